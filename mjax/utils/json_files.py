"""Reading JSON files: any problem gives one sentence, and memory is bounded by the size of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mjax.errors import UsageError

LARGEST = 2**26  # bytes; the largest tokenizer.json of a published model has half of that
DEEPEST = 64  # nesting depth of objects and lists


def read_json(file: Path, fix: str, missing: str | None = None) -> Any:
    """The value in a JSON file.

    Args:
      file: in UTF-8.
      fix: ends the sentence about a damaged file: what to do.
      missing: ends the sentence about a missing file.

    Raises:
      UsageError: the file is missing, unreadable, too large or not JSON.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST + 1)
    except FileNotFoundError:
        raise UsageError(f"{file} does not exist; {missing or fix}") from None
    except (OSError, ValueError) as error:  # a folder, or an invalid name
        raise UsageError(f"{file} cannot be read ({getattr(error, 'strerror', error)}); {fix}") from None
    if len(content) > LARGEST:
        raise UsageError(f"{file} has more than {LARGEST:,} bytes, which is too large; {fix}")
    return parse_json(content, str(file), fix)


def parse_json(content: bytes | str, source: str, fix: str) -> Any:
    """The value of `content` as JSON; `source` and `fix` begin and end the sentence if it is not JSON.

    Raises:
      UsageError: it is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        value = json.loads(content if isinstance(content, str) else content.decode("utf-8"))
        if not _is_deep(value):
            return value
        problem = "too many objects and lists are nested"
    except RecursionError:
        problem = "too many objects and lists are nested"
    except ValueError as error:  # also invalid UTF-8, and numbers of thousands of digits
        problem = str(error)
    raise UsageError(f"{source} is not JSON ({problem}); {fix}")


def _is_deep(value: Any) -> bool:
    """True if `value` is nested deeper than `DEEPEST`: its `repr` would fail later."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            part
            for parts in level
            if isinstance(parts, dict | list)
            for part in (parts.values() if isinstance(parts, dict) else parts)
        ]
        if not level:
            return False
    return True
