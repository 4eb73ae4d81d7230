"""The heads for fine-tuning a BERT, one for each kind of task.

    classification    pooler ─ dropout ─ linear, to one score per class       is the second sentence implied?
    multiple choice   the same to one score; each choice of a question is     which of four answers?
                      a separate sequence, and their scores are compared
    span              linear, of each token to two scores: first token,       where in the text is the answer?
                      and last token of the answer

The loss is the cross entropy of the label among the scores: classes, choices, or positions of a sequence, for a span
the mean of both ends. Padding positions are excluded. Sources: Megatron-LM v1.0, megatron/model/classification.py and
multiple_choice.py; for spans arXiv 1810.04805, section 4.2, with neither pooler nor dropout.

Heads are replicated over `model`, like those of pre-training. With sequence parallelism a rank has the scores of its
own rows only; they are few, and are combined before the loss.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.config.axes import CONTEXT, MODEL
from mjax.models.bert.config import BERTTaskConfig
from mjax.models.bert.model import Encoder, Linear
from mjax.models.context import Context
from mjax.models.parts.flash import MASKED
from mjax.parallel import mappings, random
from mjax.parallel.random import dropout

HEAD = "head."
"""What the names of a task's head begin with: another task's has another meaning, whatever its shape."""


class TaskBERT(Encoder):
    """An encoder with the head of a task, `config.head`."""

    loss_weights: ClassVar[dict[str, float]] = {"loss": 1.0}

    def __init__(self, key: Array, config: BERTTaskConfig, dtype=jnp.float32):
        *encoder, pooler, head = jax.random.split(key, 6)
        super().__init__(encoder, config, dtype)
        if config.head != "span":
            self.pooler = Linear(pooler, config.hidden, config.hidden, config.init_std, dtype)
        self.head = Linear(head, config.hidden, config.outputs, config.init_std, dtype)

    def scores(self, x: Float[Array, "t h"], batch: dict[str, Array], context: Context) -> Float[Array, "b ..."]:
        """The scores of each sample, from the stream after the last layer.

        Args:
          x: this rank's rows.
          batch: the arrays of `BERTTaskConfig.batch`, c sequences per sample, [b · c, s].
          context: of its tokens.

        Returns:
          Scores of the classes [b, classes], of the choices [b, c], or of being the first and the last token of the
          answer [b, 2, s], −1e30 at padding; float32 or wider, replicated over `model`.
        """
        x, tokens = self.normed(x), context.tokens
        if self.config.head == "span":
            scores = self.head(x)
            if tokens.split:
                scores = mappings.gather_whole(scores.T, MODEL, -1).T
            scores = tokens.all_positions(tokens.by_sequence(_wide(scores))).swapaxes(1, 2)  # [b, 2, s]
            return jnp.where(context.documents[:, None] == 0, scores, MASKED)
        pooled, owned = self.pooled(x, tokens)
        pooled = dropout(pooled, self.config.hidden_dropout, context.of_layer(0).key_of(random.HEAD))
        scores = _wide(self.head(pooled))
        axes = [axis for axis, splits in ((MODEL, tokens.split), (CONTEXT, tokens.across)) if splits]
        if axes:
            scores = jnp.where(owned[:, None], scores, 0)
        for axis in axes:
            scores = mappings.leave(scores, axis)
        return scores.reshape(-1, self.config.answers)

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        """The number of samples."""
        samples = mappings.counted_once(len(batch[self.config.label_names[0]]))
        return {"loss": samples, "accuracy": samples}

    def loss(self, x: Float[Array, "t h"], batch: dict[str, Array], context: Context) -> dict[str, Array]:
        """The cross entropy of the labels, and the number of samples whose labels have the highest scores."""
        scores = self.scores(x, batch, context)
        labels = jnp.stack([batch[name] for name in self.config.label_names], axis=1)  # [b, 1], for a span [b, 2]
        scores = scores.reshape(*labels.shape, -1)
        log_probabilities = jax.nn.log_softmax(scores, axis=-1)
        losses = -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1).mean((1, 2))
        right = (scores.argmax(-1) == labels).all(1)
        return {"loss": mappings.once(losses.sum()), "accuracy": mappings.once(right.sum(dtype=losses.dtype))}


def _wide(scores: Array) -> Array:
    return scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
