"""The train step: one `shard_map` around everything, so that each byte that crosses a device boundary is written here
or in the layers.

    cast parameters to the compute type, once, and gather those that are stored in shards
    count the labels of the global batch, where some do not count
    scan over micro-batches, or over the ticks of a pipeline: loss and gradient, accumulated in float32
    one sum, or reduce-scatter, over `data`
    unscale, global norm, clip; skip the update if the norm, a weight or a moment is not finite, or the loss too large
    Adam on the float32 masters
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.batch_size import at_batch
from mjax.config import Config
from mjax.models.build import Model
from mjax.models.transformer import run_blocks
from mjax.names import leaf_name
from mjax.parallel import mappings, scopes
from mjax.parallel.mappings import DATA
from mjax.parallel.mesh import sharded_shapes
from mjax.parallel.pipeline import StageProgram, pipeline_gradients, pipeline_loss, value_and_gradients
from mjax.parallel.random import DropoutKey
from mjax.parallel.schedules import forward_only, schedule_of
from mjax.parallel.tokens import Tokens
from mjax.parallel.zero import (
    gather_in_loop,
    gather_weights,
    is_layer,
    reduce_gradients,
)
from mjax.state.layout import initial_weights, lay_out
from mjax.state.precision import COMPUTE_TYPES, LossScale, parameter_type
from mjax.state.train_state import EvalMetrics, StepMetrics, TrainState
from mjax.training.losses import count_labels, named, no_loss, share
from mjax.training.optimizer import adamw, backward_order, gradient_names, learning_rate, squares_and_broken


@dataclass(frozen=True)
class TrainProgram:
    """Everything compiled that a run needs, and the shapes it works on.

    Attributes:
      abstract_state: `TrainState` of ShapeDtypeStructs with shardings; what a checkpoint is restored to.
      abstract_batch: what a training step takes beside the state, the arrays of `Config.batch_arrays`.
      batch_sharding: where every array of a batch goes.
      initialize: () → TrainState, already sharded; the same weights on every mesh.
      train_step: (TrainState, batch[, limit]) → (TrainState, StepMetrics); the old state is donated. The update is
        dropped where the loss is above `limit`, float32 []; there is no limit when not given.
      eval_step: (model, batch) → EvalMetrics; the batch may have a loss mask that those of training have not.
      gradient_names: what `StepMetrics.first_nonfinite` points into.
    """

    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    batch_sharding: NamedSharding
    initialize: Callable[[], TrainState]
    train_step: Callable[..., tuple[TrainState, StepMetrics]]
    eval_step: Callable[[Model, dict[str, Array]], EvalMetrics]
    gradient_names: list[str]


def build_program(config: Config, mesh: Mesh | AbstractMesh, batch: int | None = None) -> TrainProgram:
    """Write the program of `config` for `mesh`. Nothing is compiled or allocated before it is called.

    Args:
      config: validated, with `model.attention` resolved to a kernel.
      mesh: of the shape `config.mesh`; an abstract one is enough for tracing.
      batch: global batch of a step; `config.train.global_batch` when not given. The learning rate follows the sizes of
        the whole run either way.
    """
    rate_after = partial(learning_rate, config)
    config = at_batch(config, batch or config.train.global_batch)
    # --- Shapes, then shardings ---------------------------------------------------------------------------------------
    transform = adamw(config.optimizer)
    layout = lay_out(config, mesh)
    shapes = jax.eval_shape(partial(first_state, config, transform), layout.abstract_model)
    specs = TrainState(
        model=layout.specs,
        optimizer=optax.tree.map_params(
            transform, lambda _, spec: spec, shapes.optimizer, layout.specs, transform_non_params=lambda _: P()
        ),
        loss_scale=jax.tree.map(lambda _: P(), shapes.loss_scale),
        step=P(),
        samples=P(),
    )
    abstract_state = sharded_shapes(shapes, specs, mesh)

    # --- Programs -----------------------------------------------------------------------------------------------------
    batch_sharding = NamedSharding(mesh, P(DATA))
    training, evaluation = config.batch_arrays(), config.batch_arrays(evaluation=True)
    names = gradient_names(shapes.model, config.mesh)
    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=True)
    on_devices = shard_map(
        partial(_train_step, config, transform, rate_after, layout.plan, np.array(backward_order(names))),
        in_specs=(specs, dict.fromkeys(training, P(DATA)), P()),
        out_specs=(specs, P()),
    )

    def train_step(state, batch, limit=math.inf):
        return on_devices(state, batch, jnp.float32(limit))

    eval_step = shard_map(
        partial(_eval_step, config, layout.plan),
        in_specs=(specs.model, dict.fromkeys(evaluation, P(DATA))),
        out_specs=P(),
    )
    return TrainProgram(
        abstract_state=abstract_state,
        abstract_batch={
            name: jax.ShapeDtypeStruct((config.train.global_batch, *shape), kind, sharding=batch_sharding)
            for name, (shape, kind) in training.items()
        },
        batch_sharding=batch_sharding,
        initialize=jax.jit(
            lambda: first_state(config, transform, initial_weights(config)),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state),
        ),
        train_step=jax.jit(train_step, donate_argnums=0),
        eval_step=jax.jit(eval_step),
        gradient_names=names,
    )


def first_state(
    config: Config, transform: optax.GradientTransformation, model: Model, step: Array | int = 0
) -> TrainState:
    """The state before the first step, of master weights whose layers are cut into the chunks of the pipeline.

    Args:
      step: number of the step before the first, where the dropout masks are not to be those of steps 1, 2, …
    """
    return TrainState(
        model=model,
        optimizer=transform.init(model),
        loss_scale=LossScale.initial(config.precision),
        step=jnp.asarray(step, jnp.int32),
        samples=jnp.int32(0),
    )


# --- On every device --------------------------------------------------------------------------------------------------


def _train_step(
    config: Config,
    transform,
    rate_after,
    plan,
    order: np.ndarray,
    state: TrainState,
    batch: dict[str, Array],
    limit: Array,
):
    """One step as a single device sees it: its shards of `state`, its replica's rows of `batch` [B / data, …]."""
    scale = state.loss_scale.scale
    loss, gradients = loss_and_gradients(config, plan, state.model, batch, state.step, scale)
    loss, figures = named(config, loss)
    squares, broken = squares_and_broken(gradients, state.model, state.optimizer[0], config.mesh)
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(norm)
    applied = finite & (broken.sum() == 0) & (loss <= limit)  # the same values on every device, so all of them agree
    if config.optimizer.clip_norm > 0:
        coefficient = jnp.minimum(1.0, config.optimizer.clip_norm / (norm + 1e-6))
        gradients = jax.tree.map(lambda g: g * coefficient, gradients)

    rate = rate_after(state.samples)
    updates, optimizer = transform.update(gradients, state.optimizer, state.model)
    model = jax.tree.map(lambda p, u: p - rate * u, state.model, updates)

    def keep_if_skipped(new, old):
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    new_state = TrainState(
        model=keep_if_skipped(model, state.model),
        optimizer=keep_if_skipped(optimizer, state.optimizer),
        loss_scale=state.loss_scale.update(finite, config.precision),
        step=state.step + 1,
        samples=state.samples + jnp.where(applied, config.train.global_batch, 0).astype(jnp.int32),
    )
    nonfinite = ~jnp.isfinite(squares)[order]
    metrics = StepMetrics(
        loss=loss,
        figures=figures,
        grad_norm=norm,
        learning_rate=rate,
        loss_scale=scale,
        skipped=~applied,
        broken=(broken > 0).sum(dtype=jnp.int32),
        first_broken=jnp.argmax(broken > 0).astype(jnp.int32),
        nonfinite=nonfinite.sum(dtype=jnp.int32),
        first_nonfinite=jnp.asarray(order)[jnp.argmax(nonfinite)].astype(jnp.int32),
    )
    return new_state, metrics


