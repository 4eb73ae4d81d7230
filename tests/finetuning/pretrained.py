"""A tiny BERT as `train.py` would have left it, and the command line that trains it further."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.commands.finetune import FinetuneArguments, finetune
from mjax.config import save_config
from mjax.models.build import build_model
from tests.small import QUICKLY, small_config
from tests.tasks.synthetic import VOCABULARY, TaskFiles, tokenizer_of


def write_run(folder: Path, **changes) -> Path:
    """A run folder with a checkpoint 10 of random weights, for the vocabulary of the synthetic tasks."""
    shape = {"sequence": 48, "layers": 2, "heads": 4, "attention": "auto", "dropout": 0.0, "init_std": 0.1} | changes
    config = small_config(kind="bert", vocabulary=len(VOCABULARY), **shape)
    model = jax.jit(partial(build_model, 5, config.model), compiler_options=QUICKLY)()
    with Checkpoints(folder / "checkpoints", on_notice=lambda line: None) as checkpoints:
        checkpoints.save(10, {"model": model, "step": jnp.int32(10)})
    save_config(config, folder / "config.json")
    tokenizer_of(folder / "vocabulary").save(folder / "tokenizer")
    return folder


def words_of(run: Path, task: str, files: TaskFiles, *flags) -> list[str]:
    given = ["--run", run, "--task", task, "--train", *files.train, "--validation", *files.validation, *flags]
    return [str(word) for word in given]


def arguments_of(run: Path, task: str, files: TaskFiles, *flags) -> FinetuneArguments:
    return tyro.cli(FinetuneArguments, args=words_of(run, task, files, *flags))


def tuned(capsys, run: Path, task: str, files: TaskFiles, *flags) -> dict:
    """The report that the command prints."""
    assert finetune(arguments_of(run, task, files, *flags, "--json")) == 0
    return json.loads(capsys.readouterr().out)
