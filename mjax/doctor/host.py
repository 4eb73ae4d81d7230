"""The machine around the devices: memory, shared memory, open files, and the processes started by a launcher."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from mjax.cluster import launch
from mjax.config import Config
from mjax.doctor.finding import GREEN, RED, YELLOW, Found, check, gibibytes

LEAST_SHARED = 2**30  # bytes of /dev/shm, through which NCCL's processes on one host communicate
LEAST_FILES = 4096  # enough for a checkpoint of many arrays, the data and connections to other processes


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
    found = f"{gibibytes(available)} of {gibibytes(total)} free{within}"
    if config is not None:
        devices, here = config.mesh.devices, min(8, config.mesh.devices)
        copy = state_bytes(config) * here / devices  # replicas share the writing
        found += f"; a checkpoint's copy takes {gibibytes(copy)} of a host with {here} of its {devices} GPUs"
        if copy > available:
            return YELLOW, found, "use hosts with more memory, or more of them", figures
    return GREEN, found, None, figures


def state_bytes(config: Config) -> int:
    """Bytes of a checkpoint: parameters and two moments, float32 (fp64 runs, for tests, twice that)."""
    from mjax.models.build import count_parameters  # imports JAX, which may be what is broken

    return 12 * count_parameters(config.model) * (2 if config.precision.compute == "fp64" else 1)


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
        for place in (group, *group.parents):
            folder = root / top / place
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
    found = f"{gibibytes(room.free)} of {gibibytes(room.total)} free in {folder}"
    if devices > 1 and room.free < LEAST_SHARED:
        advice = "docker run --shm-size=8g; in Kubernetes, an emptyDir of medium Memory at /dev/shm"
        return YELLOW, f"{found}; NCCL needs more between {devices} GPUs", advice
    return GREEN, found


@check("open files")
def check_open_files(limit: int | None = None) -> Found:
    """Check that a process may open enough files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        found = f"a process may open {soft:,}; a checkpoint and the connections of a large run need more"
        return YELLOW, found, "ulimit -n 65536"
    text = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    return GREEN, f"a process may open {text}"


@check("processes")
def check_processes(environment: Mapping[str, str] = os.environ) -> Found:
    """Name the processes that `train.py` would join; this command joins none and checks its own host only."""
    launched = launch.launched_by(environment)
    if launched is not None:
        name, count = launched
        which = f"{count} processes" if count else "an indexed job"
        return GREEN, f"{name} started {which}: train.py joins them, this command checks one host"
    if "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_JOB_NUM_NODES", "?")
        job = f"Slurm job {environment['SLURM_JOB_ID']} of {nodes} nodes"
        found = f"inside {job}, outside srun: train.py would run alone"
        if nodes == "1":
            return GREEN, found
        return YELLOW, found, "srun python train.py …, see docs/cluster.md"
    return GREEN, "no launcher: train.py runs as one process"
