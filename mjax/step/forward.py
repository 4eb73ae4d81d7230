"""The forward pass of one micro-batch: from its arrays to its part of the means.

Without a pipeline the three parts run one after the other (`Forward.__call__`). The stages of a pipeline run them in
ticks (`parallel/pipeline.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mjax.config import Config
from mjax.config.pattern import layers_of_stages, stage_kinds
from mjax.errors import UsageError
from mjax.models.block import Sums
from mjax.models.protocol import ForwardContext, Model
from mjax.models.stack import map_stacks, run_blocks
from mjax.parallel import named_scopes
from mjax.parallel.pipeline import StageProgram, pipeline_gradients, pipeline_sums, vary_over_pipe
from mjax.parallel.pipeline_schedules import find_schedule, forward_schedule
from mjax.parallel.random import DropoutKey
from mjax.parallel.reductions import add_means
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import are_stacked, combine, partition_trainable
from mjax.parallel.zero import layer_gather
from mjax.step.precision import COMPUTE_TYPES, parameter_type, uses_float8

MicroBatch = dict[str, Array]


@dataclass(frozen=True)
class Forward:
    """The forward pass of a config.

    Attributes:
      config: of the run.
      plan: the storage of each weight (`zero.plan_storage`).
      factors: by name, the factor that turns a sum of the model into its part of the mean (`losses.mean_scales`).
      step: int32 [], numbers the dropout masks; None for evaluation, without dropout.
      loss_fn: instead of the model's loss, with the same names: (weights, x, micro-batch, context) → sums.
      head: instead of sums and means, for inference: (weights, x, micro-batch, context) → arrays.
    """

    config: Config
    plan: Any
    factors: dict[str, Array | float]
    step: Int[Array, ""] | None = None
    head: Callable | None = None
    loss_fn: Callable | None = None

    def __call__(self, weights: Model, micro_batch: MicroBatch, frozen: Model | None = None):
        """The parts of the means by name, [] each; or the result of `head`. Weights may come in the two parts of
        `weights.partition_trainable`."""
        weights = weights if frozen is None else combine(weights, frozen)
        x = self.embed(weights, micro_batch)
        x, aux = self.layers(weights.blocks, x, micro_batch)
        sums = self.loss(weights, x, micro_batch)
        return sums if self.head else add_means(sums, aux)

    @jax.named_scope(named_scopes.EMBEDDING)
    def embed(self, weights: Model, micro_batch: MicroBatch) -> Float[Array, "t h"]:
        """The stream before the first layer [b·s, h]."""
        return weights.embed(micro_batch, self.context(micro_batch))

    @jax.named_scope(named_scopes.LAYER)
    def layers(
        self, blocks, x: Float[Array, "t h"], micro_batch: MicroBatch, first: Int[Array, ""] | int = 1
    ) -> tuple[Float[Array, "t h"], Sums]:
        """Return the residual stream after the layers from number `first` on, and the parts of means that they add."""
        dtype = COMPUTE_TYPES[self.config.precision.compute]
        train, context = self.config.train, self.layer_context(micro_batch)
        gathers = map_stacks(partial(layer_gather, dtype=dtype, in_float8=context.tokens.float8), self.plan.blocks)
        recompute, unroll = ("none", False) if self.step is None else (train.recompute, train.unroll == "on")
        x, sums = run_blocks(blocks, x, context, recompute, first, gathers, unroll)
        return x, {} if self.head else self._parts(sums)

    @jax.named_scope(named_scopes.HEAD)
    def loss(self, weights: Model, x: Float[Array, "t h"], micro_batch: MicroBatch):
        """The parts of the means by name, from the residual stream after the last layer; or the result of `head`."""
        context = self.context(micro_batch)
        if self.head is not None:
            return self.head(weights, x, micro_batch, context)
        tokens = replace(context.tokens, loss_chunks=self.config.train.loss_chunks)
        context = replace(context, tokens=tokens)
        if self.loss_fn is None:
            return self._parts(weights.loss(x, micro_batch, context))
        sums = self.loss_fn(weights, x, micro_batch, context)
        if not isinstance(sums, dict) or sums.keys() - self.factors or not sums.keys() & set(weights.loss_weights):
            result = ", ".join(map(repr, sums)) if isinstance(sums, dict) else type(sums).__name__
            known = ", ".join(repr(name) for name in weights.loss_weights if name in self.factors)
            raise UsageError(f"the loss of the caller gives {result}; give sums by name, as the model does: {known}")
        return self._parts(sums)

    def context(self, micro_batch: MicroBatch) -> ForwardContext:
        """The context of a micro-batch."""
        key = None
        if self.step is not None and self.config.model.without_dropout() != self.config.model:
            key = DropoutKey.make(self.config.train.seed, self.step, micro_batch["samples"])
        tokens, documents = token_layout(self.config), micro_batch.get("documents")
        if documents is not None:
            documents = tokens.gather_positions(documents)
        return ForwardContext(tokens, key, micro_batch.get("positions"), documents)

    def layer_context(self, micro_batch: MicroBatch) -> ForwardContext:
        """The context of a micro-batch inside the layers, which use float8 in training if the config sets it."""
        context = self.context(micro_batch)
        float8 = self.step is not None and uses_float8(self.config.precision)
        return replace(context, tokens=replace(context.tokens, float8=float8))

    def _parts(self, sums: Sums) -> dict[str, Array]:
        return {name: total * self.factors[name] for name, total in sums.items()}


def token_layout(config: Config) -> TokenLayout:
    """The tokens in the rows of the residual stream of one micro-batch."""
    model, mesh = config.model, config.mesh
    sequences, positions = config.train.micro_batch * model.sequences, model.sequence // mesh.context
    return TokenLayout(sequences, positions, mesh.splits_tokens, context_attention=config.context_attention)


# --- The same parts for the stages of a pipeline ----------------------------------------------------------------------


def stage_program(forward: Forward, weights: dict[str, float], frozen: Model | None = None) -> StageProgram:
    """The three parts of a forward pass for the stages of a pipeline.

    Args:
      forward: of a micro-batch.
      weights: `Model.loss_weights`.
      frozen: the part of the embedding's and the head's weights that is not differentiated.
    """
    config, frozen = forward.config, vary_over_pipe(frozen)
    before = np.cumsum([0, *layers_of_stages(config.model, config.mesh)], dtype=np.int32)

    def layers(blocks, x, micro_batch, virtual_stage):
        return forward.layers(blocks, x, micro_batch, jnp.asarray(before)[virtual_stage] + 1)

    def merge_frozen(function: Callable) -> Callable:
        if frozen is None:
            return function
        return lambda trainable, *arguments: function(combine(trainable, frozen), *arguments)

    return StageProgram(
        embed=merge_frozen(forward.embed),
        layers=layers,
        head=merge_frozen(forward.loss),
        loss_weights=weights,
        kinds=stage_kinds(config.model, config.mesh),
        rows=jax.tree.map(lambda storage: storage.rows, forward.plan.blocks),
    )


def pipeline_loss_and_gradients(forward: Forward, weights: Model, micro_batches: dict[str, Array]):
    """Like `step.loss_and_gradients`, for one stage of a pipeline; results also vary over `pipe`."""
    config = forward.config
    shared, frozen = partition_trainable(_drop_blocks(weights))
    means, dshared, dblocks = pipeline_gradients(
        find_schedule(config),
        stage_program(forward, weights.loss_weights, frozen),
        shared,
        weights.blocks,
        micro_batches,
        parameter_type(config.precision.compute),
    )
    dshared.blocks = dblocks
    return means, dshared


def sum_over_stages(forward: Forward, weights: Model, micro_batches: dict[str, Array]):
    """Sum the head's results over micro-batches, on this device."""
    mesh = forward.config.mesh
    schedule = forward_schedule(mesh.pipe, forward.config.micro_batches, mesh.virtual_stages)
    program = stage_program(forward, weights.loss_weights)
    return pipeline_sums(schedule, program, _drop_blocks(weights), weights.blocks, micro_batches)


def _drop_blocks(weights: Model) -> Model:
    """The embedding and the head only: the model with nothing in place of its layers."""
    leaves, structure = jax.tree.flatten(weights)
    pairs = zip(leaves, are_stacked(weights), strict=True)
    return structure.unflatten(None if stacked else weight for weight, stacked in pairs)
