"""The first state of a run, and the files of its folder that say what it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax

from mjax.checkpoint.checkpoint import Checkpoints, restore_weights
from mjax.config import Config, read_config, save_config
from mjax.config.model_file import save_model_file
from mjax.data.sources import TrainingData
from mjax.data.tokenizers import DESCRIPTION, bos_of, same_files
from mjax.models.build import count_parameters
from mjax.run import environment
from mjax.run.continuing import save_digests
from mjax.run.origin import Origin, save_origin
from mjax.step.precision import parameter_type
from mjax.step.step import TrainProgram
from mjax.step.train_state import TrainState

FRESH = "starting with fresh optimizer state"


def first_state(
    checkpoints: Checkpoints, program: TrainProgram, origin: Origin | None, say: Callable[[str], None]
) -> tuple[int, TrainState, Origin | None]:
    """The step to continue after, the state, and the origin of a new run with the step that was read.

    The state is that of the newest checkpoint; or of step 0, with the weights alone of checkpoint 0 or of `origin`, or
    with random ones.
    """
    target = program.abstract_state.model
    if checkpoints.steps() == [0]:  # of `mjax convert`: no step has number 0, so there are no moments
        _, weights = checkpoints.restore(target, field="model")
        say(f"Loaded weights from checkpoint 0; {FRESH}")
        return 0, program.begin(weights), None
    if checkpoints.steps():
        return *checkpoints.restore(program.abstract_state), None
    if origin is None:
        return 0, program.initialize(), None
    run = Path(origin.run)
    dtype = parameter_type(read_config(run / "config.json").precision.compute)
    saved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), target)
    step, weights = restore_weights(run, saved, origin.step, say)
    origin = replace(origin, step=step)
    say(f"Loaded weights from {origin}; {FRESH}")
    return 0, program.begin(weights), origin


def write_folder(
    config: Config, resolved: Config, data: TrainingData, folder: Path, say: Callable[[str], None]
) -> None:
    """Write the files of a run folder, except checkpoints, metrics and `write_origin`'s."""
    save_config(config, folder / "config.json")
    save_model_file(folder, config.model, count_parameters(config.model))
    save_digests(folder, config.data)
    environment.write(resolved, folder, say)
    if data.tokenizer is not None:
        own = folder / "tokenizer"
        if own.is_dir() and not same_files(data.tokenizer, own):
            say(f"{own} is replaced by the other tokenizer of the data; a chat template in it is gone")
            shutil.rmtree(own)
        shutil.copytree(data.tokenizer, own, dirs_exist_ok=True)


def write_origin(folder: Path, origin: Origin | None, data: TrainingData, say: Callable[[str], None]) -> None:
    """Record the origin of a new run, and copy its tokenizer; beside that of the data only if it is the same one."""
    save_origin(folder, origin)
    if origin and (card := Path(origin.run) / "README.md").is_file():  # whose front matter has the license
        shutil.copy(card, folder)
    tokenizer = Path(origin.run) / "tokenizer" if origin else None
    if tokenizer is None or not tokenizer.is_dir():
        return
    if data.tokenizer is None or same_files(data.tokenizer, tokenizer):
        bos = bos_of(tokenizer)
        if data.tokenizer is not None and bos is not None and bos_of(data.tokenizer) is None:
            say(
                f"note: texts of {origin.run} begin with id {bos}, and documents of the data do not; prepare them "
                f"with --tokenizer run:{origin.run} or --prepend-bos on"
            )
        kept = shutil.ignore_patterns(*[DESCRIPTION] * (data.tokenizer is not None))  # which says what ends documents
        shutil.copytree(tokenizer, folder / "tokenizer", dirs_exist_ok=True, ignore=kept)
    else:
        say(f"note: the data's tokenizer is not that of {tokenizer}; make sure that ids mean the same tokens in both")
