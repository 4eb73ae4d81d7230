"""The training loop: everything that happens between a config and a trained model.

    data → devices → program → state (new, or from a checkpoint) → for each step: batch → train_step → callbacks

The host stays one step ahead of the devices: the metrics of a step are fetched while the next one runs.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import lock_folder
from mjax.checkpoint.mirror import Mirror
from mjax.cluster.launch import COMPILING, STEP, Distributed
from mjax.cluster.processes import StopSignal, broadcast_int, is_first, stop_agreed
from mjax.cluster.watchdog import Watchdog
from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.config.checks import check_devices
from mjax.data.batches import Batches, label_entropy, prefetch
from mjax.data.sources import TrainingData, open_data
from mjax.errors import PrintLine
from mjax.parallel.mesh import make_mesh
from mjax.planner.layer import model_flops, peak_tflops
from mjax.run.agreement import check_agreement, check_shared, collect_facts
from mjax.run.callbacks import Callback, Goodput
from mjax.run.continuing import Origin
from mjax.run.display import Display, announce_results, announce_start, format_losses
from mjax.run.health import Guard, HealthMonitor, check_start, continue_from, not_finite
from mjax.run.metrics import MetricsLog, Record, finite_or_none
from mjax.run.start import first_state, restore_state, write_folder, write_origin
from mjax.step.layout import TrainState, with_kernel
from mjax.step.losses import StepMetrics, weighted_mean
from mjax.step.step import TrainProgram, build_program
from mjax.utils.progress import status
from mjax.utils.stores import find_address

PREEMPTED = 75  # exit code: saved, run the same command again
MIN_SLOW_SAMPLES = 2_000_000  # whose order takes seconds


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
      stopped: whether a stop was requested, possibly in the last step, which is then not evaluated.
    """

    exit_code: int
    step: int
    state: TrainState = field(repr=False)
    validation_loss: float | None
    validation_metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False


def train(config: Config, folder: Path, options: Options | None = None) -> Result:
    """Train `config` in the run folder `folder`, continuing from its newest checkpoint if it has one.

    Args:
      config: validated.
      folder: runs/NAME; created if it does not exist.
      options: of the caller.

    Raises:
      UsageError: data, devices or an existing run do not fit the config; nothing was changed.
      RunError: the run cannot continue; its checkpoints are intact.
      UnhealthyError: too many of its steps were unhealthy, now or when it last ended.
    """
    options, goodput = options or Options(), Goodput()

    # --- Data and devices: both are checked before the order of samples is drawn, which may take minutes --------------
    data = options.data or open_data(config, partial(_check_before_drawing, config, options.name))
    check_devices(config, jax.device_count(), options.name)

    # --- Kernels and loops for these devices --------------------------------------------------------------------------
    display = Display(config.train.steps, shown=is_first() and options.show, metrics=config.model.metrics)
    with status("choosing kernels", display.console):
        resolved = with_kernel(config)
    mesh = make_mesh(config.mesh)

    # --- Processes: all of them run this program on this data ---------------------------------------------------------
    watchdog = options.watchdog or Watchdog(Distributed())
    if watchdog.count > 1:
        check_agreement(watchdog, collect_facts(resolved, data, options.origin))
        check_shared(watchdog, folder)
    check_start(folder, options.step)

    # --- Program and state --------------------------------------------------------------------------------------------
    program = build_program(resolved, mesh, optimizer=options.optimizer, loss=options.loss)
    watchdog.print_line = display.print_line
    with _open_checkpoints(config, folder, display.print_line) as checkpoints:
        if (step := broadcast_int(-1 if options.step is None else options.step)) >= 0:
            continue_from(checkpoints, step, display.print_line)
        if checkpoints.steps() in ([], [0]):  # 0: converted
            checkpoints.try_save(mesh)
        with status("compiling and filling the state", display.console):
            start, state, origin, base = first_state(checkpoints, program, options.origin, display.print_line)
        announce_start(display, resolved, data, folder, start)
        if start >= config.train.steps:
            display.print_line(f"all {start} steps are done; raise train.steps to continue")
            return Result(0, start, state, None)
        log = None
        if is_first():
            data.training.batch_at(start)  # data that do not fit are rejected before the folder records them
            write_folder(config, resolved, data, folder, display.print_line)
            if start == 0:
                write_origin(folder, origin, base, data, display.print_line)
            log = MetricsLog(folder, start, config.log, display.print_line, config.model.metrics)
            goodput.begin(folder, start, display.print_line)

        # --- Steps ----------------------------------------------------------------------------------------------------
        guard = Guard(resolved, checkpoints, display.print_line, step if step >= 0 else None)
        run = Run(resolved, mesh, program, checkpoints, data, display, watchdog, guard, log, options)
        run.set_callbacks(goodput, None if data.validation is None else Evaluate(data.validation))
        result = run.take_steps(state, start)
        del state
        if result.exit_code == 0:
            announce_results(display, result, folder, config)
    if find_address(folder) is not None:
        watchdog.decide_on_first(None, lambda _: None)  # process 0 has copied the run to its store
    return result


