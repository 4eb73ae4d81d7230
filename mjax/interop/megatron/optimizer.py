"""The optimizer of a run in Megatron's checkpoints, both ways: AdamW's moments, the schedule, and the counts.

Format torch_dist has three more tensors for each weight, in the layout of the weight:

    optimizer.state.param.decoder.layers.0.mlp.linear_fc2.weight         float32; fp32_param, or none in a run in fp32,
    optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight       without the distributed optimizer
    optimizer.state.exp_avg_sq.decoder.layers.0.mlp.linear_fc2.weight

and in the common state `optimizer` (hyperparameters, AdamW's count), `opt_param_scheduler` (which counts samples) and
`iteration`; `args` has the samples of all steps. The export is what the distributed optimizer saves with
--dist-ckpt-optim-fully-reshardable (core/optimizer/distrib_optimizer.py, 0.16 to 0.19), which loads into any split, with
AdamW of torch, Apex and TransformerEngine. By default that optimizer saves the buffers of its ranks, which are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mjax.checkpoint.arrays import open_array
from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.errors import UsageError
from mjax.interop.megatron.arguments import MegatronArguments
from mjax.interop.megatron.checkpoint import MegatronCheckpoint
from mjax.step.learning_rate import decay_end, wsd_decay_steps
from mjax.step.precision import HYSTERESIS

SLOTS = {"param": "model.", "exp_avg": "optimizer.0.mu.", "exp_avg_sq": "optimizer.0.nu."}
"""Megatron's state of a weight → prefix of the arrays in mjax's checkpoints."""
STEP, SAMPLES, COUNT = "step", "samples", "optimizer.0.count"
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "inverse_square_root": "inverse-square-root",
    "wsd": "WSD",
}  # fmt: skip
FIELDS = {
    "learning_rate": "lr", "min_learning_rate": "min_lr", "warmup_steps": "lr_warmup_iters",
    "wsd_decay": "lr_wsd_decay_style", "weight_decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
    "epsilon": "adam_eps", "clip_norm": "clip_grad",
}  # fmt: skip
"""mjax's field of the optimizer → Megatron's argument."""
REQUIRED = {
    "optimizer": "adam", "decoupled_weight_decay": True, "decoupled_lr": None, "lr_warmup_init": 0.0, "fp16": False,
    "apply_wd_to_qk_layernorm": False, "step_batch_size_schedule": None, "is_decoupled_lr": False, "lr_mult": 1.0,
    "amsgrad": False, "bias_correction": True,
}  # fmt: skip
"""Arguments, and entries of a parameter group, with the only value that mjax supports."""
OPTIONAL = "leave out --optimizer to convert the weights alone"


# --- Export -----------------------------------------------------------------------------------------------------------


def optimizer_arguments(config: Config, run: Path) -> dict[str, Any]:
    """The arguments of Megatron for the optimizer of a run, its schedule and its batches.

    Raises:
      UsageError: Megatron has no such optimizer, or saves it in another way.
    """
    optimizer, train = config.optimizer, config.train
    if optimizer.name != "adamw":
        raise UsageError(f"--optimizer is for AdamW, and {run} was trained with {optimizer.name}; {OPTIONAL}")
    if config.precision.compute in ("fp16", "fp64"):
        raise UsageError(f"--optimizer is for fp32 and bf16, and {run} is in {config.precision.compute}; {OPTIONAL}")
    return {
        "optimizer": "adam",
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "use_checkpoint_opt_param_scheduler": True,
        **{argument: getattr(optimizer, field) for field, argument in FIELDS.items()},
        "lr_decay_style": SCHEDULES[optimizer.schedule],
        "lr_decay_iters": decay_end(config),
        "lr_wsd_decay_iters": wsd_decay_steps(config) if optimizer.schedule == "wsd" else None,
        "train_iters": train.steps,
        "global_batch_size": train.global_batch,
        "micro_batch_size": train.micro_batch,
        "rampup_batch_size": train.batch_rampup and list(train.batch_rampup),
        "seed": train.seed,
    }


def common_state(config: Config, saved: Path, arguments: Mapping[str, Any], experts_apart: bool) -> dict[str, Any]:
    """What Megatron stores of an optimizer besides tensors.

    Args:
      config: of the run.
      saved: its checkpoint.
      arguments: the result of `optimizer_arguments`.
      experts_apart: True if experts are split over ranks: they have an optimizer of their own.
    """
    step, samples, count = (
        int(open_array(saved / name.split(".")[0], name).read().result()) for name in (STEP, SAMPLES, COUNT)
    )
    sizes, rates = BatchSizes.from_config(config), {"max_lr": arguments["lr"], "min_lr": arguments["min_lr"]}
    decay, consumed = arguments["weight_decay"], sizes.samples_before(step)

    def make_optimizer(experts: bool) -> dict[str, Any]:
        group = {
            **rates, "lr": arguments["lr"], "betas": (arguments["adam_beta1"], arguments["adam_beta2"]),
            "eps": arguments["adam_eps"], "bias_correction": True, "step": count, "lr_mult": 1.0,
            "is_decoupled_lr": False, "is_expert_parallel": experts, "default_config": True,
        }  # fmt: skip
        groups = [group | {"wd_mult": factor, "weight_decay": factor * decay} for factor in (1.0, 0.0)]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    schedule = {
        **rates, "lr_warmup_steps": sizes.samples_before(arguments["lr_warmup_iters"]), "num_steps": samples,
        "lr_decay_style": arguments["lr_decay_style"],
        "lr_decay_steps": sizes.samples_before(arguments["lr_decay_iters"]), "start_wd": decay, "end_wd": decay,
        "wd_incr_style": "constant", "wd_incr_steps": sizes.samples_before(arguments["train_iters"]),
    }  # fmt: skip
    return {
        "iteration": step,
        "optimizer": {number: make_optimizer(bool(number)) for number in (0, 1)} if experts_apart else make_optimizer(False),
        "opt_param_scheduler": schedule,
        "args": {
            "consumed_train_samples": consumed,
            "skipped_train_samples": consumed - samples,
            "no_save_rng": True,
        },
    }


# --- Import -----------------------------------------------------------------------------------------------------------


def read_optimizer(checkpoint: MegatronCheckpoint, config: Config) -> tuple[Config, dict[str, float]]:
    """The config with which a run continues a checkpoint, and the scalars of its state by name.

    Args:
      checkpoint: with its arguments.
      config: of its weights.

    Raises:
      UsageError: the checkpoint has no optimizer, or one that mjax cannot continue.
    """
    common, source = checkpoint.common, str(checkpoint.folder)
    args = MegatronArguments(checkpoint.arguments or {}, source)
    schedule = MegatronArguments(common.get("opt_param_scheduler") or {}, source)
    groups, count = _read_groups(common.get("optimizer"))
    if not groups or not schedule.values or not common.get("iteration"):
        args.reject("it has no state of an optimizer after a step", OPTIONAL)
    for values in (args, *(MegatronArguments(group, source) for group in groups)):
        for name, only in REQUIRED.items():
            if (value := values[name]) not in (None, only):
                args.reject(f"{name} is {value!r}, and mjax continues only a run with {only!r}", OPTIONAL)
    styles = {theirs: ours for ours, theirs in SCHEDULES.items()}
    style, wsd_style = schedule["lr_decay_style"], args["lr_wsd_decay_style"] or "exponential"
    if style not in styles or (style == "WSD" and wsd_style not in ("exponential", "linear", "minus_sqrt")):
        args.reject(f"mjax has no learning rate schedule {style} {wsd_style if style == 'WSD' else ''}".rstrip(), OPTIONAL)
    if schedule["start_wd"] != schedule["end_wd"]:
        args.reject(f"its weight decay goes from {schedule['start_wd']} to {schedule['end_wd']}", OPTIONAL)
    if any(group.get(name) not in (None, schedule[name]) for group in groups for name in ("max_lr", "min_lr")):
        args.reject("its parameter groups have several learning rates, and mjax has one", OPTIONAL)
    if args["global_batch_size"] is None:
        args.reject("its arguments have no global_batch_size, in which the schedule counts", OPTIONAL)
    rampup = args["rampup_batch_size"]
    train = replace(
        config.train,
        global_batch=args.count("global_batch_size", minimum=1),
        micro_batch=args.count("micro_batch_size", 1, 1),
        batch_rampup=tuple(map(int, rampup)) if rampup else None,
        seed=args.count("seed", config.train.seed),
    )
    sizes = BatchSizes.from_config(replace(config, train=train))

    def steps(name: str, samples: Any) -> int:
        number = sizes.steps_for(samples) if samples else 0
        if sizes.samples_before(number) != samples:
            args.reject(f"{name} is {samples:,} samples, which are no whole steps of {train.global_batch}", OPTIONAL)
        return number

    iteration, consumed = common["iteration"], args.count("consumed_train_samples", schedule.count("num_steps"))
    if sizes.samples_before(iteration) != consumed:
        args.reject(f"its {iteration:,} steps have taken {consumed:,} samples: the batch was changed", OPTIONAL)
    wsd = args["lr_wsd_decay_iters"] or steps("lr_wsd_decay_samples", args["lr_wsd_decay_samples"] or 0)
    decay_steps = steps("lr_decay_steps", schedule["lr_decay_steps"])
    beta1, beta2 = groups[0]["betas"]
    optimizer = replace(
        config.optimizer,
        schedule=styles[style],
        learning_rate=schedule.number("max_lr"),
        min_learning_rate=schedule.number("min_lr"),
        warmup_steps=steps("lr_warmup_steps", schedule["lr_warmup_steps"]),
        decay_steps=decay_steps,
        weight_decay=schedule.number("start_wd"),
        clip_norm=args.number("clip_grad", 1.0 if args["clip_grad"] is None else args["clip_grad"]),
        beta1=float(beta1),
        beta2=float(beta2),
        epsilon=float(groups[0]["eps"]),
        **({"wsd_decay_steps": wsd, "wsd_decay": wsd_style} if style == "WSD" else {}),
    )
    length = args["train_iters"] or sizes.steps_for(args["train_samples"] or 0) or decay_steps
    sequence = min(args.count("seq_length", config.model.sequence, 1), config.model.sequence)
    counts = {STEP: iteration, SAMPLES: schedule.count("num_steps"), COUNT: int(count)}
    counts |= {"loss_scale.clean_steps": 0, "loss_scale.hysteresis": HYSTERESIS}
    scalars = {name: np.int32(number) for name, number in counts.items()} | {"loss_scale.scale": np.float32(1)}
    model, train = replace(config.model, sequence=sequence), replace(train, steps=max(length, iteration))
    return replace(config, model=model, optimizer=optimizer, train=train), scalars


def _read_groups(optimizer: Any) -> tuple[list[dict[str, Any]], Any]:
    """The parameter groups of the optimizer or optimizers in a checkpoint, and AdamW's count."""
    chained = optimizer if isinstance(optimizer, list) else [optimizer]
    if isinstance(optimizer, dict) and 0 in optimizer:
        chained = list(optimizer.values())
    inner = [part.get("optimizer", part) for part in chained if isinstance(part, dict)]
    groups = [group for part in inner for group in part.get("param_groups") or ()]
    if any("betas" not in group for group in groups):
        return [], 0
    states = [part.get("state") or {} for part in inner]
    counts = [state.get("common_step", state.get(0, {}).get("step")) for state in states]
    counts += [group.get("step") for group in groups]
    return groups, next((count for count in counts if count is not None), 0)


def make_state_reader(readers: Mapping[str, Callable], scalars: Mapping[str, float]) -> Callable:
    """Return a function that reads a block of an array of a state by its name: of a weight, a moment, or a scalar.

    Args:
      readers: by slot, the results of `make_block_reader`.
      scalars: the result of `read_optimizer`.
    """

    def read_block(name: str, first: int, end: int) -> np.ndarray:
        if name in scalars:
            return np.asarray(scalars[name])
        for slot, prefix in SLOTS.items():
            if name.startswith(prefix):
                return readers[slot](name.removeprefix(prefix), first, end)
        return readers["param"](name, first, end)

    return read_block
