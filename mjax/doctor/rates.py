"""Rates of matrix products, copies and all-reduces on this device, compared with its data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.cluster.hardware import Gpu, gpu_of
from mjax.config import MeshConfig
from mjax.config.axes import MODEL
from mjax.doctor.devices import by_kind, called
from mjax.doctor.finding import FIGURE, GREEN, RED, YELLOW, Finding, Found, check, listed
from mjax.parallel import mappings
from mjax.parallel.mesh import make_mesh

MEASURED_SECONDS = 0.3  # for each rate, after two runs
SIMULATED_COUNT = 2**20  # elements that a simulated device adds
# Share of the data sheet's rate that a healthy device reaches easily; less has a cause that can be found.
ENOUGH = {"matmul": 0.6, "copy": 0.6, "all-reduce": 0.4}
THROTTLED = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER: is it throttled, capped, or used by someone else?"
SLOW = {
    "matmul": THROTTLED,
    "copy": THROTTLED,
    "all-reduce": "nvidia-smi topo -m: do all GPUs see each other over NVLink? NCCL_DEBUG=INFO says what NCCL uses",
}


def _slowest(measure: Callable[[jax.Device], tuple]) -> Iterator[tuple[str, jax.Device, tuple, str]]:
    """For each kind of device: its name, the slowest device, its result of `measure`, and words that name it.

    `measure` returns the rate first.
    """
    for kind, devices in by_kind().items():
        measured = {device: measure(device) for device in devices}
        slowest = min(devices, key=lambda device: measured[device][0])
        which = f" on {called(slowest)}, the slowest of {len(devices)}" if len(devices) > 1 else ""
        yield kind, slowest, measured[slowest], which


@check("matmul")
def check_matmul() -> Iterator[Finding]:
    """TFLOP/s of a large square product, of the slowest device of each kind."""
    for kind, _, measured, which in _slowest(_multiply):
        yield from judge_matmul(*measured, kind, which)


def _multiply(device: jax.Device) -> tuple[float, str, int]:
    """FLOP/s of a product of two [size, size] matrices, the dtype and the size.

    16 bits on a GPU; float32 on a CPU, where 16 bits are slow.
    """
    on_gpu = device.platform == "gpu"
    gpu = gpu_of(device.device_kind)
    compute = (gpu.sixteen_bits if gpu else "bf16") if on_gpu else "fp32"
    size = 8192 if on_gpu else 1024
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}[compute]
    multiply = jax.jit(jnp.matmul)
    with jax.default_device(device):
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        weight = x / size**0.5  # repeated products keep their magnitude
        seconds = seconds_of(lambda x: multiply(x, weight), x)
    return 2 * size**3 / seconds, compute, size


@check("matmul")
def judge_matmul(flops: float, compute: str, size: int, device_kind: str, which: str = "") -> Found:
    """Compare a product of two [size, size] matrices at `flops` FLOP/s, on the device `which`, with the data sheet."""
    found = f"{compute} {flops / 1e12:,.3g} TFLOP/s in a product of {size:,} × {size:,}{which}"
    figures = {"matmul_tflops": flops / 1e12}
    return _beside("matmul", found, flops, lambda gpu: gpu.peak(compute), device_kind, figures)


@check("copy")
def check_copy() -> Iterator[Finding]:
    """GB/s of device memory, and between device and host, of the slowest device of each kind."""
    for kind, slowest, (rate,), which in _slowest(_copy):
        yield from judge_copy(rate, kind, _between_host_and(slowest) if slowest.platform == "gpu" else None, which)


def _copy(device: jax.Device) -> tuple[float]:
    """Bytes per second that an in-place addition reads and writes."""
    count = 2**28 if device.platform == "gpu" else 2**24  # float32 numbers
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    with jax.default_device(device):
        return (2 * 4 * count / seconds_of(add, jnp.zeros(count, jnp.float32)),)


def _between_host_and(device: jax.Device) -> tuple[float, float]:
    """Bytes per second to the device and from it."""
    host = np.ones(2**26, np.float32)
    jax.block_until_ready(jax.device_put(host, device))  # allocates the pages of both
    begun = time.perf_counter()
    there = jax.block_until_ready(jax.device_put(host, device))
    middle = time.perf_counter()
    np.asarray(there)
    end = time.perf_counter()
    return host.nbytes / (middle - begun), host.nbytes / (end - middle)


@check("copy")
def judge_copy(rate: float, device_kind: str, host: tuple[float, float] | None = None, which: str = "") -> Found:
    """Compare device memory that moved `rate` bytes per second with the data sheet; `host`: to and from the device."""
    found, figures = f"{rate / 1e9:,.0f} GB/s read and written in device memory{which}", {"memory_gb_per_s": rate / 1e9}
    if host is not None:
        to_device, from_device = (each / 1e9 for each in host)
        figures |= {"to_device_gb_per_s": to_device, "from_device_gb_per_s": from_device}
        found = f"{to_device:,.1f} GB/s from the host, {from_device:,.1f} to it; {found}"
    return _beside("copy", found, rate, lambda gpu: gpu.memory_bandwidth, device_kind, figures)


def _beside(
    name: str, found: str, rate: float, rate_of: Callable[[Gpu], float | None], device: str, figures: dict[str, float]
) -> Found:
    """Compare a rate with the data sheet of the device, if there is one."""
    gpu = gpu_of(device)
    promised = None if gpu is None else rate_of(gpu)
    if promised is None:
        return FIGURE, f"{found}; mjax has no data sheet for {device}", None, figures
    scale, unit = (1e12, "TFLOP/s") if name == "matmul" else (1e9, "GB/s")
    figures = {**figures, "of_data_sheet": rate / promised}
    found = f"{found}, {rate / promised:.0%} of the {promised / scale:,.0f} {unit} of {device}"
    if rate > 1.05 * promised:
        return YELLOW, f"{found}: impossible", "mjax/cluster/hardware.py is wrong: report it", figures
    if rate < ENOUGH[name] * promised:
        return YELLOW, f"{found}: slow", SLOW[name], figures
    return GREEN, found, None, figures


@check("all-reduce")
def check_all_reduce() -> Found | list[Finding] | None:
    """Check a sum over `model` and measure the bus bandwidth; nothing for a single device."""
    devices = jax.local_devices()
    ranks = len(devices)
    if ranks == 1:
        return None
    mesh = make_mesh(MeshConfig(model=ranks), devices)
    on_gpus = devices[0].platform == "gpu"
    count, dtype = (2**26, jnp.bfloat16) if on_gpus else (SIMULATED_COUNT, jnp.float32)  # numbers a device
    rows = np.arange(1, ranks + 1)[:, None]  # rank r holds r + 1
    ones = jax.jit(
        lambda: jnp.asarray(rows, dtype) * jnp.ones((1, count), dtype), out_shardings=NamedSharding(mesh, P(MODEL))
    )()
    reduce = jax.jit(jax.shard_map(mappings.leave, mesh=mesh, in_specs=P(MODEL), out_specs=P()))
    total = reduce(ones)
    expected = ranks * (ranks + 1) // 2
    low, high = float(total.min()), float(total.max())
    if not (low == high == expected):
        found = f"the sum over {ranks} devices is {low:g} to {high:g}, not {expected}"
        return RED, found, "NCCL_DEBUG=INFO python -m mjax doctor; try NCCL_P2P_DISABLE=1"
    # Simulated devices share a few threads: two concurrent sums may deadlock.
    wait = (lambda x: x) if on_gpus else jax.block_until_ready
    seconds = seconds_of(lambda _: wait(reduce(ones)), total)
    wire = 2 * (ranks - 1) / ranks * count * jnp.dtype(dtype).itemsize
    return judge_all_reduce(wire / seconds, ranks, listed(list(by_kind())), simulated=not on_gpus)


@check("all-reduce")
def judge_all_reduce(bus: float, ranks: int, device_kind: str, simulated: bool) -> Found:
    """Compare a correct sum over `ranks` devices, at `bus` bytes per second of bus bandwidth, with the data sheet.

    Bus bandwidth is what each device sends, 2 (n − 1) / n of its array, divided by the time, as in NCCL's tests.
    """
    found = f"correct over {ranks} devices, {bus / 1e9:,.1f} GB/s bus bandwidth over model"
    figures = {"bus_gb_per_s": bus / 1e9}
    if simulated:
        found += "; the devices are simulated, so this says nothing about real ones"
        return FIGURE, found, None, figures
    return _beside("all-reduce", found, bus, lambda gpu: gpu.node_bandwidth, device_kind, figures)


def seconds_of(step: Callable[[Array], Array], x: Array, budget: float = MEASURED_SECONDS) -> float:
    """Seconds per `step` in a chain, each taking the previous result; about `budget` in all.

    Python runs ahead of the device, so launch time does not count while it is shorter than the kernel.
    """
    x = jax.block_until_ready(step(x))  # compiled
    begun = time.perf_counter()
    x = jax.block_until_ready(step(x))
    count = int(min(100, max(2, budget / 3 / (time.perf_counter() - begun))))
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(count):
            x = step(x)
        jax.block_until_ready(x)
        best = min(best, (time.perf_counter() - begun) / count)
    return best
