"""environment.json: what a run ran on, so that its figures can be understood later."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import jax

import mjax
from mjax.config import Config
from mjax.data.atomic import write_whole

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")


def describe(config: Config) -> dict:
    """Versions, devices, mesh, the attention kernel in use, flags, and the source's commit."""
    devices = jax.devices()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "mjax": mjax.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "host": platform.node(),
        "mesh": {"pipe": config.mesh.pipe, "data": config.mesh.data, "model": config.mesh.model},
        "attention": config.model.attention,
        "flags": {
            name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS", "GLIBC_TUNABLES") if name in os.environ
        },
    }


def write(config: Config, folder: Path) -> None:
    """Append this start of the run to environment.json, a list with one entry a start."""
    file = folder / "environment.json"
    starts = json.loads(file.read_text()) if file.exists() else []
    write_whole(file, json.dumps([*starts, describe(config)], indent=2) + "\n")


def _git_commit() -> str | None:
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],
        cwd=Path(mjax.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or None
