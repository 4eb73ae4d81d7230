"""The section of `mjax plan --compile`: memory, collectives as scheduled, kernels, and the ledger beside them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mjax.config import Config
from mjax.hardware import GIB, gpu_named
from mjax.planner.comms import Collective, axes_name, human_bytes, ledger
from mjax.planner.compile import Compilation, check_compile, compile_step, versions
from mjax.planner.hlo import ScheduledCollective
from mjax.planner.memory import Memory, predict_memory
from mjax.planner.roofline import roofline
from mjax.planner.saved_program import check_save, save_program
from mjax.planner.section import Section, named_rows, table
from mjax.training.flops import model_flops

Key = tuple[tuple[str, ...], str, str]
"""Axes, operation and dtype of collectives."""
Counts = Mapping[Key, tuple[int, int]]
"""Calls and bytes per step, for each."""
Rows = list[dict[str, Any]]


def check_arguments(config: Config, gpu: str | None, per_server: int, file: Path | None) -> None:
    """Refuse what `compile_and_tell` cannot do.

    Raises:
      UsageError: one sentence that says what to type.
    """
    check_compile(config, gpu, per_server)
    if file is not None:
        check_save(file)


def compile_and_tell(config: Config, gpu: str, per_server: int, file: Path | None = None) -> Section:
    """Compile the step of a checked config, save it on request, and report on it.

    Args:
      config, gpu, per_server: as for `compile_step`.
      file: where to save the step.
    """
    with announcing() as announce:
        compiled = compile_step(config, gpu, per_server, announce)
        formula = predict_memory(compiled.config, gpu_named(gpu).compute_capability)
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


def compile_section(compiled: Compilation, expected: Counts, formula: Memory) -> Section:
    """The section of a plan.

    Args:
      compiled: the step.
      expected: the ledger's counts, in the same way: every branch taken.
      formula: from `predict_memory`.
    """
    memory, kernels, rows = compiled.memory, compiled.program.kernels, _rows(compiled.program.collectives)
    found = {(tuple(row["axes"]), row["kind"], row["dtype"]): (row["calls"], row["bytes"]) for row in rows}
    values = {
        "gpu": compiled.gpu,
        "device_kind": compiled.device_kind,
        "servers": compiled.servers,
        "attention": compiled.attention,
        "unrolled": compiled.unrolled,
        "seconds": {"tracing": compiled.tracing, "compiling": compiled.compiling},
        "resident_bytes": compiled.resident,
        "memory": asdict(memory)
        | {"total": memory.total, "formula": formula.total, "host_formula": formula.host, "gpu": compiled.gpu_memory},
        "collectives": rows,
        "ledger": [
            _named(key)
            | {
                who: dict(zip(("calls", "bytes"), counts.get(key, (0, 0)), strict=True))
                for who, counts in (("ledger", expected), ("compiled", found))
            }
            for key in sorted(expected.keys() | found.keys())
        ],
        "kernels": {
            kernel: {"different": kernels[kernel], "launches": launches}
            for kernel, launches in compiled.program.launches.items()
        },
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    config, gpu = compiled.config, gpu_named(compiled.gpu)
    devices, compute = config.mesh.devices, config.precision.compute
    modelled = roofline(compiled.text, gpu, devices, compute)
    values["roofline"] = {
        "seconds": modelled.seconds,
        "mfu": modelled.mfu(model_flops(config) / devices, gpu, compute),
        "collectives": modelled.collectives,
        "copied_stacks": modelled.copied_stacks,
        "kinds": {kind: asdict(row) for kind, row in modelled.rows.items()},
    }
    parts = (
        _about(values),
        _memory(values["memory"], memory.outputs - memory.aliased),
        _collectives(rows),
        _kernels(values["kernels"]),
        _roofline(values["roofline"]),
        _comparison(values["ledger"]),
    )
    lines = [line for part in parts for line in ("", *part)]
    return Section(f"Compiled for {compiled.device_kind}", values, lines[1:])


@contextmanager
def announcing() -> Iterator[Callable[[str], None]]:
    """Announce each phase on stderr; on a terminal, with its elapsed time."""
    from rich.progress import TextColumn, TimeElapsedColumn

    from mjax.progress import progress

    if not sys.stderr.isatty():
        yield lambda what: print(f"mjax: {what} …", file=sys.stderr, flush=True)
        return
    columns = TimeElapsedColumn(), TextColumn("{task.description}")
    with progress("compiling", None, *columns, transient=True) as advance:
        yield lambda what: advance(0, description=what)


def totals(records: Iterable[Collective]) -> Counts:
    """The ledger's counts as in the text of a program: calls and bytes with every branch taken."""
    counted: dict[Key, tuple[int, int]] = {}
    for record in records:
        key = record.axes, record.operation, record.dtype
        calls, size = counted.get(key, (0, 0))
        counted[key] = calls + record.calls, size + record.calls * record.operand_bytes
    return counted


def _named(key: Key) -> dict[str, Any]:
    return {"axes": list(key[0]), "kind": key[1], "dtype": key[2]}


