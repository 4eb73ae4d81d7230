"""What a run carries from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import optax
from jax import Array

from mjax.models.protocol import Model
from mjax.state.precision import LossScale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step.

    Attributes:
      model: float32 master weights, sharded by their PartitionSpecs.
      optimizer: Adam's count and moments, sharded like the weights.
      loss_scale: fp16's loss scale.
      step: int32 [], steps taken, skipped ones included; it numbers batches and dropout masks. Fine-tuning
        begins the count of each seed elsewhere, for masks of its own.
      samples: int32 [], samples that have trained the model, those of skipped steps not included; the clock of the
        learning rate.
    """

    model: Model
    optimizer: optax.OptState
    loss_scale: LossScale
    step: Array
    samples: Array
