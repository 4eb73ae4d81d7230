"""The training loop: everything that happens between a config and a trained model.

    data → devices → program → state (new, or from a checkpoint) → for each step: batch → train_step → record

The host stays one step ahead of the devices: the metrics of a step are fetched while the next one runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import locked
from mjax.checkpoint.mirror import Mirror
from mjax.cluster.launch import COMPILING, STEP, Distributed
from mjax.cluster.processes import from_first, is_first, told_to_stop
from mjax.cluster.watchdog import Watchdog
from mjax.config import Config, axes
from mjax.config.batch_size import BatchSizes
from mjax.config.checks import check_devices
from mjax.data.batches import Batches, label_entropy, prefetch
from mjax.data.sources import open_data
from mjax.models.protocol import Model
from mjax.parallel.mesh import make_mesh
from mjax.planner.layer import model_flops, peak_tflops
from mjax.run.agreement import Replicas, agree, check_shared, facts_of
from mjax.run.display import Display, announce_results, announce_start, losses
from mjax.run.goodput import Goodput
from mjax.run.health import Guard, broken_state, check_start, continue_from, not_finite
from mjax.run.metrics import TRACKERS, MetricsLog, Record, finite_or_none
from mjax.run.options import PREEMPTED, Options, Result, StopSignal
from mjax.run.start import first_state, own_state, restore_state, write_folder, write_origin
from mjax.step.kernels import with_kernel
from mjax.step.losses import StepMetrics, mean_of
from mjax.step.step import TrainProgram, build_program
from mjax.step.train_state import TrainState
from mjax.utils.progress import status
from mjax.utils.stores import address_of

MANY_SAMPLES = 2_000_000  # whose order takes seconds
DAY = 86_400.0


def train(config: Config, folder: Path, options: Options | None = None) -> Result:
    """Train `config` in the run folder `folder`, continuing from its newest checkpoint if it has one.

    Args:
      config: validated.
      folder: runs/NAME; created if it does not exist.
      options: of the caller.

    Raises:
      UsageError: data, devices or an existing run do not fit the config; nothing was changed.
      RunError: the run cannot continue; what was saved is intact.
      UnhealthyError: too many of its steps were unhealthy, now or when it last ended.
    """
    options, goodput = options or Options(), Goodput()

    # --- Data and devices: both are checked before the order of samples is drawn, which may take minutes --------------
    def before_drawing(samples: int) -> None:
        check_devices(config, jax.device_count(), options.name)
        if samples > MANY_SAMPLES and is_first():
            print(f"drawing the order of {samples:,} samples", flush=True)

    data = options.data or open_data(config, before_drawing)
    check_devices(config, jax.device_count(), options.name)

    # --- Kernels and loops for these devices --------------------------------------------------------------------------
    display = Display(config.train.steps, shown=is_first() and options.show, metrics=config.model.metrics)
    with status("choosing kernels", display.console):
        resolved = with_kernel(config)
    mesh = make_mesh(config.mesh)

    # --- Processes: all of them run this program on this data ---------------------------------------------------------
    watchdog = options.watchdog or Watchdog(Distributed())
    if watchdog.count > 1:
        agree(watchdog, facts_of(resolved, data, options.origin))
        check_shared(watchdog, folder)
    check_start(folder, options.step)

    # --- Program and state --------------------------------------------------------------------------------------------
    program = build_program(resolved, mesh, optimizer=options.optimizer, loss=options.loss)
    watchdog.say = options.profile.say = display.say
    address, mirror = address_of(folder), None
    with contextlib.ExitStack() as stack:
        if is_first():
            stack.enter_context(locked(folder, display.say))
            if address is not None:
                mirror = stack.enter_context(Mirror(folder, address, display.say))
        keep_last, keep_every = config.checkpoint.keep_last, config.checkpoint.keep_every
        checkpoints = stack.enter_context(
            Checkpoints(folder / "checkpoints", keep_last, keep_every, display.say, mirror)
        )
        if (step := from_first(-1 if options.step is None else options.step)) >= 0:
            continue_from(checkpoints, step, display.say)
        if checkpoints.steps() in ([], [0]):  # 0: converted
            checkpoints.try_save(mesh)
        with status("compiling and filling the state", display.console):
            start, state, origin, base = first_state(checkpoints, program, options.origin, display.say)
        announce_start(display, resolved, program, data, folder, start)
        if start >= config.train.steps:
            display.say(f"all {start} steps are done; raise --train.steps to continue, or choose another --name")
            return Result(0, start, state, None)
        options.profile.starts(start)
        log = None
        if is_first():
            data.training.at(start)  # data that do not fit are rejected before the folder says that they do
            write_folder(config, resolved, data, folder, display.say)
            if start == 0:
                write_origin(folder, origin, base, data, display.say)
            projects = {package: getattr(config.log, package) for package in TRACKERS}
            log = MetricsLog(folder, start, config.log.tensorboard, projects, display.say, config.model.metrics)
            stack.enter_context(contextlib.closing(log))
            goodput.begin(folder, start, display.say)
            stack.callback(goodput.write)

        # --- Steps ----------------------------------------------------------------------------------------------------
        run = Run(resolved, mesh, program, checkpoints, log, display, watchdog, options)
        run.tokenizer, run.goodput = data.tokenizer, goodput
        run.guard.continued_from = step if step >= 0 else None
        result = run.steps(state, start, data.training, data.validation)
        checkpoints.wait()
        if result.exit_code == 0:
            options.on_end(run, result.state, data)
            announce_results(display, result, folder, config)
    if address is not None:
        watchdog.ask_first(None, lambda _: None)  # process 0 has copied the run to its store
    return result


class Run:
    """The steps of one run and their records."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        program: TrainProgram,
        checkpoints: Checkpoints,
        log: MetricsLog | None,
        display: Display,
        watchdog: Watchdog,
        options: Options | None = None,
    ):
        self.options, self.told_to_end = options or Options(), False
        self.profile = self.options.profile
        self.config, self.mesh, self.program, self.checkpoints = config, mesh, program, checkpoints
        self.log, self.display, self.watchdog = log, display, watchdog
        self.sizes = BatchSizes.of(config)
        self.replicas = Replicas(program.abstract_state.model, mesh)
        self.programs: dict[int, TrainProgram] = {}  # by batch size, added when first needed
        self.peak = peak_tflops(jax.devices()[0].device_kind, config.precision.compute)
        self.clock = 0.0
        self.blocked: float | None = None  # seconds that the save before the next record took of the loop
        self.written = 0  # records
        self.guard = Guard(config, checkpoints, display.say if display else print)
        self.tokenizer: Path | None = None  # its folder
        self.goodput = Goodput()
        self.nonfinite = False  # True if the last finished step had values that are not finite
        self.steps_before = 0  # of other runs in this process: processes agree to stop by a number that must only grow
        self.entropy: float | None = None  # of the labels of an evaluation, the same every time

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step. The model is traced for them, which takes half a second."""
        return model_flops(self.config)

    def steps(self, state: TrainState, start: int, training: Batches, validation: Batches | None) -> Result:
        """Take the steps from `start` on, until all are done or the run is stopped.

        Raises:
          UnhealthyError: too many of them were unhealthy.
        """
        self.guard.begin(start)
        while True:
            result = self._steps(state, start, training, validation)
            if self.guard.spike is None:
                return result
            self.steps_before += result.step
            good = self.guard.go_back()
            if result.stopped:
                self.display.say("stopped; run the same command again to continue")
                return replace(result, exit_code=PREEMPTED)
            del state, result  # free memory for the restored state
            self.steps_before -= good
            self.goodput.go_back(good)
            start, state = restore_state(self.checkpoints, self.program, good, self.display.say)
            self.guard.begin(start)
            if self.log:
                self.log.go_back(start)

    def _steps(self, state: TrainState, start: int, training: Batches, validation: Batches | None) -> Result:
        """Take steps as `steps` does, but return when the loss spikes and the run has to go back (`Guard.spike`)."""
        config, last = self.config, self.config.train.steps
        validation_loss, validation_metrics, done = None, {}, start
        fetch = prefetch(lambda step: self._to_devices(training, step), range(start, last))
        display = self.display.begin(start)
        with (
            self.watchdog.or_end(),
            contextlib.closing(fetch) as batches,
            display,
            self.profile.or_nothing(),
            StopSignal() as stop,
            jax.transfer_guard("disallow"),
        ):
            self.clock = time.perf_counter()
            waiting: tuple[int, StepMetrics] | None = None
            program, size = self.program, None
            for step, batch in enumerate(batches, start=start + 1):
                if size != (due := self.sizes.size(step - 1)):
                    waiting = self._settle(waiting)  # so that its time does not include a compilation
                    self._at(step, COMPILING)
                    size, program = due, self._program_of(due, step)
                else:
                    self._at(step)
                if self.profile.begins(step):
                    waiting = self._settle(waiting)
                arguments = state, batch, *self._limit(step)
                if self.profile.begins(step):
                    self.profile.begin(step, program.train_step, arguments)
                    self.clock = time.perf_counter()
                with self.profile.step(step):
                    state, metrics = program.train_step(*arguments)
                del arguments
                self._at(step)
                self._settle(waiting)  # while the devices work on `step`
                waiting = step, metrics
                if told_to_stop(self.steps_before + step):
                    stop.name = "SIGTERM"
                if self.checkpoints.mirror is not None and self.checkpoints.mirror.lost:  # in process 0
                    if jax.process_count() > 1:  # they agree on a step
                        os.kill(os.getpid(), signal.SIGTERM)
                    else:
                        stop.name = "the loss of its lock"
                if self.told_to_end:
                    stop.name = "a callback"
                ends = step == last or stop.requested
                evaluates = validation is not None and (step == last or step % config.train.eval_interval == 0)
                saves = ends or self.guard.saves(step)
                self._check(step, state, saves)
                if evaluates or saves or self.profile.ends(step):
                    record = self._record(*waiting)
                    self.profile.pause(step, ends)
                    if evaluates and not stop.requested:
                        self._at(step, "evaluating")
                        validation_loss, validation_metrics = self.evaluate(step, state.model, validation)
                        shown = losses(validation_loss, validation_metrics, config.model.metrics)
                        display.say(f"step {step}: validation {shown}")
                        record.val_loss, record.val_metrics = validation_loss, validation_metrics
                        with jax.transfer_guard("allow"):
                            self.options.on_validation(self, state, step)
                    self._write(record)
                    if saves:
                        self._at(step, "saving")
                        begun = time.perf_counter()
                        if self.guard.save(step, own_state(state), ends):
                            self.blocked = time.perf_counter() - begun
                    if self.log:
                        self.log.draw(last=ends)
                    waiting = None
                    self.profile.resume()
                    self.clock = time.perf_counter()
                done = step
                if ends or self.guard.spike is not None:
                    break
                self._at(step, "waiting for its batch")
            self.checkpoints.settle()  # where a second SIGTERM cannot end the process before the save is committed
        if stop.requested and done < last and self.guard.spike is None:
            display.say(
                f"stopped by {stop.name} after step {done}, which is saved; run the same command again to continue"
            )
        exit_code = 0 if done == last else PREEMPTED
        return Result(exit_code, done, state, validation_loss, validation_metrics, bool(stop.requested))

    def _at(self, step: int, doing: str = STEP) -> None:
        """Record that the loop is at `step`, doing that."""
        self.watchdog.at(step, doing)
        self.goodput.at(step, doing)

    def _check(self, step: int, state: TrainState, saves: bool) -> None:
        """Check the state before it is saved, every so many steps, and after a step with values that are not finite.

        Raises:
          UnhealthyError: replicas differ, or weights or moments cannot be right: no step would repair that.
        """
        every = self.config.health.replica_interval
        due = saves or (every and step % every == 0)
        if every and due:
            self.replicas.check(step, state.model)
        if due or self.nonfinite:
            counts = jax.device_get(self.program.broken(state))
            if problem := broken_state(counts, self.program.gradient_names):
                self.give_up(f"after step {step} {problem}")

    def _settle(self, waiting: tuple[int, StepMetrics] | None) -> None:
        """Write the record of the step in `waiting`, if any, once it is finished."""
        if waiting is not None:
            self._write(self._record(*waiting))

    def _program_of(self, size: int, step: int) -> TrainProgram:
        """Return the program for batches of `size`, which `step` is the first to use."""
        new = size not in self.programs
        if size == self.config.train.global_batch:
            self.programs[size] = self.program
        elif new:
            with jax.transfer_guard("allow"):  # building makes a few constants
                options = {"optimizer": self.options.optimizer, "loss": self.options.loss}
                self.programs[size] = build_program(self.config, self.mesh, size, **options)
        if len(self.sizes.pieces) > 1:
            self.display.say(f"batch {size} from step {step}" + (": compiling" if new else ""))
        return self.programs[size]

    def _to_devices(self, batches: Batches, step: int, evaluation: bool = False) -> dict[str, jax.Array]:
        """The batch of `step`; a process reads only the rows and positions of its own devices."""
        size, shardings = batches.sizes.size(step), self.program.batch_shardings
        shapes = {name: (size, *shape) for name, (shape, _) in self.config.batch_arrays(evaluation).items()}
        has_positions = {name for name in shapes if axes.CONTEXT in shardings[name].spec}

        def bounds(index: tuple[slice, ...], name: str, dim: int) -> tuple[int, int]:
            return index[dim].indices(shapes[name][dim])[:2]

        local = [
            (name, index)
            for name, shape in shapes.items()
            for index in shardings[name].addressable_devices_indices_map(shape).values()
        ]
        columns = [bounds(index, name, -1) for name, index in local if name in has_positions]
        first, last = min(columns, default=(0,))[0], max((end for _, end in columns), default=None)
        rows = {bounds(index, name, 0) for name, index in local}
        parts = {part: batches.at(step, slice(*part), slice(first, last)) for part in rows}

        def on_device(index: tuple[slice, ...], name: str) -> np.ndarray:
            array = parts[bounds(index, name, 0)][name]
            if name not in has_positions:
                return array
            begin, end = bounds(index, name, -1)
            return array[..., begin - first : end - first]

        with jax.transfer_guard("allow"):  # the intended transfer
            return {
                name: jax.make_array_from_callback(shape, shardings[name], partial(on_device, name=name))
                for name, shape in shapes.items()
            }

    def evaluate(self, step: int, model: Model, validation: Batches) -> tuple[float, dict[str, float]]:
        """Return the mean loss over all labels of the evaluation, and the other metrics of the model.

        Args:
          step: the step before the evaluation.
          model: master weights.
          validation: as passed to `steps`.
        """
        batches = range(self.config.train.eval_batches)
        sums = [self.program.eval_step(model, self._to_devices(validation, i, evaluation=True)) for i in batches]
        loss, metrics = mean_of(jax.device_get(sums), self.program.abstract_state.model.loss_weights)
        if guesses := [metric.guess for metric in self.config.model.metrics if isinstance(metric.guess, str)]:
            if self.entropy is None:
                self.entropy = label_entropy(map(validation.at, batches))
            metrics = metrics | dict.fromkeys(guesses, self.entropy)
        return loss, metrics

    def _record(self, step: int, metrics: StepMetrics) -> Record:
        """Wait for the metrics of `step` and combine them with its duration."""
        flops = self.flops  # counted once, while the devices work
        metrics = jax.device_get(metrics)
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
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

    def _limit(self, step: int) -> tuple[jax.Array, ...]:
        """The loss limit of `step` as an argument of the train step, if there is one."""
        limit = self.guard.limit(step)
        if limit is None:
            return ()
        with jax.transfer_guard("allow"):
            everywhere = NamedSharding(self.mesh, PartitionSpec())
            return (jax.make_array_from_callback((), everywhere, lambda _: np.float32(limit)),)

    def _write(self, record: Record) -> None:
        record.unhealthy, self.nonfinite = self.guard.observe(record), record.nonfinite is not None
        due = record.step % self.config.log.interval == 0 or record.unhealthy or record.val_loss is not None
        if self.log and due:
            self.log.write(record)
        self.display.show(record)
        self._warn_of_days(record)
        self.told_to_end |= bool(self.options.on_step(record))
        if record.unhealthy:
            self.display.say(f"step {record.step} {record.unhealthy}")
        if problem := self.guard.health.problem(ended=record.step == self.config.train.steps):
            self.give_up(problem)

    def _warn_of_days(self, record: Record) -> None:
        """Say once that a run on CPUs, which few mean to have, takes days."""
        left = self.config.train.steps - record.step
        self.written += 1
        if self.written != 3 or self.peak is not None or left * record.seconds < DAY:  # the first steps compile
            return
        self.display.say(
            f"the remaining {left:,} steps take about {left * record.seconds / DAY:,.0f} days on this machine; "
            f"--train.steps {record.step + max(int(3600 / record.seconds), 1)} ends in an hour, or use a smaller config"
        )

    def give_up(self, problem: str) -> None:
        """End an unhealthy run.

        Raises:
          UnhealthyError: always; it says how to continue.
        """
        self.guard.give_up(problem)
