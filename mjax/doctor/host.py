"""The machine around the devices: memory, shared memory, open files, a launcher's processes, and the disk.

A file system that hangs cannot be interrupted, so the checks of the disk run in a child process (`child.py`).
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from mjax.checkpoint.folders import steps_in
from mjax.cluster import launch
from mjax.config import Config
from mjax.doctor import GREEN, RED, YELLOW, Finding, Found, check, gibibytes
from mjax.errors import UsageError

LEAST_SHARED = 2**30  # bytes of /dev/shm, through which NCCL's processes on one host communicate
LEAST_FILES = 4096  # enough for a checkpoint of many arrays, the data and connections to other processes
FILE_BYTES = 64 * 2**20
SLOW = 100e6  # bytes per second, those of a hard disk; a parallel file system or an NVMe drive is ten times faster
LEAST_FREE = 2**30
SIGNS = {"RAY_JOB_ID": "Ray", "JOB_COMPLETION_INDEX": "Kubernetes"}
"""Variables of platforms on which something else sets JAX's: Kubeflow Trainer, or a file of deploy/."""


@check("memory")
def check_memory(config: Config | None = None, root: Path = Path("/")) -> Found:
    """Free host memory within the limits of container and job, compared with a checkpoint's copy if given a config.

    A checkpoint is copied to host memory before it is written. The number of devices on this host is unknown here, so
    eight are assumed, or the whole mesh if it is smaller.
    """
    text = (root / "proc/meminfo").read_text()
    total, available = (int(re.search(rf"{name}:\s+(\d+)", text)[1]) * 1024 for name in ("MemTotal", "MemAvailable"))
    within = ""
    for limit, used in _limits(root):
        if limit - used < available:
            total, available, within = limit, max(0, limit - used), ", the limit of this container or job"
    figures = {"total_gib": total / 2**30, "available_gib": available / 2**30}
    text = f"{gibibytes(available)} of {gibibytes(total)} free{within}"
    if config is not None:
        devices, here = config.mesh.devices, min(8, config.mesh.devices)
        copy = state_bytes(config) * here / devices  # replicas share the writing
        text += f"; a checkpoint's copy takes {gibibytes(copy)} of a host with {here} of its {devices} GPUs"
        if copy > available:
            return YELLOW, text, "use hosts with more memory, or more of them", figures
    return GREEN, text, None, figures


def state_bytes(config: Config) -> int:
    """Bytes of a checkpoint: trained parameters and two moments, float32 (fp64 runs, for tests, twice that)."""
    from mjax.models.build import count_parameters  # imports JAX, which may be what is broken

    return 12 * count_parameters(config.model, trained=True) * (2 if config.precision.compute == "fp64" else 1)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Memory limit and use, in bytes, of this process's control group and each above it.

    A container's limit is at the top of its hierarchy, Slurm's at the job or the step. Cached files that were not read
    recently are evicted before a process is killed, so they do not count as used.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):  # version 1 of control groups
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = "sys/fs/cgroup/memory"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for level in (group, *group.parents):
            folder = root / top / level
            stat = folder / "memory.stat"
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                given_back = re.search(rf"^{names[2]} (\d+)", stat.read_text() if stat.exists() else "", re.MULTILINE)
            except (OSError, ValueError):  # not there, or the word 'max'
                continue
            yield limit, used - (int(given_back[1]) if given_back else 0)


@check("shared memory")
def check_shared_memory(devices: int, folder: Path = Path("/dev/shm")) -> Found | None:
    """Check that /dev/shm has room for NCCL; a container has 64 MiB by default.

    Args:
      devices: GPUs of this host; a single one does not need it.
    """
    if not folder.is_dir():
        return None if devices < 2 else (RED, f"there is no {folder}", "mount a tmpfs there")
    room = shutil.disk_usage(folder)
    text = f"{gibibytes(room.free)} of {gibibytes(room.total)} free in {folder}"
    if devices > 1 and room.free < LEAST_SHARED:
        advice = "docker run --shm-size=8g; in Kubernetes, an emptyDir of medium Memory at /dev/shm"
        return YELLOW, f"{text}; NCCL needs more between {devices} GPUs", advice
    return GREEN, text


