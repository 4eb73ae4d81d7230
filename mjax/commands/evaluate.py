"""`mjax evaluate`: evaluate a run on a task and a file.

    config and tokenizer of the run → windows of the file → weights, on the requested mesh → scores → metrics

Invalid flags and files are reported before the weights are read. JAX is not imported before the command runs, because
devices have to be simulated before that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from mjax.commands.arguments import EvaluateArguments, PositionsOptions
from mjax.config import load_user_model, read_settings
from mjax.config.bounds import check_bounds
from mjax.errors import UsageError, check_options, check_picture, either, name_arguments
from mjax.tasks import labelled
from mjax.tasks.interface import CAUSAL_ONLY, Metric, Task
from mjax.tasks.zero_shot import Lambada, Perplexity, PositionwiseLoss, WikiText103
from mjax.utils.files import resolve_parents
from mjax.utils.progress import facts, progress

# name → (data, tokenizer, positions of the model, --stride) → task
SHORT_TASKS: dict[str, Callable[..., Task]] = {"wikitext103": WikiText103, "lambada": Lambada, "perplexity": Perplexity}
TEXT_TASKS = (*SHORT_TASKS, "positions")


def evaluate(arguments: EvaluateArguments) -> None:
    """Run the command; progress and notices go to stderr.

    A file without labels, such as a benchmark's test set, gives predictions only.

    Raises:
      UsageError: a flag or the file is invalid, the run folder lacks a config, a tokenizer or a checkpoint, or its
        model does not support the task.
      RunError: the checkpoint is damaged, or its model gives non-finite scores.
    """
    _check(arguments)
    from mjax.cluster import processes

    processes.start(arguments.distributed, arguments.simulate)
    step, metrics = _measure(arguments)
    if processes.is_first():
        report(arguments, step, metrics)


@name_arguments(*(field.name for field in fields(EvaluateArguments)))
def score_task(folder: str | Path, task: str, data: str, **options) -> dict[str, Any]:
    """Metrics of a task by name, as `mjax evaluate --json` prints them.

    Args:
      folder: of the run.
      task: wikitext103, lambada, perplexity or positions; for a fine-tuned run its task.
      data: file of the task.
      options: other fields of `EvaluateArguments`, such as `mesh` or `step`.

    Raises:
      UsageError: as on the command line.
    """
    check_options("evaluate", options, [field.name for field in fields(EvaluateArguments)])
    arguments = EvaluateArguments(run=resolve_parents(Path(folder)), task=task, data=str(data), **options)
    _check(arguments)
    return {metric.name: metric.value for metric in _measure(arguments)[1]}


def _check(arguments: EvaluateArguments) -> None:
    """Refuse flags that do not go together."""
    harness = f"`mjax lm-eval --run {arguments.run} --tasks {arguments.task}`"
    known = [*TEXT_TASKS, *labelled.TASKS]
    labelled.check_task_name(arguments.task, known, f", or a task of the lm-evaluation-harness: {harness}")
    check_bounds(arguments.positions, "--positions.")
    flags = {
        "--predictions": (arguments.predictions is not None, labelled.TASKS),
        "--stride": (arguments.stride is not None, SHORT_TASKS),
        "--figure": (arguments.figure is not None, ["positions"]),
        "--positions.length and --positions.bins": (arguments.positions != PositionsOptions(), ["positions"]),
    }
    for flag, (is_given, tasks) in flags.items():
        if is_given and arguments.task not in tasks:
            raise UsageError(f"{flag} is for {either(tasks)}; remove it")
    if arguments.figure is not None:
        check_picture("--figure", arguments.figure)


def _measure(arguments: EvaluateArguments) -> tuple[int, Sequence[Metric]]:
    """The step of the checkpoint, and the metrics; writes predictions on request."""
    from mjax.checkpoint.base import restore_weights
    from mjax.cluster import processes
    from mjax.generation.inference import inference_config, read_run, run_tokenizer
    from mjax.parallel.mesh import make_mesh
    from mjax.step.layout import with_kernel
    from mjax.tasks.scoring import LossScorer, Scorer, TaskScorer

    # --- The run and the file -----------------------------------------------------------------------------------------
    notices = Console(stderr=True, highlight=False, quiet=not processes.is_first())
    notify = partial(notices.print, markup=False, soft_wrap=True)
    run, is_labelled = arguments.run, arguments.task in labelled.TASKS
    load_user_model(arguments.config, run, notify)
    saved = read_settings(run / "config.json") if is_labelled else read_run(run, *CAUSAL_ONLY)
    tokenizer = run_tokenizer(run, saved.model, arguments.tokenizer)
    with notices.status(f"reading {arguments.data}"):
        if is_labelled:
            task = labelled.open_task(arguments.task, (), (arguments.data,), tokenizer, saved.model.sequence)
            size, unit, make_scorer = sum(map(len, task.validation.values())), "rows", TaskScorer
        else:
            if arguments.task == "positions":
                make_scorer, options = LossScorer, arguments.positions
                task = PositionwiseLoss(arguments.data, tokenizer, saved.model, options.length, options.bins)
            else:
                make_task, make_scorer = SHORT_TASKS[arguments.task], Scorer
                task = make_task(arguments.data, tokenizer, saved.model.max_positions, arguments.stride)
            size, unit = sum(map(len, task.passes)), "windows"
    if is_labelled:
        for note in task.notes:
            notify(note)
        if task.with_head(saved.model) != saved.model:
            tuned = f"mjax finetune --task {arguments.task}"
            raise UsageError(f"{run} was not fine-tuned for {arguments.task}; give the folder best of {tuned}")
        if arguments.predictions is None and not task.has_labels:
            raise UsageError(f"{arguments.data} has no labels to compute metrics from; add --predictions FOLDER")

    # --- The mesh and the weights -------------------------------------------------------------------------------------
    config = inference_config(saved, arguments.mesh, arguments.attention, arguments.micro_batch, arguments.compute)
    config = with_kernel(config, notify)
    scorer = make_scorer(config, make_mesh(config.mesh))
    step, model = restore_weights(run, scorer.abstract_model, arguments.step, notify)

    # --- Scores, metrics, predictions and pictures --------------------------------------------------------------------
    columns = MofNCompleteColumn(), TextColumn(unit)
    with progress(arguments.task, size, *columns, console=notices, transient=True) as advance:
        if is_labelled:
            scores = {name: scorer(model, rows, advance) for name, rows in task.validation.items()}
        else:
            scores = scorer(model, task.passes, advance)
    metrics = task.metrics(scores)
    if processes.is_first() and arguments.predictions is not None:
        for file in labelled.write_predictions(arguments.predictions, task, scores):
            notify(f"predictions  {file}")
    if processes.is_first() and arguments.figure is not None:
        task.draw(scores, arguments.figure, f"{run}, step {step:,}, on {arguments.data}")
        notify(f"picture  {arguments.figure}")
    return step, metrics


def report(arguments: EvaluateArguments, step: int, metrics: Sequence[Metric]) -> None:
    """Print the metrics, as one JSON object or as a table."""
    about = {"task": arguments.task, "data": arguments.data, "checkpoint": str(arguments.run), "step": step}
    if arguments.json:
        values = {metric.name: None if metric.value == math.inf else metric.value for metric in metrics}
        print(json.dumps(about | values, ensure_ascii=False))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{arguments.task} on {arguments.data}: {arguments.run}, step {step}\n", markup=False)
    lines = [metric for metric in metrics if not isinstance(metric.value, list)]
    if not lines:  # predictions only
        console.print("no metrics: the file has no labels")
        return
    console.print(facts((metric.name.replace("_", " "), metric.formatted, metric.note) for metric in lines))
    for metric in metrics:
        if metric not in lines:
            print(f"\n{metric.formatted}")
