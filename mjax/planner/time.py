"""Predicted seconds of a step: an analytic model of the GPU, of the program, and of how efficient it is.

The model has three independent parts:

    hardware     `Gpu`: data-sheet values (`mjax/cluster/hardware.py`).
    software     `FrameworkModel`: properties of the program that no config contains: additional collectives, their
                 dtypes and their overlap. Read from the code and from compiled programs, never fitted.
    calibration  `Calibration`: the share of the data-sheet rates that kernels reach: a few numbers of one GPU, measured
                 there kernel by kernel (`benchmarks/calibrate.py`), or taken from published runs
                 (`benchmarks/published.py`; a test repeats the fit), from one matmul on an H100, and assumed.

The model of each part of a step:

    layer matmuls     the FLOPs at `matmul` × peak, less if tiles leave multiprocessors idle or the inner dim is short;
                      or the bytes, if those take longer
    attention         flash: the FLOPs of unmasked scores, by head size, length and direction. Else: two matmuls over
                      s × s, and the scores' bytes
    elementwise       LayerNorm, residual sums, GELU: passes over the stream and over the outputs of column-parallel and
                      the inputs of row-parallel matmuls (`mjax_traffic`) over `memory` × bandwidth, and launches; with
                      a loop over layers also the stacks that it fills and copies
    float8            the layers' matmuls at `float8` × its peak; passes that round their operands
    context           attention's collectives, not overlapped
    experts           matmuls of a mixture: as many rows for each expert, in whole tiles; collectives over `expert`, not
                      overlapped
    collectives       a ring: bytes sent over its slowest link, which the rings that leave a server together share, and
                      a message's latency for each rank. If a matmul overlaps it (`Overlap`), only the time beyond that
                      of the matmul counts
    host memory       a layer's input over the link between GPU and server, at its nominal rate: out during the whole
                      forward pass of the layer, back not overlapped
    pipeline          work of all micro-batches, then fill and drain as in the schedule (`pipeline_schedules.py`), in
                      lock-step; the head is on the last stage, for which all other stages wait
    once per step     gradient all-reduce, parameter all-gather, the bytes of the optimizer; Muon's matmuls
                      (`memory.py`)

The matmuls of a layer and of the head, their shapes, and the number of all-reduces over `model` are read from the
traced model (`layer.py`), once for each model and size of that axis. The rest is arithmetic, as in arXiv 2104.04473,
sections 2.2 and 3, and in 2205.05198, section 4.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter, mul
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import numpy as np

from mjax.cluster.hardware import GPUS, Gpu
from mjax.config import Config, MeshConfig, axes
from mjax.config.axes import CONTEXT, EXPERT, MODEL, copies, shards
from mjax.config.batch_size import BatchSizes
from mjax.config.bounds import Bounds, check_bounds
from mjax.config.kernels import FUSED, attention_on_gpu, is_unrolled
from mjax.config.pattern import layer_stacks, stack_rows
from mjax.config.plain_values import build
from mjax.errors import UsageError, either
from mjax.parallel.grouped import TILE_ROWS
from mjax.planner import Section, error_bar
from mjax.planner import layer as trace
from mjax.planner.layer import hardware_flops, model_flops
from mjax.planner.memory import DTYPE_BYTES, device_weights, muon_matrices, muon_products, muon_width
from mjax.planner.program import Product
from mjax.step.muon import ITERATE_IN
from mjax.step.precision import uses_float8
from mjax.utils.figures import format_rows, format_table
from mjax.utils.files import read_json, write_whole

# Rows in a tile of the experts' matmuls.
TILE = TILE_ROWS["pallas"]


# --- Calibration ------------------------------------------------------------------------------------------------------


FORMAT = "mjax calibration 3"
RATES = ("matmul", "inner", "attention", "memory", "launch", "node", "network", "collective")
# Rates that are fractions of a data sheet, and their upper limits: some GPUs run slightly above their data sheet.
FRACTIONS, MAX_FRACTION = ("matmul", "memory", "node", "network"), 1.2
MAX_VALUE = 1e15  # above any number in a calibration
Fraction = Annotated[float, Bounds(gt=0, le=MAX_FRACTION)]
RateOrZero = Annotated[float, Bounds(ge=0, le=MAX_VALUE)]


@dataclass(frozen=True)
class Calibration:
    """Rates that kernels of a GPU reach, and the error of a predicted step.

    Attributes:
      gpu: name of the GPU they apply to (`mjax/cluster/hardware.py`).
      matmul: fraction of the peak that a matmul reaches whose tiles fill the GPU.
      inner: a matmul's inner dim k costs a factor of k / (k + inner).
      attention: flash attention, a row for each measured head size and length: head size, positions, and the fractions
        of the peak that the forward and the backward pass reach, counting only unmasked scores.
      memory: fraction of the memory bandwidth that memory-bound kernels reach.
      launch: seconds that a kernel takes in addition to its work.
      node: fraction of the bandwidth within a server that collectives reach.
      network: the same between servers.
      collective: seconds that a collective takes in addition to messages and bytes.
      float8: fraction of the float8 peak that such a matmul reaches; read with `precision.compute fp8` only.
      error: relative error bar of the time of a step on this GPU.
      error_elsewhere: the same on any other GPU.
      sequences: shortest and longest sequence of the runs behind the error bar; beyond them there is no error bar.
      source: description of these runs.
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
    source: str
    float8: Fraction = 0.65  # 8192³ on Hopper: 1,170 (torch._scaled_mm) to 1,610 TFLOP/s (cuBLASLt), 59 to 81%
    measured: tuple[str, ...] = ()
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict, hash=False)

    def relative_error(self, config: Config, gpu: Gpu) -> tuple[float | None, tuple[str, ...]]:
        """The error bar of a prediction, and its caveats.

        Outside the calibrated sequence lengths, and for float8, there is no error bar: None.
        """
        bar = self.error if gpu.name == self.gpu else self.error_elsewhere
        (low, high), length, fp8 = self.sequences, config.model.sequence, config.precision.compute == "fp8"
        in_range, caveats = low <= length <= high, []
        if fp8:
            rate = f"{self.float8:.0%} of their peak ({'measured' if 'float8' in self.measured else 'assumed'})"
            caveats.append(f"no error bar for fp8: ±{bar:.0%} is for bf16; float8 matmuls at {rate}")
        if gpu.name != self.gpu:
            caveats.append(f"calibrated on {self.gpu}, not on {gpu.name}")
        if not in_range:
            caveats.append(f"no error bar at sequence length {length:,}: calibrated on {low:,} to {high:,}")
        return bar if in_range and not fp8 else None, tuple(caveats)


_NOT_MJAX = "mjax itself has not been measured on a GPU"

