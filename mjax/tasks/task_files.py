"""Files of tasks with labels: their lines, their names, and sentences about what was left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mjax.errors import RunError, UsageError

UNREADABLE = (ValueError, RecursionError)  # what the json module raises on text that is no JSON


def lines(file: Path) -> Iterator[tuple[str, str]]:
    """FILE:LINE and text of each line that is not blank; only a line feed ends a line, alone or after a return.

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
    """Names of the columns of a tab-separated file, and FILE:LINE and fields of each further line.

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
    """The JSON object that is `text`.

    Raises:
      UsageError: it is none; `expected` says what one looks like.
    """
    try:
        values = json.loads(text)
    except UNREADABLE as error:
        raise UsageError(f"{source} is not JSON ({error}); {expected} is expected") from None
    if "\\ud" in text.lower() and any(
        "\ud800" <= letter <= "\udfff" for letter in json.dumps(values, ensure_ascii=False)
    ):
        raise UsageError(f"{source} holds half of a surrogate pair, which is no text; replace or drop it")
    if not isinstance(values, dict):
        raise UsageError(f"{source} holds {text.strip()!r:.40} and no JSON object; {expected} is expected")
    return values


def must_exist(file: Path) -> Path:
    """`file`.

    Raises:
      UsageError: it is not there, or is a folder.
    """
    if not file.is_file():
        raise UsageError(f"there is no file {file}; give the task's files as published")
    return file


def by_name(files: Sequence[Path], name: Callable[[Path], str]) -> dict[str, Path]:
    """`files` by the names of their validation sets.

    Raises:
      UsageError: two have the same name.
    """
    named: dict[str, Path] = {}
    for file in files:
        if name(file) in named:
            raise UsageError(
                f"{named[name(file)]} and {file} would both be called {name(file)}; give one, or rename the other"
            )
        named[name(file)] = file
    return named


def by_stem(files: Sequence[Path]) -> dict[str, Path]:
    """One file as "validation"; several by their names without the ending."""
    return {"validation": files[0]} if len(files) == 1 else by_name(files, lambda file: file.stem)


def check_labels(labelled: Sequence[bool], file: Path, role: Literal["train", "validation"]) -> None:
    """Refuse a file by which of its examples have labels.

    Raises:
      UsageError: there is no example, or only some have labels, or none where they are to be learned from.
    """
    if not labelled:
        raise UsageError(f"{file} holds no example; give the task's files as published")
    if any(labelled) != all(labelled):
        raise UsageError(
            f"{file} has labels for {sum(labelled):,} of its {len(labelled):,} examples; give a file that has all "
            "of them, or none"
        )
    if role == "train" and not labelled[0]:
        raise UsageError(f"{file} has no labels to train on; give the training file, and this one for validation")


def finite(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`outputs`, logits of validation sets.

    Raises:
      RunError: one is not finite, so no answer can be told from them.
    """
    for name, logits in outputs.items():
        if not np.isfinite(logits).all():
            raise RunError(
                f"the model's outputs for {name} are not finite: its weights or its activations are not; try "
                "--precision.compute fp32, or an earlier checkpoint"
            )
    return outputs
