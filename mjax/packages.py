"""Installed versions, by the packages' own metadata: nothing is imported, so the answer comes for a broken one too."""

from __future__ import annotations

import re
from importlib import metadata


def installed() -> dict[str, str]:
    """Version of each package by its name, in lower case with hyphens; of two, that which Python would import."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name, version = distribution.metadata.get("Name"), distribution.metadata.get("Version")
        if name and version:  # an installation that was broken off leaves a folder without them
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def cuda_build() -> int | None:
    """Major version of CUDA that the installed jax is built for; None: it can use the CPU only."""
    builds = map(re.compile(r"jax-cuda(\d+)-pjrt").fullmatch, installed())  # the half with XLA and its compiler
    return max((int(build[1]) for build in builds if build), default=None)
