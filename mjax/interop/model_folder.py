"""A folder that appears whole or not at all, and the JSON files in the folders of others."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mjax.data.atomic import rename, to_disk
from mjax.errors import UsageError
from mjax.json_files import read_json


def check_output(folder: Path, overwrite: bool = False) -> None:
    """Refuse to write a folder where there is something already.

    Args:
      folder: to write.
      overwrite: whether to replace what is plainly an exported model: it holds a config.json, and files only.

    Raises:
      UsageError: `folder` is a file, or holds anything that must stay.
    """
    inside = list(folder.iterdir()) if folder.is_dir() else []
    if not folder.exists() or (folder.is_dir() and not inside):
        return
    if not overwrite:
        raise UsageError(f"{folder} exists; give a folder that is empty or not there yet")
    if not (folder / "config.json").is_file() or any(entry.is_dir() for entry in inside):
        raise UsageError(
            f"--overwrite replaces models only, and {folder} is not a folder of config.json and files beside it; give "
            "another folder, or delete it"
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes its name, and the place of what is there, when all is written.

    Check before whether there is anything that must stay (`check_output`).
    """
    folder = folder.resolve()  # of a symbolic link, what it points to
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
        if old.exists() and not folder.exists():  # stopped between the two
            rename(old, folder)
        shutil.rmtree(holder, ignore_errors=True)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file from outside.

    Raises:
      UsageError: there is no such file, or it does not hold a JSON object.
    """
    fix = "restore it, or download the model again"
    values = read_json(file, fix, "give a folder that save_pretrained wrote")
    if not isinstance(values, dict):
        raise UsageError(f"{file} has no JSON object; {fix}")
    return values


def write_object(file: Path, values: dict[str, Any]) -> None:
    """Write a JSON object as `transformers` does."""
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
