"""`mjax doctor`: checks of this installation and this machine, each by trying the real thing.

A check is a function of `MachineInfo`, listed in `checks.py`. It lists rows of a condition and a finding and returns
the `first` finding whose condition holds: one line of the report, its color, and the line to type if it is not green.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mjax.config import Config

GREEN, YELLOW, RED, FIGURE = "green", "yellow", "red", "figure"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      status: `green`: good. `yellow`: works, but could be better. `red`: training will fail or be wrong. `figure`: a
        measurement without a reference value.
      message: the result, in one sentence without a full stop.
      advice: the fix: a line to type, or a sentence.
      figures: measured numbers, by a name that ends in the unit; for --json.
      check: name of the check.
    """

    status: str
    message: str
    advice: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    check: str = ""


@dataclass(frozen=True)
class MachineInfo:
    """Input of all checks.

    Attributes:
      config: to check as well; `name` is its name or file.
      runs: folder of the run folders, or of one run.
      limit: seconds for each check.
      environment: variables of a training run.
    """

    config: Config | None = None
    name: str = ""
    runs: Path = Path("runs")
    limit: float = 120.0
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


def first(good: str, *rows: tuple[Any, ...], **figures: float) -> Finding:
    """The finding of the first row whose condition holds; `good`, in green, if none does.

    Args:
      rows: condition, status, message and advice, if there is any.
      figures: of the finding.
    """
    return next((Finding(*row, figures=figures) for holds, *row in rows if holds), Finding(GREEN, good, None, figures))
