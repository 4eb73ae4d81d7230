"""`mjax doctor`: the checks and their order.

First the checks that need no device, then JAX in a child process, then the disk. This process imports no JAX, so
a broken installation cannot stop it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mjax import __version__
from mjax.config import Config, load_config
from mjax.config.bounds import Bounds, check_bounds
from mjax.doctor import driver as nvidia
from mjax.doctor import flags, host, software
from mjax.doctor.child import run_in_child
from mjax.doctor.finding import RED, Finding, guarded
from mjax.doctor.probe import ON_DEVICES, ON_DISK
from mjax.doctor.report import Report
from mjax.utils import packages


@dataclass(frozen=True)
class DoctorArguments:
    """Check that this installation and this machine can train, and suggest fixes. Exit code 1 if a check is red, else
    0."""

    config: str | None = None
    """Also check that this config can run (attention, disk space for checkpoints): a name in configs/, or a .py
    file."""
    runs: Path = Path("runs")
    """Folder that contains the run folders, for checkpoints; or one run folder, to resume it."""
    limit: Annotated[float, Bounds(gt=0, le=31_536_000)] = 120.0
    """Time limit of each check, in seconds; at most a year."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


def doctor(arguments: DoctorArguments) -> int:
    """Run all checks, print them, and return the exit code.

    Raises:
      UsageError: there is no such config, or the limit is out of bounds.
    """
    check_bounds(arguments)
    config = None if arguments.config is None else load_config(arguments.config)
    findings = []
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot print the marks
    with _told_to_end(), Report(shown=not arguments.json) as report:
        for finding in examine(config, arguments, report):
            findings.append(finding)
            report.show(finding)
        report.close(findings)
    fine = all(finding.status != RED for finding in findings)
    if arguments.json:
        print(json.dumps({"mjax": __version__, "ok": fine, "findings": [_plain(each) for each in findings]}))
    return 0 if fine else 1


@contextlib.contextmanager
def _told_to_end() -> Iterator[None]:
    """Exit on the signals that end a job, so that the child that uses the devices is ended too."""
    signals = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _plain(finding: Finding) -> dict:
    """A finding for JSON, which has no infinity and no NaN."""
    figures = {name: value if math.isfinite(value) else None for name, value in finding.figures.items()}
    return {**dataclasses.asdict(finding), "figures": figures}


def examine(config: Config | None, arguments: DoctorArguments, report: Report) -> Iterator[Finding]:
    """Run all checks and yield their findings."""
    limit = arguments.limit
    # --- Without JAX --------------------------------------------------------------------------------------------------
    yield from guarded("python", software.check_python)
    yield from guarded("packages", software.check_packages)
    yield from guarded("jax", software.check_jax)
    cuda = _or(None, packages.cuda_build)
    report.begin("driver")
    driver = _or(nvidia.Driver(problem="the GPUs of this machine could not be listed"), nvidia.read_driver)
    yield from guarded("driver", lambda: nvidia.check_driver(driver, cuda))
    yield from guarded("libraries", lambda: nvidia.check_libraries(cuda=cuda))
    yield from guarded("visible", lambda: nvidia.check_visible(driver))
    report.begin("flags")
    environment = dict(os.environ)

    def check_flags() -> list[Finding]:
        findings, repaired = flags.check_flags(environment, limit)
        environment.update(repaired)  # later checks run without the flags that crash a process
        return findings

    yield from guarded("flags", check_flags)
    yield from guarded("processes", host.check_processes)

    # --- On the devices -----------------------------------------------------------------------------------------------
    settings = {
        "driver": dataclasses.asdict(driver),
        "cuda": cuda,
        "config": arguments.config,
        "runs": str(arguments.runs),
        "name": Path(arguments.config or "").stem,  # the default name of a run in train.py
    }
    yield from run_in_child(ON_DEVICES, settings, environment, limit, report.begin, foundation="devices")

    # --- Around them --------------------------------------------------------------------------------------------------
    yield from guarded("memory", lambda: host.check_memory(config))
    gpus = nvidia.visible_gpus(driver)
    yield from guarded("shared memory", lambda: host.check_shared_memory(gpus))
    yield from guarded("open files", host.check_open_files)
    yield from run_in_child(ON_DISK, settings, environment, limit, report.begin)


def _or(otherwise, ask: Callable):
    """Return `ask()`, or `otherwise` if it fails: a missing fact must not end the checks that need it."""
    try:
        return ask()
    except Exception:
        return otherwise
