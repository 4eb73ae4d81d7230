"""The fused kernels between the products of a traced program, and the arrays between them.

A product, a collective or a cuDNN kernel reads and writes whole arrays. Everything between two of them fuses: a
*region* is a connected set of such operations, and only what a kernel or the end of the program reads is written to
memory. Inside, XLA still writes one or two float32 arrays of a region's own size: one if a function such as tanh is
needed for two results, two if a sum over a row has to be known before the row can be finished (LayerNorm, softmax).
This was learned from the tables in `tests/planner/compiled_memory.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mjax.parallel.float8 import BACKWARD
from mjax.trace.float8 import roundings
from mjax.trace.layers import Backward
from mjax.trace.program import REDUCTIONS, Operation, Program, is_float8

STAND_IN = "pure_callback"  # for a kernel that exists only on a GPU (`models/attention_kernels.py`)
FUNCTIONS = {"tanh", "erf", "erfc", "exp", "exp2", "log", "log1p", "expm1", "logistic", "sin", "cos"}


@dataclass(frozen=True)
class Region:
    """A connected part of a program that fuses.

    Attributes:
      inputs: values that it reads.
      outputs: values that it writes.
      wide: bytes of its largest array in float32 or wider.
      reduces: it sums over a dim of an array of that size.
      has_function: it computes an exponential, a tanh or a similar function.
      rounds: it rounds an array to float8.
      at_once: it computes a function and sums rows of it that nothing else in it waits for: one pass, such as that of
        an expert's activation times the weight of its row, and nothing internal is written.
    """

    inputs: frozenset[int]
    outputs: frozenset[int]
    wide: int
    reduces: bool
    has_function: bool
    rounds: bool = False
    at_once: bool = False

    @property
    def inside(self) -> int:
        """Bytes that it writes and reads internally."""
        return 0 if self.at_once else self.wide * (2 if self.reduces else 1)


class Regions:
    """The regions of a program, and the values that are written to memory.

    Attributes:
      program: the program.
      written: values that a kernel reads or writes, and results of the program.
    """

    def __init__(self, program: Program):
        self.program = program
        self.written = {value for value in program.outputs if value is not None}
        for operation in program.operations:
            if operation.is_kernel:
                self.written |= {*operation.outputs, *_read(operation)}
        self.roundings = roundings(program)
        for rounding in self.roundings:
            self.written |= rounding.sources
        self.producer = {value: op for op in program.operations for value in op.outputs}
        self._region: dict[int, Region] = {}
        for region in self._cut():
            self._region |= dict.fromkeys(region.outputs, region)

    def __iter__(self) -> Iterator[Region]:
        return iter(dict.fromkeys(self._region.values()))

    def of(self, value: int) -> Region | None:
        """The region that writes `value`; None if a kernel does, or if it is an input."""
        return self._region.get(value)

    def read_for_scale(self, region: Region) -> set[int] | None:
        """The value read by a region that finds an array's largest magnitude for its float8 scale; None for other
        regions.

        A kernel that sums over tokens, or computes an activation function, finds it as it writes the array.
        """
        rounding = next((op for op in self.roundings if op.largest in region.outputs), None)
        if rounding is None:
            return None

        def writes_it(made: Region | None) -> bool:
            if made is None:
                return False
            if made.reduces:  # a norm: its backward pass has sums over tokens
                return len(made.outputs) > 1
            return not (made.has_function and self.program.values[rounding.value].dtype == BACKWARD)

        return {value for value in rounding.sources if not writes_it(self.of(value))}

    def _cut(self) -> Iterator[Region]:
        leader: dict[int, int] = {}

        def find(value: int) -> int:
            while leader[value] != value:
                leader[value] = value = leader[leader[value]]
            return value

        fused = [op for op in self.program.operations if not op.is_kernel]
        for operation in fused:
            first = operation.outputs[0]
            leader |= dict.fromkeys(operation.outputs, first)
            for value in operation.inputs:
                if value in leader and value not in self.written:
                    leader[find(first)] = find(value)
        groups: dict[int, list[Operation]] = {}
        for operation in fused:
            groups.setdefault(find(operation.outputs[0]), []).append(operation)
        return (self._region_of(group) for group in groups.values())

    def _region_of(self, operations: list[Operation]) -> Region:
        size, made = self.program.bytes, {value for op in operations for value in op.outputs}
        read = {value for op in operations for value in _read(op)}
        largest = max(map(size, made))
        return Region(
            frozenset(read - made),
            frozenset(made & self.written),
            max((size(value) for value in made if self.is_wide(value)), default=0),
            any(op.name in REDUCTIONS and size(op.inputs[0]) >= largest for op in operations),
            any(op.name in FUNCTIONS for op in operations),
            any(is_float8(self.program.values[value]) for value in made),
            self._sums_rows_last(operations, largest),
        )

    def _sums_rows_last(self, operations: list[Operation], largest: int) -> bool:
        """Whether rows of a function are summed, and no array of that size waits for a sum."""
        values, size = self.program.values, self.program.bytes
        sums = {
            op.outputs[0]
            for op in operations
            if op.name in REDUCTIONS
            and 2 * size(op.inputs[0]) >= largest
            and len(values[op.inputs[0]].shape) - 1 in op.dims
        }
        waiting = set(sums)
        for op in operations:
            if waiting.intersection(op.inputs):
                waiting.update(op.outputs)
        alone = all(size(value) < largest / 8 for value in waiting)
        return bool(sums) and alone and any(op.name in FUNCTIONS for op in operations)

    def is_wide(self, value: int) -> bool:
        """True if a value is floating-point with 32 bits or more."""
        dtype = self.program.values[value].dtype
        return np.issubdtype(dtype, np.floating) and dtype.itemsize >= 4


def activation_elements(program: Program) -> float:
    """Elements of the activation functions in a layer's forward pass: half of what they read and write."""
    moved = 0.0
    for region in Regions(program):
        if region.has_function and not region.reduces:
            arrays = (region.inputs | region.outputs) - set(program.inputs)
            moved += sum(program.values[value].size for value in arrays)
    return moved / 2


