"""The longest sequences of a model as a plot: positions over the number of GPUs, a line for each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mjax.pictures.figures import SOFT_INK, add_heading, save

# Okabe and Ito's palette, distinguishable with colour blindness; each way has a separate marker, too. Labels stand to
# the left of the first two lines, and below the last.
STYLES = (
    ("#0072B2", "o", (-3, 5), "right"),
    ("#009E73", "s", (-6, 3), "right"),
    ("#666666", "^", (0, -15), "center"),
)


def draw_longest(found: Mapping[str, Sequence[tuple[int, int]]], file: Path, name: str, gpu: str) -> None:
    """Draw the longest sequences.

    Args:
      found: by way, highest first, the numbers of GPUs and of positions.
      file: .png, .pdf or .svg.
      name, gpu: of the config and of the GPU, for the title and the axis.
    """
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    plot = figure.add_subplot()
    for (way, points), (colour, marker, offset, side) in zip(found.items(), STYLES, strict=False):
        counts, lengths = zip(*points, strict=True)
        plot.plot(counts, lengths, color=colour, marker=marker, linewidth=2, label=way)
        for count, length in zip(counts, lengths, strict=True):
            plot.annotate(
                in_short(length),
                (count, length),
                offset,
                textcoords="offset points",
                ha=side,
                size=9,
                color=colour,
            )
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.yaxis.set_minor_formatter(NullFormatter())
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(int(value))))
    plot.margins(x=0.1, y=0.12)
    add_heading(plot, f"Longest sequence of {name} that fits into memory")
    plot.set_xlabel(f"number of {gpu.upper()} GPUs", color=SOFT_INK)
    plot.set_ylabel("positions in a sequence (k: thousand, M: million)", color=SOFT_INK)
    plot.grid(axis="y", alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(frameon=False, loc="upper left")
    save(figure, file)


def in_short(positions: int) -> str:
    """Return a number of positions with three digits: 131,072 → 131k, 1,572,864 → 1.57M."""
    for unit, word in ((1e6, "M"), (1e3, "k")):
        if positions >= unit:
            return f"{positions / unit:.3g}{word}"
    return str(positions)
