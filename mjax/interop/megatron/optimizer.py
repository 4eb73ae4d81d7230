"""The optimizer of a run in Megatron's checkpoints, both ways: AdamW's moments, the schedule, and the counts.

Format torch_dist has three more tensors for each weight, in the layout of the weight:

    optimizer.state.param.decoder.layers.0.mlp.linear_fc2.weight         float32; fp32_param, or none in a run in fp32,
    optimizer.state.exp_avg.decoder.layers.0.mlp.linear_fc2.weight       without the distributed optimizer
    optimizer.state.exp_avg_sq.decoder.layers.0.mlp.linear_fc2.weight

and in the common state `optimizer` (hyperparameters, AdamW's count), `opt_param_scheduler` (which counts samples) and
`iteration`; `args` has the samples of all steps. The export is what the distributed optimizer saves with
--dist-ckpt-optim-fully-reshardable (core/optimizer/distrib_optimizer.py, 0.16 to 0.19): it loads into any split. By
default that optimizer saves the buffers of its ranks, which are not read. AdamW of TransformerEngine and Apex counts in
the groups, that of torch in each state, which the former cannot load.
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
from mjax.interop.megatron.checkpoint import MegatronCheckpoint, list_optimizers
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
    "amsgrad": False, "bias_correction": True, "param_state_sharding_type": "fully_reshardable",
}  # fmt: skip
"""Arguments and hyperparameters with the only value that mjax supports."""
OPTIONAL = "leave out --optimizer to convert the weights alone"


# --- Export -----------------------------------------------------------------------------------------------------------


def optimizer_arguments(config: Config, run: Path) -> dict[str, Any]:
    """The arguments of Megatron for the optimizer of a run, its schedule and its batches.

    Raises:
      UsageError: Megatron has no such optimizer, or another state for it.
    """
    optimizer, train, precision = config.optimizer, config.train, config.precision.compute
    if optimizer.name != "adamw" or precision in ("fp16", "fp64"):
        problem = f"{run} was trained with {optimizer.name} in {precision}"
        raise UsageError(f"--optimizer is for adamw in fp32, bf16 or fp8, and {problem}; {OPTIONAL}")
    return {
        **dict.fromkeys(("use_distributed_optimizer", "dist_ckpt_optim_fully_reshardable"), True),
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


def common_state(config: Config, saved: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron stores of an optimizer besides tensors, and `args` about it.

    Args:
      config: of the run.
      saved: its checkpoint.
      arguments: with those of `optimizer_arguments`.
    """
    stored = (open_array(saved / name.split(".")[0], name) for name in (STEP, SAMPLES, COUNT))
    step, samples, count = (int(array.read().result()) for array in stored)
    decay, before = arguments["weight_decay"], BatchSizes.from_config(config).samples_before
    rates = {"max_lr": arguments["lr"], "min_lr": arguments["min_lr"]}

    def make_optimizer(experts: bool) -> dict[str, Any]:
        group = rates | {"lr": arguments["lr"], "betas": (arguments["adam_beta1"], arguments["adam_beta2"])}
        group |= {"eps": arguments["adam_eps"], "bias_correction": True, "step": count, "is_expert_parallel": experts}
        group |= {"lr_mult": 1.0, "is_decoupled_lr": False, "default_config": True}
        groups = [group | {"wd_mult": factor, "weight_decay": factor * decay} for factor in (1.0, 0.0)]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    # Experts that are split over ranks have an optimizer of their own.
    apart = arguments["expert_model_parallel_size"] > 1
    schedule = rates | {"num_steps": samples, "lr_decay_style": arguments["lr_decay_style"]}
    schedule |= {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"}
    for name, iterations in {"lr_warmup": "lr_warmup", "lr_decay": "lr_decay", "wd_incr": "train"}.items():
        schedule[f"{name}_steps"] = before(arguments[f"{iterations}_iters"])
    samples_of_args = {"consumed_train_samples": before(step), "skipped_train_samples": before(step) - samples}
    return {
        "iteration": step,
        "optimizer": {int(experts): make_optimizer(experts) for experts in (False, True)}
        if apart
        else make_optimizer(False),
        "opt_param_scheduler": schedule,
        "args": samples_of_args | {"no_save_rng": True},
    }


# --- Import -----------------------------------------------------------------------------------------------------------


def read_optimizer(checkpoint: MegatronCheckpoint, config: Config) -> tuple[Config, dict[str, np.generic]]:
    """The config with which a run continues a checkpoint, and the scalars of its state by name.

    Args:
      checkpoint: with its arguments.
      config: of its weights.

    Raises:
      UsageError: the checkpoint has no optimizer, or one that mjax cannot continue.
    """
    state, step = checkpoint.common.get("opt_param_scheduler") or {}, checkpoint.common.get("iteration")
    groups, count = _read_groups(checkpoint.common)
    args = MegatronArguments({**(checkpoint.arguments or {}), **state}, str(checkpoint.folder))
    if not (groups and state and step and args["global_batch_size"]):
        args.reject("it has no state of an AdamW after a step, or no arguments about it", OPTIONAL)
    required = REQUIRED | {"max_lr": state["max_lr"], "min_lr": state["min_lr"], "end_wd": state["start_wd"]}
    for name, only in required.items():
        for group in groups:
            if (value := {**args.values, **group}.get(name)) not in (None, only):
                args.reject(f"{name} is {value!r}, and mjax continues a run with {only!r}", OPTIONAL)
    styles = {theirs: ours for ours, theirs in SCHEDULES.items()}
    schedule, wsd_style = styles.get(args["lr_decay_style"]), args["lr_wsd_decay_style"] or "exponential"
    if schedule is None or (schedule == "wsd" and wsd_style == "cosine"):
        args.reject(f"mjax has no learning rate that decays as {args['lr_decay_style']} with {wsd_style}", OPTIONAL)
    rampup, batch = args["rampup_batch_size"], args.count("global_batch_size", minimum=1)
    train = replace(config.train, global_batch=batch, batch_rampup=tuple(map(int, rampup)) if rampup else None)
    sizes = BatchSizes.from_config(replace(config, train=train))

    def steps(name: str) -> int:
        samples = args[name] or 0
        number = sizes.steps_for(samples) if samples else 0
        if sizes.samples_before(number) != samples:
            args.reject(f"{name} is {samples:,} samples, which no number of steps of {batch} takes", OPTIONAL)
        return number

    if steps("consumed_train_samples") != step:
        args.reject(f"{step:,} steps of {batch} are not its {args['consumed_train_samples']:,} samples", OPTIONAL)
    optimizer = replace(
        config.optimizer,
        schedule=schedule,
        learning_rate=args.number("max_lr"),
        min_learning_rate=args.number("min_lr"),
        warmup_steps=steps("lr_warmup_steps"),
        decay_steps=steps("lr_decay_steps"),
        weight_decay=args.number("start_wd"),
        epsilon=groups[0]["eps"],
        **dict(zip(("beta1", "beta2"), groups[0]["betas"], strict=True)),
        **({} if args["clip_grad"] is None else {"clip_norm": args.number("clip_grad")}),
    )
    if schedule == "wsd":
        wsd = args["lr_wsd_decay_iters"] or steps("lr_wsd_decay_samples")
        optimizer = replace(optimizer, wsd_decay_steps=wsd, wsd_decay=wsd_style)
    end = args["train_iters"] or sizes.steps_for(args["train_samples"] or 0)
    micro, seed = args.count("micro_batch_size", 1, 1), args.count("seed", train.seed)
    train = replace(train, micro_batch=micro, seed=seed, steps=max(end, step))
    sequence = args.count("seq_length", config.model.sequence, 1)
    counts = {STEP: step, SAMPLES: args.count("num_steps"), COUNT: int(count)}
    counts |= {"loss_scale.clean_steps": 0, "loss_scale.hysteresis": HYSTERESIS}
    scalars = {name: np.int32(number) for name, number in counts.items()} | {"loss_scale.scale": np.float32(1)}
    return replace(config, model=replace(config.model, sequence=sequence), optimizer=optimizer, train=train), scalars


def _read_groups(common: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """The parameter groups of the optimizers, with the form of their state, and AdamW's count."""
    groups, counts = [], []
    for part in list_optimizers(common):
        inner, form = part.get("optimizer", part), {"param_state_sharding_type": part.get("param_state_sharding_type")}
        groups += [form | group for group in inner.get("param_groups") or ({},)]
        state = inner.get("state") or {}
        counts += [state.get("common_step", state.get(0, {}).get("step")), *(group.get("step") for group in groups)]
    return groups, next((count for count in counts if count is not None), 0)


def make_state_reader(readers: Mapping[str, Callable], scalars: Mapping[str, np.generic]) -> Callable:
    """Return a function that reads a block of an array of a state by its name: of a weight or moment, or a scalar.

    Args:
      readers: by slot, the results of `make_block_reader`.
      scalars: the result of `read_optimizer`.
    """

    def read_block(name: str, first: int, end: int) -> np.ndarray | np.generic:
        for slot, prefix in SLOTS.items():
            if name.startswith(prefix):
                return readers[slot](name.removeprefix(prefix), first, end)
        return scalars[name] if name in scalars else readers["param"](name, first, end)

    return read_block
