"""Writing a folder atomically, and reading JSON files of foreign folders."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mjax.errors import UsageError
from mjax.utils.files import read_json, rename, to_disk


def check_output(folder: Path, overwrite: bool | None = None) -> None:
    """Refuse to overwrite an existing folder.

    Args:
      folder: to write.
      overwrite: whether to replace an exported model: a folder with a config.json, and files only; None for a command
        without `--overwrite`.

    Raises:
      UsageError: `folder` is a file, or contains anything else.
    """
    inside = list(folder.iterdir()) if folder.is_dir() else []
    if not folder.exists() or (folder.is_dir() and not inside):
        return
    is_model = (folder / "config.json").is_file() and not any(entry.is_dir() for entry in inside)
    if not overwrite:
        replace = "--overwrite replaces it; or " if overwrite is False and is_model else ""
        raise UsageError(f"{folder} exists; {replace}give a folder that is empty or does not exist")
    if not is_model:
        raise UsageError(
            f"--overwrite replaces models only, and {folder} is not a folder of config.json and files beside it; give "
            "another folder, or delete it"
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which replaces it when everything is written.

    Call `check_output` before.
    """
    folder = folder.resolve()  # the target of a symbolic link
    folder.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f"{folder.name}.writing-", dir=folder.parent))
    temporary, old = holder / "new", holder / "old"
    temporary.mkdir()
    try:
        yield temporary
        to_disk(temporary)
        if folder.exists():
            rename(folder, old)
        rename(temporary, folder)
    finally:
        if old.exists() and not folder.exists():  # stopped between the two renames
            rename(old, folder)
        shutil.rmtree(holder, ignore_errors=True)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a foreign file.

    Raises:
      UsageError: there is no such file, or it is not a JSON object.
    """
    fix = "restore it, or download the model again"
    values = read_json(file, fix, "give a folder written by save_pretrained")
    if not isinstance(values, dict):
        raise UsageError(f"{file} has no JSON object; {fix}")
    return values


def write_object(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON object in the format of `transformers`."""
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
