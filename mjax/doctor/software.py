"""Python, packages and XLA_FLAGS: installed versions must work together, and XLA must know the flags.

No package is imported, so broken ones can be examined too. An unknown flag ends the process without a Python error, so
a child process tries them; every version of XLA drops flags, and the usual cause is a line copied from an old recipe.
"""

from __future__ import annotations

import difflib
import importlib.util
import mmap
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import mjax
from mjax.doctor import GREEN, RED, YELLOW, Found, check, listed
from mjax.doctor.child import SILENT
from mjax.utils import packages

PYTHON = SpecifierSet(">=3.11")
TESTED_PYTHON = SpecifierSet("<3.14")
SHOWN = ("flax", "optax", "orbax-checkpoint", "numpy")
CUDA_BUILDS = re.compile(r"jax-cuda(\d+)-(?:plugin|pjrt)")
# Flags are read when the first backend starts; the CPU's starts soonest and reads all of them.
READ_FLAGS = "import jax; jax.devices()"


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
            problem = (YELLOW, "newer than tested with mjax") if newer else (RED, "too old or excluded")
            wrong.setdefault(problem, []).append(requirement)
    for (status, problem), group in wrong.items():
        versions = ((r, installed.get(canonicalize_name(r.name))) for r in group)
        named = [f"{r.name} {version} ({r.specifier} is wanted)" if version else r.name for r, version in versions]
        advice = "pip install " + " ".join(f'"{r.name}{r.specifier}"' for r in group)
        yield status, f"{problem}: {listed(named)}", advice
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


# --- XLA_FLAGS --------------------------------------------------------------------------------------------------------


@check("flags")
def check_flags(environment: dict[str, str], limit: float) -> Found:
    """Try to start XLA with the flags that are set, and remove from `environment` those that end the process.

    Args:
      environment: of a process; one that starts with it afterwards has only flags that XLA accepts.
      limit: seconds for a start.
    """
    flags = environment.get("XLA_FLAGS", "").strip()
    if not flags:
        return GREEN, "XLA_FLAGS is not set"
    try:
        message = refusal(flags, environment, limit)
        if message is not None:
            return _repair(flags, message, environment, limit)
    except subprocess.TimeoutExpired:
        return RED, f"JAX gave no answer in {limit:g} s", SILENT
    return GREEN, f"XLA accepts XLA_FLAGS={flags}"


def _repair(flags: str, message: str, environment: dict[str, str], limit: float) -> Found:
    """Remove the flags that XLA refuses with the message `said`, and explain them."""
    words = shlex.split(flags)
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", message)
    value = re.search(r"Couldn't interpret value (.*) for flag (\w+)", message)
    if unknown:
        wrong = [word.split("=")[0] for word in shlex.split(unknown[1])]
        advice = "; ".join(_instead(flag, environment, limit) for flag in wrong)
        pronoun = "it" if len(wrong) == 1 else "them"
        text = f"XLA does not know {listed(wrong)}, and aborts every process that has {pronoun} set"
    elif value:
        wrong = [f"--{value[2]}"]
        advice = f"give --{value[2]} a valid value, or remove it from XLA_FLAGS"
        text = f"XLA cannot read the value {value[1]!r} of --{value[2]}, and aborts every process that has it set"
    elif not flags.startswith("--"):
        wrong, advice = None, "begin each flag with --"
        text = f"XLA takes {words[0]!r} in XLA_FLAGS for the name of a file, and cannot open it"
    elif refusal("", environment, limit) is not None:
        text = f"not tried: JAX does not start without XLA_FLAGS either: {message.splitlines()[-1]}"
        return YELLOW, text, "fix the line devices first"
    else:
        wrong, advice = None, "unset XLA_FLAGS"
        text = f"XLA does not start with XLA_FLAGS={flags}: {message.splitlines()[-1]}"
    accepted = "" if wrong is None else " ".join(word for word in words if word.split("=")[0] not in wrong)
    if accepted and refusal(accepted, environment, limit) is not None:
        accepted = ""
    environment["XLA_FLAGS"] = accepted
    return RED, text, advice


def known_flags() -> list[str]:
    """Words in XLA's library that look like flags; some are not."""
    spec = importlib.util.find_spec("jaxlib")
    folders = spec.submodule_search_locations if spec else []
    names: set[bytes] = set()
    for file in (file for folder in folders for file in Path(folder).glob("*.so")):
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names.update(re.findall(rb"\0(xla_[a-z0-9_]{4,80})(?=\0)", content))
    return sorted(name.decode() for name in names)


def _instead(flag: str, environment: Mapping[str, str], limit: float) -> str:
    """Advice for an unknown flag: the nearest one that XLA accepts, if any."""
    for name in difflib.get_close_matches(flag.lstrip("-"), known_flags(), n=2, cutoff=0.7):
        message = refusal(f"--{name}=true", environment, limit)
        if message is None or "Unknown flag" not in message:
            return f"remove {flag} from XLA_FLAGS; the nearest known flag is --{name}"
    return f"remove {flag} from XLA_FLAGS"


def refusal(flags: str, environment: Mapping[str, str], limit: float) -> str | None:
    """The message of a process that these flags end; None if it starts.

    Raises:
      subprocess.TimeoutExpired: neither happens in `limit` seconds.
    """
    variables = {**environment, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", READ_FLAGS]
    child = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=limit)
    return (child.stderr.strip() or f"it ended with {child.returncode}") if child.returncode else None
