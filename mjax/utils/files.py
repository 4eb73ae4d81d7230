"""Files: names from outside, atomic writes, locks, JSON of bounded size, and the folder of caches.

An atomic write has four steps: write under a temporary name, bring that file to the disk, rename it, and bring the
rename to the disk.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import secrets
import stat
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

from mjax.errors import UsageError

CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}  # the file system has no fsync; nothing went wrong
CANNOT_LOCK = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}  # some mounts of Lustre and NFS

MAX_RUN_NAME = 128  # characters
MAX_NAME_BYTES = 255  # of one path component, on every common file system


def path_below(folder: Path, name: str, what: str = "name") -> Path:
    """Return `folder / name` for a name from outside, such as a key of a store or a name in someone's JSON.

    The last component may be a link, as in the cache of Hugging Face: read through it, but write by renaming.

    Args:
      folder: the only folder below which the path may be.
      name: relative and normalized.
      what: begins the error, such as "weight_map of m/model.safetensors.index.json: name".

    Raises:
      UsageError: the name is not text, empty, absolute, not normalized, has `..` or control characters, has a part
        that is too long, or passes through a link that leads out of `folder`.
    """
    problem = name_problem(name)
    if problem is None:
        inside, parent = os.path.realpath(folder), os.path.realpath((folder / name).parent)
        if os.path.commonpath([inside, parent]) != inside:
            problem = f"leads out of {folder} through a link"
    if problem is not None:
        raise UsageError(f"{what} {_shorten(name)} {problem}; use a relative path such as a/b, without ..")
    return folder / name


def resolve_parents(path: Path) -> Path:
    """`path` without `..`, which the library of checkpoints rejects; relative if it is below the working folder.

    Call it where a path enters. Links before `..` are followed, as the system does; addresses are returned unchanged.
    """
    if ".." not in path.parts or re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        return path
    end = len(path.parts) - path.parts[::-1].index("..")
    resolved = Path(os.path.realpath(Path(*path.parts[:end])), *path.parts[end:])
    return resolved.relative_to(Path.cwd()) if Path.cwd() in resolved.parents else resolved


def is_hub_name(path: Path) -> bool:
    """True for OWNER/NAME as on Hugging Face, if there is no folder OWNER."""
    owner = path.parent.name
    return len(path.parts) == 2 and owner not in ("", "..", "runs", "data") and not path.parent.exists()


def check_run_name(name: str) -> None:
    """Refuse a run name that is not one path component of 1 to 128 characters without control characters.

    Raises:
      UsageError: it is not.
    """
    problem = name_problem(name) or ("has a /" if "/" in name else None)
    if problem is None and len(name) > MAX_RUN_NAME:
        problem = f"has {len(name):,} characters"
    if problem is not None:
        allowed = f"one path component of 1 to {MAX_RUN_NAME} characters without control characters"
        raise UsageError(f"run name {_shorten(name)} {problem}; a name is {allowed}, and --runs gives the folder")


def name_problem(name: Any) -> str | None:
    """The reason why `name` is not a relative, normalized path, as the end of a sentence; None if it is one."""
    if not isinstance(name, str):
        return "is not text"
    if not name:
        return "is empty"
    if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name):  # Cs: lone surrogates
        return "has control characters"
    if name.startswith("/"):
        return "is an absolute path"
    parts = name.split("/")
    if wrong := [part for part in parts if part in ("", ".", "..")]:
        return f"has the part {wrong[0]!r}" if wrong[0] else "has an empty part"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {MAX_NAME_BYTES} bytes"
    return None


def _shorten(name: Any) -> str:
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:60]}…{text[-20:]}"


def open_nofollow(file: Path, mode: str, **options: Any) -> IO:
    """`open` for a name that another user can predict: not through a link in place of `file`.

    Raises:
      UsageError: the file is a link.
    """

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # nor wait for the reader of a pipe

    try:
        return open(file, mode, opener=opener, **options)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UsageError(f"{file} is a link, through which mjax does not write; remove it") from None


def take_lock(stream: IO, print_line: Callable[[str], None]) -> bool:
    """Lock `stream` for this process; False if another process holds the lock.

    The lock ends with the process, however that ends, so it never has to be cleaned up. On a file system without locks
    `print_line` gets one sentence about it, and the result is True.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        folder = Path(stream.name).parent
        print_line(f"{folder} is on a file system without locks ({error.strerror}): start only one process that writes")
    return True


