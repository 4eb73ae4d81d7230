"""Shared by the benchmarks' command lines: invalid input is refused before anything runs, in one sentence, as in
mjax."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import NamedTuple

from mjax.errors import RunError, UsageError, check_folder

COLLECTED = "MJAX_BENCHMARK_FIGURES"
"""Environment variable with the file to which a benchmark that ratios.py started adds its figures."""


class Figure(NamedTuple):
    """A measured number and its goal: at most that, or with `least` at least; `number` is its name in numbers.toml."""

    line: str
    value: float
    unit: str
    goal: float
    least: bool = False
    number: str = ""

    @property
    def reached(self) -> bool:
        return self.value >= self.goal if self.least else self.value <= self.goal

    @property
    def text(self) -> str:
        """The number as pages show it, without the peer's name."""
        return f"{self.value:.2f} ×" if self.unit.startswith("×") else f"{self.value:.3g} {self.unit}"


def collect(*figures: Figure) -> None:
    """Give metrics to ratios.py, if it started this benchmark."""
    if file := os.environ.get(COLLECTED):
        with open(file, "a") as lines:
            lines.writelines(json.dumps(figure._asdict()) + "\n" for figure in figures)


def in_one_sentence(main: Callable[[], int]) -> Callable[[], int]:
    """`main`, with a UsageError printed as one sentence with exit code 2, and a RunError with exit code 1."""

    @wraps(main)
    def command() -> int:
        try:
            return main()
        except (UsageError, RunError) as error:
            print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
            return 2 if isinstance(error, UsageError) else 1

    return command


def check_counts(arguments: object, *names: str) -> None:
    """Refuse flags of these names with a value below 1; None means not given.

    Raises:
      UsageError: there is one.
    """
    for name in names:
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


def check_output(flag: str, file: Path) -> None:
    """Refuse an output file that cannot be written, before the benchmark runs.

    Raises:
      UsageError: it is a folder, or its folder does not exist.
    """
    if file.is_dir():
        raise UsageError(f"{flag} {file} is a folder; name a file")
    check_folder(flag, file)


def check_peers(*packages: str) -> None:
    """Refuse to run without the packages that mjax is compared with.

    Raises:
      UsageError: one is not installed.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not installed; type: pip install -r requirements-parity.txt")
