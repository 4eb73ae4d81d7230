"""The devices that JAX sees: number, share of memory, and rates compared with the data sheet."""

import logging.handlers
import os
import time
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.cluster.hardware import USABLE_FRACTION, find_gpu
from mjax.cluster.launch import MEMORY_FRACTIONS
from mjax.config import MeshConfig
from mjax.config.axes import MODEL
from mjax.doctor import FIGURE, GREEN, RED, YELLOW, Finding, MachineInfo, first
from mjax.doctor.host import ON_GPU_NODE, read_driver
from mjax.errors import first_line
from mjax.parallel import mappings
from mjax.parallel.mesh import make_mesh
from mjax.utils import packages
from mjax.utils.figures import human_bytes

MIN_MEMORY = 0.85  # of a GPU's memory; the rest is for CUDA, NCCL and cuDNN
REPEATS = 10
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp32": jnp.float32}
# Share of the data sheet's rate that a healthy device reaches easily.
MIN_EFFICIENCY = {"matmul": 0.6, "copy": 0.6, "all-reduce": 0.4}
THROTTLED = "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER: is it throttled, capped, or used by someone else?"
LINKS = "nvidia-smi topo -m: do all GPUs see each other over NVLink? NCCL_DEBUG=INFO says what NCCL uses"
SIMULATED_COUNT = 2**20  # elements that a simulated device adds


def devices_to_check() -> list[jax.Device]:
    """All GPUs, or one CPU device however many are simulated."""
    devices = jax.local_devices()
    return devices[:1] if devices[0].platform == "cpu" else devices


def device_name(device: jax.Device) -> str:
    """'GPU 3', by JAX's number: 0 is the first in CUDA_VISIBLE_DEVICES."""
    return f"{device.platform.upper()} {device.id}"


