"""Ties that order XLA, and backward passes that are written out.

A program says what depends on what, and XLA decides when each is computed, joins products and drops rounding. Every
`optimization_barrier` of mjax is a `tie`: none of its values is used before all are computed. Numbers are of programs
compiled for H100s (docs/results/log, of the date given).

    tie in                        without it XLA                                      measured
    recomputed                    keeps what the backward pass computes again         gpt_1b: 132 ms, else 168 (11-23)
    a norm's weights              writes the normed rows in float32                   gpt_1b: +3 ms (11-23)
    in_two_stages                 sums rows in a kernel that reads them again         gpt_1b: +14 ms (11-23)
    logits                        keeps their gradient through the layers' backward   bloom_560m: 15.4 GiB, not 11.6
                                  pass, or computes it twice if they have a bias      (11-22)
    enter                         leaves a reduce-scatter nothing to run during       gpt_8b waited for them (11-23)
    cross entropy in chunks       computes chunks at once, and keeps their logits     llama32_1b: +1 GiB (11-23)
    a kernel in float8            rounds those of all layers in one kernel            compiles in 52 s, not 29 (11-23)
    rows in float8                joins small products, which are then in bf16        1 of 14 products (11-23)
    the largest value of a block  reads all values once more                          gpt_1b: +0.1 ms a layer (11-23)
    Muon's iterations             keeps every product of all of them                  gpt_1b: 7.4 GiB, not 5.8 (11-23)
    Muon's momentum               computes it twice, from a copy of the old one       4 bytes a weight (11-23)
    experts                       starts two collectives in any order                 simulated devices hung (11-24)
    attention with ALiBi          computes the penalty before the loop over layers    bloom_560m: 256 MiB (11-22)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.parallel import mappings

BLOCK = 128  # rows


def tie(values):
    """`values`, a tree of arrays that vary over the same axes: none is used before all are computed."""
    return jax.lax.optimization_barrier(values)


def vary_alike(*trees) -> list:
    """All arrays cast to vary over the axes that any of them varies over: a tie gives its values one type."""
    axes = frozenset().union(*map(mappings.varying_axes, jax.tree.leaves(trees)))
    return jax.tree.map(lambda array: mappings.vary(array, axes), list(trees))


# --- Backward passes that are written out -----------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_backward(forward: Callable, backward: Callable, x, saved):
    """`forward(x, saved)`, of which `saved` alone is kept: `backward(saved, gradient)` returns the gradients of x and
    of `saved`; None for one that has none."""
    return forward(x, saved)


with_backward.defvjp(
    lambda forward, backward, x, saved: (with_backward(forward, backward, x, saved), saved),
    lambda forward, backward, saved, gradient: backward(saved, gradient),
)


def linear_map(forward: Callable, transpose: Callable, x, aux=()):
    """`forward(x, aux)`, linear in x, whose gradient is `transpose(gradient, aux)`; `aux` has none."""
    return with_backward(forward, lambda aux, gradient: (transpose(gradient, aux), None), x, aux)


def rematerialize(function: Callable) -> Callable:
    """`function` of arrays that keeps only its arguments: the backward pass recomputes everything else.

    Like `jax.checkpoint`, but an enclosing checkpoint cannot overrule it: the policy of the outer one also applies
    inside an inner `jax.checkpoint`, and "keep what autodiff needs" would keep what is to be recomputed.
    """

    def backward(arguments, gradient):
        # Where layers are not in a loop, XLA would find that the forward pass computes the same, and keep its results.
        arguments, gradient = tie((arguments, gradient))
        return None, jax.vjp(function, *arguments)[1](gradient)

    def differentiable(*arguments):
        return with_backward(lambda _, arguments: function(*arguments), backward, (), tuple(vary_alike(*arguments)))

    return differentiable


# --- Sums over rows ---------------------------------------------------------------------------------------------------


def blockwise_sum(x: Float[Array, " t *out"], reduce: Callable = jnp.sum) -> Float[Array, "*out"]:
    """The sum over the first dim, or another reduction: of blocks of rows, and then of their results.

    On a GPU the kernel that computes x can reduce blocks as it writes, or instead of writing; over all rows it cannot,
    and XLA does not always cut the sum by itself.
    """
    if x.shape[0] % BLOCK or x.shape[0] == BLOCK:
        return reduce(x, 0)
    return reduce(tie(reduce(x.reshape(-1, BLOCK, *x.shape[1:]), 1)), 0)


def to_at_least_float32(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`x` in float32, or as it is if that is wider; a bf16 is converted by its bits, the upper half of a float32.

    XLA drops a conversion to bf16 whose result is converted back. A sum of float32 values would then read them before
    the rounding, and XLA would write them to memory for it, beside the rounded ones: twice the bytes of x. This form
    leaves it the rounded ones, which the kernel that computes them can sum as it writes them.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if x.dtype != jnp.bfloat16:
        return x.astype(wide)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
