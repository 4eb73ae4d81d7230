"""LoRA (arXiv 2106.09685, section 4.1): a model whose weights are frozen, with adapters that are trained.

They are added to any model after it is built: to every linear layer of its stacked layers whose name is among
`lora.targets`. The experts of a mixture are no such layers: they are frozen without adapters. A kernel W is unchanged,
and the layer learns a product of two narrow matrices, A of r columns and B of r rows:

    column-parallel    y_i = f(x) W_i + s · (f(x) A) B_i       A is whole on every rank, B split as W by columns
    row-parallel       y = g(x_i W_i + s · (x_i A_i) B)        A is split as W by rows, B whole on every rank
    replicated         y = x W + s · (x A) B                  A and B are whole on every rank

The adapter is inside the region of its layer: f is applied once for both, and g sums both together. A weight that is
whole on every rank has a part of its gradient on each, and these are summed once a step (`grad_partial_over_model`).
Queries, keys and values have a pair (A, B) each, although they are one kernel. The gate and the other half of a gated
MLP have a pair each, too.
"""

import math
import zlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.config.axes import MODEL
from mjax.config.model import ModelConfig
from mjax.errors import UsageError
from mjax.parallel import mappings
from mjax.parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear, local_columns
from mjax.parallel.linear import Rows, column_parallel_input, linear
from mjax.parallel.random import DropoutKey, dropout, dropout_tokens
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import COLUMNS, IN, INPUTS, LAYER, OUT, OUTPUTS, PART, ROWS, make_param

Linear = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear


class Adapter(nnx.Module):
    """The two matrices of a layer's adapter.

    Attributes:
      a, b: A and B, in float32.
      scale: s, alpha / r or alpha / √r.
      dropout: rate on the input.
    """

    def __init__(self, a: nnx.Param, b: nnx.Param, scale: float, dropout: float):
        self.a, self.b, self.scale, self.dropout = a, b, scale, dropout


class ColumnAdapter(Adapter):
    """The adapters of some parts of a column-parallel kernel: A [h, k, r], B [k, r, *out].

    Attributes:
      parts: the numbers of these k parts.
    """

    def __init__(self, *matrices, parts: tuple[int, ...]):
        super().__init__(*matrices)
        self.parts = parts

    def input(self, x: Float[Array, "t h"], rows: Rows, tokens: TokenLayout, key: DropoutKey | None) -> Rows:
        """The input of A: `rows`, f of the layer's input x, or with dropout f of x with dropout, a second f."""
        if key is None or not self.dropout:
            return rows
        return column_parallel_input(dropout_tokens(x, self.dropout, key, tokens), (), tokens)[0]

    def __call__(
        self, outputs: Sequence[Float[Array, "bs ..."]], x: Float[Array, "bs h"], layer: ColumnParallelLinear
    ) -> list[Float[Array, "bs ..."]]:
        """The outputs of a layer, of each part or of all in one, with s · (x A) B added."""
        narrow = linear(mappings.vary(self.a[...], mappings.varying_axes(x)), x)
        b = self.scale * local_columns(self.b[...], layer.columns, 2)
        deltas = {part: linear(b[i], narrow[:, i]) for i, part in enumerate(self.parts)}
        if layer.split and len(outputs) == 1:
            zeros = jnp.zeros_like(deltas[self.parts[0]])
            deltas = {0: jnp.stack([deltas.get(part, zeros) for part in range(layer.kernel.shape[1])], axis=1)}
        return [y + deltas[part] if part in deltas else y for part, y in enumerate(outputs)]


class RowAdapter(Adapter):
    """The adapter of a row-parallel kernel: A [*into, r], B [r, h]."""

    def __call__(
        self, x: Float[Array, " bs *into"], tokens: TokenLayout, key: DropoutKey | None
    ) -> Float[Array, "bs h"]:
        """This rank's part of s · (x A) B, which is added to the output of the layer."""
        by_sequence = tokens.split_sequences(x.reshape(len(x), -1))
        first = mappings.rank(MODEL) * by_sequence.shape[-1]
        dropped = dropout(by_sequence, self.dropout, key, tokens.position_ids(), first_column=first)
        narrow = linear(self.a[...], dropped.reshape(x.shape), x.ndim - 1)
        return linear(self.scale * mappings.vary(self.b[...], mappings.varying_axes(narrow)), narrow, 1)


