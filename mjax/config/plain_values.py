"""A config from plain values: the contents of config.json, checked against the types of the dataclasses."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mjax.config.removed import REMOVED, instead_of_value
from mjax.errors import UsageError, suggestion

T = TypeVar("T")
WHOLE = 2**63  # above any valid number, and below what JSON can spell


def build(cls: type[T], values: Any, source: str, prefix: str = "") -> T:
    """The dataclass `cls` from plain values as given by `dataclasses.asdict`; missing fields take their defaults.
    Fields that were removed are dropped if that changes nothing (`removed.py`).

    Args:
      cls: fields are numbers, text, booleans, None, `Literal`s, tuples, lists and objects of these, and dataclasses of
        such fields.
      values: an object, as in JSON.
      source: where the values come from, for messages.
      prefix: of field names in messages, such as `mesh.`.

    Raises:
      UsageError: a field is unknown or missing, or has a value of another type.
    """
    if not isinstance(values, dict):
        raise UsageError(f"{source}: {prefix or 'the config'} must be an object, not {values!r}")
    hints = get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    arguments = {}
    for name, value in values.items():
        if name not in known and (gone := REMOVED.get(f"{prefix}{name}")) is not None:
            if value in gone.harmless:
                continue
            raise UsageError(f"{source}: {prefix}{name} {value!r} was removed; {gone.instead}")
        if name not in known:
            raise UsageError(f"{source}: unknown field {prefix}{name}{suggestion(name, known)}")
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = build(hints[name], value, source, f"{prefix}{name}.")
        elif _fits(value, hints[name]):
            listed = isinstance(value, list) and get_origin(hints[name]) is not list
            arguments[name] = _as_tuples(value) if listed else value
        else:
            gone = instead_of_value(f"{prefix}{name}", value)
            raise UsageError(f"{source}: {prefix}{name} is {value!r}, which is not {_describe(hints[name])}{gone}")
    for f in dataclasses.fields(cls):
        if f.name not in arguments and f.default is f.default_factory is dataclasses.MISSING:
            raise UsageError(f"{source}: there is no {prefix}{f.name}")
    return cls(**arguments)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # JSON has lists
        kinds = get_args(kind)
        if kinds[1:] == (...,):
            if value is None or isinstance(value, str):  # none or one, from before there were several (`DataConfig`)
                return value is None or _fits(value, kinds[0])
            kinds = kinds[:1] * len(value) if isinstance(value, (list, tuple)) else ()
        return isinstance(value, (list, tuple)) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(part, *get_args(kind)) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(part, get_args(kind)[1]) for part in value.values())
    if get_args(kind):
        return any(_fits(value, option) for option in get_args(kind))
    if kind is float:
        in_range = not isinstance(value, int) or abs(value) <= sys.float_info.max
        return isinstance(value, (int, float)) and not isinstance(value, bool) and in_range
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < WHOLE
    if kind is str:  # may be any path or name
        return isinstance(value, str) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[1:] == (...,)):
        return f"a list of {_describe(get_args(kind)[0])}"
    if get_origin(kind) is tuple:
        return "[" + ", ".join(_describe(part) for part in get_args(kind)) + "]"
    if get_origin(kind) is dict:
        return f"an object in which each value is {_describe(get_args(kind)[1])}"
    if get_args(kind):
        return " or ".join(_describe(option) for option in get_args(kind))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[kind]
