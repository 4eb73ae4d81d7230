"""The output layer of a language model: what scores the rows of its stream, stated once for logits and for the loss."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from mjax.models.context import Context
from mjax.parallel.chunked_cross_entropy import chunked_cross_entropy
from mjax.parallel.cross_entropy import vocab_parallel_cross_entropy
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.tokens import Tokens


class Output(NamedTuple):
    """A table of the vocabulary, and the rows that it scores.

    Attributes:
      table: the embedding of the tokens, or one of its own.
      x: after the final norm, this rank's rows of the stream.
      bias: of each token, added to its score.
    """

    table: VocabParallelEmbedding
    x: Float[Array, "t h"]
    bias: Float[Array, " v_local"] | None = None

    def logits(self, tokens: Tokens) -> Float[Array, "bs v_local"]:
        """Scores of all rows, varying over `model`."""
        return self.table.logits(self.x, tokens, self.bias)

    def cross_entropy(self, labels: Int[Array, "b s"], context: Context) -> Float[Array, " bs"]:
        """The loss of each token, float32 or wider, the same on every rank of `model`."""
        labels, tokens, chunks = labels.reshape(-1), context.tokens, context.loss_chunks
        if chunks == 1:
            return vocab_parallel_cross_entropy(self.logits(tokens), labels)
        return chunked_cross_entropy(self.x, self.table, self.bias, labels, tokens, chunks)
