"""A picture of the lengths of a dataset's documents.

Lengths spread over many powers of ten, so axis and bins are logarithmic. The bars count documents; the line shows the
share of all tokens in documents up to that length, because a model trains on tokens, and few long documents can hold
most of them.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from mjax.pictures.figures import INK, PALETTE, save

BARS, _, LINE, *_ = PALETTE
BINS_A_DECADE = 12  # at most


def draw_lengths(lengths: np.ndarray, name: str, file: Path) -> None:
    """Draw a histogram of `lengths`, tokens in each document [documents], into `file`, in the format of its suffix.

    Documents without tokens cannot be shown on a logarithmic axis; the title counts them.
    """
    present = np.sort(lengths[lengths > 0])
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log")
    first, end = present[0], present[-1] + 1
    # Few documents get few bins (Rice's rule); no bin is between 1 and 2 tokens.
    bins = max(2, round(min(2 * np.cbrt(len(present)), np.log10(end / first) * BINS_A_DECADE)))
    axes.hist(present, np.unique(np.ceil(np.geomspace(first, end, bins + 1))), color=BARS, edgecolor="white")
    axes.set(xlabel="tokens in a document", ylabel="documents")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))  # labels only where all is within a decade
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.label.set_color(BARS)
    median = np.median(present)
    axes.axvline(median, color=INK, linewidth=1, linestyle=":", label=f"median {median:,.0f}")
    axes.legend(frameon=False, loc="upper left")

    shares = axes.twinx()
    unique, last = np.unique(present[::-1], return_index=True)
    up_to = present.cumsum()[len(present) - 1 - last] / present.sum()
    shares.plot([first, *unique], [0, *up_to], color=LINE, linewidth=2, drawstyle="steps-post")
    shares.set(ylim=(0, 1.02), ylabel="share of all tokens in documents up to this length")
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.yaxis.label.set_color(LINE)

    empty = len(lengths) - len(present)
    aside = f", {empty:,} of them without tokens" if empty else ""
    title = f"{name}: {len(lengths):,} documents{aside}, {present.sum():,} tokens"
    axes.set_title(title, color=INK, fontsize=10, parse_math=False)
    save(figure, file)
