"""A new run that starts from the weights alone of another (`--init`).

    runs/q  ──weights of its checkpoint──▶  runs/new: optimizer from scratch, step 0, its own data, schedule and mesh

The weights must mean the same in both: the architecture and every field that gives a weight its shape or its place are
equal. Lengths, rotary base, window and dropout may differ, and the differences are printed. The run folder keeps the
origin in `init.json`; a run that has checkpoints continues from them, and does not read the origin again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mjax.checkpoint.runs import checkpoint_steps
from mjax.config import Config, as_flag, differences, read_config, read_settings
from mjax.config.bounds import fields_of
from mjax.config.model import TUNING, ModelConfig, kind_of
from mjax.config.model_file import new_run_flags
from mjax.config.plain_values import build
from mjax.errors import UsageError, either
from mjax.utils.files import read_json, write_whole

ORIGIN = "init.json"
UNSEEN = ("attention", "sequence", "rope_theta", "vocabulary", "vocabulary_multiple")
"""Fields of a model, beside those of `TUNING`, that its weights do not show, once their shapes are the same."""
BY_DEFAULT = {"feed_forward": "mlp_width", "kv_heads": "groups", "head_dim": "head_size"}
"""Fields that follow from others by default, and the property with the value in use."""


@dataclass(frozen=True)
class Origin:
    """Where the weights of a run come from: the contents of init.json.

    Attributes:
      run: absolute path of the run folder.
      step: the checkpoint; None before it is chosen: the newest intact one.
      changed: fields of the model that differ, with the value there and here.
    """

    run: str
    step: int | None
    changed: dict[str, list[str]]

    def __str__(self) -> str:
        step = "" if self.step is None else f", checkpoint {self.step}"
        changed = "; ".join(f"{name} {there}, now {here}" for name, (there, here) in self.changed.items())
        return f"{self.run}{step}" + (f" ({changed})" if changed else "")


def origin_of(folder: Path) -> Origin | None:
    """The origin that a run folder keeps; None: its weights were drawn at random or converted.

    Raises:
      UsageError: the file is damaged.
    """
    file = folder / ORIGIN
    if not file.is_file():
        return None
    return build(Origin, read_json(file, "remove it to forget where the weights of this run come from"), str(file))


def save_origin(folder: Path, origin: Origin | None) -> None:
    """Record where the weights of a new run come from, or that they were drawn at random."""
    if origin is None:
        (folder / ORIGIN).unlink(missing_ok=True)
    else:
        write_whole(folder / ORIGIN, json.dumps(asdict(origin), indent=2) + "\n")


def choose_origin(folder: Path, config: Config, init: Path | None, step: int | None = None) -> Origin | None:
    """The origin of the run in `folder`, if it is a new one; None: from its own checkpoints or from random weights.

    Args:
      folder: of the run.
      config: of the run.
      init: folder of the run to start from.
      step: of its checkpoint, by default the newest.

    Raises:
      UsageError: there is no such checkpoint, its model differs, or `folder` holds a run of another origin.
    """
    if init is None:
        return None
    if checkpoint_steps(folder):
        _check_same(folder, init, step)
        return None
    steps = checkpoint_steps(init)
    if not steps:
        raise UsageError(
            f"--init {init} has no checkpoint; give the folder of a run, or convert a model of Hugging Face into one: "
            f"python -m mjax convert from-hf {init} runs/NAME"
        )
    if step is not None and step not in steps:
        raise UsageError(f"--step {step}: {init} has no such checkpoint; use {either(steps)}")
    return Origin(str(init.resolve()), step, _changed(init, config))


def _check_same(folder: Path, init: Path, step: int | None) -> None:
    """Refuse another origin than that of the run in `folder`, which has checkpoints."""
    if init.resolve() == folder.resolve():
        raise UsageError(
            f"--init {init} is the folder of this run; add --name NEW for a new run, or leave --init out to continue it"
        )
    origin = origin_of(folder)
    if origin is None or Path(origin.run) != init.resolve() or step not in (None, origin.step):
        began = "with weights of its own" if origin is None else f"from {origin}"
        asked = f"{init}, checkpoint {step}" if step is not None else init
        raise UsageError(
            f"{folder} has checkpoints and began {began}, not from {asked}; add --name NEW for a new run, or leave "
            "--init out to continue it"
        )


def _changed(init: Path, config: Config) -> dict[str, list[str]]:
    """The fields of the model that differ, with the value there and here.

    Raises:
      UsageError: the weights would not fit, or would mean something else.
    """
    saved = read_settings(init / "config.json")
    if kind_of(saved.model) != kind_of(config.model):
        raise UsageError(
            f"--init {init} holds {saved.model.title} and this config describes {config.model.title}; choose a config "
            f"of the same model, or type {new_run_flags(init, saved.model)} for its own"
        )
    saved = read_config(init / "config.json")
    found = {
        name: [_value(model, name) for model in (saved.model, config.model)]
        for name in (field.partition(".")[2] for field in differences(saved, config) if field.startswith("model."))
        if name != "attention"
    }
    found = {name: values for name, values in found.items() if values[0] != values[1]}
    if wrong := [name for name in found if not _may_differ(name, saved.model, config.model)]:
        values = "; ".join(f"model.{name} {found[name][0]}, here {found[name][1]}" for name in wrong)
        flags = " ".join(as_flag(f"model.{name}", found[name][0]) for name in wrong)
        raise UsageError(
            f"--init {init} holds the weights of another model ({values}); type {flags}, "
            f"or {new_run_flags(init, saved.model)} for its own settings"
        )
    return {f"model.{name}": [str(value) for value in values] for name, values in found.items()}


def _value(model: ModelConfig, name: str) -> Any:
    """The value of a field that is in use; that of an optional one may follow from others."""
    value = getattr(model, name)
    return getattr(model, BY_DEFAULT[name]) if value is None and name in BY_DEFAULT else value


def _may_differ(name: str, saved: ModelConfig, model: ModelConfig) -> bool:
    if name == "sequence":
        return not model.learned_positions
    if name in ("vocabulary", "vocabulary_multiple"):
        return saved.padded_vocabulary == model.padded_vocabulary
    return name in UNSEEN or any(field == name and TUNING in marks for field, _, _, marks in fields_of(type(model)))
