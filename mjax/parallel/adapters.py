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

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.parallel import mappings
from mjax.parallel.products import linear
from mjax.parallel.random import DropoutKey, dropout_columns
from mjax.parallel.tokens import Tokens


class Adapter(nnx.Module):
    """What a layer's adapter is made of.

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

    def outputs(self, narrow: Float[Array, "bs k r"], b: Array) -> dict[int, Float[Array, "bs ..."]]:
        """By part what is added to its output, from f(x) A and this rank's columns of B."""
        return {part: linear(self.scale * b[i], narrow[:, i], 1) for i, part in enumerate(self.parts)}


class RowAdapter(Adapter):
    """The adapter of a row-parallel kernel: A [*into, r], B [r, h]."""

    def __call__(self, x: Float[Array, " bs *into"], tokens: Tokens, key: DropoutKey | None) -> Float[Array, "bs h"]:
        """This rank's part of what is added to the output of the layer."""
        x = dropout_columns(x, self.dropout, key, tokens)
        narrow = linear(self.a[...], x, x.ndim - 1)
        return linear(self.scale * mappings.vary(self.b[...], mappings.varying_axes(narrow)), narrow, 1)


def uniform(inputs: int):
    """PyTorch's initial weights of a linear layer, and peft's of A: uniform up to 1 / √inputs."""
    bound = 1 / math.sqrt(inputs)
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def stacked_parts(parts: dict[int, Float[Array, " bs *out"]], count: int) -> Float[Array, "bs count *out"]:
    """Some of `count` parts as one array, with zeros in place of the others."""
    like = next(iter(parts.values()))
    return jnp.stack([parts.get(part, jnp.zeros_like(like)) for part in range(count)], axis=1)