def to_disk(path: Path) -> None:
    """Make a file, or a folder with all its content, survive a power failure.

    Raises:
      OSError: the system could not write it, such as EIO or ENOSPC. A file system without fsync is not an error.
    """
    if path.is_dir():
        for inside in sorted(path.iterdir()):
            if not inside.is_symlink():
                to_disk(inside)
    _sync(path)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder, replacing an existing file, and bring the rename to the disk."""
    os.replace(old, new)
    _sync(new.parent)


def put(temporary: Path, path: Path) -> None:
    """Bring a finished file or folder to the disk, then give it its name: it exists completely or not at all."""
    to_disk(temporary)
    rename(temporary, path)


@contextlib.contextmanager
def open_new(file: Path) -> Iterator[BinaryIO]:
    """Write a file atomically: it has the new content or the old, whenever the block or the process ends.

    The temporary name is random, and a link in place of `file` is replaced: nothing is written through a link.
    """
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            yield stream
        put(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs the space
        raise


def write_whole(file: Path, content: str | bytes) -> None:
    """`open_new` with the whole content; text is written in UTF-8."""
    with open_new(file) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def copy_whole(source: str, target: str) -> None:
    """Copy a file atomically, replacing a link: the `copy_function` of `shutil.copytree`."""
    write_whole(Path(target), Path(source).read_bytes())


def remove_temporary(folder: Path, name: str = "", age: float = 0.0) -> None:
    """Remove temporary files of killed processes (`write_whole`) from `folder`, unless they are another user's.

    Args:
      folder: its temporary files are removed.
      name: remove those of this file alone.
      age: seconds since the last write, at least: where other processes write too, perhaps on other hosts.
    """
    for file in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):  # also if another process has removed it
            is_old = time.time() - file.stat().st_mtime >= age
            if is_old and re.fullmatch((re.escape(name) or ".+") + r"\.[0-9a-f]{8}\.tmp", file.name) and file.is_file():
                file.unlink()


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and bring their names to the disk."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(exist_ok=True)
        _sync(missing.parent)
    folder.mkdir(exist_ok=True)  # raises where it is a file


def make_private(folder: Path) -> str | None:
    """Make a folder that no other user can write to, or check an existing one.

    Returns:
      The reason why `folder` may hold files of another user, and the line to type; None if it cannot.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        return None
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is a link or a file, not a folder; type rm {folder}"
    if status.st_uid not in (0, os.getuid()):
        return f"{folder} belongs to another user (number {status.st_uid}); ask them to remove it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write into {folder}; type chmod go-w {folder} if it is yours"
    return None


def lock_folder(folder: Path, output: str) -> TextIO:
    """Make the working folder of an output, or check an existing one, and lock it for this process.

    Returns:
      The plan.json of the folder; closing it ends the lock.

    Raises:
      UsageError: the folder may hold files of another user, or another process has the lock.
    """
    if problem := make_private(folder):
        raise UsageError(f"{problem}, or choose another name than {output}")
    file = folder / "plan.json"
    stream = file.open("a+")
    is_locked = take_lock(stream, print) and file.exists()  # another process may have finished and removed it
    if not is_locked or not os.path.samestat(os.fstat(stream.fileno()), file.stat()):
        stream.close()
        raise UsageError(f"another process is writing {output}; wait for it, or choose another name")
    return stream


def remove(file: Path) -> None:
    """Remove a file if it exists, and bring the removal to the disk."""
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
        _sync(file.parent)


def set_aside(path: Path, word: str = "damaged") -> Path:
    """Rename an unusable file or folder that must not be lost, such as `60` to `60.damaged`; returns the new name."""
    aside = free_name(path, word)
    rename(path, aside)
    return aside


def free_name(path: Path, word: str) -> Path:
    """`PLACE.WORD`, or `PLACE.WORD.2` and so on if that exists."""
    numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.{word}{number}") for number in numbers)
    return next(name for name in names if not os.path.lexists(name))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


MAX_JSON_BYTES = 2**26  # bytes; the largest tokenizer.json of a published model has half of that
DEEPEST = 64  # nesting depth of objects and lists


def read_json(file: Path, fix: str, missing: str | None = None) -> Any:
    """The value in a JSON file.

    Args:
      file: in UTF-8.
      fix: ends the sentence about a damaged file: the remedy.
      missing: ends the sentence about a missing file.

    Raises:
      UsageError: the file is missing, unreadable, too large or not JSON.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist; {missing or fix}") from None
    except (OSError, ValueError) as error:  # a folder, or an invalid name
        raise UsageError(f"{file} cannot be read ({getattr(error, 'strerror', error)}); {fix}") from None
    if len(content) > MAX_JSON_BYTES:
        raise UsageError(f"{file} has more than {MAX_JSON_BYTES:,} bytes, which is too large; {fix}")
    return parse_json(content, str(file), fix)


def parse_json(content: bytes | str, source: str, fix: str) -> Any:
    """The value of `content` as JSON; `source` and `fix` begin and end the sentence if it is not JSON.

    Raises:
      UsageError: it is empty, not JSON in UTF-8, or is nested too deeply.
    """
    if not content.strip():
        raise UsageError(f"{source} is empty; {fix}")
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
        if _is_deep(value):
            raise RecursionError
        return value
    except RecursionError:
        problem = "too many objects and lists are nested"
    except ValueError as error:  # also invalid UTF-8, and numbers of thousands of digits
        problem = str(error)
    raise UsageError(f"{source} is not JSON ({problem}); {fix}")


def _is_deep(value: Any, levels: int = DEEPEST) -> bool:
    """True if `value` is nested deeper than `levels`: its `repr` would fail later."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    inner = (part for part in parts if isinstance(part, dict | list))
    return bool(parts) if levels == 1 else any(_is_deep(part, levels - 1) for part in inner)


def cache_home() -> Path | None:
    """Folder of everything that mjax can make again: mjax in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if home.startswith("~") else Path(home) / "mjax"  # a user may have no home
