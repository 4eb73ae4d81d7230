"""The loss in chunks (`train.loss_chunks`), where a plan proposes it: where the logits are the peak of the memory."""

from __future__ import annotations

from dataclasses import replace

from mjax.config import Config
from mjax.models.build import scores_in_chunks
from mjax.planner.memory import Memory

CHUNKS = 8
"""Proposed. The logits then take less than the gradient of the table that scores them; more chunks save little."""


def with_loss_chunks(config: Config, memory: Memory) -> list[Config]:
    """`config` with the loss in CHUNKS chunks if the logits are at the peak of its memory, and the model has that; else
    nothing."""
    if memory.moment != "head" or config.train.loss_chunks > 1 or not scores_in_chunks(config.model):
        return []
    return [replace(config, train=replace(config.train, loss_chunks=CHUNKS))]


def loss_in_words(config: Config) -> str:
    """The row of a plan that says how logits and loss are computed in chunks."""
    chunks, rows = config.train.loss_chunks, config.model.padded_vocabulary // config.mesh.model
    return f"in {chunks} chunks of the vocabulary, {-(-rows // chunks):,} logits of a token at a time, computed twice"
