"""Seconds of a kernel or a collective on a GPU: the data sheet times the calibration."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from mjax.cluster.hardware import Gpu
from mjax.errors import UsageError, either
from mjax.planner.calibration import Calibration

# Bytes per element of each dtype.
WIDTHS = {"fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# Tiles of cuBLAS's products, rows × columns of the result, and the rate of each against the largest.
TILES = (
    (128, 256, 1.0), (256, 128, 1.0), (192, 128, 1.0), (128, 192, 1.0), (256, 192, 1.0), (192, 256, 1.0),
    (128, 128, 0.92), (64, 256, 0.88), (64, 128, 0.75),
)  # fmt: skip
# Latency of a message of NCCL's tree with protocol LL against one of its ring with protocol Simple, within a server and
# between servers (NVIDIA/nccl, src/graph/tuning.cc).
LOW_LATENCY = (0.6 / 3.4, 5.0 / 14.0)
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

        A head that is no multiple of 64 runs as the next one and wastes the rest.
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

    def agree(self, ranks: int, stride: int) -> float:
        """All-reduce of one number: NCCL's tree with its low-latency protocol, whose messages take less time than those
        of a ring."""
        if ranks == 1:
            return 0.0
        in_server = max(1, min(ranks, self.gpu.gpus_per_node // stride))
        levels = math.ceil(math.log2(math.ceil(ranks / in_server)))
        within = (in_server - 1) * LOW_LATENCY[0] * self.gpu.node_latency
        return 2 * (within + levels * LOW_LATENCY[1] * self.gpu.network_latency) + self.calibration.collective

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
    share = float(np.interp(math.log(positions), *zip(*lengths, strict=True)))
    return share * (1.0 if nearest == head else head / padded)
