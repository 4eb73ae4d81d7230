"""The devices that JAX sees: number, share of memory, and rates compared with the data sheet."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.cluster.hardware import USABLE_FRACTION, gpu_of
from mjax.cluster.launch import MEMORY_FRACTIONS
from mjax.config import MeshConfig
from mjax.config.axes import MODEL
from mjax.doctor import (
    FIGURE,
    GREEN,
    RED,
    YELLOW,
    Finding,
    Found,
    advice_on,
    check,
    first_line,
    gibibytes,
    listed,
)
from mjax.doctor.driver import Driver, visible_gpus
from mjax.parallel import mappings
from mjax.parallel.mesh import make_mesh

ENOUGH_MEMORY = 0.85  # of a GPU's memory; the rest is for CUDA, NCCL and cuDNN
MEASURED_SECONDS = 0.3  # for each rate, after two runs
SIMULATED_COUNT = 2**20  # elements that a simulated device adds
# Share of the data sheet's rate that a healthy device reaches easily; less has a cause that can be found.
ENOUGH_RATE = {"matmul": 0.6, "copy": 0.6, "all-reduce": 0.4}
THROTTLED = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER: is it throttled, capped, or used by someone else?"
SLOW = {
    "matmul": THROTTLED,
    "copy": THROTTLED,
    "all-reduce": "nvidia-smi topo -m: do all GPUs see each other over NVLink? NCCL_DEBUG=INFO says what NCCL uses",
}


def by_kind() -> dict[str, list[jax.Device]]:
    """The devices to check, by JAX's name for their kind: all GPUs, or one CPU device however many are simulated."""
    devices = jax.local_devices()
    kinds: dict[str, list[jax.Device]] = {}
    for device in devices[:1] if devices[0].platform == "cpu" else devices:
        kinds.setdefault(device.device_kind, []).append(device)
    return kinds


def called(device: jax.Device) -> str:
    """'GPU 3', by JAX's number: 0 is the first in CUDA_VISIBLE_DEVICES."""
    return f"{device.platform.upper()} {device.id}"


