"""Collectives of a compiled program, read from scheduled HLO for NVIDIA GPUs.

Scheduled HLO is a list of kernels in the order in which they are launched. A `while` says how often it runs, so
everything in it counts that many times. A `conditional` does not say how often a branch is taken: everything in one
counts as if it were always taken, and is marked. XLA may merge several collectives into one, which sends the same bytes
in fewer calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

OPERATIONS = {"all-reduce", "all-gather", "reduce-scatter", "permute", "all-to-all"}
# NumPy's, and so the ledger's, names for the dtypes of HLO.
NAMES = {
    "pred": "bool", "s4": "int4", "u4": "uint4", "s8": "int8", "u8": "uint8", "s16": "int16", "u16": "uint16",
    "s32": "int32", "u32": "uint32", "s64": "int64", "u64": "uint64", "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2", "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
}  # fmt: skip
BITS = {dtype: 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0]) for dtype in NAMES}
CONTROL = ("while", "conditional", "call")  # run other computations

Key = tuple[tuple[str, ...], str, str]
"""Axes, operation and dtype of collectives."""


class HloError(ValueError):
    """The text is not scheduled HLO for a GPU in a known form."""


# --- Result -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduledCollective:
    """One operand of one collective of a compiled program.

    Attributes:
      operation: all-reduce, all-gather, reduce-scatter, permute or all-to-all.
      axes: the mesh axes of its groups, in the order of the mesh.
      dtype: NumPy's name.
      bytes: of the operand, on one device.
      count: times per step, loops included.
      calls: the same for the collective; 0 except for the first of its operands, so that calls can be summed.
      conditional: True if it is in a branch, and `count` is an upper bound.
    """

    operation: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    count: int
    calls: int
    conditional: bool

    @property
    def key(self) -> Key:
        """Axes, operation and dtype, by which collectives are counted."""
        return self.axes, self.operation, self.dtype


def counted(collectives: Iterable[ScheduledCollective]) -> dict[Key, tuple[int, int]]:
    """Calls of collectives in a step and bytes of a device's operands, by (axes, operation, dtype)."""
    totals: dict[Key, tuple[int, int]] = {}
    for c in collectives:
        calls, size = totals.get(c.key, (0, 0))
        totals[c.key] = calls + c.calls, size + c.count * c.bytes
    return totals


