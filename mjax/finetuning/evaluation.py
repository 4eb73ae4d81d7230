"""`mjax evaluate` for a run that was fine-tuned: figures of another file, and predictions for it.

A file without labels, such as a benchmark's test set, gives predictions alone.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from mjax.config import ModelConfig, read_config
from mjax.data.atomic import write_whole
from mjax.errors import UsageError
from mjax.finetuning.scores import TaskScorer
from mjax.inference import inference_config, restore_weights, run_tokenizer
from mjax.models.attention import with_kernel
from mjax.parallel.mesh import make_mesh
from mjax.parallel.processes import is_first
from mjax.progress import progress
from mjax.tasks.evaluate import EvaluateArguments, report
from mjax.tasks.labelled import LabelledTask, open_task


def evaluate_labelled(arguments: EvaluateArguments, notices: Console) -> int:
    """Run the command for a task with labels. Returns the exit code.

    Args:
      notices: for progress and what is to be said besides the figures.

    Raises:
      UsageError: the run has not the head of this task, the file cannot be used, or nothing would come of it.
      RunError: the checkpoint is damaged, or its model gives scores that are not finite.
    """
    say = lambda line: notices.print(line, markup=False)  # noqa: E731

    # --- The run and the file -----------------------------------------------------------------------------------------
    run, saved = arguments.checkpoint, read_config(arguments.checkpoint / "config.json")
    if saved.model.head == "pretraining":
        raise UsageError(
            f"{run} has not been fine-tuned for {arguments.task}; type python -m mjax finetune --help, and give the "
            "folder best of what comes of it"
        )
    tokenizer = run_tokenizer(run, saved.model, arguments.tokenizer)
    with notices.status(f"reading {arguments.data}"):
        task = open_task(arguments.task, (), (arguments.data,), tokenizer, saved.model.sequence)
    for note in task.notes:
        say(note)
    _check_head(saved.model, task, arguments)
    labelled = any(examples.labels for examples in task.validation.values())
    if not labelled and arguments.predictions is None:
        raise UsageError(f"{arguments.data} has no labels to measure by; add --predictions FOLDER for what it predicts")

    # --- The mesh and the weights -------------------------------------------------------------------------------------
    config = inference_config(saved, arguments.mesh, arguments.attention, arguments.micro_batch, arguments.compute)
    config = with_kernel(config, say)
    scorer = TaskScorer(config, make_mesh(config.mesh))
    step, model = restore_weights(run, scorer.abstract_model, arguments.step, say)

    # --- Scores, figures, predictions ---------------------------------------------------------------------------------
    count = sum(len(examples.tokens) for examples in task.validation.values())
    columns = (MofNCompleteColumn(), TextColumn("rows"))
    with progress(arguments.task, count, *columns, console=notices, transient=True) as advance:
        scores = {name: scorer(model, examples, advance) for name, examples in task.validation.items()}
    if not is_first():
        return 0
    if arguments.predictions is not None:
        arguments.predictions.mkdir(parents=True, exist_ok=True)
        for name, contents in task.predictions(scores).items():
            write_whole(arguments.predictions / name, contents)
            say(f"predictions  {arguments.predictions / name}")
    report(arguments, step, task.figures(scores))
    return 0


def _check_head(model: ModelConfig, task: LabelledTask, arguments: EvaluateArguments) -> None:
    """That the model was fine-tuned for a task of this form."""
    answers = {"classification": task.classes, "multiple_choice": task.choices, "span": model.answers}[task.head]
    if (model.head, model.answers) != (task.head, answers):
        kinds = {"classification": f"{model.answers} classes", "multiple_choice": f"{model.answers} choices"}
        raise UsageError(
            f"the model in {arguments.checkpoint} tells {kinds.get(model.head, 'where an answer is')} and was not "
            f"fine-tuned for {arguments.task}; give a run of python -m mjax finetune --task {arguments.task}"
        )
