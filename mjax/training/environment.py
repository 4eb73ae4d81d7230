"""environment.json: what a run ran on, so that its metrics can be understood later."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import jax

import mjax
from mjax.config import Config
from mjax.data.atomic import set_aside, write_whole
from mjax.parallel import axes

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece")


def describe(config: Config, say: Callable[[str], None]) -> dict:
    """Versions, devices, mesh, the attention kernel in use, flags, and the git commit."""
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
        "mesh": axes.sizes(config.mesh),
        "attention": config.model.attention,
        "flags": {
            name: os.environ[name] for name in ("XLA_FLAGS", "JAX_PLATFORMS", "GLIBC_TUNABLES") if name in os.environ
        },
    }


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
