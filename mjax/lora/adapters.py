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
from mjax.parallel.products import Rows, enter, linear
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

    def input(self, x: Float[Array, "t h"], entered: Rows, tokens: Tokens, key: DropoutKey | None) -> Rows:
        """What A multiplies: `entered`, f of the layer's input x, unless dropout gives it another one, which costs an f
        of its own."""
        if key is None or not self.dropout:
            return entered
        return enter(dropout_tokens(x, self.dropout, key, tokens), (), tokens)[0]

    def __call__(
        self, outputs: Sequence[Float[Array, "bs ..."]], x: Float[Array, "bs h"], layer: ColumnParallelLinear
    ) -> list[Float[Array, "bs ..."]]:
        """The outputs of a layer, of each part or of all in one, with s · (x A) B added."""
        narrow = linear(mappings.vary(self.a[...], mappings.varying_axes(x)), x)
        b = self.scale * local_columns(self.b[...], layer.columns, 2)
        own = {part: linear(b[i], narrow[:, i]) for i, part in enumerate(self.parts)}
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