def loss_and_gradients(config: Config, plan, model: Model, batch: dict[str, Array], step: Array, scale: Array):
    """Mean loss over the labels of the global batch that count, and its gradient, from inside `shard_map`.

    Every label of the batch weighs the same, on whatever rank and in whatever micro-batch it is. Megatron by default
    takes the mean of each micro-batch and then the mean of these, so a label weighs more the fewer count beside it;
    its --calculate-per-token-loss is what is done here. Without a loss mask the two are the same. The loss of a BERT is
    this mean over masked tokens plus the mean of the order's over sequences, Megatron's lm loss and sop loss.

    Args:
      config: as for `build_program`.
      plan: how each weight is stored (`zero.plan_storage`).
      model: this device's shards of the master weights.
      batch: this replica's rows of the arrays in `Config.batch_arrays`, [B / data, …].
      step: int32 [], numbers the dropout masks.
      scale: float32 [], multiplies the loss before differentiation and is divided out of both results.

    Returns:
      Loss [], of a BERT the means [3] of `bert.FIGURES`, or with the head of a task those [2] of `heads.FIGURES`; and a
      gradient in float32 for each shard of `model`, the same wherever the shard is.
    """
    weights = gather_weights(model, plan, COMPUTE_TYPES[config.precision.compute], config.mesh)
    program = stage_program(config, plan, share(config, scale, count_labels(config, batch)), step)
    differentiate = _accumulate if config.mesh.pipe == 1 else _pipeline
    loss, gradients = differentiate(config, program, weights, micro_batches_of(config, batch))
    # The one data-parallel reduction: float32, outside every loop.
    gradients = reduce_gradients(gradients, model, plan)
    with jax.named_scope(scopes.LOSS):
        loss = mappings.sum_over(loss, mappings.varying_axes(loss))
    return jax.tree.map(lambda x: x / scale, (loss, gradients))


