"""GPUs and their data-sheet values, each with its source. The only table of peaks.

These are the manufacturer's numbers. The rates of programs are measured (`mjax/planner/time.py`).
`run`, which divides by the peaks, and `planner`, which predicts times, both read it. No JAX is imported.

A server is described as NVIDIA builds it: its GPUs, the link between them, and the network cards they share. For other
servers use --devices-per-node and --network of `mjax plan`.

To add a GPU, add a row to gpus.txt: its name in JAX, printed by `python -c "import jax;
print(jax.devices()[0].device_kind)"`, and its dense peaks, without sparsity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mjax.errors import UsageError, either, suggestion
from mjax.utils.figures import GB, MIB

# Share of a GPU's memory that mjax gives to XLA (`launch.claim_gpu_memory`): the rest is for CUDA, cuBLAS and NCCL.
USABLE_FRACTION = 0.9


@dataclass(frozen=True)
class Gpu:
    """A GPU model and the server it comes in.

    Attributes:
      name: for `--gpu`.
      device_kinds: its names in JAX, `jax.devices()[0].device_kind`.
      compute_capability: NVIDIA's number for its instruction set (developer.nvidia.com/cuda-gpus): 7.0 Volta, 8.0
        Ampere, 9.0 Hopper, 10.0 Blackwell.
      multiprocessors: of the GPU; the tiles of a matmul are distributed over them.
      memory_bytes: memory as reported by the driver.
      peak_tflops: dense peak of matmuls in TFLOP/s by compute dtype. fp32 is TF32 if the GPU has it, which XLA
        uses for float32 matmuls there; fp8 is present if the GPU has it.
      memory_bandwidth: bytes per second, to and from its memory.
      gpus_per_node: GPUs per server.
      node_bandwidth: bytes per second, in one direction, between one GPU and the others of its server.
      network_bandwidth_per_node: bytes per second, in one direction, between servers: all network cards of a server.
      node_latency, network_latency: seconds per message from GPU to GPU, within a server and between servers.
      host_bandwidth: bytes per second, in one direction, between one GPU and the memory of its server: what its slot
        carries. Two GPUs that share a PCIe switch share its way to the processor, which no data sheet counts.
      host_memory_per_node: bytes of memory of a server; None if its data sheet does not fix it.
    """

    name: str
    device_kinds: tuple[str, ...]
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: float
    peak_tflops: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth_per_node: float
    host_bandwidth: float
    host_memory_per_node: float | None
    gpus_per_node: int = 8
    node_latency: float = 3.4e-6
    network_latency: float = 14e-6

    @property
    def usable_bytes(self) -> float:
        """Memory that XLA may allocate, unless the environment sets another share."""
        return USABLE_FRACTION * self.memory_bytes

    def with_server(self, gpus: int | None = None, network: float | None = None) -> Gpu:
        """The same GPU in another server.

        Args:
          gpus: per server; by default the usual number. The server's memory is in proportion.
          network: gigabits per second of all network cards of a server; by default in proportion to its GPUs.
        """
        gpus = gpus or self.gpus_per_node
        share = gpus / self.gpus_per_node
        bandwidth = share * self.network_bandwidth_per_node if network is None else network * GB / 8
        memory = None if self.host_memory_per_node is None else share * self.host_memory_per_node
        return replace(self, gpus_per_node=gpus, network_bandwidth_per_node=bandwidth, host_memory_per_node=memory)

    @property
    def host_bytes(self) -> float | None:
        """Memory of a server for each of its GPUs; None if it is not known."""
        return None if self.host_memory_per_node is None else self.host_memory_per_node / self.gpus_per_node

    def peak(self, compute: str) -> float | None:
        """Peak in FLOP/s for a compute dtype of the config, or None if the table has none."""
        tflops = self.peak_tflops.get(compute)
        return None if tflops is None else tflops * 1e12

    def mfu_peak(self, compute: str) -> float | None:
        """Peak in FLOP/s that an MFU is a share of; for fp8 the bf16 peak, because attention and head multiply in
        bf16."""
        return self.peak("bf16" if compute == "fp8" else compute)

    @property
    def half_precision(self) -> str:
        """The 16-bit compute dtype for this GPU: bf16, or fp16 without bf16."""
        return "bf16" if "bf16" in self.peak_tflops else "fp16"


# Sources: NVIDIA's data sheets of each GPU and of its server. Memory is the total that nvidia-smi prints, slightly
# below the round number. All latencies: NCCL's model of its ring with the protocol Simple (NVIDIA/nccl,
# src/graph/tuning.cc, hwLat). Links are one way, and data sheets give both ways; those of PCIe are of 16 lanes, 15.75,
# 31.5 and 63 GB/s without the encoding of the bits. Data sheets from H100 on have peaks with sparsity, twice as large.
#
#   v100, v100-16gb   January 2020: 125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways. DGX-1: four 100 Gb/s network cards
#   v100-dgx2         DGX-2: 2 PFLOP/s on 16 GPUs, eight 100 Gb/s network cards, NVSwitch
#   v100-dgx2h        arXiv 1909.08053, section 5: 39 TFLOP/s are 30% of the peak; 16 GPUs and eight InfiniBand cards a
#                     server, 300 GB/s both ways through NVSwitch, 100 GB/s between servers. Memory: clock 958 MHz ×
#                     4,096 bits × 2, 981 GB/s
#   a100              June 2021: 312 TFLOP/s of 16 bits, 156 of TF32; 2,039 GB/s. DGX A100 640GB: NVLink 600 GB/s both
#                     ways, eight 200 Gb/s network cards for compute
#   a100-40gb         1,555 GB/s. DGX A100 320GB
#   a100-40gb-pcie    no reference server: eight GPUs on PCIe and one 200 Gb/s network card are assumed
#   a100-pcie         1,935 GB/s. No reference server, as above
#   h100              2023: 1,978.9 TFLOP/s of FP8, 989.4 of 16 bits, 494.7 of TF32, 3.35 TB/s. DGX H100: NVLink 900
#                     GB/s both ways, eight 400 Gb/s network cards
#   h100-pcie         2022: 1,513 TFLOP/s of FP8, 756.5 of 16 bits, 378 of TF32, 2 TB/s. No reference server, as above
#   h200              2024: the products of H100, 4.8 TB/s, NVLink 900 GB/s
#   b200              HGX B200, 2024, for eight and with sparsity: 72 PFLOP/s of FP8, 36 of 16 bits, 18 of TF32. DGX
#                     B200: 64 TB/s on eight GPUs, NVLink 14.4 TB/s both ways, eight 400 Gb/s network cards
#
# Columns of gpus.txt: fields of `Gpu`, in the units below, and peaks in TFLOP/s by compute dtype; `-` is not known.
UNITS = {"memory_bytes": MIB, "host_memory_per_node": GB}
UNITS |= dict.fromkeys(("memory_bandwidth", "node_bandwidth", "network_bandwidth_per_node", "host_bandwidth"), GB)


def _read_gpus() -> Iterator[Gpu]:
    columns, *rows = Path(__file__).with_name("gpus.txt").read_text(encoding="utf-8").splitlines()
    for row in rows:
        cells = dict(zip(columns.split(), row.split(maxsplit=14), strict=True))
        name, capability, kinds = (cells.pop(text) for text in ("name", "compute_capability", "device_kinds"))
        values: dict[str, Any] = {
            column: None if cell == "-" else float(cell) * UNITS.get(column, 1) for column, cell in cells.items()
        }
        peaks = {kind: peak for kind in ("bf16", "fp16", "fp32", "fp8") if (peak := values.pop(kind))}
        counts = {column: int(values[column]) for column in ("multiprocessors", "gpus_per_node")}
        version = tuple(map(int, capability.split(".")))
        yield Gpu(name, tuple(kinds.split(",")), version, peak_tflops=peaks, **values | counts)


GPUS = tuple(_read_gpus())


def gpu_named(name: str) -> Gpu:
    """The GPU for `--gpu name`.

    Raises:
      UsageError: there is none of this name.
    """
    for gpu in GPUS:
        if name.lower() == gpu.name or name in gpu.device_kinds:
            return gpu
    names = [gpu.name for gpu in GPUS]
    raise UsageError(f"--gpu {name} is not known; {suggestion(name, names, f'use {either(names)}')}")


def find_gpu(device_kind: str) -> Gpu | None:
    """The GPU with this device kind in JAX, or None if the table has none."""
    return next((gpu for gpu in GPUS if device_kind in gpu.device_kinds), None)
