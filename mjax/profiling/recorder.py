"""Records the steps of `--profile` in the run folder, and prints where their time went.

    runs/NAME/profile/steps_10_to_12/
      table.txt              what was printed
      perfetto.json.gz       the trace for ui.perfetto.dev, kernels named by the part of the model
      plugins/profile/…      the profiler's own trace, for TensorBoard and xprof
      memory.pprof           arrays in device memory while the last step ran, for pprof

It changes nothing of what the run computes: the step is the same program, and the host only waits before the first and
after the last of these steps. With several processes process 0 records its own devices.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from mjax.profiling.breakdown import break_down, kinds_table, parts_table
from mjax.profiling.kernels import ASIDE, WINDOW, Trace, newest_trace, read_trace
from mjax.run.options import Profile
from mjax.utils.figures import human_bytes
from mjax.utils.files import make_folder, write_whole

FOLDER, MEMORY = "profile", "memory.pprof"


class Recorder(Profile):
    """Profiles some steps of a run, once.

    Its failures are reported with `say`, and the run continues.

    Attributes:
      steps: to profile.
    """

    def __init__(self, steps: range, run: Path):
        """Nothing is written before the first of `steps`; `run` is the run folder."""
        self.steps, self.run = steps, run
        self._first: int | None = None  # step, once it records
        self._window, self._aside = ExitStack(), ExitStack()  # annotations in the trace
        self._done = False

    @property
    def _recording(self) -> bool:
        return self._first is not None and not self._done

    def starts(self, after: int) -> None:
        """Leave out steps that the run has taken already."""
        left = range(max(self.steps.start, after + 1), self.steps.stop)
        if left != self.steps:
            which = f"profiles steps {left[0]} to {left[-1]} only" if left else "profiles nothing"
            self.say(
                f"note: --profile {self.steps.start}:{self.steps.stop} {which}: the run continues after step {after}"
            )
        self.steps = left

    def begins(self, step: int) -> bool:
        """Return True if `step` is the first one to profile."""
        return self._first is None and not self._done and step in self.steps

    def begin(self, step: int, train_step: Callable, arguments: tuple) -> None:
        """Start to record."""
        with self._reported():
            compiled = train_step.lower(*arguments).compile()  # shared with the call that follows
            self._program, self._memory = compiled.as_text(), compiled.memory_analysis()
            self._folder = self.run / FOLDER / f"steps_{self.steps[0]}_to_{self.steps[-1]}"
            if self._folder.exists():
                shutil.rmtree(self._folder)
            make_folder(self._folder)
            options = ProfileOptions()
            options.python_tracer_level = 0  # a call of Python's takes longer to record than to run
            jax.profiler.start_trace(str(self._folder), profiler_options=options)
            self._first = step
            self._window.enter_context(TraceAnnotation(WINDOW))

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A context in which the loop dispatches `step`; the last of them is in flight when memory is looked at."""
        with super().step(step):
            yield
        if self._recording and step == self.steps[-1]:
            self._look_at_memory()

    def ends(self, step: int) -> bool:
        """Return True if `step` is the last one to profile."""
        return self._recording and step == self.steps[-1]

    def pause(self, step: int, last: bool) -> None:
        """Leave out of the table what follows until `resume`; report if `step` is the last to profile, or of all."""
        if not self._recording:
            return
        if not (last or self.ends(step)):
            self._aside.enter_context(TraceAnnotation(ASIDE))
            return
        with self._reported():
            self._stop()
            if not (self._folder / MEMORY).exists():  # the run ends early
                self._look_at_memory()
            self._report(step)

    def resume(self) -> None:
        """Count from here on."""
        self._aside.close()

    @contextlib.contextmanager
    def or_nothing(self) -> Iterator[None]:
        """A context that leaves nothing recording, however the steps in it end."""
        try:
            yield
        finally:
            if self._recording:
                self.say(f"the profile that began with step {self._first} is abandoned")
                with self._reported():
                    self._stop()
                    shutil.rmtree(self._folder)

    def _stop(self) -> None:
        self._done = True
        self._aside.close()
        self._window.close()
        jax.profiler.stop_trace()

    def _look_at_memory(self) -> None:
        with self._reported():
            jax.profiler.save_device_memory_profile(str(self._folder / MEMORY))

    def _report(self, last: int) -> None:
        trace = read_trace(ProfileData.from_file(str(newest_trace(self._folder))), self._program)
        write_perfetto(trace, self._folder / "perfetto.json.gz")
        breakdown = break_down(trace, last - self._first + 1)
        several, count = jax.process_count() > 1, len(breakdown.devices)
        where = f"process 0 of {jax.process_count()}, on {socket.gethostname()}, with " if several else ""
        lines = [
            f"profile     steps {self._first} to {last} on {where}{count} device{'s' * (count > 1)}: "
            f"{breakdown.milliseconds:,.2f} ms a step",
            "",
            *kinds_table(breakdown),
            "",
            *parts_table(breakdown),
            "",
            self._memory_line(),
        ]
        write_whole(self._folder / "table.txt", "\n".join(lines) + "\n")
        lines += [
            f"trace       {self._folder / 'perfetto.json.gz'}, for https://ui.perfetto.dev",
            f"            tensorboard --logdir {self.run}, with the package xprof",
            f"memory      pprof -http=: {self._folder / MEMORY}",
        ]
        for line in lines:
            self.say(line)

    def _memory_line(self) -> str:
        memory = self._memory
        state = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        temporary = memory.temp_size_in_bytes
        parts = f"{human_bytes(state)} state and batch, {human_bytes(temporary)} temporaries"
        line = f"memory      {human_bytes(state + temporary)} of a device during a step: {parts}"
        allocator = jax.local_devices()[0].memory_stats() or {}  # None on a CPU
        if "peak_bytes_in_use" in allocator:
            line += f"; at most {human_bytes(allocator['peak_bytes_in_use'])} in use so far"
        return line

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a full disk, a profiler in use, a trace in an unknown form
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.say(f"the profile failed ({reason}): the run continues")
            if self._first is None:
                self._done = True


