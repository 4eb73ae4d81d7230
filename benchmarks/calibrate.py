"""Measured rates of this machine for predictions of `mjax plan`: matrix products, memory, attention, collectives.

    python benchmarks/calibrate.py --output calibration.json                  on the GPUs of this machine
    python -m mjax plan --config gpt_1b --gpu h100 --calibration calibration.json

Every kernel runs many times inside one compiled loop, so that launching it from Python does not count; the fastest of
several rounds is taken. All arrays are random, and arguments of the loop. Flash attention is measured if a training run
would use it here. Collectives are measured over all devices if there are several, which are assumed to be in one
server. The rate between servers is not measured and keeps the value from published runs.

The table compares each measurement with the value that the fitted rates predict.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import tyro

from benchmarks.command import check_counts, check_output, in_one_sentence
from benchmarks.fitting import SETTLES, Measurement, calibrate
from mjax.cluster.hardware import Gpu, find_gpu, gpu_named
from mjax.config import Config, GPTConfig, PrecisionConfig
from mjax.config.kernels import choose_kernel, gpu_capability
from mjax.errors import UsageError
from mjax.planner.time import Calibration, Rates, write_calibration
from mjax.utils.figures import format_table

# m, n, k of the layers of 345M to 8B parameters, split or not, and of their logits: forward, for inputs, for weights.
PRODUCTS = (
    (8192, 3072, 1024),
    (8192, 1024, 4096),
    (1024, 4096, 8192),
    (8192, 6144, 1536),
    (1536, 6144, 8192),
    (8192, 1152, 3072),
    (8192, 3072, 384),
    (8192, 12288, 4096),
    (4096, 12288, 8192),
    (2048, 4096, 4096),
    (512, 4096, 1024),
    (8192, 51200, 2048),
    (16384, 16384, 8192),
)
# Sequences, positions, heads, head size: each is measured forward and backward.
ATTENTIONS = (
    (8, 1024, 16, 64), (8, 1024, 16, 96), (8, 1024, 16, 128), (4, 2048, 16, 128), (2, 4096, 16, 128),
    (1, 8192, 16, 128),
)  # fmt: skip
COPIES = (2**28, 2**30)  # bytes of the array
KERNELS = 10  # of next to no work, in a row
SUMS = (2**16, 2**20, 2**24, 2**28)  # bytes of the array on each device


@dataclass(frozen=True)
class Arguments:
    """Measure the rates of this machine and write them to a file that `mjax plan --calibration` reads."""

    output: Path
    """File to write: .json."""
    gpu: str | None = None
    """GPU with the data sheet to use (mjax/cluster/hardware.py). By default the device's GPU."""
    compute: Literal["bf16", "fp16"] | None = None
    """Dtype of matmuls and attention (by default bf16, or fp16 on a GPU without bf16)."""
    kinds: tuple[Literal["launch", "copy", "product", "attention", "sum"], ...] = tuple(SETTLES)
    """Parts to measure. The others keep the rates of published runs."""
    rounds: int = 5
    """Measurements per part. The fastest counts."""
    shrink: int = 1
    """Divide every size by this, to try the command on a small machine. The rates are then of no use."""


@dataclass(frozen=True)
class Kernel:
    """A kernel to time.

    Attributes:
      kind, sizes: as in `Measurement`.
      function: x → x, whose next call has to wait for this one. It must hold no constant array: XLA folds a constant
        into the kernel that reads it, which then reads nothing.
      shapes: of x, a tree of `jax.ShapeDtypeStruct`.
    """

    kind: str
    sizes: tuple[float, ...]
    function: Callable
    shapes: object


def measure(arguments: Arguments, compute: str) -> Iterator[Measurement]:
    """All measurements in turn; products and attention in the type `compute`."""
    import jax

    flash = "attention" in arguments.kinds and _flash_runs(compute)
    forward: dict[tuple[float, ...], float] = {}  # seconds of attention's forward pass, by head size and length
    for kernel in kernels(arguments, compute, flash, jax.devices()):
        seconds = seconds_of(kernel.function, drawn(kernel.shapes), arguments.rounds)
        if kernel.kind == "attention":
            _, *sizes, backward = kernel.sizes
            if backward:  # its loop runs the forward pass too
                seconds -= forward[tuple(sizes)]
            else:
                forward[tuple(sizes)] = seconds
        yield Measurement(kernel.kind, kernel.sizes, seconds)


