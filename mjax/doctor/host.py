"""The machine around the devices: memory, shared memory, open files, a launcher's processes, and the disk.

A file system that hangs cannot be interrupted, so the checks of the disk run in a child process (`checks.py`).
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
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mjax.checkpoint.folders import steps_in
from mjax.cluster import launch
from mjax.config import Config
from mjax.doctor import GREEN, RED, YELLOW, Facts, Finding, first
from mjax.utils.figures import human_bytes

ROOT = Path("/")
MIN_SHARED = 2**30  # bytes of /dev/shm, through which NCCL's processes on one host communicate
MIN_FILES = 4096  # enough for a checkpoint of many arrays, the data and connections to other processes
FILE_BYTES = 64 * 2**20
SLOW = 100e6  # bytes per second, those of a hard disk; a parallel file system or an NVMe drive is ten times faster
MIN_FREE = 2**30
# Top folder, and files of limit, use and idle cache of version 2 and 1 of control groups.
GROUPS_V2 = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
GROUPS_V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
SIGNS = {"RAY_JOB_ID": "Ray", "JOB_COMPLETION_INDEX": "Kubernetes"}
"""Variables of platforms on which something else sets JAX's: Kubeflow Trainer, or a file of deploy/."""


def check_processes(facts: Facts) -> Finding:
    """Name the processes that `train.py` would join; this command joins none and checks its own host only.

    Raises:
      UsageError: `train.py` would not start.
    """
    environment, launched = facts.environment, launch.launched_by(facts.environment)
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1") if "SLURM_JOB_ID" in environment else "1"
    if launched is None and nodes != "1":
        return Finding(YELLOW, f"a Slurm job of {nodes} nodes: mjax train would run alone", "srun mjax train …")
    if launched is None:
        return Finding(GREEN, "no launcher: mjax train runs as one process")
    rendezvous = launch.Distributed().under_launcher(environment)
    platforms = [platform for sign, platform in SIGNS.items() if sign in environment and launched[0] == launch.OF_JAX]
    processes = f"{launched[1]} processes" if launched[1] else "an indexed job"
    address = f" at {rendezvous.coordinator}" if rendezvous.coordinator else ""
    text = f"{(platforms or launched)[0]} started {processes}: mjax train joins them{address}"
    return Finding(GREEN, f"{text}, this command checks one host")


