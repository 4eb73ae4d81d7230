"""The train step: one `shard_map` around everything, so that each byte that crosses a device boundary is written here
or in the layers.

    cast parameters to the compute type, once
    scan over micro-batches: loss and gradient of this replica, accumulated in float32
    one sum over `data`
    unscale, global norm, clip; skip the update if the norm is not finite
    Adam on the float32 masters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import Config
from mjax.models.gpt import GPT, build_gpt
from mjax.parallel import mappings
from mjax.parallel.mappings import DATA
from mjax.parallel.mesh import sharded_shapes
from mjax.parallel.random import DropoutKey
from mjax.training.optimizer import adamw, backward_order, gradient_names, learning_rate, squared_norms
from mjax.training.precision import COMPUTE_TYPES, LossScale, parameter_type


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step.

    Attributes:
      model: float32 master weights, sharded by their PartitionSpecs.
      optimizer: Adam's count and moments, sharded like the weights.
      loss_scale: fp16's loss scale.
      step: int32 [], steps taken, skipped ones included; it numbers batches and dropout masks.
      samples: int32 [], samples that have trained the model, those of skipped steps not included; the clock of the
        learning rate.
    """

    model: GPT
    optimizer: optax.OptState
    loss_scale: LossScale
    step: Array
    samples: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """What a step reports; the same on every device.

    Attributes:
      loss: float32 [], mean cross entropy of the global batch before the update, nats a token.
      grad_norm: float32 [], global L2 norm of the unscaled gradient before clipping.
      learning_rate: float32 [].
      loss_scale: float32 [], the one this step was computed with.
      skipped: bool [], whether the gradient was not finite and nothing was updated.
      nonfinite: int32 [], number of gradients that are not finite.
      first_nonfinite: int32 [], index into `TrainProgram.gradient_names` of the one the backward pass reached first.
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    loss_scale: Array
    skipped: Array
    nonfinite: Array
    first_nonfinite: Array


@dataclass(frozen=True)
class TrainProgram:
    """Everything compiled that a run needs, and the shapes it works on.

    Attributes:
      abstract_state: `TrainState` of ShapeDtypeStructs with shardings; what a checkpoint is restored to.
      batch_sharding: where a batch {"tokens", "labels"} of int32 [B, s] goes.
      initialize: () → TrainState, already sharded; the same weights on every mesh.
      train_step: (TrainState, batch) → (TrainState, StepMetrics); the old state is donated.
      eval_step: (GPT, batch) → float32 [], mean cross entropy without dropout, nats a token.
      gradient_names: what `StepMetrics.first_nonfinite` points into.
    """

    abstract_state: TrainState
    batch_sharding: NamedSharding
    initialize: Callable[[], TrainState]
    train_step: Callable[[TrainState, dict[str, Array]], tuple[TrainState, StepMetrics]]
    eval_step: Callable[[GPT, dict[str, Array]], Array]
    gradient_names: list[str]


def build_program(config: Config, mesh: Mesh | AbstractMesh) -> TrainProgram:
    """Write the program of `config` for `mesh`. Nothing is compiled or allocated before it is called.

    Args:
      config: validated, with `model.attention` resolved to a kernel.
      mesh: of the shape `config.mesh`; an abstract one is enough for tracing.
    """
    # --- Shapes, then shardings ---------------------------------------------------------------------------------------
    transform = adamw(config.optimizer)
    build = partial(_initial_state, config, transform)
    shapes = jax.eval_shape(build)
    model_specs = nnx.get_partition_spec(shapes.model)
    specs = TrainState(
        model=model_specs,
        optimizer=optax.tree.map_params(
            transform, lambda _, spec: spec, shapes.optimizer, model_specs, transform_non_params=lambda _: P()
        ),
        loss_scale=jax.tree.map(lambda _: P(), shapes.loss_scale),
        step=P(),
        samples=P(),
    )
    abstract_state = sharded_shapes(shapes, specs, mesh)

    # --- Programs -----------------------------------------------------------------------------------------------------
    batch_spec = {"tokens": P(DATA), "labels": P(DATA)}
    names = gradient_names(shapes.model)
    shard_map = partial(jax.shard_map, mesh=mesh, check_vma=True)
    train_step = shard_map(
        partial(_train_step, config, transform, np.array(backward_order(names))),
        in_specs=(specs, batch_spec),
        out_specs=(specs, P()),
    )
    eval_step = shard_map(partial(_eval_step, config), in_specs=(specs.model, batch_spec), out_specs=P())
    return TrainProgram(
        abstract_state=abstract_state,
        batch_sharding=NamedSharding(mesh, P(DATA)),
        initialize=jax.jit(build, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state)),
        train_step=jax.jit(train_step, donate_argnums=0),
        eval_step=jax.jit(eval_step),
        gradient_names=names,
    )


def _initial_state(config: Config, transform: optax.GradientTransformation) -> TrainState:
    model = build_gpt(config.train.seed, config.model, parameter_type(config.precision.compute))
    return TrainState(
        model=model,
        optimizer=transform.init(model),
        loss_scale=LossScale.initial(config.precision),
        step=jnp.int32(0),
        samples=jnp.int32(0),
    )


# --- On every device --------------------------------------------------------------------------------------------------


def _train_step(config: Config, transform, order: np.ndarray, state: TrainState, batch: dict[str, Array]):
    """One step as a single device sees it: its shards of `state`, its replica's rows of `batch` [B / data, s]."""
    scale = state.loss_scale.scale
    loss, gradients = loss_and_gradients(config, state.model, batch, state.step, scale)
    squares = squared_norms(gradients)
    norm = jnp.sqrt(squares.sum())
    finite = jnp.isfinite(norm)  # every device holds the same norm, so all of them agree
    if config.optimizer.clip_norm > 0:
        coefficient = jnp.minimum(1.0, config.optimizer.clip_norm / (norm + 1e-6))
        gradients = jax.tree.map(lambda g: g * coefficient, gradients)

    rate = learning_rate(config, state.samples)
    updates, optimizer = transform.update(gradients, state.optimizer, state.model)
    model = jax.tree.map(lambda p, u: p - rate * u, state.model, updates)

    def keep_if_skipped(new, old):
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

    new_state = TrainState(
        model=keep_if_skipped(model, state.model),
        optimizer=keep_if_skipped(optimizer, state.optimizer),
        loss_scale=state.loss_scale.update(finite, config.precision),
        step=state.step + 1,
        samples=state.samples + jnp.where(finite, config.train.global_batch, 0).astype(jnp.int32),
    )
    broken = ~jnp.isfinite(squares)[order]
    metrics = StepMetrics(
        loss=loss,
        grad_norm=norm,
        learning_rate=rate,
        loss_scale=scale,
        skipped=~finite,
        nonfinite=broken.sum(dtype=jnp.int32),
        first_nonfinite=jnp.asarray(order)[jnp.argmax(broken)].astype(jnp.int32),
    )
    return new_state, metrics


