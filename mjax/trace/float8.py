"""Arrays that a traced program rounds to float8, what that moves, and where ranks agree on a scale."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from mjax.parallel.float8 import BACKWARD
from mjax.trace.program import Operation, Program, is_float8

JOINS = ("broadcast_in_dim", "pad", "add")
"""Operations of `products._joined`."""
SCALE_KERNELS = 3
"""Launches that find a scale, after the largest magnitudes of blocks."""


class Rounding(NamedTuple):
    """An array of a traced program that is rounded to float8.

    Attributes:
      sources: the array, or the arrays that it is joined from. They are written before: its scale depends on all
        elements.
      largest: the largest magnitude on this rank, before all ranks agree; None if they do not.
      value: what it is rounded to.
    """

    sources: frozenset[int]
    largest: int | None
    value: int


def roundings(program: Program) -> list[Rounding]:
    """The arrays that a traced program rounds to float8."""
    producer = {value: op for op in program.operations for value in op.outputs}

    def is_joined(value: int | None) -> bool:
        """True for parts with zeros around, and for sums of them."""
        made = producer.get(value)
        if made is None or made.name not in JOINS:
            return False
        parts = (part for part in made.inputs if part is not None and program.shape(part))
        return made.name != "add" or all(map(is_joined, parts))

    def rounding(operation: Operation) -> Rounding:
        sources, largest, open_ = set(), None, [operation.inputs[0]]
        while open_:
            value = open_.pop()
            made, of = producer.get(value), program.values[value]
            if made is not None and made.name == "pmax":
                largest = made.inputs[0]
            elif made is None or (of.shape and of.dtype == jnp.bfloat16 and not is_joined(value)):
                sources.update([value] if of.shape else [])
            else:
                open_ += [op for op in made.inputs if op is not None]
        return Rounding(frozenset(sources), largest, operation.outputs[0])

    rounds = (op for op in program.operations if op.name == "convert_element_type")
    return [rounding(op) for op in rounds if is_float8(program.values[op.outputs[0]])]


def transposed(program: Program, depends: set[int], kept: bool) -> tuple[float, int]:
    """Bytes and launches of the second copies of arrays in float8: a GPU multiplies float8 along contiguous dims only.

    The gradient of a weight sums over tokens, and all other products over columns, so an array that both use is needed
    as it is and transposed. The kernel that rounds it writes both; what was gathered is read and written once more.

    Args:
      program: traced; a product of an array with its weight, or of two arrays.
      depends: values that depend on the tokens.
      kept: arrays are kept for products of the backward pass, and transposed now.
    """
    bytes_, launches = 0.0, 0
    for operation in program.operations:
        for value in operation.outputs:
            if value not in depends or not is_float8(program.values[value]):
                continue
            products = [op for op in program.operations if op.name == "dot_general" and value in op.inputs]
            layouts = {depends.issuperset(op.inputs) for op in products}
            if products and len(layouts) + kept > 1:
                gathered = operation.is_collective
                bytes_, launches = bytes_ + program.bytes(value) * (1 + gathered), launches + gathered
    return bytes_, launches


def of_weights(program: Program, depends: set[int], kept: bool) -> tuple[float, int]:
    """Bytes and launches of rounding weights: each is read for its largest magnitude, read again and written, also
    transposed.

    Args:
      program, depends: as for `transposed`.
      kept: both copies are written now. The backward pass knows the scale, and rounds nothing again.
    """
    bytes_, launches, read = 0.0, 0, set()
    for op in roundings(program):
        (source,) = op.sources if len(op.sources) == 1 else (None,)
        if source is None or source in depends or op.largest is None:
            continue
        if source not in read:
            bytes_, launches = bytes_ + 2 * program.bytes(source), launches + 2 + SCALE_KERNELS
        bytes_ += program.bytes(op.value) * (1 + kept)
        read.add(source)
    return bytes_, launches


def agreed(program: Program, depends: set[int]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each all-reduce that a pass through a layer waits for to agree on a scale.

    XLA combines those that do not depend on each other: those of weights with one another, and those that a backward
    pass computes again with those of its gradients.

    Args:
      program, depends: as for `transposed`.
    """
    axes = {op.inputs[0]: op.axes for op in program.operations if op.name == "pmax"}
    largest = [op for op in roundings(program) if op.largest is not None]
    of_tokens = [op for op in largest if depends.intersection(op.sources)]
    gradients = [op for op in of_tokens if program.values[op.value].dtype == BACKWARD]
    of_weights = {axes[op.largest] for op in largest if depends.isdisjoint(op.sources)}
    return (*(axes[op.largest] for op in gradients or of_tokens), *of_weights)
