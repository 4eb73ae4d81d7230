"""Plots predicted and published scaling: the time model applied to the papers' own runs."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.published import MEGATRON_A100, MEGATRON_V100, Run, table_1, v100_scaling
from mjax.models.build import count_parameters
from mjax.pictures.figures import save
from mjax.planner.layer import hardware_flops
from mjax.planner.time import Calibration, predict_time

# Okabe and Ito's palette, as in the other pictures.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
GREY = "#6e7781"  # read on light and on dark pages


def draw_scaling(file: Path | BinaryIO) -> None:
    """Draw two panels into `file`, in the format of its suffix (png, pdf, svg); a stream gets a PNG.

    Speed of 1.7 to 1,008 billion parameters on 32 to 3,072 A100s (arXiv 2104.04473, table 1), and weak scaling on V100s
    (arXiv 1909.08053, figure 5). The background is transparent and the text grey, for light and dark pages.
    """
    figure = Figure(figsize=(7, 7.6), dpi=180, layout="constrained")
    figure.patch.set_alpha(0)
    speed, scaling = figure.subplots(2, 1)
    _speed(speed)
    _scaling(scaling)
    for axes in (speed, scaling):
        axes.patch.set_alpha(0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(GREY)
        axes.tick_params(colors=GREY, labelsize=11)
        axes.grid(axis="y", color=GREY, alpha=0.25)
        axes.set_axisbelow(True)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(color=GREY, fontsize=12)
        axes.legend(frameon=False, loc="lower left" if axes is scaling else "lower right", labelcolor=GREY, fontsize=11)
    save(figure, file)


def _speed(axes: Axes) -> None:
    runs = table_1()
    gpus = [run.config.mesh.devices for run in runs]
    axes.plot(gpus, _tflops(runs, MEGATRON_A100), "-", color=BLUE, label="predicted")
    axes.plot(gpus, _tflops(runs, None), "o", color=ORANGE, label="published")
    for run, x, y in list(zip(runs, gpus, _tflops(runs, None), strict=True))[::3]:
        size = f"{count_parameters(run.config.model) / 1e9:,.0f}B"
        axes.annotate(size, (x, y), (0, -17), textcoords="offset points", ha="center", fontsize=10, color=GREY)
    axes.set(
        xscale="log",
        ylim=(0, 180),
        xlabel="A100s, with the number of parameters",
        ylabel="TFLOP/s per GPU",
    )
    axes.set_title("Speed on A100s (2104.04473, table 1)", loc="left", color=GREY)
    axes.set_xticks(gpus[::3], [f"{count:,}" for count in gpus[::3]])
    axes.minorticks_off()


def _scaling(axes: Axes) -> None:
    runs = [run for run in v100_scaling() if run.source.endswith("figure 5")]
    for colour, shape, chosen, name in (
        (BLUE, "o", runs[::2], "tensor parallel"),
        (GREEN, "s", runs[1::2], "tensor + data parallel × 64"),
    ):
        ranks = [run.config.mesh.model for run in chosen]
        for calibration, style in ((MEGATRON_V100, "-"), (None, shape)):
            percent = [tflops / 39 * 100 for tflops in _tflops(chosen, calibration)]
            what = "predicted" if calibration else "published"
            axes.plot(ranks, percent, style, color=colour, label=f"{name}, {what}")
    axes.set(
        xscale="log",
        ylim=(0, 110),
        xlabel="tensor-parallel GPUs, 1.2B to 8.3B parameters",
        ylabel="speed per GPU, % of one V100",
    )
    axes.set_title("Weak scaling on V100s (1909.08053, figure 5)", loc="left", color=GREY)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()


def _tflops(runs: list[Run] | tuple[Run, ...], calibration: Calibration | None) -> list[float]:
    """TFLOP/s a GPU with recomputation counted: predicted, or without a calibration as published."""
    return [
        hardware_flops(run.config)
        / run.config.mesh.devices
        / (run.seconds if calibration is None else _seconds(run, calibration))
        / 1e12
        for run in runs
    ]


def _seconds(run: Run, calibration: Calibration) -> float:
    return predict_time(run.config, run.hardware, calibration, run.software).total
