"""The picture of a scaling law."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjax.pictures.figures import PALETTE, add_heading, save

if TYPE_CHECKING:
    import numpy as np


def draw_scaling(runs: Sequence[Mapping[str, Any]], curve: np.ndarray, ratio: float, file: Path, about: str) -> None:
    """Draw the losses of runs over their compute, and a law with its interval.

    Args:
      runs: name, flops, loss and `fit`, the law's loss; runs that the curve is not of have other tokens per parameter.
      curve: compute, loss, low and high end of the interval, [4, points].
      ratio: tokens per parameter of the curve.
      file: .png, .pdf or .svg.
      about: the law in words.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log")
    axes.plot(curve[0], curve[1], color=PALETTE[0], linewidth=1.8, label=f"law at {ratio:.3g} tokens per parameter")
    axes.fill_between(curve[0], curve[2], curve[3], color=PALETTE[0], alpha=0.2, linewidth=0, label="95% interval")
    for run in runs:
        is_on_curve = abs(run["tokens"] / run["parameters"] / ratio - 1) < 0.1
        axes.plot(run["flops"], run["loss"], "o" if is_on_curve else "D", color=PALETTE[0 if is_on_curve else 6])
        label = run["name"] if is_on_curve else f"{run['name']}, law {run['fit']:.3f}"
        axes.annotate(label, (run["flops"], run["loss"]), (6, 4), textcoords="offset points", size=8, parse_math=False)
    axes.set(xlabel="compute 6 N D (FLOPs)", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    add_heading(axes, "Loss forecast from small runs", about)
    save(figure, file)
