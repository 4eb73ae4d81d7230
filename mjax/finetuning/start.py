"""The start of fine-tuning: the trunk of a checkpoint, and a head drawn from the seed.

The checkpoint is that of a pre-trained BERT, or of one that was fine-tuned before. Every weight that the task's model
has too, by name, is taken; the heads for masked tokens and for the order stay behind, the table of learned positions is
cut to those that the task's rows have, and what the checkpoint has not, the head above all, is drawn from N(0,
init_std).
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

from mjax.config import Config
from mjax.inference import restore_weights
from mjax.models.build import build_model
from mjax.models.protocol import Model
from mjax.names import leaf_name
from mjax.parallel.zero import cut_into_chunks
from mjax.state.layout import lay_out
from mjax.state.precision import parameter_type
from mjax.state.train_state import TrainState
from mjax.training.optimizer import adamw
from mjax.training.step import TrainProgram, first_state

HEAD = "head."  # of a task: another task's has another meaning, whatever its shape


class Start:
    """The beginning of fine-tuning from one checkpoint, for any seed."""

    def __init__(self, run: Path, saved: Config, config: Config, mesh: Mesh, program: TrainProgram):
        """Nothing is read before the first state is asked for.

        Args:
          run: folder of the trained run.
          saved: the config in it.
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
        """The state before the first step of `seed`, and the step of the checkpoint its trunk is from.

        Args:
          seed: draws the head, and chooses the dropout masks. One compiled program serves all seeds, and masks follow
            from the number of a step; so the steps of a seed are numbered from seed × steps on.
          step: the checkpoint; None: the newest that is not damaged.

        Raises:
          UsageError: there is no such checkpoint, or it is of another model than its config says.
          RunError: it is damaged.
        """
        step, model = restore_weights(self.run, self._source, step, on_notice)
        trunk = {name: weight for name, weight in _named(model).items() if name in self._kept}
        del model  # what stays behind makes room
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
