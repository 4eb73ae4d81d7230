"""The scores of every example of a set, on the mesh of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.config import Config
from mjax.finetuning.batches import padded_batches
from mjax.models.heads import TaskBERT
from mjax.parallel.mappings import DATA
from mjax.tasks.labelled import Examples
from mjax.training.forward import one_behind, rows_of_batch, to_devices
from mjax.training.layout import lay_out
from mjax.training.step import tokens_of


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
            partial(_scores, config, layout.plan),
            mesh=mesh,
            in_specs=(layout.specs, P(DATA)),
            out_specs=P(),
            check_vma=True,
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
        batches = padded_batches(examples, self.config.train.global_batch)
        dispatched = ((count, self._program(model, to_devices(batch, self._sharding))) for count, batch in batches)
        found = []
        for count, scores in one_behind(dispatched):
            found.append(jax.device_get(scores)[:count].astype(np.float32))
            on_progress(count)
        return np.concatenate(found)


def _scores(config: Config, plan, model: TaskBERT, batch: dict[str, Array]) -> Array:
    """From inside `shard_map`: the scores of the global batch, [B, …], the same on every device."""
    tokens = tokens_of(config)
    return rows_of_batch(config, plan, model, batch, lambda weights, x, rows: weights.scores(x, rows, tokens))
