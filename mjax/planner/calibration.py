"""Fractions of a GPU's data-sheet rates that a program reaches, and properties of the program, for the time model.

A `Calibration` is a handful of rates, each a fraction of the data-sheet values in `mjax/hardware.py`, and the
`Software` they apply to. There are three in this file, fitted to published runs of Megatron-LM
(`benchmarks/published.py`; a test repeats the fit and compares). `benchmarks/calibrate.py` measures one on the user's
machine and stores it in a file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mjax.bounds import Bounds, check_bounds
from mjax.config import Config
from mjax.data.atomic import write_whole
from mjax.errors import UsageError
from mjax.hardware import GPUS, Gpu
from mjax.json_files import read_json
from mjax.plain_values import build

FORMAT = "mjax calibration 1"
# Rates that are fractions of a data sheet, and their upper limits: some GPUs run slightly above their data sheet.
FRACTIONS, LARGEST = ("matmul", "attention", "memory", "node", "network"), 1.2
MOST = 1e15  # above any number in a calibration
Fraction = Annotated[float, Bounds(gt=0, le=LARGEST)]
Rate = Annotated[float, Bounds(gt=0, le=MOST)]
RateOrZero = Annotated[float, Bounds(ge=0, le=MOST)]
Whole = Annotated[int, Bounds(ge=1, le=MOST)]
WholeOrZero = Annotated[int, Bounds(ge=0, le=MOST)]


@dataclass(frozen=True)
class Software:
    """Properties of a training program that no config contains. Read from its code, never fitted.

    Bytes are those of 16-bit activations: read and written by the kernels of one layer's forward pass, per element of
    the given tensor.

    Attributes:
      name: of the program.
      stream_bytes: per element of [tokens, h]: LayerNorms, dropout, residual sums.
      mlp_bytes: per element of [tokens, f / p]: GELU.
      score_bytes: per element of the scores [b, n / p, s, s] if attention stores them: scale, mask, softmax, dropout;
        not reads and writes of the two products.
      kernels: kernel launches of a layer's forward pass, except its products.
      backward_traffic: bytes of a backward pass divided by those of the forward.
      flash: it has a flash attention kernel.
      repeated_sums: all-reduces of a layer that full recomputation repeats. The last one of a layer is dead code, which
        XLA removes.
      gradient_bytes: per element when gradients are summed over `data`.
      accumulate_bytes: read and written per weight when the gradients of a micro-batch are accumulated.
      optimizer_bytes: read and written per weight by norm, clipping, Adam and the cast to the compute dtype.
      splits_messages: each rank of `model` sends its part of an activation to the next stage, which gathers it (arXiv
        2104.04473, section 4.1), with sequence parallelism or without.
      sends_every_tick: stages synchronise after every tick of the schedule and send both ways, even without a receiver.
      hides_backward_sums: the collective after a column-parallel layer's backward pass overlaps with the product for
        its weight gradient.
      hides_gradient_sums: sums over `data` overlap with the backward pass.
    """

    name: str
    stream_bytes: Rate
    mlp_bytes: Rate
    score_bytes: RateOrZero
    kernels: WholeOrZero
    backward_traffic: Rate
    flash: bool
    repeated_sums: WholeOrZero
    gradient_bytes: Whole
    accumulate_bytes: WholeOrZero
    optimizer_bytes: Whole
    splits_messages: bool
    sends_every_tick: bool
    hides_backward_sums: bool
    hides_gradient_sums: bool


# LayerNorm reads twice and writes, twice per layer: 12. Residual sum with dropout, twice: 12. The GELU kernel: 4, and
# the split of q, k, v: 12 h / p, which is 3 for each of the 4 h / p elements of the MLP. Scores are float32: 4 read, 2
# written as probabilities, and 2 for the other half of a product's float32 result. Which collectives are hidden, and
# the 26 bytes of Adam, 4 of the norm and 6 of the cast, were read from programs compiled for H100s
# (docs/benchmarks.md).
MJAX = Software(
    name="mjax",
    stream_bytes=24, mlp_bytes=7, score_bytes=8, kernels=8, backward_traffic=1.6, flash=True, repeated_sums=1,
    gradient_bytes=4, accumulate_bytes=12, optimizer_bytes=36,
    splits_messages=False, sends_every_tick=True, hides_backward_sums=True, hides_gradient_sums=False,
)  # fmt: skip

# The program of arXiv 2104.04473 (Megatron-LM v2): GELU, dropout with residual, and softmax are fused kernels;
# attention stores its scores and a dropout mask; gradients are fp16.
MEGATRON_2021 = Software(
    name="Megatron-LM of 2021",
    stream_bytes=26, mlp_bytes=6, score_bytes=10, kernels=11, backward_traffic=1.6, flash=False, repeated_sums=2,
    gradient_bytes=2, accumulate_bytes=6, optimizer_bytes=52,
    splits_messages=True, sends_every_tick=False, hides_backward_sums=False, hides_gradient_sums=False,
)  # fmt: skip

# The program of arXiv 2205.05198: the same, but the gather for a weight's gradient overlaps with another product
# (section 4.2.2).
MEGATRON_2022 = dataclasses.replace(MEGATRON_2021, name="Megatron-LM of 2022", hides_backward_sums=True)

# The program of arXiv 1909.08053: only LayerNorm and the optimizer are fused, so bias, GELU, dropout, residual, scale,
# mask and softmax each read and write.
MEGATRON_2019 = dataclasses.replace(
    MEGATRON_2021, name="Megatron-LM of 2019", stream_bytes=34, mlp_bytes=12, score_bytes=21, splits_messages=False
)


@dataclass(frozen=True)
class Calibration:
    """Rates that are reached, and the error of predictions with them.

    Attributes:
      software: the program.
      gpu: name of the GPU they apply to (`mjax/hardware.py`).
      matmul: fraction of the peak that a large matrix product reaches.
      half: the size of a dim at which a product reaches half of that: dims m, n and k give
        m / (m + half) × n / (n + half) × k / (k + half). Small products leave multiprocessors idle.
      attention: fraction of the peak that flash attention reaches, counting only unmasked scores of a causal model.
      memory: fraction of the memory bandwidth that memory-bound kernels reach.
      launch: seconds that a kernel takes in addition to its work.
      node: fraction of the bandwidth within a server that collectives reach.
      network: the same between servers.
      collective: seconds that a collective takes in addition to messages and bytes.
      error: relative error bar of a step's time, for this program on this GPU.
      error_elsewhere: the same on any other GPU.
      fitted_on: source of the numbers, for people.
      parameters, devices: smallest and largest of the runs it was fitted to.
      date, versions: when it was measured and with which packages; empty if it comes from papers.
    """

    software: Software
    gpu: str
    matmul: Fraction
    half: RateOrZero
    attention: Fraction
    memory: Fraction
    launch: RateOrZero
    node: Fraction
    network: Fraction
    collective: RateOrZero
    error: RateOrZero
    error_elsewhere: RateOrZero
    fitted_on: str
    parameters: tuple[float, float]
    devices: tuple[int, int]
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def error_of(self, config: Config, parameters: int, gpu: Gpu) -> tuple[float, tuple[str, ...]]:
        """The error bar of a prediction for a model with that many parameters, and what is outside the calibration."""
        caveats = []
        if gpu.name != self.gpu:
            caveats.append(f"calibrated on {self.gpu}, not on {gpu.name}")
        low, high = self.parameters
        if not 0.9 * low <= parameters <= 1.1 * high:
            caveats.append(f"calibrated on models of {low / 1e9:.3g} to {high / 1e9:.4g} billion parameters")
        low, high = self.devices
        if not low <= config.mesh.devices <= high:
            caveats.append(f"calibrated on {low} to {high} GPUs" if low < high else f"calibrated on {low} GPUs")
        return (self.error if gpu.name == self.gpu else self.error_elsewhere), tuple(caveats)


# `matmul` and `half` are fitted to the ten rows of arXiv 2104.04473, table 1. The other rates are from other sources or
# assumed, and their errors have gone into these two: 80% of the memory bandwidth and 5 µs per launch; 77% of NVLink,
# which is about 230 GB/s on an A100, and 85% of the network cards; NCCL's own base latency of a ring, 8.4 µs
# (NVIDIA/nccl, src/graph/tuning.cc). Flash attention reaches 50 to 73% of the peak of an A100 (arXiv 2307.08691).
MEGATRON_A100 = Calibration(
    software=MEGATRON_2021, gpu="a100",
    matmul=0.782, half=109.3, attention=0.5, memory=0.8, launch=5e-6, node=0.77, network=0.85, collective=8.4e-6,
    error=0.05, error_elsewhere=0.33, fitted_on="ten runs of Megatron-LM, arXiv 2104.04473, table 1",
    parameters=(1.7e9, 1008e9), devices=(32, 3072),
)  # fmt: skip

# Fitted to the fourteen scaling results of arXiv 1909.08053: `matmul` and `launch`, the cost of starting each kernel
# from Python; the other rates as on A100.
MEGATRON_V100 = dataclasses.replace(
    MEGATRON_A100, software=MEGATRON_2019, gpu="v100-dgx2h",
    matmul=0.735, launch=96.8e-6,
    error=0.12, fitted_on="fourteen scaling results of Megatron-LM, arXiv 1909.08053, figure 5 and appendix D",
    parameters=(1.2e9, 8.3e9), devices=(1, 512),
)  # fmt: skip

# The rates of a large matrix product and of a collective are properties of the hardware and its libraries, so mjax
# starts from those of Megatron-LM on A100s. Its error bar is the largest error of these rates on runs they were not
# fitted to: on the same GPU those of arXiv 2205.05198, table 5; on another one a V100 in arXiv 1909.08053.
MJAX_FROM_PAPERS = dataclasses.replace(
    MEGATRON_A100,
    software=MJAX,
    error=0.12,
    fitted_on=MEGATRON_A100.fitted_on + "; mjax itself has not been measured on a GPU",
)


def default_calibration() -> Calibration:
    """The default calibration of `predict_time`."""
    return MJAX_FROM_PAPERS


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
        check_bounds(calibration, f"{file}: ")
    except UsageError as error:
        raise UsageError(f"{error}; {again}") from None
    for name in ("parameters", "devices"):
        low, high = getattr(calibration, name)
        if not 0 < low <= high <= MOST:
            raise UsageError(f"{file}: {name} is [{low}, {high}]; give the smallest and the largest, both above 0")
    if calibration.gpu not in [gpu.name for gpu in GPUS]:
        raise UsageError(f"{file}: gpu {calibration.gpu!r} is not known; mjax/hardware.py describes how to add it")
    return calibration
