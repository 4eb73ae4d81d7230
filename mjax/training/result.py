"""How a run ends, and what a caller from Python may pass to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import optax

from mjax.state.train_state import TrainState
from mjax.training.metrics import Record

PREEMPTED = 75  # exit code: saved, run me again


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      exit_code: 0 when all steps are done, 75 when it was stopped and has saved.
      step: steps taken.
      state: the last state.
      validation_loss: of the last evaluation, nats a token; None where there was none.
      validation_metrics: its other means by name; of a BERT also the entropy of the masked tokens.
      stopped: whether it was told to stop, be it in the last step, which is not measured then.
    """

    exit_code: int
    step: int
    state: TrainState
    validation_loss: float | None
    validation_metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False


@dataclass(frozen=True)
class Options:
    """What a caller from Python may pass beside a config.

    Attributes:
      loss: in the place of the model's (`Forward.objective`).
      optimizer: in the place of AdamW (`build_program`).
      on_step: called with the record of each step; True ends the run.
      show: whether to print what runs and how far it is.
    """

    loss: Callable | None = None
    optimizer: optax.GradientTransformation | None = None
    on_step: Callable[[Record], bool] = lambda record: False
    show: bool = True
