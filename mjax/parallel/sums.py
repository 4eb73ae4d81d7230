"""Operations whose gradients are sums over many rows, accumulated in float32 and rounded once.

Autodiff writes the transpose of a broadcast as a sum, and that of a lookup as a scatter-add, in the dtype of the
weight. In bf16, with 8 bits, such a sum rounds at every addition and stops growing once it is 256 times a term: the
gradient of an embedding row used 400 times in a micro-batch is 2% off, of one used 4,000 times 7% and more. PyTorch's
autocast accumulates these in float32, and so do the functions here; in float32 and float64 they equal autodiff.

    operation        forward          gradient of the weight
    add_bias         y + b            sum over rows, accumulated in float32
    lookup           table[ids]       scatter-add of g into zeros of float32
    tile_rows        rows, b times    sum over the b copies
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mjax.parallel import mappings

BLOCK = 128  # rows


def wide_type(dtype):
    """float32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def add_bias(y: Float[Array, " t *out"], bias: Float[Array, "*out"]) -> Float[Array, " t *out"]:
    """y + b for every row of y."""
    return _add_bias(y, mappings.vary(bias, mappings.varying_axes(y)))


# Added as one row: on a GPU the preceding product fuses that, but XLA would write out a bias of several dims first.
@jax.custom_vjp
def _add_bias(y: Array, bias: Array) -> Array:
    return (y.reshape(y.shape[0], -1) + bias.reshape(-1)).reshape(y.shape)


_add_bias.defvjp(
    lambda y, bias: (_add_bias(y, bias), None),
    lambda _, gradient: (gradient, sum_rows(gradient)),
)


def sum_rows(x: Float[Array, " t *out"]) -> Float[Array, "*out"]:
    """Sum over the first dim, accumulated in float32 or wider and rounded to the dtype of x."""
    return in_two_stages(widened(x)).astype(x.dtype)


def in_two_stages(x: Float[Array, " t *out"]) -> Float[Array, "*out"]:
    """Sum over the first dim: of blocks of rows, and then of their sums.

    On a GPU the kernel that computes x can add up blocks as it writes, or instead of writing; over all rows it cannot,
    and XLA does not always cut the sum by itself.
    """
    if x.shape[0] % BLOCK or x.shape[0] == BLOCK:
        return x.sum(0)
    blocks = x.reshape(-1, BLOCK, *x.shape[1:]).sum(1)
    return jax.lax.optimization_barrier(blocks).sum(0)


def widened(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`x` in float32, or as it is if that is wider; a bf16 is converted by its bits, the upper half of a float32.

    XLA drops a conversion to bf16 whose result is converted back. A sum of float32 values would then read them before
    the rounding, and XLA would write them to memory for it, beside the rounded ones: twice the bytes of x. This form
    leaves it the rounded ones, which the kernel that computes them can sum as it writes them.
    """
    if x.dtype == wide_type(x.dtype):
        return x
    if x.dtype != jnp.bfloat16:  # no such bits: what is behind a barrier is read again
        return jax.lax.optimization_barrier(x).astype(wide_type(x.dtype))
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)


def lookup(table: Float[Array, "rows h"], ids: Int[Array, " t"]) -> Float[Array, "t h"]:
    """table[ids]; each id is below rows."""
    return _lookup(table.shape[0], mappings.vary(table, mappings.varying_axes(ids)), ids)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(rows: int, table: Array, ids: Array) -> Array:
    return table[ids]


def _lookup_backward(rows: int, ids: Array, gradient: Array):
    total = jnp.zeros((rows, *gradient.shape[1:]), wide_type(gradient.dtype))
    total = mappings.vary(total, mappings.varying_axes(gradient)).at[ids].add(gradient.astype(total.dtype))
    return total.astype(gradient.dtype), None


_lookup.defvjp(lambda rows, table, ids: (_lookup(rows, table, ids), ids), _lookup_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def tile_rows(rows: Shaped[Array, "s h"], count: int) -> Shaped[Array, "{count}*s h"]:
    """`rows` repeated `count` times."""
    return jnp.tile(rows, (count, 1))


def _tile_rows_backward(count: int, _, gradient: Array):
    copies = gradient.reshape(count, -1, *gradient.shape[1:])
    return (copies.sum(0, dtype=wide_type(gradient.dtype)).astype(gradient.dtype),)


tile_rows.defvjp(lambda rows, count: (tile_rows(rows, count), None), _tile_rows_backward)
