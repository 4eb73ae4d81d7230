"""What is refused before a device is touched: in one sentence, what was given, what is allowed and what to type."""

from __future__ import annotations

from typing import Any

from mjax.config import Config
from mjax.errors import UsageError


def validate(config: Config, name: str = "this config") -> None:
    """Refuse what cannot run, before any device is touched.

    Raises:
      UsageError: one sentence naming the field, its value, what is allowed and what to type.
    """
    model, mesh, train, optimizer = config.model, config.mesh, config.train, config.optimizer
    _check_ranges(config)
    if mesh.pipe != 1:
        raise UsageError(f"--mesh.pipe {mesh.pipe} is not supported yet; use --mesh.pipe 1")

    if model.hidden % model.heads:
        raise UsageError(
            f"--model.heads {model.heads} does not divide hidden size {model.hidden}; "
            f"use {_listed(_divisors(model.hidden))}"
        )
    for what, size in (
        ("heads", model.heads),
        ("feed-forward width", model.mlp_width),
        ("padded vocabulary", model.padded_vocabulary),
    ):
        if size % mesh.model:
            possible = [
                n for n in _divisors(model.heads) if model.mlp_width % n == 0 and model.padded_vocabulary % n == 0
            ]
            raise UsageError(f"--mesh.model {mesh.model} does not divide {what} {size}; use {_listed(possible)}")

    if train.global_batch % mesh.data:
        raise UsageError(
            f"--train.global-batch {train.global_batch} does not divide over --mesh.data {mesh.data}; "
            f"use a multiple of {mesh.data}, such as {_nearest_multiple(train.global_batch, mesh.data)}"
        )
    share = train.global_batch // mesh.data
    if share % train.micro_batch:
        raise UsageError(
            f"--train.micro-batch {train.micro_batch} does not divide the {share} sequences of a data replica "
            f"(global batch {train.global_batch} / data {mesh.data}); use {_listed(_divisors(share))}"
        )

    decay_steps = optimizer.decay_steps or train.steps
    if optimizer.warmup_steps >= decay_steps and optimizer.schedule != "constant":
        raise UsageError(
            f"--optimizer.warmup-steps {optimizer.warmup_steps} must be below the {decay_steps} steps of the schedule; "
            f"use --optimizer.warmup-steps {decay_steps // 10}"
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        raise UsageError(
            f"--optimizer.min-learning-rate {optimizer.min_learning_rate:g} is above "
            f"--optimizer.learning-rate {optimizer.learning_rate:g}; lower the first"
        )
    if config.data.samples is not None and config.data.samples < train.steps * train.global_batch:
        raise UsageError(
            f"--data.samples {config.data.samples} is below the {train.steps * train.global_batch} samples that "
            f"{train.steps} steps of {train.global_batch} need; leave it out or raise it"
        )
    if config.precision.loss_scale is not None and config.precision.compute != "fp16":
        raise UsageError(
            f"--precision.loss-scale needs --precision.compute fp16; this run computes in {config.precision.compute}"
        )
    if not config.data.mock and config.data.path is None:
        raise UsageError(
            f"{name} has no data: prepare some with `python -m mjax prepare FILES --output data/corpus` and add "
            "--data.path data/corpus, or add --data.mock to measure speed"
        )


def check_devices(config: Config, found: int, name: str = "this config") -> None:
    """Refuse a mesh that does not use exactly the devices there are.

    Raises:
      UsageError: the mesh needs more or fewer devices than were found.
    """
    mesh = config.mesh
    if mesh.devices != found:
        shape = (
            f"data {mesh.data} × model {mesh.model}"
            if mesh.pipe == 1
            else f"pipe {mesh.pipe} × data {mesh.data} × model {mesh.model}"
        )
        raise UsageError(
            f"{name} needs {mesh.devices} device{'s' * (mesh.devices > 1)} ({shape}); {found} found: "
            f"set --mesh.data and --mesh.model, or --simulate {mesh.devices}"
        )


_AT_LEAST_ONE = (
    "model.layers", "model.hidden", "model.heads", "model.feed_forward", "model.sequence", "model.vocabulary",
    "model.vocabulary_multiple", "mesh.pipe", "mesh.data", "mesh.model", "data.samples", "optimizer.decay_steps",
    "optimizer.wsd_decay_steps", "precision.loss_scale", "precision.initial_loss_scale", "precision.min_loss_scale",
    "precision.loss_scale_window", "precision.hysteresis", "train.steps", "train.global_batch", "train.micro_batch",
    "train.eval_batches", "checkpoint.keep_last", "checkpoint.keep_every", "log.interval",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "optimizer.learning_rate", "optimizer.min_learning_rate", "optimizer.warmup_steps", "optimizer.weight_decay",
    "optimizer.epsilon", "optimizer.clip_norm", "train.seed", "train.eval_interval", "checkpoint.interval",
    "log.sample_tokens", "model.layernorm_epsilon", "model.init_std",
)  # fmt: skip
_BELOW_ONE = ("model.hidden_dropout", "model.attention_dropout", "optimizer.beta1", "optimizer.beta2")


def _check_ranges(config: Config) -> None:
    def flag(dotted: str) -> tuple[str, Any]:
        section, knob = dotted.split(".")
        return "--" + dotted.replace("_", "-"), getattr(getattr(config, section), knob)

    for dotted in _AT_LEAST_ONE:
        name, value = flag(dotted)
        if value is not None and not value >= 1:
            raise UsageError(f"{name} is {value}; it must be at least 1")
    for dotted in _AT_LEAST_ZERO:
        name, value = flag(dotted)
        if not value >= 0:
            raise UsageError(f"{name} is {value}; it must be 0 or more")
    for dotted in _BELOW_ONE:
        name, value = flag(dotted)
        if not 0 <= value < 1:
            raise UsageError(f"{name} is {value}; it must be at least 0 and below 1")
    if config.train.seed >= 2**32:
        raise UsageError(f"--train.seed is {config.train.seed}; it must be below 2^32")


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _listed(numbers: list[int]) -> str:
    words = [str(n) for n in numbers[:12]]
    if len(numbers) > 12:
        return ", ".join(words) + ", …"
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def _nearest_multiple(n: int, of: int) -> int:
    return max(of, round(n / of) * of)
