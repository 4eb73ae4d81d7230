"""What the loop asks of a profile of some of its steps; a run without `--profile` has this one, of none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax


class Profile:
    """A profile of no steps. `mjax.profiling.Recorder` has some.

    The loop calls `begin` before the first profiled step, when no step is in flight, and `pause` after the last.

    Attributes:
      say: prints a line; the loop puts its display here.
    """

    say: Callable[[str], None] = print

    def starts(self, after: int) -> None:
        """The run continues after that step, 0 if it is new."""

    def begins(self, step: int) -> bool:
        """Whether `step` is the first one to profile."""
        return False

    def begin(self, step: int, train_step: Callable, arguments: tuple) -> None:
        """Start to record; `train_step` is jitted and about to be called with `arguments`."""

    def step(self, step: int) -> AbstractContextManager:
        """A context in which the loop dispatches `step`; it names the step in any profile, of whatever started it."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def ends(self, step: int) -> bool:
        """Whether `step` is the last one to profile."""
        return False

    def pause(self, step: int, last: bool) -> None:
        """`step` is finished and no other in flight: what follows until `resume` is no part of any step.

        Ends a profile whose last step it is; also one that has more to come, if the run has not (`last`).
        """

    def resume(self) -> None:
        """The next step follows."""

    @contextlib.contextmanager
    def or_nothing(self):
        """A context that leaves nothing recording, however the steps in it end."""
        yield
