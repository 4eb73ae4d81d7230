"""environment.json: what a run ran on, so that its metrics can be understood later."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import jax

import mjax
from mjax.cluster import launch
from mjax.config import Config
from mjax.config.mixture import MixtureConfig
from mjax.parallel import axes
from mjax.utils import packages
from mjax.utils.files import set_aside, write_whole

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")
# NVIDIA's libraries by the name of their wheel, without the version of CUDA at its end.
LIBRARIES = {
    "nvidia-cuda-runtime": "CUDA", "nvidia-cublas": "cuBLAS", "nvidia-cudnn": "cuDNN", "nvidia-nccl": "NCCL",
}  # fmt: skip
FLAGS = re.compile(r"(XLA|JAX|NCCL|CUDA|CUDNN|NVIDIA_TF32)_\w+|GLIBC_TUNABLES|TF_CUDNN_DETERMINISTIC")


def describe(config: Config, say: Callable[[str], None]) -> dict:
    """Versions, devices, mesh, the attention kernel in use, flags (also which of them mjax has set), and the git
    commit."""
    devices = jax.devices()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "mjax": mjax.__version__,
        "git_commit": _git_commit(say),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "host": platform.node(),
        "mesh": axes.as_typed(config.mesh),
        "attention": config.model.attention,
        **({"grouped": config.model.grouped} if isinstance(config.model, MixtureConfig) else {}),
        "nvidia": nvidia(),
        "memory_fraction": next((os.environ[name] for name in launch.MEMORY_FRACTIONS if name in os.environ), None),
        "flags": {name: value for name, value in sorted(os.environ.items()) if FLAGS.fullmatch(name)},
        "set_by_mjax": dict(launch.SET_BY_MJAX),
    }


def nvidia() -> dict[str, str]:
    """Versions of NVIDIA's driver and of the libraries that JAX's wheels bring along; empty without a GPU.

    The libraries are those of package metadata: another one that LD_LIBRARY_PATH puts first is not seen.
    """
    if jax.devices()[0].platform != "gpu":
        return {}
    found = {"driver": version} if (version := launch.nvidia_driver()) else {}
    for name, version in sorted(packages.installed().items()):
        library = LIBRARIES.get(re.sub(r"-cu\d+$", "", name))
        found |= {library: version} if library else {}
    return found


def write(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Append this start of the run to environment.json, a list with one entry per start.

    A file that is not such a list is kept under another name; `say` is told about that and about other failures.
    """
    file = folder / "environment.json"
    starts = []
    if file.exists():
        try:
            starts = json.loads(file.read_bytes())
        except (ValueError, RecursionError, IsADirectoryError):  # torn, or not UTF-8
            starts = None
        if not isinstance(starts, list):
            aside = set_aside(file)
            say(f"{file} is damaged: kept as {aside.name}, started a new one")
            starts = []
    write_whole(file, json.dumps([*starts, describe(config, say)], indent=2) + "\n")


def _git_commit(say: Callable[[str], None]) -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, cwd=Path(mjax.__file__).parent, capture_output=True, check=False)
    except OSError as error:
        say(f"environment.json has no commit of the source: git cannot be run ({error.strerror})")
        return None
    return result.stdout.decode(errors="replace").strip() or None
