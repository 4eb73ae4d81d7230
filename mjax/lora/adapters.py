"""LoRA's adapters beside the kernels of Megatron's parallel layers (arXiv 2106.09685, section 4.1).

A kernel W stays as it is, and the layer learns a product of two narrow matrices, A of r columns and B of r rows:

    column-parallel    y_i = f(x) W_i + s · (f(x) A) B_i       A is whole on every rank, B split as W by columns
    row-parallel       y = g(x_i W_i + s · (x_i A_i) B)        A is split as W by rows, B whole on every rank

The adapter is inside the region of its layer: f is applied once for both, and g sums both at once. A weight that is
whole on every rank gets a part of its gradient on each, and these are summed once a step (`grad_partial_over_model`).
Queries, keys and values have a pair (A, B) each, although they are one kernel, and so have the two halves of a gated
MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.config.axes import MODEL
from mjax.parallel import mappings
from mjax.parallel.layers import ColumnParallelLinear, local_columns
from mjax.parallel.products import into_columns, linear
from mjax.parallel.random import DropoutKey, dropout, dropout_tokens
from mjax.parallel.tokens import Tokens


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

    def columns(
        self, x: Float[Array, "t h"], tokens: Tokens, layers: Sequence[ColumnParallelLinear], weights, key
    ) -> tuple[Float[Array, "bs ..."], ...]:
        """Return what `layers.columns` does, with the adapters of the layers: in the same region, unless dropout gives
        them another input, which costs an f of its own.

        Args:
          weights: kernels, biases, unfused and frozen, as `into_columns` takes them.
          key: of the dropout masks.
        """
        kernels, biases, unfused, frozen = weights
        adapters = [layer.adapter for layer in layers if layer.adapter is not None]
        axes = mappings.varying_axes(kernels[0]) | mappings.varying_axes(x)
        downs = tuple(mappings.vary(adapter.a[...], axes) for adapter in adapters)
        nothing, no = (None,) * len(downs), (False,) * len(downs)
        if key is not None and self.dropout:
            outputs = into_columns(x, kernels, biases, tokens, unfused, frozen)
            outputs += into_columns(dropout_tokens(x, self.dropout, key, tokens), downs, nothing, tokens, no, no)
        else:
            outputs = into_columns(x, kernels + downs, biases + nothing, tokens, unfused + no, frozen + no)
        outputs, narrow, sums = iter(outputs), iter(outputs[-len(downs) :]), []
        for layer, is_unfused in zip(layers, unfused, strict=True):
            parts = [next(outputs) for _ in range(layer.kernel.shape[1] if is_unfused else 1)]
            sums += parts if layer.adapter is None else layer.adapter.added(parts, next(narrow), layer)
        return tuple(sums)

    def added(
        self, outputs: list[Float[Array, "bs ..."]], narrow: Float[Array, "bs k r"], layer: ColumnParallelLinear
    ) -> list[Float[Array, "bs ..."]]:
        """The outputs of a layer, of each part or of all in one, with s · (f(x) A) B added; `narrow` is f(x) A."""
        b = self.scale * local_columns(self.b[...], layer.columns, 2)
        own = {part: linear(b[i], narrow[:, i], 1) for i, part in enumerate(self.parts)}
        if layer.split and len(outputs) == 1:
            nothing = jnp.zeros_like(own[self.parts[0]])
            own = {0: jnp.stack([own.get(part, nothing) for part in range(layer.kernel.shape[1])], axis=1)}
        return [y + own[part] if part in own else y for part, y in enumerate(outputs)]


class RowAdapter(Adapter):
    """The adapter of a row-parallel kernel: A [*into, r], B [r, h]."""

    def __call__(self, x: Float[Array, " bs *into"], tokens: Tokens, key: DropoutKey | None) -> Float[Array, "bs h"]:
        """This rank's part of what is added to the output of the layer."""
        by_sequence = tokens.by_sequence(x.reshape(len(x), -1))
        first = mappings.rank(MODEL) * by_sequence.shape[-1]
        dropped = dropout(by_sequence, self.dropout, key, tokens.position_ids(), first_column=first)
        narrow = linear(self.a[...], dropped.reshape(x.shape), x.ndim - 1)
        return linear(self.scale * mappings.vary(self.b[...], mappings.varying_axes(narrow)), narrow, 1)