def stage_program(config: Config, plan, share: Array | float, step: Array | None = None) -> StageProgram:
    """The model as a pipeline stage runs it; one device without a pipeline runs its three parts one after the other.

    Args:
      config, plan: as above.
      share: what the loss of each label that counts is multiplied by (`losses.share`).
      step: numbers the dropout masks; None for evaluation, which has none.
    """
    model, train, mesh = config.model, config.train, config.mesh
    tokens = tokens_of(config)
    weights_of = gather_in_loop(plan.blocks, COMPUTE_TYPES[config.precision.compute])
    layers_in_chunk = model.layers // (mesh.pipe * mesh.chunks)

    def key(micro_batch: dict[str, Array]) -> DropoutKey | None:
        if step is None or model.hidden_dropout == model.attention_dropout == 0:
            return None
        return DropoutKey.of(train.seed, step, micro_batch["samples"])

    @jax.named_scope(scopes.LAYER)
    def layers(blocks, x, micro_batch, virtual_stage):
        recompute = "none" if step is None else train.recompute
        first_layer = virtual_stage * layers_in_chunk + 1
        documents = micro_batch.get("documents")
        return run_blocks(blocks, x, tokens, key(micro_batch), recompute, first_layer, weights_of, documents)

    @jax.named_scope(scopes.EMBEDDING)
    def embed(weights, micro_batch):
        return weights.embed_batch(micro_batch, tokens, key(micro_batch))

    @jax.named_scope(scopes.HEAD)
    def head(weights, x, micro_batch):
        return weights.batch_loss(x, micro_batch, tokens, key(micro_batch)) * share

    return StageProgram(
        embed=embed,
        layers=layers,
        head=head,
        rows=tokens.count,
        shards=[storage.gathers if storage.in_loop else () for storage in jax.tree.leaves(plan.blocks)],
    )


def tokens_of(config: Config) -> Tokens:
    """Which tokens the rows of the stream are, of one micro-batch."""
    return Tokens(config.train.micro_batch * config.model.choices, config.model.sequence, config.mesh.sequence_parallel)


def _run(program: StageProgram, weights: Model, micro_batch: dict[str, Array]) -> Array:
    """This replica's share of the loss of one micro-batch, without a pipeline."""
    x = program.embed(weights, micro_batch)
    return program.head(weights, program.layers(weights.blocks, x, micro_batch, 0), micro_batch)


