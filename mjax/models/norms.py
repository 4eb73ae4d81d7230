"""RMSNorm (arXiv 1910.07467): x divided by its root mean square, times a weight.

    y = w · cast(x / √(mean(x²) + ε))        statistics in float32, cast to the type of x before the product, as Llama

Over the stream it has a weight [h]. Over queries or keys it comes in two forms: `RMSNorm` of each head by itself, with
one weight [d] for all (Qwen 3); and `AllHeadsRMSNorm` of all heads together with a weight for each [n, d] (OLMo 2).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.axes import MODEL
from mjax.parallel.layers import own_columns, recomputed
from mjax.parallel.sums import wide_type


class RMSNorm(nnx.Module):
    """Normalise the last dim. Shapes: x […, width] → the same; the weight is replicated.

    `of_heads` says that x are heads, which the ranks of `model` have different ones of.
    """

    def __init__(self, width: int, epsilon: float, dtype, of_heads: bool = False):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width, dtype), out_sharding=(None,), eager_sharding=False, partial=of_heads)

    def __call__(self, x: Array) -> Array:
        return recomputed(partial(_rms_norm, epsilon=self.epsilon))(x, self.scale[...])


class AllHeadsRMSNorm(nnx.Module):
    """Normalise all heads of a position together: a sum of squares for each position crosses `model`.

    Shapes: x [b, s, n / p, d], this rank's heads → the same; the weight [n, d] is split by heads. With fewer heads than
    ranks each rank has one, the same as its neighbours.
    """

    def __init__(self, heads: int, size: int, epsilon: float, dtype):
        self.epsilon, self.heads, self.size = epsilon, heads, size
        self.scale = nnx.Param(jnp.ones((heads, size), dtype), out_sharding=(MODEL, None), eager_sharding=False)

    def __call__(self, x: Array) -> Array:
        squares = recomputed(_sum_of_squares)(x)
        summed = x.shape[-2] * mappings.size(MODEL)  # heads, those of several ranks as often
        mean = mappings.sum_over(squares, frozenset({MODEL})) / (summed * self.size)
        scale = own_columns(self.scale[...], self.heads, 0)
        return recomputed(_scaled)(x, jax.lax.rsqrt(mean + self.epsilon), scale)


def _rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    wide = x.astype(wide_type(x.dtype))
    return _scaled(x, jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon), scale)


def _sum_of_squares(x: Array) -> Array:
    return jnp.square(x.astype(wide_type(x.dtype))).sum((-2, -1), keepdims=True)


def _scaled(x: Array, inverse: Array, scale: Array) -> Array:
    """cast(x · inverse) · scale. The product is exact in float32 and rounded once; so is the gradient of the scale."""
    wide = wide_type(x.dtype)
    normed = (x.astype(wide) * inverse).astype(x.dtype)
    return (normed.astype(wide) * scale.astype(wide)).astype(x.dtype)
