"""The child process of `child.py`: python -m mjax.doctor.probe SETTINGS CHECK …, a line of JSON for each check.

All that a library prints goes to stderr, so that stdout holds only those lines.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mjax.config import load_config
from mjax.doctor.driver import Driver
from mjax.doctor.finding import Finding, guarded

CHECKS = {
    "devices": ("devices:check_devices", "driver", "cuda", "complaints"),
    "device memory": ("devices:check_device_memory", "driver"),
    "attention": ("attention:check_attention", "config"),
    "numerics": ("numerics:check_numerics",),
    "matmul": ("rates:check_matmul",),
    "copy": ("rates:check_copy",),
    "all-reduce": ("rates:check_all_reduce",),
    "storage": ("storage:check_storage", "runs", "config", "name"),
    "programs": ("storage:check_programs",),
}
"""By check: MODULE:FUNCTION in mjax/doctor, imported when it runs, and the settings it takes."""
ON_DISK = ("storage", "programs")
ON_DEVICES = tuple(name for name in CHECKS if name not in ON_DISK)


class _Complaints(logging.Handler):
    """Keeps the last line of each log record: of a stack trace, the exception."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).strip().splitlines()[-1])


def main(arguments: list[str]) -> None:
    """Run the named checks and write their findings."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    complaints = _Complaints()
    logging.getLogger("jax").addHandler(complaints)
    given = json.loads(arguments[0])
    lists = {name: tuple(value) for name, value in given["driver"].items() if isinstance(value, list)}
    settings = given | {
        "driver": Driver(**given["driver"] | lists),
        "config": None if given["config"] is None else load_config(given["config"]),
        "runs": Path(given["runs"]),
        "complaints": complaints.lines,
    }
    for name in arguments[1:]:
        findings = guarded(name, lambda name=name: _run(name, settings))
        print(json.dumps([asdict(finding) for finding in findings]), file=answers, flush=True)


def _run(name: str, settings: dict[str, Any]) -> list[Finding]:
    place, *needed = CHECKS[name]
    module, function = place.split(":")
    run = getattr(importlib.import_module(f"mjax.doctor.{module}"), function)
    return run(*(settings[each] for each in needed))


if __name__ == "__main__":
    main(sys.argv[1:])
