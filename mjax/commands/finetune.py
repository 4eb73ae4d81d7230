"""`mjax finetune`: fine-tunes a pre-trained BERT on a task; writes the best checkpoint of every seed and a report.

    config and tokenizer of the run → examples of the files → recipe → mesh and program
    for each seed: trunk of the checkpoint, new head → epochs → best epoch
    report: table, report.json, best → seed-N/best

Invalid flags and files are reported before training starts. An interrupted command continues after the last completed
epoch, or the step at which it was stopped, with a bit-identical result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mjax.checkpoint.folders import check_run_folder
from mjax.config.checks import validate
from mjax.errors import explain
from mjax.finetuning import recipe as recipes
from mjax.finetuning.recipe import FinetuneArguments
from mjax.utils.stores import find_address

if TYPE_CHECKING:  # they import jax, which has to see how many devices are simulated
    from mjax.cluster.watchdog import Watchdog
    from mjax.run.agreement import Facts
    from mjax.tasks.labelled import LabelledTask


def finetune(arguments: FinetuneArguments) -> int:
    """Run the command; progress and notices go to stderr. Returns the exit code.

    Raises:
      UsageError: a flag or a file is invalid, or the run folder lacks a config, a tokenizer or a checkpoint.
      RunError: the checkpoint is damaged, or training cannot continue.
    """
    recipes.check_arguments(arguments)
    from mjax.cluster import processes
    from mjax.cluster.watchdog import make_watchdog

    processes.start(arguments.distributed, arguments.simulate)
    with make_watchdog(arguments.distributed, explain) as watchdog:
        return _tune(arguments, watchdog)


def _tune(arguments: FinetuneArguments, watchdog: Watchdog) -> int:
    from mjax.checkpoint.folders import lock_folder
    from mjax.cluster import processes
    from mjax.finetuning.tuning import Finetuning
    from mjax.generation.inference import check_enough_devices, read_run, run_tokenizer
    from mjax.run.agreement import check_agreement, check_shared, collect_facts
    from mjax.run.display import non_fatal_console
    from mjax.step.layout import with_kernel
    from mjax.tasks.labelled import open_task

    # --- The run, the recipe and the files ----------------------------------------------------------------------------
    console = non_fatal_console(sys.stderr, processes.is_first())
    notify = lambda line: console.print(line, markup=False)  # noqa: E731
    run = arguments.run
    named = run if run.name else run.absolute()  # the current folder has no name
    near = Path() if find_address(named) else named.parent  # not into the cache of a store, which is evicted
    output = arguments.output or near / f"{named.name}-{arguments.task}"
    check_run_folder(output)
    saved = read_run(run, False, "and labelled tasks need a BERT")
    tokenizer = run_tokenizer(run, saved.model, flag=None)
    recipe = recipes.resolve_recipe(arguments, saved, notify)
    with console.status(f"reading the files of {arguments.task}"):
        task = open_task(arguments.task, arguments.train, arguments.validation, tokenizer, recipe.sequence)
    for note in task.notes:
        notify(note)
    recipes.check_task(task, recipe)

    # --- Devices ------------------------------------------------------------------------------------------------------
    config = recipes.finetuning_config(arguments, saved, task, recipe)
    validate(config)
    check_enough_devices(config.mesh)
    config = with_kernel(config, notify)

    # --- Seeds --------------------------------------------------------------------------------------------------------
    request = recipes.make_request(arguments, recipe, len(task.train), config.precision.compute)
    if watchdog.count > 1:
        check_agreement(watchdog, {**collect_facts(config), **_task_facts(arguments, task)})
        check_shared(watchdog, output)
    with contextlib.ExitStack() as stack:
        if processes.is_first():
            stack.enter_context(lock_folder(output, notify))
        request = recipes.with_start_step(request, output)
        tuning = Finetuning(config, saved, task, request, output, console, watchdog)
        for number in range(arguments.seeds):
            exit_code = tuning.train(arguments.seed + number)
            if exit_code:
                return exit_code
    if processes.is_first():
        print(json.dumps(tuning.report())) if arguments.json else tuning.print_report()
    return 0


def _task_facts(arguments: FinetuneArguments, task: LabelledTask) -> Facts:
    """Facts that the processes compare besides the config: the examples and the initial weights."""
    import numpy as np

    from mjax.run.agreement import checkpoint_label

    digest = hashlib.sha256()
    for examples in (task.train, *task.validation.values()):
        for array in (examples.tokens, examples.token_types, *examples.labels.values()):
            digest.update(np.ascontiguousarray(array))
    words = {
        **{f"--{name}": str(getattr(arguments, name)) for name in ("task", "seed", "seeds", "epochs", "step")},
        "--train and --validation hold": digest.hexdigest()[:16],
        "--run holds": checkpoint_label(arguments.run),
    }
    return {name: (value, value) for name, value in words.items()}