# `matmul` and `inner` are fitted to 18 runs of Megatron-LM (arXiv 2104.04473, table 1, and 2205.05198, table 5), and
# absorb the errors of all other rates. Rates of kernels are properties of the hardware and its libraries, so mjax
# starts from those of Megatron-LM. `attention` is 50 to 73% of the peak of an A100 (arXiv
# 2307.08691): its lower end; `collective` the base latency of NCCL's ring, protocol Simple (NVIDIA/nccl,
# src/graph/tuning.cc); 77% of NVLink, about 230 GB/s on an A100, 85% of the network cards, `memory` and `launch` are
# assumed.
A100 = Calibration(
    gpu="a100", matmul=0.8036, inner=219.0, attention=((128, 2048, 0.5, 0.5),), memory=0.8, launch=5e-6, node=0.77,
    network=0.85, collective=8.4e-6, error=0.35, error_elsewhere=0.45, sequences=(512, 2048),
    source=f"43 runs of Megatron-LM and llm-foundry, 0.12 to 1,008 billion parameters on 8 to 3,072 GPUs; {_NOT_MJAX}",
)  # fmt: skip

# `matmul` is 798 TFLOP/s in a matmul of 8192³ random numbers on one H100. The others are assumed, as those of the
# roofline of compiled programs (`benchmarks/aot/roofline.py`).
H100 = Calibration(
    gpu="h100", matmul=0.832, inner=180.0, attention=((128, 1024, 0.425, 0.334),), memory=0.85, launch=1.2e-6, node=0.8,
    network=0.8, collective=8.4e-6, error=0.45, error_elsewhere=0.5, sequences=(512, 2048),
    source=f"29 runs of llm-foundry, 0.75 to 65 billion parameters on 8 to 64 GPUs; {_NOT_MJAX}", measured=("matmul",),
)  # fmt: skip


def default_calibration(gpu: Gpu) -> Calibration:
    """The default rates of a GPU: measured on the H100 for Hopper and later, on the A100 for earlier GPUs."""
    return H100 if gpu.compute_capability >= (9, 0) else A100


def write_calibration(calibration: Calibration, file: Path) -> None:
    """Write `calibration` as JSON, atomically."""
    write_whole(file, json.dumps({"format": FORMAT, **asdict(calibration)}, indent=2) + "\n")


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
        check_bounds(calibration, f"{file}: ")
    except UsageError as error:
        raise UsageError(f"{error}; {advice}") from None
    rows, (low, high) = calibration.attention, calibration.sequences
    fractions = [fraction for row in rows for fraction in row[2:]]
    if not (rows and min(map(min, rows)) > 0 and max(fractions) <= MAX_FRACTION and 0 < low <= high <= MAX_VALUE):
        takes = f"attention takes rows of head size, positions and two fractions of the peak up to {MAX_FRACTION}"
        given = f"they are {list(map(list, rows))} and {[low, high]}"
        raise UsageError(f"{file}: {takes}, sequences the shortest and the longest, all above 0; {given}")
    if calibration.gpu not in [gpu.name for gpu in GPUS]:
        raise UsageError(f"{file}: gpu {calibration.gpu!r} is not known; add it in mjax/cluster/hardware.py")
    return calibration


# --- Seconds of a kernel or a collective on a GPU: the data sheet times the calibration -------------------------------


# Tiles of cuBLAS's matmuls, rows × columns of the result, and the rate of each against the largest.
TILES = (
    (128, 256, 1.0), (256, 128, 1.0), (192, 128, 1.0), (128, 192, 1.0), (256, 192, 1.0), (192, 256, 1.0),
    (128, 128, 0.92), (64, 256, 0.88), (64, 128, 0.75),
)  # fmt: skip
HEAD_MULTIPLE = 64  # attention runs on heads that are multiples of this


