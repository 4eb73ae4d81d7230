"""The output layer of a language model: what scores the rows of its stream, stated once for logits and for the loss."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from mjax.errors import UsageError
from mjax.models.context import Context
from mjax.parallel.cross_entropy import chunked_cross_entropy, vocab_parallel_cross_entropy
from mjax.parallel.layers import VocabParallelEmbedding
from mjax.parallel.tokens import Tokens


class Output(NamedTuple):
    """A table of the vocabulary, and the rows that it scores.

    Attributes:
      table: the embedding of the tokens, or one of its own.
      x: after the final norm, this rank's rows of the stream [t, h].
      bias: of each token [v / p], added to its score.
    """

    table: VocabParallelEmbedding
    x: Array
    bias: Array | None = None

    def logits(self, tokens: Tokens) -> Array:
        """Scores of all rows [b · s, v / p], varying over `model`."""
        return self.table.logits(self.x, tokens, self.bias)

    def cross_entropy(self, labels: Array, context: Context) -> Array:
        """The loss of each token: labels int [b, s] → [b · s], float32 or wider, the same on every rank of `model`."""
        labels, tokens, chunks = labels.reshape(-1), context.tokens, context.loss_chunks
        if chunks == 1:
            return vocab_parallel_cross_entropy(self.logits(tokens), labels)
        return chunked_cross_entropy(self.x, self.table, self.bias, labels, tokens, chunks)


def check_loss_chunks(model: type, chunks: int, own_loss: bool) -> None:
    """Refuse a loss in chunks where they would not be used.

    Args:
      model: the class.
      chunks: `train.loss_chunks`.
      own_loss: whether a function replaces the model's loss.

    Raises:
      UsageError: it does, or the model has a `logits` or a `loss` that does not follow from its `output`.
    """
    if chunks == 1:
        return
    if own_loss:
        raise UsageError(
            f"--train.loss-chunks {chunks} is for the loss of the model, and this run has a function instead; "
            "leave it out"
        )
    if (own := not_from_output(model)) is not None:
        raise UsageError(
            f"--train.loss-chunks {chunks} needs a model whose `output` says what scores the vocabulary, and "
            f"{model.__name__} has a `{own}` of its own (mjax/models/output.py); leave it out"
        )


def not_from_output(model: type) -> str | None:
    """`logits` or `loss` if a model class defines that later than `output`, or without it; else None."""

    def place(name: str) -> int:
        return next((place for place, each in enumerate(model.__mro__) if name in vars(each)), len(model.__mro__))

    return next((name for name in ("logits", "loss") if place(name) < place("output")), None)
