"""The file that defines a model of your own, as a run remembers it: model.json in its folder.

mjax never executes that file because a run folder names it. `--config FILE.py` executes it, or your program imports it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from mjax.config.model import ModelConfig, is_user_defined
from mjax.config.plain_values import read
from mjax.errors import UsageError
from mjax.utils.files import write_whole

MODEL_FILE = "model.json"


@dataclass(frozen=True)
class ModelFile:
    """The contents of model.json.

    Attributes:
      file: absolute path of the file that defines the class; None for a notebook or an interpreter.
      sha256: digest of the file; None without one.
      parameters: number of the model's parameters, which cannot be counted without the class.
    """

    file: str | None
    sha256: str | None
    parameters: int


def source_file(cls: type[ModelConfig]) -> str | None:
    """The absolute path of the file that defines a model of your own; None for a model of mjax, and for a class of a
    notebook or of the program that runs, which no command can execute for its class alone."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.abspath(file) if is_user_defined(cls) and cls.__module__ != "__main__" and file else None


def save_model_file(folder: Path, model: ModelConfig, parameters: int) -> None:
    """Record in a run folder which file defines its model; nothing for a model of mjax."""
    if not is_user_defined(type(model)):
        (folder / MODEL_FILE).unlink(missing_ok=True)
        return
    file = source_file(type(model))
    found = ModelFile(file, file and _digest(file), parameters)
    write_whole(folder / MODEL_FILE, json.dumps(asdict(found), indent=2) + "\n")


def read_model_file(folder: Path) -> ModelFile | None:
    """The file that a run remembers; None for a model of mjax, and for a run of an older version.

    Raises:
      UsageError: model.json is damaged.
    """
    file = folder / MODEL_FILE
    fix = "remove it to forget which file defines the model of this run"
    return read(ModelFile, file, fix) if file.exists() else None


def describe_change(folder: Path, cls: type[ModelConfig]) -> str | None:
    """A note if the file that defines `cls` is not the one with which the run in `folder` was trained."""
    before, file = read_model_file(folder), source_file(cls)
    now = file and _digest(file)
    if before is None or now == before.sha256:
        return None
    if file == before.file:
        return f"note: {file} has changed since {folder} was trained with it"
    was, here = before.file or "a notebook", file or "a notebook"
    return f"note: {folder} was trained with the model of {was}, which is not the same as that of {here}"


def refuse_unknown(folder: Path, kind: str) -> None:
    """Refuse to use a run whose model is of a kind that nothing has registered, if it remembers the file.

    Raises:
      UsageError: it does; the sentence says what to type.
    """
    remembered = read_model_file(folder)
    if remembered is None:
        return
    file = remembered.file
    where = f"defined in {file}" if file else "defined in a notebook"
    where += ", which is not there any more" if file and not Path(file).is_file() else ""
    given = file if file and Path(file).is_file() else "FILE.py"
    fix = f"type --config {shlex.quote(given)}, or in Python call mjax.load_config({given!r}) or import it first"
    raise UsageError(f"{folder} holds {kind!r}, a model of your own {where}, which no run executes by itself; {fix}")


def run_flags(folder: Path, model: ModelConfig) -> str:
    """`--run FOLDER`, with `--config FILE.py` for a model of your own: what a command needs to use the run."""
    file = source_file(type(model))
    return f"--run {shlex.quote(str(folder))}" + (f" --config {shlex.quote(file)}" if file else "")


def new_run_flags(folder: Path, model: ModelConfig) -> str:
    """`--config … --name NEW`: a new run with the settings of the run in `folder`, or those of the model's file."""
    remembered = read_model_file(folder)
    file = source_file(type(model)) or (remembered and remembered.file) or f"{folder}/config.json"
    return f"--config {shlex.quote(file)} --name NEW"


def _digest(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
