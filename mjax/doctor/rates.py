"""How fast this device multiplies, copies and talks to its neighbours, beside what its data sheet promises."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.doctor.finding import FIGURE, GREEN, RED, YELLOW, Finding
from mjax.parallel import mappings
from mjax.parallel.mappings import MODEL
from mjax.parallel.mesh import make_mesh
from mjax.training.flops import peak_tflops

MEASURED_SECONDS = 0.3  # for each figure, after it has run twice
SIMULATED_COUNT = 2**20  # numbers that a simulated device adds
# Of a data sheet's figure, what a healthy device reaches in a large product; less has a cause that can be found.
ENOUGH_OF_PEAK = 0.6
SLOW_DEVICE = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER: is it throttled, capped, or used by someone else?"


def check_matmul() -> list[Finding]:
    """TFLOP/s of a large square product: bf16 on a GPU, float32 on a CPU, which has no fast bf16."""
    device = jax.local_devices()[0]
    on_gpu = device.platform == "gpu"
    size, dtype = (8192, jnp.bfloat16) if on_gpu else (1024, jnp.float32)
    key = jax.random.key(0)
    weight = jax.random.normal(key, (size, size), dtype) / size**0.5  # products keep their size, however many follow
    multiply = jax.jit(jnp.matmul)
    seconds = seconds_of(lambda x: multiply(x, weight), jax.random.normal(key, (size, size), dtype))
    tflops = 2 * size**3 / seconds / 1e12
    return judge_matmul(tflops, "bf16" if on_gpu else "fp32", size, device.device_kind)


def judge_matmul(tflops: float, compute: str, size: int, device_kind: str) -> list[Finding]:
    """The finding of a product of two [size, size] matrices that ran at `tflops`."""
    found = f"{compute} {tflops:,.3g} TFLOP/s in a product of {size:,} × {size:,}"
    figures = {"matmul_tflops": tflops}
    peak = peak_tflops(device_kind, compute)
    if peak is None:
        return [Finding("matmul", FIGURE, f"{found}; no peak of {compute} is known for {device_kind}", figures=figures)]
    figures["peak_tflops"] = peak
    found = f"{found}, {tflops / peak:.0%} of {device_kind}'s {peak:,.0f}"
    if tflops > 1.05 * peak:
        return [
            Finding("matmul", YELLOW, f"{found}: that cannot be", "the table of peaks is wrong: report it", figures)
        ]
    if tflops < ENOUGH_OF_PEAK * peak:
        return [Finding("matmul", YELLOW, f"{found}: slow", SLOW_DEVICE, figures)]
    return [Finding("matmul", GREEN, found, figures=figures)]


def check_copy() -> list[Finding]:
    """GB/s of reading and writing device memory, and between it and the host's."""
    device = jax.local_devices()[0]
    count = 2**28 if device.platform == "gpu" else 2**24  # float32 numbers
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    seconds = seconds_of(add, jnp.zeros(count, jnp.float32))
    rate = 2 * 4 * count / seconds
    found = f"{rate / 1e9:,.0f} GB/s read and written in device memory"
    figures = {"memory_gb_per_s": rate / 1e9}
    if device.platform == "gpu":
        host = np.ones(2**26, np.float32)
        begun = time.perf_counter()
        there = jax.block_until_ready(jax.device_put(host, device))
        middle = time.perf_counter()
        np.asarray(there)
        end = time.perf_counter()
        figures |= {"to_device_gb_per_s": host.nbytes / (middle - begun) / 1e9}
        figures |= {"from_device_gb_per_s": host.nbytes / (end - middle) / 1e9}
        found += (
            f", {figures['to_device_gb_per_s']:,.1f} GB/s from the host, {figures['from_device_gb_per_s']:,.1f} to it"
        )
    return [Finding("copy", FIGURE, found, figures=figures)]


def check_all_reduce() -> list[Finding]:
    """Whether devices add up rightly over `model`, and the bus bandwidth; nothing where there is one device."""
    devices = jax.local_devices()
    ranks = len(devices)
    if ranks == 1:
        return []
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
        found = f"the sum over {ranks} devices is {low:g} to {high:g} where it is {expected}"
        return [
            Finding("all-reduce", RED, found, "NCCL_DEBUG=INFO python -m mjax doctor; NCCL_P2P_DISABLE=1 as a trial")
        ]
    # Simulated devices share a few threads: two sums on their way at once may wait for each other for good.
    wait = (lambda x: x) if on_gpus else jax.block_until_ready
    seconds = seconds_of(lambda _: wait(reduce(ones)), total)
    wire = 2 * (ranks - 1) / ranks * count * jnp.dtype(dtype).itemsize
    found = f"right over {ranks} devices, {wire / seconds / 1e9:,.1f} GB/s bus bandwidth over model"
    if not on_gpus:
        found += "; the devices are simulated, so this says nothing of a real one"
    return [Finding("all-reduce", FIGURE, found, figures={"bus_gb_per_s": wire / seconds / 1e9})]


def seconds_of(step: Callable[[Array], Array], x: Array, budget: float = MEASURED_SECONDS) -> float:
    """Seconds of one `step` in a row of them, each taking what the one before gave; at most about `budget` in all.

    Python runs ahead of the device, so that the time to start a kernel does not count as long as it is shorter.
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
