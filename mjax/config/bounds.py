"""Bounds of numbers, declared with their types and checked in one place.

    layers: Annotated[int, Bounds(ge=1)] = 24      or, as it is common, layers: Count = 24

All errors have one form, for flags, files and Python: `--model.layers is 0; it must be at least 1`. Infinite numbers
and NaN are always rejected, and a choice (`Literal`) has only its values. This module imports no JAX.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from mjax.errors import UsageError, either, suggestion


@dataclass(frozen=True)
class Bounds:
    """The numbers that a field may have: from `ge` or above `gt`, up to `le` or below `lt`."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    such_as: str = ""
    """An example value, if the bounds alone do not suggest one."""

    def hold(self, number: float) -> bool:
        """True if `number` is within the bounds."""
        ends = (operator.ge, self.ge), (operator.gt, self.gt), (operator.le, self.le), (operator.lt, self.lt)
        return all(end is None or compare(number, end) for compare, end in ends)

    def __str__(self) -> str:
        """'at least 0 and below 1, such as 0.5'."""
        if dataclasses.astuple(self) == (0, None, None, None, ""):
            return "0 or more"
        ends = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        words = [f"{word} {'2^32' if end == 2**32 else f'{end:,}'}" for word, end in ends.items() if end is not None]
        return " and ".join(words) + (f", such as {self.such_as}" if self.such_as else "")


Count = Annotated[int, Bounds(ge=1)]
CountOrZero = Annotated[int, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, lt=2**32)]
NotNegative = Annotated[float, Bounds(ge=0)]
Positive = Annotated[float, Bounds(gt=0)]
Share = Annotated[float, Bounds(ge=0, lt=1)]


@functools.cache
def section_fields(cls: type) -> tuple[tuple[str, str, Any, tuple[Any, ...]], ...]:
    """Name, flag name, type and annotations of each field of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        named = (mark.name for mark in marks if hasattr(mark, "aliases"))  # tyro's
        flag = next((name for name in named if name is not None), field.name)
        inside = (mark for option in get_args(kind) if get_origin(option) is Annotated for mark in get_args(option)[1:])
        rows.append((field.name, flag.replace("_", "-"), kind, (*marks, *inside)))
    return tuple(rows)


def check_bounds(values: Any, prefix: str = "--") -> None:
    """Check the numbers and choices of a dataclass, possibly nested.

    Args:
      values: the dataclass.
      prefix: before the names of its fields; they are written as flags if it starts with --, else as in a file.

    Raises:
      UsageError: a number is out of bounds, or a choice unknown; the sentence lists the allowed values.
    """
    spelled = prefix.startswith("--")
    for name, flag, kind, marks in section_fields(type(values)):
        value, flag = getattr(values, name), flag if spelled else name
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{prefix}{flag}." if flag else prefix)
            continue
        flag = ("--" if spelled and is_unsectioned(marks) else prefix) + flag
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise UsageError(describe_choice(flag, value, get_args(kind), marks))
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{flag} is {value}; it must be a finite number")
        if kind is int and not isinstance(value, Integral):
            raise UsageError(f"{flag} is {value!r}; it must be a whole number")
        for bounds in (mark for mark in marks if isinstance(mark, Bounds) and value is not None):
            if not (isinstance(value, Real) and bounds.hold(value)):
                raise UsageError(f"{flag} is {value!r}; it must be {bounds}")


def describe_choice(flag: str, value: Any, choices: Sequence[Any], marks: Sequence[Any]) -> str:
    """`float16 is not a value of --precision.compute; did you mean fp16?`; `marks` may have the value elsewhere."""
    names, word = [str(choice) for choice in choices], str(value)
    translations = [mark.value(word.lower(), "") for mark in marks if hasattr(mark, "value")]
    word = next((translation for translation in translations if translation in names), word)
    return f"{value} is not a value of {flag}; {suggestion(word, names, f'use {either(names)}')}"


def is_unsectioned(marks: tuple[Any, ...]) -> bool:
    """True if the flag of a field with these annotations has no section, such as --name."""
    return any(getattr(mark, "prefix_name", None) is False for mark in marks)
