"""A picture of the lengths of a dataset's documents.

Lengths spread over many powers of ten, so axis and bins are logarithmic. The bars count documents; the line shows the
share of all tokens in documents up to that length, because a model trains on tokens, and few long documents can hold
most of them.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from mjax.pictures.figures import INK, save

BARS, LINE = "#0072B2", "#E69F00"  # of Okabe and Ito's palette
BINS_A_DECADE = 12  # at most
POINTS = 2000  # of the line, at most


def bin_edges(present: np.ndarray) -> np.ndarray:
    """Edges of bins for sorted lengths above 0: whole numbers, evenly spread in powers of ten, from the shortest
    document to beyond the longest. Few documents get few bins (Rice's rule)."""
    first, end = present[0], present[-1] + 1
    bins = min(2 * np.cbrt(len(present)), np.log10(end / first) * BINS_A_DECADE)
    return np.unique(np.ceil(np.geomspace(first, end, max(2, round(bins) + 1))))  # no bin between 1 and 2 tokens


def draw_lengths(lengths: np.ndarray, name: str, file: Path) -> None:
    """Draw a histogram of `lengths`, tokens in each document [documents], into `file`, in the format of its suffix.

    Documents without tokens cannot be shown on a logarithmic axis; the title counts them.
    """
    present = np.sort(lengths[lengths > 0])
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.hist(present, bins=bin_edges(present), color=BARS, alpha=0.85, edgecolor="white", linewidth=0.5)
    axes.margins(y=0.12)  # room for the name of the median
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="documents")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))  # labels only where all is within a decade
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.label.set_color(BARS)
    median = np.median(present)
    axes.axvline(median, color=INK, linewidth=1, linestyle=":")
    axes.annotate(
        f"median {median:,.0f}", (median, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
        textcoords="offset points", color=INK, fontsize=8,
    )  # fmt: skip

    shares = axes.twinx()
    grid = np.unique(np.geomspace(present[0], present[-1], POINTS).astype(np.int64))
    up_to = np.cumsum(present)[np.searchsorted(present, grid, side="right") - 1] / present.sum()
    shares.plot([present[0], *grid], [0, *up_to], color=LINE, linewidth=2, drawstyle="steps-post")
    shares.set(ylim=(0, 1.02), ylabel="share of all tokens in documents up to this length")
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.yaxis.label.set_color(LINE)

    for plot in (axes, shares):
        plot.spines["top"].set_visible(False)

    empty = len(lengths) - len(present)
    aside = f", {empty:,} of them without tokens" if empty else ""
    axes.set_title(
        f"{name}: {len(lengths):,} documents{aside}, {present.sum():,} tokens", color=INK, fontsize=10, parse_math=False
    )
    save(figure, file)
