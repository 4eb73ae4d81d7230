"""What `mjax plan --compile` prints: memory, collectives as scheduled, kernels, and the ledger beside them."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from mjax.planner.compile import Compilation, versions
from mjax.planner.hlo import ScheduledCollective
from mjax.planner.section import Section, named_rows, table

GIB = 2**30

Key = tuple[tuple[str, ...], str, str]
"""Axes, kind and type of collectives."""
Counts = Mapping[Key, tuple[int, int]]
"""Calls and bytes a step, for each."""


def compile_section(compiled: Compilation, expected: Counts, formula: float | None = None) -> Section:
    """The section of a plan.

    Args:
      compiled: what is told of.
      expected: what the ledger counts, in the same way: every branch taken.
      formula: bytes on a device by the planner's formula, where there is one.
    """
    memory, rows = compiled.memory, _rows(compiled.program.collectives)
    found = {key: (row["calls"], row["bytes"]) for key, row in rows.items()}
    values = {
        "gpu": compiled.gpu,
        "device_kind": compiled.device_kind,
        "servers": compiled.servers,
        "attention": compiled.attention,
        "seconds": {"tracing": compiled.tracing, "compiling": compiled.compiling},
        "resident_bytes": compiled.resident,
        "memory": {
            "arguments": memory.arguments,
            "outputs": memory.outputs,
            "aliased": memory.aliased,
            "temporaries": memory.temporaries,
            "peak": memory.peak,
            "total": memory.total,
            "formula": formula,
            "gpu": compiled.gpu_memory,
        },
        "collectives": [
            {"axes": list(axes), "kind": kind, "dtype": dtype, **row} for (axes, kind, dtype), row in rows.items()
        ],
        "ledger": [
            {
                "axes": list(key[0]),
                "kind": key[1],
                "dtype": key[2],
                "ledger": {"calls": expected.get(key, (0, 0))[0], "bytes": expected.get(key, (0, 0))[1]},
                "compiled": {"calls": found.get(key, (0, 0))[0], "bytes": found.get(key, (0, 0))[1]},
            }
            for key in sorted(expected.keys() | found.keys())
        ],
        "kernels": {
            kind: {"different": compiled.program.kernels[kind], "launches": launches}
            for kind, launches in compiled.program.launches.items()
        },
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    lines = [
        *_about(compiled),
        "",
        *_memory(compiled, formula),
        "",
        *_collectives(rows),
        "",
        *_kernels(compiled),
        "",
        *_comparison(expected, found),
    ]
    return Section(f"Compiled for {compiled.device_kind}", values, lines)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Tell on the error stream what is being done, and on a terminal that it is still being done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda what: print(f"mjax: {what} …", file=sys.stderr, flush=True)
        return
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as shown:
        task = shown.add_task("")
        yield lambda what: shown.update(task, description=what)


# --- The parts --------------------------------------------------------------------------------------------------------


def _about(compiled: Compilation) -> list[str]:
    names = ", ".join(f"{package} {number}" for package, number in versions().items())
    return named_rows(
        {
            "compiled by": names,
            "XLA flags": os.environ.get("XLA_FLAGS") or "none",
            "attention": compiled.attention,
            "took": f"{compiled.tracing:.1f} s tracing, {compiled.compiling:.1f} s compiling; this process took at "
            f"most {compiled.resident / GIB:.1f} GiB",
        }
    )


def _memory(compiled: Compilation, formula: float | None) -> list[str]:
    memory = compiled.memory
    rows = [
        ("arguments: state and batch", memory.arguments),
        ("outputs that need room of their own", memory.outputs - memory.aliased),
        ("temporaries", memory.temporaries),
        ("in all", memory.total),
    ]
    lines = table(("memory of a device", "GiB"), [(name, f"{size / GIB:.2f}") for name, size in rows])
    if formula is not None:
        lines.append(
            f"the formula says {formula / GIB:.2f} GiB, {formula / memory.total - 1:+.1%}; of {compiled.gpu_memory / GIB:.1f}"
            " GiB that the GPU has"
        )
    return lines


def _rows(collectives: list[ScheduledCollective]) -> dict[Key, dict]:
    """For each (axes, kind, dtype): calls and bytes a step, of these bytes those beside matrix products, beside other
    kernels only and beside nothing, and the calls that stand in branches."""
    rows: dict[Key, dict] = defaultdict(
        lambda: {"calls": 0, "bytes": 0, "products": 0, "kernels": 0, "nothing": 0, "calls_in_branches": 0}
    )
    for c in sorted(collectives, key=lambda c: (c.axes, c.kind, c.dtype)):
        row = rows[c.axes, c.kind, c.dtype]
        row["calls"] += c.calls
        row["bytes"] += c.count * c.bytes
        row[c.overlap] += c.count * c.bytes
        row["calls_in_branches"] += c.calls if c.conditional else 0
    return dict(rows)


def _collectives(rows: dict[Key, dict]) -> list[str]:
    header = ("collectives", "over", "type", "calls", "GiB put in", "beside products", "other kernels", "nothing")
    cells = []
    for (axes, kind, dtype), row in rows.items():
        shares = [f"{row[what] / row['bytes']:.0%}" for what in ("products", "kernels", "nothing")]
        cells.append((kind, " × ".join(axes), dtype, row["calls"], f"{row['bytes'] / GIB:.3f}", *shares))
    lines = table(header, cells, left=3)
    if not cells:
        lines = ["collectives: none, on a mesh of one device"]
    elif any(row["calls_in_branches"] for row in rows.values()):
        lines.append("calls as if every stage ran every pass in every tick: a compiled program does not say more")
    return lines


def _kernels(compiled: Compilation) -> list[str]:
    program = compiled.program
    rows = [
        (kind, program.kernels[kind], f"{program.launches[kind]:,}")
        for kind in sorted(program.launches, key=lambda kind: -program.launches[kind])
    ]
    return table(("kernels", "different", "launches a step"), rows)


def _comparison(expected: Counts, found: Counts) -> list[str]:
    """The ledger beside the compiled program, in bytes."""
    rows = []
    for key in sorted(expected.keys() | found.keys()):
        (calls, size), (calls_found, size_found) = expected.get(key, (0, 0)), found.get(key, (0, 0))
        axes, kind, dtype = key
        verdict = "equal" if size == size_found else f"{size_found - size:+,}"
        rows.append((kind, " × ".join(axes), dtype, f"{calls:,}", f"{calls_found:,}", f"{size:,}", f"{size_found:,}", verdict))
    header = ("bytes put in", "over", "type", "calls, ledger", "compiled", "bytes, ledger", "compiled", "")
    return table(header, rows, left=3) if rows else []
