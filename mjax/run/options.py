"""Options of a run that are not in its config, its result, and the signals that stop it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import optax

from mjax.cluster.processes import WARNINGS, forward_warnings
from mjax.cluster.watchdog import Watchdog
from mjax.data.sources import TrainingData
from mjax.run.callbacks import Callback
from mjax.run.continuing import Origin
from mjax.step.train_state import TrainState

PREEMPTED = 75  # exit code: saved, run the same command again


@dataclass(frozen=True)
class Options:
    """Options of a run that are not in its config.

    Attributes:
      name: of the config in messages.
      step: checkpoint to continue from, setting later ones aside; None: the newest.
      origin: the checkpoint whose weights a new run starts from; by default they are drawn at random.
      data: used instead of the config's data.
      loss: instead of the model's (`Forward.loss_fn`).
      optimizer: instead of the config's (`build_program`).
      callbacks: called after those that show the metrics of a step, before those that log and save.
      show: whether to print progress.
      watchdog: for the processes of this run; None: a single process.
    """

    name: str = "this config"
    step: int | None = None
    origin: Origin | None = None
    data: TrainingData | None = None
    loss: Callable | None = None
    optimizer: optax.GradientTransformation | None = None
    callbacks: Sequence[Callback] = ()
    show: bool = True
    watchdog: Watchdog | None = None


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


class StopSignal:
    """Turns SIGTERM, `WARNINGS` and Ctrl-C into a request to stop after the steps in flight; a second Ctrl-C stops
    immediately. Warnings that are ignored, as SIGHUP under `nohup`, or have another handler are left alone.

    Several processes have to agree on the step, so there SIGTERM is handled by JAX (`processes.told_to_stop`), warnings
    become one, and Ctrl-C stops immediately.

    Leave the context when the save is committed. After a stop request these signals are ignored from then on:
    launchers send them again, and must see the exit code that says "saved".

    Attributes:
      name: of what requested it; "" if nothing has.
    """

    def __init__(self):
        self.name = ""
        self._before: dict[int, object] = {}
        self._interrupts = 0

    @property
    def requested(self) -> bool:
        """True if the run is to end after the step dispatched last."""
        return bool(self.name)

    def __enter__(self) -> StopSignal:
        if jax.process_count() > 1:
            forward_warnings()
            return self
        free = [number for number in WARNINGS if signal.getsignal(number) == signal.SIG_DFL]
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            for number in (signal.SIGTERM, signal.SIGINT, *free):
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, kind, *_) -> None:
        saved = self.requested and kind is None
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if saved:
            with contextlib.suppress(ValueError):  # not in the main thread
                for number in {signal.SIGTERM, *self._before} - {signal.SIGINT}:
                    signal.signal(number, signal.SIG_IGN)

    def _stop(self, number: int, frame) -> None:
        repeated = self.requested
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.name = self.name or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        # The host dispatches a step while the previous one runs, so up to two more steps are printed.
        status = "still saving" if repeated else f"{self.name}: saving after the steps in flight, two at most"
        left = "once more" if self._interrupts else "twice"
        with contextlib.suppress(OSError):  # stderr may no longer be read
            # Written directly: a handler may run while the console is in the middle of a line.
            os.write(2, f"\n{status}; Ctrl-C {left} stops at once\n".encode())
