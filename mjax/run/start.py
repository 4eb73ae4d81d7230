"""The first state of a run, and the files of its folder that describe the run and its environment."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import mjax
from mjax.checkpoint.base import cast_to_trained, read_frozen, restore_weights, with_base, without_base
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import Base, read_base, save_base
from mjax.checkpoint.mirror import read_folder
from mjax.cluster import launch
from mjax.config import Config, axes, read_config, save_config
from mjax.config.model_file import save_model_file
from mjax.data.sources import TrainingData
from mjax.data.tokenizers import bos_token_id, is_same_tokenizer
from mjax.errors import PrintLine
from mjax.models.build import count_parameters
from mjax.parallel.weights import combine, partition_trainable, trainable_only
from mjax.run.agreement import dependency_versions
from mjax.run.callbacks import read_starts
from mjax.run.continuing import Origin, save_digests, save_origin
from mjax.step.layout import TrainState, initial_weights
from mjax.step.step import TrainProgram
from mjax.utils.files import copy_whole, write_whole

FLAGS = re.compile(r"(XLA|JAX|NCCL|CUDA|CUDNN|NVIDIA_TF32)_\w+|GLIBC_TUNABLES|TF_CUDNN_DETERMINISTIC")
NEW_OPTIMIZER = "starting with fresh optimizer state"


def first_state(
    checkpoints: Checkpoints, program: TrainProgram, origin: Origin | None, print_line: PrintLine
) -> tuple[int, TrainState, Origin | None, Base | None]:
    """Return the step to continue after, the state, and of a new run the origin with the step that was read, and the
    base of its adapters.

    The state comes from the newest checkpoint. At step 0 it has only weights, from checkpoint 0 or `origin`, or random
    ones.
    """
    target, folder = program.abstract_state.model, checkpoints.folder.parent
    if checkpoints.steps() == [0]:  # of `mjax convert`: no step has number 0, so there are no moments
        _, weights = restore_weights(folder, target, 0, print_line)
        print_line(f"Loaded weights from checkpoint 0; {NEW_OPTIMIZER}")
        return 0, program.begin(weights), None, None
    if checkpoints.steps():
        return *restore_state(checkpoints, program, None, print_line), None, None
    if origin is None:
        options = launch.quick_compile_options(jax.default_backend())
        initialize = program.initialize.lower().compile(options) if options else program.initialize
        return 0, initialize(), None, None
    run, base = read_folder(origin.run), None
    saved = read_config(run / "config.json")
    if target.config.lora_rank and not saved.model.lora_rank:
        new, old = partition_trainable(target)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, new)
        adapters = jax.jit(lambda: trainable_only(initial_weights(program.config)), out_shardings=shardings)()
        frozen, base = read_frozen(run, origin.step, old, print_line)
        step, weights = base.step, combine(adapters, frozen)
    else:
        new, old = partition_trainable(target)
        step, weights = restore_weights(run, combine(cast_to_trained(new, run), old), origin.step, print_line)
        base = read_base(run) if saved.model.lora_rank else None
    origin = replace(origin, step=step)
    print_line(f"Loaded weights from {origin}; {NEW_OPTIMIZER}")
    return 0, program.begin(weights), origin, base


def restore_state(
    checkpoints: Checkpoints, program: TrainProgram, step: int | None, print_line: PrintLine
) -> tuple[int, TrainState]:
    """The state of checkpoint `step`, by default of the newest intact one, with the base of its adapters."""
    step, state = checkpoints.restore(checkpoint_state(program.abstract_state), step)
    weights = with_base(state.model, program.abstract_state.model, checkpoints.folder.parent, print_line)
    return step, replace(state, model=weights)


def checkpoint_state(state: TrainState) -> TrainState:
    """The part of a state that a checkpoint holds (`base.without_base`)."""
    return replace(state, model=without_base(state.model))


def write_folder(config: Config, resolved: Config, data: TrainingData, folder: Path, print_line: PrintLine) -> None:
    """Write the files of a run folder, except checkpoints, metrics and `write_origin`'s."""
    save_config(config, folder / "config.json")
    save_model_file(folder, config.model, count_parameters(resolved.model))
    save_digests(folder, config.data)
    write_environment(resolved, folder, print_line)
    if data.tokenizer is not None:
        tokenizer = folder / "tokenizer"
        if tokenizer.is_dir() and not is_same_tokenizer(data.tokenizer, tokenizer):
            print_line(f"{tokenizer} is replaced by the other tokenizer of the data; a chat template in it is gone")
            shutil.rmtree(tokenizer)
        shutil.copytree(data.tokenizer, tokenizer, dirs_exist_ok=True, copy_function=copy_whole)