def _rows(collectives: list[ScheduledCollective]) -> Rows:
    """For each (axes, operation, dtype): calls and bytes per step, of these bytes those beside matrix products, beside
    other kernels only and beside nothing, and the calls in branches."""
    rows: dict[Key, dict] = {}
    empty = dict.fromkeys(("calls", "bytes", "products", "kernels", "nothing", "calls_in_branches"), 0)
    for c in sorted(collectives, key=lambda c: c.key):
        row = rows.setdefault(c.key, _named(c.key) | empty)
        row["calls"] += c.calls
        row["bytes"] += c.count * c.bytes
        row[c.overlap] += c.count * c.bytes
        row["calls_in_branches"] += c.calls if c.conditional else 0
    return list(rows.values())


# --- In words ---------------------------------------------------------------------------------------------------------


def _about(values: dict[str, Any]) -> list[str]:
    seconds = values["seconds"]
    rows = {
        "compiled by": ", ".join(f"{package} {number}" for package, number in values["versions"].items()),
        "XLA flags": values["xla_flags"] or "none",
        "attention": values["attention"],
        "layers": "one after the other, without a loop" if values["unrolled"] else "in a loop",
        "took": f"{seconds['tracing']:.1f} s tracing, {seconds['compiling']:.1f} s compiling; this process took at "
        f"most {values['resident_bytes'] / GIB:.1f} GiB",
    }
    return named_rows(rows)


def _memory(memory: dict[str, float], outputs: float) -> list[str]:
    rows = {
        "arguments: state and batch": memory["arguments"],
        "outputs that need memory of their own": outputs,
        "temporaries": memory["temporaries"],
        "in all": memory["total"],
    }
    lines = table(("memory of a device", "GiB"), [(name, f"{size / GIB:.2f}") for name, size in rows.items()])
    formula = memory["formula"]
    difference = f"{formula / memory['total'] - 1:+.1%}"
    lines.append(
        f"The formula predicts {formula / GIB:.2f} GiB, {difference}. The GPU has {memory['gpu'] / GIB:.1f} GiB."
    )
    if memory["host"] or memory["host_formula"]:
        lines.append(
            f"In host memory for this device: {memory['host'] / GIB:.2f} GiB; the formula predicts "
            f"{memory['host_formula'] / GIB:.2f} GiB."
        )
    return lines


def _collectives(rows: Rows) -> list[str]:
    if not rows:
        return ["collectives: none, on a mesh of one device"]
    header = ("collectives", "over", "dtype", "calls", "put in", "beside products", "other kernels", "nothing")
    cells = []
    for row in rows:
        shares = [f"{row[what] / row['bytes']:.0%}" for what in ("products", "kernels", "nothing")]
        cells.append([*_about_row(row), f"{row['calls']:,}", human_bytes(row["bytes"]), *shares])
    lines = table(header, cells, left=3)
    lines.append("The GPU waits for nearly all of what runs beside no matrix product or attention kernel.")
    if any(row["calls_in_branches"] for row in rows):
        lines.append("Calls are those of a stage that runs every pass in every tick: the program does not say more.")
    return lines


def _about_row(row: dict[str, Any]) -> list[str]:
    return [row["kind"], axes_name(row["axes"]), row["dtype"]]


def _kernels(kernels: dict[str, dict[str, int]]) -> list[str]:
    most_launched = sorted(kernels.items(), key=lambda kernel: -kernel[1]["launches"])
    rows = [(kernel, counts["different"], f"{counts['launches']:,}") for kernel, counts in most_launched]
    return table(("kernels", "different", "launches a step"), rows)


def _roofline(values: dict[str, Any]) -> list[str]:
    """The modelled time of the compiled kernels, by kind."""
    kinds = sorted(values["kinds"].items(), key=lambda kind: -kind[1]["seconds"])
    cells = [
        (kind, f"{row['kernels']:,}", f"{row['bytes'] / 1e9:.1f}", f"{1e3 * row['seconds']:.1f}",
         f"{row['seconds'] / values['seconds']:.1%}")
        for kind, row in kinds
    ]  # fmt: skip
    lines = table(("roofline of these kernels", "launches", "GB", "ms", "share"), cells)
    step, mfu = f"{1e3 * values['seconds']:.1f} ms a step", f"{values['mfu']:.1%} MFU"
    return [*lines, f"In all {step}, {mfu}: a model of the compiled program, not measured."]


def _comparison(rows: Rows) -> list[str]:
    """The ledger and the compiled program, in bytes."""
    cells = []
    for row in rows:
        ours, found = row["ledger"], row["compiled"]
        verdict = "equal" if ours["bytes"] == found["bytes"] else f"{found['bytes'] - ours['bytes']:+,}"
        counts = [f"{each[what]:,}" for what in ("calls", "bytes") for each in (ours, found)]
        cells.append([*_about_row(row), *counts, verdict])
    header = ("ledger and compiled", "over", "dtype", "calls", "compiled", "bytes put in", "compiled", "")
    return table(header, cells, left=3) if cells else []
