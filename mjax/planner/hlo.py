"""Collectives, kernels and waits of a compiled program, read from scheduled HLO for NVIDIA GPUs.

Scheduled HLO is a list of kernels in the order in which they are launched. A collective is two lines of it, and the
kernels between them overlap with it:

    %all-reduce-start = … all-reduce-start(%product), replica_groups=…
    %weight_gradient  = … fusion(…)                                      beside the collective
    %all-reduce-done  = … all-reduce-done(%all-reduce-start)             waits for it

A `while` says how often it runs, so everything in it counts that many times. A `conditional` does not say how often a
branch is taken: everything in one counts as if it were always taken, and is marked. XLA may merge several collectives
into one, which sends the same bytes in fewer calls.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
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
# Lines that cost nothing: they name values, or move less than a kernel launch costs.
FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "domain",
}  # fmt: skip
LIBRARIES = {"__cudnn$fmha": "attention, cuDNN", "__cublas": "matrix product, cuBLAS"}  # by the call's target
PALLAS, FLASH = "__gpu$xla.gpu.triton", "/flash_"  # its target, and the names of our kernels
CONTROL = ("while", "conditional", "call")  # run other computations
HOST = ":S(5)"  # the memory space of an array in host memory, in its layout
TO_HOST, FROM_HOST = "copy to host memory", "copy from host memory"  # kernels of no multiprocessor


class HloError(ValueError):
    """The text is not scheduled HLO for a GPU in a known form."""


# --- Result -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Beside:
    """Kernels that a GPU runs between the start of a collective and the wait for it.

    Attributes:
      products: matrix products and attention kernels.
      kernels: all others.
    """

    products: int = 0
    kernels: int = 0


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
      beside: kernels that overlap with it.
      source: the operation of the traced program that it comes from, in XLA's words; empty if XLA does not say.
    """

    operation: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    count: int
    calls: int
    conditional: bool
    beside: Beside
    source: str

    @property
    def key(self) -> tuple[tuple[str, ...], str, str]:
        """Axes, operation and dtype, by which collectives are counted."""
        return self.axes, self.operation, self.dtype

    @property
    def overlap(self) -> str:
        """`products`, `kernels` or `nothing`: the best that hides it."""
        return "products" if self.beside.products else "kernels" if self.beside.kernels else "nothing"


@dataclass(frozen=True)
class ScheduledProgram:
    """A compiled, scheduled program.

    Attributes:
      collectives: one entry per operand of each, in no particular order; without those in groups of one.
      kernels: for each type of kernel, the number of different ones.
      launches: the number of launches of each in a step, with every branch taken.
    """

    collectives: list[ScheduledCollective]
    kernels: dict[str, int]
    launches: dict[str, int]

    def bytes_by(self) -> dict[tuple[tuple[str, ...], str, str], int]:
        """Bytes of a device's operands of collectives in a step, by (axes, operation, dtype)."""
        total: Counter = Counter()
        for c in self.collectives:
            total[c.key] += c.count * c.bytes
        return dict(total)


