"""Settings that may change between two starts of a run, and the origin of a run that starts from another.

A run folder holds one experiment. Each config field is in one of three classes, by its marks (`config/marks.py`):

    fixed     weights or moments would not fit, or would mean something else: rejected. Fields of a model without
              `TUNING` or `FREE`, and the name of the optimizer
    learned   changes the training: rejected, unless --allow-change is given
    FREE      changes how long, on which devices or in which portions, and what is saved, shown or watched

A field that is derived from another by default is compared by its effective value (`_effective_field`). Data are
compared by digest: other tokens under the same name are different data, the same tokens under another name are not. A
longer run is the same run. A run also stays the same if its learning rates change only from here on: a stable phase may
end in a decay of any shape and length. The learning-rate schedule and Megatron's sample order depend on the number of
steps, so notes name the flags that restore the previous ones.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mjax.checkpoint.folders import checkpoint_steps
from mjax.config import Config, DataConfig, differing_fields, read_config, read_settings, to_flag
from mjax.config.batch_size import BatchSizes, training_samples
from mjax.config.datasets import parse_blend
from mjax.config.marks import FILE_ONLY, FREE, NEW_RUN, RATE, TUNING, effective_value, field_marks, names_with
from mjax.config.model import ModelConfig
from mjax.config.model_file import describe_change, new_run_flags
from mjax.config.plain_values import read_if_exists
from mjax.config.run import BLENDS, describe_missing_run
from mjax.errors import UsageError, either
from mjax.step.learning_rate import decay_end, decay_start, learning_rate, wsd_decay_steps
from mjax.utils.files import write_whole
from mjax.utils.stores import to_absolute

OPTIMIZER = "optimizer.name"
DIGESTS = "data.json"


def changes_since(
    folder: Path, config: Config, allow: bool = False, resumed: bool = False, step: int | None = None
) -> list[str]:
    """The changes that `config` makes to the run in `folder`, one line each; nothing if there is none.

    Args:
      folder: of the run.
      config: of this start.
      allow: whether to continue with settings that change the training.
      resumed: whether the run was given by its folder, for the message.
      step: checkpoint to continue from; by default the newest.

    Raises:
      UsageError: the run has another model, or was trained with other settings or on other data.
    """
    steps = checkpoint_steps(folder)
    if not steps:
        return []
    before = read_config(folder / "config.json")
    changed = differing_fields(before, config)
    for name, (old, new) in changed.items():
        if name == OPTIMIZER and steps != [0]:
            fix = f"type --{OPTIMIZER} {old} to continue it, or --init {folder} --name NEW for a new run"
            raise UsageError(f"{folder} was trained with {old} and {new} cannot use its moments; {fix}")
        if name.startswith("model.") and field_marks(config, name).isdisjoint({FREE, TUNING}):
            other = f"holds a run of another model ({name} {old}, now {new})"
            raise UsageError(f"{folder} {other}; choose another --name, or leave the model unchanged")
    now = steps[-1] if step is None else step
    same_rates = _has_same_rates(before, config, now)
    if not allow and steps != [0]:  # checkpoint 0 has weights that no step of this run produced
        rejected = _find_other_training(folder, before, config, same_rates)
        if rejected:
            other = f"{new_run_flags(folder, config.model)} instead of --run" if resumed else "--name NEW"
            fix = f"for a new run type {other}, and to continue this one with the change --allow-change"
            raise UsageError(f"{folder} was trained with other settings ({'; '.join(rejected)}); {fix}")
    shown = (name for name in changed if name != "train.batch_history")
    note = describe_change(folder, type(config.model))
    return [
        *filter(None, [note]),
        *(f"changed {name}: {changed[name][0]} → {changed[name][1]}" for name in shown),
        *_notes(before, config, steps, None if same_rates else now),
    ]


def _find_other_training(folder: Path, before: Config, config: Config, same_rates: bool) -> list[str]:
    """The differences in settings or data that change the training."""
    # An import of Megatron's optimizer has had no data before this start.
    compared = replace(before, data=config.data) if before.data == DataConfig() else before
    rejected = [
        f"{name} {_quote(old)}, now {_quote(new)}"
        for name, (old, new) in differing_fields(before, config).items()
        if FREE not in field_marks(config, name)
        and _effective_field(compared, name) != _effective_field(config, name)
        and not (same_rates and RATE in field_marks(config, name))
    ]
    return rejected + _find_changed_data(folder, compared.data, config.data)


def after_steps_taken(config: Config, folder: Path, step: int | None = None) -> Config:
    """Return `config` with the batches that the run in `folder` has taken, where they differ (`train.batch_history`).

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
        return replace(config, train=replace(config.train, batch_history=()))
    before, last = read_config(folder / "config.json"), steps[-1] if step is None else step
    stretches = BatchSizes.from_config(before).stretches(last)
    for history in ((), before.train.batch_history, tuple(stretches)):
        config = replace(config, train=replace(config.train, batch_history=history))
        if BatchSizes.from_config(config).stretches(last) == stretches:
            break
    return config


