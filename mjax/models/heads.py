"""The heads a BERT is trained further with, one for each kind of task.

    classification    pooler ─ dropout ─ linear, to a score a class           is the second sentence implied?
    multiple choice   the same to one score; each choice of a question is     which of four answers?
                      a sequence of its own, and their scores stand side by side
    span              linear, of each token to two scores: is it the first,   where in the text is the answer?
                      is it the last of the answer?

The loss is the cross entropy of the label among the scores: classes, choices, or the places of text in a sequence, of a
span the mean of both ends. Padding is no place. Sources: Megatron-LM v1.0, megatron/model/classification.py and
multiple_choice.py; for spans arXiv 1810.04805, section 4.2, which puts neither pooler nor dropout before them.

A head is whole on every rank of `model`, as those of pre-training are. With sequence parallelism a rank has the scores
of its own rows only; they are few, and are brought together before the loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from mjax.config import ModelConfig
from mjax.models.attention import MASKED
from mjax.models.bert import Encoder, Linear
from mjax.parallel import mappings, random
from mjax.parallel.random import DropoutKey, dropout
from mjax.parallel.tokens import Tokens

# What `TaskBERT.batch_loss` sums up; the first is the loss.
FIGURES = ("loss", "accuracy")


class TaskBERT(Encoder):
    """An encoder with the head of a task, `config.head`."""

    def __init__(self, key: Array, config: ModelConfig, dtype=jnp.float32):
        *encoder, pooler, head = jax.random.split(key, 6)
        super().__init__(encoder, config, dtype)
        if config.head != "span":
            self.pooler = Linear(pooler, config.hidden, config.hidden, config.init_std, dtype)
        self.head = Linear(head, config.hidden, config.outputs, config.init_std, dtype)

    def scores(self, x: Array, batch: dict[str, Array], tokens: Tokens, key: DropoutKey | None = None) -> Array:
        """What the head says of each sample, from the stream after the last layer.

        Args:
          x: [t, h].
          batch: what `Config.batch_arrays` lists, c sequences a sample, [b · c, s].
          tokens: which tokens the rows of `x` are.
          key: dropout masks; None for evaluation.

        Returns:
          Scores of the classes [b, classes], of the choices [b, c], or of being the first and the last token of the
          answer [b, 2, s], −1e30 at padding; float32 or wider, the same on every rank of `model`.
        """
        x = self.normed(x)
        if self.config.head == "span":
            found = self.head(x)
            if tokens.split:
                found = mappings.gather_over_model(found.T).T
            found = tokens.by_sequence(_wide(found)).swapaxes(1, 2)  # [b, 2, s]
            return jnp.where(batch["documents"][:, None] == 0, found, MASKED)
        pooled, owned = self.pooled(x, tokens)
        place = None if key is None else key.fold(0).fold(random.HEAD)
        found = _wide(self.head(dropout(pooled, self.config.hidden_dropout, place)))
        if tokens.split:
            found = mappings.leave(jnp.where(owned[:, None], found, 0))
        return found.reshape(-1, self.config.answers)

    def batch_loss(self, x: Array, batch: dict[str, Array], tokens: Tokens, key: DropoutKey | None = None) -> Array:
        """Sums over this replica's samples, from the stream after the last layer; arguments as for `scores`.

        Returns:
          float32 [2], the same on every rank of `model`: the cross entropy, and how many samples' labels have the
          highest scores, which has no gradient.
        """
        scores = self.scores(x, batch, tokens, key)
        labels = jnp.stack([batch[name] for name in self.config.label_names], axis=1)  # [b, 1], of a span [b, 2]
        scores = scores.reshape(*labels.shape, -1)
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        losses = -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1).mean((1, 2))
        right = (scores.argmax(-1) == labels).all(1)
        return jnp.stack([losses.sum(), right.sum(dtype=losses.dtype)])


def _wide(scores: Array) -> Array:
    return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
