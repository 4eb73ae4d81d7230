"""The common part of all models that predict the next token: the loss, and generation with a cache.

A model derives from `CausalModel` and defines `embed` and `output`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.config.axes import CONTEXT, MODEL
from mjax.errors import UsageError
from mjax.models.context import Context
from mjax.models.parts.attention import KeyValues
from mjax.models.parts.output import Output
from mjax.models.protocol import LanguageModel
from mjax.models.stack import run_blocks
from mjax.parallel import mappings
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.random import DropoutKey
from mjax.parallel.tokens import Across, Tokens

# (x, context, cache, lengths) → (x, keys and values of the prompts, or the cache)
DecodeLayers = Callable[[Array, Context, list[KeyValues] | None, Array], tuple[Array, list[KeyValues]]]


class Cache(NamedTuple):
    """The keys and values that a model has read of some sequences.

    Attributes:
      layers: keys and values of each layer.
      slots: which positions this rank's slots hold: all, in order, or its part of them, which then varies
        over `context`.
    """

    layers: list[KeyValues]
    slots: Int[Array, " S"]


class CausalModel(LanguageModel):
    """A decoder-only language model; see `protocol.Model`."""

    loss_weights: ClassVar[dict[str, float]] = {"loss": 1.0}

    def embed(self, batch: dict[str, Array], context: Context) -> Float[Array, "t h"]:
        """The stream before the first layer, of `batch["tokens"]`, int [b, s]."""
        raise NotImplementedError

    def output(self, x: Float[Array, "t h"]) -> Output:
        """The scores of the next token after the last layer."""
        raise NotImplementedError

    def logits(self, x: Float[Array, "t h"], tokens: Tokens) -> Float[Array, "bs v_local"]:
        """Scores of the next token after the last layer, varying over `model`."""
        return self.output(x).logits(tokens)

    def __call__(
        self,
        ids: Int[Array, "b s"],
        key: DropoutKey | None = None,
        recompute: str = "none",
        positions: Int[Array, "b s"] | None = None,
        documents: Int[Array, "b s"] | None = None,
    ) -> Float[Array, "b s v_local"]:
        """Logits of the next token at every position, in the dtype of the weights, varying over `model`.

        Args:
          ids: replicated over `model`.
          key: dropout masks of this forward pass; None for evaluation.
          recompute: `none`, `selective`, `full` or `offload`.
          positions: of each token; by default 0 … s − 1.
          documents: number of each token's document, if attention must stay within it.

        Raises:
          UsageError: the axes of the mesh are unknown here.
        """
        try:
            mappings.size(MODEL)
        except NameError:
            raise UsageError(
                "a model is called within jax.shard_map over its mesh; for the logits of a run, call "
                "mjax.logits(run, ids)"
            ) from None
        context = Context(Tokens(*ids.shape), key, positions, documents)
        x, _ = run_blocks(self.blocks, self.embed({"tokens": ids}, context), context, recompute)
        return context.tokens.by_sequence(self.logits(x, context.tokens))

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        """The number of labels, or of those that the loss mask counts."""
        if "loss_mask" not in batch:
            return {"loss": batch["labels"].size}
        return {"loss": batch["loss_mask"].sum(dtype=jnp.int32)}

    def loss(self, x: Float[Array, "t h"], batch: dict[str, Array], context: Context) -> dict[str, Array]:
        """The cross entropy of the labels that count. The head has no dropout."""
        if context.loss_chunks == 1:  # of a model's own `logits`, too
            losses = vocab_parallel_cross_entropy(self.logits(x, context.tokens), batch["labels"].reshape(-1))
        else:
            losses = self.output(x).cross_entropy(batch["labels"], context)
        if "loss_mask" not in batch:
            return {"loss": losses.sum()}
        return {"loss": losses.sum(where=batch["loss_mask"].reshape(-1))}

    @classmethod
    def scores_in_chunks(cls) -> bool:
        return cls.loss is CausalModel.loss and cls.logits is CausalModel.logits

    # --- Generation ---------------------------------------------------------------------------------------------------

    def all_logits(
        self, ids: Int[Array, "b s"], decode: DecodeLayers, across: Across | None = None
    ) -> Float[Array, "b s v"]:
        """Logits of the next token after every position of whole texts, as `prefill` reads them; replicated over
        `model` and `context`."""
        ranks = mappings.size(CONTEXT) if across else 1
        context = Context(Tokens(ids.shape[0], ids.shape[1] // ranks, across=across))
        x = self.embed({"tokens": ids[:, context.tokens.position_ids()]}, context)
        x, _ = decode(x, context, None, jnp.full(ids.shape[0], ids.shape[1]))
        logits = mappings.gather_whole(self.logits(x, context.tokens), MODEL, -1)
        logits = context.tokens.by_sequence(logits)
        if across:  # each rank has some of the positions
            whole = jnp.zeros((*ids.shape, logits.shape[-1]), logits.dtype)
            whole = mappings.vary(whole, mappings.varying_axes(logits)).at[:, context.tokens.position_ids()].set(logits)
            logits = mappings.sum_over(whole, frozenset({CONTEXT}))
        return logits

    def prefill(
        self,
        prompts: Int[Array, "b s"],
        lengths: Int[Array, " b"],
        slots: int,
        decode: DecodeLayers,
        across: Across | None = None,
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Read whole prompts at once, and keep the keys and values of their positions.

        The slot in the cache is the position. So prompts of different lengths are padded on the right: causal attention
        never sees later positions, and decoding overwrites the padding before it could. With `across` every rank of
        `context` reads a part of the positions, as in training, and keeps it; of the slots behind the prompts each has
        an equal part, too.

        Args:
          prompts: padded on the right with any valid id.
          lengths: tokens of each prompt, at least 1.
          slots: size of the cache over all ranks of `context`, at least s; both are multiples of
            `Config.sequence_chunks` and of that axis.
          decode: runs the layers, of this model: `decode_layers`, or over the stages of a pipeline.
          across: how attention sees the positions of other ranks of `context`; None: every rank reads all of them.

        Returns:
          Logits of the token after each prompt, replicated over `model` and `context`, and the cache.
        """
        width, ranks = prompts.shape[1], mappings.size(CONTEXT) if across else 1
        context = Context(Tokens(prompts.shape[0], width // ranks, across=across))
        position_ids, more = context.tokens.position_ids(), (slots - width) // ranks
        first = width + more * mappings.rank(CONTEXT) if across else width
        x = self.embed({"tokens": prompts[:, position_ids]}, context)
        x, new = decode(x, context, None, lengths)
        is_last = position_ids == (lengths - 1)[:, None]
        last = context.tokens.by_sequence(x).sum(1, where=is_last[..., None])  # of one, so exact
        if across:
            last = mappings.sum_over(last, frozenset({CONTEXT}))
        room = lambda part: [(0, 0)] * (part.ndim - 2) + [(0, more), (0, 0)]  # noqa: E731
        layers = jax.tree.map(lambda part: jnp.pad(part.swapaxes(-3, -2), room(part)), new)
        return self._row(last), Cache(
            layers, jnp.concatenate([position_ids, first + jnp.arange(more, dtype=jnp.int32)])
        )

    def decode(
        self,
        tokens: Int[Array, " b"],
        cached: Cache,
        lengths: Int[Array, " b"],
        decode: DecodeLayers,
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Read one token of each sequence, whose `lengths` previous tokens are in the cache.

        Args:
          tokens: the tokens at positions `lengths`.
          cached: by `prefill` and `decode`.
          lengths: below the number of all slots.
          decode: as for `prefill`.

        Returns:
          Logits of the next token, replicated over `model` and `context`, and the cache including it.
        """
        slots = cached.slots
        context = Context(Tokens(tokens.shape[0], 1), positions=lengths[:, None], slots=slots)
        x = self.embed({"tokens": tokens[:, None]}, context)
        x, layers = decode(x, context, cached.layers, lengths)
        return self._row(x), Cache(layers, slots)

    def _row(self, x: Float[Array, "b h"]) -> Float[Array, "b v"]:
        """Logits of one position of each sequence, replicated over `model`."""
        return mappings.gather_whole(self.logits(x, Tokens(x.shape[0], 1)), MODEL, -1)
