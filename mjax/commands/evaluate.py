"""`mjax evaluate`: a run folder, a task and a file in, metrics out.

    config and tokenizer of the run → windows of the file → weights, onto the mesh asked for → score → metrics

What is wrong with a flag or the file is said before the weights are read. JAX is not imported before the command runs,
because simulated devices have to be asked for first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from mjax import launch
from mjax.bounds import Count
from mjax.config import Config, MeshConfig, read_config
from mjax.data.outputs import facts
from mjax.errors import UsageError, either
from mjax.launch import Distributed
from mjax.progress import progress
from mjax.tasks.interface import FOR_TEXT, Figure, Task
from mjax.tasks.labelled import (
    TASKS,
    LabelledTask,
    check_name,
    is_fine_tuned,
    open_task,
    what_is_told,
    write_predictions,
)
from mjax.tasks.lambada import Lambada
from mjax.tasks.perplexity import Perplexity
from mjax.tasks.wikitext import WikiText103

# name → (data, tokenizer, positions of the model, --overlap) → task
TEXT_TASKS: dict[str, Callable[..., Task]] = {"wikitext103": WikiText103, "lambada": Lambada, "perplexity": Perplexity}


@dataclass(frozen=True)
class EvaluateArguments:
    """Measure a trained model: perplexity per word on WikiText103, last words of LAMBADA, perplexity of any text."""

    checkpoint: Annotated[Path, tyro.conf.arg(aliases=["--run"])]
    """Folder of the run, such as runs/demo: its config.json, tokenizer and newest checkpoint are used."""
    task: str
    """wikitext103, lambada or perplexity; of a run of `mjax finetune` mnli, qqp, race, squad1.1 or squad2.0."""
    data: str
    """File of the task: wiki.test.tokens; a .jsonl of LAMBADA; for perplexity any .txt, .jsonl or .parquet file, or the
    prefix of an indexed dataset; of the other tasks a published file or folder."""
    step: int | None = None
    """Checkpoint to use; the newest that is not damaged when not given."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND:FILES")] = None
    """The tokenizer the model was trained with, as in `mjax prepare`; that of the run when not given."""
    overlap: int | None = None
    """Tokens by which a window moves on over a text that is longer than the model reads, and that it then counts; the
    rest is context. When not given: 32 for wikitext103, and for perplexity as many as the model has positions."""
    predictions: Path | None = None
    """Folder for the files of predictions, in the official format of a task that a run was fine-tuned for."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    micro_batch: Annotated[Count | None, tyro.conf.arg(name="train.micro-batch")] = None
    """Sequences a data replica takes through the model at once; those of training when not given."""
    compute: Annotated[Literal["bf16", "fp16", "fp32"] | None, tyro.conf.arg(name="precision.compute")] = None
    """Dtype of activations and matrix products; that of training when not given."""
    attention: Annotated[Literal["auto", "cudnn", "xla", "xla_blocks"], tyro.conf.arg(name="model.attention")] = "auto"
    """Attention kernel, as in training."""
    simulate: int | None = None
    """Run on this many simulated devices of the CPU, in each process."""
    distributed: Distributed = field(default_factory=Distributed)
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


def evaluate(arguments: EvaluateArguments) -> int:
    """Run the command; progress and notices go to stderr. Returns the exit code.

    A file without labels, such as a benchmark's test set, gives predictions alone.

    Raises:
      UsageError: a flag or the file cannot be used, the run folder lacks a config, a tokenizer or a checkpoint, or its
        model is not one for the task.
      RunError: the checkpoint is damaged, or its model gives scores that are not finite.
    """
    _check(arguments)
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)
    from mjax.parallel import processes

    processes.start(arguments.distributed)
    step, figures = _measure(arguments)
    if processes.is_first():
        report(arguments, step, figures)
    return 0


def metrics_of(folder: str | Path, task: str, data: str, **options) -> dict[str, float | int | str]:
    """Metrics of a task by name, as `mjax evaluate --json` prints them.

    Args:
      folder: of the run.
      task: wikitext103, lambada or perplexity; of a fine-tuned run the task it is for.
      data: file of the task.
      options: other fields of `EvaluateArguments`, such as `mesh` or `step`.

    Raises:
      UsageError: as on the command line.
    """
    arguments = EvaluateArguments(checkpoint=Path(folder), task=task, data=str(data), **options)
    _check(arguments)
    return {figure.name: figure.value for figure in _measure(arguments)[1]}


def _check(arguments: EvaluateArguments) -> None:
    """Refuse flags that do not go together."""
    task, of_text, labelled = arguments.task, list(TEXT_TASKS), list(TASKS)
    check_name(task, of_text + labelled)
    if task in of_text and arguments.predictions is not None:
        raise UsageError(f"--predictions is for {either(labelled)}; leave it out, {task} predicts text")
    if task in labelled and arguments.overlap is not None:
        raise UsageError(f"--overlap is for {either(of_text)}; leave it out, {task} says itself what is cut")


def _measure(arguments: EvaluateArguments) -> tuple[int, Sequence[Figure]]:
    """The step of the checkpoint, and the metrics; writes the predictions that are asked for."""
    from mjax.inference import inference_config, restore_weights, run_tokenizer
    from mjax.models.kernel_trial import with_kernel
    from mjax.parallel import processes
    from mjax.parallel.mesh import make_mesh
    from mjax.tasks.scoring import Scorer, TaskScorer

    # --- The run and the file -----------------------------------------------------------------------------------------
    notices = Console(stderr=True, highlight=False, quiet=not processes.is_first())
    say = lambda line: notices.print(line, markup=False)  # noqa: E731
    run, labelled = arguments.checkpoint, arguments.task in TASKS
    saved = _read_run(arguments)
    tokenizer = run_tokenizer(run, saved.model, arguments.tokenizer)
    with notices.status(f"reading {arguments.data}"):
        if labelled:
            task = open_task(arguments.task, (), (arguments.data,), tokenizer, saved.model.sequence)
            sets, unit, scorer_of = task.validation, "rows", TaskScorer
        else:
            task = TEXT_TASKS[arguments.task](arguments.data, tokenizer, saved.model.sequence, arguments.overlap)
            sets, unit, scorer_of = dict(enumerate(task.passes)), "windows", Scorer
    if labelled:
        for note in task.notes:
            say(note)
        _check_labelled(arguments, saved, task)

    # --- The mesh and the weights -------------------------------------------------------------------------------------
    config = inference_config(saved, arguments.mesh, arguments.attention, arguments.micro_batch, arguments.compute)
    config = with_kernel(config, say)
    scorer = scorer_of(config, make_mesh(config.mesh))
    step, model = restore_weights(run, scorer.abstract_model, arguments.step, say)

    # --- Scores, metrics, predictions ---------------------------------------------------------------------------------
    columns = MofNCompleteColumn(), TextColumn(unit)
    with progress(arguments.task, sum(map(len, sets.values())), *columns, console=notices, transient=True) as advance:
        scores = {name: scorer(model, rows, advance) for name, rows in sets.items()}
    if processes.is_first() and arguments.predictions is not None:
        for file in write_predictions(arguments.predictions, task, scores):
            say(f"predictions  {file}")
    return step, task.figures(scores if labelled else list(scores.values()))


def _read_run(arguments: EvaluateArguments) -> Config:
    """The config of the run, whose model must be one for the task."""
    from mjax.inference import read_run

    if arguments.task in TEXT_TASKS:
        return read_run(arguments.checkpoint, *FOR_TEXT)
    saved = read_config(arguments.checkpoint / "config.json")
    if not is_fine_tuned(saved.model):
        raise UsageError(
            f"{arguments.checkpoint} has not been fine-tuned for {arguments.task}; type python -m mjax finetune "
            "--help, and give the folder best of what comes of it"
        )
    return saved


def _check_labelled(arguments: EvaluateArguments, saved: Config, task: LabelledTask) -> None:
    """Refuse a model that was not fine-tuned for a task of this form, and a file that would give no output."""
    if task.with_head(saved.model) != saved.model:
        raise UsageError(
            f"the model in {arguments.checkpoint} tells {what_is_told(saved.model)} and was not fine-tuned for "
            f"{arguments.task}; give a run of python -m mjax finetune --task {arguments.task}"
        )
    if arguments.predictions is None and not task.has_labels:
        raise UsageError(f"{arguments.data} has no labels to measure by; add --predictions FOLDER for what it predicts")


def report(arguments: EvaluateArguments, step: int, figures: Sequence[Figure]) -> None:
    """Print the metrics, as one JSON object or as a table."""
    about = {"task": arguments.task, "data": arguments.data, "checkpoint": str(arguments.checkpoint), "step": step}
    if arguments.json:
        print(json.dumps(about | {figure.name: figure.value for figure in figures}, ensure_ascii=False))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{arguments.task} on {arguments.data}: {arguments.checkpoint}, step {step}\n", markup=False)
    console.print(facts((figure.name.replace("_", " "), figure.shown, figure.remark) for figure in figures))
