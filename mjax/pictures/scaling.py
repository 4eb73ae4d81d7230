"""The picture of a scaling law."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mjax.pictures.figures import PALETTE, add_heading, save

if TYPE_CHECKING:
    from mjax.planner.scaling import ScalingLaw

FURTHER = 100  # the curve ends at this many times the compute of the largest run


def draw_scaling(law: ScalingLaw, file: Path) -> None:
    """Draw the runs over their compute, and the law with its interval at the tokens per parameter of the largest model.

    Args:
      law: with runs and an interval.
      file: .png, .pdf or .svg.
    """
    import numpy as np
    from matplotlib.figure import Figure

    largest = law.largest
    ratio = largest["tokens"] / largest["parameters"]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log")
    compute = np.geomspace(min(run["flops"] for run in law.runs), FURTHER * largest["flops"], 60)
    curve = np.array([law.predict(size, ratio * size) for size in np.sqrt(compute / (6 * ratio))])
    axes.plot(compute, curve[:, 0], color=PALETTE[0], linewidth=1.8, label=f"law at {ratio:.3g} tokens per parameter")
    axes.fill_between(compute, curve[:, 1], curve[:, 2], color=PALETTE[0], alpha=0.2, linewidth=0, label="95% interval")
    for run in law.runs:
        is_on_curve = abs(np.log(run["tokens"] / run["parameters"] / ratio)) < 0.1
        axes.plot(run["flops"], run["loss"], "o" if is_on_curve else "D", color=PALETTE[0 if is_on_curve else 6])
        label = (
            run["name"]
            if is_on_curve
            else f"{run['name']}, law {law.predict(run['parameters'], run['tokens']).loss:.3f}"
        )
        axes.annotate(label, (run["flops"], run["loss"]), (6, 4), textcoords="offset points", size=8, parse_math=False)
    axes.set(xlabel="compute 6 N D (FLOPs)", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    add_heading(axes, "Loss forecast from small runs", f"{law.formula}, {law.source}")
    save(figure, file)
