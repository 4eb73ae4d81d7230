"""The folder of checkpoints: write access, room and speed; and that of compiled programs.

A file system that hangs cannot be interrupted, so this runs in a child process (`child.py`).
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import tempfile
import time
from pathlib import Path

from mjax.checkpoint.folders import steps_in
from mjax.cluster import launch
from mjax.config import Config
from mjax.doctor.finding import GREEN, RED, YELLOW, Finding, Found, check, gibibytes
from mjax.doctor.host import state_bytes

FILE_BYTES = 64 * 2**20
SLOW = 100e6  # bytes per second, those of a hard disk; a parallel file system or an NVMe drive is ten times faster
LEAST_FREE = 2**30


@check("storage")
def check_storage(runs: Path, config: Config | None = None, name: str = "") -> Found | list[Finding]:
    """Write, sync, read and remove 64 MiB where run folders go, and compare the room with a config's checkpoints.

    Args:
      runs: folder of run folders, or the folder of one run.
      name: of the run; room that its checkpoints already take is not needed again.
    """
    folder = next(place for place in (runs.absolute(), *runs.absolute().parents) if os.path.lexists(place))
    where = str(runs) if folder == runs.absolute() else f"{folder} (where {runs} will be created)"
    try:
        write, read = measure(folder)
        free = shutil.disk_usage(folder).free
        there = max(len(steps_in(run / "checkpoints")) for run in (runs, runs / name))
    except FileNotFoundError:  # a dangling link
        target = os.path.realpath(folder)
        advice = f"mkdir -p {shlex.quote(target)}, or choose another folder with --runs"
        return RED, f"{where} is a link to {target}, which does not exist", advice
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space there" if full else "make it writable"
        found = f"{where} cannot be written: {error.strerror or error}"
        return RED, found, f"{advice}, or choose another folder with --runs"
    return judge_storage(where, free, write, read, config, there)


def measure(folder: Path) -> tuple[float, float]:
    """Bytes per second of writing (to the disk, not to memory) and of reading, in `folder`.

    Raises:
      OSError: it cannot be written.
    """
    block = os.urandom(2**20)  # cannot be compressed by the file system
    descriptor, name = tempfile.mkstemp(prefix=".mjax-doctor-", dir=folder)
    os.unlink(name)  # so that nothing is left behind, however this process ends
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        begun = time.perf_counter()
        for _ in range(FILE_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # else the pages are read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begun_reading = time.perf_counter()
        size = 0
        while part := file.read(len(block)):
            size += len(part)
        end = time.perf_counter()
    if size != FILE_BYTES:
        raise OSError(errno.EIO, f"of {FILE_BYTES} bytes written, {size} were read")
    return FILE_BYTES / (written - begun), FILE_BYTES / (end - begun_reading)


@check("storage")
def judge_storage(where: str, free: int, write: float, read: float, config: Config | None, there: int = 0) -> Found:
    """Findings from the measurements: `free` in bytes, `write` and `read` in bytes per second.

    Of the checkpoints that a run of `config` keeps, `there` exist already.
    """
    found = f"{where}: {gibibytes(free)} free, writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    figures = {"free_gib": free / 2**30, "write_mb_per_s": write / 1e6, "read_mb_per_s": read / 1e6}
    least = LEAST_FREE
    if config is not None:
        size = state_bytes(config)
        there = min(there, config.checkpoint.keep_last)
        more = config.checkpoint.keep_last + 1 - there  # an old one is removed when the new one is complete
        least = more * size
        found += f"; a checkpoint is {gibibytes(size)}, {size / write / 60:,.1f} min at this rate from one host"
        figures["checkpoint_gib"] = size / 2**30
    if free < least:
        room = f"{gibibytes(least)} are needed"
        if config is not None:
            room += f" for {more} of them" + (f", besides the {there} already there" if there else "")
        advice = "free some space there, or choose another folder with --runs"
        return (YELLOW if config is None else RED, f"{found}; {room}", advice, figures)
    if write < SLOW:
        advice = "choose a faster folder with --runs; while a checkpoint is written, the next one has to wait"
        return YELLOW, f"{found}: slow", advice, figures
    return GREEN, found, None, figures


@check("programs")
def check_programs() -> Found:
    """Check that compiled programs can be kept, and say where."""
    variable = launch.CACHE_FOLDER
    chosen, place = os.environ.get(variable), launch.programs_folder()
    if chosen == "":
        return GREEN, f"compiled at every start: {variable} is empty"
    if chosen is None and place is None:
        problem = "there is no home folder"
    else:
        place = Path(chosen or place)
        problem = launch.problem_with(place)
    if problem is not None:
        advice = f"name a folder: export {variable}=/path/to/folder"
        return YELLOW, f"{problem}: programs are compiled at every start", advice
    there = sum(file.stat().st_size for file in place.glob("*-cache"))
    limit = f" of at most {gibibytes(launch.CACHE_BYTES)}" if chosen is None else f", by {variable}"
    return GREEN, f"compiled ones are kept in {place}: {gibibytes(there)}{limit}"
