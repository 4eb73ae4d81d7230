"""The initial state of fine-tuning: the trunk of a checkpoint, and a head initialised by the seed.

The checkpoint is that of a pre-trained or a fine-tuned BERT. Every weight that the task's model also has, by name, is
loaded; the heads for masked tokens and for the order are dropped, the table of learned positions is cut to the length
of the task's rows, and weights that the checkpoint does not have, mainly the head, are drawn from N(0, init_std).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from mjax.checkpoint.checkpoint import restore_weights
from mjax.config import Config
from mjax.models.build import build_model
from mjax.models.protocol import Model
from mjax.parallel.zero import cut_into_chunks
from mjax.step.layout import lay_out
from mjax.step.optimizer import adamw
from mjax.step.precision import parameter_type
from mjax.step.step import TrainProgram, first_state
from mjax.step.train_state import TrainState
from mjax.utils.names import leaf_name

HEAD = "head."  # of a task: another task's head has another meaning, whatever its shape


class Start:
    """The initial state of fine-tuning from one checkpoint, for any seed."""

    def __init__(self, run: Path, saved: Config, config: Config, mesh: Mesh, program: TrainProgram):
        """Nothing is read before the first call of `state`.

        Args:
          run: folder of the trained run.
          saved: its config.
          config: of fine-tuning, with the task's head.
          mesh: of the shape `config.mesh`.
          program: of `config`.
        """
        self.run, self.config = run, config
        source = replace(config, model=replace(saved.model, attention=config.model.attention))
        self._source = lay_out(source, mesh).abstract_model
        self._kept = _named(program.abstract_state.model).keys() & _named(self._source).keys()
        self._kept = {name for name in self._kept if not name.startswith(HEAD)}
        self.new = sorted(_named(program.abstract_state.model).keys() - self._kept)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
        self._begin = jax.jit(partial(_first_state, config), out_shardings=shardings)

    def state(self, seed: int, step: int | None, on_notice: Callable[[str], None]) -> tuple[int, TrainState]:
        """The initial state for `seed`, and the step of the checkpoint of its trunk.

        Args:
          seed: initialises the head, and selects the dropout masks. One compiled program serves all seeds, and masks
            depend on the step number; so the steps of a seed are numbered from seed × steps on.
          step: the checkpoint; None: the newest intact one.

        Raises:
          UsageError: there is no such checkpoint, or its model is not that of its config.
          RunError: it is damaged.
        """
        step, model = restore_weights(self.run, self._source, step, on_notice)
        trunk = {name: weight for name, weight in _named(model).items() if name in self._kept}
        del model  # frees memory
        return step, self._begin(np.uint32(seed), np.int32(seed * self.config.train.steps % 2**31), trunk)


def _first_state(config: Config, seed: Array, first_step: Array, trunk: dict[str, Array]) -> TrainState:
    drawn = build_model(seed, config.model, parameter_type(config.precision.compute))

    def chosen(path: tuple, new: Array) -> Array:
        name = leaf_name(path)
        return trunk[name][: len(new)] if name in trunk else new

    model = jax.tree_util.tree_map_with_path(chosen, cut_into_chunks(drawn, config.mesh))
    return first_state(config, adamw(config.optimizer), model, first_step)


def _named(model: Model) -> dict[str, Array]:
    return {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(model)}