def loss_and_gradients(config: Config, model: GPT, batch: dict[str, Array], step: Array, scale: Array):
    """Mean loss over the global batch and its gradient, from inside `shard_map`.

    Args:
      config: as for `build_program`.
      model: this device's shards of the master weights.
      batch: this replica's rows, int32 [B / data, s].
      step: int32 [], numbers the dropout masks.
      scale: float32 [], multiplies the loss before differentiation and is divided out of both results.

    Returns:
      Loss [], and a gradient in float32 for each shard of `model`, the same on every replica.
    """
    weights = mappings.enter_data(cast(model, config))
    loss, gradients = _accumulate(config, weights, batch, step, scale)
    # The one data-parallel reduction: float32, outside every loop.
    gradients = mappings.sum_gradients(gradients, model)
    loss = mappings.sum_over(loss, mappings.varying_axes(loss))
    return jax.tree.map(lambda x: x / scale, (loss, gradients))


def _accumulate(config: Config, weights: GPT, batch: dict[str, Array], step: Array, scale: Array):
    """Scaled loss [] and gradient of this replica's share of the mean over the global batch; both vary over `data`."""
    accumulator = parameter_type(config.precision.compute)
    tokens_in_step = config.train.global_batch * config.model.sequence

    def loss_of(weights, tokens, labels, samples):
        key = None
        if config.model.hidden_dropout > 0 or config.model.attention_dropout > 0:
            key = DropoutKey.of(config.train.seed, step, samples)
        return weights.loss(tokens, labels, key, config.train.recompute) * (scale / tokens_in_step)

    def add(total, micro_batch):
        found = jax.value_and_grad(loss_of)(weights, *micro_batch)
        return jax.tree.map(lambda t, f: t + f.astype(t.dtype), total, found), None

    micro_batches = _split(config, batch)
    if config.micro_batches == 1:  # nothing to accumulate: no second copy of the gradients
        loss, gradients = jax.value_and_grad(loss_of)(weights, *(x[0] for x in micro_batches))
        return loss, jax.tree.map(lambda g: g.astype(accumulator), gradients)
    zeros = jax.tree.map(lambda w: jnp.zeros_like(w, dtype=accumulator), weights)
    nothing = mappings.enter_data(jnp.zeros((), accumulator))
    return jax.lax.scan(add, (nothing, zeros), micro_batches)[0]


def _eval_step(config: Config, model: GPT, batch: dict[str, Array]) -> Array:
    weights = mappings.enter_data(cast(model, config))

    def add(total, micro_batch):
        tokens, labels, _ = micro_batch
        return total + weights.loss(tokens, labels), None

    accumulator = parameter_type(config.precision.compute)
    total, _ = jax.lax.scan(add, mappings.enter_data(jnp.zeros((), accumulator)), _split(config, batch))
    return mappings.sum_over(total, mappings.varying_axes(total)) / (config.train.global_batch * config.model.sequence)


def _split(config: Config, batch: dict[str, Array]) -> tuple[Array, Array, Array]:
    """This replica's tokens and labels as [m, b, s], and each sequence's index in the global batch as [m, b]."""
    rows = config.train.global_batch // config.mesh.data
    chex.assert_shape([batch["tokens"], batch["labels"]], (rows, config.model.sequence))
    samples = mappings.rank(DATA) * rows + jnp.arange(rows)

    def split(x):
        return x.reshape(config.micro_batches, config.train.micro_batch, *x.shape[1:])

    return split(batch["tokens"]), split(batch["labels"]), split(samples)


def cast(model: GPT, config: Config) -> GPT:
    """The weights in the compute type."""
    return jax.tree.map(lambda w: w.astype(COMPUTE_TYPES[config.precision.compute]), model)
