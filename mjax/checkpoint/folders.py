"""The folder of a run: its lock, its checkpoints, and the manifest of each.

manifest.json detects damage before it becomes other weights. It has the step, dtype and shape of every array, size and
CRC-32 of every file, host values, and a checksum of itself.

A file that cannot be read is not damaged: reading is retried, and a file that stays unreadable is left alone.
"""

import contextlib
import json
import os
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from mjax.config.plain_values import misfit, read
from mjax.errors import OneSentence, PrintLine, UsageError, first_line
from mjax.utils.files import make_folder, open_nofollow, path_below, remove_temporary, take_lock, write_whole
from mjax.utils.stores import is_address, to_absolute

MANIFEST = "manifest.json"
GOOD = "good.json"  # in the folder of the checkpoints: names the last good one
BASE = "base.json"  # in a run with adapters: the run that has the frozen weights (`checkpoint/base.py`)
MADE_BY_ORBAX = "_CHECKPOINT_METADATA"  # also in a checkpoint, even if its manifest is lost
READ_BYTES = 1 << 24
READ_ATTEMPTS = 3  # before a file counts as unreadable
RETRY_INTERVAL = 1.0  # seconds between attempts


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's `checkpoints` folder, ascending, intact or not.

    A user's folder there, such as `2024`, is not one.
    """
    try:
        numbered = [entry for entry in folder.iterdir() if re.fullmatch(r"0|[1-9][0-9]*", entry.name)]
    except (FileNotFoundError, NotADirectoryError):  # process 0 may remove it after its trial save
        return []
    marks = MANIFEST, MADE_BY_ORBAX
    return sorted(int(entry.name) for entry in numbered if any((entry / mark).exists() for mark in marks))


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run folder, including damaged ones, in ascending order."""
    return steps_in(folder / "checkpoints")


def check_run_folder(folder: Path) -> None:
    """Reject a folder in which no checkpoint could be restored.

    Orbax globs the full path of the files it merges: a pattern in it would match nothing, or another run.

    Raises:
      UsageError: it is an address that no run can be at, or has one of * ? [ in its path.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
        raise UsageError(f"{folder} is an address, which only --runs, --run and --init take; give a local folder")
    if wrong := [letter for letter in "*?[" if letter in str(folder.absolute())]:
        problem = f"has {wrong[0]} in its path, where no checkpoint could be restored"
        raise UsageError(f"{folder.absolute()} {problem}; choose a folder and a --name without * ? [")


@contextlib.contextmanager
def lock_folder(folder: Path, print_line: PrintLine) -> Iterator[None]:
    """Lock the run folder for this process; the system releases the lock when the process ends, however it ends.

    On a file system without locks nothing is locked, and `print_line` is called with a notice.

    Raises:
      UsageError: another process trains here, or the lock is a link.
    """
    make_folder(folder)
    with open_nofollow(folder / ".lock", "ab") as file:
        if not take_lock(file, print_line):
            raise UsageError(f"{folder} is in use by another process; wait for it, or choose another folder")
        remove_temporary(folder)
        yield


# --- The base of adapters ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """The contents of base.json.

    Attributes:
      run: absolute path of the run folder.
      step: its checkpoint.
      digest: of the weights (`base.digest_in_blocks`).
    """

    run: str
    step: int
    digest: str


def read_base(run: Path) -> Base:
    """The base of a run with adapters.

    Raises:
      UsageError: the run has no base.json, or the file is damaged.
    """
    missing = "a run with adapters has it; start one with --init RUN"
    return read(Base, run / BASE, "restore it", missing)


def find_adapters_of(run: Path, candidates: Iterable[Path]) -> dict[Path, Base]:
    """The runs among `candidates` with adapters of the weights of `run`, and their bases.

    Raises:
      UsageError: the file of one is damaged.
    """

    def is_base(path: str) -> bool:
        moved = Path(path).name == run.resolve().name and not is_address(path) and not Path(path).exists()
        return moved or path == to_absolute(run)

    bases = {folder: read_base(folder) for folder in sorted(candidates) if (folder / BASE).is_file()}
    return {folder: base for folder, base in bases.items() if is_base(base.run)}


def save_base(run: Path, base: Base) -> None:
    """Write base.json."""
    write_whole(run / BASE, json.dumps(asdict(base), indent=2) + "\n")


# --- Manifests --------------------------------------------------------------------------------------------------------


class Manifest(TypedDict):
    """Contents of every manifest: dtype and shape of each array, size and CRC-32 of each file."""

    step: int
    arrays: dict[str, tuple[str, list[int]]]
    files: dict[str, tuple[int, int]]


class Good(TypedDict):
    """The contents of good.json."""

    step: int


class Unusable(OneSentence):
    """The problem of a checkpoint, as half a sentence.

    Attributes:
      label: names the kind of problem, and the folder when it is set aside.
    """

    label = "unusable"


class Damaged(Unusable):
    """The content differs from the written one, or a part of it is missing."""

    label = "damaged"


class Unreadable(Unusable):
    """The system could not read it; the content may be intact."""

    label = "unreadable"


class Misnamed(Unusable):
    """It is the checkpoint of another step."""

    label = "misnamed"


def write_manifest(folder: Path, step: int, arrays: dict[str, list], host: dict[str, Any] | None = None) -> int:
    """Write the manifest of Orbax's files at `step`, with the checksums of the files, and return their size.

    Args:
      folder: of the checkpoint.
      step: of the checkpoint.
      arrays: dtype and shape by name.
      host: plain values to store.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    with ThreadPoolExecutor() as readers:
        checksums = readers.map(_checksum, files)
        described = {
            file.relative_to(folder).as_posix(): [file.stat().st_size, checksum]
            for file, checksum in zip(files, checksums, strict=True)
        }
    content = {"step": step, "arrays": arrays, "files": described} | ({} if host is None else {"host": host})
    (folder / MANIFEST).write_text(json.dumps({"checksum": _checksum_json(content), **content}, indent=1))
    return sum(size for size, _ in described.values())