def check_devices(machine: MachineInfo) -> Finding:
    """Start JAX and compare its devices with the GPUs that the driver lists."""
    variables = {name: machine.environment.get(name) for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    log = logging.handlers.BufferingHandler(capacity=1000)
    log.setLevel(logging.WARNING)
    logging.getLogger("jax").addHandler(log)
    try:
        devices, error = jax.local_devices(), None
    except Exception as problem:  # an assertion, a RuntimeError or a ValueError, by version and reason
        devices, error = [], problem
    lines = [log.format(record).strip().splitlines()[-1] for record in log.buffer]  # of a stack trace, the exception
    reason = lines[-1] if lines else first_line(error) if error else "no message"
    kinds, gpus = Counter(device.device_kind for device in devices), len(read_driver().gpus)
    cuda, on_cpu = packages.cuda_build(), "cpu" in [device.platform for device in devices]
    text = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if on_cpu:
        simulated = f"{len(devices)} simulated devices of the CPU"
        text = simulated if len(devices) > 1 else f"CPU, {os.cpu_count()} cores"
    by = "".join(f" with {name}={value}" for name, value in variables.items() if value is not None)
    hidden = f"{text}{by}; the driver lists {gpus} GPUs"
    chosen = variables["CUDA_VISIBLE_DEVICES"]
    expected = gpus if chosen is None else len(chosen.strip(",").split(","))  # an unknown number hides all after it
    return first(
        text + by,
        (error and by, RED, f"JAX has no device{by} ({reason})", f"unset {' '.join(variables)}; see the line driver"),
        (error, RED, f"JAX has no device: {reason}", "fix the lines above first"),
        (on_cpu and not gpus, GREEN, text + by),
        (on_cpu and by, YELLOW, hidden, f"unset {' '.join(variables)}; under Slurm: {ON_GPU_NODE}"),
        (on_cpu and cuda is None, YELLOW, hidden, "fix the line driver"),
        (on_cpu, RED, f"{hidden}: {reason}", f'pip install --force-reinstall "jax[cuda{cuda}]"'),
        (" MIG " in text, GREEN, f"{text}, a slice of a GPU"),  # the driver counts whole GPUs
        (len(devices) < expected, YELLOW, hidden, f"number them from 0 to {gpus - 1}; sudo dmesg | grep -i xid"),
        (len(kinds) > 1, YELLOW, f"{text}: a step waits for the slowest", "choose one kind by CUDA_VISIBLE_DEVICES"),
    )


def check_device_memory(machine: MachineInfo) -> Finding | None:
    """Check the share of a GPU's memory that JAX takes; nothing on a CPU."""
    devices, environment = jax.local_devices(), machine.environment
    if devices[0].platform == "cpu":
        return None
    limit = min((device.memory_stats() or {}).get("bytes_limit", 0) for device in devices)
    driver = read_driver()
    totals = dict(zip(driver.gpus, driver.memory, strict=False))  # without slices of a GPU
    total = totals.get(devices[0].device_kind, 0)
    text = f"JAX may use {human_bytes(limit)} of {human_bytes(total)}"
    on_demand = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0")
    variable = next((name for name in MEMORY_FRACTIONS if name in environment), MEMORY_FRACTIONS[0])
    return first(
        text,
        (not limit or not total, FIGURE, f"{text}, where 0 is unknown"),
        (on_demand, YELLOW, f"{text}, on demand: it may fragment", "unset XLA_PYTHON_CLIENT_PREALLOCATE"),
        (limit < MIN_MEMORY * total, YELLOW, text, f"export {variable}={USABLE_FRACTION}"),
        usable_gib=limit / 2**30,
        total_gib=total / 2**30,
    )


# --- Rates -----------------------------------------------------------------------------------------------------------


def judge(check: str, rate: float, peak: float, text: str) -> Finding:
    """Compare a measured rate with `peak`, the data-sheet value; 0 without a data sheet."""
    scale, unit = (1e12, "TFLOP/s") if check == "matmul" else (1e9, "GB/s")
    text, share = f"{rate / scale:,.3g} {unit}, {text}", rate / (peak or np.inf)
    compared = f"{text}, {share:.0%} of the {peak / scale:,.0f} {unit} of the data sheet"
    return first(
        compared,
        (not peak, FIGURE, f"{text} (no data sheet for this device)"),
        (share > 1.05, YELLOW, f"{compared}: impossible", "mjax/cluster/hardware.py is wrong: report it"),
        (share < MIN_EFFICIENCY[check], YELLOW, f"{compared}: slow", LINKS if check == "all-reduce" else THROTTLED),
        rate=rate,
        of_data_sheet=share,
    )


def check_matmul(machine: MachineInfo) -> Finding:
    """Measure a large matmul on each device and judge the slowest."""
    return judge("matmul", *min(map(_multiply, devices_to_check())))


def _multiply(device: jax.Device) -> tuple[float, float, str]:
    """FLOP/s, the data sheet's FLOP/s, and a description; of bf16, or fp16 without bf16, but float32 on a CPU."""
    gpu = find_gpu(device.device_kind)
    compute = "fp32" if device.platform == "cpu" else gpu.half_precision if gpu else "bf16"
    size = 1024 if device.platform == "cpu" else 8192
    with jax.default_device(device):
        x = jax.random.normal(jax.random.key(0), (size, size), DTYPES[compute])
        weight = x / size**0.5  # so that repeated matmuls preserve the magnitude
        rate = 2 * size**3 / time_step(lambda x: x @ weight, x)
    text = f"{compute} matmul {size:,} × {size:,} on {device_name(device)}"
    return rate, (gpu and gpu.peak(compute)) or 0.0, text


def check_copy(machine: MachineInfo) -> Finding:
    """Measure the memory of each device and judge the slowest."""
    return judge("copy", *min(map(_copy, devices_to_check())))


def _copy(device: jax.Device) -> tuple[float, float, str]:
    """Bytes per second read and written in device memory, the data sheet's rate, and a description."""
    gpu, count = find_gpu(device.device_kind), 2**24 if device.platform == "cpu" else 2**28  # float32 numbers
    with jax.default_device(device):
        rate = 2 * 4 * count / time_step(lambda x: x + 1, jnp.zeros(count, jnp.float32))
    text = f"memory bandwidth (read and write) on {device_name(device)}"
    if device.platform == "gpu":
        x = jax.device_put(np.ones(2**26, np.float32), device)
        seconds = time_step(lambda x: jax.device_put(np.asarray(x), device), x)
        text += f"; {2 * x.nbytes / seconds / 1e9:,.1f} GB/s to host and back"
    return rate, gpu.memory_bandwidth if gpu else 0.0, text


def check_all_reduce(machine: MachineInfo) -> Finding | None:
    """Check an all-reduce and measure its bus bandwidth; nothing for a single device.

    Bus bandwidth is the bytes that a device sends, 2 (n − 1) / n of its array, over the time, as in NCCL's tests.
    """
    devices = jax.local_devices()
    ranks, on_gpus = len(devices), devices[0].platform == "gpu"
    if ranks == 1:
        return None
    mesh = make_mesh(MeshConfig(model=ranks), devices)
    count, dtype = (2**26, jnp.bfloat16) if on_gpus else (SIMULATED_COUNT, jnp.float32)  # numbers a device
    rows = np.arange(1, ranks + 1)[:, None]  # rank r holds r + 1
    by_rank = NamedSharding(mesh, P(MODEL))
    x = jax.jit(lambda: jnp.asarray(rows, dtype) * jnp.ones((1, count), dtype), out_shardings=by_rank)()
    reduce = jax.jit(jax.shard_map(mappings.reduce_from_region, mesh=mesh, in_specs=P(MODEL), out_specs=P()))
    total, expected = reduce(x), ranks * (ranks + 1) // 2
    low, high = float(total.min()), float(total.max())
    if not (low == high == expected):
        text = f"the all-reduce over {ranks} devices gives {low:g} to {high:g}, not {expected}"
        return Finding(RED, text, "NCCL_DEBUG=INFO mjax doctor; try NCCL_P2P_DISABLE=1")
    # Simulated devices share a few threads: two concurrent sums may deadlock.
    seconds = time_step(lambda _: reduce(x) if on_gpus else jax.block_until_ready(reduce(x)), total)
    bytes_sent = 2 * (ranks - 1) / ranks * count * jnp.dtype(dtype).itemsize
    gpu, simulated = find_gpu(devices[0].device_kind), "" if on_gpus else ", simulated"
    text = f"all-reduce bus bandwidth over {ranks} devices{simulated}"
    return judge("all-reduce", bytes_sent / seconds, gpu.node_bandwidth if gpu else 0.0, text)


def time_step(step: Callable[[Array], Array], x: Array) -> float:
    """Seconds per `step` in a chain, each taking the previous result; the best of three chains after one to compile.

    Python runs ahead of the device, so launch time does not count while it is shorter than the kernel.
    """
    chains = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(REPEATS):
            x = step(x)
        jax.block_until_ready(x)
        chains.append((time.perf_counter() - start) / REPEATS)
    return min(chains)
