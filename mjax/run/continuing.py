"""Which settings may change between two starts of a run.

A run folder holds one experiment. Each config field is in one of three classes:

    FIXED     weights or moments would not fit, or would mean something else: refused
    LEARNED   changes what is learned: refused, unless --allow-change is given
    FREE      changes how long, on which devices or in which portions, and what is saved, shown or watched

A field that is derived from another by default is compared by its effective value (`_meaning`), and data by digest:
other tokens under the same name are different data, and the same tokens under another name are not. A longer run is the
same run. So is one whose learning rates change only from here on: a stable phase may end in a decay of any shape and
length. The learning-rate schedule and Megatron's sample order depend on the number of steps, so notes say how to keep
the former ones.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mjax.checkpoint.runs import checkpoint_steps
from mjax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    HealthConfig,
    LogConfig,
    MeshConfig,
    differences,
    read_config,
)
from mjax.config.batch_size import BatchSizes, training_samples
from mjax.config.bounds import fields_of
from mjax.config.checks import check_batch_sizes
from mjax.config.datasets import parse_blend
from mjax.config.model import TUNING
from mjax.config.model_file import change_of_file, new_run_flags
from mjax.data.indexed import IndexedDataset
from mjax.errors import UsageError
from mjax.parallel.axes import NAMES
from mjax.step.schedule import decay_end, decay_start, learning_rate, wsd_decay_steps
from mjax.utils.files import write_whole


def _every_field(section: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(section))


# FIXED are the fields of a model, except for the attention kernel and those marked `TUNING` in its config; and the name
# of the optimizer, whose moments another one cannot use.
LEARNED = {
    "data": (
        "path", "split", "train_path", "valid_path", "mock", "own", "samples", "reset_positions", "reset_attention",
        "mask_eod_loss", "validation_tail", "mask_probability", "short_probability", "eod",
    ),
    "optimizer": (
        "learning_rate", "min_learning_rate", "schedule", "warmup_steps", "decay_steps",
        "wsd_decay_steps", "wsd_decay", "weight_decay", "beta1", "beta2", "epsilon", "muon_adjust_lr",
        "clip_norm",
    ),
    "precision": (
        "compute", "loss_scale", "initial_loss_scale", "loss_scale_window",
    ),
    "train": ("global_batch", "batch_rampup", "batch_schedule", "seed"),
}  # fmt: skip
FREE = {
    "model": ("attention",),
    "mesh": (*NAMES, "context_attention", "sequence_parallel", "schedule", "chunks", "zero"),
    "data": ("cache",),
    "train": (
        "steps", "tokens", "taken", "micro_batch", "recompute", "unroll", "loss_chunks", "eval_interval",
        "eval_batches",
    ),
    # Whole sections: none of their fields affects what is learned from which samples.
    "checkpoint": _every_field(CheckpointConfig),
    "health": _every_field(HealthConfig),
    "log": _every_field(LogConfig),
}  # fmt: skip

SCHEDULE = (
    "learning_rate", "min_learning_rate", "schedule", "warmup_steps", "decay_steps", "wsd_decay_steps",
    "wsd_decay",
)  # fmt: skip
"""Fields of the optimizer that may change if the learning rates of the steps taken do not."""
OPTIMIZER = "optimizer.name"
PATHS = ("path", "train_path", "valid_path")
DIGESTS = "data.json"


def changes_since(
    folder: Path, config: Config, allow: bool = False, resumed: bool = False, step: int | None = None
) -> list[str]:
    """What `config` changes in the run in `folder`, one line each; nothing if there is none.

    Args:
      folder: of the run.
      config: of this start.
      allow: whether to continue with settings that change what is learned.
      resumed: whether the run was given by its folder, for the message.
      step: checkpoint to continue from; by default the newest.

    Raises:
      UsageError: the run has another model, or was trained with other settings or on other data.
    """
    steps = checkpoint_steps(folder)
    if not steps:
        return []
    before = read_config(folder / "config.json")
    changed = differences(before, config)
    for name, (old, new) in changed.items():
        if name == OPTIMIZER and steps != [0]:
            raise UsageError(
                f"{folder} was trained with {old}, whose moments {new} cannot use; type --{OPTIMIZER} {old} to "
                f"continue it, or --init {folder} --name NEW for a new run from its weights"
            )
        if _is_fixed(config, name):
            raise UsageError(
                f"{folder} holds a run of another model ({name} {old}, now {new}); "
                "choose another --name, or leave the model as it was"
            )
    rates_kept = _rates_are_kept(before, config, steps[-1] if step is None else step)
    if not allow and steps != [0]:  # checkpoint 0 has weights that no step of this run produced
        refused = [
            f"{name} {_shown(old)}, now {_shown(new)}"
            for name, (old, new) in changed.items()
            if not _is_in(FREE, name)
            and _meaning(before, name) != _meaning(config, name)
            and not (rates_kept and _is_in({"optimizer": SCHEDULE}, name))
        ]
        refused = [*refused, *_changed_data(folder, before.data, config.data)]
        if refused:
            other = f"{new_run_flags(folder, config.model)} instead of --run" if resumed else "--name NEW"
            raise UsageError(
                f"{folder} was trained with other settings ({'; '.join(refused)}); "
                f"for a new run type {other}, and to continue this one with the change --allow-change"
            )
    shown = (name for name in changed if name != "train.taken")
    note = change_of_file(folder, type(config.model))
    return [
        *filter(None, [note]),
        *(f"changed {name}: {changed[name][0]} → {changed[name][1]}" for name in shown),
        *_notes(before, config, steps != [0]),
        *_note_on_decay(before, config, steps, step),
    ]


def after_steps_taken(config: Config, folder: Path, step: int | None = None) -> Config:
    """`config` with the batches that the run in `folder` has taken, where they are not its own (`train.taken`).

    So a change of the batch begins where the run is: its next sample is the first that no step has read, and tokens and
    learning rate count from there.

    Args:
      config: of this start.
      folder: of the run, which may not have begun.
      step: checkpoint to continue from; by default the newest.

    Raises:
      UsageError: the sizes of its batch are malformed.
    """
    steps = checkpoint_steps(folder)
    if not steps:
        return replace(config, train=replace(config.train, taken=()))
    check_batch_sizes(replace(config, mesh=MeshConfig(), train=replace(config.train, micro_batch=1)))
    before, last = read_config(folder / "config.json"), steps[-1] if step is None else step
    taken = BatchSizes.of(before).stretches(last)
    for known in ((), before.train.taken, tuple(taken)):
        config = replace(config, train=replace(config.train, taken=known))
        if BatchSizes.of(config).stretches(last) == taken:
            break
    return config


def save_digests(folder: Path, data: DataConfig) -> None:
    """Save digests of the run's data in the run folder."""
    write_whole(folder / DIGESTS, json.dumps(_digests(data), indent=2) + "\n")


