"""A traced program as one list of operations, and its matmuls.

A jaxpr nests: calls within calls, and views of views. Here calls are inlined, views and barriers resolved and dead code
removed, so that matmuls, arrays and collectives can be counted on one list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from mjax.parallel.named_scopes import GROUPED

# The same bytes under another shape or name: a compiler moves nothing for them, or folds them into the next matmul.
# A copy between device and host is not a kernel either: a copy engine makes it.
VIEWS = {
    "reshape", "squeeze", "expand_dims", "transpose", "pvary", "name", "copy", "stop_gradient", "reduce_precision",
    "device_put",
}  # fmt: skip
NO_COMMUNICATION = {"pvary", "axis_index", "pcast", "shard_map"}  # they name a mesh axis but send nothing
STAND_IN = "pure_callback"  # for a kernel that exists only on a GPU (`models/parts/flash.py`)
# In addition to matmuls and collectives, these read and write whole arrays; all other operations fuse.
KERNELS = {"dot_general", STAND_IN, "scatter", "scatter-add", "sort", "cumsum", "scan", "while", "cond"}
# These return their input unchanged if the number of elements is the same, such as a broadcast of a dim of 1 to 1.
RESIZING = {"broadcast_in_dim", "pad", "reduce_sum", "slice"}
# With float8 values a matmul on a GPU includes these (`parallel/float8.py`).
RESTORING = {"bitcast_convert_type", "convert_element_type", "mul"}


class Operation(NamedTuple):
    """One equation: its name, its inputs and outputs as numbers of values (None is a constant), the mesh axes that it
    names, its matmul, if it is one, and of a collective within groups of ranks their number and distance in a group."""

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    axes: tuple[str, ...] = ()
    product: Product | None = None
    ring: tuple[int, int] | None = None

    @property
    def is_collective(self) -> bool:
        """True if it communicates over a mesh axis."""
        return self.name not in NO_COMMUNICATION and bool(self.axes)


class Program:
    """A jaxpr as one list of operations: calls inlined, views resolved, dead code removed.

    Attributes:
      values: abstract arrays, by number.
      inputs: numbers of the arguments.
      outputs: numbers of the results; None is a constant.
      operations: in the order of the program.
    """

    def __init__(self, jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        jaxpr, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
        self.values, self.operations = [], []
        self._views: dict[int, int] = {}
        self.inputs = [self._add_value(v) for v in jaxpr.invars]
        self.outputs = [self._resolve_view(value) for value in self._inline(jaxpr, self.inputs)]

    def source(self, value: int | None) -> int | None:
        """The input of the program that a value is all or a part of, scaled or cast; None if it depends on several."""
        while (made := self._made.get(value)) is not None:
            used = [one for one in made.inputs if one is not None]
            if len(used) != 1 and made.name != "dynamic_slice":  # with the start indices
                return None
            value = used[0]
        return value

    @cached_property
    def _made(self) -> dict[int, Operation]:
        """The operation that made each value."""
        return {output: operation for operation in self.operations for output in operation.outputs}

    def bytes(self, value: int) -> int:
        """Bytes of a value."""
        return array_bytes(self.values[value])

    def shape(self, value: int) -> tuple[int, ...]:
        """Shape of a value."""
        return self.values[value].shape

    def _add_value(self, variable) -> int:
        self.values.append(variable.aval)
        return len(self.values) - 1

    def _resolve_view(self, value: int | None) -> int | None:
        while value in self._views:
            value = self._views[value]
        return value

    def _inline(self, jaxpr, arguments: Sequence[int | None]) -> list[int | None]:
        """Append the operations of a jaxpr to the list; return the numbers of its results."""
        numbers = dict(zip(jaxpr.invars, arguments, strict=True)) | dict.fromkeys(jaxpr.constvars)

        def number(variable) -> int | None:
            return None if isinstance(variable, Literal) else numbers[variable]

        for equation in jaxpr.eqns:
            name, inner = equation.primitive.name, list(inner_jaxprs(equation))
            inputs = [number(variable) for variable in equation.invars]
            if len(inner) == 1 and name not in KERNELS and len(inner[0].invars) == len(inputs):
                results = self._inline(inner[0], inputs)
            elif name == "optimization_barrier":
                results = inputs
            else:
                results = tuple(self._add_value(variable) for variable in equation.outvars)
                if inputs and inputs[0] is not None and self._is_view(name, inputs[0], results[0]):
                    self._views[results[0]] = inputs[0]
                else:
                    product = read_product(equation) if name == "dot_general" else None
                    viewed = tuple(map(self._resolve_view, inputs))
                    groups = equation.params.get("axis_index_groups")
                    ring = (len(groups[0]), groups[0][1] - groups[0][0]) if groups else None
                    self.operations.append(Operation(name, viewed, results, collective_axes(equation), product, ring))
            numbers |= dict(zip(equation.outvars, results, strict=True))
        return [number(variable) for variable in jaxpr.outvars]

    def _is_view(self, name: str, value: int, result: int) -> bool:
        """True if an operation returns all of its first input, or dequantizes float8 values or their bits."""
        if name in RESIZING:
            return self.values[value].size == self.values[result].size
        dtype = self.values[self._resolve_view(value)].dtype
        return name in VIEWS or (name in RESTORING and (dtype == np.uint8 or dtype.name.startswith("float8")))


def inner_jaxprs(equation) -> Iterator[Any]:
    """The programs inside an equation, in the order of its parameters."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item


def collective_axes(equation) -> tuple[str, ...]:
    """The mesh axes that an equation names."""
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    names = names if isinstance(names, (tuple, list)) else (names,)
    return tuple(name for name in names if isinstance(name, str))


def array_bytes(value) -> int:
    """Bytes of an abstract value."""
    return math.prod(value.shape) * value.dtype.itemsize


class Product(NamedTuple):
    """[m, k] × [k, n], `batch` times.

    `has_weight` is True for a matmul with a weight, `grouped` for one of experts (`grouped.STAND_IN`): m rows for each
    of `batch` weights. Of other matmuls with a weight there is one. `trained` is False if the weight is frozen.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    has_weight: bool = True
    grouped: bool = False
    trained: bool = True

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.m * self.n * self.k


def read_product(equation) -> Product:
    """The matmul of a `dot_general`."""
    (contracting, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (variable.aval.shape for variable in equation.invars)
    k, times = (math.prod(left[dim] for dim in dims) for dims in (contracting, batch))
    grouped = GROUPED in str(equation.source_info.name_stack)
    m, n = (math.prod(shape) // (k * times) for shape in (left, right))
    return Product(m, n, k, times, grouped or not batch, grouped)
