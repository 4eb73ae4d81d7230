"""Shared parts of all pictures, and the picture of the lengths of a dataset's documents."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from mjax.utils.files import write_whole

if TYPE_CHECKING:  # matplotlib takes a second to import
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT_INK = "#222222", "#666666"
PALETTE = ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#999999", "#000000")
"""Okabe and Ito's, distinguishable with color blindness: blue, sky, orange, green, pink, yellow, red, grey, black."""
MARGIN = 0.12  # inches around each plot


def add_heading(axes: Axes, title: str, about: str = "") -> None:
    """Write a bold title above `axes`, and between both the lines of `about`."""
    lines = len(about.splitlines())
    axes.set_title(
        title, loc="left", size=12, weight="bold", color=INK, pad=18 + 11 * lines if lines else 10, parse_math=False
    )
    axes.annotate(
        about, (0, 1), xycoords="axes fraction", xytext=(0, 17), textcoords="offset points", color=SOFT_INK, size=8.5,
        parse_math=False,  # a name may contain dollars
    )  # fmt: skip


def add_perplexity(axes: Axes) -> None:
    """Add perplexities to the right of an axis of losses in nats, whose limits are final."""
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_ylim()
    shown = [digit * 10**power for power in range(-1, 9) for digit in (1, 1.5, 2, 3, 5, 7)]
    shown = [number for number in shown if low <= math.log(number) <= high]
    if len(shown) < 3 and high < 20:  # a narrow range
        numbers = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(math.exp(low), math.exp(high))
        shown = [number for number in numbers if math.exp(low) <= number <= math.exp(high)]
    right = axes.secondary_yaxis("right")
    right.set_ylabel("perplexity")
    right.set_yticks([math.log(number) for number in shown], [f"{number:,g}" for number in shown])


def save(figure: Figure, file: Path | BinaryIO) -> None:
    """Write a picture under a temporary name and rename it, so that no reader sees half of it.

    Args:
      figure: gets a margin, if its layout is constrained.
      file: .png, .pdf or .svg; replaced if it exists. Or an open file for a PNG, such as a `BytesIO` in a notebook.
    """
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if isinstance(layout := figure.get_layout_engine(), ConstrainedLayoutEngine):
        layout.set(w_pad=MARGIN, h_pad=MARGIN)
    if not isinstance(file, Path):
        figure.savefig(file)
        return
    picture = BytesIO()
    figure.savefig(picture, format=file.suffix[1:])
    write_whole(file, picture.getvalue())


BINS_A_DECADE = 12  # at most


def draw_lengths(lengths: np.ndarray, name: str, file: Path) -> None:
    """Draw a histogram of `lengths`, tokens in each document [documents], into `file`, in the format of its suffix.

    Lengths spread over many powers of ten, so axis and bins are logarithmic. The line shows the share of all tokens in
    documents up to that length: a model trains on tokens, and few long documents can hold most of them.

    Documents without tokens cannot be shown on a logarithmic axis; the title counts them.
    """
    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter

    present = np.sort(lengths[lengths > 0])
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log")
    first, end = present[0], present[-1] + 1
    # Few documents get few bins (Rice's rule); no bin is between 1 and 2 tokens.
    bins = max(2, round(min(2 * np.cbrt(len(present)), np.log10(end / first) * BINS_A_DECADE)))
    axes.hist(present, np.unique(np.ceil(np.geomspace(first, end, bins + 1))), color=PALETTE[0], edgecolor="white")
    axes.set(xlabel="tokens in a document", ylabel="documents")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))  # labels only where all is within a decade
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.label.set_color(PALETTE[0])
    median = np.median(present)
    axes.axvline(median, color=INK, linewidth=1, linestyle=":", label=f"median {median:,.0f}")
    axes.legend(frameon=False, loc="upper left")

    shares = axes.twinx()
    unique, last = np.unique(present[::-1], return_index=True)
    up_to = present.cumsum()[len(present) - 1 - last] / present.sum()
    shares.plot([first, *unique], [0, *up_to], color=PALETTE[2], linewidth=2, drawstyle="steps-post")
    shares.set(ylim=(0, 1.02), ylabel="share of all tokens in documents up to this length")
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    shares.yaxis.label.set_color(PALETTE[2])

    empty = len(lengths) - len(present)
    aside = f", {empty:,} of them without tokens" if empty else ""
    title = f"{name}: {len(lengths):,} documents{aside}, {present.sum():,} tokens"
    axes.set_title(title, color=INK, fontsize=10, parse_math=False)
    save(figure, file)
