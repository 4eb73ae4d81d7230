"""Records the steps of `--profile` in the run folder, and prints where their time went.

    runs/NAME/profile/steps_10_to_12/
      table.txt              the printed table
      plugins/profile/…      the trace, for xprof, TensorBoard and ui.perfetto.dev
      memory.pprof           arrays in device memory after the last step, for pprof

The run computes the same: the step is the same program, and the host only waits before the first and after the last of
these steps. With several processes, process 0 records its devices.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from mjax.cluster.processes import is_first
from mjax.errors import first_line
from mjax.profiling.trace import PAUSE, WINDOW, Breakdown, read_trace
from mjax.run.callbacks import Callback
from mjax.utils.figures import human_bytes
from mjax.utils.files import make_folder, write_whole

if TYPE_CHECKING:
    from mjax.run.loop import Run
    from mjax.run.metrics import Record


class Recorder(Callback):
    """Profiles some steps of a run, once; its failures are reported, and the run continues.

    Attributes:
      steps: to profile; none once they are recorded.
    """

    def __init__(self, steps: range):
        """Nothing is written before the first of `steps`."""
        self._edges = {steps.start - 1, steps[-1]}
        self.steps = steps if is_first() else range(0)
        self._first: int | None = None  # step, while it records
        self._window, self._pause = ExitStack(), ExitStack()  # annotations in the trace

    def on_start(self, run: Run) -> None:
        """Report that earlier steps are not recorded."""
        self.close()
        self._print_line = run.print_line
        if self.steps and run.step >= self.steps.start:
            run.print_line(f"note: the run continues after step {run.step}, and --profile records later steps only")

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True before the first step to profile, and after the last: no step may be in flight."""
        return step in self._edges

    def on_activity(self, run: Run, step: int, activity: str) -> None:
        """Start to record; leave evaluations and saves out of the table."""
        self._pause.close()
        if self._first is not None and activity in ("evaluating", "saving"):
            self._pause.enter_context(TraceAnnotation(PAUSE))
        elif self._first is None and step in self.steps and run.step < step:
            self._begin(run, step)

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Report after the last step."""
        if self._first is not None and run.step == step and (run.ends or step == self.steps[-1]):
            with self._report_failures():
                self._report(self._stop(), step, run.folder)

    def close(self) -> None:
        """Stop the profiler, however the steps end."""
        if self._first is not None:
            self._print_line(f"the profile that began with step {self._first} is incomplete and was removed")
            with self._report_failures():
                self._stop()
                shutil.rmtree(self._folder)

    def _begin(self, run: Run, step: int) -> None:
        with self._report_failures():
            arguments = run.state, *run.arguments
            self._compiled = run.programs[run.size].train_step.lower(*arguments).compile()  # shared with the step
            self._folder = run.folder / "profile" / f"steps_{step}_to_{self.steps[-1]}"
            if self._folder.exists():
                shutil.rmtree(self._folder)
            make_folder(self._folder)
            options = ProfileOptions()
            options.python_tracer_level = 0  # recording a Python call is slower than the call
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True, profiler_options=options)
            self._first = step
            self._window.enter_context(TraceAnnotation(WINDOW))
            run.restart_clock()
            return
        self.steps = range(0)

    def _stop(self) -> int:
        """Stop recording; returns the first step."""
        first, self._first, self.steps = self._first, None, range(0)
        self._pause.close()
        self._window.close()
        jax.profiler.stop_trace()
        return first

    def _report(self, first: int, last: int, run: Path) -> None:
        jax.profiler.save_device_memory_profile(str(self._folder / "memory.pprof"))
        (trace,) = self._folder.rglob("*.xplane.pb")
        step = Breakdown(*read_trace(ProfileData.from_file(str(trace)), self._compiled.as_text()), last - first + 1)
        devices = f"{step.devices} device{'s' * (step.devices > 1)} of process 0"
        memory = self._compiled.memory_analysis()
        state = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        lines = [
            f"profile     steps {first} to {last} on {devices}: {step.milliseconds:,.2f} ms per step",
            "",
            *step.lines(),
            "",
            f"memory      {human_bytes(state)} state and batch, {human_bytes(memory.temp_size_in_bytes)} temporaries "
            "per device",
        ]
        write_whole(self._folder / "table.txt", "\n".join(lines) + "\n")
        for line in lines:
            self._print_line(line)
        self._print_line(f"trace       tensorboard --logdir {run}, with the package xprof")
        self._print_line(f"            https://ui.perfetto.dev opens {trace.parent / 'perfetto_trace.json.gz'}")
        self._print_line(f"memory      pprof -http=: {self._folder / 'memory.pprof'}")

    @contextlib.contextmanager
    def _report_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a full disk, a profiler in use, a trace in an unknown form
            self._print_line(f"the profile failed ({first_line(error)}): the run continues")
