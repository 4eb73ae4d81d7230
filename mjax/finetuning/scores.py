"""The scores of every example of a set, on the mesh of training.

It is the evaluation step with the task's head. Each micro-batch writes its scores into the rows of an array of zeros
that belong to its examples, and one sum over everything puts the rows of a batch together: under any parallelism, a
pipeline included, every device ends with all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import Config
from mjax.finetuning.batches import padded_batches
from mjax.models.heads import TaskBERT
from mjax.parallel import mappings
from mjax.parallel.mappings import DATA
from mjax.parallel.tokens import Tokens
from mjax.tasks.labelled import Examples
from mjax.training.layout import lay_out
from mjax.training.step import sum_over_batch


class TaskScorer:
    """The compiled program that scores examples with any weights of one config.

    Attributes:
      abstract_model: `TaskBERT` of ShapeDtypeStructs with shardings: what weights are restored to.
    """

    def __init__(self, config: Config, mesh: Mesh):
        """Nothing is compiled or allocated before the first call.

        Args:
          config: with the task's head, and `model.attention` resolved to a kernel.
          mesh: of the shape `config.mesh`.
        """
        self.config = config
        layout = lay_out(config, mesh)
        self.abstract_model = layout.abstract_model
        self._sharding = NamedSharding(mesh, P(DATA))
        on_devices = jax.shard_map(
            partial(_scores, config, layout.plan), mesh=mesh, in_specs=(layout.specs, P(DATA)), out_specs=P()
        )
        self._program = jax.jit(on_devices)

    def __call__(
        self, model: TaskBERT, examples: Examples, on_progress: Callable[[int], None] = lambda examples: None
    ) -> np.ndarray:
        """Scores of all N examples, float32: [N, classes], [N, c] or [N, 2, s].

        Args:
          model: master weights.
          examples: in rows of the model's length.
          on_progress: called with the number of examples that have been scored since the last call.
        """
        found, waiting = [], None
        for count, batch in padded_batches(examples, self.config.train.global_batch):
            scores = count, self._program(model, self._to_devices(batch))
            if waiting is not None:
                found.append(_fetch(*waiting, on_progress))  # while the devices work on the next batch
            waiting = scores
        return np.concatenate([*found, _fetch(*waiting, on_progress)])

    def _to_devices(self, batch: dict[str, np.ndarray]) -> dict[str, Array]:
        """Every process holds all examples and gives its own devices their rows."""
        with jax.transfer_guard("allow"):  # this one is meant
            return {
                name: jax.make_array_from_callback(rows.shape, self._sharding, rows.__getitem__)
                for name, rows in batch.items()
            }


def _scores(config: Config, plan, model: TaskBERT, batch: dict[str, Array]) -> Array:
    """From inside `shard_map`: the scores of the global batch, [B, …], the same on every device."""
    train, choices = config.train, config.model.choices
    tokens = Tokens(train.micro_batch * choices, config.model.sequence, config.mesh.sequence_parallel)

    def head(weights: TaskBERT, x: Array, micro_batch: dict[str, Array]) -> Array:
        scores = weights.scores(x, micro_batch, tokens)
        own = micro_batch["samples"][::choices] // choices  # [b], rows of the global batch
        zeros = jnp.zeros((train.global_batch, *scores.shape[1:]), scores.dtype)
        return mappings.vary(zeros, mappings.varying_axes(scores)).at[own].set(scores)

    return sum_over_batch(config, plan, model, batch, head=head)


def _fetch(count: int, scores: Array, on_progress: Callable[[int], None]) -> np.ndarray:
    fetched = jax.device_get(scores)[:count].astype(np.float32)
    on_progress(count)
    return fetched