def _is_fixed(config: Config, name: str) -> bool:
    section, knob = name.split(".")
    tuned = {field for field, _, _, marks in fields_of(type(config.model)) if TUNING in marks}
    return section == "model" and not _is_in(FREE, name) and knob not in tuned


def _is_in(fields: dict[str, tuple[str, ...]], name: str) -> bool:
    section, knob = name.split(".")
    return knob in fields.get(section, ())


def _meaning(config: Config, name: str) -> Any:
    """The effective value of a field that another field determines by default; data have their digests."""
    match name.split("."):
        case "model", "mlm_activation":
            return getattr(config.model, "mlm_activation", None) or config.model.activation
        case "data", "samples":
            return training_samples(config)
        case "data", knob if knob in PATHS:
            return None
        case "optimizer", "decay_steps":
            return decay_end(config)
        case "optimizer", "wsd_decay_steps":
            return wsd_decay_steps(config)
        case section, knob:
            return getattr(getattr(config, section), knob)


def _notes(before: Config, config: Config, begun: bool) -> list[str]:
    """Side effects of a longer or shorter run, which has `begun` unless it is an import."""
    notes, old, new = [], before.optimizer, config.optimizer
    if before.train.taken != config.train.taken and config.train.taken:
        sizes = BatchSizes.of(config)
        notes.append(
            f"note: the batch is {sizes.size(sizes.begin)} from step {sizes.begin + 1} on, which begins at sample "
            f"{sizes.samples_before(sizes.begin):,}, where the run is"
        )
    if not begun:
        return []
    if training_samples(before) != training_samples(config) and not config.data.mock:
        notes.append(
            "note: Megatron's sample order depends on their number, so it differs from the previous one; "
            f"--data.samples {training_samples(before)} keeps it if that many are enough"
        )
    decays = new.schedule in ("cosine", "linear", "wsd")
    if decays and old.decay_steps is None and new.decay_steps is None and before.train.steps != config.train.steps:
        notes.append(
            f"note: the learning rate follows --train.steps: its decay ends at step {config.train.steps} instead of "
            f"{before.train.steps}; --optimizer.decay-steps {before.train.steps} keeps it"
        )
    return notes


