"""Megatron's three parallel layers and the cross entropy that goes with them (arXiv 1909.08053, section 3).

A weight is a whole matrix with a PartitionSpec beside it. Inside `shard_map` the module sees its own shard only:

    ColumnParallelLinear   A = [A_1 … A_p]            y_i = f(x) A_i            no communication forward
    RowParallelLinear      A = [A_1; …; A_p]          y = g(x_1 A_1 + … + x_p A_p) + b
    VocabParallelEmbedding E = [E_1; …; E_p] by rows  x = g(lookup of the ids that this rank owns)

A column-parallel layer followed by a row-parallel one costs one all-reduce forward (g) and one backward (f).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.mappings import MODEL


def parameter(key: Array, initializer, shape: tuple[int, ...], spec: tuple[str | None, ...], dtype) -> nnx.Param:
    """A weight of the whole model: `spec` names, dim by dim, the mesh axis that splits it."""
    assert len(spec) == len(shape), f"spec {spec} does not name every dim of {shape}"
    return nnx.Param(initializer(key, shape, dtype), out_sharding=spec, eager_sharding=False)


def normal(std: float):
    """Initializer N(0, std)."""
    return jax.nn.initializers.normal(std)


class LayerNorm(nnx.Module):
    """Normalise the last dim to mean 0 and variance 1, then scale and shift; statistics in float32.

    Shapes: x [b, s, h] → [b, s, h]; the weights are replicated.
    """

    def __init__(self, width: int, epsilon: float, dtype):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width, dtype), out_sharding=(None,), eager_sharding=False)
        self.bias = nnx.Param(jnp.zeros(width, dtype), out_sharding=(None,), eager_sharding=False)

    def __call__(self, x: Array) -> Array:
        return _layer_norm(x, self.scale[...], self.bias[...], self.epsilon)


# The backward pass computes the statistics again from x, which the residual stream holds anyway: plain autodiff would
# keep several float32 tensors of x's shape a call, more than the rest of the layer together.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(3,))
def _layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - wide.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)
    return (normed * scale + bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(x: Array, kernel: Array, dims: int) -> Array:
    """y = x A, contracting the last `dims` dims of x with the first of the kernel; both vary over the same mesh axes.

    The backward pass is written out for the order of dims in the weight's gradient: autodiff asks for the transpose of
    gᵀ x, for which XLA copies g on a CPU (a sixth of the step); xᵀ g needs no copy anywhere.

    Shapes: x [b, s, *into], kernel [*into, *out] → y [b, s, *out].
    """
    return _linear_forward(x, kernel, dims)[0]


def _linear_forward(x: Array, kernel: Array, dims: int):
    out = kernel.shape[dims:]
    y = _matrix(x, dims) @ _matrix(kernel, len(out))
    return y.reshape(*x.shape[: x.ndim - dims], *out), (x, kernel)


def _linear_backward(dims: int, residuals, gradient: Array):
    x, kernel = residuals
    out = kernel.ndim - dims
    gradient = _matrix(gradient, out)  # [b s, o]
    to_x, to_kernel = gradient @ _matrix(kernel, out).T, _matrix(x, dims).T @ gradient
    return to_x.reshape(x.shape), to_kernel.reshape(kernel.shape)


def _matrix(x: Array, columns: int) -> Array:
    """`x` with its last `columns` dims as one dim and the others as another."""
    return x.reshape(math.prod(x.shape[: x.ndim - columns]), -1)


linear.defvjp(_linear_forward, _linear_backward)


class ColumnParallelLinear(nnx.Module):
    """y = x A + b with A split by columns: A = [A_1 … A_p], so rank i computes its own columns y_i.

    The output may have several dims, such as (3, heads, head size) for a fused QKV; `split` says which of them is
    split. Shapes: x [b, s, h], the same on every rank of `model` → y [b, s, *out] with out[split] / p, varying over
    `model`.
    """

    def __init__(self, key: Array, width: int, out: tuple[int, ...], split: int, std: float, dtype):
        spec = tuple(MODEL if dim == split else None for dim in range(len(out)))
        self.kernel = parameter(key, normal(std), (width, *out), (None, *spec), dtype)
        self.bias = parameter(key, jax.nn.initializers.zeros, out, spec, dtype)

    def __call__(self, x: Array) -> Array:
        x = mappings.enter(x)  # the gradient of x needs every rank's columns
        y = linear(x, self.kernel[...], 1)  # [b, s, *out / p]
        # Added as one row: on a GPU the product takes that in, but XLA would write out a bias of several dims first.
        return (y.reshape(*x.shape[:-1], -1) + self.bias[...].reshape(-1)).reshape(y.shape)


class RowParallelLinear(nnx.Module):
    """y = x A + b with A split by rows: rank i holds x_i and A_i, and g sums the products.

    The input may have several dims, such as (heads, head size); the first of them is split.
    Shapes: x [b, s, *into] with into[0] / p, varying over `model` → y [b, s, h], the same on every rank.
    """

    def __init__(self, key: Array, into: tuple[int, ...], width: int, std: float, dtype):
        self.kernel = parameter(key, normal(std), (*into, width), (MODEL, *(None,) * len(into)), dtype)
        self.bias = parameter(key, jax.nn.initializers.zeros, (width,), (None,), dtype)

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...]
        y = mappings.leave(linear(x, kernel, kernel.ndim - 1))
        return y + self.bias[...]  # after the sum: before it, the bias would be added p times


class VocabParallelEmbedding(nnx.Module):
    """Token embedding split by vocabulary rows, used at both ends of the model (tied weights).

    Rank i owns the ids from i·v/p up to (i + 1)·v/p, looks those up, leaves zeros for the others, and g sums.
    """

    def __init__(self, key: Array, vocabulary: int, width: int, std: float, dtype):
        self.table = parameter(key, normal(std), (vocabulary, width), (MODEL, None), dtype)

    def __call__(self, tokens: Array) -> Array:
        """Embed `tokens` int [b, s] → [b, s, h], the same on every rank of `model`."""
        table = self.table[...]
        local, owned = owned_rows(tokens, table.shape[0])
        return mappings.leave(jnp.where(owned[..., None], table[local], 0))

    def logits(self, x: Array) -> Array:
        """Score `x` [b, s, h] against every row → [b, s, v / p], varying over `model`."""
        return mappings.enter(x) @ self.table[...].T


def owned_rows(ids: Array, rows: int) -> tuple[Array, Array]:
    """Ids as row numbers of this rank's `rows` rows (0 where another rank owns them), and whether it owns them."""
    local = ids - mappings.rank(MODEL) * rows
    owned = (local >= 0) & (local < rows)
    return jnp.where(owned, local, 0), owned


