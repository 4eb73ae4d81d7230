"""`mjax generate`: continue prompts with a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from mjax.bounds import check_bounds
from mjax.config import MeshConfig
from mjax.errors import UsageError
from mjax.generation import Generator, Sample, continue_texts, print_samples
from mjax.inference import inference_config, read_run, restore_weights, run_tokenizer
from mjax.parallel.mesh import make_mesh
from mjax.sampling import Sampling


@dataclass(frozen=True)
class GenerateArguments:
    """Continue prompts with a trained model."""

    checkpoint: Annotated[Path, tyro.conf.arg(aliases=["--run"])]
    """Run folder, such as runs/demo: its config.json, tokenizer and newest checkpoint are used."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Prompt; may be given several times."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    step: int | None = None
    """Checkpoint to use; by default the newest intact one."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND:FILES")] = None
    """Tokenizer that the model was trained with, as in `mjax prepare`; by default that of the run."""
    model_parallel: Annotated[int, tyro.conf.arg(name="mesh.model")] = 1
    """Devices that share every layer's matrices; may differ from training."""
    json: bool = False
    """Print one JSON object per prompt, each on its own line."""


def generate(arguments: GenerateArguments) -> int:
    """`mjax generate`: print prompts and continuations; notices go to stderr. Returns the exit code.

    Raises:
      UsageError: a flag is out of range, or the run folder lacks a config, a tokenizer or a checkpoint.
      RunError: the checkpoint is damaged.
    """
    console, notices = Console(), Console(stderr=True, highlight=False)
    check_bounds(arguments)
    if not arguments.prompt:
        raise UsageError("there is no prompt; add --prompt TEXT")
    step, samples = _continued(arguments, notices)
    if arguments.json:
        for sample in samples:
            print(json.dumps({"step": step, **dataclasses.asdict(sample)}))
    else:
        print_samples(samples, console)
    for number, sample in enumerate(samples, start=1):
        if sample.ended == "positions":
            notices.print(
                f"prompt {number}: stopped after {sample.tokens} of {arguments.sampling.tokens} tokens, "
                f"because the model has {sample.prompt_tokens + sample.tokens} positions"
            )
    return 0


def continuations_of(folder: str | Path, prompts: str | Sequence[str], **options) -> list[Sample]:
    """Continue prompts with the newest checkpoint of a run.

    Args:
      folder: of the run.
      prompts: one text or several.
      options: fields of `Sampling`, such as `tokens` and `temperature`, and other fields of `GenerateArguments`.

    Raises:
      UsageError: as on the command line.
    """
    chosen = {name: options.pop(name) for name in {field.name for field in fields(Sampling)} & options.keys()}
    prompts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    arguments = GenerateArguments(Path(folder), prompts, Sampling(**chosen), **options)
    return _continued(arguments, Console(stderr=True, highlight=False))[1]


def _continued(arguments: GenerateArguments, notices: Console) -> tuple[int, list[Sample]]:
    """The step of the checkpoint, and the prompts continued by it."""
    run = arguments.checkpoint
    saved = read_run(run, True, "which generates no text")
    config = inference_config(saved, MeshConfig(model=arguments.model_parallel))
    tokenizer = run_tokenizer(run, config.model, arguments.tokenizer)
    generator = Generator(config, make_mesh(config.mesh))
    say = lambda line: notices.print(line, markup=False)  # noqa: E731
    step, model = restore_weights(run, generator.abstract_model, arguments.step, say)
    with notices.status(f"checkpoint {step}: writing up to {arguments.sampling.tokens} tokens"):
        return step, continue_texts(generator, model, tokenizer, arguments.prompt, arguments.sampling)
