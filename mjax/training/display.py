"""The line a person watches while a model trains.

On a terminal it is redrawn in place; elsewhere (a log file, a CI run) a line is printed now and then.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from mjax.training.metrics import Record

SECONDS_BETWEEN_LINES = 10.0
BAR = 24


class Lasting:
    """A stream that outlives its reader: a failure is announced once, on stderr, and never ends what is shown on it.

    It is written to again and again: a disk that was full may have room later.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._failed = stream, False
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # of a terminal that knows no … or →

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, or nothing of it."""
        try:
            self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if that is possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        suppressed = contextlib.suppress(OSError, ValueError)
        with suppressed, open(os.devnull, "wb") as nowhere:  # what it still holds would fail again, at the exit too
            descriptor = self._stream.fileno()
            kept = os.dup(descriptor)
            try:
                os.dup2(nowhere.fileno(), descriptor)
                self._stream.flush()
            finally:
                os.dup2(kept, descriptor)
                os.close(kept)
        if not self._failed:
            self._failed = True
            with suppressed:
                os.write(2, f"{self._stream.name} cannot be written ({error}): going on without it\n".encode())


def lasting_console(stream: TextIO | None, shown: bool = True) -> Console:
    """A console on `stream` that never ends a run; None, where a process was started without one, shows nothing."""
    return Console(file=stream and Lasting(stream), highlight=False, soft_wrap=True, quiet=not shown or stream is None)


class Display:
    """Shows progress up to step `steps` of a run.

    `begin` says where the run starts; entering the context shows the line. `say` prints a message without tearing it.
    """

    def __init__(self, steps: int, console: Console | None = None, shown: bool = True):
        self.console = console or lasting_console(sys.stdout, shown)
        self.steps = steps
        self._progress = None

    def begin(self, start: int) -> Display:
        """Set the line to step `start`."""
        self._start, self._last_line = start, -math.inf
        self._timed_from: tuple[int, float] | None = None
        if self.console.is_terminal:
            bar = [BarColumn(bar_width=BAR)] if self.console.width >= 120 else []
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
                *bar,
                FittingColumn(self.console, table_column=Column(no_wrap=True)),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                console=self.console,
            )
            self._task = self._progress.add_task("train", total=self.steps, completed=start, values=["compiling …"])
        return self

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, message: str) -> None:
        """Print a line of its own."""
        self.console.print(message, markup=False)

    def show(self, record: Record) -> None:
        """Move the line on to `record`."""
        if self._progress:
            self._progress.update(self._task, completed=record.step, values=parts(record))
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or record.step in (self._start + 1, self.steps):
            self._last_line = now
            self.say(f"step {record.step}/{self.steps}  {summary(record)}{self._time_left(record.step, now)}")

    def _time_left(self, step: int, now: float) -> str:
        if self._timed_from is None:  # the first step holds the compilation and says nothing about the others
            self._timed_from = step, now
            return ""
        first, began = self._timed_from
        return f"  {duration((now - began) / (step - first) * (self.steps - step))} left"


class FittingColumn(ProgressColumn):
    """The metrics of a step, of which a narrow terminal shows only the first.

    rich would shorten every column alike, and the number of the step and the time left with them.
    """

    def __init__(self, console: Console, **column):
        super().__init__(**column)
        self.console = console
        self.left = TimeRemainingColumn(compact=True)

    def render(self, task: Task) -> Text:
        """The metrics that have room beside the number of the step and the time left."""
        others = [f"step {task.completed}/{task.total}", self.left.render(task).plain]
        if self.console.width >= 120:
            others.append(" " * BAR)
        return Text(fitting(task.fields["values"], self.console.width - sum(len(other) + 1 for other in others)))


def fitting(values: list[str], width: int) -> str:
    """The most important of `values`, which are in that order, joined in at most `width` columns."""
    shown = ""
    for value in values:
        longer = f"{shown}  {value}" if shown else value
        if len(longer) > width:
            break
        shown = longer
    return shown


def parts(record: Record) -> list[str]:
    """The metrics of a step, the most important first."""
    found = losses(record.loss, record.metrics).split("  ") if record.loss is not None else ["loss not finite"]
    if record.loss_scale != 1.0:
        found.append(f"scale {record.loss_scale:g}")
    found += [f"lr {record.learning_rate:.2e}", f"{record.tokens_per_second:,.0f} tok/s"]
    if record.mfu is not None:
        found.append(f"MFU {record.mfu:.1%}")
    return [*found, f"{record.tflops:.3g} TFLOP/s"]


def summary(record: Record) -> str:
    """The metrics of a step on one line."""
    return "  ".join(parts(record))


def losses(loss: float, metrics: dict[str, float]) -> str:
    """'loss 3.1234  ppl 22.7', of a BERT 'mlm 3.1234  ppl 22.7  order 0.6512 (62% right)', with the head of a task
    'loss 0.3123  accuracy 0.8750'."""
    if not metrics:
        return f"loss {loss:.4f}  ppl {_perplexity(loss):.4g}"
    if "mlm_loss" not in metrics:
        return "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in {"loss": loss, **metrics}.items())
    masked, order, right = (metrics[name] for name in ("mlm_loss", "order_loss", "order_accuracy"))
    return f"mlm {masked:.4f}  ppl {_perplexity(masked):.4g}  order {order:.4f} ({right:.0%} right)"


def verdict(loss: float, metrics: dict[str, float], sequences: int) -> list[str]:
    """The last evaluation, in lines: a GPT's perplexity, or how far a BERT is from guessing at each of its tasks.

    Args:
      loss: nats a label.
      metrics: of a BERT, as `losses` takes them, and the entropy of the masked tokens.
      sequences: how many were judged.
    """
    if not metrics:
        return [f"validation perplexity {_perplexity(loss):.2f}"]
    masked, entropy, right = (metrics[name] for name in ("mlm_loss", "unigram_entropy", "order_accuracy"))
    error = math.sqrt(right * (1 - right) / sequences)
    return [
        f"validation perplexity {_perplexity(masked):.2f} of masked tokens ({masked:.3f} nats); "
        f"by their frequency alone {_perplexity(entropy):.2f} ({entropy:.3f} nats)",
        f"order       {right:.1%} ± {error:.1%} of {sequences:,} pairs right; by chance 50%",
    ]


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


def duration(seconds: float) -> str:
    """'2:31' or '3:02:31'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
