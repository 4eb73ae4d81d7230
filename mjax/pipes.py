"""`mjax plan | head`: end quietly when the reader of the output has had enough."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNREAD = 141
"""Exit code of a command whose reader is gone: 128 + SIGPIPE, as shells report it of `yes | head`."""


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout after the block, so that a reader who is gone is found by `main` and not while Python ends.

    After an error nothing is flushed: the error is what has to be told.
    """
    try:
        yield
    except SystemExit:  # tyro's --help
        _flush()
        raise
    _flush()


def output_is_unread() -> bool:
    """True where nobody reads stdout or stderr any more. They are then closed off, so that Python does not complain at
    its end."""
    broken = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_broken(stream)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in broken:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return bool(broken)


def _flush() -> None:
    if sys.stdout is not None:  # it is where a shell has closed it: mjax plan >&-
        sys.stdout.flush()


def _is_broken(stream) -> bool:
    """True where `stream` writes into a pipe or socket that has no reader."""
    try:
        file = stream.fileno()
    except (OSError, ValueError):  # a stream of Python's own, or a closed one
        return False
    poll = select.poll()
    poll.register(file, 0)  # errors are reported unasked
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
