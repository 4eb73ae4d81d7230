"""Python and packages: the installed versions must work together, as their own metadata says.

No package is imported, so broken ones can be examined too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import mjax
from mjax.doctor.finding import GREEN, RED, YELLOW, Found, check, listed
from mjax.utils import packages

PYTHON = SpecifierSet(">=3.11")
TESTED_PYTHON = SpecifierSet("<3.14")
SHOWN = ("flax", "optax", "orbax-checkpoint", "numpy")
CUDA_BUILDS = re.compile(r"jax-cuda(\d+)-(?:plugin|pjrt)")


@check("python")
def check_python(version: tuple[int, ...] = sys.version_info[:3], executable: str = sys.executable) -> Found:
    """Check that mjax supports this Python."""
    text, advice = ".".join(map(str, version[:3])), "python3.13 -m venv .venv, then install"
    if text not in PYTHON:
        return RED, f"{text}, but mjax needs 3.11, 3.12 or 3.13", advice
    if text not in TESTED_PYTHON:
        return YELLOW, f"{text}, newer than tested with mjax: 3.11, 3.12 and 3.13", advice
    return GREEN, f"{text}, {executable}"


@check("packages")
def check_packages(requirements: list[str] | None = None) -> Iterator[Found]:
    """Check that every required package is installed, in a supported version."""
    lines = _requirements() if requirements is None else requirements
    wanted: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate():
            name = canonicalize_name(requirement.name)
            if name in wanted:  # both lines hold
                requirement.specifier &= wanted[name].specifier
            wanted[name] = requirement
    installed = packages.installed()
    wrong: dict[tuple[str, str], list[Requirement]] = {}
    for name, requirement in wanted.items():
        version = installed.get(name)
        if version is None:
            wrong.setdefault((RED, "not installed"), []).append(requirement)
        elif not requirement.specifier.contains(version, prereleases=True):
            lowest = SpecifierSet(",".join(str(part) for part in requirement.specifier if part.operator == ">="))
            newer = bool(lowest) and lowest.contains(version, prereleases=True)
            what = (YELLOW, "newer than tested with mjax") if newer else (RED, "too old or excluded")
            wrong.setdefault(what, []).append(requirement)
    for (status, what), them in wrong.items():
        versions = ((r, installed.get(canonicalize_name(r.name))) for r in them)
        named = [f"{r.name} {version} ({r.specifier} is wanted)" if version else r.name for r, version in versions]
        yield status, f"{what}: {listed(named)}", "pip install " + " ".join(f'"{r.name}{r.specifier}"' for r in them)
    if not wrong:
        versions = [f"{name} {installed[name]}" for name in SHOWN if name in installed]
        yield GREEN, f"all {len(wanted)} required packages, among them {listed(versions)}"


@check("jax")
def check_jax() -> Found:
    """Check that jax, jaxlib and the CUDA plugin have one version: each is a separate wheel, the plugin two."""
    installed = packages.installed()
    jax, jaxlib = installed.get("jax"), installed.get("jaxlib")
    if jax is None or jaxlib is None:
        absent = listed([name for name, version in (("jax", jax), ("jaxlib", jaxlib)) if version is None])
        return RED, f"not installed: {absent}", 'pip install "jax>=0.10.2,<0.13"'
    plugins = {name: version for name, version in installed.items() if CUDA_BUILDS.fullmatch(name)}
    majors = {CUDA_BUILDS.fullmatch(name)[1] for name in plugins}
    build = f"jax[cuda{max(majors)}]" if majors else "jax"
    advice = f'pip install --upgrade "{build}=={jax}"'
    needs = [Requirement(line) for line in metadata.requires("jax") or [] if "extra ==" not in line]
    accepted = SpecifierSet(",".join(str(need.specifier) for need in needs if need.name == "jaxlib"))
    if not accepted.contains(jaxlib, prereleases=True):
        return RED, f"jax {jax} does not work with jaxlib {jaxlib}: it wants {accepted}", advice
    if len(majors) > 1:
        both = listed([f"{name} {version}" for name, version in sorted(plugins.items())])
        advice = f"pip uninstall jax-cuda{min(majors)}-plugin jax-cuda{min(majors)}-pjrt"
        return YELLOW, f"two CUDA builds are installed, and JAX uses one: {both}", advice
    strays = {name: version for name, version in plugins.items() if Version(version) != Version(jaxlib)}
    if strays:
        named = listed([f"{name} {version}" for name, version in sorted(strays.items())])
        return RED, f"jaxlib is {jaxlib}, and {named}: JAX will not use the GPU with it", advice
    if majors and len(plugins) < 2:
        return RED, f"{listed(sorted(plugins))} without its other half: JAX cannot use the GPU", advice
    if not majors:
        return GREEN, f"jax {jax}, jaxlib {jaxlib}: the build for CPUs"
    (major,) = majors
    names = {"cuDNN": f"nvidia-cudnn-cu{major}", "NCCL": f"nvidia-nccl-cu{major}"}
    libraries = listed([f"{what} {installed[name]}" for what, name in names.items() if name in installed])
    return GREEN, f"jax {jax}, jaxlib {jaxlib}: the build for CUDA {major}, with {libraries}"


def _requirements() -> list[str]:
    """The lines of requirements.txt in a source tree, else the requirements of the installed package."""
    file = Path(mjax.__file__).parents[1] / "requirements.txt"
    if file.is_file():
        lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
        return [line for line in lines if line]
    return [line for line in metadata.requires("mjax") or [] if "extra ==" not in line]
