"""What `mjax plan --compile` prints: memory, collectives as scheduled, kernels, and the ledger beside them."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mjax.config import Config
from mjax.hardware import GIB, gpu_named
from mjax.planner.compile import Compilation, check_compile, compile_step, versions
from mjax.planner.hlo import ScheduledCollective
from mjax.planner.memory import predict_memory
from mjax.planner.saved_program import check_save, save_program
from mjax.planner.section import Section, named_rows, table

if TYPE_CHECKING:
    from mjax.planner.comms import Collective  # imports JAX

Key = tuple[tuple[str, ...], str, str]
"""Axes, kind and type of collectives."""
Counts = Mapping[Key, tuple[int, int]]
"""Calls and bytes a step, for each."""


def check_arguments(config: Config, gpu: str | None, per_server: int, file: Path | None) -> None:
    """Refuse before JAX is imported what `compile_and_tell` could not do.

    Raises:
      UsageError: one sentence that says what to type.
    """
    check_compile(config, gpu, per_server)
    if file is not None:
        check_save(file)


def compile_and_tell(config: Config, gpu: str, per_server: int, file: Path | None = None) -> Section:
    """Compile the step of a checked config, save it where that is asked for, and say what became of it.

    Args:
      config, gpu, per_server: as for `compile_step`.
      file: where to save the step.
    """
    from mjax.planner.comms import ledger

    with announcing() as announce:
        compiled = compile_step(config, gpu, per_server, announce)
        formula = predict_memory(config, gpu_named(gpu).compute_capability).total
        section = compile_section(compiled, totals(ledger(config).records), formula)
        if file is not None:
            announce(f"writing {file}")
            facts = {
                name: section.values[name]
                for name in ("gpu", "device_kind", "attention", "memory", "versions", "xla_flags")
            }
            save_program(file, config, compiled.step, "cuda", facts, compiled.text)
    section.values["program"] = None if file is None else str(file)
    if file is not None:
        section.lines.extend(["", f"saved: {file}"])
    return section


def compile_section(compiled: Compilation, expected: Counts, formula: float) -> Section:
    """The section of a plan.

    Args:
      compiled: what is told of.
      expected: what the ledger counts, in the same way: every branch taken.
      formula: bytes on a device, as `predict_memory` says.
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
def announcing() -> Iterator[Callable[[str], None]]:
    """Tell on the error stream what is being done, and on a terminal that it is still being done."""
    from rich.progress import TextColumn, TimeElapsedColumn

    from mjax.progress import progress

    if not sys.stderr.isatty():
        yield lambda what: print(f"mjax: {what} …", file=sys.stderr, flush=True)
        return
    figures = TimeElapsedColumn(), TextColumn("{task.description}")
    with progress("compiling", None, *figures, transient=True) as advance:
        yield lambda what: advance(0, description=what)


def totals(records: Iterable[Collective]) -> Counts:
    """What the ledger counts, as the text of a program counts it: calls and bytes with every branch taken."""
    counted: dict[Key, tuple[int, int]] = {}
    for record in records:
        key = record.axes, record.kind, record.dtype
        calls, size = counted.get(key, (0, 0))
        counted[key] = calls + record.calls, size + record.calls * record.operand_bytes
    return counted


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


def _memory(compiled: Compilation, formula: float) -> list[str]:
    memory = compiled.memory
    rows = [
        ("arguments: state and batch", memory.arguments),
        ("outputs that need room of their own", memory.outputs - memory.aliased),
        ("temporaries", memory.temporaries),
        ("in all", memory.total),
    ]
    lines = table(("memory of a device", "GiB"), [(name, f"{size / GIB:.2f}") for name, size in rows])
    difference = formula / memory.total - 1
    lines.append(
        f"The formula says {formula / GIB:.2f} GiB, {difference:+.1%}. The GPU has {compiled.gpu_memory / GIB:.1f}."
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
    header = ("collectives", "over", "type", "calls", "put in", "beside products", "other kernels", "nothing")
    cells = []
    for (axes, kind, dtype), row in rows.items():
        shares = [f"{row[what] / row['bytes']:.0%}" for what in ("products", "kernels", "nothing")]
        cells.append((kind, " × ".join(axes), dtype, f"{row['calls']:,}", _size(row["bytes"]), *shares))
    lines = table(header, cells, left=3)
    if not cells:
        lines = ["collectives: none, on a mesh of one device"]
    else:
        lines.append("The GPU waits for what runs beside no matrix product or attention, nearly for all of its time.")
    if any(row["calls_in_branches"] for row in rows.values()):
        lines.append("Calls are those of a stage that runs every pass in every tick: a compiled program says no more.")
    return lines


def _size(count: float) -> str:
    """'23.8 GiB'."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


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
        rows.append(
            (kind, " × ".join(axes), dtype, f"{calls:,}", f"{calls_found:,}", f"{size:,}", f"{size_found:,}", verdict)
        )
    header = ("ledger and compiled", "over", "type", "calls", "compiled", "bytes put in", "compiled", "")
    return table(header, rows, left=3) if rows else []
