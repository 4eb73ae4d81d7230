"""The metrics of a step: means over the global batch by name, from the sums and counts of a model.

A model sums over the sequences of its part of the batch (`models/protocol.py`). `mean_scales` returns the factor that
turns each sum into its part of the mean over the global batch, on whatever device, so parts only have to be added.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mjax.config.axes import axes_sharing_weights
from mjax.models.protocol import Batch, Model
from mjax.parallel import mappings, named_scopes

Count = Array | np.ndarray | int
Counts = dict[str, Count]  # denominators of the means, by name


@jax.named_scope(named_scopes.LOSS)
def global_counts(model: Model, batch: Batch) -> Counts:
    """`Model.counts` of the global batch, from this replica's part: the same on every device."""

    def reduce_count(count: Count) -> Count:
        if isinstance(count, (int, np.ndarray)):
            return count * mappings.size(axes_sharing_weights())
        return mappings.psum(count, mappings.varying_axes(count))

    return {name: reduce_count(count) for name, count in model.counts(batch).items()}


def mean_scales(counts: Counts, scale: Array | float = 1.0) -> dict[str, Array | float]:
    """The factor that turns each sum into its part of `scale` times the mean. A count of 0 gives a mean of 0."""

    def to_divisor(count: Count) -> Array | np.ndarray | float:
        if isinstance(count, int):  # tokens × layers may exceed int32
            return float(count)
        return count if isinstance(count, np.ndarray) else jnp.maximum(count, 1)

    return {name: scale / to_divisor(count) for name, count in counts.items()}


def select_loss(weights: dict[str, float], means: dict[str, Array] | dict[str, float]) -> Array | float:
    """Return the loss that a run reports: the mean of this name, such as a causal model's cross entropy, without
    auxiliary losses. For a model without it, such as a BERT, it is the weighted sum of the means that have a weight."""
    if "loss" in means:
        return means["loss"]
    return sum(means[name] if weight == 1.0 else weight * means[name] for name, weight in weights.items())


def other_metrics(means: dict) -> dict:
    """All means except the one that is the loss itself."""
    return {name: mean for name, mean in means.items() if name != "loss"}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step; the same on every device.

    Attributes:
      loss: mean cross entropy over the labels of the global batch that count, before the update, in nats;
        0 if none counts; as `select_loss` if a model has several losses.
      grad_norm: global L2 norm of the unscaled gradient before clipping.
      learning_rate, loss_scale: as used in this step.
      skipped: whether the update was skipped: a gradient was not finite, or the loss was above the limit.
      nonfinite: number of gradients that are not finite.
      first_nonfinite: index into `TrainProgram.gradient_names` of the one the backward pass reached first.
      labels: of the global batch that count; None if all do.
      metrics: the other means by name: for a BERT its separate losses, and the accuracy of the order;
        and the arrays of `Model.summary`.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    loss_scale: Float[Array, ""]
    skipped: Bool[Array, ""]
    nonfinite: Int[Array, ""]
    first_nonfinite: Int[Array, ""]
    labels: Int[Array, ""] | None = None
    metrics: dict[str, Array] = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EvalMetrics:
    """The metrics of the evaluation of one batch; the same on every device.

    Attributes:
      loss: as in `StepMetrics`.
      means: by name, without dropout; losses in nats, 0 if nothing counts. Also the arrays of
        `Model.summary`, which have no count.
      counts: by name, the denominator of each mean: the weight of this batch among others.
    """

    loss: Float[Array, ""]
    means: dict[str, Array]
    counts: dict[str, Array]


def weighted_mean(batches: list[EvalMetrics], weights: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Loss and metrics of several batches together: every label has the same weight, whichever batch it is in.

    Args:
      batches: metrics of each, fetched from the devices.
      weights: `Model.loss_weights`.
    """
    means = {}
    for name in batches[0].means:
        if name not in batches[0].counts:
            continue
        counts = [int(batch.counts[name]) for batch in batches]
        total = sum(float(batch.means[name]) * count for batch, count in zip(batches, counts, strict=True))
        means[name] = total / max(sum(counts), 1)
    return select_loss(weights, means), other_metrics(means)