def read_manifest(folder: Path, print_line: PrintLine = print) -> dict[str, Any]:
    """The manifest of the checkpoint in `folder`, which is named by its step.

    Returns:
      'step', 'arrays' {name: [dtype, shape]}, 'files' {path: [bytes, CRC-32]} and, for a training
      run, 'host' {name: plain value}.

    Raises:
      Damaged: it is missing, differs from the written one, or names files elsewhere.
      Unreadable: the system could not read it, `READ_ATTEMPTS` times; `print_line` reports each attempt.
      Misnamed: it has another step.
    """
    content = _read_with_retries(folder, MANIFEST, Path.read_bytes, print_line)
    try:
        manifest = json.loads(content)
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):  # not JSON, or changed
        checksum, manifest = None, None
    if checksum != _checksum_json(manifest) or misfit(manifest, Manifest):
        raise Damaged(f"{MANIFEST} is not what was written")
    try:
        for name in manifest["files"]:
            path_below(folder, name, "file")
    except UsageError as error:
        raise Damaged(f"{MANIFEST} has names of no checkpoint: {error}") from None
    if folder.name.isdecimal() and manifest["step"] != int(folder.name):
        renamed = folder.with_name(str(manifest["step"]))
        command = shlex.join(["mv", str(folder), str(renamed)])
        raise Misnamed(f"{MANIFEST} belongs to checkpoint {renamed.name}; type: {command}")
    return manifest


def select_files(files: Iterable[str], field: str | None) -> list[str]:
    """The files of a checkpoint that `field` of its state needs; None: all fields."""
    return [name for name in files if field is None or name.split("/")[0] == field or "/" not in name]


def check_files(folder: Path, files: dict[str, list], field: str | None, print_line: PrintLine = print) -> None:
    """Compare size and checksum of each file, or of those that `field` needs, with the manifest's.

    Raises:
      Damaged: one is missing, of another size, or of another content.
      Unreadable: the system could not read one, `READ_ATTEMPTS` times; `print_line` reports each attempt.
    """
    needed = {name: files[name] for name in select_files(files, field)}
    for name, (size, _) in needed.items():
        actual = _read_with_retries(folder, name, Path.stat, print_line).st_size
        if actual != size:
            raise Damaged(f"{name} has {actual} bytes of {size}")
    with ThreadPoolExecutor() as readers:
        checksums = readers.map(lambda name: _read_with_retries(folder, name, _checksum, print_line), needed)
        for (name, (_, checksum)), actual in zip(needed.items(), checksums, strict=True):
            if actual != checksum:
                raise Damaged(f"{name} is not what was written (checksum)")


def _read_with_retries(folder: Path, name: str, read: Callable[[Path], Any], print_line: PrintLine) -> Any:
    """`read` of a file, retried if the system cannot read it: a network file system may fail once."""
    for attempt in range(1, READ_ATTEMPTS + 1):
        try:
            return read(folder / name)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing, so it was not finished or not copied completely") from None
        except OSError as error:
            print_line(f"reading {folder / name} failed, attempt {attempt} of {READ_ATTEMPTS}: {reason(error)}")
            if attempt == READ_ATTEMPTS:
                raise Unreadable(f"{name} cannot be read: {reason(error)}") from error
            time.sleep(RETRY_INTERVAL)


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _checksum_json(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def reason(error: BaseException) -> str:
    """The system's message for a failure; tensorstore hides the error number in its text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"os_error_code='(\d+)'", str(error))
    return os.strerror(int(number[1])) if number else first_line(error)
