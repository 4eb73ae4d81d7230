"""GPUs and their data-sheet values, each with its source. The only table of peaks.

These are the manufacturer's numbers. The rates of programs are measured (`mjax/planner/time.py`).
The table is outside `training`, which divides by the peaks, and `planner`, which predicts times with all of it, because
both read it. No JAX is imported.

A server is described as NVIDIA builds it: its GPUs, the link between them, and the network cards they share. For other
servers use --devices-per-node and --network of `mjax plan`.

To add a GPU, define a `Gpu` and add it to `GPUS`: its name in `device_kinds` is what `python -c "import jax;
print(jax.devices()[0].device_kind)"` prints, and its peaks are the dense ones, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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
      multiprocessors: of the GPU; the tiles of a matrix product are dealt out among them.
      memory_bytes: memory as reported by the driver.
      peak_tflops: dense peak of matrix products in TFLOP/s by compute dtype. fp32 is TF32 if the GPU has it, which XLA
        uses for float32 products there; fp8 is there if the GPU has it.
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

    def in_server(self, gpus: int | None = None, network: float | None = None) -> Gpu:
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
        """Peak in FLOP/s that an MFU is a share of; for fp8 that of bf16, in which attention and head multiply.

        So a step that is twice as fast has twice the MFU, in either.
        """
        return self.peak("bf16" if compute == "fp8" else compute)

    @property
    def sixteen_bits(self) -> str:
        """The 16-bit compute dtype for this GPU: bf16, or fp16 without bf16."""
        return "bf16" if "bf16" in self.peak_tflops else "fp16"


def _peaks(sixteen_bit: float, fp32: float, bf16: bool = True, fp8: float | None = None) -> dict[str, float]:
    """Peaks by compute dtype; V100 has no bf16, and GPUs before Ada and Hopper have no float8."""
    peaks = {"fp16": sixteen_bit, "fp32": fp32}
    peaks = {"bf16": sixteen_bit, **peaks} if bf16 else peaks
    return peaks if fp8 is None else {**peaks, "fp8": fp8}


# Sources: NVIDIA's data sheets of each GPU and of its server, named above it. Memory is the total that nvidia-smi
# prints, slightly below the round number. All latencies: NCCL's own model of its ring with the protocol Simple
# (NVIDIA/nccl, src/graph/tuning.cc, hwLat). Links are one way, and data sheets give both ways; those of PCIe are of 16
# lanes, 15.75, 31.5 and 63 GB/s without the encoding of the bits.
_PCIE_3, _PCIE_4, _PCIE_5 = 16 * GB, 32 * GB, 64 * GB

# V100, January 2020: 125 TFLOP/s, 900 GB/s, NVLink 300 GB/s both ways. DGX-1: four 100 Gb/s network cards.
V100 = Gpu(
    name="v100",
    device_kinds=("Tesla V100-SXM2-32GB",),
    compute_capability=(7, 0),
    multiprocessors=80,
    memory_bytes=32_510 * MIB,
    peak_tflops=_peaks(125.0, 15.7, bf16=False),
    memory_bandwidth=900 * GB,
    node_bandwidth=150 * GB,
    network_bandwidth_per_node=50 * GB,
    host_bandwidth=_PCIE_3,
    host_memory_per_node=512 * GB,
)
V100_16GB = replace(V100, name="v100-16gb", device_kinds=("Tesla V100-SXM2-16GB",), memory_bytes=16_160 * MIB)
# DGX-2: 2 PFLOP/s on 16 GPUs, eight 100 Gb/s network cards, NVSwitch.
V100_DGX2 = replace(
    V100,
    name="v100-dgx2",
    device_kinds=("Tesla V100-SXM3-32GB",),
    memory_bandwidth=981 * GB,
    gpus_per_node=16,
    network_bandwidth_per_node=100 * GB,
    host_memory_per_node=1500 * GB,
)
# arXiv 1909.08053, section 5: 39 TFLOP/s are 30% of the peak; 16 GPUs and eight InfiniBand cards a server, 300 GB/s
# both ways through NVSwitch, 100 GB/s between servers. Memory: clock 958 MHz × 4,096 bits × 2, 981 GB/s.
V100_DGX2H = replace(
    V100_DGX2,
    name="v100-dgx2h",
    device_kinds=("Tesla V100-SXM3-32GB-H",),
    peak_tflops=_peaks(130.0, 16.3, bf16=False),
)
# A100, June 2021: 312 TFLOP/s of 16 bits, 156 of TF32; 2,039 GB/s. DGX A100 640GB: NVLink 600 GB/s both ways, eight 200
# Gb/s network cards for compute.
A100 = Gpu(
    name="a100",
    device_kinds=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    compute_capability=(8, 0),
    multiprocessors=108,
    memory_bytes=81_251 * MIB,
    peak_tflops=_peaks(312.0, 156.0),
    memory_bandwidth=2039 * GB,
    node_bandwidth=300 * GB,
    network_bandwidth_per_node=200 * GB,
    host_bandwidth=_PCIE_4,
    host_memory_per_node=2000 * GB,
)
# A100 40GB: 1,555 GB/s. DGX A100 320GB.
A100_40GB = replace(
    A100,
    name="a100-40gb",
    device_kinds=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    memory_bytes=40_536 * MIB,
    memory_bandwidth=1555 * GB,
    host_memory_per_node=1000 * GB,
)
# No reference server: eight GPUs on PCIe and one 200 Gb/s network card are assumed.
A100_40GB_PCIE = replace(
    A100_40GB,
    name="a100-40gb-pcie",
    device_kinds=("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
    node_bandwidth=32 * GB,
    network_bandwidth_per_node=25 * GB,
    host_memory_per_node=None,
)
# A100 80GB PCIe: 1,935 GB/s.
A100_PCIE = replace(
    A100_40GB_PCIE,
    name="a100-pcie",
    device_kinds=("NVIDIA A100 80GB PCIe",),
    memory_bytes=81_251 * MIB,
    memory_bandwidth=1935 * GB,
)
# H100, 2023 (with sparsity twice): 1,978.9 TFLOP/s of FP8, 989.4 of 16 bits, 494.7 of TF32, 3.35 TB/s. DGX H100: NVLink
# 900 GB/s both ways, eight 400 Gb/s network cards.
H100 = Gpu(
    name="h100",
    device_kinds=("NVIDIA H100 80GB HBM3",),
    compute_capability=(9, 0),
    multiprocessors=132,
    memory_bytes=81_559 * MIB,
    peak_tflops=_peaks(989.4, 494.7, fp8=1978.9),
    memory_bandwidth=3352 * GB,
    node_bandwidth=450 * GB,
    network_bandwidth_per_node=400 * GB,
    host_bandwidth=_PCIE_5,
    host_memory_per_node=2000 * GB,
)
# H100 PCIe, 2022: 1,513 TFLOP/s of FP8, 756.5 of 16 bits, 378 of TF32, 2 TB/s. No reference server, as above.
H100_PCIE = replace(
    H100,
    name="h100-pcie",
    device_kinds=("NVIDIA H100 PCIe",),
    multiprocessors=114,
    peak_tflops=_peaks(756.5, 378.0, fp8=1513.0),
    memory_bandwidth=2039 * GB,
    node_bandwidth=64 * GB,
    network_bandwidth_per_node=25 * GB,
    host_memory_per_node=None,
)
# H200, 2024: the products of H100, 4.8 TB/s, NVLink 900 GB/s.
H200 = replace(
    H100,
    name="h200",
    device_kinds=("NVIDIA H200",),
    memory_bytes=143_771 * MIB,
    memory_bandwidth=4800 * GB,
)
# HGX B200, 2024, for eight and with sparsity: 72 PFLOP/s of FP8, 36 of 16 bits, 18 of TF32. DGX B200: 64 TB/s on eight
# GPUs, NVLink 14.4 TB/s both ways, eight 400 Gb/s network cards.
B200 = replace(
    H100,
    name="b200",
    device_kinds=("NVIDIA B200",),
    compute_capability=(10, 0),
    multiprocessors=148,
    memory_bytes=183_359 * MIB,
    peak_tflops=_peaks(2250.0, 1125.0, fp8=4500.0),
    memory_bandwidth=8000 * GB,
    node_bandwidth=900 * GB,
    host_memory_per_node=None,
)
GPUS = (V100_16GB, V100, V100_DGX2H, V100_DGX2, A100_40GB, A100, A100_40GB_PCIE, A100_PCIE, H100, H100_PCIE, H200, B200)


def gpu_named(name: str) -> Gpu:
    """The GPU for `--gpu name`.

    Raises:
      UsageError: there is none of this name.
    """
    for gpu in GPUS:
        if name.lower() == gpu.name or name in gpu.device_kinds:
            return gpu
    names = [gpu.name for gpu in GPUS]
    raise UsageError(f"--gpu {name} is not known{suggestion(name.lower(), names)}; use {either(names)}")


def gpu_of(device_kind: str) -> Gpu | None:
    """The GPU with this device kind in JAX, or None if the table has none."""
    return next((gpu for gpu in GPUS if device_kind in gpu.device_kinds), None)
