"""Fractions of a GPU's data-sheet rates that its kernels reach, for the model of time.

A `Calibration` is a handful of rates of one GPU, each a fraction of the data-sheet values in
`mjax/cluster/hardware.py`, with the source of each and the error of predictions with them. `benchmarks/calibrate.py`
measures one, kernel by kernel, on the user's machine and stores it in a file. The rates in this module come from
published runs (`benchmarks/published.py`; a test repeats the fit), from one product on an H100, and from assumptions;
mjax itself has not been measured on a GPU."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from mjax.cluster.hardware import GPUS, Gpu
from mjax.config import Config
from mjax.config.bounds import Bounds, check_bounds
from mjax.config.plain_values import build
from mjax.errors import UsageError, either
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
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    measured: tuple[str, ...] = ()
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    def error_of(self, config: Config, parameters: int, gpu: Gpu) -> tuple[float | None, tuple[str, ...]]:
        """The error bar of a prediction for a model with that many parameters, and what is outside the calibration.

        Beyond the lengths that the error bar was found on, and for float8, there is no error bar: None.
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

    def source_of(self, name: str) -> str:
        """The source of a rate."""
        return self.sources.get(name, "assumed" if name == "float8" else "its source is not known")

    def not_measured(self, gpu: Gpu, compute: str = "bf16") -> list[str]:
        """The rates of a prediction that were not measured on `gpu`."""
        rates = (*RATES, "float8") if compute == "fp8" else RATES
        return [name for name in rates if gpu.name != self.gpu or name not in self.measured]


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

# Assumptions of the roofline of compiled programs (`benchmarks/aot/roofline.py`).
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
    advice = "in mjax's repository, python benchmarks/calibrate.py --output calibration.json writes one"
    values = read_json(file, advice)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise UsageError(f"--calibration {file} is not a calibration of this version of mjax; {advice}")
    try:
        calibration = build(Calibration, values, str(file))
        calibration = dataclasses.replace(calibration, attention=tuple(map(tuple, calibration.attention)))
        check_bounds(calibration, f"{file}: ")
    except UsageError as error:
        raise UsageError(f"{error}; {advice}") from None
    if not calibration.attention:
        raise UsageError(f"{file}: attention has no rows; give at least [head size, positions, forward, backward]")
    for row in calibration.attention:
        head, positions, *fractions = row
        if head < 1 or positions < 1 or not all(0 < fraction <= LARGEST for fraction in fractions):
            raise UsageError(
                f"{file}: attention has the row {list(row)}; give a head size and positions above 0, and two fractions "
                f"of the peak above 0 and at most {LARGEST}"
            )
    for name in ("sequences", "parameters", "devices"):
        low, high = getattr(calibration, name)
        if not 0 < low <= high <= MOST:
            raise UsageError(f"{file}: {name} is [{low}, {high}]; give the smallest and the largest, both above 0")
    if calibration.gpu not in [gpu.name for gpu in GPUS]:
        raise UsageError(
            f"{file}: gpu {calibration.gpu!r} is not known; mjax/cluster/hardware.py describes how to add it"
        )
    return calibration


# --- Seconds of a kernel or a collective on a GPU: the data sheet times the calibration -------------------------------


