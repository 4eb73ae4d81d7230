"""A training run from Python: `train.py` as an object, with your data, loss, optimizer and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import optax

from mjax.checkpoint.folders import check_run_folder
from mjax.checkpoint.mirror import local_run, run_to_train
from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.config.checks import check_type, resolve_steps, validate
from mjax.config.run import BLENDS
from mjax.data.batches import BatchSource, UserBatches
from mjax.data.sources import TrainingData
from mjax.errors import UsageError, name_arguments
from mjax.run import loop
from mjax.run.callbacks import Callback
from mjax.run.continuing import after_steps_taken, changes_since, choose_origin, with_positions
from mjax.run.loop import Options, Result
from mjax.step.learning_rate import decay_end
from mjax.utils.files import resolve_parents


class Trainer:
    """A run in a folder, new or continued, on the devices that JAX sees.

    trainer = Trainer(config, "runs/mine", data=lambda step: {"tokens": …, "labels": …})
    result = trainer.train()
    """

    @name_arguments("init", "name", "allow_change", "step")
    def __init__(
        self,
        config: Config,
        folder: str | Path,
        *,
        data: BatchSource | None = None,
        validation: Callable[[int], dict] | None = None,
        callbacks: Sequence[Callback] = (),
        loss: Callable | None = None,
        optimizer: optax.GradientTransformation | None = None,
        init: str | Path | None = None,
        allow_change: bool = False,
        show: bool = True,
    ):
        """Check everything that can be checked without a device.

        Args:
          config: as in a file in configs/, or from `load_config`.
          folder: of the run, as with `train.py --name`; created if it does not exist, else its run continues.
          data: a function of the step (from 0) or an iterator that gives the arrays of `config.batch_arrays()`, global
            batches of NumPy arrays [B, …]; by default the config's `data` section. In a run of several processes each
            one gets the whole batch, and uses the rows of its devices.
          validation: the same for validation, a function of the batch index; needed with `data` unless
            `train.eval_interval` is 0.
          callbacks: further actions around the steps.
          loss: (model, residual stream after the last layer [b·s, h], micro-batch, `ForwardContext`) → sums by name,
            instead of the model's `loss`; names and counts still come from the model (`models/protocol.py`).
          optimizer: an optax transform that gives the direction of a step, such as `optax.scale_by_lion()`; the step
            subtracts learning rate × direction, with the config's schedule. By default the config's optimizer.
          init: folder of a run from whose weights alone a new run starts, as with `train.py --init`.
          allow_change: continue a run even if a setting that changes its training is different.
          show: print progress, as `train.py` does.

        Raises:
          UsageError: with the sentence that `train.py` would print.
        """
        check_type(config)
        if wrong := [callback for callback in callbacks if not isinstance(callback, Callback)]:
            fix = "give objects of a subclass of mjax.Callback, with on_step(run, step, metrics)"
            raise UsageError(f"callbacks has {wrong[0]!r}; {fix}")
        self.folder = resolve_parents(run_to_train(folder))
        check_run_folder(self.folder)
        if data is not None:
            if config.train.eval_interval and validation is None:
                raise UsageError("data is given and validation is not; give it, or set train.eval_interval to 0")
            config = replace(config, data=replace(config.data, custom=True, **dict.fromkeys(BLENDS, ())))
        init = None if init is None else resolve_parents(local_run(init))
        config, _ = resolve_steps(with_positions(after_steps_taken(config, self.folder), self.folder, init))
        if (warmup := _fitting_warmup(config)) != config.optimizer.warmup_steps:
            if show:
                print(f"warm-up of {warmup} steps instead of {config.optimizer.warmup_steps:,}, as the run is shorter")
            config = replace(config, optimizer=replace(config.optimizer, warmup_steps=warmup))
        validate(config, str(folder))
        self.config = config
        origin = choose_origin(self.folder, config, init)
        for change in changes_since(self.folder, config, allow_change):
            if show:
                print(change)
        self.options = Options(
            name=str(self.folder),
            origin=origin,
            data=data and _user_data(config, data, validation),
            loss=loss,
            optimizer=optimizer,
            callbacks=callbacks,
            show=show,
        )

    @name_arguments()
    def train(self) -> Result:
        """Take the remaining steps, and return the result of the run with its last state.

        Raises:
          UsageError: data, devices or the run in the folder do not fit the config; nothing was changed.
          RunError: the run cannot continue; its checkpoints are intact.
          UnhealthyError: too many of its steps were unhealthy.
        """
        return loop.train(self.config, self.folder, self.options)


def _user_data(config: Config, data: BatchSource, validation: Callable[[int], dict] | None) -> TrainingData:
    whole = BatchSizes.constant(config.train.global_batch)
    evaluation = None if validation is None else UserBatches(validation, whole, config)
    training = UserBatches(data, BatchSizes.from_config(config), config)
    return TrainingData(training, evaluation, None, "batches of the caller")


def _fitting_warmup(config: Config) -> int:
    """The warm-up of a config, or a tenth of a run that is not longer."""
    steps, warmup = decay_end(config), config.optimizer.warmup_steps
    return warmup if config.optimizer.schedule == "constant" or warmup < steps else min(max(steps // 10, 1), steps - 1)
