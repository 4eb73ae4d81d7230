"""Fractions of a GPU's data-sheet rates that its kernels reach, for the model of time.

A `Calibration` is a handful of rates of one GPU, each a fraction of the data-sheet values in
`mjax/cluster/hardware.py`, with the source of each and the error of predictions with them. `benchmarks/calibrate.py`
measures one, kernel by kernel, on the user's machine and stores it in a file. Those in this module come from published
runs (`benchmarks/published.py`; a test repeats the fit), from one product on an H100, and from assumptions; mjax itself
has not been measured on a GPU."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mjax.cluster.hardware import GPUS, Gpu
from mjax.config import Config
from mjax.config.bounds import Bounds, check_bounds
from mjax.config.plain_values import build
from mjax.errors import UsageError
from mjax.utils.files import read_json, write_whole

FORMAT = "mjax calibration 2"
RATES = ("matmul", "inner", "attention", "memory", "launch", "node", "network", "collective")
# Rates that are fractions of a data sheet, and their upper limits: some GPUs run slightly above their data sheet.
FRACTIONS, LARGEST = ("matmul", "memory", "node", "network"), 1.2
MOST = 1e15  # above any number in a calibration
Fraction = Annotated[float, Bounds(gt=0, le=LARGEST)]
RateOrZero = Annotated[float, Bounds(ge=0, le=MOST)]


@dataclass(frozen=True)
class Calibration:
    """Rates that kernels of a GPU reach, and the error of a step that is predicted with them.

    Attributes:
      gpu: name of the GPU they apply to (`mjax/cluster/hardware.py`).
      matmul: fraction of the peak that a matrix product reaches whose tiles fill the GPU.
      inner: a product's inner dim k costs a factor of k / (k + inner).
      attention: flash attention, a row for each measured head size and length: head size, positions, and the fractions
        of the peak that the forward and the backward pass reach, counting only unmasked scores.
      memory: fraction of the memory bandwidth that memory-bound kernels reach.
      launch: seconds that a kernel takes in addition to its work.
      node: fraction of the bandwidth within a server that collectives reach.
      network: the same between servers.
      collective: seconds that a collective takes in addition to messages and bytes.
      float8: fraction of the float8 peak that such a product reaches; read with `precision.compute fp8` only.
      error: relative error bar of the time of a step on this GPU.
      error_elsewhere: the same on any other GPU.
      sequences: shortest and longest of the runs that the error was found on; beyond them there is no error bar.
      parameters, devices: smallest and largest of them.
      sources: where each rate comes from, for people; and under `error`, what the error bar was found on.
      measured: rates that were measured on this GPU, as kernels.
      date, versions: when it was measured and with which packages; empty if it was not.
    """

    gpu: str
    matmul: Fraction
    inner: RateOrZero
    attention: tuple[tuple[int, int, float, float], ...]
    memory: Fraction
    launch: RateOrZero
    node: Fraction
    network: Fraction
    collective: RateOrZero
    error: RateOrZero
    error_elsewhere: RateOrZero
    sequences: tuple[int, int]
    parameters: tuple[float, float]
    devices: tuple[int, int]
    float8: Fraction = 0.65  # 8192³ on Hopper: 1,170 (torch._scaled_mm) to 1,610 TFLOP/s (cuBLASLt), 59 to 81%
    sources: dict[str, str] = field(default_factory=dict)
    measured: tuple[str, ...] = ()
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def error_of(self, config: Config, parameters: int, gpu: Gpu) -> tuple[float | None, tuple[str, ...]]:
        """The error bar of a prediction for a model with that many parameters, and what is outside the calibration.

        Beyond the lengths that the error bar was found on it is None, and so it is for float8.
        """
        caveats = []
        if gpu.name != self.gpu:
            caveats.append(f"calibrated on {self.gpu}, not on {gpu.name}")
        low, high = self.sequences
        length = config.model.sequence
        if not low <= length <= high:
            caveats.append(f"no error bar at {length:,} positions: it was found on runs of {low:,} to {high:,}")
        low, high = self.parameters
        if not 0.9 * low <= parameters <= 1.1 * high:
            caveats.append(f"compared with models of {low / 1e9:.3g} to {high / 1e9:.4g} billion parameters")
        low, high = self.devices
        if not low <= config.mesh.devices <= high:
            caveats.append(f"compared with runs on {low} to {high} GPUs" if low < high else f"compared on {low} GPUs")
        bar = self.error if gpu.name == self.gpu else self.error_elsewhere
        if config.precision.compute == "fp8":
            caveats.insert(
                0,
                f"no error bar for fp8: ±{bar:.0%} was found on runs in bf16; the rate of products in float8, "
                f"{self.float8:.0%} of their peak, is {self.source_of('float8')}",
            )
            return None, tuple(caveats)
        return bar if self.sequences[0] <= length <= self.sequences[1] else None, tuple(caveats)

    def rates(self, compute: str) -> tuple[str, ...]:
        """The names of the rates that a prediction depends on."""
        return (*RATES, "float8") if compute == "fp8" else RATES

    def source_of(self, name: str) -> str:
        """Where a rate comes from."""
        return self.sources.get(name, "assumed" if name == "float8" else "its source is not known")

    def not_measured(self, gpu: Gpu, compute: str = "bf16") -> list[str]:
        """The rates of a prediction that were not measured on `gpu`."""
        return [name for name in self.rates(compute) if gpu.name != self.gpu or name not in self.measured]


FITTED = "fitted to 18 runs of Megatron-LM, arXiv 2104.04473, table 1, and 2205.05198, table 5"
_NCCL = "the base latency of NCCL's ring, protocol Simple (NVIDIA/nccl, src/graph/tuning.cc)"
_LINKS = "77% of NVLink, about 230 GB/s on an A100, and 85% of the network cards: assumed"
_FOUNDRY = "the README of mosaicml/llm-foundry, scripts/train/benchmarking"
_COMPARED = f"steps of other programs, {_FOUNDRY}, up to 2,048 positions; mjax itself has not been measured on a GPU"

# `matmul` and `inner` are fitted to 18 published runs. The other rates are from other sources or assumed, and their
# errors have gone into these two. Rates of kernels are properties of the hardware and its libraries, so mjax starts
# from those of Megatron-LM.
A100 = Calibration(
    gpu="a100",
    matmul=0.8036, inner=219.0, attention=((128, 2048, 0.5, 0.5),), memory=0.8, launch=5e-6, node=0.77, network=0.85,
    collective=8.4e-6,
    error=0.35, error_elsewhere=0.45, sequences=(512, 2048), parameters=(1.2e8, 1008e9), devices=(8, 3072),
    sources={
        "matmul": FITTED, "inner": FITTED,
        "attention": "50 to 73% of the peak of an A100, arXiv 2307.08691: its lower end",
        "memory": "assumed", "launch": "assumed", "node": _LINKS, "network": _LINKS, "collective": _NCCL,
        "error": f"18 runs of Megatron-LM and 25 {_COMPARED}",
    },
)  # fmt: skip

# What the roofline of compiled programs assumes (`benchmarks/aot/roofline.py`).
H100 = Calibration(
    gpu="h100",
    matmul=0.832, inner=180.0, attention=((128, 1024, 0.425, 0.334),), memory=0.85, launch=1.2e-6, node=0.8,
    network=0.8, collective=8.4e-6,
    error=0.45, error_elsewhere=0.5, sequences=(512, 2048), parameters=(7.5e8, 6.5e10), devices=(8, 64),
    sources={
        "matmul": "798 TFLOP/s in a product of 8192³ random numbers on one H100",
        "inner": "assumed", "attention": "cuDNN's kernels with heads of 128: assumed", "memory": "assumed",
        "launch": "assumed", "node": "assumed", "network": "assumed", "collective": _NCCL,
        "error": f"29 {_COMPARED}",
    },
    measured=("matmul",),
)  # fmt: skip


def default_calibration(gpu: Gpu) -> Calibration:
    """The rates that `predict_time` takes for a GPU: those of the H100 from Hopper on, and of the A100 before."""
    return H100 if gpu.compute_capability >= (9, 0) else A100


# --- In a file --------------------------------------------------------------------------------------------------------


def write_calibration(calibration: Calibration, file: Path) -> None:
    """Write `calibration` as JSON, atomically."""
    write_whole(file, json.dumps({"format": FORMAT, **dataclasses.asdict(calibration)}, indent=2) + "\n")


def read_calibration(file: Path) -> Calibration:
    """Read a file of `write_calibration`.

    Raises:
      UsageError: there is no such file, it is not a calibration, or a number in it is out of bounds.
    """
    again = "write one with: python benchmarks/calibrate.py --output calibration.json"
    values = read_json(file, again)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise UsageError(f"--calibration {file} is not a calibration of this version of mjax; {again}")
    try:
        calibration = build(Calibration, values, str(file))
        calibration = dataclasses.replace(calibration, attention=tuple(map(tuple, calibration.attention)))
        check_bounds(calibration, f"{file}: ")
    except UsageError as error:
        raise UsageError(f"{error}; {again}") from None
    _check_attention(calibration, file)
    for name in ("sequences", "parameters", "devices"):
        low, high = getattr(calibration, name)
        if not 0 < low <= high <= MOST:
            raise UsageError(f"{file}: {name} is [{low}, {high}]; give the smallest and the largest, both above 0")
    if calibration.gpu not in [gpu.name for gpu in GPUS]:
        raise UsageError(
            f"{file}: gpu {calibration.gpu!r} is not known; mjax/cluster/hardware.py describes how to add it"
        )
    return calibration


def _check_attention(calibration: Calibration, file: Path) -> None:
    if not calibration.attention:
        raise UsageError(f"{file}: attention has no rows; give at least [head size, positions, forward, backward]")
    for row in calibration.attention:
        head, positions, *fractions = row
        if head < 1 or positions < 1 or not all(0 < fraction <= LARGEST for fraction in fractions):
            raise UsageError(
                f"{file}: attention has the row {list(row)}; give a head size and positions above 0, and two fractions "
                f"of the peak above 0 and at most {LARGEST}"
            )
