"""The tasks of EleutherAI's lm-evaluation-harness: `mjax lm-eval`, and a callback of a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from mjax.cluster import launch
from mjax.cluster.launch import enable_compilation_cache
from mjax.commands.flags import parse_known
from mjax.config import read_settings
from mjax.errors import UsageError
from mjax.run.callbacks import Callback

if TYPE_CHECKING:
    from mjax.run.loop import Run
    from mjax.run.metrics import Record
    from mjax.tasks.harness import HarnessModel

NAME, TARGET = "mjax", "mjax.tasks.harness:HarnessModel"


@dataclass(frozen=True)
class LmEvalArguments:
    """Run EleutherAI's lm-evaluation-harness (pip install lm-eval): mjax lm-eval {run,ls,validate} and its flags, which
    `mjax lm-eval run --help` lists. --model_args of mjax are run, config, step, pipe, data, context, model, compute,
    attention, tokenizer and seed."""

    run: str | None = None
    """Run folder to evaluate. Short for run --model mjax --model_args run=RUN."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.py")] = None
    """With --run: the .py file that defines the run's model, if you wrote it. Any other --config is the harness's."""
    model_args: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["-a"], metavar="NAME=VALUE …")] = ()
    """With --run: further arguments of the model."""
    simulate: int | None = None
    """Number of CPU devices to simulate."""


def lm_eval(argv: Sequence[str]) -> None:
    """Run the harness's command line, with the model `mjax` registered.

        mjax lm-eval --run runs/x --tasks hellaswag
        mjax lm-eval run --model mjax --model_args run=runs/x --tasks hellaswag     the same

    The harness finds models only in a registry of its process, so it has to run in a process that has registered ours.
    Everything after `lm-eval` belongs to the harness: `run`, `ls`, `validate` and all their flags.

    Raises:
      UsageError: the package lm-eval is missing, or an argument of ours or the name of a task is invalid.
      RunError: the checkpoint is damaged.
    """
    arguments, rest = parse_known(LmEvalArguments, argv, "mjax lm-eval")
    rest = harness_arguments(arguments, rest)
    if arguments.run is not None and "--apply_chat_template" in rest:  # before weights are read
        from mjax.generation.chat import Chat

        Chat(Path(arguments.run) / "tokenizer", flag="--apply_chat_template")
    if arguments.run is not None:
        read_settings(Path(arguments.run) / "config.json")
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)
    enable_compilation_cache()
    _check_installed("mjax lm-eval")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target=TARGET)  # imported on use, and JAX with it
    before, sys.argv = sys.argv, ["lm-eval", *rest]
    try:
        cli_evaluate()
    except ValueError as error:
        if not str(error).startswith("Tasks not found"):
            raise
        raise UsageError(f"{error}; `mjax lm-eval ls tasks` lists their names") from None
    finally:
        sys.argv = before


def harness_arguments(arguments: LmEvalArguments, rest: Sequence[str]) -> list[str]:
    """The harness's arguments: `rest`, and the replacements of --run, --config and --model_args."""
    model_args, config, rest = list(arguments.model_args), arguments.config, list(rest)
    if arguments.run is not None:
        model_args.insert(0, f"run={arguments.run}")
        if config is not None and config.endswith(".py"):
            model_args, config = [*model_args, f"config={config}"], None
        rest = ["run", "--model", NAME, *(word for word in rest if word != "run")]
    rest += ["--model_args", ",".join(model_args)] if model_args else []
    return rest + ([] if config is None else ["--config", config])


def _check_installed(who: str) -> None:
    try:
        importlib.import_module("lm_eval")
    except ImportError as error:
        fix = "pip install lm-eval, or use mjax evaluate"
        raise UsageError(f"{who} needs the package lm-eval ({error}): {fix}") from None


class EvaluateWithHarness(Callback):
    """Evaluates tasks of the harness every few steps and after the last one, with the weights of that step.

    The results are metrics of the step: the accuracy of hellaswag is `val_hellaswag_acc` in metrics.jsonl.
    """

    def __init__(self, tasks: Sequence[str], every: int, **options: Any):
        """Nothing is read before the first step.

        Args:
          tasks: names, as `mjax lm-eval ls tasks` lists them.
          every: steps between two evaluations.
          options: of `lm_eval.simple_evaluate`, such as `limit=100` documents or `num_fewshot=5`.

        Raises:
          UsageError: the package lm-eval is missing.
        """
        _check_installed("EvaluateWithHarness")
        self.tasks, self.every, self.options = list(tasks), every, options
        self._model: HarnessModel | None = None

    def on_start(self, run: Run) -> None:
        """Prepare the model; UsageError if the run has no tokenizer."""
        from mjax.tasks.harness import HarnessModel

        self._model = self._model or HarnessModel.from_run(run)

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True if `step` is evaluated."""
        return step % self.every == 0 or step == run.config.train.steps

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Add the results to the metrics, unless the run is to stop soon."""
        if not self.needs_state(run, step) or run.signal.requested:
            return
        from lm_eval import simple_evaluate

        run.begin_activity(step, "evaluating")
        self._model.weights = run.state.model
        options = {"bootstrap_iters": 0, "log_samples": False, **self.options}
        for task, values in simple_evaluate(self._model, tasks=self.tasks, **options)["results"].items():
            named = {name.removesuffix(",none").replace(",", "_"): value for name, value in values.items()}
            scores = {f"{task}_{name}": value for name, value in named.items() if isinstance(value, float)}
            metrics.val_metrics = metrics.val_metrics | scores