def write_origin(
    folder: Path, origin: Origin | None, base: Base | None, data: TrainingData, print_line: PrintLine
) -> None:
    """Record the origin of a new run and the base of its adapters, and copy its tokenizer, unless the data have another
    one."""
    save_origin(folder, origin)
    if base is not None:
        save_base(folder, base)
    if origin and (card := read_folder(origin.run) / "README.md").is_file():  # whose front matter has the license
        copy_whole(str(card), str(folder / card.name))
    tokenizer = read_folder(origin.run) / "tokenizer" if origin else None
    if tokenizer is None or not tokenizer.is_dir():
        return
    if data.tokenizer is None or is_same_tokenizer(data.tokenizer, tokenizer):
        bos = bos_token_id(tokenizer)
        if data.tokenizer is not None and bos is not None and bos_token_id(data.tokenizer) is None:
            remedy = f"prepare them with --tokenizer run:{origin.run} or --prepend-bos on"
            print_line(f"note: texts of {origin.run} begin with id {bos}, and documents of the data do not; {remedy}")
        # The files of the data name the token that ends documents, and their chat template.
        ignored = shutil.ignore_patterns(*[] if data.tokenizer is None else os.listdir(data.tokenizer))
        shutil.copytree(tokenizer, folder / "tokenizer", ignore=ignored, copy_function=copy_whole, dirs_exist_ok=True)
    else:
        advice = "make sure that ids mean the same tokens in both"
        print_line(f"note: the data's tokenizer is not that of {tokenizer}; {advice}")


# --- environment.json -------------------------------------------------------------------------------------------------


def describe_environment(config: Config, print_line: PrintLine) -> dict:
    """Versions, devices, mesh, kernels in use, flags (also which of them mjax has set), and the git commit."""
    devices = jax.devices()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "mjax": mjax.__version__,
        "git_commit": _git_commit(print_line),
        "python": platform.python_version(),
        "packages": dependency_versions(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "host": platform.node(),
        "mesh": axes.cli_sizes(config.mesh),
        "parameters": count_parameters(config.model),
        "attention": config.model.attention,
        **({"moe_kernel": config.model.moe_kernel} if config.model.moe_kernel else {}),
        "driver": launch.nvidia_driver(),
        "flags": {name: value for name, value in sorted(os.environ.items()) if FLAGS.fullmatch(name)},
        "set_by_mjax": dict(launch.SET_BY_MJAX),
    }


def write_environment(config: Config, folder: Path, print_line: PrintLine) -> None:
    """Append this start of the run to environment.json, a list with one entry per start.

    A file that is not such a list is renamed; `print_line` is called with a notice of that and of other failures.
    """
    file = folder / "environment.json"
    starts = read_starts(dict[str, Any], file, print_line)
    write_whole(file, json.dumps([*starts, describe_environment(config, print_line)], indent=2) + "\n")


def _git_commit(print_line: PrintLine) -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, cwd=Path(mjax.__file__).parent, capture_output=True, check=False)
    except OSError as error:
        print_line(f"environment.json has no commit of the source: git cannot be run ({error.strerror})")
        return None
    return result.stdout.decode(errors="replace").strip() or None
