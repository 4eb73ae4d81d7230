"""Attention of sequences whose positions are split over `context`, with any of the kernels
(`attention_kernels.py`).

    heads     an all-to-all gives each rank all positions of n / c of the heads, and one back its own positions of all
              (DeepSpeed-Ulysses, arXiv 2309.14509). Kernels, windows, documents and masks see whole sequences.

                  [b, s / c, n, d] ── all-to-all ──▶ [b, s, n / c, d] ── attention ── all-to-all ──▶ [b, s / c, n, d]

    gather    every rank gets the keys and values of all positions, and attends from its own queries (Llama 3, arXiv
              2407.21783, section 3.3.2). With grouped heads these are few. The backward pass sums their gradients by a
              reduce-scatter. Queries are balanced: rank r of c has the chunks r and 2c − 1 − r of 2c (`tokens.py`).

Numbers sent by a rank in the forward pass of a layer: 4 · (c − 1) / c · b s n d / c of `heads`, and 2 · (c − 1) / c ·
b s k d of `gather`, with n heads and k key-value heads on a rank of `model`.

Where there are fewer key-value heads than ranks of `context`, `heads` sends copies of them, which rank needs which:
lcm(k, c) heads. Their gradients are summed where they come from.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from mjax.models.attention_kernels import attend
from mjax.parallel import mappings
from mjax.parallel.axes import CONTEXT, MODEL
from mjax.parallel.tokens import Tokens

HEADS, POSITIONS = 2, 1


def attend_across(
    q: Array, k: Array, v: Array, kernel: str, tokens: Tokens, slopes: Array | None = None, **seen
) -> Array:
    """`attend` for the positions of all ranks of `context`.

    Args:
      q, k, v: [b, s, n, d], with this rank's positions, and its heads of `model`; keys and values may have fewer.
      tokens: which positions they are, and how to attend to those of other ranks.
      slopes: [n].
      seen: as for `attend`; documents are of whole sequences.

    Returns:
      [b, s, n, d].
    """
    if tokens.across == "heads":
        own = q.shape[HEADS] // mappings.size(CONTEXT)
        first = mappings.rank(CONTEXT) * own
        if slopes is not None:
            slopes = jax.lax.dynamic_slice_in_dim(slopes, first, own)
        first = mappings.rank(MODEL) * q.shape[HEADS] + first
        q, k, v = (mappings.exchange(x, CONTEXT, HEADS, POSITIONS) for x in (q, *map(_enough, (k, v))))
        attended = attend(q, k, v, kernel, slopes=slopes, first_head=first, **seen)
        return mappings.exchange(attended, CONTEXT, POSITIONS, HEADS)
    if tokens.across == "gather":
        seen["places"] = tokens.places()
        k, v = tokens.all_positions(k), tokens.all_positions(v)
    return attend(q, k, v, kernel, slopes=slopes, **seen)


def _enough(x: Array) -> Array:
    """Key-value heads repeated until `context` divides their number."""
    heads, ranks = x.shape[HEADS], mappings.size(CONTEXT)
    copies = math.lcm(heads, ranks) // heads
    return jnp.repeat(x, copies, axis=HEADS) if copies > 1 else x
