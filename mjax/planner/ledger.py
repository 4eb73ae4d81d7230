"""The communication ledger: every collective of a training step, read from the traced program, without a device.

The step is one `shard_map` in which all communication is written by hand, so its jaxpr lists every collective: none is
added by a partitioner. The body of a scan counts once per iteration. A conditional of the pipeline counts by the
schedule's table, stage by stage. Unused results are left out, as in XLA: the pipeline's backward pass traces the
embedding once more, but needs only its derivative. All-to-alls to experts count for one round, as with a balanced
router. Any other loop of unknown length with a collective in it is an error.

The source of a collective is read from the names that the step puts on its equations (`parallel/named_scopes.py`),
which JAX carries through differentiation. `find_source` reads it from a name in the metadata of a compiled program.

Bytes are counted for ring algorithms, the minimum (arXiv 1909.09756, section 2). Of a tensor of k bytes on n ranks each
rank sends 2 (n − 1) / n · k in an all-reduce and k in a permute. In an all-gather, a reduce-scatter or an all-to-all it
sends (n − 1) / n · k, where k is the unsharded tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from mjax.config import Config
from mjax.config.axes import NAMES
from mjax.config.pattern import stage_kinds
from mjax.parallel import named_scopes
from mjax.parallel.mesh import abstract_mesh
from mjax.parallel.pipeline_schedules import PipelineSchedule, find_schedule
from mjax.planner.layer import resolve_dispatcher, trace_once
from mjax.planner.program import NO_COMMUNICATION, collective_axes, inner_jaxprs
from mjax.step.step import build_program
from mjax.utils.figures import format_table, human_bytes

OPERATIONS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "ppermute": "permute",
    "all_to_all": "all-to-all",
}


@dataclass(frozen=True)
class Collective:
    """The calls of one collective in a step, from one part of the model.

    Attributes:
      operation: all-reduce, all-gather, reduce-scatter, all-to-all or permute.
      axes: the mesh axes it runs over with more than one rank, in the order of the mesh.
      ranks: devices that take part in it.
      shape: of a device's operand.
      dtype: of the operand.
      part: its source, one of `named_scopes.PARTS`; empty if unknown.
      phase: forward, backward or recomputation; empty outside differentiation.
      loops: lengths of the loops around it, outermost first.
      counts: calls of a device in a step, for each pipeline stage.
      calls: calls in the text of a program, with every branch of a conditional.
    """

    operation: str
    axes: tuple[str, ...]
    ranks: int
    shape: tuple[int, ...]
    dtype: str
    part: str = ""
    phase: str = ""
    loops: tuple[int, ...] = ()
    counts: tuple[int, ...] = (1,)
    calls: int = 1

    @property
    def count(self) -> int:
        """Calls in a step, on the stage with most."""
        return max(self.counts)

    @property
    def source(self) -> str:
        """Its part of the model and phase, such as 'layer forward'."""
        return " ".join(filter(None, (self.part or "other", self.phase)))

    @property
    def operand_bytes(self) -> int:
        """Bytes of a device's operand."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def wire(self) -> float:
        """Bytes that a device sends in one call, on a ring."""
        shares = {"all-reduce": 2 * (self.ranks - 1), "permute": self.ranks}
        whole = self.operand_bytes * (self.ranks if self.operation == "all-gather" else 1)
        return whole * shares.get(self.operation, self.ranks - 1) / self.ranks

    @property
    def sent(self) -> np.ndarray:
        """Bytes that a device sends in a step, for each pipeline stage: float64 [stages]."""
        return self.wire * np.array(self.counts, np.float64)

    def values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"source": self.source, "wire_bytes": float(self.sent.max())}


