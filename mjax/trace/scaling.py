"""The trace of a layer with experts for any numbers of samples, experts and ranks of `expert`, from one trace.

It is traced for numbers whose prime factors no other size has (`TAGS`), so each size shows which of them it goes with.
Where a dim becomes 1, operations such as its broadcast do nothing and are left out (`program.RESIZING`). Where a size
has further factors, or would not be whole, the layer is traced as it is. `tests/trace/test_scaling.py` compares what is
computed with what is traced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import gcd
from typing import Any

from mjax.trace.program import Program, Value

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
    values: tuple[Any, ...]
    same: Hashable

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
