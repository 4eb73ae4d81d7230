"""What a model is to the rest of mjax: an architecture is a config and a module that follow this page.

The config (`mjax/model_config.py`) says what a batch holds, which sizes the `model` axis divides, and builds the
module. The module turns a batch into the stream, has stacks of layers, and turns the stream into a loss. Everything
else follows from the traced program: storage, checkpoints, the pipeline, FLOPs, memory, the communication ledger.

    batch ── embed ──▶ x [t, h] ── blocks ──▶ x [t, h] ── loss ──▶ {name: sum}     ÷ counts ──▶ {name: mean}

A loss is a mean over the global batch, and a model sees a part of it, so it gives sums and counts by name. `counts`
depends on the batch alone: the step adds up the counts of all devices first and then differentiates the sums over them,
wherever they are taken.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax import Array

from mjax.model_config import ModelConfig
from mjax.models.context import Context

Batch = dict[str, Array]


@runtime_checkable
class Model(Protocol):
    """A language model, an `nnx.Module`.

    Built outside `shard_map` it holds whole weights with their PartitionSpecs (`layers.parameter`); passed into
    `shard_map` the same pytree holds this device's shards, and its methods compute with those.

    Attributes:
      config: what it was built from.
      loss_weights: by name the weight of a mean in the loss; other names are metrics without a gradient.
      blocks: the layers, stacked (`block.stack`); an `nnx.List` of stacks where they differ.
    """

    config: ModelConfig
    loss_weights: dict[str, float]
    blocks: Any

    def embed(self, batch: Batch, context: Context) -> Array:
        """The stream before the first layer: this rank's rows [t, h]."""
        ...

    def counts(self, batch: Batch) -> dict[str, Array | int]:
        """By name of a sum how many things it is a sum over, in this part [b, …] of a batch.

        An int where all parts have as many; an int32 [] where the batch decides.
        """
        ...

    def loss(self, x: Array, batch: Batch, context: Context) -> dict[str, Array]:
        """The sums by name over this micro-batch, float32 [], the same on every rank of `model`.

        Args:
          x: the stream after the last layer [t, h].
          batch: the arrays of the micro-batch [b, …].
          context: of its tokens.
        """
        ...
