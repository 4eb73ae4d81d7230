"""The result of a run, and the options of a caller from Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import optax

from mjax.run.metrics import Record
from mjax.run.profile import Profile
from mjax.step.train_state import TrainState

PREEMPTED = 75  # exit code: saved, run the same command again


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      exit_code: 0 if all steps are done, 75 if it was stopped and has saved.
      step: steps taken.
      state: the last state.
      validation_loss: of the last evaluation, nats per token; None if there was none.
      validation_metrics: its other means by name; for a BERT also the entropy of the masked tokens.
      stopped: whether it was told to stop, possibly in the last step, which is then not evaluated.
    """

    exit_code: int
    step: int
    state: TrainState = field(repr=False)
    validation_loss: float | None
    validation_metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False


@dataclass(frozen=True)
class Options:
    """Options of a caller from Python beside a config.

    Attributes:
      loss: instead of the model's (`Forward.objective`).
      optimizer: instead of the config's (`build_program`).
      on_step: called with the record of each step; True ends the run.
      show: whether to print progress.
      profile: of some steps.
    """

    loss: Callable | None = None
    optimizer: optax.GradientTransformation | None = None
    on_step: Callable[[Record], bool] = lambda record: False
    show: bool = True
    profile: Profile = field(default_factory=Profile)
