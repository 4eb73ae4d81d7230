"""Atomic writes: write under a temporary name, bring it to the disk, rename it, and bring the rename to the disk."""

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}  # the file system has no fsync; nothing went wrong
CANNOT_LOCK = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}  # some mounts of Lustre and NFS


def take_lock(stream: BinaryIO, say: Callable[[str], None]) -> bool:
    """Lock `stream` for this process; False if another process holds the lock.

    The lock ends with the process, however that ends, so it never has to be cleaned up. On a file system without locks
    `say` gets one sentence about it, and the result is True.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        folder = Path(stream.name).parent
        say(f"{folder} is on a file system without locks ({error.strerror}): start only one process that writes there")
    return True


def lock(stream: BinaryIO, file: Path, say: Callable[[str], None] = print) -> bool:
    """`take_lock` on a temporary file; False also if another process has just renamed it."""
    return take_lock(stream, say) and file.exists() and os.path.samestat(os.fstat(stream.fileno()), file.stat())


def to_disk(place: Path) -> None:
    """Make a file, or a folder with all its content, survive a power failure.

    Raises:
      OSError: the system could not write it, such as EIO or ENOSPC. A file system without fsync is not an error.
    """
    if place.is_dir():
        for inside in sorted(place.iterdir()):
            if not inside.is_symlink():
                to_disk(inside)
    _sync(place)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, replacing an existing file, and bring the rename to the disk."""
    os.replace(old, new)
    _sync(new.parent)


def put(temporary: Path, place: Path) -> None:
    """Bring a finished file or folder to the disk, then give it its name: it exists completely or not at all."""
    to_disk(temporary)
    rename(temporary, place)


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically: it has the new content or the old, whenever the process ends."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    put(temporary, file)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and bring their names to the disk."""
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(exist_ok=True)
        _sync(missing.parent)
    folder.mkdir(exist_ok=True)  # raises where it is a file


def remove(file: Path) -> None:
    """Remove a file if it exists, and bring the removal to the disk."""
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
        _sync(file.parent)


def set_aside(place: Path, word: str = "damaged") -> Path:
    """Rename an unusable file or folder that must not be lost, such as `60` to `60.damaged`; returns the new name."""
    aside = free_name(place, word)
    rename(place, aside)
    return aside


def free_name(place: Path, word: str) -> Path:
    """`PLACE.WORD`, or `PLACE.WORD.2` and so on if that exists."""
    numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    names = (place.with_name(f"{place.name}.{word}{number}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise OSError(error.errno, error.strerror, str(place)) from error
    finally:
        os.close(descriptor)
