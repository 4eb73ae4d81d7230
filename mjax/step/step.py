"""The train step: one `shard_map` around everything, so that all communication between devices is written here or in
the layers.

    cast parameters to the compute dtype, once, and gather those stored in shards
    count the labels of the global batch, if there is a loss mask
    scan over micro-batches, or over the ticks of a pipeline: loss and gradient, accumulated in float32
    one all-reduce, or reduce-scatter, of each gradient over its replicas; with ZeRO-3 inside the scan, layer by layer
    unscale, global norm, clip; skip the update if the norm is not finite, or the loss is too large
    the optimizer, on the float32 master weights, and the model's adjustments, such as the bias of a router
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from mjax.config import Config, axes
from mjax.config.batch_size import with_batch_size
from mjax.errors import UsageError
from mjax.models.protocol import Model
from mjax.parallel import mappings, named_scopes
from mjax.parallel.mesh import batch_specs, sharded_shapes
from mjax.parallel.reductions import loss_cotangents, tree_add, tree_index
from mjax.parallel.weights import combine, partition_trainable, trainable_only
from mjax.parallel.zero import add_to_shards, gather_weights, reduce_gradients
from mjax.step.forward import Forward, MicroBatch, pipeline_loss_and_gradients, sum_over_stages, token_layout
from mjax.step.layout import TrainState, build_layout, initial_weights, with_sequence_length
from mjax.step.learning_rate import learning_rate
from mjax.step.losses import Counts, EvalMetrics, StepMetrics, global_counts, mean_scales, other_metrics, select_loss
from mjax.step.optimizer import backward_order, count_nonfinite, gradient_names, is_masked, make_optimizer, square_norms
from mjax.step.parametrization import scale_gradients, scale_updates
from mjax.step.precision import COMPUTE_TYPES, LossScale, parameter_type, uses_float8


@dataclass(frozen=True)
class TrainProgram:
    """The compiled functions of a run, and the shapes of their arguments.

    Attributes:
      abstract_state: `TrainState` of ShapeDtypeStructs with shardings: the target for restoring a checkpoint.
      abstract_batch: the batch of a training step, the arrays of `Config.batch_arrays`.
      initialize: () → TrainState, already sharded; the same weights on every mesh.
      begin: (model) → TrainState of step 0 with these master weights, which are donated; of any float dtype.
      train_step: (TrainState, batch[, limit]) → (TrainState, StepMetrics); the old state is donated. The update is
        skipped if the loss is above `limit`, float32 []; by default there is no limit.
      broken: TrainState → the number of weights and moments of each parameter that are not finite or far too large;
        float32, named by `gradient_names`.
      eval_step: (model, batch) → EvalMetrics; the batch may have a loss mask that training batches do not have.
      gradient_names: names for the indices in `StepMetrics.first_nonfinite`, and for the results of `broken`.
      config: of its batches.
    """

    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    initialize: Callable[[], TrainState]
    begin: Callable[[Model], TrainState]
    train_step: Callable[..., tuple[TrainState, StepMetrics]]
    broken: Callable[[TrainState], Array]
    eval_step: Callable[[Model, dict[str, Array]], EvalMetrics]
    gradient_names: list[str]
    config: Config

    def put_on_devices(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Copy a global batch of this process to its devices.

        Its sequences may be shorter than `model.sequence`, as long as the mesh and the attention kernel can split them;
        each length is compiled once.

        Raises:
          UsageError: it has other arrays than `Config.batch_arrays`, a length that cannot be split, or an id outside
            the vocabulary.
        """
        if batch.keys() != self.config.batch_arrays().keys():
            arrays = ", ".join(self.abstract_batch)
            mask = "; with data.custom=True it takes a loss_mask too" if "loss_mask" in batch else ""
            raise UsageError(f"the batch has {', '.join(batch)}; the program takes {arrays}{mask}")
        with_sequence_length(self.config, batch)
        self.config.model.check_values(batch, "the batch")
        return {name: jax.device_put(array, self.abstract_batch[name].sharding) for name, array in batch.items()}


