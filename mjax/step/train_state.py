"""The state of a run from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import optax
from jax import Array

from mjax.models.protocol import Model
from mjax.step.precision import LossScale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a run carries from step to step.

    Attributes:
      model: float32 master weights, sharded by their PartitionSpecs.
      optimizer: its count and moments, sharded like the weights.
      loss_scale: fp16's loss scale.
      step: int32 [], steps taken, including skipped ones; it numbers batches and dropout masks. Fine-tuning starts each
        seed at another number, for different masks.
      samples: int32 [], samples that have trained the model, without those of skipped steps; the learning rate follows
        it.
    """

    model: Model
    optimizer: optax.OptState
    loss_scale: LossScale
    step: Array
    samples: Array
