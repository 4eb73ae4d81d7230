"""The progress line of a run.

On a terminal it is redrawn in place; elsewhere (a log file, a CI run) a line is printed from time to time.
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

from mjax.config.batch_size import in_units
from mjax.run.metrics import Record

SECONDS_BETWEEN_LINES = 10.0
BAR = 24


class Lasting:
    """A stream that may fail: the first failure is reported on stderr, and never ends the program that writes to it.

    Writing is always tried again: a full disk may have space later.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._failed = stream, False
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # for terminals that cannot show … or →

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, or nothing."""
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
        with suppressed, open(os.devnull, "wb") as nowhere:  # its buffer would fail again, at the exit too
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
                os.write(2, f"{self._stream.name} cannot be written ({error}): continuing without it\n".encode())


def lasting_console(stream: TextIO | None, shown: bool = True) -> Console:
    """A console on `stream` that never ends a run; None, if a process was started without one, shows nothing."""
    return Console(file=stream and Lasting(stream), highlight=False, soft_wrap=True, quiet=not shown or stream is None)


class Display:
    """Shows progress up to step `steps` of a run.

    `begin` sets the first step; entering the context shows the line. `say` prints a message without breaking it.
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
        """Print a separate line."""
        self.console.print(message, markup=False)

    def show(self, record: Record) -> None:
        """Update the line with `record`."""
        if self._progress:
            self._progress.update(self._task, completed=record.step, values=parts(record))
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or record.step in (self._start + 1, self.steps):
            self._last_line = now
            self.say(f"step {record.step}/{self.steps}  {summary(record)}{self._time_left(record.step, now)}")

    def _time_left(self, step: int, now: float) -> str:
        if self._timed_from is None:  # the first step includes compilation and is not representative
            self._timed_from = step, now
            return ""
        first, began = self._timed_from
        return f"  {duration((now - began) / (step - first) * (self.steps - step))} left"


class FittingColumn(ProgressColumn):
    """The metrics of a step, as many as fit into a narrow terminal.

    rich would shorten all columns alike, including the step number and the time left.
    """

    def __init__(self, console: Console, **column):
        super().__init__(**column)
        self.console = console
        self.left = TimeRemainingColumn(compact=True)

    def render(self, task: Task) -> Text:
        """The metrics that fit beside the step number and the time left."""
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
    return [*found, f"{record.tflops:.3g} TFLOP/s", f"{in_units(record.tokens)} tokens"]


def summary(record: Record) -> str:
    """The metrics of a step on one line."""
    return "  ".join(parts(record))


def losses(loss: float, metrics: dict[str, float]) -> str:
    """'loss 3.1234  ppl 22.7'; for a BERT 'mlm 3.1234  ppl 22.7  order 0.6512 (62% right)'; with the head of a task
    'loss 0.3123  accuracy 0.8750'."""
    if not metrics:
        return f"loss {loss:.4f}  ppl {_perplexity(loss):.4g}"
    if "mlm_loss" not in metrics:
        return "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in {"loss": loss, **metrics}.items())
    masked, order, right = (metrics[name] for name in ("mlm_loss", "order_loss", "order_accuracy"))
    return f"mlm {masked:.4f}  ppl {_perplexity(masked):.4g}  order {order:.4f} ({right:.0%} right)"


def verdict(loss: float, metrics: dict[str, float], sequences: int) -> list[str]:
    """The last evaluation, in lines: a GPT's perplexity, or how much better than guessing a BERT is at each of its
    tasks.

    Args:
      loss: nats per label.
      metrics: for a BERT, as in `losses`, and the entropy of the masked tokens.
      sequences: number of sequences evaluated.
    """
    if "mlm_loss" not in metrics:
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