def read_collectives(text: str, mesh: Mapping[str, int]) -> list[ScheduledCollective]:
    """The collectives of scheduled GPU HLO, in no particular order; without those in groups of one.

    Args:
      text: `compiled.as_text()`.
      mesh: sizes of the axes by name, slowest first; partitions are numbered along them in row-major order.

    Raises:
      HloError: it is not scheduled; a collective is in a loop of unknown length, or its groups do not lie along axes of
        `mesh`.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise HloError("this HLO is not scheduled: use the compiled program's text, not the lowered one's")
    return [collective for collective, _, _ in Module(text).collectives(mesh)]


# --- The text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """`%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    inside: str
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.inside)

    def attribute(self, name: str) -> str | None:
        """The computation or word after `name=`."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match and match[1]

    @property
    def source(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""


LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, (.*))?")


def _read_line(text: str) -> Line | None:
    match = LINE.fullmatch(text)
    if match is None and " = " in text:
        raise HloError(f"this line has an unknown form: {text[:200].strip()}")
    return match and Line(*match.groups(""))


def arrays_of(shape: str) -> list[tuple[str, int]]:
    """(dtype, bytes) of every array of a shape."""
    arrays = []
    for dtype, dims in dims_of(shape):
        if dtype not in BITS:
            raise HloError(f"dtype {dtype} is not known: {shape[:100]}")
        arrays.append((dtype, BITS[dtype] * math.prod(dims) // 8))
    return arrays


def dims_of(shape: str) -> list[tuple[str, list[int]]]:
    """(dtype, dims) of every array of a shape."""
    arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, [int(dim) for dim in dims.split(",") if dim]) for dtype, dims in arrays]


class Module:
    """The computations of a module, and the meaning of their lines."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Line]] = {}
        current: list[Line] | None = None
        for row in text.splitlines():
            if row.startswith(("%", "ENTRY")) and row.endswith("{"):
                name = re.match(r"(?:ENTRY )?%?([\w.\-]+)", row)[1]
                current = self.computations[name] = []
                if row.startswith("ENTRY"):
                    self.entry = name
            elif row.startswith("}"):
                current = None
            elif current is not None and (line := _read_line(row)) is not None:
                current.append(line)

    # --- Which lines run, and how often -------------------------------------------------------------------------------

    def executed(self) -> Iterator[tuple[list[Line], int, bool]]:
        """(lines, times a step, True in a branch) of every computation that runs as a list of kernels."""
        waiting = [(self.entry, 1, False)]
        while waiting:
            name, times, conditional = waiting.pop()
            lines = self.computations[name]
            yield lines, times, conditional
            for line in lines:
                waiting += [(inner, times * n, conditional or branch) for inner, n, branch in self.inner(line)]

    def inner(self, line: Line) -> list[tuple[str, int, bool]]:
        """(computation, times, True in a branch) run by a loop, a branch or a call."""
        if line.opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line.attributes)
            body = line.attribute("body")
            if trips is None:
                if any(self.operation_of(inner) for inner in self.all_lines(self.computations[body])):
                    raise HloError(f"the loop {line.name} has an unknown length, and communicates")
                return [(body, 1, True)]
            return [(body, int(trips[1]), False)]
        if line.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", line.attributes)
            names = re.findall(r"%([\w.\-]+)", listed[1]) if listed else []
            names = names or [line.attribute("true_computation"), line.attribute("false_computation")]
            return [(name, 1, True) for name in names]
        if line.opcode == "call":
            return [(line.attribute("to_apply"), 1, False)]
        return []

    def all_lines(self, lines: Iterable[Line]) -> Iterator[Line]:
        """These lines, each followed by the lines of the computations that it runs."""
        for line in lines:
            yield line
            for name, _, _ in self.inner(line):
                yield from self.all_lines(self.computations[name])

    # --- Collectives --------------------------------------------------------------------------------------------------

    def collectives(self, mesh: Mapping[str, int]) -> Iterator[tuple[ScheduledCollective, list[Line], int]]:
        """Every operand of every collective, with the computation that it is in, and its line there."""
        for computation, times, conditional in self.executed():
            shapes = {line.name: line.shape for line in computation}
            for place, line in enumerate(computation):
                operation = self.operation_of(line)
                if operation is None or not (axes := _axes_of(self.described(line), operation, mesh)):
                    continue
                arrays = [array for operand in line.operands for array in arrays_of(shapes[operand])]
                for index, (dtype, size) in enumerate(arrays):
                    calls = times if index == 0 else 0
                    counts = size, times, calls, conditional
                    yield ScheduledCollective(operation, axes, NAMES[dtype], *counts), computation, place

    def operation_of(self, line: Line) -> str | None:
        """The operation of the collective that `line` starts, or is; None for other lines."""
        operation = line.opcode.removesuffix("-start").removeprefix("collective-")
        if operation in OPERATIONS:
            return operation
        described = self.described(line)
        return None if described is line else self.operation_of(described)

    def described(self, line: Line) -> Line:
        """The line with the groups: an `async-start` has its collective in a separate computation."""
        wrapped = self.computations.get(line.attribute("calls") or "", []) if line.opcode == "async-start" else []
        return next((inner for inner in wrapped if self.operation_of(inner)), line)


# --- Groups and axes --------------------------------------------------------------------------------------------------


def groups_of(line: Line, operation: str, devices: int) -> np.ndarray:
    """The devices of each group of a collective, or each pair of a permutation: int [groups, members]."""
    if operation != "permute":
        return _groups(line.attributes, devices)
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line.attributes)
    return np.array(re.findall(r"\{(\d+),(\d+)\}", pairs[1]), dtype=np.int64)


def _axes_of(line: Line, operation: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which a collective communicates; empty if its groups have one device each.

    Raises:
      HloError: its groups do not match any axes of `mesh`.
    """
    groups = groups_of(line, operation, math.prod(mesh.values()))
    places = np.stack(np.unravel_index(groups, tuple(mesh.values())), axis=-1)  # [groups, members, axes]
    varies = (places != places[:, :1]).any(axis=(0, 1))
    axes = tuple(axis for axis, differs in zip(mesh, varies, strict=True) if differs)
    whole = groups.size == math.prod(mesh.values()) and groups.shape[1] == math.prod(mesh[axis] for axis in axes)
    if operation != "permute" and not whole:
        raise HloError(f"the groups of {line.name} lie along no axes of the mesh {dict(mesh)}")
    return axes


def _groups(attributes: str, devices: int) -> np.ndarray:
    """The replica groups of a collective: int [groups, members]."""
    listed = re.search(r"replica_groups=\{(\{[\d,{}]*\})?\}", attributes)
    if listed:
        if listed[1] is None:
            return np.arange(devices)[None]
        groups = [np.array(group.split(","), dtype=np.int64) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        if len({len(group) for group in groups}) != 1:
            raise HloError(f"groups of different sizes: {attributes[:200]}")
        return np.stack(groups)
    named = re.search(r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',? ?)+)\}", attributes)  # jax 0.11
    if named:
        mesh = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'", named[2])
        order = [list(mesh).index(axis) for axis in (*(name for name in mesh if name not in axes), *axes)]
        numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())).transpose(order)
        return numbers.reshape(-1, math.prod(mesh[axis] for axis in axes))
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if counted is None:
        raise HloError(f"replica groups have an unknown form: {attributes[:200]}")
    shape, dims, order = (tuple(int(n) for n in part.split(",")) if part else None for part in counted.groups())
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return (numbers if order is None else numbers.transpose(order)).reshape(shape)
