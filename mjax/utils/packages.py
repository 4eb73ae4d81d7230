"""Installed versions, from package metadata without an import, so that broken packages are listed too; and hashes of
mjax's sources."""

import hashlib
import re
from importlib import metadata
from pathlib import Path

import mjax


def list_versions() -> dict[str, str]:
    """Return the version of each package by name, in lower case with hyphens; of two, the one that Python imports."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        named = distribution.metadata  # a property that reads the file
        name, version = named.get("Name"), named.get("Version")
        if name and version:  # an interrupted installation leaves a folder without them
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return versions


def source_hashes() -> dict[str, str]:
    """Return a hash of each source file of mjax, by path: 'mjax/config/run.py'."""
    root = Path(mjax.__file__).parent.parent
    files = sorted((root / "mjax").rglob("*.py"))
    return {file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


def cuda_build() -> int | None:
    """Return the major CUDA version of the installed jax; None for the CPU build."""
    builds = map(re.compile(r"jax-cuda(\d+)-pjrt").fullmatch, list_versions())  # the half with XLA and its compiler
    return max((int(build[1]) for build in builds if build), default=None)
