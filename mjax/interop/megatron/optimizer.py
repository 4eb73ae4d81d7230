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

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mjax.checkpoint.arrays import open_array
from mjax.checkpoint.folders import checkpoint_steps
from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.errors import UsageError
from mjax.interop.megatron.arguments import MegatronArguments
from mjax.interop.megatron.checkpoint import SAVE_MOMENTS, MegatronCheckpoint, list_optimizers
from mjax.step.learning_rate import decay_end, wsd_decay_steps
from mjax.step.precision import HYSTERESIS

SLOTS = {"param": "model.", "exp_avg": "optimizer.0.mu.", "exp_avg_sq": "optimizer.0.nu."}
"""Megatron's state of a weight → prefix of the arrays in mjax's checkpoints."""
STEP, SAMPLES, COUNT = "step", "samples", "optimizer.0.count"
SCHEDULES = {
    "cosine": "cosine", "linear": "linear", "constant": "constant", "inverse_square_root": "inverse-square-root",
    "wsd": "WSD",
}  # fmt: skip
NUMBERS = {
    "learning_rate": "lr", "min_learning_rate": "min_lr", "weight_decay": "weight_decay", "beta1": "adam_beta1",
    "beta2": "adam_beta2", "epsilon": "adam_eps", "clip_norm": "clip_grad",
}  # fmt: skip
"""mjax's field of the optimizer → Megatron's argument."""
REQUIRED = {
    "optimizer": "adam", "decoupled_weight_decay": True, "decoupled_lr": None, "lr_warmup_init": 0.0, "fp16": False,
    "apply_wd_to_qk_layernorm": False, "step_batch_size_schedule": None, "is_decoupled_lr": False, "lr_mult": 1.0,
    "amsgrad": False, "bias_correction": True,
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
    if getattr(config.model, "has_router_bias", False):
        raise UsageError(f"--optimizer is for models without a bias of the router, and {run} has one; {OPTIONAL}")
    if checkpoint_steps(run) == [0]:
        raise UsageError(f"{run} has taken no step, so it has no state of an optimizer; {OPTIONAL}")
    wsd = {"lr_wsd_decay_iters": wsd_decay_steps(config), "lr_wsd_decay_style": optimizer.wsd_decay}
    return {
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "use_checkpoint_opt_param_scheduler": True,
        **{argument: getattr(optimizer, field) for field, argument in NUMBERS.items()},
        "lr_decay_style": SCHEDULES[optimizer.schedule],
        "lr_warmup_iters": optimizer.warmup_steps,
        "lr_decay_iters": decay_end(config),
        **(wsd if optimizer.schedule == "wsd" else {}),
        "train_iters": train.steps,
        "global_batch_size": train.global_batch,
        "micro_batch_size": train.micro_batch,
        "rampup_batch_size": train.batch_rampup and list(train.batch_rampup),
        "seed": train.seed,
    }


def common_state(config: Config, saved: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the optimizer except for tensors, and `args` about it.

    Args:
      config: of the run.
      saved: its checkpoint.
      arguments: with those of `optimizer_arguments`.
    """
    stored = (open_array(saved / name.split(".")[0], name) for name in (STEP, SAMPLES, COUNT))
    step, samples, count = (int(array.read().result()) for array in stored)
    samples_before, decay = BatchSizes.from_config(config).samples_before, arguments["weight_decay"]
    rates = {"max_lr": arguments["lr"], "min_lr": arguments["min_lr"]}
    betas = arguments["adam_beta1"], arguments["adam_beta2"]

    def make_optimizer(experts: bool) -> dict[str, Any]:
        group = rates | {"lr": arguments["lr"], "betas": betas, "eps": arguments["adam_eps"], "bias_correction": True}
        group |= {"step": count, "is_expert_parallel": experts, "lr_mult": 1.0, "is_decoupled_lr": False}
        groups = [group | {"wd_mult": factor, "weight_decay": factor * decay} for factor in (1.0, 0.0)]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}

    optimizer = make_optimizer(experts=False)
    if arguments["expert_model_parallel_size"] > 1:  # experts have an optimizer of their own
        optimizer = {0: optimizer, 1: make_optimizer(experts=True)}
    schedule = rates | {"num_steps": samples, "lr_decay_style": arguments["lr_decay_style"]}
    schedule |= {"start_wd": decay, "end_wd": decay, "wd_incr_style": "constant"}
    for name, iterations in {"lr_warmup": "lr_warmup", "lr_decay": "lr_decay", "wd_incr": "train"}.items():
        schedule[f"{name}_steps"] = samples_before(arguments[f"{iterations}_iters"])
    taken = samples_before(step)
    args = {"consumed_train_samples": taken, "skipped_train_samples": taken - samples, "no_save_rng": True}
    return {"iteration": step, "optimizer": optimizer, "opt_param_scheduler": schedule, "args": args}


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
    values = {"clip_grad": 1.0, **(checkpoint.arguments or {}), **state}
    args = MegatronArguments(values, str(checkpoint.folder))
    if args["moe_router_enable_expert_bias"]:
        args.reject("mjax reads no optimizer with moe_router_enable_expert_bias", OPTIONAL)
    group = _read_group(checkpoint, args)
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
    end = args["train_iters"] or sizes.steps_for(args["train_samples"] or 0)
    actual = {"lr": state["max_lr"], "weight_decay": state["start_wd"], "adam_eps": group["eps"]}
    actual |= zip(("adam_beta1", "adam_beta2"), group["betas"], strict=True)
    optimizer = replace(
        config.optimizer,
        **replace(args, values={**args.values, **actual}).numbers(NUMBERS),
        schedule=schedule,
        warmup_steps=steps("lr_warmup_steps"),
        decay_steps=None if (decay := steps("lr_decay_steps")) == end else decay,
    )
    if schedule == "wsd":
        length = args["lr_wsd_decay_iters"] or steps("lr_wsd_decay_samples")
        optimizer = replace(optimizer, wsd_decay_steps=length, wsd_decay=wsd_style)
    micro, seed = args.count("micro_batch_size", 1, 1), args.count("seed", train.seed)
    train = replace(train, micro_batch=micro, seed=seed, steps=max(end, step))
    model = replace(config.model, sequence=args.count("seq_length", config.model.sequence, 1))
    counts = {STEP: step, SAMPLES: args.count("num_steps"), COUNT: int(group["step"])}
    counts |= {"loss_scale.clean_steps": 0, "loss_scale.hysteresis": HYSTERESIS}
    scalars = {name: np.int32(number) for name, number in counts.items()} | {"loss_scale.scale": np.float32(1)}
    return replace(config, model=model, optimizer=optimizer, train=train), scalars


def _read_group(checkpoint: MegatronCheckpoint, args: MegatronArguments) -> dict[str, Any]:
    """The hyperparameters of the first group of weights, and in `step` AdamW's count.

    Raises:
      UsageError: the other groups have others, or mjax lacks one, or there is no state.
    """
    optimizers, state = list_optimizers(checkpoint.common), checkpoint.common.get("opt_param_scheduler") or {}
    if forms := {part.get("param_state_sharding_type") for part in optimizers} - {None, "fully_reshardable"}:
        args.reject(f"its optimizer is in the form {forms.pop()}", SAVE_MOMENTS)
    if checkpoint.old_names:
        args.reject("its optimizer is from before megatron-core", OPTIONAL)
    inner = [part.get("optimizer", part) for part in optimizers]
    groups = [group for part in inner for group in part.get("param_groups") or ()]
    if not (groups and state and checkpoint.common.get("iteration") and args["global_batch_size"]):
        args.reject("it has no state of an optimizer after a step, or no arguments about it", OPTIONAL)
    required = REQUIRED | {"max_lr": state["max_lr"], "min_lr": state["min_lr"], "end_wd": state["start_wd"]}
    for name, only in required.items():
        for value in [{**args.values, **group}.get(name) for group in groups]:
            if value not in (None, only):
                args.reject(f"{name} is {value!r}, and mjax continues a run with {only!r}", OPTIONAL)
    torch_state = inner[0].get("state") or {}  # of torch's AdamW, which counts for each weight
    return {"step": torch_state.get("common_step", torch_state.get(0, {}).get("step")), **groups[0]}


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
