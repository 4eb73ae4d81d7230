"""One seed of fine-tuning: a training run that the task evaluates after each epoch.

    seed-1234/
      config.json, metrics.jsonl   as in any run
  epochs.json                  loss and metrics of the validation files after each epoch
  checkpoints/STEP/            the whole state after each of the last two epochs, to continue from
  best/                        a run folder: config, tokenizer and the weights after the best epoch, and after the
                               previous best one, in case the newer ones are damaged
    predictions/               of the validation files, in the task's official format

An epoch is better than those before it if the task's metric is higher; in a tie the first one is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from mjax.checkpoint.arrays import named
from mjax.checkpoint.base import restore_weights
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.cluster.processes import is_first
from mjax.config import Config
from mjax.errors import UnhealthyError, UsageError
from mjax.models.bert.heads import HEAD, TaskBERT
from mjax.models.build import build_model
from mjax.parallel.zero import cut_into_chunks
from mjax.run.loop import Run
from mjax.step.layout import lay_out
from mjax.step.optimizer import adamw
from mjax.step.precision import parameter_type
from mjax.step.step import TrainProgram, first_state
from mjax.step.train_state import TrainState
from mjax.tasks.labelled import Examples, LabelledTask, write_predictions
from mjax.tasks.scoring import TaskScorer
from mjax.utils.files import read_json, write_whole


class SeedRun(Run):
    """A training run with the task's evaluation, which keeps the weights of its best epoch.

    Attributes:
      epochs: results so far, as in epochs.json: one dict per epoch with its number, its last step, loss and metrics.
    """

    def __init__(self, *arguments, folder: Path, task: LabelledTask, scorer: TaskScorer, best: Checkpoints, start: int):
        """Load the folder's results of the epochs up to step `start`.

        Args:
          arguments: as for `Run`.
          folder: seed-N.
          task: provides the validation files.
          scorer: of the run's config.
          best: checkpoints of the folder's best/.
          start: the step the run continues from.
        """
        super().__init__(*arguments)
        self.folder, self.task, self.scorer, self.best = folder, task, scorer, best
        self.epochs = [epoch for epoch in read_epochs(folder) if epoch["step"] <= start]

    def evaluate(self, step: int, model: TaskBERT, validation: dict[str, Examples]) -> tuple[float, dict[str, float]]:
        """Loss and metrics of the validation files; saves the results and, if it is the best, the weights of this
        epoch."""
        scores = {name: self.scorer(model, examples) for name, examples in validation.items()}
        metrics = {metric.name: metric.value for metric in self.task.metrics(scores)}
        loss = mean_loss(scores, validation)
        epoch = {"epoch": step // self.config.train.eval_interval, "step": step, "loss": loss, "figures": metrics}
        self.epochs.append(epoch)
        is_best = best_of(self.epochs, self.task.metric) is epoch
        if is_best:
            self.best.save(step, {"model": model}, last=True)
        if is_first():
            if is_best:
                write_predictions(self.folder / "best" / "predictions", self.task, scores)
            write_whole(self.folder / "epochs.json", json.dumps(self.epochs, indent=1) + "\n")
        return loss, {name: value for name, value in metrics.items() if isinstance(value, float)}

    def give_up(self, problem: str) -> None:
        """End an unhealthy seed.

        Raises:
          UnhealthyError: always; the earlier seeds are intact.
        """
        raise UnhealthyError(f"{problem}; fine-tune with a lower --learning-rate, into another --output")


def read_epochs(folder: Path) -> list[dict]:
    """Read epochs.json of a seed; empty if it does not exist.

    Raises:
      UsageError: it is damaged.
    """
    file = folder / "epochs.json"
    if not file.exists():
        return []
    fix = f"remove {folder}, to train this seed from scratch"
    epochs = read_json(file, fix)
    if not isinstance(epochs, list) or not all(map(_is_epoch, epochs)):
        raise UsageError(f"{file} is not a list of epochs with their steps and metrics; {fix}")
    return epochs


def _is_epoch(values: Any) -> bool:
    """Return True if `values` have the form that `SeedRun.evaluate` writes for an epoch."""
    if not isinstance(values, dict) or not isinstance(metrics := values.get("figures"), dict):
        return False
    numbers = [*(values.get(name) for name in ("epoch", "step", "loss")), *metrics.values()]
    return all(type(number) in (int, float) for number in numbers)


def best_of(epochs: list[dict], metric: str) -> dict:
    """The epoch with the highest metric, the first one in a tie."""
    return max(epochs, key=lambda epoch: epoch["figures"][metric])


def mean_loss(scores: dict[str, np.ndarray], validation: dict[str, Examples]) -> float:
    """Mean cross entropy in nats over the examples with labels, as in `TaskBERT.loss`."""
    losses = []
    for name, examples in validation.items():
        if examples.labels:
            labels = np.stack(list(examples.labels.values()), axis=1)  # [N, 1], of a span [N, 2]
            logits = scores[name].reshape(*labels.shape, -1).astype(np.float64)
            of_labels = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
            losses += (np.logaddexp.reduce(logits, axis=-1) - of_labels).mean(1).tolist()
    return float(np.mean(losses))


# --- The initial state of fine-tuning: the trunk of a checkpoint, and a head initialised by the seed ------------------
# The checkpoint is that of a pre-trained or a fine-tuned BERT. Every weight that the task's model also has, by name, is
# loaded; the heads for masked tokens and for the order are dropped, and weights that the checkpoint does not have,
# mainly the head, are drawn from N(0, init_std).


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
        names = named(program.abstract_state.model).keys()
        self._trunk = {name for name in names & named(self._source).keys() if not name.startswith(HEAD)}
        self.new = sorted(names - self._trunk)

        def first(seed: Array, first_step: Array, trunk: dict[str, Array]) -> TrainState:
            drawn = build_model(seed, config.model, parameter_type(config.precision.compute))
            weights = named(cut_into_chunks(drawn, config.mesh))
            chosen = [trunk.get(name, weight) for name, weight in weights.items()]
            model = jax.tree.unflatten(jax.tree.structure(program.abstract_state.model), chosen)
            return first_state(config, adamw(config.optimizer), model, first_step)

        shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state)
        self._first = jax.jit(first, out_shardings=shardings)

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
        trunk = {name: weight for name, weight in named(model).items() if name in self._trunk}
        del model  # frees memory
        return step, self._first(np.uint32(seed), np.int32(seed * self.config.train.steps % 2**31), trunk)
