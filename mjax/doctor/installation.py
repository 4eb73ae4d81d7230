"""The installation: Python, packages and NVIDIA's driver, without JAX, which may be what is broken."""

from __future__ import annotations

import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import mjax
from mjax.cluster.launch import nvidia_driver
from mjax.doctor import GREEN, RED, YELLOW, Facts, Finding, first
from mjax.utils import packages
from mjax.utils.figures import human_bytes

# The oldest Linux driver that runs programs built for a major version of CUDA (NVIDIA's "CUDA Compatibility", minor
# version compatibility).
OLDEST_DRIVER = {12: 525, 13: 580}
NOT_LOADED = "Driver Not Loaded"  # in NVML's words; also on a machine without a GPU
# A container without the tools, a package that is missing, and a GPU without memory of its own.
ABSENT = ("NVML Shared Library Not Found", "No module named 'pynvml'", "Not Supported")
ROOT = Path("/")
USED_BY_OTHERS = 2**30  # bytes; a desktop or a monitoring process takes less
INSTALL = "install NVIDIA driver 580 or newer; start a container with --gpus all"
ON_GPU_NODE = "srun --gpus-per-node 1 mjax doctor"


def check_python(facts: Facts) -> Finding:
    """Check that mjax supports this Python."""
    version, advice = platform.python_version(), "python3.13 -m venv .venv, then install"
    return first(
        f"{version}, {sys.executable}",
        (not _fits(">=3.11", version), RED, f"{version}, but mjax needs 3.11, 3.12 or 3.13", advice),
        (not _fits("<3.14", version), YELLOW, f"{version}, newer than tested: 3.11, 3.12 and 3.13", advice),
    )


def _fits(specifier: str | SpecifierSet, version: str) -> bool:
    return SpecifierSet(str(specifier)).contains(version, prereleases=True)


def check_packages(facts: Facts) -> Finding:
    """Check that every required package is installed, in a supported version: by requirements.txt in a source tree."""
    file = Path(mjax.__file__).parents[1] / "requirements.txt"
    lines = file.read_text().splitlines() if file.is_file() else metadata.requires("mjax") or []
    requirements = [Requirement(line) for line in (line.split("#")[0].strip() for line in lines) if line]
    wrong = _unmet(requirements)
    lowest = {each: ",".join(str(part) for part in each.specifier if part.operator == ">=") for each in wrong}
    old = [each for each, version in wrong.items() if version is None or not _fits(lowest[each], version)]
    advice = "pip install " + " ".join(f'"{each.name}{each.specifier}"' for each in wrong)
    return first(
        f"all {len(requirements)} required packages",
        (old, RED, _words(wrong), advice),
        (wrong, YELLOW, f"newer than tested: {_words(wrong)}", advice),
    )


def _unmet(requirements: Iterable[Requirement], extra: str = "") -> dict[Requirement, str | None]:
    """The requirements that are not met, with the installed version; `extra` is that of an installation."""
    installed = packages.installed()
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": extra})]
    versions = {each: installed.get(canonicalize_name(each.name)) for each in needed}
    return {each: version for each, version in versions.items() if not (version and _fits(each.specifier, version))}


def _words(wrong: Mapping[Requirement, str | None]) -> str:
    return ", ".join(f"{each.name} {version or 'is missing'} ({each.specifier})" for each, version in wrong.items())


def check_jax(facts: Facts) -> Finding | None:
    """Check that jax, jaxlib and the CUDA plugin fit: each is a separate wheel, the plugin two."""
    installed = packages.installed()
    if "jax" not in installed:
        return None
    builds = sorted({match[1] for name in installed if (match := re.fullmatch(r"jax-(cuda\d+)-(plugin|pjrt)", name))})
    version, build = installed["jax"], "".join(builds[:1])
    plugin, pjrt, wheels = f"jax-{build}-plugin", f"jax-{build}-pjrt", f"jax[{build}]" if build else "jax"
    parts = [each for each in map(Requirement, metadata.requires("jax") or []) if each.name.startswith("jax")]
    # The halves of the plugin have one version.
    parts += [Requirement(str(each).replace(plugin, pjrt)) for each in parts if each.name == plugin]
    wrong = _unmet(parts, build)
    folders = filter(None, facts.environment.get("LD_LIBRARY_PATH", "").split(":") if build else ())
    files = (file for folder in folders for file in Path(folder).glob("lib*.so*"))
    other = next((file for file in files if re.match("lib(cudnn|cublas|nccl)", file.name)), None)
    two = f"two CUDA builds are installed, and JAX uses one: {', '.join(builds)}"
    return first(
        f"jax {version}, jaxlib {installed.get('jaxlib')}: the build for {build or 'CPUs'}",
        (len(builds) > 1, YELLOW, two, f"pip uninstall {plugin} {pjrt}"),
        (wrong, RED, f"jax {version} does not fit {_words(wrong)}", f'pip install --upgrade "{wheels}=={version}"'),
        (other, YELLOW, f"LD_LIBRARY_PATH puts {other} before jax's own", "unset LD_LIBRARY_PATH"),
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
      on_bus: NVIDIA GPUs on the PCI bus, with or without a driver; a container sees those of its host.
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
    driver = Driver(nvidia_driver(ROOT), tuple(re.findall(r"Model:\s+(.+\S)", "\n".join(texts))), on_bus=on_bus)
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = tuple(map(nvml.nvmlDeviceGetName, devices))
        driver = replace(driver, version=nvml.nvmlSystemGetDriverVersion(), gpus=names)
        memory = list(map(nvml.nvmlDeviceGetMemoryInfo, devices))
        return replace(driver, memory=tuple(each.total for each in memory), used=tuple(each.used for each in memory))
    except Exception as error:  # of NVML: there is no driver; host and GPU share memory; a broken installation
        return driver if str(error) in ABSENT else replace(driver, problem=str(error))


def check_driver(facts: Facts) -> Finding:
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
        (not version and cuda, YELLOW, f"jax is the build for CUDA {cuda}, but there is no driver", INSTALL),
        (not version, GREEN, "no NVIDIA GPU on this machine, and jax is the build for CPUs"),
        (branch < oldest, RED, f"{text}: CUDA {cuda or 13} needs driver {oldest} or newer", newer),
        (cuda is None, RED, f"{text}, but jax is the build for CPUs: it cannot use them", 'pip install "jax[cuda13]"'),
        (used, YELLOW, f"{text}; other processes hold {used}", "nvidia-smi shows who; end them, or wait"),
    )
