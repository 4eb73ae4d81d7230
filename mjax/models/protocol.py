"""The interface of a model: an architecture is a config and a module that follow this page.

The config (`mjax/config/model.py`) lists the arrays of a batch and the sizes that the `model` axis divides, and builds
the module. The module turns a batch into the stream, has stacks of layers, and turns the stream into a loss. Everything
else is derived from the traced program: storage, checkpoints, the pipeline, FLOPs, memory, the communication ledger.

    batch ── embed ──▶ x [t, h] ── blocks ──▶ x [t, h] ── loss ──▶ {name: sum}     ÷ counts ──▶ {name: mean}

A loss is a mean over the global batch, and a model sees a part of it, so it gives sums and counts by name. `counts`
depends on the batch alone: the step first adds the counts of all devices and then differentiates the sums divided by
them, wherever they are computed.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.config.model import ModelConfig
from mjax.lora.adapters import add_adapters
from mjax.models.context import Context

Batch = dict[str, Array]


@runtime_checkable
class Model(Protocol):
    """A language model, an `nnx.Module`.

    Outside `shard_map` it has whole weights with their PartitionSpecs (`weights.parameter`); inside `shard_map` the
    same pytree has this device's shards, and its methods compute with those.

    Attributes:
      config: the config it was built from.
      loss_weights: by name the weight of a mean in the loss; other names are metrics without a gradient.
      blocks: the layers, as `stack.stack` gives them.

    """

    config: ModelConfig
    loss_weights: dict[str, float]
    blocks: Any

    def embed(self, batch: Batch, context: Context) -> Float[Array, "t h"]:
        """The stream before the first layer: this rank's rows."""
        ...

    def counts(self, batch: Batch) -> dict[str, Array | int]:
        """The denominator of each sum by name, for this part [b, …] of a batch.

        An int, or an array of NumPy, if it is the same for all parts, which are added up; an int32 array if it depends
        on the batch, added up too, or if it is that of the whole batch already, the same on every device: with 1 the
        mean is a sum.
        """
        ...

    def loss(self, x: Float[Array, "t h"], batch: Batch, context: Context) -> dict[str, Array]:
        """The sums by name over this micro-batch, float32, replicated over `model`.

        Args:
          x: the stream after the last layer.
          batch: the arrays of the micro-batch [b, …].
          context: of its tokens.
        """
        ...

    def summary(self, means: dict[str, Array]) -> dict[str, Array]:
        """The means of the global batch as a run reports them, [] each.

        A sum may be an array, whose count is one of the same shape; then this turns its mean into numbers. Arrays under
        new names get to `Record.arrays` of a training step; evaluations leave them out.
        """
        ...

    def adjustments(self, means: dict[str, Array]) -> dict[str, Array]:
        """The amounts that a step adds to weights after the optimizer's update, unless it is skipped; from the means
        before their summary.

        By name of the weight, such as `blocks.mlp.router.bias`, its whole array, layers as [l, …], the same on every
        device. So a weight can follow a rule rather than a gradient. Compute with its `stop_gradient`, and name it
        `bias` or `scale`, which have no weight decay.
        """
        ...

    @classmethod
    def scores_in_chunks(cls) -> bool:
        """Whether the loss may go through the vocabulary in parts (`train.loss_chunks`, `Output.cross_entropy`)."""
        ...


class LanguageModel(nnx.Module):
    """What most architectures leave as it is of a `Model`.

    Attributes:
      after_layers: names of the parts behind the layers, whose gradients are the first of the backward pass.
    """

    after_layers: ClassVar[tuple[str, ...]] = ("final_norm", "head")

    def summary(self, means: dict[str, Array]) -> dict[str, Array]:
        return means

    def adjustments(self, means: dict[str, Array]) -> dict[str, Array]:
        return {}

    @classmethod
    def scores_in_chunks(cls) -> bool:
        return False


def build_model(seed: int | Array, config: ModelConfig, dtype=jnp.float32) -> Model:
    """The model whose initial weights are a function of `seed` and `config`, whatever the mesh it is sharded over."""
    model = config.build(jax.random.key(seed), dtype)
    return add_adapters(model, jax.random.key(seed), dtype) if config.lora_rank else model
