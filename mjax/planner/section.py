"""One part of a plan: printed by `mjax plan`, and stored in `--json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Section:
    """One part of a plan.

    Attributes:
      title: its headline.
      values: for --json, plain values only.
      lines: printed below the headline.
    """

    title: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The section as printed."""
        return "\n".join([f"--- {self.title} ---", *self.lines])


def named_rows(rows: Mapping[str, Any]) -> list[str]:
    """One line per name and value, with aligned values."""
    width = max(map(len, rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> list[str]:
    """Lines of a table, with at least two spaces between columns.

    Args:
      header: one word per column.
      rows: one cell per column.
      left: how many of the first columns are left-aligned; numbers are right-aligned.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    for column in range(len(header)):
        width = max(len(row[column]) for row in cells)
        for row in cells:
            row[column] = row[column].ljust(width) if column < left else row[column].rjust(width)
    return ["  ".join(row).rstrip() for row in cells]


def good_to(error: float | None) -> str:
    """An error bar in words: '±30%'."""
    return "no error bar" if error is None else f"±{error:.0%}"


def layers_in_words(unrolled: bool) -> str:
    """The row of a plan that says how the layers are compiled."""
    return "one after the other, without a loop" if unrolled else "in a loop"