def read_program(text: str, mesh: Mapping[str, int]) -> ScheduledProgram:
    """Read scheduled GPU HLO.

    Args:
      text: `compiled.as_text()`.
      mesh: sizes of the axes by name, slowest first; partitions are numbered along them in row-major order.

    Raises:
      HloError: it is not scheduled; a collective is in a loop of unknown length, or its groups do not lie along axes of
        `mesh`.
    """
    if "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise HloError("this HLO is not scheduled: take the text of a compiled program, not of a lowered one")
    module = Module(text)
    collectives, launches, different = [], Counter(), defaultdict(set)
    for computation, times, conditional in module.executed():
        shapes = {line.name: line.shape for line in computation}
        for place, line in enumerate(computation):
            operation, kernel = module.operation_of(line), module.kernel_of(line)
            if operation is not None:
                described = module.described(line)
                if axes := _axes_of(described, operation, mesh):
                    beside, source = module.beside(computation, place), line.source or described.source
                    arrays = [array for operand in line.operands for array in arrays_of(shapes[operand])]
                    for index, (dtype, size) in enumerate(arrays):
                        calls = times if index == 0 else 0
                        counts = size, times, calls, conditional, beside, source
                        collectives.append(ScheduledCollective(operation, axes, NAMES[dtype], *counts))
            if kernel is not None:
                launches[kernel] += times
                different[kernel].add(line.attribute("calls") or line.name)
    kernels = {kernel: len(names) for kernel, names in sorted(different.items())}
    return ScheduledProgram(collectives, kernels, dict(sorted(launches.items())))


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
    found = []
    for dtype, dims in dims_of(shape):
        if dtype not in BITS:
            raise HloError(f"dtype {dtype} is not known: {shape[:100]}")
        found.append((dtype, BITS[dtype] * math.prod(dims) // 8))
    return found


def dims_of(shape: str) -> list[tuple[str, list[int]]]:
    """(dtype, dims) of every array of a shape."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, [int(dim) for dim in dims.split(",") if dim]) for dtype, dims in found]


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
        self._products: dict[str, bool] = {}

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
        """(computation, times, True in a branch) of what a loop, a branch or a call runs."""
        if line.opcode == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line.attributes)
            body = line.attribute("body")
            if trips is None:
                if any(self.operation_of(inner) for inner in self._all_lines(self.computations[body])):
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

    def _all_lines(self, lines: Iterable[Line]) -> Iterator[Line]:
        """These lines, each followed by those of the computations that it runs."""
        for line in lines:
            yield line
            for name, _, _ in self.inner(line):
                yield from self._all_lines(self.computations[name])

    # --- Collectives --------------------------------------------------------------------------------------------------

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

    def beside(self, computation: list[Line], place: int) -> Beside:
        """The kernels between the collective at `place` and the wait for it."""
        start, found = computation[place], []
        if not start.opcode.endswith("-start"):
            return Beside()
        for line in computation[place + 1 :]:
            if line.opcode.endswith("-done") and start.name in line.operands:
                products = sum(kernel.startswith(("matrix product", "attention")) for kernel in found)
                return Beside(products, len(found) - products)
            found += filter(None, map(self.kernel_of, self._all_lines([line])))
        raise HloError(f"nothing waits for {start.name}")

    # --- Host memory --------------------------------------------------------------------------------------------------

    def host_copy(self, line: Line) -> tuple[str, int] | None:
        """The direction and the bytes of a copy between device and host that `line` starts, or is; None for others.

        Arrays of all layers stay where they are: a slice of one moves, or is written in place.
        """
        if HOST not in line.shape or not line.opcode.startswith(("copy", "fusion", "dynamic-")):
            return None
        if line.opcode.endswith("-done"):
            return None
        found = re.findall(r"[a-z]\w*\[[\d,]+\](?:\{[^}]*\})?", line.shape)  # without numbers, such as indices
        if not found:
            return None
        result = found[0] if line.opcode == "copy-start" else found[-1]
        return TO_HOST if HOST in result else FROM_HOST, min(arrays_of(shape)[0][1] for shape in found)

    # --- Kernels ------------------------------------------------------------------------------------------------------

    def kernel_of(self, line: Line) -> str | None:
        """The type of kernel that a line launches; None if it launches none, or a collective."""
        opcode = line.opcode
        if opcode in FREE or opcode in CONTROL or self.operation_of(line):
            return None
        if opcode.endswith("-done") or opcode == "async-update":
            return None
        if copied := self.host_copy(line):
            return copied[0]
        if opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', line.attributes)[1]
            if target == "AllocateBuffer":
                return None
            if target == PALLAS and FLASH in line.source:
                return "attention, Pallas"
            known = (kernel for prefix, kernel in LIBRARIES.items() if target.startswith(prefix))
            return next(known, f"custom call {target}")
        if opcode == "fusion":
            return self._fusion(line)
        if opcode in ("copy", "copy-start"):
            return "copy"
        return opcode.removesuffix("-start")

    def _fusion(self, line: Line) -> str:
        inside = self.computations[line.attribute("calls")]
        if called := [each for each in inside if each.opcode == "custom-call"]:
            return self.kernel_of(called[0])  # with a slice of a buffer, or written into one (jax 0.11)
        config = re.search(r'"fusion_backend_config":\{"kind":"([^"]*)"', line.attributes)
        emitter = config[1] if config else ""
        if self._has_product(line.attribute("calls")):
            maker = "Triton" if emitter.startswith("__triton") else "cuDNN" if "cudnn" in emitter else "XLA"
            return f"matrix product, {maker}"
        if emitter.startswith("__triton"):
            return "fusion, Triton"
        if emitter == "__custom_fusion":
            return "copy"  # a slice of a buffer, passed on or written in place
        return "fusion, reduction" if "kind=kInput" in line.attributes else "fusion, element-wise"

    def _has_product(self, name: str) -> bool:
        if name not in self._products:
            lines = self.computations[name]
            self._products[name] = any(
                line.opcode in ("dot", "convolution", "scaled-dot")
                or (line.opcode == "fusion" and self._has_product(line.attribute("calls")))
                for line in lines
            )
        return self._products[name]


# --- Groups and axes --------------------------------------------------------------------------------------------------


def members_of(line: Line, operation: str, devices: int) -> list[int]:
    """The devices of the first group of a collective."""
    return [int(member) for member in _all_groups(line, operation, devices)[0]]


def _all_groups(line: Line, operation: str, devices: int) -> np.ndarray:
    """The devices of each group of a collective, or each pair of a permutation: int [groups, members]."""
    if operation != "permute":
        return _groups(line.attributes, devices)
    pairs = re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line.attributes)
    return np.array(re.findall(r"\{(\d+),(\d+)\}", pairs[1]), dtype=np.int64)


def _axes_of(line: Line, operation: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which a collective communicates; empty if its groups have one device each.

    Raises:
      HloError: its groups are not those of any axes of `mesh`.
    """
    groups = _all_groups(line, operation, math.prod(mesh.values()))
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
