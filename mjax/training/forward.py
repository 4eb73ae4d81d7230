"""Batches through a trained model, for scores of each sample: what tasks are evaluated with.

It is the evaluation step with a head of the task's own. Each micro-batch writes what its head gives into the rows of an
array of zeros that belong to its samples, and one sum over everything puts the rows of a batch together: under any
parallelism, a pipeline included, every device ends with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from mjax.config import Config
from mjax.models.build import Model
from mjax.parallel import mappings
from mjax.training.step import sum_over_batch

T = TypeVar("T")


def rows_of_batch(config: Config, plan, model: Model, batch: dict[str, Array], head: Callable) -> Array:
    """What the head gives for each sample of the global batch, without dropout, from inside `shard_map`.

    Args:
      config, plan, model, batch: as for `step.loss_and_gradients`.
      head: (weights, stream after the last layer [t, h], micro-batch) → [b, …], the same on every rank of `model`.

    Returns:
      [B, …], the same on every device.
    """
    choices = config.model.choices

    def placed(weights: Model, x: Array, micro_batch: dict[str, Array]) -> Array:
        found = head(weights, x, micro_batch)
        own = micro_batch["samples"][::choices] // choices  # [b], rows of the global batch
        zeros = jnp.zeros((config.train.global_batch, *found.shape[1:]), found.dtype)
        return mappings.vary(zeros, mappings.varying_axes(found)).at[own].set(found)

    return sum_over_batch(config, plan, model, batch, head=placed)


def to_devices(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, Array]:
    """The arrays of a batch that every process holds as a whole; each gives its own devices their rows."""
    with jax.transfer_guard("allow"):  # this one is meant
        return {
            name: jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__) for name, rows in batch.items()
        }


def one_behind(dispatched: Iterable[T]) -> Iterator[T]:
    """The same items, each when the next has been made: it is fetched while the devices work on that one."""
    waiting: list[T] = []
    for item in dispatched:
        yield from waiting
        waiting = [item]
    yield from waiting
