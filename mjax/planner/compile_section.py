"""The section of `mjax plan --compile`: memory and collectives as compiled, and as predicted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from mjax.cluster.hardware import GIB, gpu_named
from mjax.config import Config
from mjax.planner.compile import Compilation, compile_step, versions
from mjax.planner.memory import Memory, predict_memory
from mjax.planner.section import Section, layers_in_words, named_rows, table
from mjax.trace.collectives import axes_name, ledger
from mjax.trace.hlo import Key, counted


def compile_and_tell(config: Config, gpu: str, per_server: int) -> Section:
    """Compile the step of a checked config, and report on it; arguments as for `compile_step`."""
    with announcing() as announce:
        compiled = compile_step(config, gpu, per_server, announce)
        formula = predict_memory(compiled.config, gpu_named(gpu).compute_capability)
        return compile_section(compiled, ledger(config).in_program(), formula)


def compile_section(compiled: Compilation, expected: Mapping[Key, tuple[int, int]], formula: Memory) -> Section:
    """The section of a plan.

    Args:
      compiled: the step.
      expected: the ledger's counts (`Ledger.in_program`).
      formula: from `predict_memory`.
    """
    memory, found = compiled.memory, counted(compiled.collectives)
    values = {
        "gpu": compiled.gpu,
        "device_kind": compiled.device_kind,
        "attention": compiled.attention,
        "unrolled": compiled.unrolled,
        "seconds": {"tracing": compiled.tracing, "compiling": compiled.compiling},
        "memory": asdict(memory)
        | {"total": memory.total, "formula": formula.total, "host_formula": formula.host, "gpu": compiled.gpu_memory},
        "ledger": [
            {
                "axes": list(key[0]),
                "kind": key[1],
                "dtype": key[2],
                "ledger": dict(zip(("calls", "bytes"), expected.get(key, (0, 0)), strict=True)),
                "compiled": dict(zip(("calls", "bytes"), found.get(key, (0, 0)), strict=True)),
            }
            for key in sorted(expected.keys() | found.keys())
        ],
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    parts = (
        _about(values),
        _memory(values["memory"], memory.outputs - memory.aliased),
        _collectives(values["ledger"], any(collective.conditional for collective in compiled.collectives)),
    )
    lines = [line for part in parts for line in ("", *part)]
    return Section(f"Compiled for {compiled.device_kind}", values, lines[1:])


@contextmanager
def announcing() -> Iterator[Callable[[str], None]]:
    """Announce each phase on stderr; on a terminal, with its elapsed time."""
    from rich.progress import TextColumn, TimeElapsedColumn

    from mjax.utils.progress import progress

    if not sys.stderr.isatty():
        yield lambda what: print(f"mjax: {what} …", file=sys.stderr, flush=True)
        return
    columns = TimeElapsedColumn(), TextColumn("{task.description}")
    with progress("compiling", None, *columns, transient=True) as advance:
        yield lambda what: advance(0, description=what)


# --- In words ---------------------------------------------------------------------------------------------------------


def _about(values: dict) -> list[str]:
    rows = {
        "compiled by": ", ".join(f"{package} {number}" for package, number in values["versions"].items()),
        "XLA flags": values["xla_flags"] or "none",
        "attention": values["attention"],
        "layers": layers_in_words(values["unrolled"]),
        "took": ", ".join(f"{spent:.1f} s {what}" for what, spent in values["seconds"].items()),
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


def _collectives(rows: list[dict], in_branches: bool) -> list[str]:
    """The ledger and the compiled program, in bytes."""
    if not rows:
        return ["collectives: none, on a mesh of one device"]
    cells = []
    for row in rows:
        ours, found = row["ledger"], row["compiled"]
        verdict = "equal" if ours["bytes"] == found["bytes"] else f"{found['bytes'] - ours['bytes']:+,}"
        counts = [f"{each[what]:,}" for what in ("calls", "bytes") for each in (ours, found)]
        cells.append([row["kind"], axes_name(row["axes"]), row["dtype"], *counts, verdict])
    header = ("collectives", "over", "dtype", "calls", "compiled", "bytes put in", "compiled", "")
    lines = table(header, cells, left=3)
    if in_branches:
        lines.append("Calls are those of a stage that runs every pass in every tick: the program does not say more.")
    return lines