def _check_before_drawing(config: Config, name: str, samples: int) -> None:
    """Check the devices before the order of samples is drawn, and announce it if it takes long."""
    check_devices(config, jax.device_count(), name)
    if samples > MIN_SLOW_SAMPLES and is_first():
        print(f"drawing the order of {samples:,} samples", flush=True)


@contextlib.contextmanager
def _open_checkpoints(config: Config, folder: Path, print_line: PrintLine) -> Iterator[Checkpoints]:
    """The checkpoints of a run. Its folder is locked meanwhile and, if it has an address, uploaded."""
    with contextlib.ExitStack() as stack:
        mirror = None
        if is_first():
            stack.enter_context(lock_folder(folder, print_line))
            if (address := find_address(folder)) is not None:
                mirror = stack.enter_context(Mirror(folder, address, print_line))
        retention = config.checkpoint.keep_last, config.checkpoint.keep_every
        yield stack.enter_context(Checkpoints(folder / "checkpoints", *retention, print_line, mirror))


@dataclass(eq=False)
class Run:
    """The steps of one run.

    Attributes:
      config, mesh, program: of the run, with the attention kernel in use.
      folder: of the run.
      data: training and validation batches, and the tokenizer's folder.
      checkpoints: in the folder.
      callbacks: in the order in which they are called.
      step: the last step that was started.
      state: the state after `step`.
      ends: True if no step follows `step`, so that it is saved.
    """

    config: Config
    mesh: Mesh
    program: TrainProgram
    checkpoints: Checkpoints
    data: TrainingData
    display: Display
    watchdog: Watchdog
    guard: Guard
    log: MetricsLog | None = None
    options: Options = field(default_factory=Options)
    callbacks: Sequence[Callback] = ()
    step: int = 0
    state: TrainState | None = None
    ends: bool = False
    saves: bool = False  # a callback has requested a checkpoint
    validation: tuple[float | None, dict[str, float]] = (None, {})  # the last loss and other metrics
    blocked: float | None = None  # seconds that the save before the next record took of the loop
    steps_before: int = 0  # of other runs in this process: processes agree to stop by a number that must only grow
    size: int = 0  # of the batch
    programs: dict[int, TrainProgram] = field(default_factory=dict)  # by batch size, added when first needed

    def __post_init__(self):
        self.folder, self.sizes = self.checkpoints.folder.parent, BatchSizes.from_config(self.config)
        self.peak = peak_tflops(jax.devices()[0].device_kind, self.config.precision.compute)

    def set_callbacks(self, *first: Callback | None) -> None:
        """Set the callbacks: one of `first` evaluates, the others check the health, show, log, and save the state."""
        rest = HealthMonitor(self.guard), self.display, *self.options.callbacks, self.log, self.guard
        self.callbacks = [callback for callback in (*first, *rest) if callback is not None]

    # --- For callbacks ------------------------------------------------------------------------------------------------

    def print_line(self, line: str) -> None:
        """Print a line, in process 0."""
        self.display.print_line(line)

    def stop(self, reason: str = "a callback") -> None:
        """End the run after the steps in flight, which are saved. With several processes, all must do so."""
        self.signal.name = self.signal.name or reason

    def save(self) -> None:
        """Save a checkpoint after this step if it waits, else after the next, unless the run is unhealthy."""
        self.saves = True

    def begin_activity(self, step: int, activity: str = STEP) -> None:
        """Record in the watchdog and in all callbacks that the run begins an activity, such as 'evaluating'."""
        self.watchdog.record_step(step, activity)
        for callback in self.callbacks:
            callback.on_activity(self, step, activity)

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the next one."""
        self._clock = time.perf_counter()

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step. The model is traced for them, which takes half a second."""
        return model_flops(self.config)

    # --- The loop -----------------------------------------------------------------------------------------------------

    def take_steps(self, state: TrainState, start: int) -> Result:
        """Take the steps after `start`, until all are done or the run is stopped.

        Raises:
          UnhealthyError: too many of them were unhealthy.
          RunError: two saves in a row failed, or the last one.
        """
        self.state, self.step, last = state, start, self.config.train.steps
        del state  # it is donated, and a rollback needs its memory
        with self.watchdog.abort_on_error(), contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback.close)
            with StopSignal() as self.signal:
                self._take_steps()
                while self.guard.spike is not None and self._roll_back():
                    self._take_steps()
                # Here a second SIGTERM cannot end the process before the save is committed.
                self.checkpoints.wait_until_finished()
            spiked, done = self.guard.spike is not None, self.step == last
            if spiked:
                self.print_line("stopped; run the same command again to continue")
            elif not done:
                event = f"stopped by {self.signal.name} after step {self.step}, which is saved"
                self.print_line(f"{event}; run the same command again to continue")
            self.checkpoints.check_for_errors()
            if done and not spiked:
                for callback in self.callbacks:
                    callback.on_end(self)
        exit_code = 0 if done and not spiked else PREEMPTED
        return Result(exit_code, self.step, self.state, *self.validation, stopped=self.signal.requested)

    def _take_steps(self) -> None:
        """Take steps until the run ends or the loss spikes; metrics are read while the next step runs."""
        for callback in self.callbacks:
            callback.on_start(self)
        self.size, self._pending = 0, None
        steps = range(self.step, self.config.train.steps)
        with contextlib.closing(prefetch(partial(self.to_devices, self.data.training), steps)) as batches:
            self.restart_clock()
            for step, batch in enumerate(batches, start=self.step + 1):
                train_step = self._prepare(step, batch)
                with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
                    self.state, metrics = train_step(self.state, *self.arguments)
                self.step, previous, self._pending = step, self._pending, (step, metrics)
                self.begin_activity(step)
                self._finish(previous)
                self.ends = self._is_stop_requested() or step == self.config.train.steps
                if self.ends or any(callback.needs_state(self, step) for callback in self.callbacks):
                    self._finish_pending()
                if self.ends or self.guard.spike is not None:
                    break
                self.begin_activity(step, "waiting for its batch")

    def _prepare(self, step: int, batch: dict[str, jax.Array]) -> Callable:
        """Return the train step for the batch, which is compiled if its size is new."""
        before, self.size = self.size, self.sizes.size(step - 1)
        if self.size != before:
            self._finish_pending()  # so that its time does not include a compilation
            self._build(step)
        self.arguments = batch, *self._limit(step)
        self.begin_activity(step, STEP if self.size == before else COMPILING)
        return self.programs[self.size].train_step

    def _build(self, step: int) -> None:
        """Add the program for batches of `size`, which `step` is the first to use."""
        new = self.size not in self.programs
        if self.size == self.config.train.global_batch:
            self.programs[self.size] = self.program
        elif new:
            options = {"optimizer": self.options.optimizer, "loss": self.options.loss}
            self.programs[self.size] = build_program(self.config, self.mesh, self.size, **options)
        if len(self.sizes.pieces) > 1:
            self.print_line(f"batch {self.size} from step {step}" + (": compiling" if new else ""))

    def _finish_pending(self) -> None:
        """Wait for the step in flight, if any."""
        pending, self._pending = self._pending, None
        self._finish(pending)
        self.restart_clock()

    def _finish(self, pending: tuple[int, StepMetrics] | None) -> None:
        """Wait for the metrics of a step, and call `on_step` of all callbacks."""
        if pending is not None:
            record = self._record(*pending)
            for callback in self.callbacks:
                callback.on_step(self, record.step, record)

    def _is_stop_requested(self) -> bool:
        """Return True, in every process, if the run has to stop after `step`."""
        if stop_agreed(self.steps_before + self.step):
            self.signal.name = "SIGTERM"
        if self.checkpoints.mirror is not None and self.checkpoints.mirror.taken_by:  # in process 0
            if jax.process_count() > 1:  # they agree on a step
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.signal.name = "the loss of its lock"
        return self.signal.requested

    def _roll_back(self) -> bool:
        """Restore the last good checkpoint; False if a stop was requested: the next start restores it."""
        good = self.guard.go_back()
        if self.signal.requested:
            return False
        self.steps_before += self.step - good
        self.state = self.arguments = None  # free memory for the restored state
        self.step, self.state = restore_state(self.checkpoints, self.program, good, self.print_line)
        return True

    def _limit(self, step: int) -> tuple[jax.Array, ...]:
        """The loss limit of `step` as an argument of the train step, if there is one."""
        limit = self.guard.limit(step)
        if limit is None:
            return ()
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return (jax.make_array_from_callback((), everywhere, lambda _: np.float32(limit)),)

    def to_devices(self, batches: Batches, step: int) -> dict[str, jax.Array]:
        """The batch of `step`; a process reads only the rows of its devices."""
        size = batches.sizes.size(step)
        rows = cache(lambda begin, end: batches.batch_at(step, slice(begin, end)))

        def read_part(index: tuple[slice, ...], name: str) -> np.ndarray:
            return rows(*index[0].indices(size)[:2])[name][:, *index[1:]]

        return {
            name: jax.make_array_from_callback((size, *leaf.shape[1:]), leaf.sharding, partial(read_part, name=name))
            for name, leaf in self.program.abstract_batch.items()
        }

    def _record(self, step: int, metrics: StepMetrics) -> Record:
        """Wait for the metrics of `step` and combine them with its duration."""
        flops = self.flops  # counted once, while the devices work
        metrics = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        blocked, self.blocked = self.blocked, None
        config, size = self.config, self.sizes.size(step - 1)
        sample = config.model.sequences * config.model.sequence  # tokens
        tflops = flops * (size / config.train.global_batch) / seconds / config.mesh.devices / 1e12
        return Record(
            step=step,
            loss=finite_or_none(float(metrics.loss)),
            grad_norm=finite_or_none(float(metrics.grad_norm)),
            learning_rate=float(metrics.learning_rate),
            loss_scale=float(metrics.loss_scale),
            skipped=bool(metrics.skipped),
            tokens=self.sizes.samples_before(step) * sample,
            seconds=seconds,
            tokens_per_second=size * sample / seconds,
            tflops=tflops,
            mfu=tflops / self.peak if self.peak else None,
            nonfinite=not_finite(metrics, self.program.gradient_names),
            labels=None if metrics.labels is None else int(metrics.labels),
            checkpoint_blocked_seconds=blocked,
            metrics={name: finite_or_none(float(value)) for name, value in metrics.metrics.items() if not value.ndim},
            arrays={name: value for name, value in metrics.metrics.items() if value.ndim},
        )


