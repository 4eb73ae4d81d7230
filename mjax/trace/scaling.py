"""The trace of a layer or a head with any numbers of ranks and samples, from the traces with two.

On 8 ranks of `model` a layer has the operations that it has on 2, and each dim of its arrays is the same, or it goes
with a power of the number of ranks. Two traces tell which, so a search computes those on more ranks. The same holds for
ranks of `context`, with which rows of experts go as their tiles do. A layer with experts is traced for numbers of
samples, experts and ranks of `expert` whose prime factors no other size has (`TAGS`): one trace then tells the sizes
for all. Where a dim becomes 1, operations such as its broadcast do nothing and are left out (`program.RESIZING`). Some
are traced nevertheless: where a dim would not be whole, and where the operations of two traces differ.
`tests/trace/test_scaling.py` compares what is computed with what is traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import product
from math import gcd
from typing import Any, NamedTuple

from mjax.trace.program import Program, Value

Numbers = tuple[int, ...]
TAGS = 59, 61
"""Primes: ranks of `expert`, and experts of such a rank as multiples of what a model has."""
SAMPLE_TAGS = 53, 83, 89, 113, 131
"""Primes that the number of samples is chosen from; 2 s + 1 is prime too."""
POWERS = (0, -1, 1, -2, 2)
"""Of a number, that a size may go with."""


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

    @cached_property
    def operations(self) -> tuple:
        """Everything but sizes."""
        return self.same, tuple(
            (
                *map(tuple, (program.inputs, program.outputs)),
                tuple((value.dtype, len(value.shape)) for value in program.values),
                tuple(
                    (op.name, op.inputs, op.outputs, op.axes, op.product and op.product[4:])
                    for op in program.operations
                ),
            )
            for program in self.programs
        )


def without_factors(number: int, others: int) -> int:
    """`number` without all prime factors of `others`."""
    while (common := gcd(number, others)) > 1:
        number //= common
    return number


class Form(NamedTuple):
    """A size as `beyond` + a part that goes with a power of a number, and with the tiles if `tiled`."""

    beyond: int
    tiled: bool
    power: int


FORMS = tuple(map(Form._make, product((0, 1), (False, True), POWERS)))
"""In the order in which they are tried."""


class Step:
    """A change of one number, which also changes the tiles of experts' rows.

    Attributes:
      tiles: the power of the number that these go with; None if they go with none.
    """

    def __init__(self, numbers: tuple[int, int], tiles: tuple[int, int]):
        (few, many), (before, after) = numbers, tiles
        self.grows = few <= many

        def ratio(power: int) -> tuple[int, int]:
            return (many**power, few**power) if power > 0 else (few**-power, many**-power)

        self.tiles = next((n for n in POWERS if before * ratio(n)[0] == after * ratio(n)[1]), None)
        self._ratios = {
            form: (more * (after if form.tiled else 1), less * (before if form.tiled else 1))
            for form, (more, less) in ((form, ratio(form.power)) for form in FORMS)
            if self.tiles is None or not form.tiled
        }

    def form(self, size: int, other: int) -> Form | None:
        """The form of a size that becomes `other`; None if it has none."""
        return next((form for form in self._ratios if self.of(size, form) == other), None)

    def of(self, size: int, form: Form) -> int | None:
        """The size after the change; None if it would not be whole."""
        more, less = self._ratios[form]
        scaled, rest = divmod((size - form.beyond) * more, less)
        return None if rest else scaled + form.beyond


class Parts:
    """Traced parts, and what two of them tell of others.

    Attributes:
      tiles: of experts' rows, with all else that a part depends on and some numbers.
    """

    def __init__(self, tiles: Callable[..., int]):
        self.tiles = tiles
        self._traced: dict[Hashable, list[tuple[Numbers, Part]]] = defaultdict(list)
        self._forms: dict[Hashable, list[tuple[Form, ...]]] = {}

    def on(self, numbers: Numbers, others: Hashable, trace: Callable[[], Part]) -> Part:
        """A part.

        Args:
          numbers: that its sizes go with, of ranks of each axis that splits it.
          others: everything else that it depends on.
          trace: it.
        """
        bases = self._traced[others]
        for before, part in bases:
            if (scaled := self._scaled(before, part, numbers, others)) is not None:
                return scaled
        part = trace()
        for before, other in bases:
            axis, *more = (axis for axis in range(len(numbers)) if before[axis] != numbers[axis])
            if not more and part.operations == other.operations:
                step = Step((before[axis], numbers[axis]), (self.tiles(others, *before), self.tiles(others, *numbers)))
                forms = [tuple(map(step.form, *sizes)) for sizes in zip(other.sizes(), part.sizes(), strict=True)]
                if not any(None in of for of in forms):
                    self._forms.setdefault((others, axis, step.tiles, part.operations), forms)
        bases.append((numbers, part))
        return part

    def _scaled(self, now: Numbers, part: Part, numbers: Numbers, others: Hashable) -> Part | None:
        """`part`, which was traced with the numbers `now`, with `numbers`; None if it has to be traced."""
        shapes = list(part.sizes())
        for axis, many in enumerate(numbers):
            if now[axis] == many:
                continue
            before, now = now, (*now[:axis], many, *now[axis + 1 :])
            step = Step((before[axis], many), (self.tiles(others, *before), self.tiles(others, *now)))
            forms = self._forms.get((others, axis, step.tiles, part.operations))
            if forms is None or not step.grows:
                return None
            for number, (sizes, of) in enumerate(zip(shapes, forms, strict=True)):
                if any(of_dim != FORMS[0] for of_dim in of):
                    scaled = tuple(map(step.of, sizes, of))
                    if None in scaled:
                        return None
                    shapes[number] = scaled
        return part.resized(iter(shapes))
