"""What a run carries from step to step, and what a step reports."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import jax
import optax
from jax import Array

from mjax.models.build import Model
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """What a step reports; the same on every device.

    Attributes:
      loss: float32 [], mean cross entropy over the labels of the global batch that count, before the update, in nats;
        0 where none counts. Of a BERT with that of the order added.
      grad_norm: float32 [], global L2 norm of the unscaled gradient before clipping.
      learning_rate: float32 [].
      loss_scale: float32 [], the one this step was computed with.
      skipped: bool [], whether nothing was updated: a gradient, weight or moment was not finite, or the loss was above
        the limit.
      broken: int32 [], number of parameters whose weights or moments were not finite, or beyond all bounds, before it.
      first_broken: int32 [], index into `TrainProgram.gradient_names` of the first of them.
      nonfinite: int32 [], number of gradients that are not finite.
      first_nonfinite: int32 [], index into `TrainProgram.gradient_names` of the one the backward pass reached first.
      figures: of a BERT its losses one by one, and how often the order is found (`bert.FIGURES`); with the head of a
        task those of `heads.FIGURES`; float32 [] each.
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    loss_scale: Array
    skipped: Array
    broken: Array
    first_broken: Array
    nonfinite: Array
    first_nonfinite: Array
    figures: dict[str, Array] = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EvalMetrics:
    """What an evaluation of one batch reports; the same on every device.

    Attributes:
      loss: float32 [], mean cross entropy over the labels that count, without dropout, in nats; 0 where none counts.
      labels: int32 [], how many count: the weight of this batch among others.
      figures: as in `StepMetrics`.
    """

    loss: Array
    labels: Array
    figures: dict[str, Array] = field(default_factory=dict)


def mean_of(batches: list[EvalMetrics]) -> tuple[float, dict[str, float]]:
    """Loss and figures of several batches of one size as of one: labels weigh the same, whichever batch they are in."""
    labels = [int(batch.labels) for batch in batches]
    weighed = lambda values: sum(map(operator.mul, map(float, values), labels)) / max(sum(labels), 1)  # noqa: E731
    if not batches[0].figures:
        return weighed(batch.loss for batch in batches), {}
    figures = {name: sum(float(batch.figures[name]) for batch in batches) / len(batches) for name in batches[0].figures}
    figures["mlm_loss"] = weighed(batch.figures["mlm_loss"] for batch in batches)
    return figures["mlm_loss"] + figures["order_loss"], figures