def _accumulate(config: Config, program: StageProgram, weights: Model, micro_batches: dict[str, Array]):
    """Scaled loss or figures, as of `loss_and_gradients`, and gradient of this replica's share of the mean over the
    global batch, varying over `data`."""
    accumulator = parameter_type(config.precision.compute)

    def differentiate(micro_batch):
        loss, (gradients,) = value_and_gradients(lambda weights: _run(program, weights, micro_batch), weights)
        return loss, gradients

    def add(total, micro_batch):
        found = differentiate(micro_batch)
        return jax.tree.map(lambda t, f: t + f.astype(t.dtype), total, found), None

    if config.micro_batches == 1:  # nothing to accumulate: no second copy of the gradients
        loss, gradients = differentiate(jax.tree.map(lambda x: x[0], micro_batches))
        return loss, jax.tree.map(lambda g: g.astype(accumulator), gradients)
    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accumulator), weights)
    return jax.lax.scan(add, (no_loss(config), zeros), micro_batches)[0]


def _pipeline(config: Config, program: StageProgram, weights: Model, micro_batches: dict[str, Array]):
    """As `_accumulate`, of what this stage of a pipeline runs; both vary over `pipe` too."""
    schedule = schedule_of(config)
    shared, blocks = _without_blocks(weights), weights.blocks
    accumulator = parameter_type(config.precision.compute)
    loss, to_shared, to_blocks = pipeline_gradients(schedule, program, shared, blocks, micro_batches, accumulator)
    to_shared.blocks = to_blocks
    return loss, to_shared


def _without_blocks(weights: Model) -> Model:
    """The embedding and the head alone: the model with nothing in the place of its layers."""
    return jax.tree_util.tree_map_with_path(lambda path, w: None if is_layer(leaf_name(path)) else w, weights)


def _eval_step(config: Config, plan, model: Model, batch: dict[str, Array]) -> EvalMetrics:
    labels = count_labels(config, batch)
    loss, figures = named(config, sum_over_batch(config, plan, model, batch, share(config, 1.0, labels)))
    return EvalMetrics(loss, jnp.int32(labels), figures)


def sum_over_batch(
    config: Config,
    plan,
    model: Model,
    batch: dict[str, Array],
    factors: Array | float = 1.0,
    head: Callable | None = None,
) -> Array:
    """What the head gives for each micro-batch of the global batch, summed, without dropout, from inside `shard_map`.

    Args:
      config, plan, model, batch: as for `loss_and_gradients`.
      factors: what the loss of each label that counts is multiplied by (`losses.share`).
      head: (weights, stream after the last layer [t, h], micro-batch) → array of any shape, the same on every rank of
        `model`; the loss when not given.

    Returns:
      The sum, of the head's shape, the same on every device.
    """
    mesh = config.mesh
    weights = gather_weights(model, plan, COMPUTE_TYPES[config.precision.compute], mesh)
    program, micro_batches = stage_program(config, plan, factors), micro_batches_of(config, batch)
    if head is not None:
        program = dataclasses.replace(program, head=head)
    if mesh.pipe > 1:
        schedule = forward_only(mesh.pipe, config.micro_batches, mesh.chunks)
        total = pipeline_loss(schedule, program, _without_blocks(weights), weights.blocks, micro_batches)
    else:
        total = jax.lax.map(partial(_run, program, weights), micro_batches).sum(0)
    return mappings.sum_over(total, mappings.varying_axes(total))


def micro_batches_of(config: Config, batch: dict[str, Array]) -> dict[str, Array]:
    """This replica's rows of the batch as [m, b, …], and each sequence's index in the global batch as [m, b].

    A sample of several sequences, [c, s], lends its rows to the micro-batch one after the other.
    """
    rows = config.train.global_batch // config.mesh.data
    chex.assert_tree_shape_prefix(batch, (rows,))
    for name in batch.keys() & {"tokens", "labels"}:
        chex.assert_axis_dimension(batch[name], -1, config.model.sequence)
    sequences = rows * config.model.choices
    samples = mappings.rank(DATA) * sequences + jnp.arange(sequences)

    def split(x):
        return x.reshape(config.micro_batches, -1, *x.shape[1:][-1:])

    return {name: split(x) for name, x in {**batch, "samples": samples}.items()}
