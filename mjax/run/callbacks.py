"""Callbacks: actions around the steps of a run, in mjax itself and in your code.

    class Losses(mjax.Callback):
        def on_step(self, run, step, metrics):
            print(step, metrics.loss)

    mjax.Trainer(config, "runs/x", callbacks=[Losses(), mjax.KeepBestCheckpoint()]).train()

The loop dispatches a step to the devices and reads the metrics of the one before while they work. So in `on_step` the
state of the run is a step ahead, unless `needs_state` asked the loop to wait.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mjax.cluster.launch import COMPILING, STEP
from mjax.config.plain_values import read_if_exists
from mjax.errors import PrintLine, UsageError
from mjax.utils.files import set_aside, write_whole

if TYPE_CHECKING:
    from mjax.run.loop import Run
    from mjax.run.metrics import Record


class Callback:
    """Hooks around the steps of a run; every method does nothing by default.

    The loop calls a method for all callbacks in order, in every process. A callback must change the run and its devices
    in the same way in all of them. The data of `run` are described in `mjax.run.loop.Run`.
    """

    def on_start(self, run: Run) -> None:
        """The steps after `run.step` follow. Called again when the run goes back to a checkpoint (`health.spike`)."""

    def on_activity(self, run: Run, step: int, activity: str) -> None:
        """The loop begins an activity for `step`, such as 'compiling', 'running the step' or 'saving'."""

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True if `on_step` uses the state after `step`: it is then called before the next step starts."""
        return False

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """The metrics of `step` are known. Entries that a callback adds are logged.

        `metrics.val_loss` is the validation loss, or None if it was not measured after this step.
        """

    def on_end(self, run: Run) -> None:
        """All steps are done and saved; not called for a run that was stopped or failed."""

    def close(self) -> None:
        """Release the resources of `on_start`; called however the steps end."""


class KeepBestCheckpoint(Callback):
    """Retains the checkpoint with the lowest validation loss, in addition to the newest ones.

    A checkpoint is saved after each validation that is better than the best checkpoint's, with its loss in the
    manifest, so that a run that continues retains it. A better checkpoint replaces it only once it is on disk.
    """

    def on_start(self, run: Run) -> None:
        """Exempt the best checkpoint from rotation."""
        run.checkpoints.keep_best = True

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Save after the best validation so far."""
        loss = metrics.val_loss
        if loss is not None and math.isfinite(loss) and run.checkpoints.is_best(loss):
            run.save()


# --- Goodput: how a run spends its hours. goodput.json has an entry for each start, for `mjax runs --goodput` ---------

GOODPUT = "goodput.json"
STARTING, STEPS, REPEATED = "starting", "steps", "repeated"
ACTIVITIES = {STEP: STEPS, COMPILING: "compiling", "waiting for its batch": "data"}
KINDS = {
    STEPS: "steps", REPEATED: "repeated", STARTING: "start", "compiling": "compile", "data": "data",
    "evaluating": "eval", "saving": "save",
}  # fmt: skip
"""Activities with their titles in a table; steps come first, which are the goodput."""
WRITE_INTERVAL = 60.0  # seconds, which goodput.json lacks of a run that is killed


class RunStart(TypedDict):
    """An entry of goodput.json: when a start of the run began and was last seen, its steps, and seconds by activity."""

    began: str
    seen: str
    first: int
    last: int
    seconds: dict[str, float]


class Goodput(Callback):
    """Seconds of this start of a run, by activity; they add up to the time since it was made.

    A step that an earlier start, or this one before it went back, has taken already counts as repeated.

    Attributes:
      file: goodput.json; None: nothing is written, as in all processes but the first.
    """

    def __init__(self):
        self.file: Path | None = None
        self.seconds: Counter[str] = Counter()
        self._began, self._activity, self._since = _now(), STARTING, time.monotonic()
        self._starts: list[RunStart] = []
        self._first = self._last = self._done = 0
        self._written = self._since

    def begin(self, folder: Path, step: int, print_line: PrintLine = print) -> None:
        """Write to the run `folder` from now on; the run continues after `step`. `print_line` gets a damaged file."""
        self.file, self._first, self._last = folder / GOODPUT, step, step
        self._starts = read_starts(RunStart, self.file, print_line)
        self._done = max((start["last"] for start in self._starts), default=0)

    def on_start(self, run: Run) -> None:
        """Count the steps after `run.step`: after a rollback they are taken again."""
        self._done, self._last = max(self._done, self._last), run.step

    def on_activity(self, run: Run, step: int, activity: str) -> None:
        """Count the time until the next activity as this one's."""
        now = time.monotonic()
        self.seconds[self._activity] += now - self._since
        self._activity, self._since = ACTIVITIES.get(activity, activity), now
        if self._activity == STEPS and step <= self._done:
            self._activity = REPEATED
        self._last = step
        if now - self._written > WRITE_INTERVAL:
            self.close()

    def close(self) -> None:
        """Bring goodput.json up to date; one that cannot be written does not end a run."""
        self._written = now = time.monotonic()
        if self.file is None:
            return
        self.seconds[self._activity] += now - self._since
        self._since = now
        seconds = {name: round(self.seconds[name], 3) for name in KINDS if name in self.seconds}
        last = max(self._done, self._last)
        entry = RunStart(began=self._began, seen=_now(), first=self._first, last=last, seconds=seconds)
        try:
            write_whole(self.file, json.dumps([*self._starts, entry], indent=1) + "\n")
        except OSError:
            self.file = None


def read_starts(kind: type, file: Path, print_line: PrintLine) -> list[Any]:
    """The list to which each start of a run adds an entry of a `kind`; a damaged file is set aside and reported."""
    try:
        return read_if_exists(list[kind], file, "") or []
    except UsageError:
        print_line(f"{file} is damaged: renamed to {set_aside(file).name}, started a new one")
        return []


def read_goodput(folder: Path) -> list[RunStart]:
    """The entries of a run's goodput.json; none if it has no such file.

    Raises:
      UsageError: it is damaged.
    """
    return read_if_exists(list[RunStart], folder / GOODPUT, "remove it to count from the next start") or []


def sum_activities(starts: list[RunStart]) -> dict[str, float]:
    """Seconds by activity over all starts, and `between` them, when the run did not exist.

    Raises:
      UsageError: the times of two starts cannot be compared.
    """
    seconds = Counter(dict.fromkeys(KINDS, 0.0))
    for start in starts:
        seconds.update({name: value for name, value in start["seconds"].items() if name in KINDS})
    between = 0.0
    for before, start in pairwise(starts):
        try:
            pause = datetime.fromisoformat(start["began"]) - datetime.fromisoformat(before["seen"])
        except (ValueError, TypeError) as error:  # no time, or only one of both with a zone
            raise UsageError(f"{GOODPUT} has a time that cannot be used ({error}); remove it") from None
        between += max(pause.total_seconds(), 0.0)
    return dict(seconds) | {"between": between}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
