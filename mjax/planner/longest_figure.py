"""The longest sequences of a model as a plot: positions over the number of GPUs, a line for each way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mjax.figures import INK, SOFT_INK, save

# Okabe and Ito's palette, distinguishable with colour blindness; each way has a marker of its own, too. Labels stand
# above the first line, to the left of the second, and below the last.
STYLES = (
    ("#0072B2", "o", (0, 7), "center"),
    ("#009E73", "s", (-6, 3), "right"),
    ("#888888", "^", (0, -15), "center"),
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
    plot.set_yscale("log", base=2)
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    plot.yaxis.set_major_locator(LogLocator(base=4))
    plot.yaxis.set_minor_locator(NullLocator())
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(int(value))))
    plot.margins(x=0.1, y=0.12)
    plot.set_xlabel(f"{gpu} GPUs", color=SOFT_INK)
    plot.set_title(f"Longest sequence of {name} that fits", loc="left", size=13, weight="bold", color=INK)
    plot.set_ylabel("positions", color=SOFT_INK)
    plot.grid(axis="y", alpha=0.3)
    plot.spines[["top", "right"]].set_visible(False)
    plot.legend(frameon=False, loc="upper left")
    save(figure, file)


def in_short(positions: int) -> str:
    """A number of positions: 131,072 → 128k, 1,572,864 → 1.5M."""
    for unit, word in ((2**20, "M"), (2**10, "k")):
        if positions >= unit:
            return f"{positions / unit:.3g}{word}"
    return str(positions)
