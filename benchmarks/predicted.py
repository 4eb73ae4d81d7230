"""Predicted against measured: time and memory of training steps on one GPU.

    python benchmarks/calibrate.py --output calibration.json
    python benchmarks/predicted.py --calibration calibration.json
    python benchmarks/predicted.py --calibration calibration.json --write calibration.json

Five models run in turn, each in a separate process, with the step that `mjax train` compiles. With --write the
calibration is saved with the largest error of the table as its error bar, and with the lengths that it was found on.
Its rates stay: they come from kernels, and a step would hide errors of the model in them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from benchmarks.command import check_counts, check_output, in_one_sentence
from benchmarks.published import Run, as_mjax
from benchmarks.train_step import Process
from mjax.cluster.hardware import Gpu, find_gpu, gpu_named
from mjax.cluster.huge_pages import has_nvidia_gpu
from mjax.config import Config, MeshConfig, load_config
from mjax.config.checks import validate
from mjax.errors import RunError, UsageError
from mjax.planner.memory import predict_memory
from mjax.planner.time import (
    MJAX,
    NAMES,
    Calibration,
    default_calibration,
    predict_time,
    read_calibration,
    write_calibration,
)
from mjax.utils.figures import format_table

# Config, sequences of a step, of a micro-batch, recomputation. All without dropout, so that attention is cuDNN's.
CASES = (
    ("gpt_345m", 32, 16, "none"),
    ("gpt_1b", 16, 8, "none"),
    ("gpt_2b", 16, 4, "selective"),
    ("bert_336m", 64, 32, "none"),
    ("gpt_1_7b", 8, 4, "full"),
)


@dataclass(frozen=True)
class Arguments:
    """Measure training steps on one GPU and compare them with their predictions."""

    configs: tuple[str, ...] = ()
    """Configs to run instead of the five, unchanged and on one device: names, or paths to .py files."""
    calibration: Path | None = None
    """Rates to predict with, from benchmarks/calibrate.py (by default the planner's)."""
    gpu: str | None = None
    """GPU with the data sheet to use (mjax/cluster/hardware.py). By default the device's GPU. With a GPU without bf16,
    such as v100, the five configs compute in fp16."""
    write: Path | None = None
    """Write the calibration to this file, with the largest error here as its error bar."""
    rounds: int = 3
    """Measurements per config. The median counts."""
    steps: int = 10
    """Steps in a round."""


def cases(arguments: Arguments, gpu: Gpu | None = None) -> list[tuple[str, Config]]:
    """Name and config of each model, cut to one device, on mock tokens."""
    found, compute = [], "bf16" if gpu is None else gpu.half_precision
    for name, batch, micro_batch, recompute in CASES if not arguments.configs else ():
        config = load_config(name)
        config = replace(
            config,
            model=replace(config.model, hidden_dropout=0.0, attention_dropout=0.0),
            precision=replace(config.precision, compute=compute),
            train=replace(
                config.train,
                global_batch=batch,
                micro_batch=micro_batch,
                recompute=recompute,
                batch_rampup=None,
            ),
        )
        found.append((name, config))
    found += [(Path(name).stem, load_config(name)) for name in arguments.configs]
    alone = [(name, replace(config, mesh=MeshConfig(), data=replace(config.data, mock=True))) for name, config in found]
    for name, config in alone:
        validate(config, name)
    return alone


def measure(name: str, config: Config, arguments: Arguments, platform: str) -> tuple[float, float, str]:
    """Seconds of a step, peak bytes and the device.

    RunError: it fails.
      RunError: it does not run.
    """
    process = Process("mjax", config, platform, len(os.sched_getaffinity(0)))
    try:
        for _ in range(arguments.rounds):
            process.measure(arguments.steps)
    finally:
        process.stop()
    if process.row.failed is not None:
        raise RunError(f"{name}: {process.row.failed}")
    return median(process.seconds), process.row.memory_gib * 2**30, process.about["device"]


def measured_runs(arguments: Arguments) -> tuple[list[Run], list[float], Gpu]:
    """The measured runs, their peak bytes, and the GPU."""
    platform = "gpu" if has_nvidia_gpu() and os.environ.get("JAX_PLATFORMS", "") != "cpu" else "cpu"
    if platform == "cpu" and arguments.gpu is None:
        raise UsageError("there is no NVIDIA GPU here; name a data sheet to compare this machine with: --gpu h100")
    gpu, runs, peaks = None if arguments.gpu is None else gpu_named(arguments.gpu), [], []
    for name, config in cases(arguments, gpu):
        if gpu is not None:
            predict_time(config, gpu)  # refuses a compute type that the GPU has no peak of
        seconds, peak, device = measure(name, config, arguments, platform)
        gpu = gpu or find_gpu(device)
        if gpu is None:
            raise UsageError(f"no data sheet of {device} is known; add it to mjax/cluster/hardware.py")
        runs.append(Run(name, config, gpu.name, MJAX, seconds, device))
        peaks.append(peak)
    return runs, peaks, gpu


def kept(calibration: Calibration, runs: list[Run]) -> Calibration:
    """The calibration with the range and the error of these steps."""
    lengths = [run.config.model.sequence for run in runs]
    on = runs[0].gpu
    return replace(
        calibration,
        gpu=on,
        measured=calibration.measured if calibration.gpu == on else (),
        error=float(abs(as_mjax(runs, calibration)).max()),
        sequences=(min(lengths), max(lengths)),
        source=f"{len(runs)} training steps of mjax on one {runs[0].source}",
        date=datetime.now(UTC).date().isoformat(),
    )


@in_one_sentence
def main() -> int:
    """Measure, compare, print, and write if asked to."""
    arguments = tyro.cli(Arguments, prog="predicted.py")
    check_counts(arguments, "rounds", "steps")
    if arguments.write is not None:
        check_output("--write", arguments.write)
    given = None if arguments.calibration is None else read_calibration(arguments.calibration)
    runs, peaks, gpu = measured_runs(arguments)
    calibration = given or default_calibration(gpu)
    rows = []
    for run, peak in zip(runs, peaks, strict=True):
        step = predict_time(run.config, gpu, calibration)
        memory = predict_memory(run.config).total
        share = sorted(NAMES, key=lambda part: -step.parts[part])[:3]
        rows.append(
            (
                run.name,
                f"{1e3 * step.total:,.1f}",
                f"{1e3 * run.seconds:,.1f}",
                f"{step.total / run.seconds - 1:+.1%}",
                f"{step.mfu:.1%}",
                f"{step.mfu * step.total / run.seconds:.1%}",
                f"{memory / 2**30:,.2f}",
                f"{peak / 2**30:,.2f}",
                f"{memory / peak - 1:+.1%}",
                ", ".join(f"{part} {step.parts[part] / step.total:.0%}" for part in share),
            )
        )
    header = (
        "",
        "predicted ms",
        "measured ms",
        "error",
        "MFU",
        "measured",
        "predicted GiB",
        "measured",
        "error",
        "parts of the step",
    )
    print(*format_table(header, rows), sep="\n")
    print(f"{gpu.name} as {runs[0].source}; rates of {calibration.gpu}, {calibration.date or 'not measured'}")
    if arguments.write is not None:
        write_calibration(kept(calibration, runs), arguments.write)
        print(f"written to {arguments.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
