"""The tasks of EleutherAI's lm-evaluation-harness: `mjax lm-eval`, and a callback of a run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mjax.cluster import launch
from mjax.cluster.launch import keep_programs
from mjax.errors import UsageError
from mjax.run.callbacks import Callback

if TYPE_CHECKING:
    from mjax.run.loop import Run
    from mjax.run.metrics import Record
    from mjax.tasks.harness import HarnessModel

NAME, TARGET = "mjax", "mjax.tasks.harness:HarnessModel"

HELP = """usage: mjax lm-eval [--run RUN [--config FILE.py]] [--simulate N] [flags of lm-eval run]
       mjax lm-eval [--simulate N] {run,ls,validate} [flags of lm-eval]

  --run RUN         run folder to evaluate; short for: run --model mjax --model_args run=RUN
  --config FILE.py  with --run: the file that defines a model of your own; any other --config is the harness's
  --simulate N      number of CPU devices to simulate

Everything else is passed to EleutherAI's lm-evaluation-harness (pip install lm-eval); mjax lm-eval run --help lists
its flags. --model_args of mjax are run, config, step, pipe, data, context, model, compute, attention, tokenizer and
seed."""


def lm_eval(argv: Sequence[str]) -> int:
    """Run the harness's own command line, with the model `mjax` registered. Returns the exit code.

        mjax lm-eval --run runs/x --tasks hellaswag
        mjax lm-eval run --model mjax --model_args run=runs/x --tasks hellaswag     the same

    The harness finds models only in a registry of its process, so it has to run in a process that has registered ours.
    Everything after `lm-eval` belongs to the harness: `run`, `ls`, `validate` and all their flags.

    Raises:
      UsageError: the package lm-eval is missing, or an argument of ours is invalid.
      RunError: the checkpoint is damaged.
    """
    parser = argparse.ArgumentParser(prog="mjax lm-eval", add_help=False, allow_abbrev=False)
    parser.add_argument("--simulate", type=int)
    parser.add_argument("--run", "--checkpoint")
    arguments, rest = parser.parse_known_args(argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(HELP)
        return 0
    if arguments.run is not None:
        rest = _with_run(arguments.run, rest)
        if "--apply_chat_template" in rest:  # before weights are read
            from mjax.generation.chat import Chat

            Chat(Path(arguments.run) / "tokenizer", flag="--apply_chat_template")
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)
    keep_programs()
    _check_installed("mjax lm-eval")
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target=TARGET)  # imported on use, and JAX with it
    before, sys.argv = sys.argv, ["lm-eval", *rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


def _check_installed(who: str) -> None:
    try:
        importlib.import_module("lm_eval")
    except ImportError as error:
        raise UsageError(
            f"{who} needs the package lm-eval ({error}): pip install lm-eval, or use mjax evaluate, which needs nothing"
        ) from None


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

        self._model = self._model or HarnessModel.of_training(run)

    def needs_state(self, run: Run, step: int) -> bool:
        """Return True if `step` is evaluated."""
        return step % self.every == 0 or step == run.config.train.steps

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Add the results to the metrics, unless the run is to stop soon."""
        if not self.needs_state(run, step) or run.signal.requested:
            return
        from lm_eval import simple_evaluate

        run.at(step, "evaluating")
        self._model.weights = run.state.model
        options = {"bootstrap_iters": 0, "log_samples": False, **self.options}
        for task, values in simple_evaluate(self._model, tasks=self.tasks, **options)["results"].items():
            named = {name.removesuffix(",none").replace(",", "_"): value for name, value in values.items()}
            metrics.val_metrics = metrics.val_metrics | {
                f"{task}_{name}": value for name, value in named.items() if isinstance(value, float)
            }


def _with_run(folder: str, rest: Sequence[str]) -> list[str]:
    """The harness's arguments for the run in `folder`, keeping other --model_args."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model_args", "-a", nargs="+", default=[])
    parser.add_argument("--config")
    given, rest = parser.parse_known_args([word for word in rest if word != "run"])
    ours = [f"run={folder}", *given.model_args]
    if given.config is not None and given.config.endswith(".py"):
        ours.append(f"config={given.config}")
    elif given.config is not None:
        rest += ["--config", given.config]
    return ["run", "--model", NAME, "--model_args", ",".join(ours), *rest]
