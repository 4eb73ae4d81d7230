"""LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467); statistics in float32.

    LayerNorm   y = (x − mean(x)) / √(var(x) + ε) · w + b
    RMSNorm     y = w · cast(x / √(mean(x²) + ε))              cast to the dtype of x before · w, as in Llama

RMSNorm also normalizes queries or keys, each head separately, with one weight [d] for all (Qwen 3).
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.parallel import mappings
from mjax.parallel.autodiff import blockwise_sum, optimization_barrier, with_backward
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.weights import make_param


class LayerNorm(nnx.Module):
    """Normalize the last dim to mean 0 and variance 1, then scale and shift; the weights are replicated."""

    def __init__(self, width: int, epsilon: float, dtype):
        self.epsilon = epsilon
        self.scale = make_param(None, jax.nn.initializers.ones, (width,), ("out",), dtype)
        self.bias = make_param(None, jax.nn.initializers.zeros, (width,), ("out",), dtype)

    def __call__(self, x: Float[Array, "*rows h"]) -> Float[Array, "*rows h"]:
        return _norm(x, self.scale[...], self.bias[...], self.epsilon)


class RMSNorm(nnx.Module):
    """Normalize the last dim to mean square 1, then scale; the weight is replicated.

    With `of_heads` x are heads, different ones on each rank of `model`.
    """

    initial_scale = staticmethod(jax.nn.initializers.ones)

    def __init__(self, width: int, epsilon: float, dtype, of_heads: bool = False):
        self.epsilon = epsilon
        init = self.initial_scale
        self.scale = make_param(None, init, (width,), ("out",), dtype, grad_partial_over_model=of_heads)

    def __call__(self, x: Float[Array, "*rows h"]) -> Float[Array, "*rows h"]:
        return _norm(x, self.scale[...], None, self.epsilon)


def scale_rows(x: Array, inverse: Array, scale: Array) -> Array:
    """cast(x · inverse) · scale. The product and the scale's gradient are exact in float32 and rounded once."""
    wide = accumulation_dtype(x.dtype)
    rows = (x.astype(wide) * inverse).astype(x.dtype)
    return (rows.astype(wide) * scale.astype(wide)).astype(x.dtype)


# --- Forward and backward ---------------------------------------------------------------------------------------------


def _norm(
    x: Float[Array, "*rows h"], scale: Float[Array, " h"], bias: Float[Array, " h"] | None, epsilon: float
) -> Float[Array, "*rows h"]:
    """LayerNorm of the last dim, or without a bias RMSNorm.

    The backward pass recomputes the statistics from x, which the residual stream saves anyway: autodiff would save
    several float32 arrays of x's shape, more than the rest of the layer together. It is custom for the memory traffic
    of a GPU: the gradient of x needs sums along rows, the gradients of the weights need sums over rows, and no XLA
    kernel computes both. From one program it would write the normalized rows in float32 for the second kernel. After a
    barrier the second reads x and the statistics of each row.
    """
    axes = mappings.varying_axes(x)
    weights = (None if weight is None else mappings.vary(weight, axes) for weight in (scale, bias))

    def forward(_, saved):
        x, scale, bias = saved
        statistics = _statistics(x, epsilon, bias is not None)
        if bias is None:
            return scale_rows(x, *statistics, scale)
        return (_normalize(x, statistics) * scale + bias).astype(x.dtype)

    return with_backward(forward, partial(_norm_backward, epsilon), (), (x, *weights))


def _norm_backward(epsilon: float, saved, gradient: Array):
    x, scale, bias = saved
    x, gradient = optimization_barrier((x, gradient))
    statistics = _one_pass_statistics(x, epsilon) if bias is not None else _statistics(x, epsilon, False)
    rows = _normalize(x, statistics)
    dy = gradient.astype(rows.dtype)
    drows = dy * scale
    dx = drows - rows * (drows * rows).mean(-1, keepdims=True)
    if bias is not None:
        dx = dx - drows.mean(-1, keepdims=True)
    dx = (dx * statistics[-1]).astype(x.dtype)

    rows = _normalize(x, optimization_barrier(statistics))
    rows = rows.astype(x.dtype) if bias is None else rows

    def sum_rows(terms, weight):
        return blockwise_sum(terms.reshape(-1, terms.shape[-1])).astype(weight.dtype)

    return None, (dx, sum_rows(dy * rows, scale), None if bias is None else sum_rows(dy, bias))


def _statistics(x: Float[Array, "*rows h"], epsilon: float, centered: bool) -> tuple[Float[Array, "*rows 1"], ...]:
    """Mean of the last dim, if `centered`, and the inverse of the root of the mean square around it or around 0; in
    float32 or wider."""
    wide = x.astype(accumulation_dtype(x.dtype))
    mean = [wide.mean(-1, keepdims=True)] if centered else []
    return *mean, jax.lax.rsqrt(jnp.square(_subtract_mean(wide, mean)).mean(-1, keepdims=True) + epsilon)


def _one_pass_statistics(
    x: Float[Array, "*rows h"], epsilon: float
) -> tuple[Float[Array, "*rows 1"], Float[Array, "*rows 1"]]:
    """Mean and inverse standard deviation, from the distances to the first element of a row: their sum and the sum of
    their squares are one kernel, and neither is large compared with the variance."""
    wide = x.astype(accumulation_dtype(x.dtype))
    first = wide[..., :1]
    mean = (wide - first).mean(-1, keepdims=True)
    variance = jnp.square(wide - first).mean(-1, keepdims=True) - jnp.square(mean)
    return first + mean, jax.lax.rsqrt(jnp.maximum(variance, 0.0) + epsilon)


def _normalize(x: Array, statistics: tuple[Array, ...]) -> Array:
    """x with mean 0, if that is among the statistics, and mean square 1, in float32 or wider."""
    *mean, inverse = statistics
    return _subtract_mean(x.astype(inverse.dtype), mean) * inverse


def _subtract_mean(x: Array, mean: list[Array]) -> Array:
    return x - mean[0] if mean else x
