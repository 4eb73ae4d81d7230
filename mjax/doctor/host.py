"""The machine around the devices: installation, driver, memory, open files, a launcher's processes, and the disk.

A file system that hangs cannot be interrupted, so the checks of the disk run in a child process (`checks.py`).
"""

import errno
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import mjax
from mjax.checkpoint.folders import steps_in
from mjax.cluster import launch
from mjax.config import Config
from mjax.doctor import GREEN, RED, YELLOW, Finding, MachineInfo, first
from mjax.utils import packages
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


def check_processes(machine: MachineInfo) -> Finding:
    """Name the processes that `train.py` would join; this command joins none and checks one host.

    Raises:
      UsageError: `train.py` would not start.
    """
    environment, launched = machine.environment, launch.find_launcher(machine.environment)
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1") if "SLURM_JOB_ID" in environment else "1"
    if launched is None and nodes != "1":
        return Finding(YELLOW, f"a Slurm job of {nodes} nodes: train.py would run alone", "srun python train.py …")
    if launched is None:
        return Finding(GREEN, "no launcher: train.py runs as one process")
    rendezvous = launch.Distributed().with_launcher(environment)
    platforms = [platform for sign, platform in SIGNS.items() if sign in environment and launched[0] == launch.JAX]
    processes = f"{launched[1]} processes" if launched[1] else "an indexed job"
    address = f" at {rendezvous.coordinator}" if rendezvous.coordinator else ""
    text = f"{(platforms or launched)[0]} started {processes}: train.py joins them{address}"
    return Finding(GREEN, f"{text}, this command checks one host")


