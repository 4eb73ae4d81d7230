"""The lines that a run prints: its plan, the progress line, and its results.

On a terminal the progress line is redrawn in place; elsewhere (a log file, a CI run) a line is printed from time to
time.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from mjax.config import Config, axes
from mjax.config.batch_size import BatchSizes, format_tokens
from mjax.config.marks import Metric
from mjax.config.model import is_user_defined
from mjax.config.model_file import run_flags, source_file
from mjax.data.sources import TrainingData
from mjax.models.build import count_parameters
from mjax.parallel.pipeline_schedules import find_schedule, slot_times
from mjax.planner.layer import peak_tflops
from mjax.run.callbacks import Callback
from mjax.run.metrics import Record
from mjax.utils.figures import duration
from mjax.utils.stores import with_addresses

if TYPE_CHECKING:
    from mjax.run.loop import Result, Run

SECONDS_BETWEEN_LINES = 10.0


class NonFatalStream:
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
            original = os.dup(descriptor)
            try:
                os.dup2(nowhere.fileno(), descriptor)
                self._stream.flush()
            finally:
                os.dup2(original, descriptor)
                os.close(original)
        if not self._failed:
            self._failed = True
            with suppressed:
                os.write(2, f"{self._stream.name} cannot be written ({error}): continuing without it\n".encode())


def non_fatal_console(stream: TextIO | None, shown: bool = True) -> Console:
    """A console on `stream` that never ends a run; None, if a process was started without one, shows nothing."""
    quiet = not shown or stream is None
    return Console(file=stream and NonFatalStream(stream), highlight=False, soft_wrap=True, quiet=quiet)


class Display(Callback):
    """Shows progress up to step `steps` of a run.

    `begin` shows the line, `close` ends it, and `print_line` prints a message without breaking it.
    """

    def __init__(self, steps: int, console: Console | None = None, shown: bool = True, metrics: Sequence[Metric] = ()):
        self.console = console or non_fatal_console(sys.stdout, shown)
        self.steps, self.metrics = steps, metrics
        self._progress: Progress | None = None

    def begin(self, start: int) -> Display:
        """Set the line to step `start`."""
        self.close()
        self._start, self._last_line = start, -math.inf
        self._first_timed: tuple[int, float] | None = None  # step and time
        if self.console.is_terminal:
            bar = [BarColumn(bar_width=24)] if self.console.width >= 120 else []
            # A narrow terminal shortens the metrics only: their column gets the width that the others leave.
            metrics = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
                *bar,
                TextColumn("{task.description}", markup=False, table_column=metrics),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
                console=self.console,
                expand=True,
            )
            self._task = self._progress.add_task("compiling …", total=self.steps, completed=start)
            self._progress.start()
        return self

    def close(self) -> None:
        """End the line."""
        if self._progress:
            self._progress.stop()

    def on_start(self, run: Run) -> None:
        """Show the line."""
        self.begin(run.step)

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Show the metrics, and the problem of the step."""
        self.show(metrics)
        if metrics.unhealthy:
            self.print_line(f"step {step} {metrics.unhealthy}")

    def on_end(self, run: Run) -> None:
        """End the line before the results."""
        self.close()

    def print_line(self, message: str) -> None:
        """Print a separate line."""
        self.console.print(with_addresses(message), markup=False)

    def show(self, record: Record) -> None:
        """Update the line with `record`."""
        if self._progress:
            self._progress.update(self._task, completed=record.step, description=format_record(record, self.metrics))
            return
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES or record.step in (self._start + 1, self.steps):
            self._last_line = now
            line = f"{format_record(record, self.metrics)}{self._time_left(record.step, now)}"
            self.print_line(f"step {record.step}/{self.steps}  {line}")

    def _time_left(self, step: int, now: float) -> str:
        if self._first_timed is None:  # the first step includes compilation and is not representative
            self._first_timed = step, now
            return ""
        first, began = self._first_timed
        return f"  {duration((now - began) / (step - first) * (self.steps - step))} left"


def format_record(record: Record, shown: Sequence[Metric] = ()) -> str:
    """Format the metrics of a step, the most important first."""
    parts = [format_losses(record.loss, record.metrics, shown) if record.loss is not None else "loss not finite"]
    if record.loss_scale != 1.0:
        parts.append(f"scale {record.loss_scale:g}")
    parts += [f"lr {record.learning_rate:.2e}", f"{record.tokens_per_second:,.0f} tok/s"]
    if record.mfu is not None:
        parts.append(f"MFU {record.mfu:.1%}")
    return "  ".join([*parts, f"{record.tflops:.3g} TFLOP/s", f"{format_tokens(record.tokens)} tokens"])


def format_losses(loss: float, metrics: dict[str, float], shown: Sequence[Metric] = ()) -> str:
    """Format the losses of a step or an evaluation as the model shows them (`ModelConfig.metrics`).

    'mlm loss 3.1234  ppl 22.7  sop loss 0.6512  sop accuracy 62%'; without such metrics 'loss 3.1234  ppl 22.7', or
    'loss 0.3123  accuracy 0.8750' with others.
    """
    if not metrics:
        return f"loss {loss:.4f}  ppl {_perplexity(loss):.4g}"
    if parts := [metric.line.format_map(_values(metric, metrics)) for metric in shown if metric.name in metrics]:
        return "  ".join(parts)
    return "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in {"loss": loss, **metrics}.items())


