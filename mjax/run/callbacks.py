"""Callbacks: what happens around the steps of a run, in mjax itself and in your own code.

    class Losses(mjax.Callback):
        def on_step(self, run, step, metrics):
            print(step, metrics.loss)

    mjax.Trainer(config, "runs/x", callbacks=[Losses(), mjax.KeepBestCheckpoint()]).train()

The loop dispatches a step to the devices and reads the metrics of the one before while they work. So in `on_step` the
state of the run is a step ahead, unless `needs_state` asked the loop to wait.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mjax.run.loop import Run
    from mjax.run.metrics import Record


class Callback:
    """What happens around the steps of a run; every method does nothing by default.

    The loop calls a method for all callbacks in order, in every process: what a callback makes the run or its devices
    do must be the same in all of them. The data of `run` are described in `mjax.run.loop.Run`.
    """

    def on_start(self, run: Run) -> None:
        """The steps after `run.step` follow. Called again when the run goes back to a checkpoint (`health.spike`)."""

    def on_activity(self, run: Run, step: int, activity: str) -> None:
        """The loop begins to do something for `step`, such as 'compiling', 'running the step' or 'saving'."""

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True if `on_step` uses the state after `step`: it is then called before the next step starts."""
        return False

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """The metrics of `step` are known; what a callback adds to them is logged.

        `metrics.val_loss` is the validation loss, or None if it was not measured after this step.
        """

    def on_end(self, run: Run) -> None:
        """All steps are done and saved; not called for a run that was stopped or failed."""

    def close(self) -> None:
        """Release what `on_start` took; called however the steps end."""


class KeepBestCheckpoint(Callback):
    """Keeps the checkpoint with the lowest validation loss, in addition to the newest ones.

    A checkpoint is saved after each validation that is better than those of all checkpoints, with its loss in the
    manifest, so that a run that continues keeps it. A better one replaces it only when that is on disk.
    """

    def on_start(self, run: Run) -> None:
        """Exempt the best checkpoint from rotation."""
        run.checkpoints.keep_best = True

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Save after the best validation so far."""
        loss = metrics.val_loss
        if loss is not None and math.isfinite(loss) and run.checkpoints.is_best(loss):
            run.save()