def _rates_are_kept(before: Config, config: Config, step: int) -> bool:
    """Whether both schedules have the same learning rate at each of the first `step` steps."""
    sizes = BatchSizes.of(before)
    taken = np.unique(np.linspace(0, max(step - 1, 0), 2000).astype(int))
    samples = np.array([sizes.samples_before(int(number)) for number in taken])
    return np.array_equal(learning_rate(before, samples), learning_rate(config, samples))


def _note_on_decay(before: Config, config: Config, steps: list[int], step: int | None) -> list[str]:
    """That the learning rate rises again, if a run continues after its final decay has begun."""
    now, last = steps[-1] if step is None else step, decay_start(before)
    kept = before.optimizer.schedule != "wsd" or config.optimizer.schedule != "wsd" or now <= last
    if kept or _rates_are_kept(before, config, now):
        return []
    stable = [number for number in steps if 0 < number <= last]
    way = f"--step {stable[-1]} continues from before it" if stable else "no checkpoint from before it is left"
    return [f"note: the learning rate had decayed since step {last} and rises again after checkpoint {now}; {way}"]


# --- Data -------------------------------------------------------------------------------------------------------------


def _digests(data: DataConfig) -> dict[str, list[str]]:
    """Digests of the datasets of each blend, in its order: {'path': ['5d41…']}."""
    blends = {} if data.mock else {name: getattr(data, name) for name in PATHS if getattr(data, name)}
    return {
        name: [IndexedDataset(prefix).digest for prefix in parse_blend(values, f"--data.{name}").prefixes]
        for name, values in blends.items()
    }


def _changed_data(folder: Path, before: DataConfig, now: DataConfig) -> list[str]:
    """The datasets that are not those of the run; not those with the same tokens under another path."""
    kept, found = _kept_digests(folder / DIGESTS), {}
    if kept is not None and not now.mock:
        found = _digests(now)
    changed = []
    for name in PATHS:
        old, new = getattr(before, name), getattr(now, name)
        if not kept or name not in kept or name not in found:  # a run of an older version, or synthetic tokens
            if old != new:
                changed.append(f"data.{name} {_shown(old)}, now {_shown(new)}")
        elif kept[name] != found[name]:
            tokens = "with other tokens than before" if old == new else f"now {_shown(new)}"
            changed.append(f"data.{name} {_shown(old)}, {tokens}")
        elif parse_blend(old).weights != parse_blend(new).weights:
            changed.append(f"data.{name} {_shown(old)}, now {_shown(new)}")
    return changed


def _kept_digests(file: Path) -> dict[str, list[str]] | None:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        kept = None
    if not isinstance(kept, dict):
        raise UsageError(f"{file} is damaged; remove it to continue without comparing the data with those of the run")
    return kept


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
