"""Dropout that is the same on every mesh.

Whether an element is dropped is a function of (seed, step, layer, site) and of the element's index in the global batch:
its sample, its position or head, its column. No device has a generator, so one device and four hundred draw the same
masks, a resumed run draws the same masks, and the backward pass draws them again instead of storing them.

The function is a counter hash: two rounds of a 32-bit integer mixer over the column, keyed by two words per row. It
fuses with its neighbours, which a call to a random-number generator would not. It is meant for dropout only; initial
weights and sampling use `jax.random`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from mjax.parallel.autodiff import linear_call
from mjax.parallel.token_layout import TokenLayout

# Sites of dropout, each with different masks. The first and the last are outside the layers: they count as layer 0.
EMBEDDING, ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT, HEAD = 0, 1, 2, 3, 4
# The inputs of adapters (`lora/adapters.py`).
LORA_QKV, LORA_OUT, LORA_UP, LORA_DOWN = 5, 6, 7, 8


@jax.jit  # traced once for each shape
def mix_bits(x: UInt32[Array, "*dims"]) -> UInt32[Array, "*dims"]:
    """A bijection of uint32 in which every input bit reaches every output bit (C. Wellons' lowbias32)."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def uint32_words(x: Shaped[Array, "*dims"]) -> UInt32[Array, "*words"]:
    """The bits of each number as one uint32, [*dims], or of a 64-bit number as two, [*dims, 2]."""
    return jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").astype(jnp.uint32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DropoutKey:
    """The key of the dropout masks of one forward pass.

    Attributes:
      words: hashed from seed, step, layer and site.
      samples: each local sequence's index in the global batch.
    """

    words: UInt32[Array, " 2"]
    samples: UInt32[Array, " b"]

    @classmethod
    def make(cls, seed: int, step: Int[Array, ""], samples: Shaped[Array, " b"]) -> DropoutKey:
        """Return the key of a step; fold in layers and sites."""
        start = jnp.array([seed, seed ^ 0x9E3779B9], jnp.uint32)
        return cls(mix_bits(start), samples.astype(jnp.uint32)).fold_in(step)

    def fold_in(self, number: Shaped[Array, ""] | int) -> DropoutKey:
        """Return the key of the `number`-th step, layer or site, as `jax.random.fold_in`."""
        number = jnp.asarray(number).astype(jnp.uint32)
        step = jnp.stack([number, number + np.uint32(0x85EBCA6B)])
        return DropoutKey(mix_bits(mix_bits(self.words + step) ^ self.words[::-1]), self.samples)

    def row_words(self, *indices: Int[Array, " _"]) -> tuple[UInt32[Array, " b *i"], UInt32[Array, " b *i"]]:
        """Two random words for each row of an array whose leading dims are (samples, *indices)."""
        first, second = self.samples + self.words[0], self.samples ^ self.words[1]
        for index in indices:
            index = index.astype(jnp.uint32)
            first, second = mix_bits(first)[..., None] + index, mix_bits(second)[..., None] ^ index
        return mix_bits(first), mix_bits(second)


def keep_mask(
    rate: float, rows: tuple[UInt32[Array, "*rows"], UInt32[Array, "*rows"]], columns: int
) -> Bool[Array, "*rows {columns}"]:
    """Mask of the elements to keep, from `row_words`; each is dropped with probability `rate`."""
    first, second = (row[..., None] for row in rows)
    return keep_mask_from_words(rate, first, second, jnp.arange(columns, dtype=jnp.uint32))


def keep_mask_from_words(rate: float, first: Array, second: Array, column: Array) -> Array:
    """`keep_mask` of these columns in rows with these words: bool, of the broadcast shape."""
    word = mix_bits(mix_bits(column + first) ^ second)
    return word < np.uint32(min(round((1.0 - rate) * 2**32), 2**32 - 1))


def dropout(
    x: Float[Array, "b *i columns"],
    rate: float,
    key: DropoutKey | None,
    *indices: Int[Array, " _"],
    first_column: Int[Array, ""] | int = 0,
) -> Float[Array, "b *i columns"]:
    """Zero elements of `x` with probability `rate` and scale the others by 1 / (1 − rate).

    Args:
      rate: probability; 0 returns `x`.
      key: selects the masks; None (evaluation) returns `x`.
      indices: for each middle dim, the *global* index of each of its local elements (positions, heads).
      first_column: global index of the first column.
    """
    if key is None or rate == 0.0:
        return x
    assert x.ndim == 2 + len(indices), f"{x.ndim} dims need {x.ndim - 2} indices, got {len(indices)}"
    first, second = key.row_words(*indices)
    if not isinstance(first_column, int) or first_column:
        first = first + jnp.uint32(first_column)  # `keep_mask` adds the index of a column to it
    return _dropout(x, (first, second), rate)


def dropout_tokens(
    x: Float[Array, "t h"], rate: float, key: DropoutKey | None, tokens: TokenLayout
) -> Float[Array, "t h"]:
    """`dropout` of a residual stream with rows as in `tokens`: the mask of [b, s, h], on whatever rank the rows are."""
    if key is None or rate == 0.0:
        return x
    rows = key.row_words(tokens.position_ids())  # [b, s] each
    return _dropout(x, tuple(tokens.local_rows(words.reshape(-1)) for words in rows), rate)


def _dropout(x: Array, rows: tuple[Array, Array], rate: float) -> Array:
    def mask(x, rows):  # its transpose hashes again: a scan over layers would stack masks
        wide = jnp.promote_types(x.dtype, jnp.float32)  # 1 / 0.9 in bf16 would bias the mean by 0.16%
        scaled = (x.astype(wide) * (1.0 / (1.0 - rate))).astype(x.dtype)
        return jnp.where(keep_mask(rate, rows, x.shape[-1]), scaled, jnp.zeros_like(scaled))

    return linear_call(mask, mask, x, rows)