def format_verdict(loss: float, metrics: dict[str, float], sequences: int, shown: Sequence[Metric] = ()) -> list[str]:
    """Format the last evaluation: the verdicts of the model's metrics, or the perplexity.

    Args:
      loss: nats per label.
      metrics: of the evaluation.
      sequences: number of sequences evaluated.
      shown: the metrics of the model (`ModelConfig.metrics`).
    """
    metrics = {**metrics, "sequences": sequences}
    lines = [m.verdict.format_map(_values(m, metrics)) for m in shown if m.verdict and m.name in metrics]
    return lines or [f"validation perplexity {_perplexity(loss):.2f}"]


def _values(metric: Metric, metrics: dict[str, float]) -> dict[str, float]:
    """The values that the texts of a metric format."""
    value = metrics[metric.name]
    values = {**metrics, "value": value, "perplexity": _perplexity(value)}
    guess = metrics.get(metric.guess) if isinstance(metric.guess, str) else metric.guess
    if guess is not None:
        values |= {"guess": guess, "guess_perplexity": _perplexity(guess)}
    if metric.share and "sequences" in metrics:
        values["error"] = math.sqrt(value * (1 - value) / metrics["sequences"])
    return values


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


# --- Before the first step and after the last -------------------------------------------------------------------------


def announce_start(display: Display, config: Config, data: TrainingData, folder: Path, start: int) -> None:
    """Print the model, mesh, data, steps and folder of a run."""
    model, mesh, train = config.model, config.mesh, config.train
    kind = jax.devices()[0].device_kind
    batches = BatchSizes.from_config(config)
    tokens = batches.samples_before(train.steps) * model.sequence
    sizes = [size for first_step, _, size in batches.pieces if first_step < train.steps]
    size = " to ".join(map(str, sorted({min(sizes), max(sizes)})))
    parameters, compute = count_parameters(model), config.precision.compute
    choices = ", unrolled layers" if train.unroll == "on" else ""
    choices += f", context attention {config.context_attention}" if config.context_attention else ""
    choices += f", expert matmuls {model.moe_kernel}" if model.moe_kernel else ""
    choices += f", {model.token_dispatcher(mesh.expert)} to experts" if mesh.expert > 1 else ""
    choices += f", loss in {train.loss_chunks} chunks" if train.loss_chunks > 1 else ""
    trained = count_parameters(model, trained=True)
    choices += "" if trained == parameters else f"; {trained:,} trainable ({trained / parameters:.2%})"
    display.print_line(f"model   {parameters:,} parameters, {compute}, attention {model.attention}{choices}")
    display.print_line(f"mesh    {describe_mesh(config)} on {mesh.devices} × {kind}")
    display.print_line(f"data    {data.summary}")
    for note in data.notes:
        display.print_line(f"        {note}")
    display.print_line(f"plan    {train.steps:,} steps of {size} × {model.sequence} tokens, {tokens:,} in total")
    display.print_line(f"run     {folder}" + (f", continued after step {start}" if start else ""))
    if kind != "cpu" and peak_tflops(kind, config.precision.compute) is None:
        problem = f"no {config.precision.compute} peak is known for {kind}"
        display.print_line(f"mfu     not shown: {problem}; mjax/cluster/hardware.py describes how to add it")


def describe_mesh(config: Config) -> str:
    """`pipe 4 (1f1b, 2 virtual stages, bubble 18.8%) × data 2 × model 2, sequence parallel, ZeRO-1`."""
    mesh, text = config.mesh, ""
    if mesh.pipe > 1:
        bubble = find_schedule(config).bubble(*slot_times(config))
        stages = f", {mesh.virtual_stages} virtual stages" if mesh.virtual_stages > 1 else ""
        text = f"pipe {mesh.pipe} ({mesh.schedule}{stages}, bubble {bubble:.1%}) × "
    text += axes.describe_mesh(replace(mesh, pipe=1)) + ", sequence parallel" * mesh.splits_tokens
    return text + (f", ZeRO-{mesh.zero}" if mesh.zero else "")


def announce_results(display: Display, result: Result, folder: Path, config: Config) -> None:
    """Print the files of a finished run, and the next commands."""
    if result.validation_loss is not None:
        sequences, shown = config.train.eval_batches * config.train.global_batch, config.model.metrics
        for line in format_verdict(result.validation_loss, result.validation_metrics, sequences, shown):
            display.print_line(line)
    display.print_line(f"curve       {folder / 'loss.png'}")
    if config.model.experts:
        display.print_line(f"experts     {folder / 'experts.png'}")
    display.print_line(f"checkpoint  {folder / 'checkpoints' / str(result.step)}")
    if not config.model.causal or not (folder / "tokenizer").is_dir():
        return
    if is_user_defined(type(config.model)) and source_file(type(config.model)) is None:
        call = f'mjax.generate({str(folder)!r}, "…")'
        display.print_line(f"more text   {call} in Python, where {config.model.kind!r} is defined")
    else:
        flags = run_flags(folder, config.model) + " --chat" * config.data.conversations
        display.print_line(f'more text   mjax generate {flags} --prompt "…"')
