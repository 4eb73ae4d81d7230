"""How long the documents of a dataset are, as a picture.

Lengths spread over many powers of ten, so the axis is logarithmic and so are the bins. The bars count documents; the
line says which share of all tokens lies in documents up to that length, for it is tokens that a model trains on, and
few long documents can hold most of them.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter

BARS, LINE, INK = "#0072B2", "#E69F00", "#222222"  # of Okabe and Ito's palette
BINS_A_DECADE = 12


def draw_lengths(lengths: np.ndarray, name: str, file: Path) -> None:
    """Draw a histogram of `lengths`, tokens in each document [documents], into `file`, in the format of its suffix.

    Documents without tokens have no place on a logarithmic axis; the title counts them.
    """
    present = np.sort(lengths[lengths > 0])
    first, last = np.floor(np.log10(present[0])), np.log10(present[-1] + 1)
    edges = np.logspace(first, last, max(2, round((last - first) * BINS_A_DECADE) + 1))
    edges = np.unique(np.ceil(edges))  # whole numbers: no bin between 1 and 2 tokens

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.hist(present, bins=edges, color=BARS, alpha=0.85)
    axes.margins(y=0.12)  # room for the name of the median
    axes.set(xscale="log", xlabel="tokens in a document", ylabel="documents")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.label.set_color(BARS)
    median = np.median(present)
    axes.axvline(median, color=INK, linewidth=1, linestyle=":")
    axes.annotate(
        f"median {median:,.0f}", (median, 1), xycoords=("data", "axes fraction"), xytext=(4, -12),
        textcoords="offset points", color=INK, fontsize=8,
    )  # fmt: skip

    shares = axes.twinx()
    steps = np.linspace(0, len(present) - 1, min(len(present), 2000)).astype(int)
    shares.plot(present[steps], (np.cumsum(present) / present.sum())[steps], color=LINE, linewidth=2)
    shares.set(ylim=(0, 1.02), ylabel="share of all tokens in documents up to this length")
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.yaxis.label.set_color(LINE)

    empty = len(lengths) - len(present)
    aside = f", {empty:,} of them without tokens" if empty else ""
    axes.set_title(f"{name}: {len(lengths):,} documents{aside}, {present.sum():,} tokens", color=INK, fontsize=10)
    figure.savefig(file)