def with_positions(config: Config, folder: Path, init: Path | None) -> Config:
    """Return `config` with the `max_position_embeddings` of the weights that it trains further, unless it sets one.

    Args:
      config: of this start.
      folder: of the run, which may not have begun.
      init: folder of the run to start from.
    """
    weights, model = folder if checkpoint_steps(folder) else init, config.model
    if weights is None or model.max_position_embeddings is not None or not (weights / "config.json").is_file():
        return config
    saved = read_settings(weights / "config.json").model
    longer = saved.sequence if saved.sequence > model.sequence else None
    return replace(config, model=replace(model, max_position_embeddings=saved.max_position_embeddings or longer))


def save_digests(folder: Path, data: DataConfig) -> None:
    """Save digests of the run's data in the run folder."""
    write_whole(folder / DIGESTS, json.dumps(compute_digests(data), indent=2) + "\n")


def _effective_field(config: Config, name: str) -> Any:
    """The effective value of a field that another field determines by default; data have their digests."""
    match name.split("."):
        case "data", "train_samples":
            return None if config.data.conversations else training_samples(config)  # their order does not depend on it
        case "data", field if field in BLENDS:
            return None
        case "optimizer", "decay_steps":
            return decay_end(config)
        case "optimizer", "wsd_decay_steps":
            return wsd_decay_steps(config)
        case section, field:
            return effective_value(getattr(config, section), field)


def _notes(before: Config, config: Config, steps: list[int], now: int | None) -> list[str]:
    """Side effects of a longer or shorter run.

    Args:
      steps: of the checkpoints; an import has only 0.
      now: the one to continue from, if the learning rates of its steps differ.
    """
    notes, old, new = [], before.optimizer, config.optimizer
    if before.train.batch_history != config.train.batch_history and config.train.batch_history:
        sizes = BatchSizes.from_config(config)
        notes.append(
            f"note: the batch is {sizes.size(sizes.begin)} from step {sizes.begin + 1} on, which begins at sample "
            f"{sizes.samples_before(sizes.begin):,}, where the run is"
        )
    if steps == [0]:
        return []
    if training_samples(before) != training_samples(config) and not (config.data.mock or config.data.conversations):
        notes.append(
            "note: Megatron's sample order depends on their number, so it differs from the previous one; "
            f"--data.train-samples {training_samples(before)} keeps it if that many are enough"
        )
    decays = new.schedule in ("cosine", "linear", "wsd")
    if decays and old.decay_steps is None and new.decay_steps is None and before.train.steps != config.train.steps:
        notes.append(
            f"note: the learning rate follows --train.steps: its decay ends at step {config.train.steps} instead of "
            f"{before.train.steps}; --optimizer.decay-steps {before.train.steps} keeps it"
        )
    if now is not None and {old.schedule, new.schedule} == {"wsd"} and now > (last := decay_start(before)):
        stable = [number for number in steps if 0 < number <= last]
        advice = f"--step {stable[-1]} continues from before it" if stable else "no checkpoint from before it is left"
        since = f"note: the learning rate had decayed since step {last} and rises again after checkpoint {now}"
        notes.append(f"{since}; {advice}")
    return notes


