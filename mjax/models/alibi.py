"""ALiBi: attention that knows positions by their distance (Press et al., arXiv 2108.12409, section 3).

Nothing is added to the embedding. Each head lowers its scores in proportion to how far back a key lies:

    score of key j for query i ≤ position      q_i · k_j / √d  −  m (i − j)          m > 0, the slope of the head

Slopes are fixed: no weight, no gradient. A head with a steep slope looks at its neighbourhood, one with a gentle slope
far back. For n heads, n a power of two, they are the geometric sequence 2^(−8/n), 2^(−16/n), …, 2^(−8). For any other n
they are those of the next lower power of two, then every second one of twice that many, as in the authors' code:

    heads    slopes
    4        2^−2        2^−4        2^−6        2^−8
    6        2^−2        2^−4        2^−6        2^−8        2^−1        2^−3

Megatron-DeepSpeed and `transformers` add m · j instead, from which m (i − j) differs by a number that all keys of a
query share and softmax does not see. Here it is the distance, because that is small, and so exact, where attention is
not negligible.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.mappings import MODEL


def alibi_slopes(heads: int) -> np.ndarray:
    """The slopes m of all heads of a layer: float64 [n], above 0."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8 * np.arange(1, 2 * lower, 2) / (2 * lower))
    return np.concatenate([slopes, between])[:heads]


def local_slopes(heads: int) -> Array:
    """The slopes of this rank's heads, from inside `shard_map`: [n / p], varying over `model`.

    Args:
      heads: n, of all ranks together.
    """
    own = heads // mappings.size(MODEL)
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(alibi_slopes(heads)), mappings.rank(MODEL) * own, own)


def distance_penalty(slopes: Array, ahead: Array, dtype) -> Array:
    """What is added to the scores, −m (i − j).

    Args:
      slopes: [n].
      ahead: int [*b, q, k], j − i: how far a key lies ahead of its query, below 0 for the past.
      dtype: type of the scores.

    Returns:
      [*b, n, q, k].
    """
    return slopes[:, None, None].astype(dtype) * ahead[..., None, :, :].astype(dtype)
