"""How a run is told to stop: it ends its step, saves and goes."""

from __future__ import annotations

import contextlib
import os
import signal

import jax


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into a request to stop after the step; a second Ctrl-C stops at once.

    Several processes have to agree on the step, so there SIGTERM is JAX's (`processes.told_to_stop`) and Ctrl-C
    stops at once.

    Attributes:
      name: of what asked for it; "" as long as nothing has.
    """

    def __init__(self):
        self.name = ""
        self._before: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to end after this step."""
        return bool(self.name)

    def __enter__(self) -> StopSignal:
        if jax.process_count() > 1:
            return self
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        # Written directly: a handler may run while the console is in the middle of a line.
        os.write(2, f"\n{self.name}: saving after this step; Ctrl-C once more stops at once\n".encode())