# --- Cross entropy over a split vocabulary ----------------------------------------------------------------------------


@jax.custom_vjp
def vocab_parallel_cross_entropy(logits: Array, labels: Array) -> Array:
    """Cross entropy −log softmax(logits)[label] when each rank holds v/p of the logits (arXiv 1909.08053, section 3).

    Only the row's maximum, its sum of exponentials and the label's logit cross the model axis: three numbers a token
    in place of v. The one copy of the logits that is kept for the backward pass has the compute type.

    Shapes: logits [b, s, v / p] varying over `model`, labels int [b, s] → loss [b, s], float32 or wider, the same on
    every rank of `model`.
    """
    return _cross_entropy_forward(logits, labels)[0]


def _cross_entropy_forward(logits: Array, labels: Array):
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    highest = mappings.maximum_over_model(wide.max(-1))  # [b, s]
    local, owned = owned_rows(labels, logits.shape[-1])
    label_logit = jnp.take_along_axis(wide, local[..., None], -1)[..., 0]
    label_logit = jnp.where(owned, label_logit - highest, 0.0)
    exponentials = jnp.exp(wide - highest[..., None]).sum(-1)
    exponentials, label_logit = mappings.leave(jnp.stack([exponentials, label_logit]))
    log_sum = jnp.log(exponentials)
    return log_sum - label_logit, (logits, highest + log_sum, labels)


def _cross_entropy_backward(residuals, gradient: Array):
    logits, log_normalizer, labels = residuals
    wide = logits.astype(log_normalizer.dtype)
    probabilities = jnp.exp(wide - log_normalizer[..., None])
    local, owned = owned_rows(labels, logits.shape[-1])
    column = jnp.arange(logits.shape[-1], dtype=local.dtype)
    is_label = owned[..., None] & (column == local[..., None])
    return ((probabilities - is_label) * gradient[..., None]).astype(logits.dtype), None


vocab_parallel_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
