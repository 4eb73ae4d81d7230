"""Plots predicted and published scaling: the time model applied to the papers' own runs."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.published import MEGATRON_A100, MEGATRON_V100, Run, table_1, table_5, v100_scaling
from mjax.models.build import count_parameters
from mjax.pictures.figures import INK, SOFT_INK, save
from mjax.planner.layer import hardware_flops
from mjax.planner.time import Calibration, predict_time

# Okabe and Ito's palette, as in the other figures.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"


def draw_scaling(file: Path | BinaryIO) -> None:
    """Draw three panels into `file`, in the format of its suffix (png, pdf, svg); a stream gets a PNG.

    The first panel shows the speed of 1.7 to 1,008 billion parameters on 32 to 3,072 A100s (arXiv 2104.04473, table 1).
    The second shows weak scaling on V100s (arXiv 1909.08053, figure 5). The third shows every published step time over
    its prediction, including arXiv 2205.05198, table 5, to which the same two rates are fitted.
    """
    figure = Figure(figsize=(14.5, 4.6), dpi=120, layout="constrained")
    speed, scaling, all_runs = figure.subplots(1, 3)
    _speed(speed)
    _scaling(scaling)
    _all_runs(all_runs)
    for axes in (speed, scaling, all_runs):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=SOFT_INK)
        axes.grid(axis="y", color="#E5E5E5")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="lower right" if axes is speed else "lower left")
    save(figure, file)


def _speed(axes: Axes) -> None:
    runs = table_1()
    gpus = [run.config.mesh.devices for run in runs]
    axes.plot(gpus, _tflops(runs, MEGATRON_A100), "-", color=BLUE, label="predicted")
    axes.plot(gpus, _tflops(runs, None), "o", color=ORANGE, label="published")
    for run, x, y in list(zip(runs, gpus, _tflops(runs, None), strict=True))[::3]:
        size = f"{count_parameters(run.config.model) / 1e9:,.0f}B"
        axes.annotate(size, (x, y), (0, -14), textcoords="offset points", ha="center", fontsize=7, color=SOFT_INK)
    axes.set(
        xscale="log",
        ylim=(0, 180),
        xlabel="number of A100s; grey: parameters",
        ylabel="TFLOP/s per GPU, recomputation counted",
    )
    axes.set_title("Speed on A100s (2104.04473, table 1)", loc="left", color=INK)
    axes.set_xticks(gpus[::3], [f"{count:,}" for count in gpus[::3]])
    axes.minorticks_off()


def _scaling(axes: Axes) -> None:
    runs = [run for run in v100_scaling() if run.source.endswith("figure 5")]
    for colour, shape, chosen, name in (
        (BLUE, "o", runs[::2], "model"),
        (GREEN, "s", runs[1::2], "model × data 64"),
    ):
        ranks = [run.config.mesh.model for run in chosen]
        for calibration, style in ((MEGATRON_V100, "-"), (None, shape)):
            percent = [tflops / 39 * 100 for tflops in _tflops(chosen, calibration)]
            what = "predicted" if calibration else "published"
            axes.plot(ranks, percent, style, color=colour, label=f"{name}, {what}")
    axes.set(
        xscale="log",
        ylim=(0, 110),
        xlabel="ranks of model, for 1.2B to 8.3B parameters",
        ylabel="speed per GPU, % of one V100",
    )
    axes.set_title("Weak scaling on V100s (1909.08053, figure 5)", loc="left", color=INK)
    axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes.minorticks_off()


def _all_runs(axes: Axes) -> None:
    for colour, shape, runs, calibration, name in (
        (ORANGE, "o", table_1(), MEGATRON_A100, "A100s, 2104.04473: two rates fitted"),
        (BLUE, "s", v100_scaling(), MEGATRON_V100, "V100s: two rates fitted"),
        (GREEN, "D", table_5(), MEGATRON_A100, "A100s, 2205.05198: the same two rates"),
    ):
        times = [run.seconds for run in runs]
        ratio = [seconds / _seconds(run, calibration) for seconds, run in zip(times, runs, strict=True)]
        axes.plot(times, ratio, shape, color=colour, label=name, markersize=5)
    axes.axhspan(0.9, 1.1, color="#F0F0F0", zorder=0)
    axes.axhline(1.0, color=SOFT_INK, linewidth=0.8)
    axes.set(
        xscale="log", ylim=(0.5, 1.3), xlabel="published step time, seconds", ylabel="published / predicted step time"
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title("All 32 published runs (band: within 10%)", loc="left", color=INK)


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
