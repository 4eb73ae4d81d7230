"""The request of a fine-tuning: the task's recipe, changed by flags, and the resulting config.

Recipes come from the paper and from Megatron-LM v1.0 (`tasks/labelled.py`). They use AdamW with Megatron's decay mask,
linear warm-up over a share of the steps, then linear decay to 0, gradients clipped at norm 1, and the dropout of
pre-training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict

import tyro

from mjax import config as configs
from mjax.cluster.launch import Distributed
from mjax.config import Config, MeshConfig
from mjax.config.bounds import Count, NotNegative, Seed, Share
from mjax.config.marks import RUN_SYNONYMS, Synonyms
from mjax.config.model import Attention
from mjax.config.plain_values import read
from mjax.config.run import ComputeDtype, Recompute
from mjax.errors import UsageError

if TYPE_CHECKING:
    from mjax.tasks.labelled import LabelledTask, Recipe


@dataclass(frozen=True)
class FinetuneArguments:
    """Fine-tune a pre-trained BERT for a labelled task, with several seeds, and keep the best checkpoint."""

    examples: ClassVar = ("mjax finetune --run runs/bert_336m --task mnli --train train.tsv --validation dev.tsv",)

    run: Annotated[Path, RUN_SYNONYMS]
    """Pre-trained run, such as runs/bert_336m: its config, tokenizer and newest checkpoint are used, without heads."""
    task: str
    """mnli, qqp, race, squad1.1 or squad2.0."""
    train: Annotated[tuple[str, ...], Synonyms("train-file train-data")]
    """Training files, as published: a .tsv of GLUE, a folder of RACE, a .json of SQuAD."""
    validation: Annotated[tuple[str, ...], Synonyms("val-data validation-file")]
    """Validation files, evaluated after each epoch to choose the best one."""
    output: Annotated[Path | None, Synonyms("save output-dir out-dir save-dir")] = None
    """Results folder (by default RUN-TASK, for an address in the current folder). Existing results are continued."""
    step: int | None = None
    """Checkpoint to start from (by default the newest intact one)."""
    seeds: Count = 1
    """Number of seeds, which differ in head, order of examples and dropout. The papers report the median of five."""
    seed: Annotated[Seed, Synonyms("random-seed")] = 1234
    """First seed. Further runs use the next ones."""
    epochs: Annotated[Count | None, Synonyms("epochs train-epochs")] = None
    """Number of epochs. The default is the paper's recipe for the task, also for the flags below."""
    batch: Annotated[Count | None, Synonyms("batch global-batch train-batch")] = None
    """Examples per step, over all devices."""
    learning_rate: Annotated[NotNegative | None, Synonyms("lr")] = None
    """Peak learning rate, with linear decay to 0."""
    warmup: Annotated[Share | None, Synonyms("warmup-fraction warmup-ratio")] = None
    """Share of the steps with linear warm-up from 0."""
    weight_decay: Annotated[NotNegative | None, Synonyms("wd")] = None
    """Decoupled weight decay, for matrices and embeddings."""
    sequence: Annotated[Count | None, Synonyms("seq-length seq-len sequence-length max-seq-length max-length")] = None
    """Tokens per row. Longer rows are truncated by the task's rule."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    micro_batch: Annotated[Count | None, tyro.conf.arg(name="train.micro-batch")] = None
    """Examples per forward pass and data-parallel replica (by default its whole share, in a pipeline one)."""
    recompute: Annotated[Recompute, tyro.conf.arg(name="train.recompute")] = "none"
    """Activations that the backward pass recomputes, as in training."""
    compute: ComputeDtype = None
    """Dtype of activations and matmuls (by default as in pre-training)."""
    attention: Annotated[Attention, tyro.conf.arg(name="model.attention")] = "auto"
    """Attention kernel, as in training."""
    simulate: int | None = None
    """Number of CPU devices to simulate, in each process."""
    distributed: Distributed = field(default_factory=Distributed)
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the report as one JSON object."""


def check_arguments(arguments: FinetuneArguments) -> None:
    """Check the flags before files are read.

    Raises:
      UsageError: a sentence with the flag and what is allowed.
    """
    from mjax.tasks.labelled import check_task_name

    check_task_name(arguments.task)
    if arguments.seed + arguments.seeds > 2**32:
        raise UsageError(f"--seed is {arguments.seed}; all seeds must be below 2^32")


