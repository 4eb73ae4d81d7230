"""Stopping a run: it finishes the steps in flight, saves and exits, however often it is told to meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal

import jax

ENDS = (signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Turns SIGTERM, the SIGHUP of a closed terminal and Ctrl-C into a request to stop after the steps in flight; a
    second Ctrl-C stops at once. A run started by `nohup` goes on after a SIGHUP.

    Several processes have to agree on the step, so there SIGTERM is handled by JAX (`processes.told_to_stop`), SIGHUP
    becomes one, and Ctrl-C stops at once.

    Leave the context when the save is committed. After a stop request SIGTERM and SIGHUP are ignored from then on:
    launchers send them again, and must see the exit code that says "saved".

    Attributes:
      name: of what requested it; "" if nothing has.
    """

    def __init__(self):
        self.name = ""
        self._before: dict[int, object] = {}
        self._interrupts = 0

    @property
    def requested(self) -> bool:
        """Whether the run is to end after the step dispatched last."""
        return bool(self.name)

    def __enter__(self) -> StopSignal:
        handlers = dict.fromkeys((*ENDS, signal.SIGINT), self._stop)
        if jax.process_count() > 1:
            handlers = {signal.SIGHUP: lambda *_: os.kill(os.getpid(), signal.SIGTERM)}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            for number, handler in handlers.items():
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, kind, *_) -> None:
        saved = self.requested and kind is None
        for number, handler in self._before.items():
            if number not in ENDS or not saved:
                signal.signal(number, handler)
        if saved:
            with contextlib.suppress(ValueError):  # not in the main thread
                for number in ENDS:
                    signal.signal(number, signal.SIG_IGN)

    def _stop(self, number: int, frame) -> None:
        again = self.requested
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        self.name = self.name or ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        # The host dispatches a step while the previous one runs, so up to two more steps are printed.
        said = "still saving" if again else f"{self.name}: saving after the steps in flight, two at most"
        left = "once more" if self._interrupts else "twice"
        with contextlib.suppress(OSError):  # stderr may no longer be read
            # Written directly: a handler may run while the console is in the middle of a line.
            os.write(2, f"\n{said}; Ctrl-C {left} stops at once\n".encode())