class Rates:
    """Seconds of kernels and collectives on a GPU: the data sheet times the calibration. Seconds, bytes, FLOPs.

    Attributes:
      gpu, calibration: the two factors.
      compute: dtype of the matmuls that are not in float8.
      peak: FLOP/s in this dtype.
      float8_peak: FLOP/s of float8 matmuls; None if the GPU has none.

    Raises:
      UsageError: no peak is known for this dtype.
    """

    def __init__(self, gpu: Gpu, calibration: Calibration, compute: str):
        self.gpu, self.calibration = gpu, calibration
        self.compute = "bf16" if compute == "fp8" else compute
        self.peak, self.float8_peak = gpu.peak(self.compute), gpu.peak("fp8")
        if gpu.peak(compute) is None:
            known = either([dtype for dtype in gpu.peak_tflops if dtype != "fp8"])
            fix = f"use --precision.compute {known}, or add the peak in mjax/cluster/hardware.py"
            raise UsageError(f"no {compute} peak is known for {gpu.name}, so its time cannot be predicted; {fix}")

    def product(self, m: float, n: float, k: float, batch: float = 1.0, float8: bool = False) -> float:
        """[m, k] × [k, n], `batch` times in one kernel; in float8 or not, the result has the compute dtype."""
        width = DTYPE_BYTES[self.compute]
        moved = batch * ((1 if float8 else width) * (m * k + k * n) + width * m * n)
        seconds = 2 * batch * m * n * k / self.product_rate(batch * m, n, k, float8)
        return max(seconds, self.bytes(moved)) + self.calibration.launch

    def product_rate(self, m: float, n: float, k: float, float8: bool = False) -> float:
        """FLOP/s of a compute-bound matmul with m rows in all: less if its tiles leave multiprocessors idle, or its
        inner dim is short."""
        filled, calibration = tile_efficiency(m, n, self.gpu.multiprocessors), self.calibration
        largest = self.float8_peak * calibration.float8 if float8 else self.peak * calibration.matmul
        return largest * filled * k / (k + calibration.inner)

    def flash(self, flops: float, head: int, positions: int, backward: bool = False) -> float:
        """A kernel of flash attention: `flops` inside the mask, this head size and sequence length."""
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
        """All-gather or reduce-scatter of `whole` bytes on a ring of `ranks` devices with this stride."""
        return (ranks - 1) / ranks * whole / self._bandwidth(ranks, stride) + self._steps(ranks, stride)

    def exchange(self, ranks: int, stride: int, whole: float) -> float:
        """All-to-all of `whole` bytes of every device. A link carries what one device sends, for no other one as in a
        ring, and all devices of a server share its network cards."""
        gpu, calibration = self.gpu, self.calibration
        in_server = max(1, min(ranks, gpu.gpus_per_node // stride))
        node = (in_server - 1) / (gpu.node_bandwidth * calibration.node)
        network = (ranks - in_server) * gpu.gpus_per_node / (gpu.network_bandwidth_per_node * calibration.network)
        return whole / ranks * max(node, network) + self._steps(ranks, stride)

    def sum(self, ranks: int, stride: int, whole: float) -> float:
        """All-reduce of `whole` bytes: a reduce-scatter and an all-gather in one kernel."""
        return 2 * self.gather(ranks, stride, whole) - (ranks > 1) * self.calibration.collective

    def send(self, ranks: int, stride: int, sent: float) -> float:
        """Every device sends `sent` bytes to the one `stride` away, on an axis of `ranks`."""
        latency = self.gpu.node_latency if self._inside(ranks, stride) else self.gpu.network_latency
        return sent / self._bandwidth(ranks, stride) + latency + self.calibration.collective

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
        """Latency of a collective, and of the ranks - 1 messages of its ring, in and between servers (NVIDIA/nccl,
        src/graph/tuning.cc); 0 of one rank."""
        in_server = max(1, min(ranks, self.gpu.gpus_per_node // stride))
        between = math.ceil(ranks / in_server) - 1
        messages = between * self.gpu.network_latency + (ranks - 1 - between) * self.gpu.node_latency
        return messages + (ranks > 1) * self.calibration.collective


@lru_cache(maxsize=65536)
def tile_efficiency(m: float, n: float, multiprocessors: int) -> float:
    """The share of the multiprocessors' time that the tiles of a matmul fill, with the best tile."""

    def share(rows: int, columns: int, rate: float) -> float:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / multiprocessors)
        return rate * m * n / (waves * multiprocessors * rows * columns)

    return min(1.0, max(share(*tile) for tile in TILES))


@lru_cache(maxsize=65536)
def flash_share(rows: tuple[tuple[int, int, float, float], ...], head: int, positions: int, backward: bool) -> float:
    """The fraction of the peak that flash attention reaches; rows as in `Calibration.attention`."""
    padded, sizes = HEAD_MULTIPLE * math.ceil(head / HEAD_MULTIPLE), {row[0] for row in rows}
    nearest = head if head in sizes else min(sizes, key=lambda size: abs(size - padded))
    lengths = sorted((math.log(row[1]), row[3 if backward else 2]) for row in rows if row[0] == nearest)
    share = float(np.interp(math.log(positions), *zip(*lengths, strict=True)))
    return share * (1.0 if nearest == head else head / padded)


# --- Software ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """The collectives that run during matmuls.

    Attributes:
      backward: share of a layer's backward collectives over `model` that overlaps its wgrad matmuls, at most as long as
        these take.
      repeated: with sequence parallelism the share of the repeated all-gathers of saved tokens that overlaps the
        gradient matmuls: both of a layer with selective recomputation, the first with full.
      gradients: all-reduces over `data` run during the backward pass of the only micro-batch, without ZeRO and without
        a loop over its layers.
      weights: share of FSDP's all-gathers and reduce-scatters that runs during the layers.
      copies: the copies into and out of the stacks of a loop over layers run during the matmuls.
    """

    backward: float
    repeated: float = 0.0
    gradients: bool = False
    weights: float = 0.0
    copies: bool = False


class Traffic(NamedTuple):
    """The memory-bound kernels of a layer and of the head for a micro-batch: bytes that they read and write, launches.

    Attributes:
      forward, backward: of a layer, without its scores; the backward pass with recomputation.
      scores, scores_backward: of attention that writes its scores.
      head: forward and backward.
      saved: bytes of a layer's saved activations, which a loop over layers fills and copies.
    """

    forward: tuple[float, float]
    backward: tuple[float, float]
    scores: tuple[float, float]
    scores_backward: tuple[float, float]
    head: tuple[float, float]
    saved: float = 0.0


# Passes over arrays in 16 bit of the kernels that XLA compiles for H100s, counted between the traced matmuls of nine
# families: over a branch's rows of the stream (norms and sums), with one more for each all-reduce over `model`; of a
# backward pass as multiples of the forward pass, without and with recomputation; and over the whole stream for each
# all-reduce over `model` in the backward pass.
STREAM_PASSES, BACKWARD_FACTOR, RECOMPUTE_FACTOR, SUM_PASSES = 4, 1.4, 1.75, 2.25
# Passes over scores, forward, backward, and backward with recomputation; over the stream in the head.
SCORE_PASSES, HEAD_PASSES = (3, 5, 6), 6
# Bytes that quantize an element of an operand to float8, beyond those of 16 bit, and an element of a weight; launches
# that quantize an operand of a matmul and its weight.
FP8_OPERAND_BYTES, FP8_WEIGHT_BYTES, FP8_LAUNCHES = 2, 6, 8
# Of a loop over layers: times that saved activations and weights of a layer are read or written by copies into and out
# of stacks; each stack is filled with zeros before.
SAVED_COPIES, WEIGHT_COPIES, COPY_LAUNCHES = 3, 6, 20


def mjax_traffic(layer: LayerTime) -> Traffic:
    """Return the traffic of mjax's program: an operand or result of a matmul is written or read once outside it, and
    the operations between two matmuls fuse."""
    run, branches, element = layer.run, layer.layer.branches, layer.run.element
    mesh, recompute = layer.config.mesh, layer.config.train.recompute
    outputs = layer.samples * sum(p.batch * p.m * p.n for branch in branches for p in branch[:-1])
    inputs = layer.samples * sum(p.batch * p.m * p.k for *_, p in branches)
    stream = len(branches) * run.stream
    rows = stream / (mesh.model if mesh.splits_tokens else 1)
    # Experts: each row is dispatched, and the rows of a token are combined.
    moved = 2 * layer.samples * sum(p.batch * p.m * min(p.k, p.n) for p in layer.layer.weight_products if p.grouped)
    local, parallel, repeats = outputs + inputs + moved + STREAM_PASSES * rows, mesh.model > 1, recompute != "none"
    factor, kernels = RECOMPUTE_FACTOR if repeats else BACKWARD_FACTOR, 4 * len(branches)
    # The gradients of experts are sums over their rows, written for each micro-batch.
    backward = element * (factor * local + SUM_PASSES * stream * parallel + layer.experts)
    operands, weights, launches = 0.0, 0.0, 0
    if run.float8:
        operands, weights = FP8_OPERAND_BYTES * (outputs + inputs + 2 * rows), FP8_WEIGHT_BYTES * layer.weights
        launches = FP8_LAUNCHES * len(layer.layer.weight_products)
    scores = layer.samples * max((p.batch * p.m * p.n for p in layer.layer.activation_products), default=0)
    written, scores = (not run.flash) * SCORE_PASSES[0] * scores, element * scores
    saved = {
        "none": outputs + inputs + 2 * moved + stream + 1.5 * rows + written,
        "selective": outputs + 1.5 * rows,
        "full": rows / len(branches),
    }
    return Traffic(
        forward=(element * (local + rows * parallel) + operands + weights, kernels + launches),
        backward=(backward + (1 + repeats) * operands + weights, factor * kernels + (1 + repeats) * launches),
        scores=(SCORE_PASSES[0] * scores, 3),
        scores_backward=(SCORE_PASSES[1 + repeats] * scores, 3),
        head=(element * (2 * layer.samples * run.end.logits + HEAD_PASSES * rows / len(branches)), 6),
        saved=element * saved.get(recompute, 0.0),
    )


@dataclass(frozen=True)
class FrameworkModel:
    """A training program; by default mjax.

    Attributes:
      traffic: its memory-bound kernels.
      flash: it has a flash attention kernel.
      overlap: its overlapped collectives; None if they depend on the config (`mjax_overlap`).
      repeated_sums: all-reduces of a layer that full recomputation repeats. The last one of a layer is dead code, which
        XLA removes.
      gradient_bytes: per element of the gradient all-reduce.
      accumulate_bytes: read and written per weight when the gradients of a micro-batch are accumulated.
      optimizer_bytes: read and written per weight by norm and clipping, Adam and the cast to the compute dtype: of mjax
        2, 26 and 6, read from programs compiled for H100s (benchmarks/log).
      splits_messages: each rank of `model` sends its part of an activation to the next stage, which gathers it (arXiv
        2104.04473, section 4.1), with sequence parallelism or without.
      sums_stacks: it all-reduces the gradients of each stack of layers as one array, after all micro-batches.
    """

    traffic: Callable[[LayerTime], Traffic] = field(default=mjax_traffic)
    flash: bool = True
    overlap: Overlap | None = None
    repeated_sums: int = 1
    gradient_bytes: int = 4
    accumulate_bytes: int = 12
    optimizer_bytes: int = 34
    splits_messages: bool = False
    sums_stacks: bool = True


MJAX = FrameworkModel()


def mjax_overlap(config: Config, version: tuple[int, ...]) -> Overlap:
    """Return the collectives that mjax's step overlaps, by version of jax, read from programs compiled for H100s.

    With sequence parallelism a barrier ties each reduce-scatter of the backward pass to the matmul next to it, in every
    version. The all-gather before it is needed immediately, and a repeated one needs only saved activations. Without
    sequence parallelism XLA decides: jax 0.10 overlaps the all-reduce with the matmul, 0.11 does not, but copies into
    the stacks of a loop during the matmuls. FSDP's all-gathers and reduce-scatters run during the layers. Without ZeRO
    and a loop over layers the all-reduces of the only micro-batch run during the wgrad matmuls. XLA has one collective
    in flight, so none of these overlaps the collectives over `model` (benchmarks/log).
    """
    newer = version >= (0, 11)
    if config.mesh.splits_tokens:
        return Overlap(backward=0.5, repeated=1.0, copies=newer)
    whole = config.mesh.model == 1
    return Overlap(backward=0.0 if newer else 1.0, gradients=whole, weights=0.85 * whole, copies=newer)


# --- Layers -----------------------------------------------------------------------------------------------------------


def replica_collective(
    mesh: MeshConfig, collective: Callable, width: float, weights: float, experts: float = 0.0
) -> float:
    """Seconds of a collective of `width` bytes for each of `weights`, over all replicas of a group; for the `experts`
    among them, which `expert` splits, over the replicas of a shard."""
    seconds = collective(shards(mesh), mesh.model, width * (weights - experts))
    if not experts:
        return seconds
    return seconds + collective(shards(mesh) // mesh.expert, mesh.model * mesh.expert, width * experts)


class LayerTime:
    """The work of one device in a layer, part by part; every method returns seconds.

    Attributes:
      run: shared by all layers.
      layer: its matmuls.
      weights: elements of its weights, as used in the computation; of them `experts` are split over `expert`, and
        `trained` have gradients.
    """

    def __init__(self, run: _MicroBatch, layers: int, spec: trace.TraceSpec):
        self.run, self.config, self.rates, self.software = run, run.config, run.rates, run.software
        self.samples, self.layer, self.mesh = run.samples, trace.layer_forward(spec), run.config.mesh
        mesh = replace(self.mesh, pipe=1, virtual_stages=1, stage_layers=())
        weights = device_weights(run.config.model, mesh, spec.kind)
        self.weights, self.experts = weights.layers / layers, weights.experts / layers
        self.trained = device_weights(run.config.model, mesh, spec.kind, trained=True).layers / layers

    @cached_property
    def passes(self) -> list[dict[str, float]]:
        """The parts: the forward pass, and the halves of the backward pass: inputs, weights."""
        weight_gradients = {"matmul": self._weight_gradients(self.layer.trained_products)}
        return [self._forward(), self._backward_inputs(), weight_gradients]

    @cached_property
    def seconds(self) -> float:
        """All passes."""
        return sum(sum(parts.values()) for parts in self.passes)

    @cached_property
    def traffic(self) -> Traffic:
        """Its memory-bound kernels."""
        return self.software.traffic(self)

    def _forward(self) -> dict[str, float]:
        work = {
            "matmul": self._forward_products,
            "attention": self._attention(backward=False),
            "elementwise": self.rates.traffic(*self.traffic.forward),
        }
        forward = {
            **work,
            "model": len(self.layer.branches) * self.run.layer_sum + self._more_rows,
            "context": sum(self._context_collectives),
            "expert": sum(self._expert_collectives),
            "data": self.run.expose_zero(self._data_collectives(self.run.gathered), sum(work.values())),
        }
        return forward | {"host": max(0.0, self._to_host - sum(forward.values()))}

    @property
    def _to_host(self) -> float:
        """A copy of the layer's input to host memory, one way, at the nominal rate of the link; not measured."""
        offloaded = self.run.element * self.run.stream / (self.mesh.model if self.mesh.splits_tokens else 1)
        return offloaded / self.rates.gpu.host_bandwidth if self.config.train.recompute == "offload" else 0.0

    def _backward_inputs(self) -> dict[str, float]:
        """A layer's backward pass without its weight gradients, including recomputation."""
        recompute, run, overlap = self.config.train.recompute, self.run, self.run.overlap
        to_inputs = sum(self._product(product, product.k, product.n) for product in self.layer.weight_products)
        whole, attention = recompute in ("full", "offload"), recompute != "none"
        repeated, split = 0.0, self.config.mesh.splits_tokens
        if whole and split:  # of a layer's gathers and scatters only the last scatter can be dead code
            repeated = (2 - overlap.repeated) * run.layer_gather + self.software.repeated_sums * run.layer_scatter
        elif whole:
            repeated = self.software.repeated_sums * run.layer_sum
        elif attention and split:  # the two gathers are repeated
            repeated = 2 * run.layer_gather - min(2 * overlap.repeated * run.layer_gather, to_inputs)
        work = {
            "matmul": to_inputs,
            "attention": self._attention(backward=True),
            "elementwise": self.rates.traffic(*self.traffic.backward) + self._loop,
            "recompute": whole * self._forward_products + attention * self._attention(backward=False),
        }
        zero = self._data_collectives(run.gathered)
        zero += self._data_collectives(self.software.gradient_bytes, self.trained)
        overlapped = sum(work.values()) + self._weight_gradients(self.layer.trained_products)
        (before, after), (gathers, scatters) = self._context_collectives, self._expert_collectives
        return {
            **work,
            "model": self._exposed_backward + repeated + (1 + whole) * self._more_rows,
            "context": before + after + attention * before + whole * after,
            "expert": gathers + scatters + attention * gathers,
            "data": run.expose_zero(zero, overlapped),
            "host": self._to_host,
        }

    @cached_property
    def _forward_products(self) -> float:
        return sum(self._product(product, product.n, product.k) for product in self.layer.weight_products)

    def _weight_gradients(self, products: Iterable[Product]) -> float:
        rows = ((product, *self._rows(product)) for product in products)
        return sum(self.rates.product(p.k, p.n, m, groups, float8=self.run.float8) for p, m, groups in rows)

    def _product(self, product: Product, n: int, k: int) -> float:
        """[tokens, k] × [k, n] of a matmul with a weight."""
        rows, groups = self._rows(product)
        return self.rates.product(rows, n, k, groups, float8=self.run.float8)

    def _rows(self, product: Product) -> tuple[float, int]:
        """The rows of a matmul with a weight, and the number of experts; the rows of an expert are whole tiles."""
        rows = self.samples * product.m
        return (TILE * math.ceil(rows / TILE), product.batch) if product.grouped else (rows, 1)

    @cached_property
    def _more_rows(self) -> float:
        """The collectives over `model` of the rows that experts have in addition to those of the rank's stream."""
        if not self.experts:
            return 0.0
        largest = max((whole for axis, _, whole, *_ in self.layer.collectives if axis == MODEL), default=0)
        return max(0.0, largest / (self.run.element * self.layer.elements) - 1) * self.run.layer_sum

    @cached_property
    def _expert_collectives(self) -> tuple[float, float]:
        """A layer's collectives over `expert` in its forward pass, before the experts and after them; the backward pass
        has the transpose of each, and recomputation repeats the first. All-to-alls count for one round."""
        seconds = self._time_collectives(EXPERT, self.mesh.expert, self.mesh.model * self.mesh.context)
        before = len(seconds) // 3 * 2  # rows, and weights with numbers of experts; then results
        return sum(seconds[:before]), sum(seconds[before:])

    @cached_property
    def _context_collectives(self) -> tuple[float, float]:
        """A layer's collectives over `context` in its forward pass, before attention and after it; the backward pass
        has the transpose of each, and recomputation repeats the first."""
        seconds = self._time_collectives(CONTEXT, self.mesh.context, self.mesh.model)
        return sum(seconds[:3]), sum(seconds[3:])  # queries, keys and values; the result

    def _time_collectives(self, axis: str, ranks: int, stride: int) -> list[float]:
        """The seconds of a layer's collectives over this axis alone, which has `ranks` ranks at this stride."""
        rates = {"all_to_all": self.rates.exchange}
        calls = [call for call in self.layer.collectives if call[0] == axis and call[1] != "pmax"]
        sent = [(name, self.samples * whole, *(ring or (ranks, 1))) for _, name, whole, ring in calls]
        return [rates.get(name, self.rates.gather)(n, gap * stride, whole) for name, whole, n, gap in sent]

    def _attention(self, backward: bool) -> float:
        """Scores, softmax and weighted sums. A flash kernel has five matmuls backward for two forward, because it
        recomputes the scores (arXiv 2307.08691), all as wide as the widest."""
        products, model = self.layer.activation_products, self.config.model
        if not products:
            return 0.0
        if self.run.flash:
            flops = self.samples * len(products) * max(product.flops for product in products)
            flops *= (2.5 if backward else 1) / (2 if model.causal else 1)
            width = max(model.head_size, model.value_size)
            return self.rates.flash(flops, width, model.sequence, backward)
        written = self.traffic.scores_backward if backward else self.traffic.scores
        matmuls = sum(self.rates.product(p.m, p.n, p.k, p.batch * self.samples) for p in products)
        return (2 if backward else 1) * matmuls + self.rates.traffic(*written)

    @cached_property
    def _loop(self) -> float:
        """Cost of a loop for each layer: filling stacks and copying, unless the copies run during matmuls."""
        if not self.run.looped:
            return 0.0
        saved, weights = self.traffic.saved, self.run.element * self.weights
        if self.run.overlap.copies:
            return self.rates.traffic(saved + weights, 0)
        return self.rates.traffic((1 + SAVED_COPIES) * saved + (1 + WEIGHT_COPIES) * weights, COPY_LAUNCHES)

    @cached_property
    def _exposed_backward(self) -> float:
        """Exposed seconds of a layer's backward collectives over `model`.

        A collective that overlaps the weight gradients of column-parallel layers costs nothing while these run.
        """
        run = self.run
        hidden = run.overlap.backward * (2 * run.layer_scatter if self.config.mesh.splits_tokens else run.layer_sum)
        columns = ([product for product in branch[:-1] if product.trained] for branch in self.layer.branches)
        return sum(run.layer_sum - min(hidden, overlapped) for overlapped in map(self._weight_gradients, columns))

    def _data_collectives(self, width: float, weights: float | None = None) -> float:
        """ZeRO-3: all-gather of a layer's weights, or reduce-scatter of gradients, of `width` bytes per element."""
        if self.config.mesh.zero != 3:
            return 0.0
        weights = self.weights if weights is None else weights
        return replica_collective(self.config.mesh, self.rates.gather, width, weights, min(self.experts, weights))


# --- A step -----------------------------------------------------------------------------------------------------------


# Parts of a step in display order, with their names in a plan.
NAMES = {
    "matmul": "layer matmuls",
    "attention": "attention",
    "elementwise": "elementwise and norms",
    "recompute": "recomputed matmuls and attention",
    "head": "embedding and head",
    "model": "tensor-parallel collectives (exposed)",
    "context": "context-parallel collectives",
    "expert": "expert-parallel collectives",
    "pipe": "pipeline send/recv",
    "bubble": "pipeline bubble",
    "data": "gradient all-reduce (exposed)",
    "host": "activation offload (exposed)",
    "optimizer": "optimizer and gradient accumulation",
}
# Launches for each chunk of the loss: running sums, the gradient of its logits, and its matmuls.
CHUNK_LAUNCHES = 10


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part.

    Attributes:
      parts: seconds by name; they add up to `total`.
        matmul: matmuls of the layers.
        attention: scores, softmax and weighted sums.
        elementwise: memory-bound kernels of the layers, including recomputed ones.
        recompute: recomputed matmuls and attention.
        head: embedding, logits and loss, without their collectives.
        model: exposed collectives over `model`; with Muon also its matrices' collectives.
        context: attention's collectives over `context`.
        expert: collectives over `expert`, to the experts of a mixture and back.
        pipe: send/recv between stages.
        bubble: idle time while the pipeline fills and drains.
        data: exposed gradient all-reduce over `data` and `context`, with ZeRO reduce-scatter and parameter all-gather;
          gradient all-reduce of the embedding over `pipe`; with Muon the collectives of its matrices.
        host: exposed copies of the layers' inputs to host memory and back.
        optimizer: gradient accumulation, gradient norm, update of the weights.
      model_tflops: TFLOP/s of one GPU, counted as in `model_flops` (nothing for recomputation, full attention).
      mfu: `model_tflops` over the peak.
      error: error bar of `total`, relative to the time that is measured; None if there is none for this config.
      mean: seconds per step, mean over the run: less than `total` with a batch ramp-up.
      caveats: sentences on parts outside the calibration.
    """

    parts: dict[str, float]
    model_tflops: float
    mfu: float
    error: float | None
    mean: float
    caveats: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())


def predict_time(
    config: Config, gpu: Gpu, calibration: Calibration | None = None, software: FrameworkModel = MJAX
) -> StepTime:
    """Predict the time of a step.

    Args:
      config: validated; `model.attention` is a kernel's name, or `auto`, resolved as on this GPU.
      gpu: the hardware. Neighbors in a server are ranks of `model`, then of `data`, then of `pipe`.
      calibration: rates; by default `default_calibration`.
      software: the program.

    Raises:
      UsageError: the GPU has no peak for the config's compute dtype, or does not support its attention kernel.
    """
    return TimePredictor(gpu, calibration, software)(config)


# The share of a step that other layers for each stage must save, for a plan to propose them.
MIN_SAVED = 0.01
# The fields that the work of a micro-batch depends on, without FSDP.
WORK = attrgetter(
    "model", "data", "precision.compute", "mesh.pipe", "mesh.model", "mesh.expert", "mesh.context",
    "mesh.context_attention", "mesh.sequence_parallel", "train.micro_batch", "train.recompute", "train.loss_chunks",
)  # fmt: skip


class TimePredictor:
    """Predicts the time of steps; arguments as for `predict_time`. Configs share the work of a micro-batch."""

    def __init__(self, gpu: Gpu, calibration: Calibration | None = None, software: FrameworkModel = MJAX):
        self.gpu, self.calibration, self.software = gpu, calibration or default_calibration(gpu), software
        self._works: dict[tuple, _MicroBatch] = {}

    def mean(self, config: Config) -> float:
        """Seconds of a step of `config`, mean over the run: `StepTime.mean`, for a search."""
        return self._step(config).mean_over_run()

    def balance(self, config: Config) -> Config:
        """`config` with the layers of its pipeline stages that make the slowest as fast as possible, if that saves
        `MIN_SAVED` of a step."""
        mesh, runs = config.mesh, config.model.pattern.runs(config.model.layers)
        if mesh.pipe == 1:
            return config
        step, sizes = self._step(config), [len(kinds) for kinds, count in runs for _ in range(count)]
        ends = [0, *balance_stages(step.group_times(), mesh.pipe * mesh.virtual_stages, step.work.head_seconds)]
        layers = tuple(sum(sizes[first:end]) for first, end in pairwise(ends))
        balanced = replace(config, mesh=replace(mesh, stage_layers=layers))
        return balanced if self.mean(balanced) < (1 - MIN_SAVED) * self.mean(config) else config

    def _step(self, config: Config) -> _StepTime:
        """The step, with the work of a micro-batch, which configs share."""
        mesh = config.mesh
        fsdp = (mesh.data, mesh.replicate) if mesh.zero == 3 else None
        key = *WORK(config), fsdp, is_unrolled(config, on_gpu=True)
        if key not in self._works:
            rates = Rates(self.gpu, self.calibration, config.precision.compute)
            self._works[key] = _MicroBatch(config, rates, self.software)
        return _StepTime(config, self._works[key])

    def __call__(self, config: Config) -> StepTime:
        """The time of a step of `config`."""
        step, train = self._step(config), config.train
        work, seconds = step.work, step.seconds(config.micro_batches)
        total = sum(seconds.values())
        tflops = model_flops(config) / total / config.mesh.devices / 1e12
        error, caveats = self.calibration.relative_error(config, self.gpu)
        untimed = []
        if work.kernel == "flash":
            untimed.append("attention kernel flash (timed as cuDNN's)")
        if config.model.experts:
            untimed.append("expert matmuls (timed as cuBLAS's)")
        if train.recompute == "offload":
            untimed.append(f"copies to host memory (timed at {self.gpu.host_bandwidth / 1e9:g} GB/s one way)")
        caveats += tuple(f"not measured: {name}" for name in untimed)
        error, mfu = None if untimed else error, tflops * 1e12 / work.rates.peak
        return StepTime(seconds, tflops, mfu, error, step.mean_over_run(), caveats)


class _MicroBatch:
    """The work of one device for a micro-batch, part by part; every method returns seconds.

    Attributes:
      element: bytes of the compute dtype; `gathered`: of the dtype of all-gathers.
      tokens: of a micro-batch on this rank of `context`, made of `samples`.
      kernel: of attention; `flash`: whether it writes no scores.
      stream: elements of a micro-batch's stream on all ranks of `model`.
      looped: whether the layers run in a loop.
      end: the head.
      layers: one of each kind.
    """

    def __init__(self, config: Config, rates: Rates, software: FrameworkModel):
        self.config, self.rates, self.software = config, rates, software
        model, mesh = config.model, config.mesh
        self.overlap = software.overlap or mjax_overlap(config, jax.__version_info__)
        self.element, self.float8 = DTYPE_BYTES[config.precision.compute], uses_float8(config.precision)
        self.gathered = 1 if self.float8 else self.element
        self.samples = config.train.micro_batch
        self.tokens = self.samples * model.sequences * model.sequence // mesh.context
        self.kernel = attention_on_gpu(config, rates.gpu.compute_capability)
        self.flash = software.flash and self.kernel in FUSED
        self.looped = software.sums_stacks and not is_unrolled(config, on_gpu=True)
        kinds = trace.layer_kinds(config)
        self.stream = self.samples * trace.layer_forward(kinds[0][1]).elements
        self.end = trace.head(kinds[0][1])
        # One all-reduce of a stream over `model`; with sequence parallelism a reduce-scatter and an all-gather.
        self.layer_scatter = rates.gather(mesh.model, 1, self.element * self.stream)
        self.layer_gather = rates.gather(mesh.model, 1, self.gathered * self.stream)
        self.layer_sum = self.layer_scatter + self.layer_gather
        if not mesh.splits_tokens:
            self.layer_sum = rates.sum(mesh.model, 1, self.element * self.stream)
        self.layers = [LayerTime(self, sum(rows.counts), spec) for rows, spec in kinds]

    def expose_zero(self, seconds: float, work: float) -> float:
        """Exposed seconds of ZeRO's collectives that take `seconds` and overlap `work`."""
        return seconds - min(self.overlap.weights * seconds, work)

    @property
    def head_seconds(self) -> float:
        """The seconds of the embedding and the head, with their collectives."""
        return self.head() + self.head_sums()

    # --- Embedding and head -------------------------------------------------------------------------------------------

    def head(self) -> float:
        """Embedding, logits and loss of a micro-batch, forward and backward."""
        embedding = self.rates.traffic(9 * self.element * self.stream, 3)
        if not self.end.products:
            return embedding
        moved = self.rates.traffic(*self.layers[0].traffic.head)
        products = [self.rates.product(self.tokens, product.n, product.k) for product in self.end.products]
        seconds = embedding + moved + (3 if self.end.trained else 2) * sum(products)
        if (chunks := self.config.train.loss_chunks) > 1:  # as many bytes, and the logits once more
            losses = len(self.end.logit_products)
            seconds += losses * (products[-1] + self.rates.traffic(0, CHUNK_LAUNCHES * chunks))
        return seconds

    def head_sums(self) -> float:
        """Collectives over `model` of the embedding's output and of the logits' gradient.

        With a pipeline they are on different stages, and the embedding's overlaps the work of all other stages.
        """
        seconds = 2 * self.layer_scatter if self.config.mesh.splits_tokens else self.layer_sum
        return seconds * (2 if self.config.mesh.pipe == 1 else 1)


class _StepTime:
    """The rest of a step of one device; every method returns seconds.

    Attributes:
      work: of a micro-batch.
      weights: of a device; `trained`: those that have gradients, moments and master weights.
    """

    def __init__(self, config: Config, work: _MicroBatch):
        self.config, self.work, self.rates, self.software = config, work, work.rates, work.software
        self.element, self.gathered = work.element, work.gathered
        self.weights = device_weights(config.model, config.mesh)
        self.trained = device_weights(config.model, config.mesh, trained=True)
        self.rows = stack_rows(config.model, config.mesh)

    @cached_property
    def passes(self) -> list[Counter[str]]:
        """`LayerTime.passes`, summed over the layers of the last stage."""
        passes, last = [Counter(), Counter(), Counter()], self.config.mesh.pipe - 1
        for rows, layer in zip(self.rows, self.work.layers, strict=True):
            for total, parts in zip(passes, layer.passes, strict=True):
                for part, seconds in parts.items():
                    total[part] += sum(rows.counts[last :: last + 1]) * seconds
        return passes

    def chunk_times(self) -> list[float]:
        """The seconds of the passes of each virtual stage, without the head."""
        layers = [layer.seconds for layer in self.work.layers]
        return [sum(map(mul, numbers, layers)) for numbers in zip(*(rows.counts for rows in self.rows), strict=True)]

    def group_times(self) -> list[float]:
        """The seconds of the passes of each group of layers, which stages cannot split."""
        model, seconds = self.config.model, Counter()
        for stack, layer in zip(layer_stacks(model), self.work.layers, strict=True):
            seconds[stack.run] += len(stack.kinds) * layer.seconds
        runs = model.pattern.runs(model.layers)
        return [seconds[run] for run, (_, count) in enumerate(runs) for _ in range(count)]

    def seconds(self, m: int) -> dict[str, float]:
        """The parts of a step of `m` micro-batches on each replica."""
        mesh, work = self.config.mesh, self.work
        seconds = {part: m * sum(spent[part] for spent in self.passes) for part in NAMES}
        seconds["head"] += m * work.head()
        seconds["model"] += m * work.head_sums()
        seconds["data"] += self._sums_over_data(m)
        seconds["optimizer"] += self.optimizer(m)
        if self.config.optimizer.name == "muon":
            for axis, exchanged in muon_exchange_seconds(self.config, self.rates).items():
                seconds["model" if axis == MODEL else "data"] += exchanged
        if mesh.pipe > 1:
            message = self._message()
            # One activation and one gradient of each chunk; and two for each stage to fill.
            seconds["pipe"] += m * 2 * mesh.virtual_stages * message
            seconds["bubble"] += idle_seconds(mesh, m, self.chunk_times(), work.head_seconds)
            seconds["bubble"] += (mesh.pipe - 1) * 2 * message
        return seconds

    def mean_over_run(self) -> float:
        """Mean of a step over the run."""
        config, train = self.config, self.config.train
        if train.batch_rampup is None or train.steps < 1:
            return sum(self.seconds(config.micro_batches).values())
        replicas, sizes = config.mesh.data * train.micro_batch, BatchSizes.from_config(config)
        return (
            sum(n * sum(self.seconds(size // replicas).values()) for n, size in sizes.stretches(train.steps))
            / train.steps
        )

    def _message(self) -> float:
        """An activation, or its gradient, to the next stage; all ranks of a server send at the same time."""
        mesh, whole = self.config.mesh, self.element * self.work.stream
        split = mesh.splits_tokens or self.software.splits_messages
        sent = self.rates.send(mesh.pipe, mesh.model * copies(mesh), whole / (mesh.model if split else 1))
        if split and not mesh.splits_tokens:
            sent += self.rates.gather(mesh.model, 1, whole)
        return sent

    def _sums_over_data(self, m: int) -> float:
        """Gradient all-reduce, or reduce-scatter and parameter all-gather; for the embedding also over `pipe`."""
        mesh, rates, software, trained = self.config.mesh, self.rates, self.software, self.trained
        stage = mesh.model * copies(mesh)

        def sent_bytes(weights: float, gradients: float) -> float:
            """Bytes of an all-gather of weights and a reduce-scatter of gradients."""
            return self.element * weights + software.gradient_bytes * gradients

        seconds = rates.gather(mesh.pipe, stage, sent_bytes(self.weights.shared, trained.shared))
        seconds += rates.gather(mesh.pipe, stage, sent_bytes(self.weights.exchanged, trained.exchanged))
        shared, trained_shared = self.weights.shared / mesh.pipe, trained.shared / mesh.pipe
        weights = shared if mesh.zero == 3 else self.weights.layers + shared
        gradients = trained_shared if mesh.zero == 3 else trained.layers + trained_shared
        if not mesh.zero:
            whole = replica_collective(mesh, rates.sum, software.gradient_bytes, gradients, trained.experts)
            # A traced program all-reduces the gradients of several micro-batches after the loop over them.
            if not self.work.overlap.gradients or self.work.looped or (m > 1 and software.sums_stacks):
                return seconds + whole
            # It all-reduces each stack as one array; the last of them and the embedding overlap nothing.
            last = (trained_shared + trained.largest) * software.sums_stacks
            exposed = rates.sum(copies(mesh), mesh.model, software.gradient_bytes * last)
            return seconds + max(exposed, whole - sum(sum(parts.values()) for parts in self.passes[1:]))
        narrow = (self.element - self.gathered) * (weights - shared)  # fewer bytes
        seconds += rates.sum(mesh.replicate, stage // mesh.replicate, software.gradient_bytes * trained.stored)
        experts = 0.0 if mesh.zero == 3 else sent_bytes(self.weights.experts, trained.experts)
        return seconds + replica_collective(mesh, rates.gather, 1, sent_bytes(weights, gradients) - narrow, experts)

    def optimizer(self, m: int) -> float:
        """Accumulation of the gradients of `m` micro-batches, and the update of this device's shards."""
        mesh, trained = self.config.mesh, self.trained
        weights = trained.layers + trained.shared / mesh.pipe
        if mesh.zero == 3:
            weights = (weights + (mesh.expert - 1) * trained.experts) / shards(mesh)
        added = m * weights if m > 1 else 0.0
        moved = self.software.optimizer_bytes * trained.stored + self.software.accumulate_bytes * added
        if self.config.optimizer.name == "adamw":
            return self.rates.traffic(moved, 20)
        # No second moment is read and written, 8 bytes; momentum and result are, before and after the matmuls.
        moved += (4 * muon_width(self.config) - 8) * self.weights.matrices
        return self.rates.traffic(moved, 20) + muon_iteration_seconds(self.config, self.rates)


# --- Muon, and the pipeline: closed forms of its schedules (`parallel/pipeline_schedules.py`) -------------------------


def muon_iteration_seconds(config: Config, rates: Rates) -> float:
    """Seconds in which the busiest device orthogonalizes its matrices."""
    rates = Rates(rates.gpu, rates.calibration, ITERATE_IN[config.precision.compute])
    return sum(
        rates.product(product.m, product.n, product.k, product.batch)
        for matrices in muon_matrices(config.model, config.mesh)
        for product in muon_products(matrices.count_per_rank, *matrices.matrix_shape)
    )


def muon_exchange_seconds(config: Config, rates: Rates) -> dict[str, float]:
    """Seconds in which matrices are resharded and results sent back, by mesh axis. An axis that splits a matrix has two
    all-to-alls, each with the bytes of an all-gather; any other axis an all-gather or all-reduce of results.
    """
    sizes, seconds = axes.sizes(config.mesh), dict.fromkeys(axes.NAMES, 0.0)
    for matrices in muon_matrices(config.model, config.mesh):
        count, part = matrices.num_matrices, math.prod(matrices.matrix_shape)  # elements of a matrix that a device has
        part //= math.prod(sizes[axis] for axis, dim in matrices.exchanges if dim is not None)
        for axis, dim in matrices.exchanges:
            ranks, stride = sizes[axis], math.prod(sizes[inner] for inner in axes.NAMES[axes.NAMES.index(axis) + 1 :])
            share = -(-count // ranks)
            moved = 2 * count if dim is None and ranks > count else share * ranks
            times = 1 if dim is None else 2
            seconds[axis] += times * rates.gather(ranks, stride, moved * part * muon_width(config))
            count, part = share, part * (1 if dim is None else ranks)
    return seconds


def idle_seconds(mesh: MeshConfig, m: int, chunks: Sequence[float], head: float) -> float:
    """Return the last stage's idle seconds in a step, with these seconds of each virtual stage and of the head.

    In lock-step every tick takes as long as its slowest stage. Of m V + p − 1 ticks m have the head. Equal stages give
    `PipelineSchedule.makespan` in closed form.
    """
    slowest, busy = max(chunks), sum(chunks[mesh.pipe - 1 :: mesh.pipe]) + head
    ticks = m * max(slowest, chunks[-1] + head) + (m * (mesh.virtual_stages - 1) + mesh.pipe - 1) * slowest
    return ticks - m * busy


def balance_stages(costs: Sequence[float], stages: int, head: float) -> list[int]:
    """Divide groups of layers among stages, so that the slowest takes as little time as possible.

    Args:
      costs: seconds of each group.
      stages: virtual stages.
      head: seconds of the head, which the last stage runs too.

    Returns:
      For each stage the end of its groups, near its share of all seconds.
    """
    before = [0.0, *accumulate(costs)]
    low, high = head, before[-1] + head

    def earliest_ends(limit: float) -> list[int]:
        """The end of each stage if later stages take as many groups as the limit allows."""
        ends = [len(costs)]
        for room in (limit - head, *[limit] * (stages - 2)):
            ends.append(bisect_left(before, before[ends[-1]] - room - 1e-9 * limit))
        return ends[::-1]

    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if before[earliest_ends(middle)[0]] <= middle else (middle, high)
    ends, start = earliest_ends(high), 0
    for stage, earliest in enumerate(ends[:-1]):
        share = (stage + 1) / stages * (before[-1] + head)
        latest = bisect_right(before, before[start] + (1 + 1e-9) * high)
        ends[stage] = start = min(range(max(start, earliest), latest), key=lambda end: abs(before[end] - share))
    return ends


# --- The time section of a plan ---------------------------------------------------------------------------------------


def time_section(config: Config, gpu: Gpu, calibration: Calibration | None = None) -> Section:
    """The plan section on the time of a step and of the run.

    Args:
      config: validated.
      gpu: the GPU.
      calibration: its rates; by default `default_calibration`.

    Raises:
      UsageError: the GPU has no peak for the config's compute dtype.
    """
    calibration = calibration or default_calibration(gpu)
    step, devices, compute = predict_time(config, gpu, calibration), config.mesh.devices, config.precision.compute
    peak, of_bf16 = gpu.mfu_peak(compute), " of bf16" if uses_float8(config.precision) else ""
    rates = (*RATES, "float8") if compute == "fp8" else RATES
    run_seconds, tokens, between = config.train.steps * step.mean, run_tokens(config), None
    if step.error is not None and step.error < 1:  # limits of the measured time
        between = step.total / (1 + step.error), step.total / (1 - step.error)
    values = {
        "gpu": gpu.name,
        "seconds": step.total,
        "error": step.error,
        "between": between,
        "caveats": list(step.caveats),
        "parts": step.parts,
        "model_tflops": step.model_tflops,
        "hardware_tflops": hardware_flops(config) / step.total / devices / 1e12,
        "peak_tflops": peak / 1e12,
        "mfu": step.mfu,
        "mfu_causal": model_flops(config, causal=True) / (peak * devices * step.total),
        "tokens_per_second": config.train.global_batch * config.model.sequences * config.model.sequence / step.total,
        "run": {"tokens": tokens, "seconds": run_seconds},
        "not_measured": [name for name in rates if gpu.name != calibration.gpu or name not in calibration.measured],
    }
    names = part_names(config.mesh)
    spent = {names[part]: step.parts[part] for part in NAMES if step.parts[part] > 0} | {"step": step.total}
    cells = [(name, f"{1e3 * seconds:,.1f}", f"{seconds / step.total:.1%}") for name, seconds in spent.items()]
    limits = f": {1e3 * between[0]:,.1f} to {1e3 * between[1]:,.1f} ms" if between else ""
    causal = f" ({values['mfu_causal']:.1%} counting half of causal attention)" if config.model.causal else ""
    rows = {
        "calibrated on": calibration.source,
        "unmeasured rates": ", ".join(values["not_measured"]) or "none",
        "TFLOP/s/GPU": f"{step.model_tflops:,.1f} model, {values['hardware_tflops']:,.1f} with recomputation",
    }
    answer = {
        "step": f"{1e3 * step.total:,.1f} ms ({error_bar(step.error)}{limits})",
        "bottlenecks": bottlenecks(step, config.mesh),
        "MFU": f"{step.mfu:.1%} of {peak / 1e12:,g} TFLOP/s{of_bf16}{causal}",
        "tokens/s": f"{values['tokens_per_second']:,.0f} ({values['tokens_per_second'] / devices:,.0f} per GPU)",
        "run": f"{config.train.steps:,} steps, {tokens:,} tokens: {run_seconds / 86_400:,.3g} days, "
        f"{run_seconds * devices / 3600:,.0f} GPU-hours",
        **({"caveats": "\n".join(step.caveats)} if step.caveats else {}),
    }
    lines = [*format_table(("", "ms", "share"), cells), *format_rows(rows)]
    return Section(f"Step time on {gpu.name} (predicted)", values, lines, answer)


def part_names(mesh: MeshConfig) -> dict[str, str]:
    """Names of the parts of a step on a mesh."""
    return NAMES | ({"data": "gradient reduce-scatter and parameter all-gather (exposed)"} if mesh.zero else {})


def bottlenecks(step: StepTime, mesh: MeshConfig) -> str:
    """The two longest parts of a step besides the matmuls, with their shares."""
    parts = sorted((-seconds, part) for part, seconds in step.parts.items() if seconds > 0 and part != "matmul")[:2]
    shares = (f"{part_names(mesh)[part]} {-seconds / step.total:.0%}" for seconds, part in parts)
    return ", ".join(shares).replace(" (exposed)", "")


def run_tokens(config: Config) -> int:
    """Tokens of all steps of the run."""
    samples = BatchSizes.from_config(config).samples_before(config.train.steps)
    return samples * config.model.sequences * config.model.sequence
