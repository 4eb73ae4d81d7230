"""Plain values from files, checked against types: config.json, and other small JSON files (`read`)."""

import dataclasses
import functools
import sys
import typing
from collections.abc import Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, is_typeddict

from mjax.errors import UsageError, suggestion
from mjax.utils.files import read_json

T = TypeVar("T")
MAX_INT = 2**63  # above any valid number; JSON can contain larger ones

get_type_hints = functools.lru_cache(256)(typing.get_type_hints)  # evaluates annotations at each call
get_args, get_origin = functools.lru_cache(1024)(get_args), functools.lru_cache(1024)(get_origin)


def read(kind: type[T], file: Path, fix: str, missing: str | None = None) -> T:
    """Read a small JSON file, and check its value against a type.

    Args:
      kind: as for `check`.
      file: in UTF-8.
      fix: end of the sentence about a damaged file: the remedy.
      missing: end of the sentence about a missing file.

    Raises:
      UsageError: the file is missing, unreadable or not JSON, or its value has another type.
    """
    return check(kind, read_json(file, fix, missing), str(file), fix)


def read_if_exists(kind: type[T], file: Path, fix: str) -> T | None:
    """`read` a file; None if it does not exist."""
    return read(kind, file, fix) if file.exists() else None


def check(kind: type[T], value: Any, source: str, fix: str) -> T:
    """Check `value` against a type, and return it; a dataclass is built.

    A TypedDict may have more keys, which a later version has written. With `total=False` it may lack keys.

    Raises:
      UsageError: the type differs; `source` and `fix` begin and end the sentence.
    """
    if dataclasses.is_dataclass(kind):
        try:
            return build(kind, value, source)
        except UsageError as error:
            raise UsageError(f"{error}; {fix}") from None
    if problem := misfit(value, kind):
        raise UsageError(f"{source}: {problem}; {fix}")
    return value


def misfit(value: Any, kind: Any, name: str = "") -> str | None:
    """Describe the first part of `value`, called `name`, that does not match its type in `kind`; None: all match."""
    dot, origin, kinds = f"{name}." if name else "", get_origin(kind), get_args(kind)
    if is_typeddict(kind) and isinstance(value, dict):
        if missing := sorted(kind.__required_keys__ - value.keys()):
            return f"there is no {dot}{missing[0]}"
        hints = get_type_hints(kind)
        return _first_misfit((value[key], hint, f"{dot}{key}") for key, hint in hints.items() if key in value)
    if origin is list and isinstance(value, list):
        return _first_misfit((part, kinds[0], f"{name}[{number}]") for number, part in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return _first_misfit((part, kinds[1], f"{dot}{key}") for key, part in value.items())
    if origin not in (list, dict) and not is_typeddict(kind) and _fits_whole(value, kind):
        return None
    return f"{name or 'the content'} is {value!r}, which is not {describe(kind)}"


def _first_misfit(parts: Iterable[tuple[Any, Any, str]]) -> str | None:
    return next(filter(None, (misfit(*part) for part in parts)), None)


def _fits_whole(value: Any, kind: Any) -> bool:
    """True if a value matches a tuple, a choice, a union or a scalar."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):  # JSON has lists
            return False
        kinds = kinds[:1] * len(value) if kinds[1:] == (...,) else kinds
        return len(value) == len(kinds) and all(map(fits, value, kinds))
    if origin is Literal:
        return value in kinds
    return any(fits(value, option) for option in kinds) if kinds else _fits_scalar(value, kind)


def fits(value: Any, kind: Any) -> bool:
    """True if a plain value matches `kind`."""
    return misfit(value, kind) is None


def build(cls: type[T], values: Any, source: str, prefix: str = "") -> T:
    """Build the dataclass `cls` from plain values, as `dataclasses.asdict` returns them; missing fields have defaults.

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
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    known, arguments = [*defaults], {}
    for name, value in values.items():
        if type(value) is type(default := defaults.get(name, MISSING)) and value == default:
            arguments[name] = value  # most values; checking a type takes time
            continue
        if name not in known:
            near = suggestion(name, known, "")
            raise UsageError(f"{source}: unknown field {prefix}{name}{near and f'; {near}'}")
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = build(hints[name], value, source, f"{prefix}{name}.")
        elif fits(value, hints[name]):
            is_tuple = isinstance(value, list) and get_origin(hints[name]) is not list
            arguments[name] = to_tuples(value) if is_tuple else value
        else:
            raise UsageError(f"{source}: {prefix}{name} is {value!r}, which is not {describe(hints[name])}")
    for f in dataclasses.fields(cls):
        if f.name not in arguments and f.default is f.default_factory is MISSING:
            raise UsageError(f"{source}: there is no {prefix}{f.name}")
    return cls(**arguments)


def to_tuples(value: Any) -> Any:
    """A value of JSON with tuples in place of its lists, which may be in one another."""
    return tuple(map(to_tuples, value)) if isinstance(value, list | tuple) else value


def _fits_scalar(value: Any, kind: type) -> bool:
    """True if a value is a number in range, text that can be a path, or an instance of `kind`."""
    if kind is Any:
        return True
    if kind is float:  # NaN is out of range
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_INT
    if kind is str:  # possibly a path
        return isinstance(value, str) and "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)
    return isinstance(value, kind)


def describe(kind: Any) -> str:
    """Describe a type: 'a whole number'."""
    if is_typeddict(kind) or kind == dict[str, Any]:
        return "an object"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if get_origin(kind) is list or (get_origin(kind) is tuple and get_args(kind)[1:] == (...,)):
        return f"a list of {describe(get_args(kind)[0])}".replace("of an object", "of objects")
    if get_origin(kind) is tuple:
        return "[" + ", ".join(describe(part) for part in get_args(kind)) + "]"
    if get_origin(kind) is dict:
        return f"an object in which each value is {describe(get_args(kind)[1])}"
    if get_args(kind):
        return " or ".join(describe(option) for option in get_args(kind))
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[kind]
