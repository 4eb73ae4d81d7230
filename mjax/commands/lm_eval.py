"""`mjax lm-eval`: the tasks of EleutherAI's lm-evaluation-harness."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mjax.cluster import launch
from mjax.cluster.launch import keep_programs
from mjax.errors import UsageError

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
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UsageError(
            f"mjax lm-eval needs the package lm-eval ({error}): pip install lm-eval, or use mjax evaluate, which needs "
            "nothing"
        ) from None
    model_registry.register(NAME, target=TARGET)  # imported on use, and JAX with it
    before, sys.argv = sys.argv, ["lm-eval", *rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


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
