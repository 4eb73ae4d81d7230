"""The command line: `mjax COMMAND …`, and `train.py`, which is `mjax train`.

Exit codes: 0 success · 2 a usage or config error, one sentence, nothing was started · 75 stopped after saving, run me
again · 1 anything else.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from mjax import __version__, launch
from mjax.config import Config, available_configs, load_config, read_config, suggestion
from mjax.errors import RunError, UsageError
from mjax.launch import Distributed
from mjax.validation import validate


@dataclass(frozen=True)
class TrainArguments:
    """Train a model. Any field of the config can be changed by a flag, such as --mesh.data 8 or --train.steps 1000."""

    config: str = "gpt_demo"
    """Name of a file in configs/, or a path to a .py file that defines `config`."""
    name: str | None = None
    """Name of the run, whose folder is RUNS/NAME; that of the config when not given. A run that is there is
    continued."""
    runs: Path = Path("runs")
    """Folder of run folders."""
    resume: Path | None = None
    """Continue the run in this folder with the config saved there."""
    simulate: int | None = None
    """Run on this many simulated devices of the CPU, in each process."""
    force: bool = False
    """Train even where the memory of the GPUs is predicted not to suffice."""
    distributed: Distributed = field(default_factory=Distributed)
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def train(argv: Sequence[str]) -> int:
    """`mjax train`."""
    chosen = _choose_config(argv)
    arguments = tyro.cli(TrainArguments, args=argv, prog="train.py", default=chosen)
    config = arguments.settings
    folder = arguments.resume or arguments.runs / (arguments.name or Path(arguments.config).stem)
    label = arguments.config if arguments.resume is None else str(folder)

    # Everything that can be refused without a device is refused before jax is imported.
    validate(config, label)
    from mjax.training.runs import changes_since

    changes = changes_since(folder, config)
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)

    from mjax.parallel import processes
    from mjax.planner.fit import check_gpu_at_hand
    from mjax.training import loop
    from mjax.training.metrics import check_wandb
    from mjax.training.watchdog import watching

    check_wandb(config.log.wandb)
    processes.start(arguments.distributed)
    if processes.is_first():
        for line in changes:
            print(line)
    check_gpu_at_hand(config, label, arguments.force, print if processes.is_first() else lambda line: None)
    with watching(arguments.distributed, explain) as watchdog:
        result = loop.train(config, folder, label, watchdog)
    return result.exit_code


def _choose_config(argv: Sequence[str]) -> TrainArguments:
    """The defaults of the other flags: from --resume's run folder, or from --config's file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="gpt_demo")
    parser.add_argument("--resume", type=Path)
    first, _ = parser.parse_known_args(argv)
    if first.resume is not None:
        from mjax.training.runs import has_checkpoint

        if not has_checkpoint(first.resume):
            raise UsageError(f"--resume {first.resume} holds no checkpoint; give a run folder such as runs/gpt_demo")
        return TrainArguments(resume=first.resume, settings=read_config(first.resume / "config.json"))
    return TrainArguments(config=first.config, settings=load_config(first.config))


def prepare(argv: Sequence[str]) -> int:
    """`mjax prepare`."""
    from mjax.data.prepare import PrepareArguments
    from mjax.data.prepare import prepare as run

    run(tyro.cli(PrepareArguments, args=argv, prog="mjax prepare"))
    return 0


def dedup(argv: Sequence[str]) -> int:
    """`mjax dedup`."""
    from mjax.data.dedup import DedupArguments
    from mjax.data.dedup import dedup as run

    run(tyro.cli(DedupArguments, args=argv, prog="mjax dedup"))
    return 0


def clean(argv: Sequence[str]) -> int:
    """`mjax clean`."""
    from mjax.data.clean import CleanArguments
    from mjax.data.clean import clean as run

    run(tyro.cli(CleanArguments, args=argv, prog="mjax clean"))
    return 0


def generate(argv: Sequence[str]) -> int:
    """`mjax generate`."""
    from mjax.generation import GenerateArguments, run_generate

    return run_generate(tyro.cli(GenerateArguments, args=argv, prog="mjax generate"))


def evaluate(argv: Sequence[str]) -> int:
    """`mjax evaluate`."""
    from mjax.tasks.evaluate import EvaluateArguments
    from mjax.tasks.evaluate import evaluate as run

    return run(tyro.cli(EvaluateArguments, args=argv, prog="mjax evaluate"))


def finetune(argv: Sequence[str]) -> int:
    """`mjax finetune`."""
    from mjax.finetuning.command import FinetuneArguments
    from mjax.finetuning.command import finetune as run

    return run(tyro.cli(FinetuneArguments, args=argv, prog="mjax finetune"), explain)


def lm_eval(argv: Sequence[str]) -> int:
    """`mjax lm-eval`."""
    from mjax.tasks.harness_command import run

    return run(argv)


def plan(argv: Sequence[str]) -> int:
    """`mjax plan`."""
    launch.leave_accelerators_alone()
    from mjax.planner.plan import PlanArguments, run_plan

    chosen = _choose_config(argv)
    default = PlanArguments(config=chosen.config, settings=chosen.settings)
    return run_plan(tyro.cli(PlanArguments, args=argv, prog="mjax plan", default=default))