@dataclass(frozen=True)
class Ledger:
    """All collectives of a step; printed as a table of calls and bytes sent per device and step.

    Attributes:
      records: one for each kind, shape and source, in the order of the program.
    """

    records: tuple[Collective, ...]

    def __str__(self) -> str:
        rows = []
        for axes, ledger in sorted(self.group_by("axes").items(), key=lambda item: -item[1].sent):
            for (source, operation), part in ledger.group_by("source", "operation").items():
                rows.append((axes_name(axes), source, operation, f"{part.count:,}", human_bytes(part.sent)))
            rows.append((axes_name(axes), "total", "", f"{ledger.count:,}", human_bytes(ledger.sent)))
        return "\n".join(format_table(("axes", "source", "collective", "calls", "sent"), rows, 3))

    def filter_axes(self, *axes: str) -> Ledger:
        """The collectives over exactly these mesh axes."""
        return Ledger(tuple(record for record in self.records if set(record.axes) == set(axes)))

    def group_by(self, *names: str) -> dict[Any, Ledger]:
        """A ledger for each value of these attributes, in the order of the program."""
        groups: dict[Any, list[Collective]] = {}
        for record in self.records:
            groups.setdefault(attrgetter(*names)(record), []).append(record)
        return {value: Ledger(tuple(records)) for value, records in groups.items()}

    def bytes_by_axis(self) -> dict[tuple[str, ...], float]:
        """Bytes that a device sends in a step by axes, on the stage that sends most."""
        return {axes: part.sent for axes, part in self.group_by("axes").items()}

    def bytes_by_source(self) -> dict[str, dict[str, float]]:
        """Bytes by name of the axes and by source, on the stage that sends most over these axes."""
        by_axes = {}
        for axes, ledger in self.group_by("axes").items():
            groups = ledger.group_by("source").items()
            sent = {source: sum(record.sent for record in group.records) for source, group in groups}
            stage = int(np.argmax(sum(sent.values())))
            by_axes[axes_name(axes)] = {source: float(size[stage]) for source, size in sent.items()}
        return by_axes

    @property
    def count(self) -> int:
        """Calls of a device in a step, on the stage with most."""
        return max(map(sum, zip(*(record.counts for record in self.records), strict=True)), default=0)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step, on the stage that sends most."""
        return float(np.max(sum(record.sent for record in self.records), initial=0.0))


def ledger(config: Config) -> Ledger:
    """The ledger of a training step of `config`, which must be validated. No device is used.

    Traced with XLA's attention, which every machine can trace, and without dropout, whose masks are a third of the
    equations: neither communicates.
    """
    model = resolve_dispatcher(config.model.without_dropout(), config.mesh.expert)
    config = replace(config, model=replace(model, attention="xla"))

    def trace() -> list[tuple]:
        with jax.enable_x64(config.precision.compute == "fp64"):
            program = build_program(config, abstract_mesh(config.mesh))
            step = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
        schedule = find_schedule(config) if config.mesh.pipe > 1 else None
        kinds = stage_kinds(config.model, config.mesh)
        return [astuple(record) for record in read_collectives(step, schedule, kinds)]

    records = trace_once(("ledger", config), config.model, trace, lambda *records: records)
    return Ledger(tuple(Collective(*record) for record in records))


def read_collectives(
    jaxpr, schedule: PipelineSchedule | None = None, kinds: tuple[int, ...] = ()
) -> tuple[Collective, ...]:
    """The collectives of a traced program over more than one rank; equal ones are counted together.

    Args:
      jaxpr: of a function that contains a `shard_map`.
      schedule: the table that its pipeline runs, if there is one.
      kinds: of its virtual stages (`pattern.stage_kinds`).

    Raises:
      ValueError: a collective is in a loop of unknown length, or in a conditional that is not the pipeline's, or is of
        an unknown kind.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    runs, stages = ({}, 1) if schedule is None else (schedule.runs(kinds), schedule.stages)
    merged: dict[Collective, Collective] = {}
    for record in _read(used, runs, _ProgramPosition("", {}, np.ones(stages, np.int64), 1)):
        if record.ranks > 1:
            key = replace(record, counts=(), calls=0)
            counts, calls = (merged[key].counts, merged[key].calls) if key in merged else ((0,) * stages, 0)
            counts = tuple(map(sum, zip(counts, record.counts, strict=True)))
            merged[key] = replace(record, counts=counts, calls=calls + record.calls)
    return tuple(merged.values())


