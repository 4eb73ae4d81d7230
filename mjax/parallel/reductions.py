"""Operations whose gradients are sums over many rows, accumulated in float32 and rounded once.

Autodiff transposes a broadcast to a sum and a lookup to a scatter-add, both in the weight's dtype. In bf16, with 8
bits, such a sum rounds at every addition and stops growing once it is 256 times a term. The gradient of an embedding
row used 400 times in a micro-batch is 2% off, used 4,000 times 7% and more. The functions here accumulate in float32,
like PyTorch's autocast; in float32 and float64 they equal autodiff.

    operation        forward          gradient of the weight
    add_bias         y + b            sum over rows, accumulated in float32
    lookup           table[ids]       scatter-add of g into zeros of float32
    tile_rows        rows, b times    sum over the b copies
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mjax.parallel import mappings
from mjax.parallel.autodiff import blockwise_sum, linear_call, to_at_least_float32


def accumulation_dtype(dtype):
    """float32, or `dtype` if that is wider."""
    return jnp.promote_types(dtype, jnp.float32)


def add_bias(y: Float[Array, " t *out"], bias: Float[Array, "*out"]) -> Float[Array, " t *out"]:
    """y + b for every row of y."""

    def add(operands, _):  # as one row: a GPU's matmul fuses that, but XLA would write out a bias of several dims first
        y, bias = operands
        return (y.reshape(y.shape[0], -1) + bias.reshape(-1)).reshape(y.shape)

    varied = mappings.vary(bias, mappings.varying_axes(y))
    return linear_call(add, lambda gradient, _: (gradient, sum_rows(gradient)), (y, varied))


def sum_rows(x: Float[Array, " t *out"]) -> Float[Array, "*out"]:
    """Sum over the first dim, accumulated in float32 or wider and rounded to the dtype of x."""
    return blockwise_sum(to_at_least_float32(x)).astype(x.dtype)


def lookup(table: Float[Array, "rows h"], ids: Int[Array, " t"]) -> Float[Array, "t h"]:
    """table[ids]; each id is below rows."""

    def scatter(gradient, ids):
        total = jnp.zeros((table.shape[0], *gradient.shape[1:]), accumulation_dtype(gradient.dtype))
        total = mappings.vary(total, mappings.varying_axes(gradient)).at[ids].add(gradient.astype(total.dtype))
        return total.astype(gradient.dtype)

    varied = mappings.vary(table, mappings.varying_axes(ids))
    return linear_call(lambda table, ids: table[ids], scatter, varied, ids)


def tile_rows(rows: Shaped[Array, "s h"], count: int) -> Shaped[Array, "{count}*s h"]:
    """`rows` repeated `count` times."""

    def sum_copies(gradient, _):
        copies = gradient.reshape(count, -1, *gradient.shape[1:])
        return copies.sum(0, dtype=accumulation_dtype(gradient.dtype)).astype(gradient.dtype)

    return linear_call(lambda rows, _: jnp.tile(rows, (count, 1)), sum_copies, rows)


# --- Means by name, and sums over micro-batches -----------------------------------------------------------------------

Means = dict[str, Array]  # means by name, or this device's parts of them, from a model's sums


def loss_cotangents(loss_weights: dict[str, float], means: Means | dict[str, jax.ShapeDtypeStruct]) -> Means:
    """The gradient of the loss with respect to each mean: its weight in the loss."""
    return {
        name: mappings.vary(jnp.full(mean.shape, loss_weights.get(name, 0.0), mean.dtype), mappings.varying_axes(mean))
        for name, mean in means.items()
    }


def tree_index(tree, index):
    """Entry `index` of the first dim of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def add_means(total: Means, new: Means) -> Means:
    """`total` with the means of `new` added by name; a name may be in one of them only."""
    return total | {name: tree_add(total[name], x) if name in total else x for name, x in new.items()}


def tree_add(sums, new):
    """The sum of two trees, leaf by leaf, in the dtypes of the first."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new)
