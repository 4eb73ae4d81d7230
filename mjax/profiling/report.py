"""The table of a profile, in words."""

from __future__ import annotations

from mjax.planner.section import table
from mjax.profiling.breakdown import Breakdown, Row
from mjax.profiling.kernels import COLLECTIVES

SHOWN = 3  # kernels of each kind
WIDTH = 64  # columns of a name


def kinds_table(found: Breakdown) -> list[str]:
    """Kinds of kernels with the longest kernels of each, in lines that add up to the step."""
    rows = []
    for kind in found.kinds:
        name = "collectives, exposed" if kind.name == COLLECTIVES else kind.name
        rows.append(_row(name, kind, found))
        rows += [_row(f"  {row.name}"[:WIDTH], row, found) for row in found.top.get(kind.name, ())[:SHOWN]]
    rows.append(_row("a step", _total(found), found))
    return table(("kind of kernel, and the longest", "ms", "share", "hidden ms", "kernels"), rows)


def parts_table(found: Breakdown) -> list[str]:
    """Parts of the model, in lines that add up to the step."""
    rows = [_row(row.name, row, found) for row in (*found.parts, _total(found))]
    return table(("part of the model", "ms", "share", "hidden ms", "kernels"), rows)


def _total(found: Breakdown) -> Row:
    return Row(
        "a step", found.milliseconds, sum(row.hidden for row in found.kinds), sum(row.kernels for row in found.kinds)
    )


def _row(name: str, row: Row, found: Breakdown) -> tuple[str, ...]:
    share = row.milliseconds / found.milliseconds
    return name, f"{row.milliseconds:,.2f}", f"{share:.1%}", f"{row.hidden:,.2f}", f"{row.kernels:,.0f}"