def doctor(argv: Sequence[str]) -> int:
    """`mjax doctor`."""
    from mjax.doctor.command import DoctorArguments, run_doctor

    return run_doctor(tyro.cli(DoctorArguments, args=argv, prog="mjax doctor"))


def merge(argv: Sequence[str]) -> int:
    """`mjax data merge`."""
    from mjax.data.merge import MergeArguments
    from mjax.data.merge import merge as run

    run(tyro.cli(MergeArguments, args=argv, prog="mjax data merge"))
    return 0


def inspect(argv: Sequence[str]) -> int:
    """`mjax data inspect`."""
    from mjax.data.inspection import InspectArguments
    from mjax.data.inspection import inspect as run

    run(tyro.cli(InspectArguments, args=argv, prog="mjax data inspect"))
    return 0


def data(argv: Sequence[str]) -> int:
    """`mjax data`, a group of commands."""
    return _run("mjax data", DATA_COMMANDS, argv)


def from_hf(argv: Sequence[str]) -> int:
    """`mjax convert from-hf`."""
    launch.leave_accelerators_alone()
    from mjax.interop.convert import FromHfArguments
    from mjax.interop.convert import from_hf as run

    return run(tyro.cli(FromHfArguments, args=argv, prog="mjax convert from-hf"))


def to_hf(argv: Sequence[str]) -> int:
    """`mjax convert to-hf`."""
    launch.leave_accelerators_alone()
    from mjax.interop.convert import ToHfArguments
    from mjax.interop.convert import to_hf as run

    return run(tyro.cli(ToHfArguments, args=argv, prog="mjax convert to-hf"))


def from_megatron(argv: Sequence[str]) -> int:
    """`mjax convert from-megatron`."""
    launch.leave_accelerators_alone()
    from mjax.interop.megatron.command import FromMegatronArguments
    from mjax.interop.megatron.command import from_megatron as run

    return run(tyro.cli(FromMegatronArguments, args=argv, prog="mjax convert from-megatron"))


def convert(argv: Sequence[str]) -> int:
    """`mjax convert`, a group of commands."""
    return _run("mjax convert", CONVERT_COMMANDS, argv)


Commands = dict[str, tuple[Callable[[Sequence[str]], int], str]]

DATA_COMMANDS: Commands = {
    "inspect": (inspect, "show what a dataset holds: documents, tokens, lengths, a sample"),
    "merge": (merge, "write several datasets as one"),
}

CONVERT_COMMANDS: Commands = {
    "from-hf": (from_hf, "turn a model of Hugging Face into a run folder"),
    "from-megatron": (from_megatron, "turn a checkpoint of Megatron-LM into a run folder"),
    "to-hf": (to_hf, "turn a run's checkpoint into a model folder that transformers opens"),
}

COMMANDS: Commands = {
    "train": (train, "train a model; the same as train.py"),
    "prepare": (prepare, "turn text into an indexed dataset and its tokenizer"),
    "dedup": (dedup, "remove exact and near-duplicate documents from text"),
    "clean": (clean, "repair text, cut evaluation sets out of it, remove short and unwanted documents"),
    "data": (data, "inspect or merge datasets"),
    "evaluate": (evaluate, "measure a trained model: WikiText103, LAMBADA, perplexity; fine-tuned, its task"),
    "lm-eval": (lm_eval, "run tasks of EleutherAI's lm-evaluation-harness on a trained model"),
    "finetune": (finetune, "train a BERT further for a task: MNLI, QQP, RACE, SQuAD"),
    "convert": (convert, "bring a model of Hugging Face or Megatron-LM here, or take one to the former"),
    "generate": (generate, "continue a text with a trained model"),
    "plan": (plan, "show what a run of a config will do, without a device"),
    "doctor": (doctor, "check this installation and this machine, and say what to do"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors a person can mend are printed as one sentence."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in ("-V", "--version"):
        print(f"mjax {__version__}")
        return 0
    try:
        return _run("mjax", COMMANDS, argv)
    except (UsageError, RunError, OSError, KeyboardInterrupt) as error:
        return explain(error)


def _run(group: str, commands: Commands, argv: Sequence[str]) -> int:
    """Run the command of a group that `argv` names first, or show what there is."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(group, commands))
        return 0
    if argv[0] not in commands:
        names = list(commands)
        there = f"there is no command {argv[0]!r}" if group == "mjax" else f"{group} has no command {argv[0]!r}"
        raise UsageError(f"{there}{suggestion(argv[0], names)}; there are: {', '.join(names)}")
    return commands[argv[0]][0](argv[1:])


def explain(error: BaseException) -> int:
    """Print what went wrong, in one sentence where a person can mend it, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("mjax: stopped at once; what was written whole before is intact", file=sys.stderr)
        return 130
    if isinstance(error, OSError):
        print(
            f"mjax: error: {error}; what was saved before is intact, the same command continues from it",
            file=sys.stderr,
        )
    elif isinstance(error, UsageError | RunError):
        print(f"mjax: error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 2 if isinstance(error, UsageError) else 1


def _usage(group: str, commands: Commands) -> str:
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in commands.items())
    usage = (
        f"usage: {group} COMMAND …\n\n"
        f"{listed}\n\n"
        f"`{group} COMMAND --help` lists a command's flags with units and defaults."
    )
    return usage if commands is not COMMANDS else f"{usage}\nconfigs: {', '.join(available_configs())}"