# Bytes per element of each dtype.
WIDTHS = {"fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# Tiles of cuBLAS's products, rows × columns of the result, and the rate of each against the largest.
TILES = (
    (128, 256, 1.0), (256, 128, 1.0), (192, 128, 1.0), (128, 192, 1.0), (256, 192, 1.0), (192, 256, 1.0),
    (128, 128, 0.92), (64, 256, 0.88), (64, 128, 0.75),
)  # fmt: skip
HEADS = 64  # attention runs on heads that are multiples of this


class Rates:
    """Seconds of kernels and collectives on a GPU: the data sheet times the calibration. Seconds, bytes, FLOPs.

    Attributes:
      gpu, calibration: the two factors.
      compute: dtype of the products, but of those in float8.
      peak: FLOP/s in this dtype.
      float8_peak: the same of products in float8; None if the GPU has none.

    Raises:
      UsageError: no peak is known for this dtype.
    """

    def __init__(self, gpu: Gpu, calibration: Calibration, compute: str):
        self.gpu, self.calibration = gpu, calibration
        self.compute = "bf16" if compute == "fp8" else compute
        self.peak, self.float8_peak = gpu.peak(self.compute), gpu.peak("fp8")
        if gpu.peak(compute) is None:
            known = either([dtype for dtype in gpu.peak_tflops if dtype != "fp8"])
            raise UsageError(
                f"no {compute} peak is known for {gpu.name}, so its time cannot be predicted; "
                f"use --precision.compute {known}, or add the peak in mjax/cluster/hardware.py"
            )

    def product(self, m: float, n: float, k: float, batch: float = 1.0, float8: bool = False) -> float:
        """[m, k] × [k, n], `batch` times in one kernel; in float8 or not, the result has the compute dtype."""
        width = WIDTHS[self.compute]
        moved = batch * ((1 if float8 else width) * (m * k + k * n) + width * m * n)
        seconds = 2 * batch * m * n * k / self.product_rate(batch * m, n, k, float8)
        return max(seconds, self.bytes(moved)) + self.calibration.launch

    def product_rate(self, m: float, n: float, k: float, float8: bool = False) -> float:
        """FLOP/s of a product with m rows in all that is not bound by memory: less if its tiles leave multiprocessors
        idle, or its inner dim is short."""
        filled, calibration = filled_share(m, n, self.gpu.multiprocessors), self.calibration
        largest = self.float8_peak * calibration.float8 if float8 else self.peak * calibration.matmul
        return largest * filled * k / (k + calibration.inner)

    def flash(self, flops: float, head: int, positions: int, backward: bool = False) -> float:
        """A kernel of flash attention: `flops` inside the mask, heads of this size, a sequence of so many positions."""
        return flops / self.flash_rate(head, positions, backward) + self.calibration.launch

    def flash_rate(self, head: int, positions: int, backward: bool = False) -> float:
        """FLOP/s of flash attention: of the nearest measured head size, between the nearest measured lengths.

        A head that is not a multiple of 64 runs as the next one and wastes the rest.
        """
        return self.peak * flash_share(self.calibration.attention, head, positions, backward)

    def traffic(self, moved: float, kernels: float = 1) -> float:
        """Memory-bound kernels that read and write `moved` bytes in total."""
        return self.bytes(moved) + kernels * self.calibration.launch

    def gather(self, ranks: int, stride: int, whole: float) -> float:
        """All-gather or reduce-scatter of `whole` bytes on a ring of `ranks` devices, `stride` apart."""
        if ranks == 1:
            return 0.0
        sent = (ranks - 1) / ranks * whole
        return sent / self._bandwidth(ranks, stride) + self._steps(ranks, stride) + self.calibration.collective

    def sum(self, ranks: int, stride: int, whole: float) -> float:
        """All-reduce of `whole` bytes: a reduce-scatter and an all-gather in one kernel."""
        if ranks == 1:
            return 0.0
        return 2 * self.gather(ranks, stride, whole) - self.calibration.collective

    def send(self, ranks: int, stride: int, sent: float) -> float:
        """Every device sends `sent` bytes to the one `stride` away, on an axis of `ranks`."""
        latency = self.gpu.node_latency if self._inside(ranks, stride) else self.gpu.network_latency
        return sent / self._bandwidth(ranks, stride) + latency + self.calibration.collective

    def host(self, moved: float) -> float:
        """A copy between the device and host memory, at the nominal rate of their link: nobody has timed it."""
        return moved / self.gpu.host_bandwidth

    def bytes(self, moved: float) -> float:
        """Bytes that a kernel reads and writes."""
        return moved / (self.gpu.memory_bandwidth * self.calibration.memory)

    def _inside(self, ranks: int, stride: int) -> bool:
        return ranks * stride <= self.gpu.gpus_per_node

    def _bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second of the slowest link of a ring.

        A ring that leaves its server does so once in each direction, and `stride` parallel rings in a server share its
        network cards.
        """
        gpu, inside = self.gpu, self.gpu.node_bandwidth * self.calibration.node
        if self._inside(ranks, stride):
            return inside
        rings = min(stride, gpu.gpus_per_node)
        return min(inside, gpu.network_bandwidth_per_node * self.calibration.network / rings)

    def _steps(self, ranks: int, stride: int) -> float:
        """Latency of the ranks - 1 messages of a ring one after the other, those between servers apart (NVIDIA/nccl,
        src/graph/tuning.cc)."""
        in_server = max(1, min(ranks, self.gpu.gpus_per_node // stride))
        between = math.ceil(ranks / in_server) - 1
        return between * self.gpu.network_latency + (ranks - 1 - between) * self.gpu.node_latency


@lru_cache(maxsize=65536)
def filled_share(m: float, n: float, multiprocessors: int) -> float:
    """The share of the multiprocessors' time that the tiles of a product fill, with the best tile."""

    def share(rows: int, columns: int, rate: float) -> float:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / multiprocessors)
        return rate * m * n / (waves * multiprocessors * rows * columns)

    return min(1.0, max(share(*tile) for tile in TILES))


@lru_cache(maxsize=65536)
def flash_share(rows: tuple[tuple[int, int, float, float], ...], head: int, positions: int, backward: bool) -> float:
    """The fraction of the peak that flash attention reaches; rows as in `Calibration.attention`."""
    padded, sizes = HEADS * math.ceil(head / HEADS), {row[0] for row in rows}
    nearest = head if head in sizes else min(sizes, key=lambda size: abs(size - padded))
    lengths = sorted((math.log(row[1]), row[3 if backward else 2]) for row in rows if row[0] == nearest)
    import numpy as np

    share = float(np.interp(math.log(positions), *zip(*lengths, strict=True)))
    return share * (1.0 if nearest == head else head / padded)
