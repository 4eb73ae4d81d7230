"""Megatron's three parallel layers (arXiv 1909.08053, section 3).

A weight is a whole matrix with a PartitionSpec. Inside `shard_map` the module has only this device's shard:

    ColumnParallelLinear   A = [A_1 … A_p]            y_i = f(x) A_i            no communication forward
    RowParallelLinear      A = [A_1; …; A_p]          y = g(x_1 A_1 + … + x_p A_p) + b
    VocabParallelEmbedding E = [E_1; …; E_p] by rows  x = g(lookup of the ids of this rank's rows)

A column-parallel layer followed by a row-parallel one costs one all-reduce forward (g) and one backward (f), or, with
sequence parallelism, an all-gather and a reduce-scatter of the tokens each way. Activations are rows, one per token;
`TokenLayout` describes them and implements f and g (`gather_rows`, `reduce_rows`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mjax.config.axes import MODEL
from mjax.errors import UsageError
from mjax.parallel import linear, mappings
from mjax.parallel.random import DropoutKey
from mjax.parallel.reductions import add_bias, lookup
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import COLUMNS, IN, OUT, PART, ROWS, TOKEN, is_frozen, make_param


def normal_init(std: float):
    """Initializer N(0, std)."""
    return jax.nn.initializers.normal(std)


class ColumnParallelLinear(nnx.Module):
    """y = x A + b with A split by columns: A = [A_1 … A_p], so rank i computes its columns y_i.

    The output may have several dims, such as (3, heads, head size) for a fused QKV. `split` is the number of the dim
    that is split; dims before it number separate matrices, which `parts` names. If the split dim has fewer columns than
    there are ranks, each rank computes one, the same as its neighbors. With `unfused` the parts along the first dim are
    separate outputs (`apply_column_parallel`), each of a separate matmul, so that none is copied out of a larger one.
    """

    adapter: Any = None
    """LoRA's, if it has one (`lora/adapters.py`)."""

    def __init__(
        self,
        key: Array,
        width: int,
        out: tuple[int, ...],
        split: int,
        std: float,
        dtype,
        bias: bool = True,
        unfused: bool = False,
        parts: tuple[str, ...] = (),
    ):
        self.columns, self.split, self.unfused, self.parts = out[split], split, unfused, parts
        dims = (PART,) * split + (COLUMNS,) + (OUT,) * (len(out) - split - 1)
        self.kernel = make_param(key, normal_init(std), (width, *out), (IN, *dims), dtype, parts=parts, float8=True)
        self.bias = make_param(key, jax.nn.initializers.zeros, out, dims, dtype, parts=parts) if bias else None

    def __call__(
        self, x: Float[Array, "t h"], tokens: TokenLayout, key: DropoutKey | None = None
    ) -> Float[Array, " bs *out"]:
        """Map this rank's rows of the residual stream to the whole output, with out[split] / t, varying over `model`;
        `key` draws the adapter's dropout masks."""
        return apply_column_parallel(x, tokens, self, whole=True, key=key)[0]

    @property
    def frozen(self) -> bool:
        """True if the kernel is not trained."""
        return is_frozen(self.kernel)

    def local_weights(self) -> tuple[Array, Array | None]:
        """The columns of kernel and bias that this rank computes with."""
        bias = None if self.bias is None else local_columns(self.bias[...], self.columns, self.split)
        return local_columns(self.kernel[...], self.columns, self.split + 1), bias


def apply_column_parallel(
    x: Float[Array, "t h"],
    tokens: TokenLayout,
    *layers: ColumnParallelLinear,
    whole: bool = False,
    key: DropoutKey | None = None,
) -> tuple[Float[Array, "bs ..."], ...]:
    """Return the outputs of column-parallel layers with the same input; f is applied once.

    A layer with `unfused` has one output for each of its parts, or with `whole` one for all.
    """
    kernels, biases = zip(*(layer.local_weights() for layer in layers), strict=True)
    rows, kernels = linear.column_parallel_input(x, kernels, tokens, layers[0].frozen)  # f
    adapter = next((layer.adapter for layer in layers if layer.adapter is not None), None)
    adapter_rows = None if adapter is None else adapter.input(x, rows, tokens, key)
    outputs = []
    for layer, kernel, bias in zip(layers, kernels, biases, strict=True):
        by_part = layer.unfused and not whole
        parts = linear.linear_with_bias(rows, kernel, bias, 1, layer.frozen, by_part)  # x A_i + b_i
        outputs += parts if layer.adapter is None else layer.adapter(parts, adapter_rows, layer)
    return tuple(outputs)


