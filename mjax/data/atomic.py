"""What keeps a file whole: one process writes it under another name and has it on the disk before it is renamed."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO, TextIO


def lock(stream: BinaryIO, file: Path) -> bool:
    """Make this process the only writer of a temporary file; False where another one is, or has just finished it.

    The lock goes with the process, however that ends, so nobody has to clean up after one that was killed.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some file systems know no locks
    return file.exists() and os.path.samestat(os.fstat(stream.fileno()), file.stat())


def to_disk(stream: BinaryIO | TextIO) -> None:
    """Have what was written to `stream` survive a power failure."""
    stream.flush()
    with contextlib.suppress(OSError):  # some file systems cannot
        os.fsync(stream.fileno())


def write_whole(file: Path, text: str) -> None:
    """Write a text file that is there whole or as it was before, whenever the process ends."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        to_disk(stream)
    temporary.replace(file)
