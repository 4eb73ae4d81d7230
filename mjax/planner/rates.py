"""Seconds of a kernel or a collective on a GPU: the data sheet times the calibration."""

from __future__ import annotations

import math

from mjax.errors import UsageError, either
from mjax.hardware import Gpu
from mjax.planner.calibration import Calibration

# Bytes per element of each dtype.
WIDTHS = {"fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


class Rates:
    """Seconds of kernels and collectives on a GPU: the data sheet times the calibration. Seconds, bytes, FLOPs.

    Attributes:
      gpu, calibration: the two factors.
      compute: dtype of the products.
      peak: FLOP/s.

    Raises:
      UsageError: no peak is known for this dtype.
    """

    def __init__(self, gpu: Gpu, calibration: Calibration, compute: str):
        if compute == "fp8":
            raise UsageError(
                "the time of --precision.compute fp8 cannot be predicted; use --precision.compute bf16, or --compile "
                "for a roofline"
            )
        self.gpu, self.calibration, self.compute, self.peak = gpu, calibration, compute, gpu.peak(compute)
        if self.peak is None:
            known = either([dtype for dtype in gpu.peak_tflops if dtype != "fp8"])
            raise UsageError(
                f"no {compute} peak is known for {gpu.name}, so its time cannot be predicted; "
                f"use --precision.compute {known}, or add the peak in mjax/hardware.py"
            )

    def product(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """[m, k] × [k, n], `batch` times in one kernel."""
        half = self.calibration.half
        rate = self.peak * self.calibration.matmul * (m / (m + half)) * (n / (n + half)) * (k / (k + half))
        moved = batch * WIDTHS[self.compute] * (m * k + k * n + m * n)
        return max(2 * batch * m * n * k / rate, self._bytes(moved)) + self.calibration.launch

    def flash(self, flops: float) -> float:
        """A kernel of flash attention."""
        return flops / (self.peak * self.calibration.attention) + self.calibration.launch

    def traffic(self, moved: float, kernels: float = 1) -> float:
        """Memory-bound kernels that read and write `moved` bytes in total."""
        return self._bytes(moved) + kernels * self.calibration.launch

    def gather(self, ranks: int, stride: int, whole: float) -> float:
        """All-gather or reduce-scatter of `whole` bytes on a ring of `ranks` devices, `stride` apart."""
        if ranks == 1:
            return 0.0
        bandwidth, latency = self._link(ranks, stride)
        sent = (ranks - 1) / ranks * whole
        return sent / bandwidth + latency * math.log2(ranks) + self.calibration.collective

    def sum(self, ranks: int, stride: int, whole: float) -> float:
        """All-reduce of `whole` bytes: a reduce-scatter and an all-gather in one kernel."""
        if ranks == 1:
            return 0.0
        return 2 * self.gather(ranks, stride, whole) - self.calibration.collective

    def send(self, ranks: int, stride: int, sent: float) -> float:
        """Every device sends `sent` bytes to the one `stride` away, on an axis of `ranks`."""
        bandwidth, latency = self._link(ranks, stride)
        return sent / bandwidth + latency + self.calibration.collective

    def _bytes(self, moved: float) -> float:
        return moved / (self.gpu.memory_bandwidth * self.calibration.memory)

    def _link(self, ranks: int, stride: int) -> tuple[float, float]:
        """Bytes per second and latency of the slowest link of a ring.

        A ring that leaves its server does so once in each direction, and `stride` parallel rings in a server share its
        network cards.
        """
        gpu, inside = self.gpu, self.gpu.node_bandwidth * self.calibration.node
        if ranks * stride <= gpu.gpus_per_node:
            return inside, gpu.node_latency
        rings = min(stride, gpu.gpus_per_node)
        network = gpu.network_bandwidth_per_node * self.calibration.network / rings
        return min(inside, network), gpu.network_latency