# --- Temporaries of a backward pass -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """Bytes that one layer's backward pass holds besides its residuals and its result.

    Attributes:
      peak: of the largest region: its outputs and internal arrays, and what was recomputed for later ones.
      gathered: of the largest gathered array.
      biases: written-out arrays of cuDNN's attention besides q, k and v.
    """

    peak: int
    gathered: int
    biases: int


def backward_work(backward: Backward, last_dims: tuple[int, int]) -> Work:
    """Walk a layer's backward pass in an order in which everything is computed as late as possible.

    Args:
      last_dims: of attention's scores (`Traced.scores`), which XLA recomputes only when it needs them.
    """
    program, regions = backward.program, Regions(backward.program)
    carried = program.inputs[backward.constants : backward.constants + backward.carried]
    depends = {value for value in carried if program.shape(value)}  # on the incoming gradient
    for operation in program.operations:
        if depends.intersection(operation.inputs):
            depends.update(operation.outputs)

    def is_score(value: int) -> bool:
        shape = program.shape(value)
        return len(shape) > 2 and shape[-2:] == last_dims

    def held_by(region: Region) -> int:
        written = [value for value in region.outputs if not regions.is_wide(value) or is_single(value)]
        new = [value for value in written if value in depends or is_score(value)]
        return region.inside + sum(map(program.bytes, new))

    narrowest = min(program.values[value].dtype.itemsize for value in depends if program.shape(value))

    def is_single(value: int) -> bool:
        """True if a wide value has the compute dtype itself, as in float32."""
        return program.values[value].dtype.itemsize == narrowest and not is_score(value)

    order = list(_as_late_as_possible(program, regions, depends))
    last = {value: time for time, (made, needed) in enumerate(order) for value in (*needed, made)}
    peak, again = 0, {}
    for time, (made, _) in enumerate(order):
        if made not in depends and not is_score(made):
            again[made] = program.bytes(made)
        region = regions.of(made)
        if region is not None and made in depends:
            peak = max(peak, held_by(region) + sum(again.values()))
        again = {value: size for value, size in again.items() if last[value] > time}
    gathered = [
        op.outputs[0]
        for op in program.operations
        if op.is_collective and program.bytes(op.outputs[0]) > sum(map(program.bytes, _read(op)))
    ]
    given = [value for op in program.operations if op.name == STAND_IN for value in _read(op)]
    largest, biases = ([program.bytes(value) for value in values] for values in (gathered, filter(is_score, given)))
    return Work(peak, max(largest, default=0), max(biases, default=0))


def _as_late_as_possible(
    program: Program, regions: Regions, depends: set[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Written values, and the values that each is computed from, in such an order."""
    made = set(program.inputs)

    def sources(operation: Operation) -> set[int]:
        values, seen, open_ = set(), set(), [operation]
        while open_:
            for value in set(_read(open_.pop())) - seen:
                seen.add(value)
                if value in regions.written or value in made or value not in regions.producer:
                    values.add(value)
                else:
                    open_.append(regions.producer[value])
        return values

    def make(value: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        if value in made or value not in regions.producer:
            return
        operation = regions.producer[value]
        needed = sorted(sources(operation))
        for source in needed:
            yield from make(source)
        for output in operation.outputs if operation.is_kernel else (value,):
            if output not in made:
                made.add(output)
                yield output, tuple(needed)

    for operation in program.operations:
        if operation.is_kernel and depends.intersection(operation.outputs):
            yield from make(operation.outputs[0])
    for value in program.outputs:
        if value is not None:
            yield from make(value)


def _read(operation: Operation) -> list[int]:
    """The values that an operation reads."""
    return [value for value in operation.inputs if value is not None]
