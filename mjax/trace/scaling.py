"""The trace of a layer or a head on any number of ranks of `model` or `context`, from the traces on two numbers.

On 8 ranks of `model` a layer has the operations that it has on 2, and each dim of its arrays is the same, or it goes
with a power of the number of ranks. Two traces tell which, so a search computes those on more ranks. Some are traced
nevertheless: where a dim would not be whole, where one would become 1 (a broadcast is another operation), and where the
operations of two traces differ. `tests/trace/test_scaling.py` compares what is computed with what is traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax

from mjax.trace.program import Program, axes_of

Ranks = tuple[int, ...]
POWERS = (0, -1, 1, -2, 2)
"""Of a number of ranks, that a size may go with."""


@dataclass(frozen=True)
class Part:
    """A traced part of a model on a rank.

    Attributes:
      programs: of it.
      values: abstract values besides theirs.
      same: the rest, which does not depend on the number of ranks.
    """

    programs: tuple[Program, ...]
    values: tuple[Any, ...]
    same: Hashable

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """The sizes of all arrays and products."""
        for program in self.programs:
            yield from program.sizes()
        yield from (value.shape for value in self.values)

    def resized(self, shapes: Iterator[tuple[int, ...]]) -> Part:
        """The same with other sizes."""
        programs = tuple(program.resized(shapes) for program in self.programs)
        return Part(
            programs, tuple(jax.ShapeDtypeStruct(next(shapes), value.dtype) for value in self.values), self.same
        )

    @cached_property
    def operations(self) -> tuple:
        """Everything but sizes."""
        return self.same, tuple(
            (
                program.inputs,
                program.outputs,
                [(value.dtype, len(value.shape)) for value in program.values],
                [
                    (op.name, op.inputs, op.outputs, axes_of(op.equation), op.product and op.product[4:])
                    for op in program.operations
                ],
            )
            for program in self.programs
        )


class Parts:
    """Traced parts, and what two of them tell of others."""

    def __init__(self):
        self._traced: dict[Hashable, list[tuple[Ranks, Part]]] = defaultdict(list)
        self._powers: dict[Hashable, tuple[tuple, list[tuple[int, ...]]]] = {}

    def on(self, ranks: Ranks, others: Hashable, kind: Hashable, trace: Callable[[], Part]) -> Part:
        """A part on so many ranks.

        Args:
          ranks: of each axis that splits it.
          others: everything else that it depends on.
          kind: of these, what decides which dims depend on a number of ranks.
          trace: it.
        """
        bases = self._traced[others]
        for before, part in bases:
            if (scaled := self._scaled(before, part, ranks, kind)) is not None:
                return scaled
        part = trace()
        for before, other in bases:
            axis, *more = (axis for axis in range(len(ranks)) if before[axis] != ranks[axis])
            if not more and (kind, axis) not in self._powers and part.operations == other.operations:
                powers = _powers_between(before[axis], other, ranks[axis], part)
                if powers is not None:
                    self._powers[kind, axis] = part.operations, powers
        bases.append((ranks, part))
        return part

    def _scaled(self, before: Ranks, part: Part, ranks: Ranks, kind: Hashable) -> Part | None:
        """`part`, which was traced on the ranks `before`, on `ranks`; None if it has to be traced there."""
        shapes = list(part.sizes())
        for axis, (few, many) in enumerate(zip(before, ranks, strict=True)):
            if few == many:
                continue
            operations, powers = self._powers.get((kind, axis), (None, []))
            if few > many or part.operations != operations:
                return None
            for number, sizes in enumerate(shapes):
                if any(powers[number]):
                    scaled = tuple(map(partial(_times, few, many), sizes, powers[number]))
                    if None in scaled:
                        return None
                    shapes[number] = scaled
        return part.resized(iter(shapes))


def _powers_between(few: int, part: Part, many: int, other: Part) -> list[tuple[int, ...]] | None:
    """The power of a number of ranks that each size goes with; None if one goes with none."""

    def power(one: int, two: int) -> int | None:
        return next(
            (
                n
                for n in POWERS
                if one * many ** max(n, 0) * few ** max(-n, 0) == two * few ** max(n, 0) * many ** max(-n, 0)
            ),
            None,
        )

    found = [tuple(map(power, *sizes)) for sizes in zip(part.sizes(), other.sizes(), strict=True)]
    return None if any(None in powers for powers in found) else found


def _times(few: int, many: int, size: int, power: int) -> int | None:
    """A size with `many` ranks, from that with `few`; None if it is not whole, or becomes 1."""
    if power < 0:
        few, many = many, few
    scaled, rest = divmod(size * many ** abs(power), few ** abs(power))
    return None if rest or (scaled == 1 and size > 1) else scaled
