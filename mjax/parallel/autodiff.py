"""Custom backward passes, and barriers that keep XLA's order.

XLA decides when each operation runs, merges matmuls and drops rounding. `optimization_barrier` is the only place with a
barrier of XLA: none of its values is used before all are computed. Numbers are of programs compiled for H100s
(benchmarks/log, of the date given).

    barrier in                    without it XLA                                      measured
    rematerialize                 stores what the backward pass computes again        gpt_1b: 132 ms, else 168 (11-23)
    a norm's weights              writes the normed rows in float32                   gpt_1b: +3 ms (11-23)
    blockwise_sum                 sums rows in a kernel that reads them again         gpt_1b: +14 ms (11-23)
    vocab_parallel_logits         stores their gradient through the layers' backward  bloom_560m: 15.4 GiB, not 11.6
                                  pass, or computes it twice if they have a bias      (11-22)
    reduce_with_overlap           overlaps a reduce-scatter with nothing              gpt_8b waited for them (11-23)
    cross entropy in chunks       computes chunks together, and stores their logits   llama32_1b: +1 GiB (11-23)
    a kernel in float8            rounds those of all layers in one kernel            compiles in 52 s, not 29 (11-23)
    rows in float8                merges small matmuls, which are then in bf16        1 of 14 matmuls (11-23)
    the largest value of a block  reads all values once more                          gpt_1b: +0.1 ms a layer (11-23)
    Muon's iterations             stores every matmul of all of them                  gpt_1b: 7.4 GiB, not 5.8 (11-23)
    Muon's momentum               computes it twice, from a copy of the old one       4 bytes a weight (11-23)
    experts                       starts two collectives in any order                 simulated devices hung (11-24)
    attention with ALiBi          computes the penalty before the loop over layers    bloom_560m: 256 MiB (11-22)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.config import axes
from mjax.parallel import mappings, named_scopes

BLOCK = 128  # rows


def optimization_barrier(values):
    """Return `values`, arrays that vary over the same axes; none is used before all are computed."""
    return jax.lax.optimization_barrier(values)


def match_varying_axes(*trees) -> list:
    """Cast all arrays to vary over the axes that any of them varies over, as `optimization_barrier` needs it."""
    every = frozenset().union(*map(mappings.varying_axes, jax.tree.leaves(trees)))
    return jax.tree.map(lambda array: mappings.vary(array, every), list(trees))


# --- The order of collectives on simulated devices --------------------------------------------------------------------


def _simulated() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size > 1 and mesh.abstract_device is not None and mesh.abstract_device.platform == "cpu"


def start_after(results, tree, over: frozenset[str] = frozenset()):
    """Return `tree`; on simulated devices a collective of one of its arrays starts after those of `results` that vary
    over no axes but the array's and `over`.

    XLA for CPUs gives all collectives one channel, and starts one while a loop before it still runs, unless the loop's
    result goes into it. It is then mixed up with one of the same kind in the loop: a wrong number, or a hang. Barriers
    are removed too early to help, so the arrays depend on bits that are always 0. GPUs run collectives in order.
    """
    if not _simulated():
        return tree

    def wait(leaf: Array) -> Array:
        varying = mappings.varying_axes(leaf)
        before = [result for result in jax.tree.leaves(results) if mappings.varying_axes(result) <= varying | over]
        total = sum(jax.lax.stop_gradient(result).reshape(-1)[:1].sum(dtype=jnp.float32) for result in before)
        never = jax.lax.bitcast_convert_type(jnp.asarray(total, jnp.float32), jnp.uint32) >> 31 >> 1
        never = mappings.psum(never, mappings.varying_axes(never) - varying)
        return jnp.where(never > 0, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(wait, tree)


def run_after(x: Array, weights) -> tuple[Array, Any]:
    """Return both; on simulated devices a layer's weights are gathered after `x` is computed, and in the backward pass
    the gradient of `x` is used after their gradients are summed."""
    if not _simulated():
        return x, weights

    def backward(_, gradients):
        dx, dweights = gradients
        return (start_after(dweights, dx, frozenset(axes.NAMES)), dweights), None

    return with_backward(lambda both, _: (both[0], start_after(*both)), backward, (x, weights), None)


# --- Custom backward passes -------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_backward(forward: Callable, backward: Callable, x, saved):
    """Return `forward(x, saved)`; `backward(saved, gradient)` returns the gradients of x and of `saved`, None for one
    without. Only `saved` is stored for the backward pass."""
    return forward(x, saved)


with_backward.defvjp(
    lambda forward, backward, x, saved: (with_backward(forward, backward, x, saved), saved),
    lambda forward, backward, saved, gradient: backward(saved, gradient),
)


def linear_call(forward: Callable, transpose: Callable, x, residuals=()):
    """Return `forward(x, residuals)`, linear in x; its gradient is `transpose(gradient, residuals)`."""
    return with_backward(forward, lambda residuals, gradient: (transpose(gradient, residuals), None), x, residuals)


def rematerialize(function: Callable) -> Callable:
    """Make `function` of arrays save only its arguments: the backward pass recomputes everything else.

    Like `jax.checkpoint`, but an enclosing checkpoint cannot overrule it: the policy of the outer one also applies
    inside an inner `jax.checkpoint`, and "save what autodiff needs" would save what is to be recomputed.
    """

    def backward(arguments, gradient):
        # Without a loop over layers, XLA would see that the forward pass computes the same, and store its results.
        arguments, gradient = optimization_barrier((arguments, gradient))
        return None, jax.vjp(function, *arguments)[1](gradient)

    def differentiable(*arguments):
        arguments = tuple(match_varying_axes(*arguments))
        return with_backward(lambda _, arguments: function(*arguments), backward, (), arguments)

    return differentiable


def sum_rounds(function: Callable, x, constants, rounds: Int[Array, ""]) -> Float[Array, "*dims"]:
    """Σ function(i, x, constants) over the rounds i, of which only the device knows the number, 1 or more.

    Differentiable in x. The first round is part of the program around it, and its residuals are saved. The backward
    pass computes the other ones again, in a loop, so memory does not depend on their number. Sums are float32 or wider.
    """

    def add_rounds(results: Callable, first, rounds):
        """The sum of `first` and of the results of all rounds but the first, in the dtypes of `first`."""
        widen = partial(jax.tree.map, to_at_least_float32)
        add = lambda i, total: jax.tree.map(jnp.add, total, widen(results(i)))  # noqa: E731
        with jax.named_scope(named_scopes.ROUNDS):
            total = jax.lax.fori_loop(1, rounds, add, widen(first))
        return jax.tree.map(lambda total, first: total.astype(first.dtype), total, first)

    def backward(saved, gradient):
        pullback, x, constants, rounds = saved
        gradients = lambda i: jax.vjp(lambda x: function(i, x, constants), x)[1](gradient)[0]  # noqa: E731
        return (None, add_rounds(gradients, pullback(gradient)[0], rounds)), None

    saved = jax.lax.stop_gradient(x)
    first, pullback = jax.vjp(lambda x: function(0, x, constants), saved)
    total = add_rounds(lambda i: function(i, saved, constants), first, rounds)
    return with_backward(lambda x, _: x[0], backward, (total, x), (pullback, saved, constants, rounds))


# --- Sums over rows ---------------------------------------------------------------------------------------------------


def blockwise_sum(x: Float[Array, " t *out"], reduce: Callable = jnp.sum) -> Float[Array, "*out"]:
    """Sum over the first dim, or reduce it otherwise: blocks of rows first, and then their results.

    On a GPU the kernel that computes x can reduce blocks as it writes, or instead of writing; over all rows it cannot,
    and XLA does not always split the sum.
    """
    if x.shape[0] % BLOCK or x.shape[0] == BLOCK:
        return reduce(x, 0)
    return reduce(optimization_barrier(reduce(x.reshape(-1, BLOCK, *x.shape[1:]), 1)), 0)


def to_at_least_float32(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`x` in float32, or unchanged if it is wider; a bf16 is converted by its bits, the upper half of a float32.

    XLA drops a conversion to bf16 whose result is converted back. A sum of float32 values would then read the values
    before rounding, which XLA would write to memory together with the rounded ones: twice the bytes of x. With the bits
    it reads the rounded values, which the kernel that computes them can sum as it writes them.
    """
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
