"""The common part of all models that predict the next token: the loss, and generation with a cache.

A model derives from `CausalModel` and defines `embed` and `output`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.config.axes import CONTEXT, MODEL
from mjax.errors import UsageError
from mjax.models.context import Context
from mjax.models.parts.output import Output
from mjax.models.protocol import LanguageModel
from mjax.models.stack import run_blocks
from mjax.parallel import mappings
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.random import DropoutKey
from mjax.parallel.tokens import Across, Tokens


@runtime_checkable
class Layers(Protocol):
    """All layers of a model, as `Block` has them for one: `generation/generate.py`, also over stages of a pipeline."""

    def empty_cache(self, sequences: int, slots: int, dtype) -> Any: ...

    def decode(self, x: Array, context: Context, cached: Any, lengths: Array) -> tuple[Array, Any]: ...


class Cache(NamedTuple):
    """What a model has read of some sequences.

    Attributes:
      layers: of the layers.
      slots: which positions this rank's slots hold: all, in order, or its part of them, which then varies
        over `context`.
    """

    layers: Any
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

    def all_logits(self, ids: Int[Array, "b s"], layers: Layers, across: Across | None = None) -> Float[Array, "b s v"]:
        """Logits of the next token after every position of whole texts, as `prefill` reads them; replicated over
        `model` and `context`."""
        x, tokens, _ = self._read(ids, jnp.full(len(ids), ids.shape[1]), ids.shape[1], layers, across)
        logits = tokens.by_sequence(mappings.gather_whole(self.logits(x, tokens), MODEL, -1))
        if across:  # each rank has some of the positions
            whole = jnp.zeros((*ids.shape, logits.shape[-1]), logits.dtype)
            whole = mappings.vary(whole, mappings.varying_axes(logits)).at[:, tokens.position_ids()].set(logits)
            logits = mappings.sum_over(whole, frozenset({CONTEXT}))
        return logits

    def prefill(
        self,
        prompts: Int[Array, "b s"],
        lengths: Int[Array, " b"],
        slots: int,
        layers: Layers,
        across: Across | None = None,
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Read whole prompts at once into a cache.

        The slot in the cache is the position. With `across` every rank of `context` reads a part of the positions, as
        in training, and keeps it; of the slots behind the prompts each has an equal part, too.

        Args:
          prompts: padded on the right with any valid id.
          lengths: tokens of each prompt, at least 1.
          slots: size of the cache over all ranks of `context`, at least s; both are multiples of
            `Config.sequence_chunks` and of that axis.
          layers: of this model.
          across: how attention sees the positions of other ranks of `context`; None: every rank reads all of them.

        Returns:
          Logits of the token after each prompt, replicated over `model` and `context`, and the cache.
        """
        x, tokens, cached = self._read(prompts, lengths, slots, layers, across)
        position_ids, more = tokens.position_ids(), (slots - prompts.shape[1]) * tokens.positions // prompts.shape[1]
        first = prompts.shape[1] + (more * mappings.rank(CONTEXT) if across else 0)
        is_last = position_ids == (lengths - 1)[:, None]
        last = tokens.by_sequence(x).sum(1, where=is_last[..., None])  # of one, so exact
        if across:
            last = mappings.sum_over(last, frozenset({CONTEXT}))
        every = jnp.concatenate([position_ids, first + jnp.arange(more, dtype=jnp.int32)])
        return self._row(last), Cache(cached, every)

    def _read(
        self, ids: Int[Array, "b s"], lengths: Int[Array, " b"], slots: int, layers: Layers, across: Across | None
    ) -> tuple[Float[Array, "t h"], Tokens, Any]:
        """This rank's positions of whole texts after the layers, which positions they are, and the cache with them."""
        ranks = mappings.size(CONTEXT) if across else 1
        context = Context(Tokens(ids.shape[0], ids.shape[1] // ranks, across=across))
        x = self.embed({"tokens": ids[:, context.tokens.position_ids()]}, context)
        x, cached = layers.decode(x, context, layers.empty_cache(len(ids), slots // ranks, x.dtype), lengths)
        return x, context.tokens, cached

    def decode(
        self,
        tokens: Int[Array, " b"],
        cached: Cache,
        lengths: Int[Array, " b"],
        layers: Layers,
    ) -> tuple[Float[Array, "b v"], Cache]:
        """Read one token of each sequence, whose `lengths` previous tokens are in the cache.

        Args:
          tokens: the tokens at positions `lengths`.
          cached: by `prefill` and `decode`.
          lengths: below the number of all slots.
          layers: of this model.

        Returns:
          Logits of the next token, replicated over `model` and `context`, and the cache including it.
        """
        context = Context(Tokens(tokens.shape[0], 1), positions=lengths[:, None], slots=cached.slots)
        x = self.embed({"tokens": tokens[:, None]}, context)
        x, new = layers.decode(x, context, cached.layers, lengths)
        return self._row(x), Cache(new, cached.slots)

    def _row(self, x: Float[Array, "b h"]) -> Float[Array, "b v"]:
        """Logits of one position of each sequence, replicated over `model`."""
        return mappings.gather_whole(self.logits(x, Tokens(x.shape[0], 1)), MODEL, -1)
