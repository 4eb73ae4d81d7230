"""`mjax lm-eval`: the harness's own command line, in which `--model mjax` is known.

The harness finds models in a registry of its process and looks nowhere else for them, so the process has to be one that
has registered ours. Everything behind `lm-eval` is the harness's: `run`, `ls`, `validate` and all their flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mjax import launch
from mjax.errors import UsageError

NAME, TARGET = "mjax", "mjax.tasks.harness:HarnessModel"


def run(argv: Sequence[str]) -> int:
    """Run the harness's command line. Returns the exit code.

    Raises:
      UsageError: the package lm-eval is missing, or an argument of ours cannot be used.
      RunError: the checkpoint is damaged.
    """
    own = argparse.ArgumentParser(prog="mjax lm-eval", add_help=False, allow_abbrev=False)
    own.add_argument("--simulate", type=int)
    arguments, rest = own.parse_known_args(argv)
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        raise UsageError(
            f"mjax lm-eval needs the package lm-eval ({error}): pip install lm-eval, or use mjax evaluate, which needs "
            "nothing"
        ) from None
    model_registry.register(NAME, target=TARGET)  # imported when it is asked for, and JAX with it
    before, sys.argv = sys.argv, ["lm-eval", *rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0