def kernels(arguments: Arguments, compute: str, flash: bool, devices: Sequence) -> Iterator[Kernel]:
    """The operations that `measure` times; `flash` says whether there is attention, and `devices` run the
    all-reduces."""
    import jax
    import jax.numpy as jnp

    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[compute]
    small, shape = arguments.shrink, jax.ShapeDtypeStruct

    if "launch" in arguments.kinds:
        yield Kernel("launch", (KERNELS,), _small_kernels, shape((), jnp.float32))
    for size in COPIES if "copy" in arguments.kinds else ():
        x = shape((size // small // 4,), jnp.float32)
        yield Kernel("copy", (2.0 * 4 * x.size,), lambda x: x * 1.000001, x)
    for sizes in PRODUCTS if "product" in arguments.kinds else ():
        m, n, k = (max(size // small, 8) for size in sizes)
        yield Kernel("product", (m, n, k), _product, (shape((m, k), dtype), shape((k, n), dtype)))
    for b, s, n, d in ATTENTIONS if flash and "attention" in arguments.kinds else ():
        s = max(s // small, 64)
        flops, qkv = 4.0 * b * n * s * s * d / 2, (shape((b, s, n, d), dtype),) * 3
        yield Kernel("attention", (flops, d, s, 0), _attention, qkv)
        yield Kernel("attention", (2.5 * flops, d, s, 1), _attention_and_gradient, qkv)
    for size in SUMS if len(devices) > 1 and "sum" in arguments.kinds else ():
        width = max(size // small // 4, 1)
        yield Kernel("sum", (len(devices), 4.0 * width), *_sum_over_all(width, devices))


def drawn(shapes):
    """Random arrays of these shapes and shardings: normal, with the variance of weights of this many rows.

    A GPU multiplies constants with less power than numbers, and so faster.
    """
    import jax

    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def draw(key, leaf):
        scale = leaf.shape[0] ** -0.5 if leaf.shape else 1.0
        return (scale * jax.random.normal(key, leaf.shape, leaf.dtype)).astype(leaf.dtype)

    arrays = [
        jax.jit(partial(draw, leaf=leaf), out_shardings=leaf.sharding)(key)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def _small_kernels(x):
    """Compute KERNELS kernels on one number, each depending on the one before."""
    import jax

    for _ in range(KERNELS):
        x = jax.lax.optimization_barrier(x * 1.000001)
    return x


def _product(x_and_kernel):
    """x and A, with one element of x changed by x A, so that the next product depends on this one."""
    import jax

    x, kernel = x_and_kernel
    y = jax.lax.optimization_barrier(x @ kernel)
    return x.at[0, 0].set(y[0, 0]), kernel


def _flash_runs(compute: str) -> bool:
    """True if a model's attention would be cuDNN's on this device; if not, prints the reason."""
    import jax

    if jax.default_backend() != "gpu":
        return False
    _, s, n, d = ATTENTIONS[0]
    model = GPTConfig(hidden=n * d, heads=n, sequence=s, attention_dropout=0.0)
    config = Config(model=model, precision=PrecisionConfig(compute=compute))
    try:
        return choose_kernel(config, "gpu", gpu_capability(jax.local_devices()[0]))[0] == "cudnn"
    except UsageError as error:
        print(f"attention is not measured: {error}")
        return False


def _causal(q, k, v):
    import jax

    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _attention(qkv):
    """q, k and v, with one element of q changed by the result."""
    import jax

    q, k, v = qkv
    out = jax.lax.optimization_barrier(_causal(q, k, v))
    return q.at[0, 0, 0, 0].set(out[0, 0, 0, 0]), k, v


def _attention_and_gradient(qkv):
    """q, k and v, with one element of q changed by the gradients."""
    import jax

    out, pullback = jax.vjp(_causal, *qkv)
    gradients = jax.lax.optimization_barrier(pullback(out))
    q, k, v = qkv
    return q.at[0, 0, 0, 0].set(gradients[0][0, 0, 0, 0]), k, v


def _sum_over_all(width: int, devices: Sequence) -> tuple[Callable, object]:
    """A mean over all devices of an array that each of them has, and the shape of that array."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from mjax.config import MeshConfig
    from mjax.config.axes import DATA
    from mjax.parallel import mappings
    from mjax.parallel.mesh import make_mesh

    ranks = len(devices)
    mesh = make_mesh(MeshConfig(data=ranks), devices)

    def mean(x):
        summed = mappings.psum(x, frozenset({DATA})) / ranks
        return mappings.vary(summed, frozenset({DATA}))

    summed = jax.shard_map(mean, mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=True)
    return summed, jax.ShapeDtypeStruct((ranks * width,), jnp.float32, sharding=NamedSharding(mesh, P(DATA)))


def seconds_of(function: Callable, x, rounds: int, least: int = 4, enough: float = 0.05) -> float:
    """Seconds per call of `function`, x → x, in a compiled loop of many calls; the fastest round.

    Args:
      rounds: number of timed loops.
      least: minimum number of calls in a loop; more if these take less than `enough` seconds.
    """
    import jax

    repeated = loop_of(function)

    def timed(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(repeated(x, times))
        return time.perf_counter() - start

    timed(least)
    once = timed(least) / least
    times = max(least, min(int(enough / once), 1000 * least))
    timed(times)  # compiles
    return min(timed(times) for _ in range(rounds)) / times


def loop_of(function: Callable) -> Callable:
    """The compiled loop of x, times → the result of so many calls of `function`, x → x."""
    import jax

    @partial(jax.jit, static_argnums=1)
    def repeated(x, times: int):
        return jax.lax.fori_loop(0, times, lambda _, x: function(x), x)

    return repeated


def described(measurement: Measurement) -> str:
    """A measurement in words."""
    sizes = measurement.sizes
    if measurement.kind == "product":
        return "product " + " × ".join(f"{size:,.0f}" for size in sizes)
    if measurement.kind == "sum":
        return f"all-reduce of {sizes[1] / 1e6:,.2f} MB over {sizes[0]:.0f}"
    if measurement.kind == "attention":
        flops, head, positions, backward = sizes
        direction = "backward" if backward else "forward"
        return f"attention {direction}, heads of {head}, {positions:,} positions, {flops / 1e9:,.6g} GFLOP"
    unit = {"copy": (1e6, "MB"), "launch": (1, "kernel")}[measurement.kind]
    return f"{measurement.kind} {sizes[0] / unit[0]:,.6g} {unit[1]}"


def fitted(measurements: list[Measurement], gpu: Gpu, compute: str) -> tuple[Calibration, np.ndarray]:
    """The calibration, and the relative error of its prediction for every measurement."""
    found, unsettled = calibrate(measurements, gpu, compute)
    if unsettled:
        print(f"not settled by what was measured, and left as published: {', '.join(unsettled)}")
    rates = Rates(gpu, found, compute)
    settled = [name for names in SETTLES.values() for name in names if name not in unsettled]
    today = datetime.now(UTC).date().isoformat()
    found = replace(
        found,
        measured=tuple(settled),
        date=today,
        versions={name: metadata.version(name) for name in ("jax", "jaxlib")},
    )
    return found, np.array([m.predicted(rates) / m.seconds - 1 for m in measurements])


@in_one_sentence
def main() -> int:
    """Measure, fit, print, write."""
    arguments = tyro.cli(Arguments, prog="calibrate.py")
    check_counts(arguments, "rounds", "shrink")
    check_output("--output", arguments.output)
    named = None if arguments.gpu is None else gpu_named(arguments.gpu)
    import jax

    kind = jax.devices()[0].device_kind
    gpu = named or find_gpu(kind)
    if gpu is None:
        raise UsageError(
            f"no data sheet of {kind} is known; add it to mjax/cluster/hardware.py, or name one to "
            "compare with: --gpu h100"
        )
    compute = arguments.compute or gpu.half_precision
    if not gpu.peak(compute):
        raise UsageError(f"--compute {compute}: {gpu.name} has no {compute}; use --compute {gpu.half_precision}")
    measurements = list(measure(arguments, compute))
    if not measurements:
        raise UsageError(f"--kinds {' '.join(arguments.kinds)} is nothing that can be measured on {kind}; leave it out")
    found, off = fitted(measurements, gpu, compute)
    rows = [(described(m), f"{1e6 * m.seconds:,.1f}", f"{o:+.1%}") for m, o in zip(measurements, off, strict=True)]
    print(*format_table(("", "µs", "model"), rows), sep="\n")
    names = ("matmul", "inner", "memory", "launch", "node", "collective")
    print(f"{gpu.name}: " + ", ".join(f"{name} {getattr(found, name):.3g}" for name in names))
    write_calibration(found, arguments.output)
    print(f"written to {arguments.output}; python -m mjax plan --gpu {gpu.name} --calibration {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
