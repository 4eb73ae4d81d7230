"""Checks before a device is touched, and settings that follow from the data and the length of a run.

An error is one sentence: the given value, the allowed values, the line to type.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from mjax.config import axes
from mjax.config.batch_size import BatchSizes, check_pipeline, parse_tokens
from mjax.config.bounds import check_bounds
from mjax.config.datasets import DatasetMetadata, parse_blend, read_metadata, split_sequences
from mjax.config.marks import Only, field_marks
from mjax.config.pattern import stage_groups
from mjax.config.run import BLENDS, Config, differing_fields, read_settings, to_flag
from mjax.errors import UsageError, either, name_arguments

MAX_DIVISOR = 2**16  # a config.json may contain any number: limit the search


def check_type(config: Config) -> None:
    """Reject an object that is not a `Config`, such as the name of one."""
    if not isinstance(config, Config):
        text = repr(config) if isinstance(config, str) else "'gpt_demo'"
        raise UsageError(f"config is {config!r}, not a Config; give one, such as mjax.load_config({text})")


def validate(config: Config, name: str = "this config") -> None:
    """Check a config before any device is touched.

    Raises:
      UsageError: one sentence with the field, its value, the allowed values and the line to type.
    """
    check_type(config)
    check_bounds(config)
    if config.train.tokens is not None:
        raise UsageError(f"train.tokens {config.train.tokens} of {name} is not converted to steps; call resolve_steps")
    _check_shapes(config)
    _check_batch_sizes(config)
    _check_pipeline(config)
    _check_conditions(config)
    config.model.check(config)
    check_offload(config)
    _check_schedules(config)
    _check_lora(config)
    _check_parametrization(config)
    _check_data(config, name)


validate_config = name_arguments()(validate)  # `mjax.validate`, whose sentences name fields instead of flags


def _check_divides(flag: str, number: int, what: str, size: int, allowed: list[int] | None = None) -> None:
    if size % number:
        raise UsageError(f"{flag} {number} does not divide {what}; use {_join_numbers(allowed or divisors(size))}")


def _check_shapes(config: Config) -> None:
    """Check that heads, mesh axes and micro-batches divide the dims they split."""
    model, mesh, train = config.model, config.mesh, config.train
    if model.head_dim is None:
        _check_divides("--model.heads", model.heads, f"hidden size {model.hidden}", model.hidden)
    if model.learned_positions and model.sequence > (most := model.max_position_embeddings or model.sequence):
        fix = f"use 1 to {most}, or for a new model --model.max-position-embeddings {model.sequence}"
        raise UsageError(f"--model.sequence {model.sequence} exceeds the {most} learned positions of the model; {fix}")
    _check_axes(config)
    tokens = train.micro_batch * model.sequences * model.sequence // mesh.context
    if mesh.sequence_parallel and tokens % mesh.model:
        split = f"cannot split the {tokens} tokens of a micro-batch over --mesh.model {mesh.model}"
        fix = f"use a --train.micro-batch that is a multiple of {mesh.model}, or --mesh.no-sequence-parallel"
        raise UsageError(f"--mesh.sequence-parallel {split}; {fix}")
    if train.unroll == "on" and mesh.pipe > 1:
        by_slot = "(stages save activations by slot)"
        raise UsageError(f"--train.unroll on is not supported with --mesh.pipe {mesh.pipe} {by_slot}; remove it")
    if train.global_batch % mesh.data:
        fix = f"use a multiple of {mesh.data}, such as {_nearest_multiple(train.global_batch, mesh.data)}"
        raise UsageError(f"--mesh.data {mesh.data} does not divide --train.global-batch {train.global_batch}; {fix}")
    share = train.global_batch // mesh.data
    what = f"the {share} sequences of a data replica (global batch {train.global_batch} / data {mesh.data})"
    _check_divides("--train.micro-batch", train.micro_batch, what, share)


def _check_axes(config: Config) -> None:
    """Check that the axes `model`, `expert`, `replicate` and `context` divide the dims they split."""
    model, mesh = config.model, config.mesh
    if not model.splits(mesh.model):
        columns = model.columns()
        what, size = next(row for row in (columns | model.column_sizes()).items() if row[1] % mesh.model)
        fails = "does not divide" if what in columns else "neither divides nor is a multiple of"
        possible = [ranks for ranks in divisors(math.gcd(*columns.values())) if model.splits(ranks)]
        raise UsageError(f"--mesh.model {mesh.model} {fails} {what} {size}; use {_join_numbers(possible)}")
    if mesh.expert > 1:
        if not (experts := model.experts):
            raise UsageError(f"--mesh.expert {mesh.expert} needs experts, and {model.title} is dense; remove it")
        possible = divisors(math.gcd(mesh.data, experts))
        for what, size in ((f"--mesh.data {mesh.data}", mesh.data), (f"{experts} experts", experts)):
            _check_divides("--mesh.expert", mesh.expert, what, size, possible)
    if mesh.replicate > 1:
        if mesh.zero == 0:
            shards = "needs the shards of ZeRO, and --mesh.zero 0 makes none; add --mesh.zero 3"
            raise UsageError(f"--mesh.replicate {mesh.replicate} {shards}, or remove --mesh.replicate")
        by_expert = f" / --mesh.expert {mesh.expert}" if mesh.expert > 1 else ""
        what = f"--mesh.data {mesh.data}{by_expert}: it is the number of groups"
        _check_divides("--mesh.replicate", mesh.replicate, what, mesh.data // mesh.expert)
    if mesh.context > 1:
        _check_context(config)


def _check_lora(config: Config) -> None:
    """Check the settings of LoRA, and those that adapters do not support."""
    model = config.model
    if not model.lora_rank:
        for name, value in model.lora_settings().items():
            flag = to_flag(f"model.{name}", value)
            raise UsageError(f"{flag} has no effect without adapters; add --lora.rank, such as --lora.rank 16")
        return
    rank = f"--lora.rank {model.lora_rank}"
    if not model.causal:
        raise UsageError(f"{rank} is not supported for {model.title} (it predicts no next token); remove it")
    if config.precision.compute == "fp8":
        raise UsageError(f"{rank} is not supported with --precision.compute fp8; type --precision.compute bf16")
    if config.optimizer.name != "adamw":
        raise UsageError(f"{rank} is not supported with --optimizer.name {config.optimizer.name}; use adamw")


def _check_parametrization(config: Config) -> None:
    """Check that the parametrization has the sizes it is relative to, and supports the model."""
    model, optimizer = config.model, config.optimizer
    if optimizer.parametrization == "standard":
        return
    flag = f"--optimizer.parametrization {optimizer.parametrization}"
    needed = {"base_width": 256, "base_depth": 4} if optimizer.parametrization == "completep" else {"base_width": 256}
    for name, such_as in needed.items():
        if getattr(optimizer, name) is None:
            fix = f"set it in the config file, such as OptimizerConfig({name}={such_as})"
            raise UsageError(f"{flag} needs optimizer.{name} of the model whose learning rate was tuned; {fix}")
    if not model.causal or model.lora_rank:
        other = f"--lora.rank {model.lora_rank}" if model.causal else model.title
        raise UsageError(f"{flag} is not supported for {other}; remove it")


def _check_context(config: Config) -> None:
    """Check that the `context` axis divides the positions, and heads where it splits them."""
    model, mesh = config.model, config.mesh
    parts = max(config.sequence_chunks, mesh.context)
    if model.sequence % parts:
        cut = f"cannot cut {model.sequence} positions into {parts} equal parts"
        raise UsageError(f"--mesh.context {mesh.context} {cut}; use a --model.sequence that is a multiple of {parts}")
    heads = model.heads // mesh.model
    if config.context_attention == "ulysses" and heads % mesh.context:
        possible = _join_numbers(divisors(heads)[1:] or [1])
        what = f"the {heads} heads of a rank of --mesh.model {mesh.model}"
        fix = f"use --mesh.context {possible}, or --mesh.context-attention allgather"
        raise UsageError(f"--mesh.context {mesh.context} does not divide {what}; {fix}")


def can_run_layers(config: Config) -> bool:
    """True if the recomputation of a config is possible: offload needs a loop over the layers, and no pipeline."""
    return config.train.recompute != "offload" or (config.mesh.pipe == 1 and config.train.unroll != "on")


def check_offload(config: Config) -> None:
    """Check that `--train.recompute offload` can move activations to host memory."""
    if can_run_layers(config):
        return
    offload, pipe = "--train.recompute offload is not supported with", config.mesh.pipe
    if pipe > 1:
        raise UsageError(f"{offload} --mesh.pipe {pipe} (stages save activations by slot); use --train.recompute full")
    # For H100s XLA put all copies to the host into the backward pass (benchmarks/log/2026-11-25-host-memory.md).
    late = "(without a loop over the layers, XLA copies to the host too late)"
    raise UsageError(f"{offload} --train.unroll on {late}; remove one of the two")


def _check_schedules(config: Config) -> None:
    """Check the learning-rate schedule, the number of samples."""
    train, optimizer = config.train, config.optimizer
    decay_steps = optimizer.decay_steps or train.steps
    if optimizer.warmup_steps >= decay_steps and optimizer.schedule != "constant":
        below = f"must be below the {decay_steps} steps of the schedule; use {decay_steps // 10}"
        raise UsageError(f"--optimizer.warmup-steps {optimizer.warmup_steps} {below}")
    room = decay_steps - optimizer.warmup_steps
    if optimizer.wsd_decay_steps is not None and optimizer.wsd_decay_steps > room:
        between = f"does not fit between the warm-up of {optimizer.warmup_steps} steps and step {decay_steps}"
        raise UsageError(f"--optimizer.wsd-decay-steps {optimizer.wsd_decay_steps} {between}; use {room} or fewer")
    if optimizer.min_learning_rate > optimizer.learning_rate:
        peak = f"--optimizer.learning-rate {optimizer.learning_rate:g}"
        raise UsageError(f"--optimizer.min-learning-rate is above {peak}; lower it")
    samples_before = BatchSizes.from_config(config).samples_before
    # Of conversations, some padding may fill the last batch.
    needed = samples_before(train.steps - 1) + 1 if config.data.conversations else samples_before(train.steps)
    if (samples := config.data.train_samples) is not None and samples < needed:
        raise UsageError(f"--data.train-samples {samples} is below the {needed} samples of all steps; remove it")


def _check_conditions(config: Config) -> None:
    """Check the settings that depend on the value of another field (`marks.Only`)."""
    for name, (value, _) in differing_fields(config, Config(model=config.model)).items():
        for mark in field_marks(config, name):
            actual = attrgetter(mark.field)(config) if isinstance(mark, Only) else None
            if actual is None or actual in (*mark.values.split(), "examples"):
                continue
            other = "samples of" if mark.field == "samples" else f"--{mark.field}"
            known = f"{other} {either(mark.values.split())}"
            raise UsageError(f"{to_flag(name, value)} is for {known}, and this run has {actual}; remove it")


def _check_data(config: Config, name: str) -> None:
    """Check that there are data, given in one of the two ways, and that blends are well-formed."""
    data = config.data
    if data.mock or data.custom:
        return
    if not data.path and not data.train_path:
        prepare = "type `mjax prepare FILES --output data/corpus`, and add --data.path data/corpus"
        raise UsageError(f"{name} has no data; {prepare}, or --data.mock to measure speed")
    if data.path and (data.train_path or data.valid_path):
        raise UsageError("--data.path excludes --data.train-path and --data.valid-path; type --data.path with no value")
    if not data.path and config.train.eval_interval > 0 and not data.valid_path:
        raise UsageError("--data.train-path has no validation data; add --data.valid-path, or --train.eval-interval 0")
    for field in BLENDS:
        if getattr(data, field):
            parse_blend(getattr(data, field), f"--data.{field.replace('_', '-')}")
    split_sequences(data.split, 0)


def _check_batch_sizes(config: Config) -> None:
    """Check the ramp-up of the batch, and that each size makes whole micro-batches.

    Raises:
      UsageError: one sentence, with values that fit.
    """
    train, mesh = config.train, config.mesh
    if train.batch_rampup is None:
        return
    unit, factors = mesh.data * train.micro_batch, f"data {mesh.data} × micro-batch {train.micro_batch}"
    if mesh.virtual_stages > 1:
        unit, factors = unit * mesh.pipe, f"{factors} × pipe {mesh.pipe}, for the interleaved pipeline"
    flag = f"--train.batch-rampup {' '.join(map(str, train.batch_rampup))}"
    for first_step, _, size in BatchSizes.from_config(config).ahead():
        if size % unit:
            odd = f"a batch of {size} from step {first_step + 1} on, which is not a multiple of {unit} ({factors})"
            fix = f"use multiples, also as --train.global-batch, such as {_nearest_multiple(size, unit)}"
            raise UsageError(f"{flag} has {odd}; {fix}")


def check_devices(config: Config, available: int, name: str = "this config") -> None:
    """Check that the mesh uses exactly the available devices.

    Raises:
      UsageError: the mesh needs more or fewer devices than are available.
    """
    mesh = config.mesh
    if mesh.devices != available:
        needs = f"{name} needs {mesh.devices} device{'s' * (mesh.devices > 1)} ({axes.describe_mesh(mesh)})"
        fix = f"set --mesh.data and other axes, or --simulate {mesh.devices}"
        raise UsageError(f"{needs}; {available} available: {fix}")


def _check_pipeline(config: Config) -> None:
    mesh = config.mesh
    if mesh.pipe == 1 and (mesh.virtual_stages > 1 or mesh.stage_layers):
        one, several = f"--mesh.virtual-stages {mesh.virtual_stages}", mesh.virtual_stages > 1
        flag, simplest = (one, "--mesh.virtual-stages 1") if several else ("--mesh.stage-layers", "give it no value")
        raise UsageError(f"{flag} needs a pipeline; set --mesh.pipe too, or {simplest}")
    if mesh.pipe == 1:
        return
    stage_groups(config.model, mesh)
    for size in BatchSizes.from_config(config).sizes():
        check_pipeline(mesh.pipe, size // (mesh.data * config.train.micro_batch), mesh.virtual_stages)


def divisors(n: int) -> list[int]:
    """The divisors of `n`, ascending; of a huge number only some."""
    low = [k for k in range(1, min(math.isqrt(n), MAX_DIVISOR) + 1) if n % k == 0]
    return low + [n // k for k in reversed(low) if k * k != n]


def _join_numbers(numbers: list[int]) -> str:
    return either(numbers) if len(numbers) <= 12 else ", ".join(map(str, numbers[:12])) + ", …"


def _nearest_multiple(n: int, unit: int) -> int:
    return max(unit, round(n / unit) * unit)


# --- Settings that a config takes from its data and its length, unless the command line sets them ---------------------
#
#     steps           from train.tokens
#     vocabulary      from the data's tokenizer; a config file has another, often GPT-2's
#     conversations   from the data
#     warm-up         shortened in proportion if it exceeds --train.steps
#
# A line reports each of them, and the run's config.json contains the resulting values.


def resolve(config: Config, chosen: Config, typed: Set[str], label: str, run: Path) -> tuple[Config, list[str]]:
    """Complete the config of a run from its data and length.

    Returns:
      The config, and one line for each setting that this changed.

    Args:
      config: including the flags of the command line.
      chosen: without them.
      typed: names of these flags, such as "train.steps".
      label: name of the config in messages.
      run: folder of the run; its weights, if any, keep their vocabulary.

    Raises:
      UsageError: the data or the run are damaged.
    """
    config, lines = resolve_steps(config, typed)
    chosen, _ = resolve_steps(chosen)
    datasets = _metadata(config)
    prefix, vocabulary = next(((name, metadata.vocabulary) for name, metadata in datasets.items()), (None, 0))
    if "model.vocabulary" in typed or not datasets:
        vocabulary = config.model.vocabulary
    if vocabulary != config.model.vocabulary and not is_resume(run, config.model.vocabulary):
        model = replace(config.model, vocabulary=vocabulary)
        rows = "" if model.padded_vocabulary == vocabulary else f", {model.padded_vocabulary:,} rows of the embedding"
        lines.append(f"vocabulary {vocabulary:,} as in {prefix}{rows} ({label} has {config.model.vocabulary:,})")
        config = replace(config, model=model)
    if any(metadata.trained is not None for metadata in datasets.values()):
        config = replace(config, data=replace(config.data, conversations=True))
        lines.append("conversations, in which the turns of the assistant are trained")
    warmup = None if "optimizer.warmup-steps" in typed else clip_warmup(config, chosen)
    if warmup is not None:
        steps, optimizer = f"{warmup} step{'s' * (warmup != 1)}", config.optimizer
        lines.append(f"warm-up of {steps} instead of {optimizer.warmup_steps:,}, in proportion to the run's length")
        config = replace(config, optimizer=replace(optimizer, warmup_steps=warmup))
    return config, lines


def resolve_steps(config: Config, typed: Set[str] = frozenset()) -> tuple[Config, list[str]]:
    """Convert `train.tokens` to steps, and report it in a line.

    Args:
      typed: names of the flags of the command line, such as "train.steps"; they override a config file.

    Raises:
      UsageError: tokens and steps are both given, or tokens or the sizes of the batch are malformed.
    """
    train, tokens = config.train, config.train.tokens
    if tokens is None:
        return config, []
    if "train.steps" in typed and "train.tokens" not in typed:
        return replace(config, train=replace(train, tokens=None)), []
    if "train.steps" in typed or ("train.tokens" not in typed and train.steps != type(train)().steps):
        raise UsageError(f"--train.steps {train.steps} and --train.tokens {tokens} both set the length; remove one")
    if not (count := parse_tokens(str(tokens))):
        raise UsageError(f"--train.tokens {tokens} is not a number of tokens above 0; write 300B, 1.5T, 10M or 5K")
    sample, sizes = config.model.sequences * config.model.sequence, BatchSizes.from_config(config)
    steps = sizes.steps_for(-(-count // sample))
    line = f"{tokens} tokens are {steps:,} steps ({sizes.samples_before(steps) * sample:,} tokens)"
    return replace(config, train=replace(train, steps=steps, tokens=None)), [line]


def _metadata(config: Config) -> dict[str, DatasetMetadata]:
    """Return the metadata of each dataset by prefix; datasets of Megatron's tools have none."""
    field = "path" if config.data.path else "train_path"
    values = () if config.data.mock else getattr(config.data, field)
    prefixes = parse_blend(values, f"--data.{field.replace('_', '-')}").prefixes if values else ()
    return {prefix: metadata for prefix in prefixes if (metadata := read_metadata(prefix)) is not None}


def is_resume(run: Path, vocabulary: int) -> bool:
    """True if the run in this folder has this vocabulary."""
    file = run / "config.json"
    return file.is_file() and read_settings(file).model.vocabulary == vocabulary


def clip_warmup(config: Config, chosen: Config) -> int | None:
    """A warm-up scaled to the length of the run if the config file's is longer than the run; else None."""
    before, now = (settings.optimizer.decay_steps or settings.train.steps for settings in (chosen, config))
    warmup = config.optimizer.warmup_steps
    if config.optimizer.schedule == "constant" or warmup < now or warmup >= before or now < 1:
        return None
    return min(max(round(warmup * now / before), 1), now - 1)
