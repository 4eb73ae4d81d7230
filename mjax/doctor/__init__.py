"""`mjax doctor`: checks of this installation and this machine, each by trying the real thing.

A check returns findings: one line each, its color, and what to type if it is not green.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

GREEN, YELLOW, RED, FIGURE = "green", "yellow", "red", "figure"
MEMORY_IS_TAKEN = (
    "nvidia-smi shows which process holds a GPU's memory, another doctor perhaps: wait for it or end it, or choose "
    "another GPU with CUDA_VISIBLE_DEVICES"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      check: its name, in a word or two.
      status: `green`: good. `yellow`: works, but could be better. `red`: training will fail or be wrong. `figure`: a
        measurement without a reference value.
      found: the result, in one sentence without a full stop.
      advice: the fix: a line to type, or a sentence.
      figures: measured numbers, by a name that ends in the unit; for --json.
    """

    check: str
    status: str
    found: str
    advice: str | None = None
    figures: dict[str, float] = field(default_factory=dict)


Found = tuple
"""The rest of a finding: (status, found), (status, found, advice) or (status, found, advice, figures)."""


def check(name: str) -> Callable[[Callable[..., Found | Iterable[Found] | None]], Callable[..., list[Finding]]]:
    """Make the check `name` of a function that returns or yields `Found`s, or returns None; guarded."""

    def decorate(look: Callable[..., Found | Iterable[Found] | None]) -> Callable[..., list[Finding]]:
        @functools.wraps(look)
        def findings(*arguments, **named) -> list[Finding]:
            def run() -> list[Finding]:
                result = look(*arguments, **named)
                results = [] if result is None else [result] if isinstance(result, tuple) else result
                return [one if isinstance(one, Finding) else Finding(name, *one) for one in results]

            return guarded(name, run)

        return findings

    return decorate


def guarded(name: str, run: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of `run`; if it raises, one red finding, so that it never hides the others."""
    try:
        return run()
    except Exception as error:  # any error concerns this check alone
        raised_at = traceback.extract_tb(error.__traceback__)[-1]
        advice = f"look at {raised_at.filename}, line {raised_at.lineno}; if the bug is in mjax, report it"
        text = f"could not be checked: {type(error).__name__}: {first_line(error)}"
        return [Finding(name, RED, text, advice_on(str(error), advice))]


def advice_on(message: str, otherwise: str) -> str:
    """Advice for a check that failed with the message `said`; lack of memory has its own."""
    return MEMORY_IS_TAKEN if re.search("RESOURCE_EXHAUSTED|OUT_OF_MEMORY", message) else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def gibibytes(count: float) -> str:
    """'1.5 GiB', or '64 MiB' below one."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


def listed(words: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "none"
