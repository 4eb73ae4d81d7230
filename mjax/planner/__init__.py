"""Predictions of a run before it starts: memory, communication, time. No device is used.

A plan has one section for each part. Nothing here imports JAX, so flags are checked before any slow import.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Section:
    """One part of a plan.

    Attributes:
      title: its headline.
      values: for --json, plain values only.
      lines: printed below the headline.
      answer: rows that a plan shows without --details.
    """

    title: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The section as printed."""
        return "\n".join([f"--- {self.title} ---", *self.lines])


def error_bar(error: float | None) -> str:
    """'±30%', or 'no error bar'."""
    return "no error bar" if error is None else f"±{error:.0%}"
