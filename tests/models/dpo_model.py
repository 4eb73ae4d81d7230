"""DPO (arXiv 2305.18290) on a Llama: an objective over pairs of sequences, with a custom array in the batch.

A sample is a pair: a prompt with the chosen answer, and with the rejected one. `loss_mask` is True at labels of the
answer, and `reference` is the sum of their log-probabilities under the model that training started from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax

from mjax.models.llama.config import LlamaConfig
from mjax.models.llama.model import Llama
from mjax.parallel import mappings

BETA = 0.1


@dataclass(frozen=True)
class PairConfig(LlamaConfig):
    """Not registered: on disk it is the Llama that it trains."""

    module: ClassVar[str] = f"{__name__}:PairLlama"
    sequences: ClassVar[int] = 2

    def batch(self, data):
        rows = {name: ((2, *shape), dtype) for name, (shape, dtype) in super().batch(data).items()}
        return {**rows, "loss_mask": ((2, self.sequence), "bool"), "reference": ((2,), "float32")}


class PairLlama(Llama):
    def counts(self, batch):
        return dict.fromkeys(("loss", "preferred"), mappings.mask_count_to_first_context_rank(len(batch["reference"])))

    def loss(self, x, batch, context):
        losses = self.output(x).cross_entropy(batch["labels"], context)
        answers = -context.tokens.split_sequences(losses * batch["loss_mask"].reshape(-1)).sum(1)
        if context.tokens.context_attention:
            answers = mappings.reduce_from_region(answers, "context")  # log p of whole answers
        ratios = answers.reshape(-1, 2) - batch["reference"]
        margin = BETA * (ratios[:, 0] - ratios[:, 1])
        sums = {"loss": -jax.nn.log_sigmoid(margin).sum(), "preferred": (margin > 0).sum(dtype=margin.dtype)}
        return jax.tree.map(mappings.mask_to_first_context_rank, sums)
