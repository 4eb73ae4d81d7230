"""The pictures of tasks: on long texts, and of fine-tuning."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from mjax.pictures.figures import PALETTE, add_heading, add_perplexity, save

LINE, MARK = PALETTE[0], PALETTE[6]


def draw_positions(bins: Sequence[dict[str, Any]], file: Path, about: str, trained: int | None) -> None:
    """Loss over positions with its standard error, and perplexity on the right.

    Args:
      bins: first and last position, loss and standard error of each, nats per token.
      file: .png, .pdf or .svg.
      about: what was evaluated on what, and how much text it is, in lines.
      trained: positions before they were scaled, to be marked.
    """
    first, last, loss = (np.array([row[name] for row in bins], np.float64) for name in ("first", "last", "loss"))
    error = np.array([row["standard_error"] or 0.0 for row in bins])
    middle = np.sqrt(first * last)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    band = {"color": LINE, "alpha": 0.2, "linewidth": 0, "label": "± standard error"}
    axes.fill_between(middle, loss - error, loss + error, **band)
    axes.plot(middle, loss, "o-", color=LINE, markersize=4, linewidth=1.8, label="mean of a bin")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if trained is not None:
        axes.axvline(trained, color=MARK, linewidth=1.2, linestyle="--", label=f"trained on {trained:,} positions")
    axes.set(xlabel="position: tokens read before the one that is predicted", ylabel="loss (nats per token)")
    add_perplexity(axes)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    add_heading(axes, "Loss by position", about)
    save(figure, file)


def draw_seeds(
    metric: str, curves: Mapping[int, Mapping[int, float]], best: Mapping[int, int], file: Path, title: str
) -> None:
    """The metric after every epoch, one line per seed, its best epoch marked, and the median of these, as a PNG.

    Args:
      curves: values of the metric by seed and epoch.
      best: epoch of each seed.
    """
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for seed, values in curves.items():
        (line,) = axes.plot(values.keys(), values.values(), "-", label=f"seed {seed}")
        axes.plot(best[seed], values[best[seed]], "o", color=line.get_color())
    if len(curves) > 1:
        median = statistics.median(values[best[seed]] for seed, values in curves.items())
        axes.axhline(median, color="grey", linestyle=":", label=f"median of the best, {median:.4f}")
    axes.set(xlabel="epoch", ylabel=metric.replace("_", " "))
    axes.set_title(title, parse_math=False)  # a name may contain dollars
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save(figure, file)
