"""The NVIDIA driver, examined without JAX: through /proc, /sys, and NVML in a child process with a time limit."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mjax.cluster.launch import nvidia_driver
from mjax.doctor import GREEN, RED, YELLOW, Found, check, gibibytes

# The oldest Linux driver that runs programs built for a major version of CUDA (NVIDIA's "CUDA Compatibility", minor
# version compatibility).
OLDEST_DRIVER = {12: 525, 13: 580}
ASK_NVML = (sys.executable, "-m", "mjax.doctor.driver")
ANSWER_SECONDS = 20.0
NOT_LOADED = "Driver Not Loaded"  # in NVML's words; also on a machine without a GPU
ABSENT = ("NVML Shared Library Not Found", "No module named 'pynvml'")  # a container without the tools; `packages`
USED_BY_OTHERS = 2**30  # bytes; a desktop or a monitoring process takes less


@dataclass(frozen=True)
class Driver:
    """Facts about this machine's NVIDIA GPUs.

    Attributes:
      version: of the driver; None if no driver is accessible.
      gpus: names of the GPUs that the driver shows.
      memory: bytes of each GPU.
      used: bytes in use of each GPU.
      on_bus: NVIDIA GPUs on the PCI bus, with or without a driver; a container sees those of its host.
      problem: error of NVML, if any.
    """

    version: str | None = None
    gpus: tuple[str, ...] = ()
    memory: tuple[float, ...] = ()
    used: tuple[float, ...] = ()
    on_bus: int = 0
    problem: str | None = None


def read_driver(root: Path = Path("/"), ask: Sequence[str] = ASK_NVML) -> Driver:
    """Examine this machine; `root` holds /proc and /sys, the command `ask` prints what NVML knows."""
    known = Driver(nvidia_driver(root), on_bus=_on_bus(root))
    child = subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        answer, errors = child.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: a process that hangs in the driver cannot be killed
        return replace(known, problem=f"the driver gave no answer in {ANSWER_SECONDS:.0f} s")
    if not child.returncode:
        version, *columns = json.loads(answer)
        return Driver(version, *map(tuple, columns), on_bus=known.on_bus)
    problem = (errors.strip() or f"exit code {child.returncode}").splitlines()[-1].split(": ")[-1]
    if problem not in ABSENT:
        return replace(known, problem=problem)
    information = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"Model:\s+(.+)", _text(file)) for file in information]
    return replace(known, gpus=tuple(match[1].strip() for match in models if match))


def ask_nvml() -> list:
    """The driver's version, and for each GPU its name, its bytes and those in use: a column of each."""
    import pynvml as nvml

    nvml.nvmlInit()
    gpus = []
    for device in map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount())):
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            gpus.append((nvml.nvmlDeviceGetName(device), memory.total, memory.used))
        except nvml.NVMLError_NotSupported:  # host and GPU share memory
            gpus.append((nvml.nvmlDeviceGetName(device), 0, 0))
    return [nvml.nvmlSystemGetDriverVersion(), *zip(*gpus, strict=True)]


@check("driver")
def check_driver(driver: Driver, cuda: int | None) -> Found:
    """Check that driver and jax fit together; `cuda` is the major version of jax's plugin, if any.

    NVML's problems come first: a driver that hangs would hang all later checks.
    """
    without_gpu = driver.problem == NOT_LOADED or (not driver.problem and driver.version and not driver.gpus)
    if without_gpu and not driver.on_bus:
        problem = f" ({driver.problem})" if driver.problem else ""
        text = f"NVIDIA's driver or tools, but no NVIDIA GPU on the PCI bus: perhaps a login node{problem}"
        advice = "to train on GPUs, ask on a node that has some: srun --gpus-per-node 1 mjax doctor"
        return YELLOW, text, advice
    if driver.problem:
        advice = (
            "reboot: the driver was updated while its old version was running"
            if "mismatch" in driver.problem
            else "sudo dmesg | grep -iE 'xid|nvrm'; then reload the driver or reboot"
        )
        return RED, driver.problem, advice
    if driver.version is None:
        return _without_driver(driver, cuda)
    gpus = ", ".join(f"{count} × {name}" for name, count in Counter(driver.gpus).items()) or "no GPU listed"
    oldest, branch = OLDEST_DRIVER.get(cuda or 13, 0), int(driver.version.split(".")[0])
    newer = f"install NVIDIA driver {oldest} or newer"
    if branch < oldest and branch >= OLDEST_DRIVER[12]:
        newer = f'pip install "jax[cuda12]", or {newer}'
    if cuda is None:
        text = f"driver {driver.version} with {gpus}, but jax is the build for CPUs: it cannot use them"
        install = "pip install 'jax[cuda13]'"
        return RED, text, f"{newer} and {install}" if branch < oldest else install
    if branch < oldest:
        text = f"driver {driver.version} is too old for jax's CUDA {cuda}, which needs {oldest} or newer"
        return RED, text, newer
    text = f"driver {driver.version}, {gpus}"
    if in_use := [f"{gibibytes(used)} of GPU {i}" for i, used in enumerate(driver.used) if used > USED_BY_OTHERS]:
        advice = "nvidia-smi shows who; training takes most of a GPU's memory when it starts"
        return YELLOW, f"{text}; other processes hold {', '.join(in_use)}", advice
    return GREEN, text


