"""Settings that a config takes from its data and its length unless the command line sets them.

    steps           of train.tokens, if that is given in their place
    vocabulary      that of the data's tokenizer; a config file has that of another, often GPT-2's
    conversations   where the data are some, with what of them is trained
    warm-up         shortened in proportion if --train.steps leaves no room for it

Each is announced in one line, and the run's config.json has the resulting values.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from mjax.config.batch_size import with_steps
from mjax.config.checks import check_batch_sizes
from mjax.config.datasets import DatasetMetadata, parse_blend, read_metadata
from mjax.config.run import Config, MeshConfig, read_settings


def resolve(config: Config, chosen: Config, typed: Set[str], label: str, run: Path) -> tuple[Config, list[str]]:
    """The config of a run, and one line for each setting taken from elsewhere.

    Args:
      config: including the flags of the command line.
      chosen: without them.
      typed: names of these flags, such as "train.steps".
      label: name of the config in messages.
      run: folder with the weights of the run, if there are any yet: they keep their vocabulary.

    Raises:
      UsageError: the data or the run there are damaged.
    """
    config, lines = resolve_steps(config, typed)
    chosen, _ = resolve_steps(chosen)
    noted = _metadata(config)
    prefix, vocabulary = next(((name, one.vocabulary) for name, one in noted.items()), (None, 0))
    if "model.vocabulary" in typed or not noted:
        vocabulary = config.model.vocabulary
    if vocabulary != config.model.vocabulary and not _goes_on(run, config.model.vocabulary):
        model = replace(config.model, vocabulary=vocabulary)
        rows = "" if model.padded_vocabulary == vocabulary else f", {model.padded_vocabulary:,} rows of the embedding"
        lines.append(f"vocabulary {vocabulary:,} as in {prefix}{rows} ({label} has {config.model.vocabulary:,})")
        config = replace(config, model=model)
    if any(one.trained is not None for one in noted.values()):
        config = replace(config, data=replace(config.data, conversations=True))
        lines.append("conversations, in which the turns of the assistant are trained")
    warmup = None if "optimizer.warmup-steps" in typed else shorter_warmup(config, chosen)
    if warmup is not None:
        steps = f"{warmup} step{'s' * (warmup != 1)}"
        lines.append(
            f"warm-up of {steps} instead of {config.optimizer.warmup_steps:,}, in proportion to the run's length"
        )
        config = replace(config, optimizer=replace(config.optimizer, warmup_steps=warmup))
    return config, lines


def resolve_steps(config: Config, typed: Set[str] = frozenset()) -> tuple[Config, list[str]]:
    """The config with steps in place of tokens, and a line about it if tokens are given.

    Raises:
      UsageError: tokens and steps are both given, or tokens or the sizes of the batch are malformed.
    """
    if config.train.tokens is not None:  # the mesh may still have to be found
        check_batch_sizes(replace(config, mesh=MeshConfig(), train=replace(config.train, micro_batch=1)))
    config, line = with_steps(config, typed)
    return config, [line] if line else []


def _metadata(config: Config) -> dict[str, DatasetMetadata]:
    """Return the metadata that `mjax prepare` recorded, by dataset; Megatron's tools record none.

    Several datasets have the same tokenizer, or `open_data` refuses them.
    """
    field = "path" if config.data.path else "train_path"
    values = () if config.data.mock else getattr(config.data, field)
    prefixes = parse_blend(values, f"--data.{field.replace('_', '-')}").prefixes if values else ()
    return {prefix: noted for prefix in prefixes if (noted := read_metadata(prefix)) is not None}


def _goes_on(run: Path, vocabulary: int) -> bool:
    """True if the run in this folder has this vocabulary."""
    file = run / "config.json"
    return file.is_file() and read_settings(file).model.vocabulary == vocabulary


def shorter_warmup(config: Config, chosen: Config) -> int | None:
    """A warm-up that fits, if the config file's does not fit the given length; else None."""
    before, now = (one.optimizer.decay_steps or one.train.steps for one in (chosen, config))
    warmup = config.optimizer.warmup_steps
    if config.optimizer.schedule == "constant" or warmup < now or warmup >= before or now < 1:
        return None
    return min(max(round(warmup * now / before), 1), now - 1)
