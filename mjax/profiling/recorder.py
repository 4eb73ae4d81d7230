"""Records the steps of `--profile` in the run folder, and prints where their time went.

    runs/NAME/profile/steps_10_to_12/
      table.txt              what was printed
      plugins/profile/…      the profiler's own trace, for xprof, TensorBoard and ui.perfetto.dev
      memory.pprof           arrays in device memory after the last step, for pprof

It changes nothing of what the run computes: the step is the same program, and the host only waits before the first and
after the last of these steps. With several processes process 0 records its own devices.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from mjax.errors import first_line
from mjax.profiling.breakdown import Breakdown
from mjax.profiling.trace import ASIDE, WINDOW, read_trace
from mjax.run.options import Profile
from mjax.utils.figures import human_bytes
from mjax.utils.files import make_folder, write_whole


class Recorder(Profile):
    """Profiles some steps of a run, once.

    Its failures are reported with `say`, and the run continues.

    Attributes:
      steps: to profile; none once they are recorded.
    """

    def __init__(self, steps: range, run: Path):
        """Nothing is written before the first of `steps`; `run` is the run folder."""
        self.steps, self.run = steps, run
        self._first: int | None = None  # step, while it records
        self._window, self._aside = ExitStack(), ExitStack()  # annotations in the trace

    def starts(self, after: int) -> None:
        """Report steps that the run has taken already."""
        if after >= self.steps.start:
            self.say(f"note: the run continues after step {after}, and --profile records later steps only")

    def begins(self, step: int) -> bool:
        """Return True if `step` is the first one to profile."""
        return self._first is None and step in self.steps

    def begin(self, step: int, train_step: Callable, arguments: tuple) -> None:
        """Start to record."""
        with self._reported():
            self._compiled = train_step.lower(*arguments).compile()  # shared with the call that follows
            self._folder = self.run / "profile" / f"steps_{step}_to_{self.steps[-1]}"
            if self._folder.exists():
                shutil.rmtree(self._folder)
            make_folder(self._folder)
            options = ProfileOptions()
            options.python_tracer_level = 0  # a call of Python's takes longer to record than to run
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True, profiler_options=options)
            self._first = step
            self._window.enter_context(TraceAnnotation(WINDOW))
            return
        self.steps = range(0)

    def ends(self, step: int) -> bool:
        """Return True if `step` is the last one to profile."""
        return self._first is not None and step == self.steps[-1]

    def pause(self, step: int, last: bool) -> None:
        """Leave out of the table what follows until `resume`; report if `step` is the last to profile, or of all."""
        if self._first is not None and not (last or self.ends(step)):
            self._aside.enter_context(TraceAnnotation(ASIDE))
        elif self._first is not None:
            with self._reported():
                self._report(self._stop(), step)

    def resume(self) -> None:
        """Count from here on."""
        self._aside.close()

    @contextlib.contextmanager
    def or_nothing(self) -> Iterator[None]:
        """A context that leaves nothing recording, however the steps in it end."""
        try:
            yield
        finally:
            if self._first is not None:
                self.say(f"the profile that began with step {self._first} is abandoned")
                with self._reported():
                    self._stop()
                    shutil.rmtree(self._folder)

    def _stop(self) -> int:
        """Stop recording; returns the first step."""
        first, self._first, self.steps = self._first, None, range(0)
        self._aside.close()
        self._window.close()
        jax.profiler.stop_trace()
        return first

    def _report(self, first: int, last: int) -> None:
        jax.profiler.save_device_memory_profile(str(self._folder / "memory.pprof"))
        (trace,) = self._folder.rglob("*.xplane.pb")
        step = Breakdown(*read_trace(ProfileData.from_file(str(trace)), self._compiled.as_text()), last - first + 1)
        devices = f"{step.devices} device{'s' * (step.devices > 1)} of process 0"
        memory = self._compiled.memory_analysis()
        state = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        lines = [
            f"profile     steps {first} to {last} on {devices}: {step.milliseconds:,.2f} ms a step",
            "",
            *step.lines(),
            "",
            f"memory      {human_bytes(state)} state and batch, {human_bytes(memory.temp_size_in_bytes)} temporaries "
            "of a device during a step",
        ]
        write_whole(self._folder / "table.txt", "\n".join(lines) + "\n")
        for line in lines:
            self.say(line)
        self.say(f"trace       tensorboard --logdir {self.run}, with the package xprof")
        self.say(f"            https://ui.perfetto.dev opens {trace.parent / 'perfetto_trace.json.gz'}")
        self.say(f"memory      pprof -http=: {self._folder / 'memory.pprof'}")

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a full disk, a profiler in use, a trace in an unknown form
            reason = first_line(error)
            self.say(f"the profile failed ({reason}): the run continues")