class ReplicatedAdapter(Adapter):
    """The adapter of a replicated kernel: A [i, r], B [r, o]."""

    def __call__(self, x: Float[Array, "t i"], tokens: TokenLayout, key: DropoutKey | None) -> Float[Array, "t o"]:
        narrow = linear(self.a[...], dropout_tokens(x, self.dropout, key, tokens))
        return linear(self.scale * self.b[...], narrow)


# --- Adding adapters to a model ---------------------------------------------------------------------------------------


def add_adapters(model: nnx.Module, key: Array, dtype) -> nnx.Module:
    """Freeze the weights of `model` and add the adapters of its config. A is drawn from `key` and the name of the
    layer, and B is zero, so that the results of the model do not change.

    Raises:
      UsageError: the model has no such layer, or the rank is above the maximum for a matrix.
    """
    config, known = model.config, set()
    for _, weight in nnx.iter_graph(model):
        if isinstance(weight, nnx.Param):
            weight.set_metadata(frozen=True)
    wanted = set(config.lora_targets)
    for path, name, layer in list(linear_layers(model)):
        targets = match_targets(name, layer)
        parts = tuple(i for i, target in enumerate(targets) if target in wanted or "all" in wanted)
        known |= set(targets)
        if parts:
            layer_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
            layer.adapter = _make_adapter(layer_key, layer, config, parts, dtype)
    if unknown := sorted(wanted - known - {"all"}):
        raise UsageError(f"--lora.targets {unknown[0]} is not a layer of {config.title}; use {' '.join(sorted(known))}")
    return model


def linear_layers(model: nnx.Module) -> Iterator[tuple[str, str, Linear]]:
    """The linear layers of the stacked layers: dotted path, last name, and the layer."""
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, Linear) and LAYER in layer.kernel.get_metadata()["dims"]:
            yield ".".join(map(str, path)), str(path[-1]), layer


def match_targets(name: str, layer: Linear) -> tuple[str, ...]:
    """The names in `lora.targets` of the parts of a layer, in order; of a layer without parts, its name."""
    return getattr(layer, "parts", ()) or (name,)


def _make_adapter(key: Array, layer: Linear, config: ModelConfig, parts: tuple[int, ...], dtype) -> Adapter:
    """Make the adapter for some parts of a kernel [*layers, *into, (parts,) *out].

    Raises:
      UsageError: the rank is above the maximum for the matrix.
    """
    (layers, into, out), rank, count = _kernel_sizes(layer), config.lora_rank, len(parts)
    rows, columns, settings = math.prod(into), math.prod(out), (config.lora_scale, config.lora_dropout)
    if rank > min(rows, columns):
        fix = f"use at most {min(rows, columns)}"
        raise UsageError(f"--lora.rank {rank} is above the maximum for {rows:,} × {columns:,} matrices; {fix}")

    def make(shape: tuple, dims: tuple, initializer=jax.nn.initializers.zeros, **marks) -> nnx.Param:
        shape, dims = (*layers, *shape), ((LAYER,) * len(layers) + dims)
        return make_param(key, initializer, shape, dims, dtype, muon=False, **marks)

    if isinstance(layer, ColumnParallelLinear):
        a = make((*into, count, rank), (IN, PART, OUT), uniform(rows), grad_partial_over_model=True)
        b = make((count, rank, *out), (PART, IN, COLUMNS, *(OUT,) * (len(out) - 1)))
        return ColumnAdapter(a, b, *settings, parts=parts)
    if isinstance(layer, RowParallelLinear):
        a = make((*into, rank), (ROWS, *(IN,) * (len(into) - 1), OUT), uniform(rows))
        return RowAdapter(a, make((rank, *out), (IN, OUT), grad_partial_over_model=True), *settings)
    return ReplicatedAdapter(make((*into, rank), (IN, OUT), uniform(rows)), make((rank, *out), (IN, OUT)), *settings)


def _kernel_sizes(layer: Linear) -> list[tuple[int, ...]]:
    """The sizes of a layer's kernel along dims that are layers, inputs, and outputs."""
    sizes = list(zip(layer.kernel.get_metadata()["dims"], layer.kernel.shape, strict=True))
    return [tuple(size for dim, size in sizes if dim in kind) for kind in ((LAYER,), INPUTS, OUTPUTS)]


def uniform(inputs: int):
    """PyTorch's initial weights of a linear layer, and peft's of A: uniform up to 1 / √inputs."""
    bound = 1 / math.sqrt(inputs)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
