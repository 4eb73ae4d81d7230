"""Grouped matmuls of a mixture of experts: FLOPs used over FLOPs needed, and time, compared with `lax.ragged_dot`.

    python benchmarks/grouped.py

Rows of tokens are multiplied with the matrix of the expert they were assigned to; then both gradients. Loads differ in
how the router spreads the assignments. Sorting is not measured: every method gets sorted rows.

    balanced   the same number for every expert
    ragged     each token draws its k experts, all equally likely
    skewed     the same, with likelihoods 1, 1/2, 1/3, … (Zipf)
    one        all to one expert

FLOPs used are counted over the tiles in use, and for `ragged_dot` in the compiled program. The exit code is 1 if a
method's results differ from `ragged_dot`'s.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.command import check_counts, in_one_sentence
from mjax.errors import RunError, UsageError


@dataclass(frozen=True)
class Shape:
    """Sizes of the products: t tokens with k of E experts each, matrices [h, f]."""

    t: int
    k: int
    experts: int
    h: int
    f: int

    @property
    def flops(self) -> float:
        """Needed forward and backward."""
        return 3 * 2.0 * self.t * self.k * self.h * self.f

    def __str__(self):
        return f"t = {self.t:,}, k = {self.k}, E = {self.experts}, h = {self.h:,}, f = {self.f:,}"


SHAPES = {
    "moe_demo": Shape(2048, 2, 8, 256, 512),
    "qwen3_30b": Shape(4096, 8, 128, 2048, 768),
    "tiny": Shape(50, 2, 4, 32, 48),
}
LOADS = ("balanced", "ragged", "skewed", "one")
CALLS = 5  # timed together


@in_one_sentence
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="moe_demo", help="sizes (default: moe_demo)")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of a tile, one or more (default: those of training)")
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured; the fastest counts (default: 5)")
    arguments = parser.parse_args()
    check_counts(arguments, "rows", "rounds")
    import jax

    on_gpu = jax.default_backend() == "gpu"
    if arguments.shape == "qwen3_30b" and not on_gpu:
        raise UsageError(
            f"--shape qwen3_30b needs an NVIDIA GPU and this process runs on {jax.default_backend()}; "
            "use --shape moe_demo"
        )
    shape, dtype = SHAPES[arguments.shape], "bfloat16" if on_gpu else "float32"
    print(f"{shape}, {dtype}, forward and both gradients on {jax.devices()[0].device_kind}\n")
    columns = "load", "method", "rows of a tile", "FLOPs used / needed", "ms", "needed GFLOP/s"
    print("| " + " | ".join(columns) + " |")
    print("| --- | --- |" + " ---: |" * (len(columns) - 2))
    for load in LOADS:
        contenders = measured(shape, load, dtype, arguments.rows, arguments.rounds, on_gpu)
        for one in contenders:
            figures = f"{one.flops / shape.flops:.2f}", f"{1e3 * one.seconds:.2f}"
            row = load, one.name, one.rows or "–", *figures, f"{shape.flops / one.seconds / 1e9:,.0f}"
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print(f"\nThe fastest of {arguments.rounds} rounds of {CALLS} calls; jax {metadata.version('jax')}")
    print(f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} CPU cores, load {os.getloadavg()[0]:.1f}")
    return 0


class Contender:
    """A method, its program compiled for these arrays.

    Attributes:
      rows: of a tile; None for `ragged_dot`.
      flops: used; None until they are counted.
      seconds: of the fastest call so far.
    """

    def __init__(self, name: str, rows: int | None, product, arrays: tuple):
        import jax

        def outputs(x, kernels, upstream, groups):
            y, pullback = jax.vjp(lambda x, kernels: product(x, kernels, groups), x, kernels)
            return y, *pullback(upstream)

        self.name, self.rows, self.arrays, self.seconds = name, rows, arrays, float("inf")
        self.compiled, self.flops = jax.jit(outputs).lower(*arrays).compile(), None

    def outputs(self) -> list[np.ndarray]:
        """y, dx and dW."""
        return [np.asarray(array, np.float32) for array in self.compiled(*self.arrays)]

    def measure(self) -> None:
        import jax

        start = time.perf_counter()
        for _ in range(CALLS):
            last = self.compiled(*self.arrays)
        jax.block_until_ready(last)
        self.seconds = min(self.seconds, (time.perf_counter() - start) / CALLS)


def assigned(shape: Shape, load: str) -> np.ndarray:
    """The expert of each assignment, sorted: int32 [t · k]."""
    if load == "balanced":
        which = np.arange(shape.t * shape.k) % shape.experts
    elif load == "one":
        which = np.zeros(shape.t * shape.k)
    else:
        likely = np.ones(shape.experts) if load == "ragged" else 1 / np.arange(1, shape.experts + 1)
        gumbel = np.random.default_rng(0).gumbel(size=(shape.t, shape.experts))  # the k largest are k distinct draws
        which = np.argsort(-(np.log(likely) + gumbel), axis=1)[:, : shape.k]
    return np.sort(which.reshape(-1)).astype(np.int32)


def measured(shape: Shape, load: str, dtype: str, rows: list[int] | None, rounds: int, on_gpu: bool) -> list[Contender]:
    """All methods, measured in turns.

    Raises:
      RunError: one gives other results than `ragged_dot`.
    """
    import jax.numpy as jnp
    from jax import lax

    from mjax.parallel.grouped import TILE_ROWS, assign_rows, grouped_matmul

    random = np.random.default_rng(0)
    sizes = (shape.t * shape.k, shape.h), (shape.experts, shape.h, shape.f), (shape.t * shape.k, shape.f)
    x, kernels, upstream = (jnp.asarray(random.standard_normal(size), dtype) for size in sizes)
    which = jnp.asarray(assigned(shape, load))
    counts = jnp.zeros(shape.experts, jnp.int32).at[which].add(1)

    reference = Contender("ragged_dot", None, lax.ragged_dot, (x, kernels, upstream, counts))
    reference.flops = flops_of(reference.compiled, on_gpu)
    contenders, expected = [reference], reference.outputs()
    for kernel in ("xla", "pallas") if on_gpu else ("xla",):
        for tile in rows or [TILE_ROWS[kernel]]:
            groups, place = assign_rows(which, shape.experts, tile)
            length = len(groups.of_tile) * tile
            padded = [jnp.zeros((length, each.shape[1]), dtype).at[place].set(each) for each in (x, upstream)]
            product = partial(grouped_matmul, kernel=kernel)
            one = Contender(kernel, tile, product, (padded[0], kernels, padded[1], groups))
            one.flops = shape.flops * int(groups.used) * tile / (shape.t * shape.k)
            y, to_x, to_kernels = one.outputs()
            check(one, (y[place], to_x[place], to_kernels), expected)
            contenders.append(one)
    for _ in range(rounds):
        for one in contenders:
            one.measure()
    return contenders


def flops_of(compiled, on_gpu: bool) -> float:
    """FLOPs of a compiled program. XLA counts those for CPUs; for GPUs it leaves out the products of cuBLAS."""
    if not on_gpu:
        return compiled.cost_analysis()["flops"]
    from benchmarks.aot.roofline import roofline
    from mjax.cluster.hardware import gpu_named

    kernels = roofline(compiled.as_text(), gpu_named("h100"), 1).rows  # FLOPs are the same for every GPU
    return sum(row.flops for row in kernels.values())


def check(one: Contender, found: tuple, expected: list) -> None:
    """Compare results by the largest of each array."""
    tolerance = 2e-2 if one.arrays[0].dtype.itemsize == 2 else 1e-5
    for name, ours, theirs in zip(("y", "dx", "dW"), found, expected, strict=True):
        difference = np.abs(ours - theirs).max() / np.abs(theirs).max()
        if not difference < tolerance:
            raise RunError(f"{name} of {one.name} differs from ragged_dot's by {difference:.1e} of its largest")


if __name__ == "__main__":
    sys.exit(main())
