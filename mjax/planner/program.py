"""A traced program as one list of operations, and its matrix products.

A jaxpr nests: calls within calls, and views of views. Here calls are inlined, views and barriers resolved and dead code
removed, so that products, bytes and collectives can be counted on one list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from mjax.parallel.scopes import GROUPED

# The same bytes under another shape or name: a compiler moves nothing for them, or folds them into the next product.
# A copy between device and host is not a kernel either: an engine of its own makes it.
VIEWS = {
    "reshape", "squeeze", "expand_dims", "transpose", "pvary", "name", "copy", "stop_gradient", "reduce_precision",
    "device_put",
}  # fmt: skip
SILENT = {"pvary", "axis_index"}  # they name a mesh axis but send nothing
# Besides products and collectives, these read and write whole arrays; all other operations fuse.
STAND_IN = "pure_callback"  # for a kernel that exists only on a GPU (`models/parts/attention_kernels.py`)
KERNELS = {"dot_general", STAND_IN, "scatter", "scatter-add", "sort", "cumsum", "scan", "while", "cond"}
# These give all of their input, where that has no more and no fewer elements: a broadcast of a dim of 1 to 1.
RESIZING = {"broadcast_in_dim", "pad", "reduce_sum", "slice"}
# With float8 values a product on a GPU does these by itself (`parallel/float8.py`).
RESTORING = {"bitcast_convert_type", "convert_element_type", "mul"}


class Value(NamedTuple):
    """An array of a program."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


class Operation(NamedTuple):
    """One equation: its name, its inputs and outputs as numbers of values (None is a constant), the mesh axes that it
    names, and its product, if it is one."""

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...] = ()
    product: Product | None = None

    @property
    def is_kernel(self) -> bool:
        """Whether it reads and writes its own arrays, rather than being fused with its neighbours."""
        return self.name in KERNELS or self.is_collective

    @property
    def is_collective(self) -> bool:
        """Whether it communicates over a mesh axis."""
        return self.name not in SILENT and bool(self.axes)


