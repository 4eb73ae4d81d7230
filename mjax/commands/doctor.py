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
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from mjax import __version__
from mjax.config import Config, load_config
from mjax.config.bounds import Bounds, check_bounds
from mjax.doctor import FIGURE, GREEN, RED, YELLOW, Finding, host, software
from mjax.doctor import driver as nvidia
from mjax.doctor.child import ON_DEVICES, ON_DISK, run_in_child
from mjax.utils import packages

# A word and a sign for each colour: not every terminal, log or reader sees colours.
MARKS = {
    GREEN: ("✓ ok", "green"),
    YELLOW: ("! look", "yellow"),
    RED: ("✗ fix", "bold red"),
    FIGURE: ("· shown", "default"),
}
NAME_WIDTH = 14


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
    report = Report(shown=not arguments.json)
    with _told_to_end(), report.status:
        for finding in examine(config, arguments, report):
            findings.append(finding)
            report.show(finding)
        report.close(findings)
    fine = all(finding.status != RED for finding in findings)
    if arguments.json:
        print(json.dumps({"mjax": __version__, "ok": fine, "findings": [_plain(finding) for finding in findings]}))
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
    yield from software.check_python()
    yield from software.check_packages()
    yield from software.check_jax()
    cuda = _or(None, packages.cuda_build)
    report.begin("driver")
    driver = _or(nvidia.Driver(problem="the GPUs of this machine could not be listed"), nvidia.read_driver)
    yield from nvidia.check_driver(driver, cuda)
    yield from nvidia.check_libraries(cuda=cuda)
    yield from nvidia.check_visible(driver)
    report.begin("flags")
    environment = dict(os.environ)
    yield from software.check_flags(environment, limit)  # later checks run without the flags that crash a process
    yield from host.check_processes()

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
    yield from host.check_memory(config)
    yield from host.check_shared_memory(nvidia.visible_gpus(driver))
    yield from host.check_open_files()
    yield from run_in_child(ON_DISK, settings, environment, limit, report.begin)


def _or(otherwise, ask: Callable):
    """Return `ask()`, or `otherwise` if it fails: a missing fact must not end the checks that need it."""
    try:
        return ask()
    except Exception:
        return otherwise


class Report:
    """Prints findings and, on a terminal inside `status`, the current check below them.

    With `shown` false it prints nothing, for --json.
    """

    def __init__(self, shown: bool):
        self.console = Console(highlight=False, soft_wrap=True, quiet=not shown)
        self.status = self.console.status("starting …")

    def begin(self, check: str) -> None:
        """Show the name of the current check."""
        self.status.update(f"checking {check} …")

    def show(self, finding: Finding) -> None:
        """Print one finding, and below it what to do."""
        mark, style = MARKS[finding.status]
        line = Text(f"{mark:<8}", style=style)
        line.append(f"{finding.check:<{NAME_WIDTH}}", style="bold")
        indent = " " * (8 + NAME_WIDTH)
        line.append(self._fold(finding.found, indent), style="default")
        if finding.advice:
            line.append(f"\n{indent}→ " + self._fold(finding.advice, indent + "  "), style="default")
        self.console.print(line)

    def close(self, findings: list[Finding]) -> None:
        """Print the number of findings of each status."""
        count = {status: sum(finding.status == status for finding in findings) for status in MARKS}
        parts = [f"{count[GREEN]} ok", f"{count[YELLOW]} to look at", f"{count[RED]} to fix"]
        style = MARKS[RED if count[RED] else YELLOW if count[YELLOW] else GREEN][1]
        end = "fix what is marked ✗ before training" if count[RED] else "ready to train"
        self.console.print(Text(f"\n{', '.join(parts)}: {end}", style=style))

    def _fold(self, text: str, indent: str) -> str:
        """Wrapped to the terminal's width; whole lines elsewhere, for grep."""
        if not self.console.is_terminal:
            return text
        width = max(40, self.console.width - len(indent))
        return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False).replace("\n", f"\n{indent}")
