"""Map a function over batches on all cores, with results in order.

Workers are fresh processes, not copies of this one, which may already have threads and a GPU. Only a few batches wait,
so memory does not grow with the corpus. When the work is interrupted they are killed, whatever they do: what a task has
not finished is done again anyway.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from mjax.errors import RunError

Item, Result = TypeVar("Item"), TypeVar("Result")

WAITING = 2  # batches per worker: one in work, one ready
WORTH_A_WORKER = 2**22  # bytes of input; less is done before another process has started


def all_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def useful_workers(asked: int | None, size: int) -> int:
    """`asked` workers, or by default all cores, but fewer for little input (`size` bytes)."""
    return max(1, min(all_cores(), size // WORTH_A_WORKER)) if asked is None else asked


class Workers:
    """A pool of `count` processes, each of which calls `make(*arguments)` once; of 0, this process does the work.

    Use it as a context manager: an exception kills the processes.
    """

    def __init__(self, count: int, make: Callable[..., Any] | None = None, arguments: tuple = ()):
        self.count, self._starting = count, (make, arguments)
        self._pool: ProcessPoolExecutor | None = None
        self._others: list[multiprocessing.Process] = []

    def __enter__(self) -> "Workers":
        self._others = multiprocessing.active_children()
        if self.count:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_start, initargs=self._starting)
        else:
            _make(*self._starting)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self._pool:
            for process in multiprocessing.active_children() if kind else ():
                if process not in self._others:
                    process.kill()
            self._pool.shutdown(cancel_futures=True)
        _make(None, ())

    def map(self, function: Callable[..., Result], items: Iterable[Item]) -> Iterator[Result]:
        """`function(item)` of each item, in order, or `function(made, item)` with the process's result of `make`.

        Items are drawn as workers become free.

        Raises:
          RunError: a worker was killed. Exceptions of the function are raised here too.
        """
        if self._pool is None:
            yield from map(partial(_call, function), items)
            return
        running = deque()
        try:
            for item in items:
                running.append(self._submit(function, item))
                if len(running) >= WAITING * self.count:
                    yield _wait_for(running.popleft())
            while running:
                yield _wait_for(running.popleft())
        except BrokenProcessPool:
            which, fix = "the worker process", "more --tasks"
            if self.count > 1:
                which, fix = f"one of {self.count} worker processes", "fewer --workers"
            raise RunError(f"{which} was killed, most likely for lack of memory; use {fix}") from None

    def _submit(self, function: Callable[..., Result], item: Item) -> "Future[Result]":
        """Submit a call. Processes start here, with Ctrl-C blocked: it is answered by this process alone."""
        with INTERRUPTS.delay():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return self._pool.submit(_call, function, item)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for(future: "Future[Result]") -> Result:
    """`future.result()`, which a signal always interrupts: another thread may get it, and this one sleep on."""
    while not wait([future], timeout=0.5).done:
        pass
    return future.result()


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interrupts:
    """`STOPS` raise KeyboardInterrupt in the block, unless they are `delayed`.

    Attributes:
      too_late: if set, they print this instead: the output is complete.
    """

    def __init__(self):
        self.too_late, self.delayed, self._came = "", False, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        self.too_late, self.delayed, self._came = "", False, False
        if threading.current_thread() is threading.main_thread():
            for number in STOPS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._answer)

    def __exit__(self, *_) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _answer(self, *_) -> None:
        self._came = self.delayed
        if self.too_late:
            os.write(2, self.too_late.encode())  # `print` may be what is interrupted
        elif not self.delayed:
            raise KeyboardInterrupt

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Let the block end first."""
        self.delayed = True
        try:
            yield
        finally:
            self.delayed = False
        if self._came:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()


_made: Any = None  # in this process


def _make(make: Callable[..., Any] | None, arguments: tuple) -> None:
    global _made
    _made = make(*arguments) if make else None


def _call(function: Callable[..., Result], item: Item) -> Result:
    return function(item) if _made is None else function(_made, item)


def _start(*starting: Any) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _make(*starting)


def _leave_with_parent() -> None:
    """End this process when its parent ends, even if that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
