"""Files of labelled tasks: their lines, columns and objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mjax.errors import UsageError
from mjax.utils.files import parse_json


def lines(file: Path) -> Iterator[tuple[str, str]]:
    """FILE:LINE and text of each non-blank line; only a line feed ends a line, possibly after a carriage return.

    Raises:
      UsageError: there is no such file, or it is not UTF-8.
    """
    with must_exist(file).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{file}:{number} is not UTF-8 (byte {error.start}); give the published file"
                ) from None
            if text.strip():
                yield f"{file}:{number}", text


def table(file: Path, *needed: str) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """Column names of a tab-separated file, and FILE:LINE and fields of each further line.

    Raises:
      UsageError: the file is missing or empty, or has no column of a name in `needed`.
    """
    rows = ((source, text.split("\t")) for source, text in lines(file))
    source, columns = next(rows, (f"{file}:1", []))
    columns = [name.strip() for name in columns]
    if missing := [name for name in needed if name not in columns]:
        raise UsageError(
            f"{source} names no column {' and no '.join(missing)}; give the published file, whose first line does"
        )
    return columns, rows


def json_object(text: str, source: str, expected: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
      UsageError: it is not one; `expected` shows the format.
    """
    values = parse_json(text, source, f"{expected} is expected")
    if "\\ud" in text.lower() and any(
        "\ud800" <= letter <= "\udfff" for letter in json.dumps(values, ensure_ascii=False)
    ):
        raise UsageError(f"{source} has half of a surrogate pair, which is not valid text; replace or drop it")
    if not isinstance(values, dict):
        raise UsageError(f"{source} is {text.strip()!r:.40}, not a JSON object; {expected} is expected")
    return values


def must_exist(file: Path) -> Path:
    """`file`.

    Raises:
      UsageError: it does not exist, or is a folder.
    """
    if not file.is_file():
        raise UsageError(f"there is no file {file}; give the task's files as published")
    return file
