"""`mjax doctor`: the command and its report.

This process imports no JAX, so a broken installation cannot stop it.
"""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from mjax import __version__
from mjax.config import load_config
from mjax.config.bounds import Bounds
from mjax.doctor import FIGURE, GREEN, RED, YELLOW, Finding, MachineInfo
from mjax.doctor.checks import examine

# A word and a sign for each color: not every terminal, log or reader sees colors.
MARKS = {
    GREEN: ("✓ ok", "green"),
    YELLOW: ("! warn", "yellow"),
    RED: ("✗ fail", "bold red"),
    FIGURE: ("· info", "default"),
}
MARK_WIDTH, NAME_WIDTH = 8, 14


@dataclass(frozen=True)
class DoctorArguments:
    """Check that this installation and this machine can train, and suggest fixes. Exit code 1 if a check is red, else
    0."""

    config: str | None = None
    """Also check that this config can run (attention, space for checkpoints): a name in configs/, or a .py file."""
    runs: Path = Path("runs")
    """Folder of run folders, to check space for checkpoints, or one run folder, to check that it can resume."""
    timeout: Annotated[float, Bounds(gt=0, le=31_536_000)] = 120.0
    """Time limit per check, in seconds, at most a year."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


def doctor(arguments: DoctorArguments) -> int:
    """Run all checks, print them, and return the exit code.

    Raises:
      UsageError: there is no such config, or the limit is out of bounds.
    """
    config = None if arguments.config is None else load_config(arguments.config)
    console = Console(highlight=False, soft_wrap=True, quiet=arguments.json)
    findings = []
    with console.status("starting …") as status:
        machine = MachineInfo(config, arguments.config or "", arguments.runs, arguments.timeout)
        for finding in examine(machine, lambda check: status.update(f"checking {check} …")):
            findings.append(finding)
            _show(console, finding)
    counts = Counter(finding.status for finding in findings)
    bad = counts[RED]
    end = "fix the lines marked ✗ before training" if bad else "ready to train"
    console.print(f"\n{counts[GREEN]} ok, {counts[YELLOW]} warnings, {bad} failed: {end}")
    if arguments.json:
        print(json.dumps({"mjax": __version__, "ok": not bad, "findings": [_plain(finding) for finding in findings]}))
    return 1 if bad else 0


def _plain(finding: Finding) -> dict:
    """A finding for JSON, which has no infinity and no NaN."""
    figures = {name: value if math.isfinite(value) else None for name, value in finding.figures.items()}
    return {**dataclasses.asdict(finding), "figures": figures}


def _show(console: Console, finding: Finding) -> None:
    """Print a finding, and below it the fix, in whole lines for grep."""
    mark, style = MARKS[finding.status]
    text = Text.assemble((f"{mark:<{MARK_WIDTH}}", style), (f"{finding.check:<{NAME_WIDTH}}", "bold"), finding.message)
    if finding.advice:
        text.append(f"\n{'':{MARK_WIDTH + NAME_WIDTH}}→ {finding.advice}")
    console.print(text)
