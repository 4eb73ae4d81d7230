"""XLA_FLAGS: an unknown flag ends the process without a Python error, so a child process tries them.

Every version of XLA drops flags; the usual cause is a line copied from an old recipe.
"""

from __future__ import annotations

import difflib
import importlib.util
import mmap
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mjax.doctor.child import SILENT
from mjax.doctor.finding import GREEN, RED, YELLOW, Finding, Found, listed

# Flags are read when the first backend starts; the CPU's starts soonest and reads all of them.
READ_FLAGS = "import jax; jax.devices()"


def check_flags(environment: Mapping[str, str], limit: float) -> tuple[list[Finding], dict[str, str]]:
    """Try to start XLA with the flags that are set.

    Args:
      limit: seconds for a start.

    Returns:
      The findings, and an environment in which XLA starts: the given one without the flags that would end the process.
    """
    repaired = dict(environment)
    try:
        return [Finding("flags", *_judge(repaired, limit))], repaired
    except subprocess.TimeoutExpired:
        return [Finding("flags", RED, f"JAX gave no answer in {limit:g} s", SILENT)], dict(environment)


def _judge(environment: dict[str, str], limit: float) -> Found:
    """The result; removes from `environment` the flags that would end the process."""
    flags = environment.get("XLA_FLAGS", "").strip()
    if not flags:
        return GREEN, "XLA_FLAGS is not set"
    said = refusal(flags, environment, limit)
    if said is None:
        return GREEN, f"XLA accepts XLA_FLAGS={flags}"
    words = shlex.split(flags)
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", said)
    value = re.search(r"Couldn't interpret value (.*) for flag (\w+)", said)
    if unknown:
        wrong = [word.split("=")[0] for word in shlex.split(unknown[1])]
        advice = "; ".join(_instead(flag, environment, limit) for flag in wrong)
        them = "it" if len(wrong) == 1 else "them"
        what = f"XLA does not know {listed(wrong)}, and aborts every process that has {them} set"
    elif value:
        wrong = [f"--{value[2]}"]
        advice = f"give --{value[2]} a valid value, or remove it from XLA_FLAGS"
        what = f"XLA cannot read the value {value[1]!r} of --{value[2]}, and aborts every process that has it set"
    elif not flags.startswith("--"):
        wrong, advice = None, "begin each flag with --"
        what = f"XLA takes {words[0]!r} in XLA_FLAGS for the name of a file, and cannot open it"
    elif refusal("", environment, limit) is not None:
        found = f"not tried: JAX does not start without XLA_FLAGS either: {said.splitlines()[-1]}"
        return YELLOW, found, "fix the line devices first"
    else:
        wrong, advice = None, "unset XLA_FLAGS"
        what = f"XLA does not start with XLA_FLAGS={flags}: {said.splitlines()[-1]}"
    left = "" if wrong is None else " ".join(word for word in words if word.split("=")[0] not in wrong)
    if left and refusal(left, environment, limit) is not None:
        left = ""
    environment["XLA_FLAGS"] = left
    return RED, what, advice


def known_flags() -> list[str]:
    """Words in XLA's library that look like flags; some are not."""
    spec = importlib.util.find_spec("jaxlib")
    libraries = [file for place in spec.submodule_search_locations for file in Path(place).glob("*.so")] if spec else []
    found: set[bytes] = set()
    for file in libraries:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found.update(re.findall(rb"\0(xla_[a-z0-9_]{4,80})(?=\0)", content))
    return sorted(name.decode() for name in found)


def _instead(flag: str, environment: Mapping[str, str], limit: float) -> str:
    """Advice for an unknown flag: the nearest one that XLA accepts, if any."""
    for name in difflib.get_close_matches(flag.lstrip("-"), known_flags(), n=2, cutoff=0.7):
        said = refusal(f"--{name}=true", environment, limit)
        if said is None or "Unknown flag" not in said:
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
