"""Position encodings inside attention: none, for a model that adds them to its embedding, or ALiBi.

ALiBi encodes positions by distance (Press et al., arXiv 2108.12409, section 3).

Nothing is added to the embedding. Each head lowers its scores in proportion to the distance of the key:

    score of key j for query i ≤ position      q_i · k_j / √d  −  m (i − j)          m > 0, the slope of the head

Slopes are fixed: no weight, no gradient. A head with a steep slope attends locally, one with a gentle slope far back.
For n heads, n a power of two, they are the geometric sequence 2^(−8/n), 2^(−16/n), …, 2^(−8). For any other n they are
the slopes for the next lower power of two, then every second slope for twice that many heads, as in the authors' code:

    heads    slopes
    4        2^−2        2^−4        2^−6        2^−8
    6        2^−2        2^−4        2^−6        2^−8        2^−1        2^−3

Megatron-DeepSpeed and `transformers` add m · j instead, which differs from −m (i − j) by the same number for all keys
of a query, to which softmax is invariant. Here it is the distance, because that is small, and so precise, where
attention is not negligible.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mjax.config.axes import MODEL
from mjax.errors import UsageError
from mjax.models.protocol import ForwardContext
from mjax.parallel import mappings
from mjax.parallel.reductions import lookup, tile_rows
from mjax.parallel.token_layout import TokenLayout


@dataclass(frozen=True)
class Positions:
    """The position encoding of attention; this one does nothing. Subclasses override one of the two methods."""

    def __init_subclass__(cls):
        if "turn" in vars(cls):
            raise UsageError(f"{cls.__name__}.turn is apply_to_qk now; rename the method")

    def apply_to_qk(
        self, q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], context: ForwardContext
    ) -> tuple[Float[Array, "b s n d"], Float[Array, "b s k d"]]:
        """Apply the encoding to queries and keys; a rotary embedding rotates them here."""
        return q, k

    def slopes(self) -> Float[Array, " n"] | None:
        """The penalty on a score for one position of distance, for each of this rank's heads; None: no penalty."""
        return None


NO_POSITIONS = Positions()


def position_embeddings(table: Float[Array, "S h"], tokens: TokenLayout) -> Float[Array, "bs h"]:
    """Rows of a learned table of positions, one for each token."""
    if not tokens.context_attention:
        return tile_rows(table[: tokens.positions], tokens.sequences)
    return tile_rows(lookup(table, tokens.position_ids()), tokens.sequences)


@dataclass(frozen=True)
class ALiBi(Positions):
    """A penalty on the distance between two tokens.

    Attributes:
      heads: n, over all ranks.
    """

    heads: int

    def slopes(self) -> Float[Array, " n"]:
        """The slopes of this rank's heads, inside `shard_map`, varying over `model`."""
        local = self.heads // mappings.size(MODEL)
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(alibi_slopes(self.heads)), mappings.rank(MODEL) * local, local)


def alibi_slopes(heads: int) -> Float[np.ndarray, " {heads}"]:
    """The slopes m of all heads of a layer, above 0."""
    lower = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8 * np.arange(1, 2 * lower, 2) / (2 * lower))
    return np.concatenate([slopes, between])[:heads]


def distance_penalty(slopes: Float[Array, " n"], ahead: Int[Array, "*b q k"], dtype) -> Float[Array, "*b n q k"]:
    """The bias for the scores, −m (i − j), in their dtype.

    `ahead` is j − i: how far a key is ahead of its query, below 0 for the past.
    """
    return slopes[:, None, None].astype(dtype) * ahead[..., None, :, :].astype(dtype)
