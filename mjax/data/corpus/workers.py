"""Map a function over batches on all cores, with results in order.

Workers are fresh processes, not copies of this one, which may already have threads and a GPU. Only a few batches wait,
so memory does not grow with the corpus. With one worker everything happens in this process.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
    """A pool of `count` processes, each of which calls `make(*arguments)` once. Use it as a context manager."""

    def __init__(self, count: int, make: Callable[..., Any] | None = None, arguments: tuple = ()):
        self.count, self._starting = count, (make, arguments)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        if self.count > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_start, initargs=self._starting)
        else:
            _make(*self._starting)
        return self

    def __exit__(self, *_) -> None:
        if self._pool:
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
                running.append(self._pool.submit(_call, function, item))
                if len(running) >= WAITING * self.count:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                f"one of {self.count} worker processes was killed, most likely for lack of memory; use fewer --workers"
            ) from None


_made: Any = None  # in this process


def _make(make: Callable[..., Any] | None, arguments: tuple) -> None:
    global _made
    _made = make(*arguments) if make else None


def _call(function: Callable[..., Result], item: Item) -> Result:
    return function(item) if _made is None else function(_made, item)


def _start(*starting: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is answered by the parent alone
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _make(*starting)


def _leave_with_parent() -> None:
    """End this process when its parent ends, even if that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)