def _has_same_rates(before: Config, config: Config, step: int) -> bool:
    """True if both schedules have the same learning rate at each of the first `step` steps."""
    import numpy as np

    sizes = BatchSizes.from_config(before)
    steps = np.unique(np.linspace(0, max(step - 1, 0), 2000).astype(int))
    samples = np.array([sizes.samples_before(int(number)) for number in steps])
    return np.array_equal(*(learning_rate(schedule, samples, np) for schedule in (before, config)))


# --- Data -------------------------------------------------------------------------------------------------------------


def compute_digests(data: DataConfig) -> dict[str, list[str]]:
    """Digests of the datasets of each blend, in its order: {'path': ['5d41…']}."""
    from mjax.data.indexed import IndexedDataset

    blends = {} if data.mock else {name: getattr(data, name) for name in BLENDS if getattr(data, name)}
    prefixes = {name: parse_blend(values, f"--data.{name}").prefixes for name, values in blends.items()}
    return {name: [IndexedDataset(prefix).digest for prefix in prefixes[name]] for name in blends}


def _find_changed_data(folder: Path, before: DataConfig, now: DataConfig) -> list[str]:
    """List datasets with other tokens, or other weights in the blend, than in the run."""
    changed, advice = [], "remove it to continue without comparing the data with those of the run"
    saved = read_if_exists(dict[str, list[str]], folder / DIGESTS, advice) or {}
    current = compute_digests(now) if saved else {}
    for name in BLENDS:
        old, new = getattr(before, name), getattr(now, name)
        same_tokens = old == new  # of synthetic ones, or if digests are missing
        if name in saved and name in current:
            same_tokens = saved[name] == current[name]
        if old == new:
            changed += [] if same_tokens else [f"data.{name} {_quote(old)}, with other tokens than before"]
        elif not same_tokens or parse_blend(old).weights != parse_blend(new).weights:
            changed.append(f"data.{name} {_quote(old)}, now {_quote(new)}")
    return changed


def _quote(value: Any) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


# --- The origin of a run that starts from the weights of another (--init) ---------------------------------------------
#
#     runs/q  ──weights of its checkpoint──▶  runs/new: optimizer from scratch, step 0, other data, schedule and mesh
#
# The weights must mean the same in both: the architecture and every field that gives a weight its shape or position are
# equal. Lengths, rotary base, window and dropout may differ, and the differences are printed. The run folder has the
# origin in `init.json`; a run that has checkpoints continues from them, and does not read the origin again.

ORIGIN = "init.json"


@dataclass(frozen=True)
class Origin:
    """The origin of a run's weights: the contents of init.json.

    Attributes:
      run: absolute path of the run folder.
      step: the checkpoint; None before it is chosen: the newest intact one.
      changed: fields of the model that differ, with the values in the origin and in this run.
    """

    run: str
    step: int | None
    changed: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        step = "" if self.step is None else f", checkpoint {self.step}"
        changed = "; ".join(f"{name} {old}, now {new}" for name, (old, new) in self.changed.items())
        return f"{self.run}{step}" + (f" ({changed})" if changed else "")


def read_origin(folder: Path) -> Origin | None:
    """The origin in a run folder; None: its weights were drawn at random or converted.

    Raises:
      UsageError: the file is damaged.
    """
    return read_if_exists(Origin, folder / ORIGIN, "remove it if you do not need the origin of the weights")


def save_origin(folder: Path, origin: Origin | None) -> None:
    """Record where the weights of a new run come from, or that they were drawn at random."""
    if origin is None:
        (folder / ORIGIN).unlink(missing_ok=True)
    else:
        write_whole(folder / ORIGIN, json.dumps(asdict(origin), indent=2) + "\n")