def build_program(
    config: Config,
    mesh: Mesh | AbstractMesh,
    batch: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loss: Callable | None = None,
) -> TrainProgram:
    """Build the program of `config` for `mesh`. Nothing is compiled or allocated before it is called.

    Args:
      config: validated, with `model.attention` resolved to a kernel.
      mesh: of the shape `config.mesh`; an abstract one is enough for tracing.
      batch: global batch of a step; by default `config.train.global_batch`. The learning rate always follows the sizes
        of the whole run.
      optimizer: computes the update of a step without the learning rate; by default the config's.
      loss: (model, residual stream after the last layer, micro-batch, context) → sums by name, instead of `Model.loss`.
    """
    rate_after = partial(learning_rate, config, xp=jnp)
    config = with_batch_size(config, batch or config.train.global_batch)
    # --- Shapes, then shardings ---------------------------------------------------------------------------------------
    layout = build_layout(config, mesh)
    transform = scale_updates(config, optimizer or make_optimizer(config, layout))
    shapes, specs = _state_shapes(config, transform, layout)
    abstract_state = sharded_shapes(shapes, specs, mesh)

    # --- Programs -----------------------------------------------------------------------------------------------------
    arrays, rows = config.batch_arrays(), config.train.global_batch
    batch_spec = batch_specs(arrays, config.model.sequence)
    batch_shapes = {name: jax.ShapeDtypeStruct((rows, *shape), kind) for name, (shape, kind) in arrays.items()}
    names = gradient_names(trainable_only(shapes.model), config.model)
    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=True)
    order = np.array(backward_order(names, getattr(shapes.model, "after_layers", ())))

    def train_step(state, batch, limit=math.inf):
        sized = with_sequence_length(config, batch)
        step = partial(_train_step, sized, transform, rate_after, layout.plan, order, loss)
        on_devices = shard_map(step, in_specs=(specs, batch_spec, P()), out_specs=(specs, P()))
        return on_devices(state, batch, jnp.float32(limit))

    def eval_step(model, batch):
        step = partial(_eval_step, with_sequence_length(config, batch), layout.plan, loss)
        return shard_map(step, in_specs=(specs.model, batch_spec), out_specs=P())(model, batch)

    def count_broken(state):
        return count_nonfinite(trainable_only(state.model), state.optimizer, config.mesh)

    def begin(model):
        weights = jax.tree.map(lambda weight, leaf: weight.astype(leaf.dtype), model, shapes.model)
        return initial_state(config, transform, weights)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    options = _compiler_options(mesh)
    return TrainProgram(
        abstract_state=abstract_state,
        abstract_batch=sharded_shapes(batch_shapes, batch_spec, mesh),
        initialize=jax.jit(lambda: initial_state(config, transform, initial_weights(config)), out_shardings=shardings),
        begin=jax.jit(begin, out_shardings=shardings, donate_argnums=0),
        train_step=jax.jit(train_step, donate_argnums=0, compiler_options=options),
        broken=jax.jit(shard_map(count_broken, in_specs=(specs,), out_specs=P())),
        eval_step=jax.jit(eval_step, compiler_options=options),
        gradient_names=names,
        config=config,
    )


