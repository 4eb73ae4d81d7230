"""The common part of all models that predict the next token: logits and loss. Generation is in `decoding.py`.

A model derives from `CausalModel` and defines `embed` and `output`.
"""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.config.axes import MODEL
from mjax.errors import UsageError
from mjax.models.protocol import ForwardContext, LanguageModel
from mjax.models.stack import run_blocks
from mjax.parallel import mappings
from mjax.parallel.chunked_cross_entropy import chunked_cross_entropy
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.token_layout import TokenLayout


class Output(NamedTuple):
    """The output layer of a model, and its input: logits and cross entropy.

    Attributes:
      table: the embedding of the tokens (tied), or a separate one.
      x: after the final norm, this rank's rows of the residual stream.
      bias: of each token, added to its score.
    """

    table: VocabParallelEmbedding
    x: Float[Array, "t h"]
    bias: Float[Array, " v_local"] | None = None

    def logits(self, tokens: TokenLayout) -> Float[Array, "bs v_local"]:
        """Scores of all rows, varying over `model`."""
        return self.table.logits(self.x, tokens, self.bias)

    def cross_entropy(self, labels: Int[Array, "b s"], context: ForwardContext) -> Float[Array, " bs"]:
        """The loss of each token, float32 or wider, the same on every rank of `model`."""
        labels, tokens = labels.reshape(-1), context.tokens
        if tokens.loss_chunks == 1:
            return vocab_parallel_cross_entropy(self.logits(tokens), labels)
        return chunked_cross_entropy(self.x, self.table, self.bias, labels, tokens)


class CausalModel(LanguageModel):
    """A decoder-only language model; see `protocol.Model`."""

    loss_weights: ClassVar[dict[str, float]] = {"loss": 1.0}

    def embed(self, batch: dict[str, Array], context: ForwardContext) -> Float[Array, "t h"]:
        """The stream before the first layer, of `batch["tokens"]`, int [b, s]."""
        raise NotImplementedError

    def output(self, x: Float[Array, "t h"]) -> Output:
        """The scores of the next token after the last layer."""
        raise NotImplementedError

    def logits(self, x: Float[Array, "t h"], tokens: TokenLayout) -> Float[Array, "bs v_local"]:
        """Scores of the next token after the last layer, varying over `model`."""
        return self.output(x).logits(tokens)

    def __call__(self, ids: Int[Array, "b s"]) -> Float[Array, "b s v_local"]:
        """Logits of the next token at every position, without dropout, in the dtype of the weights, varying over
        `model`; ids are replicated over it.

        Raises:
          UsageError: the axes of the mesh are unknown here.
        """
        try:
            mappings.size(MODEL)
        except NameError:
            fix = "for the logits of a run, call mjax.logits(run, ids)"
            raise UsageError(f"a model is called within jax.shard_map over its mesh; {fix}") from None
        context = ForwardContext(TokenLayout(*ids.shape))
        x, _ = run_blocks(self.blocks, self.embed({"tokens": ids}, context), context)
        return context.tokens.split_sequences(self.logits(x, context.tokens))

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        """The number of labels, or of labels in the loss mask."""
        if "loss_mask" not in batch:
            return {"loss": batch["labels"].size}
        return {"loss": batch["loss_mask"].sum(dtype=jnp.int32)}

    def loss(self, x: Float[Array, "t h"], batch: dict[str, Array], context: ForwardContext) -> dict[str, Array]:
        """The cross entropy of the labels in the loss mask. The head has no dropout."""
        if context.tokens.loss_chunks == 1 or type(self).logits is not CausalModel.logits:
            losses = vocab_parallel_cross_entropy(self.logits(x, context.tokens), batch["labels"].reshape(-1))
        else:
            losses = self.output(x).cross_entropy(batch["labels"], context)
        if "loss_mask" not in batch:
            return {"loss": losses.sum()}
        return {"loss": losses.sum(where=batch["loss_mask"].reshape(-1))}
