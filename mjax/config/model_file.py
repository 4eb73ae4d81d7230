"""model.json of a run folder: the file that defines a custom model.

mjax never executes a file that a run folder names. `--config FILE.py` executes it, or your program imports it.
"""

import hashlib
import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from mjax.config.model import ModelConfig, is_user_defined
from mjax.config.plain_values import read_if_exists
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
    """The absolute path of the file that defines a custom model; None for a model of mjax, and for a class that is
    defined in a notebook or in the running program."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return os.path.abspath(file) if is_user_defined(cls) and cls.__module__ != "__main__" and file else None


def save_model_file(folder: Path, model: ModelConfig, parameters: int) -> None:
    """Write model.json for a custom model."""
    if not is_user_defined(type(model)):
        (folder / MODEL_FILE).unlink(missing_ok=True)
        return
    file = source_file(type(model))
    values = ModelFile(file, file and _digest(file), parameters)
    write_whole(folder / MODEL_FILE, json.dumps(asdict(values), indent=2) + "\n")


def read_model_file(folder: Path) -> ModelFile | None:
    """Read model.json; None for a model of mjax, and for a run of an older version.

    Raises:
      UsageError: model.json is damaged.
    """
    fix = "remove it to forget which file defines the model of this run"
    return read_if_exists(ModelFile, folder / MODEL_FILE, fix)


def describe_change(folder: Path, cls: type[ModelConfig]) -> str | None:
    """A note if the file that defines `cls` differs from the one that the run in `folder` was trained with."""
    before, file = read_model_file(folder), source_file(cls)
    now = file and _digest(file)
    if before is None or now == before.sha256:
        return None
    if file == before.file:
        return f"note: {file} has changed since {folder} was trained with it"
    old, new = before.file or "a notebook", file or "a notebook"
    return f"note: {folder} was trained with the model of {old}, which differs from the model of {new}"


def refuse_unknown(folder: Path, kind: str) -> None:
    """Refuse a run of a custom model that is not registered; do nothing without a model.json.

    Raises:
      UsageError: there is a model.json; the sentence contains the line to type.
    """
    if (model_file := read_model_file(folder)) is None:
        return
    file = model_file.file
    where = f"defined in {file}" if file else "defined in a notebook"
    where += ", which no longer exists" if file and not Path(file).is_file() else ""
    name = file if file and Path(file).is_file() else "FILE.py"
    fix = f"type --config {shlex.quote(name)}, or in Python call mjax.load_config({name!r}) or import it first"
    custom = f"{folder} contains {kind!r}, a custom model {where}"
    raise UsageError(f"{custom}; mjax executes no file that a run names: {fix}")


def run_flags(folder: Path, model: ModelConfig) -> str:
    """`--run FOLDER`, with `--config FILE.py` for a custom model: the flags to use a run."""
    file = source_file(type(model))
    return f"--run {shlex.quote(str(folder))}" + (f" --config {shlex.quote(file)}" if file else "")


def new_run_flags(folder: Path, model: ModelConfig) -> str:
    """`--config … --name NEW`: a new run with the settings of the run in `folder`, or of the model's file."""
    model_file = read_model_file(folder)
    file = source_file(type(model)) or (model_file and model_file.file) or f"{folder}/config.json"
    return f"--config {shlex.quote(file)} --name NEW"


def _digest(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
