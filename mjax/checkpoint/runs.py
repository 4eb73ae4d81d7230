"""Run folders: their checkpoints, and their lock."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mjax.checkpoint.manifest import steps_in
from mjax.errors import UsageError
from mjax.utils.files import make_folder, take_lock


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run folder, including damaged ones, in ascending order."""
    return steps_in(folder / "checkpoints")


def has_checkpoint(folder: Path) -> bool:
    """Whether `folder` contains a run that can be continued."""
    return bool(checkpoint_steps(folder))


def check_run_folder(folder: Path) -> None:
    """Refuse a folder in which no checkpoint could be restored.

    Orbax globs the whole path of what it merges: with a pattern in it, it would find nothing, or another run.

    Raises:
      UsageError: it is an address, such as of an object store, or has one of * ? [ in its path.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
        raise UsageError(
            f"{folder} is an address, and mjax writes runs into folders of a file system; mount the bucket, or give a "
            "local folder and copy it when the run has ended"
        )
    if wrong := [letter for letter in "*?[" if letter in str(folder.absolute())]:
        raise UsageError(
            f"{folder.absolute()} has {wrong[0]} in its path, where no checkpoint could be restored; choose a folder "
            "and a --name without * ? ["
        )


@contextlib.contextmanager
def locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the run folder for this process; the system releases the lock when the process ends, however it ends.

    On a file system without locks `say` is told, and nothing is locked.

    Raises:
      UsageError: another process trains here.
    """
    make_folder(folder)
    with (folder / ".lock").open("wb") as file:
        if not take_lock(file, say):
            raise UsageError(f"{folder} is in use by another process; wait for it, or choose another folder")
        yield