def _compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Compiler options that prevent deadlocks of collectives on simulated devices.

    XLA for CPUs starts a collective while a loop before it still runs, in which there are collectives of the same
    channel, unless the loop's result goes into it. In the order that `launch.IN_ORDER` asks for, gathers of the head
    come after the loop over the layers, and half of the runs with ZeRO-3 hung. In the other order they come first.
    Pipelines hang in that one.
    """
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "cpu" or mesh.shape["pipe"] > 1:
        return {}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"}


def _state_shapes(config: Config, transform: optax.GradientTransformation, layout) -> tuple[TrainState, TrainState]:
    """Shapes of the state, and its specs: moments are sharded like their weights, the rest is replicated."""
    shapes = jax.eval_shape(partial(initial_state, config, transform), layout.abstract_model)
    replicated = jax.tree.map(lambda _: P(), shapes)
    moments = optax.tree.map_params(
        transform,
        lambda moment, spec: moment if is_masked(moment) else spec,
        shapes.optimizer,
        trainable_only(layout.specs),
        transform_non_params=lambda _: P(),
        is_leaf=is_masked,
    )
    return shapes, replace(replicated, model=layout.specs, optimizer=moments)


def initial_state(
    config: Config, transform: optax.GradientTransformation, model: Model, step: Array | int = 0
) -> TrainState:
    """The initial state for master weights whose layers are split into the chunks of the pipeline.

    Args:
      step: initial step number; another number than 0 gives other dropout masks than steps 1, 2, …
    """
    return TrainState(
        model=model,
        optimizer=transform.init(trainable_only(model)),
        loss_scale=LossScale.initial(config.precision),
        step=jnp.asarray(step, jnp.int32),
        samples=jnp.int32(0),
    )


# --- On each device ---------------------------------------------------------------------------------------------------


def _train_step(
    config: Config,
    transform,
    rate_after,
    plan,
    order: np.ndarray,
    loss_fn: Callable | None,
    state: TrainState,
    batch: dict[str, Array],
    limit: Array,
):
    """One step on a single device: its shards of `state`, and its rows and positions of `batch` [B / data, …]."""
    scale, (weights, frozen) = state.loss_scale.scale, partition_trainable(state.model)
    counts = global_counts(state.model, batch)
    sums, gradients = loss_and_gradients(config, plan, state.model, batch, state.step, scale, loss_fn, counts)
    gradients = scale_gradients(config, weights, gradients)
    means = state.model.summary(sums)
    loss = select_loss(state.model.loss_weights, means)
    squares = square_norms(gradients, config.mesh)
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(norm)
    applied = finite & jnp.isfinite(loss) & (loss <= limit)  # the same on every device

    def select(new, old):
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    with jax.named_scope(named_scopes.OPTIMIZER):
        if config.optimizer.clip_norm > 0:
            coefficient = jnp.minimum(1.0, config.optimizer.clip_norm / (norm + 1e-6))
            gradients = jax.tree.map(lambda g: g * coefficient, gradients)
        rate = rate_after(state.samples.astype(jnp.uint32))
        updates, optimizer = transform.update(gradients, state.optimizer, weights)
        model = jax.tree.map(lambda p, u: p - rate * u, weights, updates)
        # With adapters no rule changes a weight of the base: their checkpoints do not contain it.
        adjustments = {} if config.model.lora_rank else state.model.adjustments(sums)
        model = add_to_shards(model, adjustments, trainable_only(plan))
        new_state = TrainState(
            model=combine(select(model, weights), frozen),
            optimizer=select(optimizer, state.optimizer),
            loss_scale=state.loss_scale.update(finite, config.precision),
            step=state.step + 1,
            samples=state.samples + jnp.where(applied, config.train.global_batch, 0).astype(jnp.int32),
        )
    nonfinite = ~jnp.isfinite(squares)[order]
    metrics = StepMetrics(
        loss=loss,
        labels=counts.get("loss") if "loss_mask" in batch else None,
        metrics=other_metrics(means),
        grad_norm=norm,
        learning_rate=rate,
        loss_scale=scale,
        skipped=~applied,
        nonfinite=nonfinite.sum(dtype=jnp.int32),
        first_nonfinite=jnp.asarray(order)[jnp.argmax(nonfinite)].astype(jnp.int32),
    )
    return new_state, metrics


def loss_and_gradients(
    config: Config,
    plan,
    model: Model,
    batch: dict[str, Array],
    step: Array,
    scale: Array,
    loss_fn: Callable | None = None,
    counts: Counts | None = None,
):
    """The means of a model over the global batch, and the gradient of its loss, inside `shard_map`.

    Every label of the batch has the same weight, on any rank and in any micro-batch, as in Megatron with
    --calculate-per-token-loss. By default Megatron averages each micro-batch and then these means, so a label in a
    micro-batch with few labels has a larger weight. Without a loss mask the two are the same.

    Args:
      config: as for `build_program`.
      plan: the storage of each weight (`zero.plan_storage`).
      model: this device's shards of the master weights.
      batch: this replica's rows of the arrays in `Config.batch_arrays`, [B / data, …].
      step: int32 [], numbers the dropout masks.
      scale: float32 [], multiplies the loss before differentiation and is divided out of both results.
      loss_fn: instead of `Model.loss`.
      counts: `global_counts` of the batch; computed by default.

    Returns:
      Means by name, [] each before `Model.summary`, or of the shape of their counts; and a gradient in float32 for each
      shard of `model` that is trained, sharded like it.
    """
    compute, wide = COMPUTE_TYPES[config.precision.compute], parameter_type(config.precision.compute)
    weights = gather_weights(model, plan, compute, config.mesh, uses_float8(config.precision))
    scale = jnp.asarray(scale, wide)  # 1 / count is as exact as the weights
    factors = mean_scales(counts or global_counts(model, batch), scale)
    forward = Forward(config, plan, factors, step, loss_fn=loss_fn)
    micro_batches = split_micro_batches(config, batch)

    trained, frozen = partition_trainable(weights)

    def differentiate(micro_batch: MicroBatch):
        means, pullback = jax.vjp(partial(forward, micro_batch=micro_batch, frozen=frozen), trained)
        (gradients,) = pullback(loss_cotangents(model.loss_weights, means))
        return means, jax.tree.map(lambda gradient: gradient.astype(wide), gradients)

    if config.mesh.pipe > 1:
        means, gradients = pipeline_loss_and_gradients(forward, weights, micro_batches)
    elif config.micro_batches == 1:  # nothing to accumulate: avoid a second copy of the gradients
        means, gradients = differentiate(tree_index(micro_batches, 0))
    else:
        zero = mappings.vary(jnp.zeros((), wide), frozenset(axes.axes_sharing_weights()))
        means = {name: zero + jnp.zeros(jnp.shape(factor), wide) for name, factor in factors.items()}
        gradients = jax.tree.map(lambda weight: jnp.zeros_like(weight, dtype=wide), trained)
        accumulate = lambda total, micro_batch: (tree_add(total, differentiate(micro_batch)), None)  # noqa: E731
        (means, gradients), _ = jax.lax.scan(accumulate, (means, gradients), micro_batches)
    # In float32, after all micro-batches; layers gathered one by one (ZeRO-3) sum their gradients in the loop.
    gradients = reduce_gradients(gradients, trainable_only(model), trainable_only(plan))
    with jax.named_scope(named_scopes.LOSS):
        means = {name: mappings.psum(mean, mappings.varying_axes(mean)) for name, mean in means.items()}
    means, gradients = jax.tree.map(lambda x: x / scale, (means, gradients))
    return means, gradients


def _eval_step(config: Config, plan, loss_fn: Callable | None, model: Model, batch: dict[str, Array]) -> EvalMetrics:
    counts = global_counts(model, batch)
    means = model.summary(sum_over_batch(config, plan, model, batch, mean_scales(counts), loss_fn=loss_fn))
    counts = {name: jnp.max(jnp.asarray(count)).astype(jnp.int32) for name, count in counts.items()}
    return EvalMetrics(select_loss(model.loss_weights, means), means, counts)


def sum_over_batch(
    config: Config,
    plan,
    model: Model,
    batch: dict[str, Array],
    factors: dict[str, Array | float] | None = None,
    head: Callable | None = None,
    loss_fn: Callable | None = None,
):
    """Sum the head's results over the micro-batches of the global batch, without dropout, inside `shard_map`.

    Args:
      config, plan, model, batch: as for `loss_and_gradients`.
      factors: factor of each sum of the model (`losses.mean_scales`).
      head: (weights, residual stream after the last layer [b·s, h], micro-batch, context) → array of any shape,
        replicated over `model`; by default the means by name.
      loss_fn: instead of `Model.loss`.

    Returns:
      The sum, of the head's shape, replicated on every device.
    """
    weights = gather_weights(model, plan, COMPUTE_TYPES[config.precision.compute], config.mesh)
    forward = Forward(config, plan, factors or {}, head=head, loss_fn=loss_fn)
    micro_batches = split_micro_batches(config, batch)
    if config.mesh.pipe > 1:
        total = sum_over_stages(forward, weights, micro_batches)
    else:
        results = jax.lax.map(lambda micro_batch: forward(weights, micro_batch), micro_batches)
        total = jax.tree.map(lambda parts: parts.sum(0), results)
    return jax.tree.map(lambda x: mappings.psum(x, mappings.varying_axes(x)), total)


def split_micro_batches(config: Config, batch: dict[str, Array]) -> dict[str, Array]:
    """This device's rows of the batch as [m, b, …], and each sequence's index in the global batch as [m, b].

    The rows of a sample of several sequences, [c, s], follow each other in the micro-batch. If `context` splits the
    sequences, a rank has the positions `TokenLayout.position_ids`.
    """
    rows = config.train.global_batch // config.mesh.data
    chex.assert_tree_shape_prefix(batch, (rows,))
    for name in batch.keys() & {"tokens", "labels"}:
        chex.assert_axis_dimension(batch[name], -1, config.model.sequence // config.mesh.context)
    sequences = rows * config.model.sequences
    samples = mappings.rank(axes.axes_splitting("batch")) * sequences + jnp.arange(sequences)

    tokens, positions = token_layout(config), config.model.sequence // config.mesh.context

    def split(x):
        x = x.reshape(config.micro_batches, -1, *x.shape[1:][-1:])
        return tokens.exchange_positions(x) if x.shape[2:] == (positions,) else x

    return {name: split(x) for name, x in {**batch, "samples": samples}.items()}
