"""A layer: attention, MLP and norms.

    Block, pre-LN (arXiv 1909.08053, figure 7b)

    x ─┬─ norm ─ attention ─ dropout ─ + ─┬─ norm ─ MLP ─ dropout ─ + ─▶
       └──────────────────────────────┘   └────────────────────────┘

    Block with norms of the outputs, too (Gemma 3, arXiv 2503.19786)

    x ─┬─ norm ─ attention ─ norm ─ dropout ─ + ─┬─ norm ─ MLP ─ norm ─ dropout ─ + ─▶
       └─────────────────────────────────────┘   └───────────────────────────────┘

    PostNormBlock, the original BERT (figure 7a)

    x ─┬─ attention ─ dropout ─ + ─ norm ─┬─ MLP ─ dropout ─ + ─ norm ─▶
       └──────────────────────┘           └────────────────┘

    OutputNormBlock (OLMo 2, arXiv 2501.00656)

    x ─┬─ attention ─ norm ─ dropout ─ + ─┬─ MLP ─ norm ─ dropout ─ + ─▶
       └──────────────────────────────┘   └────────────────────────┘

Attention and MLP each open and close a tensor-parallel region, so a layer has two all-reduces forward and two backward.
Between them the residual stream is [b·s, h], one row per token of the micro-batch. With sequence parallelism a rank
holds its share of the rows.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mjax.models.parts.attention import Attention
from mjax.models.protocol import ForwardContext
from mjax.parallel import random

Sums = dict[str, Array]


class Block(nnx.Module):
    """One transformer layer, with norms before attention and MLP, of this rank's rows of the residual stream."""

    backward_order: ClassVar[tuple[str, ...]] = ("mlp", "mlp_norm", "attention", "attention_norm")
    """The layer's parts in the order of the backward pass."""

    def __init__(
        self,
        attention_norm: nnx.Module,
        attention: Attention,
        mlp_norm: nnx.Module,
        mlp: nnx.Module,
        dropout: float = 0.0,
        attention_out_norm: nnx.Module | None = None,
        mlp_out_norm: nnx.Module | None = None,
    ):
        """Compose the layer.

        Args:
          attention_norm, mlp_norm: called with x.
          attention, mlp: called with x and a `ForwardContext`.
          dropout: rate for the outputs of attention and MLP.
          attention_out_norm, mlp_out_norm: called with these outputs; None: they have no norm.
        """
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.attention_out_norm, self.mlp_out_norm, self.dropout = attention_out_norm, mlp_out_norm, dropout

    def __call__(
        self, x: Float[Array, "t h"], context: ForwardContext, attention: Callable | None = None
    ) -> Float[Array, "t h"] | tuple[Float[Array, "t h"], Sums]:
        """The stream after the layer, and the sums of its MLP, if it returns some. `attention` replaces the layer's."""
        y = (attention or self.attention)(self.attention_norm(x), context)
        if self.attention_out_norm is not None:
            y = self.attention_out_norm(checkpoint_name(y, "residual"))
        x = checkpoint_name(x + context.dropout(y, self.dropout, random.ATTENTION_OUTPUT), "residual")
        y, sums = split_sums(self.mlp(self.mlp_norm(x), context))
        if self.mlp_out_norm is not None:
            y = self.mlp_out_norm(checkpoint_name(y, "residual"))
        x = x + context.dropout(y, self.dropout, random.MLP_OUTPUT)
        return (x, sums) if sums else x

    def empty_cache(self, sequences: int, slots: int, dtype) -> Any:
        """This rank's cache for generation, before the first position: a pytree of arrays, which only the layer reads
        and writes.

        Args:
          sequences: b, the first dim of every array.
          slots: positions of this rank that the cache must hold.
          dtype: of the residual stream.
        """
        return self.attention.empty_cache(sequences, slots, dtype)

    def decode(
        self, x: Float[Array, "t h"], context: ForwardContext, cached: Any, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], Any]:
        """The layer without dropout, and the cache with the positions of `x`, for generation.

        Args:
          x: whole prompts, padded on the right to one width; with `context.slots` one position per sequence, the one
            after the cached ones.
          context: of these tokens.
          cached: by `empty_cache` and `decode` of this layer; empty for prompts.
          lengths: tokens of each prompt; with `context.slots` positions in the cache.
        """
        caches = []

        def attention(x, context):
            y, cache = self.attention.decode(x, context, cached, lengths)
            caches.append(cache)
            return y

        return split_sums(self(x, context, attention))[0], caches[0]


class PostNormBlock(Block):
    """One transformer layer of the original BERT, with a norm after each residual sum."""

    def __call__(
        self, x: Float[Array, "t h"], context: ForwardContext, attention: Callable | None = None
    ) -> Float[Array, "t h"]:
        y = (attention or self.attention)(x, context)
        x = checkpoint_name(x + context.dropout(y, self.dropout, random.ATTENTION_OUTPUT), "residual")
        x = self.attention_norm(x)
        y = self.mlp(x, context)
        x = x + context.dropout(y, self.dropout, random.MLP_OUTPUT)
        # The input of a norm is saved for its backward pass; in the pre-LN layer it is the next layer's input.
        return self.mlp_norm(checkpoint_name(x, "residual"))


class OutputNormBlock(Block):
    """One transformer layer whose attention and MLP are normed before they are added to the residual stream."""

    def __call__(
        self, x: Float[Array, "t h"], context: ForwardContext, attention: Callable | None = None
    ) -> Float[Array, "t h"]:
        y = (attention or self.attention)(x, context)
        y = self.attention_norm(checkpoint_name(y, "residual"))
        x = checkpoint_name(x + context.dropout(y, self.dropout, random.ATTENTION_OUTPUT), "residual")
        y = self.mlp(x, context)
        y = self.mlp_norm(checkpoint_name(y, "residual"))
        return x + context.dropout(y, self.dropout, random.MLP_OUTPUT)


def split_sums(result: Array | tuple[Array, Sums]) -> tuple[Array, Sums]:
    """Split the result of a layer or of an MLP into its array and its sums by name; {} if it has none."""
    return result if isinstance(result, tuple) else (result, {})