# --- The callback that evaluates; the others are `Guard`, `Display`, `MetricsLog` and `Goodput` -----------------------


class Evaluate(Callback):
    """Measures the validation loss every `train.eval_interval` steps, and after the last one."""

    def __init__(self, validation: Batches):
        self.validation = validation
        self._entropy: float | None = None  # of the labels, the same every time

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True if `step` is evaluated."""
        return step == run.config.train.steps or step % run.config.train.eval_interval == 0

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Add the validation loss to the metrics, unless the run is to stop soon."""
        if not self.needs_state(run, step) or run.signal.requested:
            return
        run.begin_activity(step, "evaluating")
        run.validation = metrics.val_loss, metrics.val_metrics = self.measure(run, step)
        run.print_line(f"step {step}: validation {format_losses(*run.validation, run.config.model.metrics)}")

    def measure(self, run: Run, step: int) -> tuple[float, dict[str, float]]:
        """Return the mean loss over all labels, nats per label, and the other metrics of the model."""
        batches = range(run.config.train.eval_batches)
        sums = []
        for index in batches:
            sums.append(run.program.eval_step(run.state.model, run.to_devices(self.validation, index)))
            jax.block_until_ready(sums[-2:-1])  # one batch ahead: XLA for CPUs hangs with more than 32 in flight
        loss, metrics = weighted_mean(jax.device_get(sums), run.program.abstract_state.model.loss_weights)
        if guesses := [metric.guess for metric in run.config.model.metrics if isinstance(metric.guess, str)]:
            if self._entropy is None:
                self._entropy = label_entropy(map(self.validation.batch_at, batches))
            metrics = metrics | dict.fromkeys(guesses, self._entropy)
        return loss, metrics
