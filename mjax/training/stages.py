"""The step of a pipeline: the parts of the forward pass that its stages run (`parallel/pipeline.py`)."""

from __future__ import annotations

import jax
from jax import Array

from mjax.models.protocol import Model
from mjax.names import leaf_name
from mjax.parallel.pipeline import StageProgram, pipeline_gradients, pipeline_sums
from mjax.parallel.products import kernel_gradient, kernel_gradient_in_float8
from mjax.parallel.schedules import forward_only, schedule_of
from mjax.parallel.zero import is_layer
from mjax.state.precision import in_float8, parameter_type
from mjax.training.forward import Forward, tokens_of


def stage_program(forward: Forward, weights: dict[str, float]) -> StageProgram:
    """The three parts of a forward pass for the stages of a pipeline; `weights` is `Model.loss_weights`."""
    config = forward.config
    layers_in_chunk = config.model.layers // (config.mesh.pipe * config.mesh.chunks)

    def layers(blocks, x, micro_batch, virtual_stage):
        return forward.layers(blocks, x, micro_batch, virtual_stage * layers_in_chunk + 1)

    return StageProgram(
        embed=forward.embed,
        layers=layers,
        head=forward.loss,
        loss_weights=weights,
        rows=tokens_of(config).count,
        shards=[storage.gathers if storage.in_loop else () for storage in jax.tree.leaves(forward.plan.blocks)],
        kernel_gradient=kernel_gradient_in_float8 if in_float8(config.precision) else kernel_gradient,
    )


def pipeline_means_and_gradients(forward: Forward, weights: Model, micro_batches: dict[str, Array]):
    """Like `step.loss_and_gradients`, for one stage of a pipeline; results also vary over `pipe`."""
    config = forward.config
    means, to_shared, to_blocks = pipeline_gradients(
        schedule_of(config),
        stage_program(forward, weights.loss_weights),
        _without_blocks(weights),
        weights.blocks,
        micro_batches,
        parameter_type(config.precision.compute),
    )
    to_shared.blocks = to_blocks
    return means, to_shared


def sum_over_stages(forward: Forward, weights: Model, micro_batches: dict[str, Array]):
    """The sum over micro-batches of what the head returns, on this device."""
    mesh = forward.config.mesh
    schedule = forward_only(mesh.pipe, forward.config.micro_batches, mesh.chunks)
    program = stage_program(forward, weights.loss_weights)
    return pipeline_sums(schedule, program, _without_blocks(weights), weights.blocks, micro_batches)


def _without_blocks(weights: Model) -> Model:
    """The embedding and the head only: the model with nothing in place of its layers."""
    return jax.tree_util.tree_map_with_path(lambda path, w: None if is_layer(leaf_name(path)) else w, weights)