def choose_origin(folder: Path, config: Config, init: Path | None, step: int | None = None) -> Origin | None:
    """The origin of the run in `folder`, if it is a new one; None: it has checkpoints, or begins with random weights.

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
        _check_origin(folder, init, step)
        return None
    steps = checkpoint_steps(init)
    if not steps and not init.exists():
        raise UsageError(describe_missing_run(init))
    if not steps:
        fix = f"give the folder of a run, or convert a model of Hugging Face: mjax convert from-hf {init} runs/NAME"
        raise UsageError(f"--init {init} has no checkpoint; {fix}")
    if step is not None and step not in steps:
        raise UsageError(f"--step {step}: {init} has no such checkpoint; use {either(steps)}")
    return Origin(to_absolute(init), step, _find_changed_fields(init, config))


def _check_origin(folder: Path, init: Path, step: int | None) -> None:
    """Reject an origin that differs from the recorded origin of the run in `folder`, which has checkpoints."""
    fix = "add --name NEW for a new run, or remove --init to continue it"
    if to_absolute(init) == to_absolute(folder):
        raise UsageError(f"--init {init} is the folder of this run; {fix}")
    origin = read_origin(folder)
    if origin is None or origin.run != to_absolute(init) or step not in (None, origin.step):
        began = "without --init" if origin is None else f"from {origin}"
        requested = f"{init}, checkpoint {step}" if step is not None else init
        raise UsageError(f"{folder} has checkpoints and began {began}, not from {requested}; {fix}")


def _find_changed_fields(init: Path, config: Config) -> dict[str, tuple[str, str]]:
    """List the fields of the model that differ from `init`, with both values."""
    saved = read_settings(init / "config.json")
    if saved.model.kind != config.model.kind:
        other = f"--init {init} holds {saved.model.title} and this config describes {config.model.title}"
        flags = new_run_flags(init, saved.model)
        raise UsageError(f"{other}; choose a config of the same model, or type {flags} for that model")
    saved = read_config(init / "config.json")
    if saved.model.lora_rank and not config.model.lora_rank:
        flags = " ".join(to_flag(f"model.{name}", value) for name, value in saved.model.lora_settings().items())
        fix = f"type {flags} to train the adapters on, or merge them: mjax convert to-hf {init} DIR --merged"
        raise UsageError(f"--init {init} holds adapters, and this run trains all weights; {fix}")
    if not saved.model.lora_rank:  # the adapters of this run are new
        saved = replace(saved, model=replace(saved.model, **config.model.lora_settings()))
    changed = {}
    for section, _, name in (field.partition(".") for field in differing_fields(saved, config)):
        if section == "model" and name != "attention":
            values = effective_value(saved.model, name), effective_value(config.model, name)
            changed |= {name: values} if values[0] != values[1] else {}
    if wrong := [name for name in changed if not _may_differ(name, saved.model, config)]:
        values = "; ".join(f"model.{name} {changed[name][0]}, here {changed[name][1]}" for name in wrong)
        flags = " ".join(to_flag(f"model.{name}", changed[name][0]) for name in wrong) + ", or "
        if set(names_with(FILE_ONLY, type(saved.model))).intersection(wrong):
            flags = ""
        if "vocabulary" in wrong:  # the data's ids would not fit the smaller vocabulary
            fix = f"prepare the data with its tokenizer, `mjax prepare … --tokenizer run:{init}`, or remove --init"
            raise UsageError(f"--init {init} has an embedding of other ids ({values}); {fix}")
        fix = f"type {flags}{new_run_flags(init, saved.model)} for its settings"
        raise UsageError(f"--init {init} holds the weights of another model ({values}); {fix}")
    return {f"model.{name}": (str(old), str(new)) for name, (old, new) in changed.items()}


def _may_differ(name: str, saved: ModelConfig, config: Config) -> bool:
    model = config.model
    if name == "sequence" or name == "max_position_embeddings":
        return not model.learned_positions or saved.max_positions == model.max_positions
    if name in ("vocabulary", "vocabulary_multiple"):
        return saved.padded_vocabulary == model.padded_vocabulary
    return not field_marks(config, f"model.{name}").isdisjoint({NEW_RUN, TUNING})
