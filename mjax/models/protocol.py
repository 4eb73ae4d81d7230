"""The interface of a model: an architecture is a config and a module that follow this page.

The config (`mjax/config/model.py`) lists the arrays of a batch and the sizes that the `model` axis divides, and builds
the module. The module turns a batch into the residual stream, contains stacks of layers, and turns the residual stream
into a loss. Everything else is derived from the traced program: storage, checkpoints, the pipeline, FLOPs, memory, the
communication ledger.

    batch ── embed ──▶ x [b·s, h] ── blocks ──▶ x [b·s, h] ── loss ──▶ {name: sum}     ÷ counts ──▶ {name: mean}

A loss is a mean over the global batch, and a model sees a part of it, so it gives sums and counts by name. `counts`
depends on the batch alone: the step first adds the counts of all devices and then differentiates the sums divided by
them, wherever they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mjax.config.model import ModelConfig
from mjax.config.pattern import PLAIN, LayerKind
from mjax.lora.adapters import add_adapters
from mjax.parallel.random import DropoutKey, dropout_tokens
from mjax.parallel.token_layout import TokenLayout

Batch = dict[str, Array]


@dataclass(frozen=True)
class ForwardContext:
    """The arguments of a forward pass in addition to the residual stream: layout, dropout, positions, documents, layer.

    Attributes:
      tokens: layout of the tokens in the rows of the residual stream.
      key: of the dropout masks of this forward pass, inside a layer of the layer's; None: no dropout.
      positions: of each token; None: `tokens.position_ids`.
      documents: number of a token's document, if attention must stay within it; of whole sequences, also
        where a rank has a part of their positions.
      kind: of a layer, from the pattern of the model.
      layer: number of a layer in the model, from 1.
      slots: the positions in the slots of a cache on this rank, to decode one position after them; None in training,
        and for whole prompts.
    """

    tokens: TokenLayout
    key: DropoutKey | None = None
    positions: Int[Array, "b s"] | None = None
    documents: Int[Array, "b s"] | None = None
    kind: LayerKind = PLAIN
    layer: Array | int = 0
    slots: Int[Array, " S"] | None = None

    def position_ids(self) -> Int[Array, "_ s"]:
        """Positions of this rank's tokens, counted within their documents if the run does; one row if all sequences
        have the same."""
        return self.tokens.position_ids()[None] if self.positions is None else self.positions

    def with_layer(self, number: Array | int, kind: LayerKind = PLAIN) -> ForwardContext:
        """The context of a layer, numbered from 1; 0 is the embedding."""
        key = None if self.key is None else self.key.fold_in(number)
        return replace(self, key=key, kind=kind, layer=number)

    def layer_key(self, site: int) -> DropoutKey | None:
        """The dropout key of one of the sites of a layer (`parallel/random.py`)."""
        return None if self.key is None else self.key.fold_in(site)

    def dropout(self, x: Float[Array, "t h"], rate: float, site: int) -> Float[Array, "t h"]:
        """Dropout of the residual stream with the masks of a site."""
        return dropout_tokens(x, rate, self.layer_key(site), self.tokens)


@runtime_checkable
class Model(Protocol):
    """A language model, an `nnx.Module`.

    Outside `shard_map` it has whole weights with their PartitionSpecs (`weights.make_param`); inside `shard_map` the
    same pytree has this device's shards, and its methods compute with these.

    Attributes:
      config: the config it was built from.
      loss_weights: by name the weight of a mean in the loss; other names are metrics without a gradient.
      blocks: the layers, from `stack.stack`.
    """

    config: ModelConfig
    loss_weights: dict[str, float]
    blocks: Any

    def embed(self, batch: Batch, context: ForwardContext) -> Float[Array, "t h"]:
        """The stream before the first layer: this rank's rows."""

    def counts(self, batch: Batch) -> dict[str, Array | int]:
        """The denominator of each sum by name, for this part [b, …] of a batch.

        An int, or an array of NumPy, if it is the same for all parts: the step adds them up. An int32 array if it
        depends on the batch, added up too, or already the whole batch's denominator, the same on every device: with 1
        the mean is a sum.
        """

    def loss(self, x: Float[Array, "t h"], batch: Batch, context: ForwardContext) -> dict[str, Array]:
        """The sums by name over this micro-batch, float32, replicated over `model`.

        Args:
          x: the residual stream after the last layer.
          batch: the arrays of the micro-batch [b, …].
          context: of its tokens.
        """

    def summary(self, means: dict[str, Array]) -> dict[str, Array]:
        """The means of the global batch as a run reports them, [] each.

        A sum may be an array, with a count of the same shape; then this turns its mean into numbers. Arrays under new
        names are in `Record.arrays` of a training step; evaluations omit them.
        """

    def adjustments(self, means: dict[str, Array]) -> dict[str, Array]:
        """The amounts that a step adds to weights after the optimizer's update, unless it is skipped; from the means
        before their summary.

        By name of the weight, such as `blocks.mlp.router.bias`, its whole array, layers as [l, …], the same on every
        device. So a rule can set a weight instead of a gradient. Compute with its `stop_gradient`, and name it `bias`
        or `scale`, which have no weight decay.
        """


class LanguageModel(nnx.Module):
    """The methods of a `Model` that most architectures do not override.

    Attributes:
      after_layers: names of the parts after the layers, whose gradients are the first of the backward pass.
    """

    after_layers: ClassVar[tuple[str, ...]] = ("final_norm", "head")

    def summary(self, means: dict[str, Array]) -> dict[str, Array]:
        return means

    def adjustments(self, means: dict[str, Array]) -> dict[str, Array]:
        return {}


def build_model(seed: int | Array, config: ModelConfig, dtype=jnp.float32) -> Model:
    """Build a model, whose initial weights are a function of `seed` and `config`, on every mesh."""
    model = config.build(jax.random.key(seed), dtype)
    return add_adapters(model, jax.random.key(seed), dtype) if config.lora_rank else model
