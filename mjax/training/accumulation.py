"""Gradients of several micro-batches on one device, without a pipeline: added up in float32, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from mjax.models.protocol import Model
from mjax.parallel import axes, mappings
from mjax.parallel.means import Means, means_and_gradients
from mjax.parallel.stacks import Accumulated, Apart, joined, zeros_like
from mjax.parallel.zero import Storage, shards_to_sum, sums_by_layer, sums_in_last
from mjax.state.precision import parameter_type
from mjax.training.forward import Forward, MicroBatch

Found = tuple[Means, Model]


def accumulate(forward: Forward, model: Model, weights: Model, micro_batches: MicroBatch, last) -> Found:
    """This replica's parts of the means, and the gradient of its part of the loss, varying over `data`.

    Args:
      forward: of each micro-batch but the last one.
      model: this device's shards of the master weights.
      weights: as `gather_weights` returns them.
      micro_batches: arrays [m, b, …], as `micro_batches_of` returns them.
      last: how each weight is stored, for the last one: gradients of those `in_loop` are summed over `data` there.
    """
    config = forward.config
    wide = parameter_type(config.precision.compute)
    if config.micro_batches == 1:  # nothing to accumulate: avoid a second copy of the gradients
        means, gradients = _differentiate(forward, weights, _at(0, micro_batches))
        return means, jax.tree.map(lambda g: g.astype(wide), joined(gradients))
    nothing = mappings.vary(jnp.zeros((), wide), frozenset(axes.holding()))
    start = {n: nothing + jnp.zeros(jnp.shape(f), wide) for n, f in forward.factors.items()}, zeros_like(weights, wide)

    def add(total: Found, micro_batch: MicroBatch) -> tuple[Found, None]:
        means, gradients = _differentiate(forward, weights, micro_batch)
        return jax.tree.map(lambda t, f: t + f.astype(t.dtype), total, (means, joined(gradients))), None

    if not sums_in_last(config):
        return jax.lax.scan(add, start, micro_batches)[0]
    so_far, _ = jax.lax.scan(add, start, jax.tree.map(lambda x: x[:-1], micro_batches))
    means, gradients = so_far
    # Else XLA would compute the last micro-batch beside the one before, and keep the activations of both.
    waiting = jax.tree.map(lambda _, *both: jax.lax.optimization_barrier(both), forward.plan, weights, gradients)
    weights, gradients = (jax.tree.map(lambda _, both, i=i: both[i], forward.plan, waiting) for i in (0, 1))
    if not sums_by_layer(config):
        return add((means, gradients), _at(-1, micro_batches))[0]
    return _with_last(replace(forward, plan=last), model, weights, _at(-1, micro_batches), (means, gradients))


def _with_last(forward: Forward, model: Model, weights: Model, micro_batch: MicroBatch, so_far: Found) -> Found:
    """The sums `so_far` and those of the last micro-batch, in whose backward pass the gradients of the layers are
    summed over `data`, one layer beside the other's work."""
    means, gradients = so_far

    def accumulated(storage: Storage, weight: Array, before: Array | Apart, gradient: Array):
        if not storage.in_loop:
            return weight
        return Accumulated(weight, before, gradient)

    def run(own: Model, micro_batch: MicroBatch) -> Means:
        return forward(jax.tree.map(accumulated, forward.plan, own, weights, gradients), micro_batch)

    shards = shards_to_sum(model, forward.plan, forward.config.mesh)
    own = jax.tree.map(lambda how, shard, weight: shard if how.in_loop else weight, forward.plan, shards, weights)
    others, found = _differentiate(run, own, micro_batch)
    found = jax.tree.map(lambda how, t, f: f if how.in_loop else t + f.astype(t.dtype), forward.plan, gradients, found)
    return jax.tree.map(jnp.add, means, others), found


def _differentiate(forward: Callable[[Model, MicroBatch], Means], weights: Model, micro_batch: MicroBatch) -> Found:
    means, (gradients,) = means_and_gradients(weights.loss_weights, lambda w: forward(w, micro_batch), weights)
    return means, gradients


def _at(number: int, micro_batches: MicroBatch) -> MicroBatch:
    return {name: array[number] for name, array in micro_batches.items()}