def local_columns(weight: Array, columns: int, dim: int) -> Array:
    """The columns of a weight that this rank computes with: its shard, or one column where there are fewer `columns`
    than ranks and each rank has them all."""
    ranks = mappings.size(MODEL)
    if weight.shape[dim] * ranks == columns:
        return weight
    assert weight.shape[dim] == columns, f"a rank has {weight.shape[dim]} of {columns} columns"
    weight = mappings.vary(weight, frozenset({MODEL}))
    return jax.lax.dynamic_slice_in_dim(weight, mappings.rank(MODEL) * columns // ranks, 1, dim)


class RowParallelLinear(nnx.Module):
    """y = x A + b with A split by rows: rank i holds x_i and A_i, and g sums x_i A_i.

    The input may have several dims, such as (heads, head size); the first of them is split.
    """

    adapter: Any = None
    """LoRA's, if it has one (`lora/adapters.py`)."""

    def __init__(self, key: Array, into: tuple[int, ...], width: int, std: float, dtype, bias: bool = True):
        dims = (ROWS, *(IN,) * (len(into) - 1), OUT)
        self.kernel = make_param(key, normal_init(std), (*into, width), dims, dtype, residual=True, float8=True)
        self.bias = make_param(key, jax.nn.initializers.zeros, (width,), (OUT,), dtype, residual=True) if bias else None

    def __call__(
        self, x: Float[Array, " bs *into"], tokens: TokenLayout, key: DropoutKey | None = None
    ) -> Float[Array, "t h"]:
        rows = linear.row_parallel_input(x, tokens)
        y = linear.linear(self.kernel[...], rows, x.ndim - 1, is_frozen(self.kernel))  # x_i A_i
        y = y if self.adapter is None else y + self.adapter(x, tokens, key)
        y = linear.row_parallel_output(y, tokens)  # g
        return y if self.bias is None else add_bias(y, self.bias[...])  # before the sum it would be added t times


class ReplicatedLinear(nnx.Module):
    """y = x A of this rank's rows; every rank of `model` has A."""

    adapter: Any = None
    """LoRA's, if it has one (`lora/adapters.py`)."""

    def __init__(self, key: Array, width: int, out: int, std: float, dtype):
        self.kernel = make_param(key, normal_init(std), (width, out), (IN, OUT), dtype)

    def __call__(
        self, x: Float[Array, "t i"], tokens: TokenLayout, key: DropoutKey | None = None
    ) -> Float[Array, "t o"]:
        y = linear.linear(self.kernel[...], x, frozen=is_frozen(self.kernel))
        return y if self.adapter is None else y + self.adapter(x, tokens, key)


class VocabParallelEmbedding(nnx.Module):
    """Token embedding split by vocabulary rows, used at both ends of the model (tied weights).

    Rank i has the rows of the ids from i·v/t up to (i + 1)·v/t. It looks those up, other ids are zeros, and g sums.

    Rows from `vocabulary` on are padding that makes the table divisible: they get the lowest possible score, so that a
    loss does not depend on their number. (Megatron includes them in the softmax, and trains the model to avoid them.)
    """

    def __init__(self, key: Array, vocabulary: int, rows: int, width: int, std: float, dtype):
        self.vocabulary, self.rows = vocabulary, rows
        self.table = make_param(key, normal_init(std), (rows, width), (TOKEN, OUT), dtype)

    def __call__(self, ids: Int[Array, "b s"], tokens: TokenLayout) -> Float[Array, "t h"]:
        """Embed `ids`, the same on every rank of `model`, and return this rank's rows of the residual stream."""
        table = self.table[...]
        local, is_local = to_local_ids(ids.reshape(-1), table.shape[0])
        return tokens.reduce_rows(jnp.where(is_local[:, None], lookup(table, local), 0))

    def logits(
        self, x: Float[Array, "t h"], tokens: TokenLayout, bias: Float[Array, " v_local"] | None = None
    ) -> Float[Array, "bs v_local"]:
        """Score this rank's rows against every row of the table, plus `bias`; varies over `model`.

        Raises:
          UsageError: a loss in chunks needs the logits of the whole vocabulary.
        """
        if tokens.loss_chunks > 1:
            needs = "needs a loss that computes no logits; call self.output(x).cross_entropy(labels, context) in it"
            raise UsageError(f"--train.loss-chunks {tokens.loss_chunks} {needs}, or remove it")
        table = self.table[...]
        bias = None if bias is None else mappings.vary(bias, mappings.varying_axes(table) | mappings.varying_axes(x))
        logits = linear.vocab_parallel_logits(x, table, bias, tokens, is_frozen(self.table))
        return mask_padding(logits, self.local_vocabulary(table))

    def local_vocabulary(self, table: Float[Array, "v_local h"]) -> Int[Array, ""] | None:
        """The number of this rank's rows that are tokens; at most 0 if all are padding, None if none are."""
        if self.vocabulary == self.rows:
            return None
        return self.vocabulary - mappings.rank(MODEL) * table.shape[0]


def mask_padding(logits: Float[Array, "t v"], tokens: Int[Array, ""] | None) -> Float[Array, "t v"]:
    """Set all columns but the first `tokens` to the lowest number of the dtype; None: all are tokens."""
    if tokens is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < tokens, logits, jnp.finfo(logits.dtype).min)


def to_local_ids(ids: Int[Array, " t"], rows: int) -> tuple[Int[Array, " t"], Bool[Array, " t"]]:
    """Ids as row numbers of this rank's `rows` rows, 0 where another rank has the row; and whether this one has it."""
    local = ids - mappings.rank(MODEL) * rows
    is_local = (local >= 0) & (local < rows)
    return jnp.where(is_local, local, 0), is_local