class Program:
    """A jaxpr as one list of operations: calls inlined, views resolved, dead code removed.

    Attributes:
      values: by number.
      inputs: numbers of the arguments.
      outputs: numbers of the results; None is a constant.
      operations: in the order of the program.
    """

    def __init__(self, jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        self.values: list[Value] = []
        self._views: dict[int, int] = {}
        self.inputs = [self._new(v) for v in jaxpr.invars]
        every: list[Operation] = []
        outputs = self._inline(jaxpr, self.inputs, every)
        self.outputs = [self._viewed(value) for value in outputs]
        self.operations, self._views = _used(every, self.outputs), {}

    @property
    def products(self) -> tuple[Product, ...]:
        """Its matrix products, in order."""
        return tuple(op.product for op in self.operations if op.product is not None)

    def resized(self, shapes: Iterator[tuple[int, ...]]) -> Program:
        """The same operations on arrays of other sizes: the next of `shapes`, as `sizes` has them."""
        other = copy(self)
        other.values = [Value(next(shapes), value.dtype) for value in self.values]
        other.operations = [
            op if op.product is None else op._replace(product=Product(*next(shapes), *op.product[4:]))
            for op in self.operations
        ]
        views = {
            op.outputs[0]: op.inputs[0]
            for op in self.operations
            if other._is_whole(op.name, op.inputs, op.outputs) and not self._is_whole(op.name, op.inputs, op.outputs)
        }
        if views:
            other._views = views
            operations = [op._replace(inputs=tuple(map(other._viewed, op.inputs))) for op in other.operations]
            other.outputs = [other._viewed(value) for value in self.outputs]
            other.operations = _used([op for op in operations if op.outputs[0] not in views], other.outputs)
        return other

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """The shapes of all values, then the sizes of the products."""
        yield from (value.shape for value in self.values)
        yield from (product[:4] for product in self.products)

    def source(self, value: int | None) -> int | None:
        """The input of the program that a value is all or a part of, scaled or cast; None if it depends on several."""
        while (made := self._made.get(value)) is not None:
            used = [one for one in made.inputs if one is not None]
            if len(used) != 1 and made.name != "dynamic_slice":  # whose others say where
                return None
            value = used[0]
        return value

    @cached_property
    def _made(self) -> dict[int, Operation]:
        """The operation that made each value."""
        return {output: operation for operation in self.operations for output in operation.outputs}

    def bytes(self, value: int) -> int:
        """Bytes of a value."""
        return bytes_of(self.values[value])

    def shape(self, value: int) -> tuple[int, ...]:
        """Shape of a value."""
        return self.values[value].shape

    def plain(self) -> list:
        """Plain values for JSON, from which `of_plain` makes the program again."""
        return [_plain_values(self.values), self.inputs, self.outputs, self.operations]

    @classmethod
    def of_plain(cls, plain: list) -> Program:
        """The program of `plain`."""
        values, inputs, outputs, operations = plain
        program = cls.__new__(cls)
        program.values, program.inputs, program.outputs, program._views = _values_of(values), inputs, outputs, {}
        program.operations = [
            Operation(name, *map(tuple, numbers), product and Product(*product))
            for name, *numbers, product in operations
        ]
        return program

    def ends_with(self, value: int, dims: tuple[int, int]) -> bool:
        """Whether a value has these last dims, after others, as the scores of attention have."""
        return len(self.shape(value)) > 2 and self.shape(value)[-2:] == dims

    def _new(self, variable) -> int:
        self.values.append(Value(variable.aval.shape, variable.aval.dtype))
        return len(self.values) - 1

    def _viewed(self, value: int | None) -> int | None:
        while value in self._views:
            value = self._views[value]
        return value

    def _inline(self, jaxpr, arguments: Sequence[int | None], operations: list[Operation]) -> list[int | None]:
        numbers = dict(zip(jaxpr.invars, arguments, strict=True))
        numbers |= dict.fromkeys(jaxpr.constvars)

        def number(variable) -> int | None:
            return None if isinstance(variable, Literal) else numbers[variable]

        for equation in jaxpr.eqns:
            name, inner = equation.primitive.name, list(inner_jaxprs(equation))
            inputs = [number(variable) for variable in equation.invars]
            if len(inner) == 1 and name not in KERNELS and len(inner[0].invars) == len(inputs):
                results = self._inline(inner[0], inputs, operations)
                numbers |= dict(zip(equation.outvars, results, strict=True))
                continue
            if name == "optimization_barrier":
                numbers |= dict(zip(equation.outvars, inputs, strict=True))
                continue
            outputs = tuple(self._new(variable) for variable in equation.outvars)
            numbers |= dict(zip(equation.outvars, outputs, strict=True))
            view = (name in VIEWS and inputs[0] is not None) or self._restores(name, inputs)
            moves = name == "pad" and any(map(any, equation.params["padding_config"]))
            if view or (self._is_whole(name, inputs, outputs) and not moves):
                self._views[outputs[0]] = inputs[0]
                continue
            product = product_of(equation) if name == "dot_general" else None
            inputs = tuple(map(self._viewed, inputs))
            operations.append(Operation(name, inputs, outputs, axes_of(equation), product))
        return [number(variable) for variable in jaxpr.outvars]

    def _is_whole(self, name: str, inputs: Sequence[int | None], outputs: Sequence[int]) -> bool:
        """Whether an operation gives all of its first input and nothing else."""
        if name not in RESIZING or inputs[0] is None:
            return False
        return self.values[inputs[0]].size == self.values[outputs[0]].size

    def _restores(self, name: str, inputs: Sequence[int | None]) -> bool:
        """Whether an operation on float8 values, or on their bits, gives what they stand for."""
        if name not in RESTORING or inputs[0] is None:
            return False
        value = self.values[self._viewed(inputs[0])]
        return value.dtype == np.uint8 or is_float8(value)


def _plain_values(values: Iterable[Value]) -> list:
    return [[value.shape, value.dtype.name] for value in values]


def _values_of(plain: list) -> list[Value]:
    return [Value(tuple(shape), np.dtype(dtype)) for shape, dtype in plain]


def _used(operations: Sequence[Operation], outputs: Iterable[int | None]) -> list[Operation]:
    """The operations on whose results these values depend."""
    used, kept = set(outputs) - {None}, []
    for operation in reversed(operations):
        if used.intersection(operation.outputs):
            kept.append(operation)
            used.update(value for value in operation.inputs if value is not None)
    return kept[::-1]


def is_float8(value) -> bool:
    """Whether an abstract value is in float8."""
    return value.dtype.name.startswith("float8")


def inner_jaxprs(equation) -> Iterator[Any]:
    """The programs inside an equation, in the order of its parameters."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def axes_of(equation) -> tuple[str, ...]:
    """The mesh axes that an equation names."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(name for name in names if isinstance(name, str))


def bytes_of(value) -> int:
    """Bytes of an abstract value."""
    return math.prod(value.shape) * value.dtype.itemsize


# --- Products ---------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """[m, k] × [k, n], `batch` times.

    `of_weight` is True for a product with a weight, `grouped` for one of experts (`grouped.STAND_IN`): m rows for each
    of `batch` weights. Of other products with a weight there is one.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    of_weight: bool = True
    grouped: bool = False

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


def product_of(equation) -> Product:
    """The product of a `dot_general`."""
    (contracting, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    k, times = (math.prod(left[dim] for dim in dims) for dims in (contracting, batch))
    grouped = GROUPED in str(equation.source_info.name_stack)
    return Product(
        math.prod(left) // (k * times), math.prod(right) // (k * times), k, times, grouped or not batch, grouped
    )


# --- Layers with experts: any numbers of samples, experts and ranks from one trace ------------------------------------
#
# It is traced for numbers whose prime factors no other size has (`TAGS`), so each size shows which of them it has.
# Where a dim becomes 1, operations such as its broadcast do nothing and are left out (`RESIZING`). Where a size has
# further factors, or would not be whole, the layer is traced as it is.


TAGS = 59, 61
"""Primes: ranks of `expert`, and experts of such a rank as multiples of what a model has."""
SAMPLE_TAGS = 53, 83, 89, 113, 131
"""Primes that the number of samples is chosen from; 2 s + 1 is prime too."""


@dataclass(frozen=True)
class Part:
    """A traced part of a model on a rank.

    Attributes:
      programs: of it.
      values: abstract values besides theirs.
      same: the rest, which is the same with other numbers.
    """

    programs: tuple[Program, ...]
    values: tuple[Value, ...]
    same: Any

    def plain(self) -> list:
        """Plain values for JSON, from which `of_plain` makes the part again."""
        return [[program.plain() for program in self.programs], _plain_values(self.values), self.same]

    @classmethod
    def of_plain(cls, plain: list) -> Part:
        """The part of `plain`."""
        programs, values, same = plain
        return cls(tuple(map(Program.of_plain, programs)), tuple(_values_of(values)), same)

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """The sizes of all arrays and products."""
        for program in self.programs:
            yield from program.sizes()
        yield from (value.shape for value in self.values)

    def with_factors(self, factors: Mapping[int, Fraction | int], others: int) -> Part | None:
        """The same with other numbers for factors of sizes, or of sizes but for 1 or 2; None if a size has further
        factors, or would not be whole.

        Args:
          factors: what takes their place; the first go before the others.
          others: a number with all prime factors of sizes that stay.
        """

        @cache
        def changed(size: int) -> Fraction:
            for beyond in (0, 1, 2):
                rest, ratio = size - beyond, Fraction(1)
                for factor, number in factors.items():
                    while rest and rest % factor == 0:
                        rest, ratio = rest // factor, ratio * number
                if rest == 0 or without_factors(rest, others) == 1:
                    return rest * ratio + beyond
            return Fraction(1, 2)

        shapes = [tuple(map(changed, shape)) for shape in self.sizes()]
        if any(size.denominator > 1 for shape in shapes for size in shape):
            return None
        return self.resized(iter([tuple(map(int, shape)) for shape in shapes]))

    def resized(self, shapes: Iterator[tuple[int, ...]]) -> Part:
        """The same with other sizes."""
        programs = tuple(program.resized(shapes) for program in self.programs)
        return Part(programs, tuple(Value(next(shapes), value.dtype) for value in self.values), self.same)


def without_factors(number: int, others: int) -> int:
    """`number` without all prime factors of `others`."""
    while (common := gcd(number, others)) > 1:
        number //= common
    return number
