"""`mjax plan | head`: end quietly when the output is no longer read."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNREAD = 141
"""Exit code of a command whose reader is gone: 128 + SIGPIPE, as in shells for `yes | head`."""


@contextmanager
def flushed_output() -> Iterator[None]:
    """Flush stdout after the block, so that a closed pipe is noticed by `main` and not while Python exits.

    After an error nothing is flushed: the error has to be reported.
    """
    try:
        yield
    except SystemExit:  # tyro's --help
        _flush()
        raise
    _flush()


def output_is_unread() -> bool:
    """True if stdout or stderr is no longer read. They are then closed off, so that Python does not complain at
    exit."""
    broken = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _is_broken(stream)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in broken:
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return bool(broken)


def _flush() -> None:
    if sys.stdout is not None:  # None if a shell has closed it: mjax plan >&-
        sys.stdout.flush()


def _is_broken(stream) -> bool:
    """True if `stream` writes into a pipe or socket without a reader."""
    try:
        file = stream.fileno()
    except (OSError, ValueError):  # not a real file, or a closed one
        return False
    poll = select.poll()
    poll.register(file, 0)  # errors are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