@check("devices")
def check_devices(
    driver: Driver, cuda: int | None, complaints: Sequence[str] = (), environment: Mapping[str, str] = os.environ
) -> Found:
    """Start JAX and compare its devices with the GPUs that the driver shows.

    Args:
      driver, cuda: as in `driver.check_driver`.
      complaints: list that collects JAX's log messages while it starts; read afterwards.
    """
    platforms = environment.get("JAX_PLATFORMS")
    try:
        devices = jax.local_devices()
    except Exception as error:  # an assertion, a RuntimeError or a ValueError, by version and reason
        reason = (list(complaints) or [first_line(error)])[-1]
        if platforms:
            text = f"JAX has no device with JAX_PLATFORMS={platforms} ({reason})"
            advice = "unset JAX_PLATFORMS to train on the CPU; for a GPU, see the line driver"
            return RED, text, advice_on(reason, advice)
        return RED, f"JAX has no device: {reason}", advice_on(reason, "fix the lines above first")
    counts = Counter(device.device_kind for device in devices)
    if devices[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cpu = f"the CPU, {cores} cores" if len(devices) == 1 else f"{len(devices)} simulated devices of the CPU"
        if driver.gpus and not platforms and visible_gpus(driver, environment):
            if cuda is None:
                return YELLOW, f"{cpu}; the GPU cannot be used", "fix the line driver"
            why = f": {complaints[-1]}" if complaints else ""
            text = f"{cpu}, although {len(driver.gpus)} GPU{'s are' if len(driver.gpus) > 1 else ' is'} here{why}"
            return RED, text, f'pip install --upgrade --force-reinstall "jax[cuda{cuda}]"'
        return GREEN, f"{cpu}{f', by JAX_PLATFORMS={platforms}' if platforms else ''}"
    text = listed([f"{count} × {kind}" for kind, count in counts.items()])
    if any(" MIG " in kind for kind in counts):  # the driver counts whole GPUs
        return GREEN, f"{text}, a slice of a GPU"
    expected = visible_gpus(driver, environment)
    if len(devices) < expected:
        return YELLOW, f"{text}; the driver shows {expected}", "nvidia-smi; sudo dmesg | grep -i xid"
    if len(counts) > 1:
        advice = "choose those of one kind with CUDA_VISIBLE_DEVICES; a step waits for the slowest"
        return YELLOW, f"{text}: of different kinds", advice
    return GREEN, text


@check("device memory")
def check_device_memory(driver: Driver, environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Check the share of a GPU's memory that JAX takes; nothing on a CPU."""
    totals = dict(zip(driver.gpus, driver.memory, strict=False))  # the driver does not know it for a slice of a GPU
    for kind, devices in by_kind().items():
        if devices[0].platform == "gpu":
            limit = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)
            yield from judge_device_memory(limit, totals.get(kind, 0.0), environment, kind)


@check("device memory")
def judge_device_memory(limit: float, total: float, environment: Mapping[str, str], kind: str) -> Found:
    """Compare the bytes that JAX may use with those of a GPU; 0 means unknown."""
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator == "platform":
        text = "XLA_PYTHON_CLIENT_ALLOCATOR=platform asks the driver for every array, which is slow"
        return YELLOW, text, "unset XLA_PYTHON_CLIENT_ALLOCATOR"
    if not limit or not total:
        usable = gibibytes(limit) if limit else "an unknown part"
        return FIGURE, f"JAX may use {usable} of {kind}{'' if total else '; the driver does not report its memory'}"
    figures = {"usable_gib": limit / 2**30, "total_gib": total / 2**30}
    text = f"JAX may use {gibibytes(limit)} of {gibibytes(total)} of {kind}"
    if environment.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("false", "False", "0"):
        text += ", allocated piece by piece (XLA_PYTHON_CLIENT_PREALLOCATE), so that it may become fragmented"
        return YELLOW, text, "unset XLA_PYTHON_CLIENT_PREALLOCATE", figures
    if limit < ENOUGH_MEMORY * total:
        named = next((name for name in MEMORY_FRACTIONS if name in environment), MEMORY_FRACTIONS[0])
        advice = f"export {named}={USABLE_FRACTION}"
        return YELLOW, f"{text}, {limit / total:.0%}", advice, figures
    return GREEN, text, None, figures


# --- Rates -----------------------------------------------------------------------------------------------------------


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
    text = f"{compute} {flops / 1e12:,.3g} TFLOP/s in a product of {size:,} × {size:,}{which}"
    gpu = gpu_of(device_kind)
    return _compared("matmul", text, flops, gpu and gpu.peak(compute), device_kind, {"matmul_tflops": flops / 1e12})


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
    on_device = jax.block_until_ready(jax.device_put(host, device))
    middle = time.perf_counter()
    np.asarray(on_device)
    end = time.perf_counter()
    return host.nbytes / (middle - begun), host.nbytes / (end - middle)


@check("copy")
def judge_copy(rate: float, device_kind: str, host: tuple[float, float] | None = None, which: str = "") -> Found:
    """Compare device memory that moved `rate` bytes per second with the data sheet; `host`: to and from the device."""
    text, figures = f"{rate / 1e9:,.0f} GB/s read and written in device memory{which}", {"memory_gb_per_s": rate / 1e9}
    if host is not None:
        to_device, from_device = (host_rate / 1e9 for host_rate in host)
        figures |= {"to_device_gb_per_s": to_device, "from_device_gb_per_s": from_device}
        text = f"{to_device:,.1f} GB/s from the host, {from_device:,.1f} to it; {text}"
    gpu = gpu_of(device_kind)
    return _compared("copy", text, rate, gpu and gpu.memory_bandwidth, device_kind, figures)


def _compared(name: str, text: str, rate: float, peak: float | None, device: str, figures: dict[str, float]) -> Found:
    """Compare a rate with `peak`, that of the device's data sheet, if there is one."""
    if peak is None:
        return FIGURE, f"{text}; mjax has no data sheet for {device}", None, figures
    scale, unit = (1e12, "TFLOP/s") if name == "matmul" else (1e9, "GB/s")
    figures = {**figures, "of_data_sheet": rate / peak}
    text = f"{text}, {rate / peak:.0%} of the {peak / scale:,.0f} {unit} of {device}"
    if rate > 1.05 * peak:
        return YELLOW, f"{text}: impossible", "mjax/cluster/hardware.py is wrong: report it", figures
    if rate < ENOUGH_RATE[name] * peak:
        return YELLOW, f"{text}: slow", SLOW[name], figures
    return GREEN, text, None, figures


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
        text = f"the sum over {ranks} devices is {low:g} to {high:g}, not {expected}"
        return RED, text, "NCCL_DEBUG=INFO mjax doctor; try NCCL_P2P_DISABLE=1"
    # Simulated devices share a few threads: two concurrent sums may deadlock.
    step = (lambda _: reduce(ones)) if on_gpus else (lambda _: jax.block_until_ready(reduce(ones)))
    seconds = seconds_of(step, total)
    wire = 2 * (ranks - 1) / ranks * count * jnp.dtype(dtype).itemsize
    return judge_all_reduce(wire / seconds, ranks, listed(list(by_kind())), simulated=not on_gpus)


@check("all-reduce")
def judge_all_reduce(bus: float, ranks: int, device_kind: str, simulated: bool) -> Found:
    """Compare a correct sum over `ranks` devices, at `bus` bytes per second of bus bandwidth, with the data sheet.

    Bus bandwidth is what each device sends, 2 (n − 1) / n of its array, divided by the time, as in NCCL's tests.
    """
    text = f"correct over {ranks} devices, {bus / 1e9:,.1f} GB/s bus bandwidth over model"
    figures = {"bus_gb_per_s": bus / 1e9}
    if simulated:
        return FIGURE, f"{text}; the devices are simulated, so this says nothing about real ones", None, figures
    gpu = gpu_of(device_kind)
    return _compared("all-reduce", text, bus, gpu and gpu.node_bandwidth, device_kind, figures)


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