# --- The trace as JSON for ui.perfetto.dev ----------------------------------------------------------------------------


def write_perfetto(trace: Trace, file: Path) -> None:
    """Write `trace` to `file`, whose name ends in .json.gz: a process for each device and one for the host, a thread
    for each stream. Kernels are named by the part of the model; the profiler's own trace calls one by its instruction,
    `fusion.12`, and keeps at most a million events."""
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        stream.write(",\n".join(json.dumps(event) for event in _events(trace)))
        stream.write("\n]}\n")


def _events(trace: Trace) -> Iterator[dict]:
    threads = dict.fromkeys([("host", "Python"), *((kernel.device, kernel.line) for kernel in trace.kernels)])
    processes = {process: pid for pid, process in enumerate(dict.fromkeys(process for process, _ in threads))}
    ids = {(process, thread): {"pid": processes[process], "tid": tid} for tid, (process, thread) in enumerate(threads)}
    for process, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
    for (_, thread), numbers in ids.items():
        yield {"ph": "M", "name": "thread_name", **numbers, "args": {"name": thread}}

    def span(name: str, begin: float, end: float) -> dict:
        return {"ph": "X", "name": name, "ts": begin / 1e3, "dur": (end - begin) / 1e3}

    for event in trace.host:
        yield {**span(*event), **ids["host", "Python"]}
    for kernel in trace.kernels:
        title = f"{kernel.part}: {kernel.name}" if kernel.part else kernel.name
        details = {"operation": kernel.source, "instruction": kernel.name}
        event = span(title, kernel.begin, kernel.end)
        yield {**event, **ids[kernel.device, kernel.line], "cat": kernel.kind, "args": details}