def check_memory(machine: MachineInfo) -> Finding:
    """Free host memory within the limits of container and job, compared with a checkpoint's copy if given a config.

    A checkpoint is copied to host memory before it is written. The number of devices on this host is unknown here, so
    eight are assumed, or the whole mesh if it is smaller.
    """
    text = (ROOT / "proc/meminfo").read_text()
    total, free = (int(re.search(rf"{name}:\s+(\d+)", text)[1]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limits = [(max(0, limit - used), limit, ", the limit of this container or job") for limit, used in _limits()]
    free, total, within = min([(free, total, ""), *limits])
    text, copy = f"{human_bytes(free)} of {human_bytes(total)} free{within}", 0.0
    if machine.config is not None:
        devices = machine.config.mesh.devices
        local = min(8, devices)
        copy = state_bytes(machine.config) * local / devices  # replicas share the writing
        text += f"; a checkpoint's copy takes {human_bytes(copy)} of a host with {local} of its {devices} GPUs"
    figures = {"total_gib": total / 2**30, "available_gib": free / 2**30}
    return first(text, (copy > free, YELLOW, text, "use hosts with more memory, or more of them"), **figures)


def state_bytes(config: Config) -> int:
    """Bytes of a checkpoint: trained parameters and two moments, float32 (fp64 runs, for tests, twice that)."""
    from mjax.models.build import count_parameters  # imports JAX, which may be broken

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


def check_shared_memory(machine: MachineInfo) -> Finding:
    """Check that /dev/shm has room for NCCL, which a single GPU does not need; a container has 64 MiB by default."""
    folder, devices = ROOT / "dev/shm", len(list(ROOT.glob("dev/nvidia[0-9]*")))
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    text, advice = f"{human_bytes(free)} free in {folder}", "docker run --shm-size=8g; in Kubernetes, an emptyDir there"
    small = devices > 1 and free < MIN_SHARED
    return first(text, (small, YELLOW, f"{text}; NCCL needs more between {devices} GPUs", advice))


def check_open_files(machine: MachineInfo) -> Finding:
    """Check that a process may open enough files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = soft == resource.RLIM_INFINITY
    text, few = f"limit per process: {'none' if unlimited else f'{soft:,}'}", not unlimited and soft < MIN_FILES
    return first(text, (few, YELLOW, f"{text}; a checkpoint of a large run needs more", "ulimit -n 65536"))


# --- The disk ---------------------------------------------------------------------------------------------------------


def check_storage(machine: MachineInfo) -> Finding:
    """Write, sync, read and remove 64 MiB where run folders go, and compare the room with a config's checkpoints.

    Room that the run's checkpoints already take is not needed again.
    """
    runs, config, other = machine.runs.absolute(), machine.config, "choose another folder with --runs"
    folder = next(folder for folder in (runs, *runs.parents) if os.path.lexists(folder))
    text = str(machine.runs) if folder == runs else f"{folder} (where {machine.runs} will be created)"
    try:
        write, read = measure(folder)
        free = shutil.disk_usage(folder).free
        saved = max(len(steps_in(run / "checkpoints")) for run in (runs, runs / Path(machine.name).stem))
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
        text += f"; {more} checkpoints of {human_bytes(size)} will be saved, {minutes}"
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


# --- The installation: Python, packages and NVIDIA's driver, without JAX, which may be broken -------------------------


# The oldest Linux driver that runs programs built for a major version of CUDA (NVIDIA's "CUDA Compatibility", minor
# version compatibility).
OLDEST_DRIVER = {12: 525, 13: 580}
NOT_LOADED = "Driver Not Loaded"  # in NVML's words; also on a machine without a GPU
# A container without the tools, a missing package, and a GPU that shares the host's memory.
ABSENT = ("NVML Shared Library Not Found", "No module named 'pynvml'", "Not Supported")
USED_BY_OTHERS = 2**30  # bytes; a desktop or a monitoring process takes less
INSTALL = "install NVIDIA driver 580 or newer; start a container with --gpus all"
ON_GPU_NODE = "srun --gpus-per-node 1 mjax doctor"


def check_python(machine: MachineInfo) -> Finding:
    """Check that mjax supports this Python."""
    version, advice = platform.python_version(), "python3.13 -m venv .venv, then install"
    return first(
        f"{version}, {sys.executable}",
        (not _fits(">=3.11", version), RED, f"{version}, but mjax needs 3.11, 3.12 or 3.13", advice),
        (not _fits("<3.14", version), YELLOW, f"{version}, newer than tested: 3.11, 3.12 and 3.13", advice),
    )


def _fits(specifier: str | SpecifierSet, version: str) -> bool:
    return SpecifierSet(str(specifier)).contains(version, prereleases=True)


def check_packages(machine: MachineInfo) -> Finding:
    """Check that every required package is installed, in a supported version: by requirements.txt in a source tree."""
    file = Path(mjax.__file__).parents[1] / "requirements.txt"
    lines = file.read_text().splitlines() if file.is_file() else metadata.requires("mjax") or []
    requirements = [Requirement(line) for line in (line.split("#")[0].strip() for line in lines) if line]
    wrong = _unmet(requirements)
    lowest = {item: ",".join(str(part) for part in item.specifier if part.operator == ">=") for item in wrong}
    old = [item for item, version in wrong.items() if version is None or not _fits(lowest[item], version)]
    advice = "pip install " + " ".join(f'"{item.name}{item.specifier}"' for item in wrong)
    return first(
        f"all {len(requirements)} required packages",
        (old, RED, _words(wrong), advice),
        (wrong, YELLOW, f"newer than tested: {_words(wrong)}", advice),
    )


def _unmet(requirements: Iterable[Requirement], extra: str = "") -> dict[Requirement, str | None]:
    """The unmet requirements, with the installed version; `extra` names an extra of the installation."""
    installed = packages.list_versions()
    needed = [item for item in requirements if item.marker is None or item.marker.evaluate({"extra": extra})]
    versions = {item: installed.get(canonicalize_name(item.name)) for item in needed}
    return {item: version for item, version in versions.items() if not (version and _fits(item.specifier, version))}


def _words(wrong: Mapping[Requirement, str | None]) -> str:
    return ", ".join(f"{item.name} {version or 'is missing'} ({item.specifier})" for item, version in wrong.items())


def check_jax(machine: MachineInfo) -> Finding | None:
    """Check that jax, jaxlib and the CUDA plugin fit: each is a separate wheel, the plugin two."""
    installed = packages.list_versions()
    if "jax" not in installed:
        return None
    builds = sorted({match[1] for name in installed if (match := re.fullmatch(r"jax-(cuda\d+)-(plugin|pjrt)", name))})
    version, build = installed["jax"], "".join(builds[:1])
    plugin, pjrt, wheels = f"jax-{build}-plugin", f"jax-{build}-pjrt", f"jax[{build}]" if build else "jax"
    required = [item for item in map(Requirement, metadata.requires("jax") or []) if item.name.startswith("jax")]
    # The halves of the plugin have one version.
    required += [Requirement(str(item).replace(plugin, pjrt)) for item in required if item.name == plugin]
    wrong = _unmet(required, build)
    folders = filter(None, machine.environment.get("LD_LIBRARY_PATH", "").split(":") if build else ())
    files = (file for folder in folders for file in Path(folder).glob("lib*.so*"))
    library = next((file for file in files if re.match("lib(cudnn|cublas|nccl)", file.name)), None)
    two = f"two CUDA builds are installed, and JAX uses one: {', '.join(builds)}"
    return first(
        f"jax {version}, jaxlib {installed.get('jaxlib')}, {build or 'CPU'} build",
        (len(builds) > 1, YELLOW, two, f"pip uninstall {plugin} {pjrt}"),
        (wrong, RED, f"jax {version} does not fit {_words(wrong)}", f'pip install --upgrade "{wheels}=={version}"'),
        (library, YELLOW, f"LD_LIBRARY_PATH puts {library} before that of jax", "unset LD_LIBRARY_PATH"),
    )


# --- NVIDIA's driver --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Driver:
    """Facts about this machine's NVIDIA GPUs.

    Attributes:
      version: of the driver; None if no driver is accessible.
      gpus: names of the GPUs that the driver shows.
      memory: bytes of each GPU.
      used: bytes in use of each GPU.
      on_bus: NVIDIA GPUs on the PCI bus, with or without a driver; a container sees its host's GPUs.
      problem: error of NVML; empty if it works.
    """

    version: str | None = None
    gpus: tuple[str, ...] = ()
    memory: tuple[float, ...] = ()
    used: tuple[float, ...] = ()
    on_bus: int = 0
    problem: str = ""


def read_driver() -> Driver:
    """Examine this machine, with NVML; a driver that hangs hangs this too."""
    nvidia = [file for file in ROOT.glob("sys/bus/pci/devices/*/vendor") if file.read_text().strip() == "0x10de"]
    on_bus = sum(file.with_name("class").read_text().startswith("0x03") for file in nvidia)  # display controllers
    texts = [file.read_text() for file in sorted(ROOT.glob("proc/driver/nvidia/gpus/*/information"))]
    driver = Driver(launch.nvidia_driver(ROOT), tuple(re.findall(r"Model:\s+(.+\S)", "\n".join(texts))), on_bus=on_bus)
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = tuple(map(nvml.nvmlDeviceGetName, devices))
        driver = replace(driver, version=nvml.nvmlSystemGetDriverVersion(), gpus=names)
        memory = list(map(nvml.nvmlDeviceGetMemoryInfo, devices))
        return replace(driver, memory=tuple(item.total for item in memory), used=tuple(item.used for item in memory))
    except Exception as error:  # of NVML: there is no driver; host and GPU share memory; a broken installation
        return driver if str(error) in ABSENT else replace(driver, problem=str(error))


def check_driver(machine: MachineInfo) -> Finding:
    """Check that driver and jax fit together."""
    driver, cuda = read_driver(), packages.cuda_build()
    bad, version, on_bus, oldest = driver.problem, driver.version, driver.on_bus, OLDEST_DRIVER.get(cuda or 13, 0)
    branch = int((version or "0").split(".")[0])
    without_gpu = not on_bus and (bad == NOT_LOADED or (version and not bad and not driver.gpus))
    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(driver.gpus).items())
    used = ", ".join(f"{human_bytes(used)} of GPU {i}" for i, used in enumerate(driver.used) if used > USED_BY_OTHERS)
    newer = f"install NVIDIA driver {oldest} or newer" + ", or jax[cuda12]" * (branch >= OLDEST_DRIVER[12])
    text = f"driver {version}, {gpus or 'no GPU listed'}"
    return first(
        text,
        (without_gpu, YELLOW, "NVIDIA's driver or tools, but no NVIDIA GPU: perhaps a login node", ON_GPU_NODE),
        ("mismatch" in bad, RED, bad, "reboot: the driver was updated while its old version was running"),
        (bad, RED, bad, "sudo dmesg | grep -iE 'xid|nvrm'; then reload the driver or reboot"),
        (not version and on_bus, YELLOW if cuda is None else RED, f"{on_bus} × NVIDIA GPU, but no driver", INSTALL),
        (not version and cuda, YELLOW, f"jax is a CUDA {cuda} build, but there is no driver", INSTALL),
        (not version, GREEN, "no NVIDIA GPU on this machine, and jax is a CPU build"),
        (branch < oldest, RED, f"{text}: CUDA {cuda or 13} needs driver {oldest} or newer", newer),
        (cuda is None, RED, f"{text}, but jax is a CPU build and cannot use them", 'pip install "jax[cuda13]"'),
        (used, YELLOW, f"{text}; other processes use {used}", "nvidia-smi lists them; end them, or wait"),
    )