def find_source(name_stack: str) -> tuple[str, str]:
    """Part of the model and phase from a name: a JAX name stack, or `op_name` in a compiled program.

    >>> find_source("jit(step)/transpose(jvp(layer))/while/body/rematted_computation/psum")
    ('layer', 'recomputation')
    """
    names = re.findall(r"[^/()]+", name_stack)
    parts = [name for name in names if name in named_scopes.PARTS]
    if not parts:
        return "", ""
    part = parts[-1]
    differentiated = {named_scopes.EMBEDDING, named_scopes.LAYER, named_scopes.HEAD} & set(parts)
    if part == named_scopes.GRADIENT or not differentiated:
        return part, ""
    if "rematted_computation" in names:
        return part, "recomputation"
    return part, "backward" if "transpose" in names else "forward"


def axes_name(axes: Sequence[str]) -> str:
    """'data', or 'pipe × data' of a collective over both."""
    return " × ".join(axes)


# --- The reader -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ProgramPosition:
    """A position in the program: its names, loops, and number of runs."""

    stack: str
    sizes: dict[str, int]
    counts: np.ndarray  # [stages]
    calls: int
    loops: tuple[int, ...] = ()
    outside: np.ndarray = field(default_factory=lambda: np.ones(1, np.int64))  # counts before the innermost loop


def _read(jaxpr, runs: dict[str, np.ndarray], start: _ProgramPosition) -> Iterator[Collective]:
    """The collectives of a program at `start`; `runs` has the schedule's counts of each branch of a conditional."""
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(inner_jaxprs(equation))
        position = replace(start, stack=f"{start.stack}/{equation.source_info.name_stack}")
        if name in OPERATIONS:
            yield from _records(equation, position)
        elif not inner:
            if name not in NO_COMMUNICATION and collective_axes(equation):
                raise ValueError(f"{name} over {collective_axes(equation)} is not a known collective")
        elif name == "while":
            counted = named_scopes.ROUNDS not in position.stack
            if counted and any(True for body in inner for _ in _read(body, runs, position)):
                raise ValueError(f"a collective is in a loop of unknown length, at {position.stack}")
        elif name == "cond":
            yield from _conditional(equation, inner, runs, position)
        else:
            if name == "scan":
                times = equation.params["length"]
                repeated = {"counts": position.counts * times, "calls": position.calls * times}
                position = replace(position, **repeated, loops=(*position.loops, times), outside=position.counts)
            if name == "shard_map":
                position = replace(position, sizes=dict(equation.params["mesh"].shape))
            for body in inner:
                yield from _read(body, runs, position)


def _conditional(equation, branches: list, runs: dict, position: _ProgramPosition) -> Iterator[Collective]:
    """A conditional of the pipeline counts by the schedule's table; all branches of any other must be equal."""
    name = str(equation.source_info.name_stack).rsplit("/", 1)[-1]
    if name in runs:
        for kind, branch in enumerate(branches[1:]):  # the first does nothing
            runs_of_kind = {name: counts[kind : kind + 1] for name, counts in runs.items()}
            yield from _read(branch, runs_of_kind, replace(position, counts=position.outside * runs[name][kind]))
        return
    records = [list(_read(branch, runs, position)) for branch in branches]
    if all(branch == records[0] for branch in records):
        yield from records[0]
    else:
        raise ValueError(f"a collective is in a conditional that runs an unknown number of times: {position.stack}")


def _records(equation, position: _ProgramPosition) -> Iterator[Collective]:
    """A record for each operand of a collective."""
    # An axis of one rank has no communication, and is not in a compiled program.
    names = [axis for axis in collective_axes(equation) if position.sizes[axis] > 1]
    axes = tuple(sorted(names, key=lambda axis: NAMES.index(axis) if axis in NAMES else len(NAMES)))
    groups = equation.params.get("axis_index_groups")
    ranks = len(groups[0]) if groups else math.prod(position.sizes[axis] for axis in axes)
    part, phase = find_source(position.stack)
    operation, counts = OPERATIONS[equation.primitive.name], tuple(position.counts.tolist())
    for operand in equation.invars:
        shape, dtype = tuple(operand.aval.shape), str(operand.aval.dtype)
        yield Collective(operation, axes, ranks, shape, dtype, part, phase, position.loops, counts, position.calls)
