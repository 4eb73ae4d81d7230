"""The description of attention, which every kernel reads: mask, scale, ALiBi slopes and dropout."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mjax.config.axes import MODEL
from mjax.parallel import mappings
from mjax.parallel.random import DropoutKey

# A finite stand-in for −∞: added to a score it makes exp() exactly 0, without NaN in any dtype wider than fp16.
MASKED = -1e30
_static = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMask:
    """Softmax(scale · q kᵀ − slope · distance), with dropout, over the positions visible to a query.

    These are all positions, or with `causal` no later one; of these only the last `window`, and only those in the
    query's document.

    Attributes:
      causal: mask later positions; False: bidirectional (BERT).
      window: number of visible positions, including the query's; only with `causal`. None: all up to the query's.
      scale: of the scores, such as Gemma 3's, or that of a latent attention with YaRN; None: 1 / √d.
      rate, key: dropout of the probabilities; without a key there is none, and `rate` has no effect.
      documents: number of each token's document, [b, S]; None: a sample is one document.
      slopes: of ALiBi for these heads; only with `causal`. None: the scores do not depend on positions.
      first_head: global index of the first of these heads, for dropout; by default heads are split equally over
        `model`.
      position_ids: positions of the queries among the key positions, ascending in each half; None: the same.
    """

    causal: bool = field(default=True, metadata=_static)
    window: int | None = field(default=None, metadata=_static)
    scale: float | None = field(default=None, metadata=_static)
    rate: float = field(default=0.0, metadata=_static)
    key: DropoutKey | None = None
    documents: Int[Array, "b S"] | None = None
    slopes: Float[Array, " n"] | None = None
    first_head: Int[Array, ""] | None = None
    position_ids: Int[Array, " s"] | None = None

    def scale_for(self, q: Float[Array, "b s n d"]) -> float:
        """`scale`, or its default for these queries."""
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def visible(self, query: Int[Array, "*q"], key: Int[Array, "*k"]) -> Bool[Array, "*qk"] | bool:
        """True where the position `key` is visible to the position `query`, in the same document."""
        if not self.causal:
            return True
        visible = key <= query
        return visible if self.window is None else visible & (key > query - self.window)

    def heads(self, count: int) -> Int[Array, " n"]:
        """The global indices of this rank's heads."""
        first = mappings.rank(MODEL) * count if self.first_head is None else self.first_head
        return first + jnp.arange(count)