@check("open files")
def check_open_files(limit: int | None = None) -> Found:
    """Check that a process may open enough files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        text = f"a process may open {soft:,}; a checkpoint and the connections of a large run need more"
        return YELLOW, text, "ulimit -n 65536"
    text = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    return GREEN, f"a process may open {text}"


@check("processes")
def check_processes(environment: Mapping[str, str] = os.environ) -> Found:
    """Name the processes that `train.py` would join; this command joins none and checks its own host only."""
    launched = launch.launched_by(environment)
    if launched is not None:
        try:
            where = launch.Distributed().under_launcher(environment)
        except UsageError as error:
            text, advice = str(error).split("; ", 1)
            return RED, f"mjax train would not start: {text}", advice
        name, count = launched
        if name == launch.OF_JAX:
            name = next((found for sign, found in SIGNS.items() if sign in environment), name)
        processes = f"{count} processes" if count else "an indexed job"
        meeting = f" at {where.coordinator}" if where.coordinator else ""
        return GREEN, f"{name} started {processes}: mjax train joins them{meeting}, this command checks one host"
    if "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_JOB_NUM_NODES", "?")
        job = f"Slurm job {environment['SLURM_JOB_ID']} of {nodes} nodes"
        text = f"inside {job}, outside srun: mjax train would run alone"
        if nodes == "1":
            return GREEN, text
        return YELLOW, text, "start it with srun: srun mjax train …"
    return GREEN, "no launcher: mjax train runs as one process"


# --- The disk ---------------------------------------------------------------------------------------------------------


@check("storage")
def check_storage(runs: Path, config: Config | None = None, name: str = "") -> Found | list[Finding]:
    """Write, sync, read and remove 64 MiB where run folders go, and compare the room with a config's checkpoints.

    Args:
      runs: folder of run folders, or the folder of one run.
      name: of the run; room that its checkpoints already take is not needed again.
    """
    folder = next(folder for folder in (runs.absolute(), *runs.absolute().parents) if os.path.lexists(folder))
    where = str(runs) if folder == runs.absolute() else f"{folder} (where {runs} will be created)"
    try:
        write, read = measure(folder)
        free = shutil.disk_usage(folder).free
        saved = max(len(steps_in(run / "checkpoints")) for run in (runs, runs / name))
    except FileNotFoundError:  # a dangling link
        target = os.path.realpath(folder)
        advice = f"mkdir -p {shlex.quote(target)}, or choose another folder with --runs"
        return RED, f"{where} is a link to {target}, which does not exist", advice
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space there" if full else "make it writable"
        text = f"{where} cannot be written: {error.strerror or error}"
        return RED, text, f"{advice}, or choose another folder with --runs"
    return judge_storage(where, free, write, read, config, saved)


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
def judge_storage(where: str, free: int, write: float, read: float, config: Config | None, saved: int = 0) -> Found:
    """Findings from the measurements: `free` in bytes, `write` and `read` in bytes per second.

    Of the checkpoints that a run of `config` keeps, `there` exist already.
    """
    text = f"{where}: {gibibytes(free)} free, writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    figures = {"free_gib": free / 2**30, "write_mb_per_s": write / 1e6, "read_mb_per_s": read / 1e6}
    least = LEAST_FREE
    if config is not None:
        size = state_bytes(config)
        saved = min(saved, config.checkpoint.keep_last)
        more = config.checkpoint.keep_last + 1 - saved  # an old one is removed when the new one is complete
        least = more * size
        text += f"; a checkpoint is {gibibytes(size)}, {size / write / 60:,.1f} min at this rate from one host"
        figures["checkpoint_gib"] = size / 2**30
    if free < least:
        room = f"{gibibytes(least)} are needed"
        if config is not None:
            room += f" for {more} of them" + (f", besides the {saved} already there" if saved else "")
        advice = "free some space there, or choose another folder with --runs"
        return (YELLOW if config is None else RED, f"{text}; {room}", advice, figures)
    if write < SLOW:
        advice = "choose a faster folder with --runs; while a checkpoint is written, the next one has to wait"
        return YELLOW, f"{text}: slow", advice, figures
    return GREEN, text, None, figures


@check("programs")
def check_programs() -> Found:
    """Check that compiled programs can be kept, and say where."""
    variable = launch.CACHE_FOLDER
    chosen, folder = os.environ.get(variable), launch.programs_folder()
    if chosen == "":
        return GREEN, f"compiled at every start: {variable} is empty"
    if chosen is None and folder is None:
        problem = "there is no home folder"
    else:
        folder = Path(chosen or folder)
        problem = launch.problem_with(folder)
    if problem is not None:
        advice = f"name a folder: export {variable}=/path/to/folder"
        return YELLOW, f"{problem}: programs are compiled at every start", advice
    size = sum(file.stat().st_size for file in folder.glob("*-cache"))
    limit = f" of at most {gibibytes(launch.CACHE_BYTES)}" if chosen is None else f", by {variable}"
    return GREEN, f"compiled ones are kept in {folder}: {gibibytes(size)}{limit}"
