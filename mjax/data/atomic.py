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
    """Make this process the only one to hold `stream`; False where another holds it.

    The lock goes with the process, however that ends, so nobody has to clean up after one that was killed. On a file
    system without locks `say` is told so in one sentence, and the answer is True.
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
    """`take_lock` on a temporary file; False also where another process has just finished it."""
    return take_lock(stream, say) and file.exists() and os.path.samestat(os.fstat(stream.fileno()), file.stat())


def to_disk(place: Path) -> None:
    """Have a file, or a folder with all in it, survive a power failure.

    Raises:
      OSError: the system could not write it, such as EIO or ENOSPC. A file system that knows no fsync is none.
    """
    if place.is_dir():
        for inside in sorted(place.iterdir()):
            if not inside.is_symlink():
                to_disk(inside)
    _sync(place)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, replacing a file that is there, and bring the rename to the disk."""
    os.replace(old, new)
    _sync(new.parent)


def put(temporary: Path, place: Path) -> None:
    """Give a finished file or folder its name once all of it is on the disk: it is there whole or not at all."""
    to_disk(temporary)
    rename(temporary, place)


def write_whole(file: Path, text: str) -> None:
    """Write a text file that is there whole or as it was before, whenever the process ends."""
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
    """Remove a file if it is there, and bring that to the disk before what follows."""
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
        _sync(file.parent)


def set_aside(place: Path, word: str = "damaged") -> Path:
    """Rename what is not to be used but not to be lost either, such as `60` to `60.damaged`; returns the new name."""
    aside = free_name(place, word)
    rename(place, aside)
    return aside


def free_name(place: Path, word: str) -> Path:
    """`PLACE.WORD`, or `PLACE.WORD.2` and so on where that is taken."""
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