def _without_driver(driver: Driver, cuda: int | None) -> Found:
    install = "install NVIDIA driver 580 or newer; a container has to be started with --gpus all"
    if driver.on_bus:
        status = YELLOW if cuda is None else RED
        text = f"{driver.on_bus} NVIDIA GPU{'s' * (driver.on_bus > 1)} on the PCI bus, but no driver accessible"
        return status, f"{text}: no GPU can be used", install
    if cuda is None:
        return GREEN, "no NVIDIA GPU on this machine, and jax is the build for CPUs"
    text = f"jax is the build for CUDA {cuda}, but no NVIDIA driver is accessible: no GPU can be used"
    return YELLOW, text, f"to train on a GPU, {install}; mjax plan needs none"


@check("visible")
def check_visible(driver: Driver, environment: Mapping[str, str] = os.environ) -> Found | None:
    """Find environment variables that hide GPUs from JAX; nothing if there is no GPU."""
    if not driver.gpus:
        return None
    platforms, devices = environment.get("JAX_PLATFORMS"), environment.get("CUDA_VISIBLE_DEVICES")
    count = len(driver.gpus)
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return YELLOW, f"JAX_PLATFORMS={platforms} hides the GPUs", "unset JAX_PLATFORMS"
    if devices is None:
        return GREEN, f"all {count} GPUs" if count > 1 else "the GPU"
    visible = visible_gpus(driver, environment)
    if devices == "NoDevFiles":
        advice = "ask for some: srun --gpus-per-node 1 mjax doctor"
        return YELLOW, "Slurm gave this job none of the GPUs (CUDA_VISIBLE_DEVICES=NoDevFiles)", advice
    if visible == 0:
        return YELLOW, f"CUDA_VISIBLE_DEVICES={devices!r} hides all {count} GPUs", "unset CUDA_VISIBLE_DEVICES"
    named = len([name for name in devices.split(",") if name.strip()])
    if visible < named:
        text = f"CUDA_VISIBLE_DEVICES={devices} names an unknown GPU, which hides it and all after it: "
        advice = f"number them from 0 to {count - 1}, or unset CUDA_VISIBLE_DEVICES"
        return YELLOW, f"{text}{visible} of {count} are left", advice
    text = f"{visible} of {count} GPUs" if "MIG-" not in devices else "a slice of a GPU"
    return GREEN, f"{text}, by CUDA_VISIBLE_DEVICES={devices}"


def visible_gpus(driver: Driver, environment: Mapping[str, str] = os.environ) -> int:
    """Count the driver's GPUs that a process with this environment can see."""
    devices = environment.get("CUDA_VISIBLE_DEVICES")
    if devices is None:
        return len(driver.gpus)

    def known(name: str) -> bool:
        return int(name) < len(driver.gpus) if name.isdecimal() else name.startswith(("GPU-", "MIG-"))

    names = map(str.strip, devices.split(","))
    return len(list(itertools.takewhile(known, names)))  # CUDA stops at the first unknown one


@check("libraries")
def check_libraries(environment: Mapping[str, str] = os.environ, cuda: int | None = None) -> Found | None:
    """Find another CUDA that LD_LIBRARY_PATH puts before that of jax's wheels; nothing if there is none."""
    folders = environment.get("LD_LIBRARY_PATH", "").split(":") if cuda is not None else ()
    for folder in filter(None, folders):
        for name in ("libcudnn.so", "libcublas.so", "libnccl.so"):
            if any(Path(folder).glob(f"{name}*")):
                return YELLOW, f"LD_LIBRARY_PATH puts {folder}/{name} before jax's own", "unset LD_LIBRARY_PATH"
    return None


def _on_bus(root: Path) -> int:
    """Display controllers (PCI class 03) of NVIDIA (vendor 10de)."""
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return sum(
        _text(file).strip() == "0x10de" and _text(file.with_name("class")).startswith("0x03") for file in vendors
    )


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    print(json.dumps(ask_nvml()))