def resolve_recipe(arguments: FinetuneArguments, saved: Config, print_line: Callable[[str], None]) -> Recipe:
    """The task's recipe, changed by the flags.

    Args:
      saved: config of the pre-trained run.
      print_line: called if rows are shortened because the model has fewer positions.

    Raises:
      UsageError: rows are longer than the model's sequence, or the batch does not divide.
    """
    from mjax.tasks.labelled import RECIPES, Recipe

    positions = saved.model.max_positions
    if arguments.sequence is not None and arguments.sequence > positions:
        problem = f"--sequence {arguments.sequence} is longer than the {positions} positions of the model"
        raise UsageError(f"{problem} in {arguments.run}; use at most {positions}")
    flags = {name: getattr(arguments, name) for name in Recipe.__dataclass_fields__}
    recipe = replace(RECIPES[arguments.task], **{name: value for name, value in flags.items() if value is not None})
    data = arguments.mesh.data
    if data > 0 and recipe.batch % data:
        raise UsageError(f"--batch {recipe.batch} does not divide over --mesh.data {data}; use a multiple of {data}")
    if recipe.sequence > positions:
        print_line(f"rows have {positions} tokens rather than {recipe.sequence}: the model has no more positions")
    return replace(recipe, sequence=min(recipe.sequence, positions))


def check_task(task: LabelledTask, recipe: Recipe) -> None:
    """Check that the files can be used for training and validation.

    Raises:
      UsageError: there are fewer examples than a batch, or there is no label for validation.
    """
    count = len(task.train)
    if count < recipe.batch:
        raise UsageError(f"--batch {recipe.batch} is more than the {count} examples of --train; use at most {count}")
    if not task.has_labels:
        raise UsageError("--validation has no labels to choose the best epoch by; give the published development set")


def finetuning_config(arguments: FinetuneArguments, saved: Config, task: LabelledTask, recipe: Recipe) -> Config:
    """The config of the steps, for every seed: the pre-trained model's shape and dropout with another head.

    Its seed is 0: head, order of examples and dropout masks depend on the seed in `Finetuning.train`.
    """
    mesh, steps_of_epoch = arguments.mesh, len(task.train) // recipe.batch
    steps = recipe.epochs * steps_of_epoch
    micro_batch = arguments.micro_batch or (1 if mesh.pipe > 1 else recipe.batch // max(mesh.data, 1))
    precision = replace(saved.precision, compute=arguments.compute or saved.precision.compute)
    return replace(
        saved,
        model=replace(
            task.with_head(saved.model),
            sequence=recipe.sequence,
            max_position_embeddings=saved.model.max_positions,
            attention=arguments.attention,
        ),
        mesh=mesh,
        data=configs.DataConfig(mock=True),  # no pre-training data are read
        optimizer=configs.OptimizerConfig(
            learning_rate=recipe.learning_rate,
            min_learning_rate=0.0,
            schedule="linear",
            warmup_steps=int(recipe.warmup * steps),
            weight_decay=recipe.weight_decay,
        ),
        precision=precision,
        train=configs.TrainConfig(
            steps=steps,
            global_batch=recipe.batch,
            micro_batch=micro_batch,
            recompute=arguments.recompute,
            seed=0,
            eval_interval=steps_of_epoch,
        ),
        checkpoint=configs.CheckpointConfig(interval=steps_of_epoch, keep_last=2),
        health=configs.HealthConfig(spike="ignore"),  # the loss of a few examples varies a lot
        log=configs.LogConfig(tensorboard=False, sample_tokens=0),
    )


# --- Whether an output folder can be continued ----------------------------------------------------------------------


def make_request(arguments: FinetuneArguments, recipe: Recipe, examples: int, compute: str) -> dict[str, Any]:
    """The settings that affect the results, for request.json: a folder is continued only with the same.

    Mesh, micro-batch and number of seeds may change between two starts.

    Args:
      examples: number of training examples.
      compute: dtype of activations and matmuls.
    """
    return {
        "checkpoint": str(arguments.run),
        "step": arguments.step,
        "task": arguments.task,
        "train": list(arguments.train),
        "validation": list(arguments.validation),
        "examples": examples,
        "compute": compute,
        **asdict(recipe),
    }


class SavedRequest(TypedDict):
    """The required fields of request.json."""

    step: int


def with_start_step(request: dict[str, Any], output: Path) -> dict[str, Any]:
    """The `request`, with the step that the fine-tuning in the folder `output` started from.

    Raises:
      UsageError: the folder has another request, or is damaged.
    """
    file = output / "request.json"
    if not file.exists():
        return request
    before = read(SavedRequest, file, "choose another --output")
    if request["step"] is None:
        request = request | {"step": before["step"]}
    for name, now in request.items():
        if before.get(name) != now:
            flag = "precision.compute" if name == "compute" else name.replace("_", "-")
            subject = "number of examples" if name == "examples" else f"--{flag}"
            change = f"{subject} {_format_value(before.get(name))}, now {_format_value(now)}"
            raise UsageError(f"{output} was fine-tuned with {change}; choose another --output, or use the old value")
    return request


def _format_value(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