def check_memory(facts: Facts) -> Finding:
    """Free host memory within the limits of container and job, compared with a checkpoint's copy if given a config.

    A checkpoint is copied to host memory before it is written. The number of devices on this host is unknown here, so
    eight are assumed, or the whole mesh if it is smaller.
    """
    text = (ROOT / "proc/meminfo").read_text()
    total, free = (int(re.search(rf"{name}:\s+(\d+)", text)[1]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limits = [(max(0, limit - used), limit, ", the limit of this container or job") for limit, used in _limits()]
    free, total, within = min([(free, total, ""), *limits])
    text, copy = f"{human_bytes(free)} of {human_bytes(total)} free{within}", 0.0
    if facts.config is not None:
        devices = facts.config.mesh.devices
        copy = state_bytes(facts.config) * min(8, devices) / devices  # replicas share the writing
        text += (
            f"; a checkpoint's copy takes {human_bytes(copy)} of a host with {min(8, devices)} of its {devices} GPUs"
        )
    return first(
        text,
        (copy > free, YELLOW, text, "use hosts with more memory, or more of them"),
        total_gib=total / 2**30,
        available_gib=free / 2**30,
    )


def state_bytes(config: Config) -> int:
    """Bytes of a checkpoint: trained parameters and two moments, float32 (fp64 runs, for tests, twice that)."""
    from mjax.models.build import count_parameters  # imports JAX, which may be what is broken

    return 12 * count_parameters(config.model, trained=True) * (2 if config.precision.compute == "fp64" else 1)


def _limits() -> Iterator[tuple[int, int]]:
    """Memory limit and use, in bytes, of this process's control group and each above it.

    A container's limit is at the top of its hierarchy, Slurm's at the job or the step. Cached files that were not read
    recently are evicted before a process is killed, so they do not count as used.
    """
    groups = ROOT / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit_file, used_file, idle_cache = GROUPS_V1 if controllers else GROUPS_V2
        group = PurePosixPath(path.lstrip("/"))
        for level in (group, *group.parents):
            folder = ROOT / top / level
            try:
                limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
                cached = re.findall(rf"^{idle_cache} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            except (OSError, ValueError):  # not there, or the word 'max'
                continue
            yield limit, used - sum(map(int, cached))


def check_shared_memory(facts: Facts) -> Finding:
    """Check that /dev/shm has room for NCCL, which a single GPU does not need; a container has 64 MiB by default."""
    folder, devices = ROOT / "dev/shm", len(list(ROOT.glob("dev/nvidia[0-9]*")))
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    text, advice = f"{human_bytes(free)} free in {folder}", "docker run --shm-size=8g; in Kubernetes, an emptyDir there"
    return first(
        text,
        (devices > 1 and free < MIN_SHARED, YELLOW, f"{text}; NCCL needs more between {devices} GPUs", advice),
    )


def check_open_files(facts: Facts) -> Finding:
    """Check that a process may open enough files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = soft != resource.RLIM_INFINITY and soft < MIN_FILES
    return first(
        f"a process may open {'any number' if soft == resource.RLIM_INFINITY else f'{soft:,}'}",
        (few, YELLOW, f"a process may open {soft:,}; a checkpoint of a large run needs more", "ulimit -n 65536"),
    )


# --- The disk ---------------------------------------------------------------------------------------------------------


def check_storage(facts: Facts) -> Finding:
    """Write, sync, read and remove 64 MiB where run folders go, and compare the room with a config's checkpoints.

    Room that the run's checkpoints already take is not needed again.
    """
    runs, config, other = facts.runs.absolute(), facts.config, "choose another folder with --runs"
    folder = next(folder for folder in (runs, *runs.parents) if os.path.lexists(folder))
    text = str(facts.runs) if folder == runs else f"{folder} (where {facts.runs} will be created)"
    try:
        write, read = measure(folder)
        free = shutil.disk_usage(folder).free
        saved = max(len(steps_in(run / "checkpoints")) for run in (runs, runs / Path(facts.name).stem))
    except FileNotFoundError:
        make = f"mkdir -p {shlex.quote(os.path.realpath(folder))}"
        return Finding(RED, f"{text} is a link to nowhere", f"{make}, or {other}")
    except OSError as error:
        remedy = "free some space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        return Finding(RED, f"{text} cannot be written: {error.strerror or error}", f"{remedy}, or {other}")
    text += f": {human_bytes(free)} free, writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f} MB/s"
    needed, shortage = MIN_FREE, YELLOW
    if config is not None:
        most, size = config.checkpoint.keep_last, state_bytes(config)
        more = most + 1 - min(saved, most)  # one is written before one goes
        needed, shortage = more * size, RED
        minutes = f"{size / write / 60:,.1f} min each from one host"
        text += f"; {more} checkpoints of {human_bytes(size)} are to be saved, {minutes}"
    return first(
        text,
        (free < needed, shortage, f"{text}; {human_bytes(needed)} are needed", f"free some space there, or {other}"),
        (write < SLOW, YELLOW, f"{text}: slow", f"{other}: while a checkpoint is written, the next one waits"),
        free_gib=free / 2**30,
        write_mb_per_s=write / 1e6,
        read_mb_per_s=read / 1e6,
    )


def measure(folder: Path) -> tuple[float, float]:
    """Bytes per second of writing (to the disk, not to memory) and of reading, in `folder`.

    Raises:
      OSError: it cannot be written.
    """
    data = os.urandom(FILE_BYTES)  # cannot be compressed by the file system
    with tempfile.TemporaryFile(prefix=".mjax-doctor-", dir=folder) as file:
        start = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):  # else the pages are read from memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        middle = time.perf_counter()
        same, end = file.read() == data, time.perf_counter()
    if not same:
        raise OSError(errno.EIO, "the bytes read are not those written")
    return FILE_BYTES / (written - start), FILE_BYTES / (end - middle)
