"""The child's side of `child.py`: python -m mjax.doctor.probe SETTINGS CHECK …, a line of JSON for each check.

Whatever a library prints goes to standard error, so that standard output holds those lines alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mjax.config import Config, from_dict
from mjax.doctor.child import answer
from mjax.doctor.driver import Driver
from mjax.doctor.finding import Finding, guarded


@dataclass(frozen=True)
class Settings:
    """What the parent found out, and what the person asked for."""

    driver: Driver
    cuda: int | None
    config: Config | None
    runs: Path
    name: str
    """Of the run."""
    complaints: list[str]
    """What JAX logs; it grows."""


def _devices(settings: Settings) -> list[Finding]:
    from mjax.doctor.devices import check_devices

    return check_devices(settings.driver, settings.cuda, settings.complaints)


def _device_memory(settings: Settings) -> list[Finding]:
    from mjax.doctor.devices import check_device_memory

    return check_device_memory(settings.driver)


def _attention(settings: Settings) -> list[Finding]:
    from mjax.doctor.attention import check_attention

    return check_attention(settings.config)


def _numerics(settings: Settings) -> list[Finding]:
    from mjax.doctor.numerics import check_numerics

    return check_numerics()


def _matmul(settings: Settings) -> list[Finding]:
    from mjax.doctor.rates import check_matmul

    return check_matmul()


def _copy(settings: Settings) -> list[Finding]:
    from mjax.doctor.rates import check_copy

    return check_copy()


def _all_reduce(settings: Settings) -> list[Finding]:
    from mjax.doctor.rates import check_all_reduce

    return check_all_reduce()


def _storage(settings: Settings) -> list[Finding]:
    from mjax.doctor.storage import check_storage

    return check_storage(settings.runs, settings.config, settings.name)


CHECKS: dict[str, Callable[[Settings], list[Finding]]] = {
    "devices": _devices,
    "device memory": _device_memory,
    "attention": _attention,
    "numerics": _numerics,
    "matmul": _matmul,
    "copy": _copy,
    "all-reduce": _all_reduce,
    "storage": _storage,
}
ON_DEVICES = tuple(name for name in CHECKS if name != "storage")


class _Complaints(logging.Handler):
    """Keeps the last line of what is logged: of a stack trace, the exception."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record).strip().splitlines()[-1])


def main(arguments: list[str]) -> None:
    """Run the checks that are named, and write what each found."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    complaints = _Complaints()
    logging.getLogger("jax").addHandler(complaints)
    given = json.loads(arguments[0])
    driver = Driver(**{name: tuple(v) if isinstance(v, list) else v for name, v in given["driver"].items()})
    config = None if given["config"] is None else from_dict(given["config"])
    for name in arguments[1:]:

        def run(name=name):
            settings = Settings(driver, given["cuda"], config, Path(given["runs"]), given["name"], complaints.lines)
            return CHECKS[name](settings)

        print(answer(guarded(name, run)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
