"""The command line: `mjax COMMAND …`, and `train.py`, which is `mjax train`.

Exit codes: 0 success · 2 a usage or config error, one sentence, nothing was started · 3 the run is unhealthy, a person
must look before it goes on · 75 stopped after saving, run me again · 141 nobody reads the output any more
(`mjax plan | head`) · 1 anything else.
"""

from __future__ import annotations

import argparse
import errno
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from mjax import __version__, launch
from mjax.config import Config, available_configs, load_config, read_config, suggestion
from mjax.errors import RunError, UsageError, either, exit_code
from mjax.flags import parse, typed_flags
from mjax.launch import Distributed
from mjax.pipes import UNREAD, flushed_output, output_is_unread
from mjax.resolve import resolve
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
    resume: Annotated[Path | None, tyro.conf.arg(aliases=["--run"])] = None
    """Continue the run in this folder with the config saved there."""
    step: int | None = None
    """With --resume: continue from this checkpoint, and set later ones aside; the newest when not given."""
    simulate: int | None = None
    """Run on this many simulated devices of the CPU, in each process."""
    allow_change: bool = False
    """Continue a run although a setting that changes what it learns (optimizer, data, seed, batch, precision, model) is
    another one. Steps, mesh, intervals and logging change without it."""
    force: bool = False
    """Train even where the memory of the GPUs is predicted not to suffice."""
    distributed: Distributed = field(default_factory=Distributed)
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def train(argv: Sequence[str]) -> int:
    """`mjax train`."""
    try:
        arguments, label, changes = _train_arguments(argv)
    except UsageError as error:
        _tell_the_others(argv, error)
        raise

    from mjax.parallel import processes
    from mjax.planner.fit import check_gpu_at_hand
    from mjax.training import loop
    from mjax.training.watchdog import watching

    config = arguments.settings
    processes.start(arguments.distributed)
    with watching(arguments.distributed, explain) as watchdog:
        if processes.is_first():
            for line in changes:
                print(line)
        check_gpu_at_hand(config, label, arguments.force, print if processes.is_first() else lambda line: None)
        result = loop.train(config, arguments.resume, label, watchdog, arguments.step)
    return result.exit_code


def _train_arguments(argv: Sequence[str]) -> tuple[TrainArguments, str, list[str]]:
    """What `mjax train` is asked for, with the run folder in `resume`; what to call the config; and what it takes
    from its data and changes in its run.

    Everything that can be refused without a device is refused here, before jax is imported.
    """
    chosen = _choose_config(argv)
    arguments = parse(TrainArguments, argv, "mjax train", chosen)
    folder = arguments.resume or arguments.runs / (arguments.name or _name_of(arguments.config))
    label = arguments.config if arguments.resume is None else str(folder)
    if arguments.step is not None:
        _check_step(arguments, folder)
    taken: list[str] = []
    if arguments.resume is None:
        settings, taken = resolve(arguments.settings, chosen.settings, typed_flags(argv), label, folder)
        arguments = replace(arguments, settings=settings)
    validate(arguments.settings, label)
    from mjax.training.continuing import changes_since

    changes = changes_since(folder, arguments.settings, arguments.allow_change, resumed=arguments.resume is not None)
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)
    from mjax.training.metrics import check_wandb

    check_wandb(arguments.settings.log.wandb)
    return replace(arguments, resume=folder), label, [*taken, *changes]


def _check_step(arguments: TrainArguments, folder: Path) -> None:
    """That --step names a checkpoint of the run that is resumed."""
    from mjax.training.runs import checkpoint_steps

    if arguments.resume is None:
        raise UsageError(f"--step {arguments.step} goes with --resume; add --resume {folder}")
    if arguments.step not in (steps := checkpoint_steps(folder)):
        raise UsageError(f"--step {arguments.step}: {folder} holds no such checkpoint; use {either(steps)}")


def _tell_the_others(argv: Sequence[str], error: UsageError) -> None:
    """Where this is one of several processes, say why it does not train and join the others to tell them: they would
    wait for it."""
    needed = ("--distributed.", "--simulate")  # others may be what is wrong
    words = [
        word
        for before, word in zip(["", *argv], argv, strict=False)
        if word.startswith(needed) or (before.startswith(needed) and "=" not in before)
    ]
    if not words and launch.launched_by() is None:
        return
    arguments = parse(TrainArguments, words, "mjax train", TrainArguments())
    if not arguments.distributed.several:
        return
    explain(error)  # at once: the others may come late
    if arguments.simulate is not None and "jax" not in sys.modules:
        launch.simulate_devices(arguments.simulate)
    from mjax.parallel import processes
    from mjax.training.watchdog import watching

    processes.start(arguments.distributed)
    with watching(arguments.distributed, exit_code):
        raise error


def _name_of(config: str) -> str:
    """The name of a run when none is given: that of its config, or of the run whose config.json it is."""
    file = Path(config)
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def _choose_config(argv: Sequence[str]) -> TrainArguments:
    """The defaults of the other flags: from --run's folder, or from --config's file."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?")
    parser.add_argument("--run", "--resume", dest="resume", type=Path, nargs="?")
    parser.add_argument("--name", nargs="?")
    first, _ = parser.parse_known_args(argv)
    if first.resume is not None:
        for flag in ("config", "name"):
            if (value := getattr(first, flag)) is not None:
                raise UsageError(
                    f"--{flag} {value} does nothing beside --run {first.resume}, which continues that run; leave one "
                    f"out, or type --config {first.resume}/config.json --name NEW for a new run with its settings"
                )
        from mjax.training.runs import has_checkpoint

        if not has_checkpoint(first.resume):
            raise UsageError(f"--run {first.resume} holds no checkpoint; give a run folder such as runs/gpt_demo")
        return TrainArguments(resume=first.resume, settings=read_config(first.resume / "config.json"))
    config = first.config or TrainArguments.config
    return TrainArguments(config=config, settings=load_config(config))


def prepare(argv: Sequence[str]) -> int:
    """`mjax prepare`."""
    from mjax.data.prepare import PrepareArguments
    from mjax.data.prepare import prepare as run

    run(parse(PrepareArguments, argv, "mjax prepare"))
    return 0


def dedup(argv: Sequence[str]) -> int:
    """`mjax dedup`."""
    from mjax.data.dedup import DedupArguments
    from mjax.data.dedup import dedup as run

    run(parse(DedupArguments, argv, "mjax dedup"))
    return 0


def clean(argv: Sequence[str]) -> int:
    """`mjax clean`."""
    from mjax.data.clean import CleanArguments
    from mjax.data.clean import clean as run

    run(parse(CleanArguments, argv, "mjax clean"))
    return 0


def generate(argv: Sequence[str]) -> int:
    """`mjax generate`."""
    from mjax.generation import GenerateArguments, run_generate

    return run_generate(parse(GenerateArguments, argv, "mjax generate"))


def evaluate(argv: Sequence[str]) -> int:
    """`mjax evaluate`."""
    from mjax.tasks.evaluate import EvaluateArguments
    from mjax.tasks.evaluate import evaluate as run

    return run(parse(EvaluateArguments, argv, "mjax evaluate"))


def finetune(argv: Sequence[str]) -> int:
    """`mjax finetune`."""
    from mjax.finetuning.command import FinetuneArguments
    from mjax.finetuning.command import finetune as run

    return run(parse(FinetuneArguments, argv, "mjax finetune"), explain)


def lm_eval(argv: Sequence[str]) -> int:
    """`mjax lm-eval`."""
    from mjax.tasks.harness_command import run

    return run(argv)


def plan(argv: Sequence[str]) -> int:
    """`mjax plan`."""
    launch.leave_accelerators_alone()
    from mjax.planner.plan import PlanArguments, run_plan

    chosen = _choose_config(argv)
    config = chosen.config if chosen.resume is None else str(chosen.resume)
    default = PlanArguments(config=config, run=chosen.resume, settings=chosen.settings)
    arguments = parse(PlanArguments, argv, "mjax plan", default)
    if chosen.resume is None:
        folder = TrainArguments.runs / _name_of(config)
        settings, taken = resolve(arguments.settings, chosen.settings, typed_flags(argv), config, folder)
        arguments = replace(arguments, settings=settings)
        for line in taken:
            print(line, file=sys.stderr)
    return run_plan(arguments)


def doctor(argv: Sequence[str]) -> int:
    """`mjax doctor`."""
    from mjax.doctor.command import DoctorArguments, run_doctor

    return run_doctor(parse(DoctorArguments, argv, "mjax doctor"))


def merge(argv: Sequence[str]) -> int:
    """`mjax data merge`."""
    from mjax.data.merge import MergeArguments
    from mjax.data.merge import merge as run

    run(parse(MergeArguments, argv, "mjax data merge"))
    return 0


def inspect(argv: Sequence[str]) -> int:
    """`mjax data inspect`."""
    from mjax.data.inspection import InspectArguments
    from mjax.data.inspection import inspect as run

    run(parse(InspectArguments, argv, "mjax data inspect"))
    return 0


def data(argv: Sequence[str]) -> int:
    """`mjax data`, a group of commands."""
    return _run("mjax data", DATA_COMMANDS, argv)


def from_hf(argv: Sequence[str]) -> int:
    """`mjax convert from-hf`."""
    launch.leave_accelerators_alone()
    from mjax.interop.convert import FromHfArguments
    from mjax.interop.convert import from_hf as run

    return run(parse(FromHfArguments, argv, "mjax convert from-hf"))


def to_hf(argv: Sequence[str]) -> int:
    """`mjax convert to-hf`."""
    launch.leave_accelerators_alone()
    from mjax.interop.convert import ToHfArguments
    from mjax.interop.convert import to_hf as run

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--run", "--checkpoint", nargs="?")
    named, rest = own.parse_known_args(argv)
    return run(parse(ToHfArguments, rest if named.run is None else [named.run, *rest], "mjax convert to-hf"))


def from_megatron(argv: Sequence[str]) -> int:
    """`mjax convert from-megatron`."""
    launch.leave_accelerators_alone()
    from mjax.interop.megatron.command import FromMegatronArguments
    from mjax.interop.megatron.command import from_megatron as run

    return run(parse(FromMegatronArguments, argv, "mjax convert from-megatron"))


def convert(argv: Sequence[str]) -> int:
    """`mjax convert`, a group of commands."""
    return _run("mjax convert", CONVERT_COMMANDS, argv)


def list_runs(argv: Sequence[str]) -> int:
    """`mjax runs list`, and `mjax runs` alone."""
    from mjax.runs_command import ListArguments
    from mjax.runs_command import list_runs as run

    return run(parse(ListArguments, argv, "mjax runs"))


def compare_runs(argv: Sequence[str]) -> int:
    """`mjax runs compare`."""
    from mjax.runs_command import CompareArguments
    from mjax.runs_command import compare_runs as run

    return run(parse(CompareArguments, argv, "mjax runs compare"))


def remove_runs(argv: Sequence[str]) -> int:
    """`mjax runs remove`."""
    from mjax.runs_command import RemoveArguments
    from mjax.runs_command import remove_runs as run

    return run(parse(RemoveArguments, argv, "mjax runs remove"))


def runs(argv: Sequence[str]) -> int:
    """`mjax runs`, a group of commands, the first of which needs no name."""
    listing = not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help"))
    return list_runs(argv) if listing else _run("mjax runs", RUNS_COMMANDS, argv)


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

RUNS_COMMANDS: Commands = {
    "list": (list_runs, "show a line for each run; so does `mjax runs` alone"),
    "compare": (compare_runs, "compare runs: results, settings that differ, one picture of the curves"),
    "remove": (remove_runs, "remove runs, after a question"),
}

COMMANDS: Commands = {
    "train": (train, "train a model; the same as train.py"),
    "prepare": (prepare, "turn text into an indexed dataset and its tokenizer"),
    "dedup": (dedup, "remove exact and near-duplicate documents from text"),
    "clean": (clean, "repair text, cut evaluation sets out of it, remove short and unwanted documents"),
    "data": (data, "inspect or merge datasets"),
    "runs": (runs, "list, compare or remove runs"),
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
    try:
        with flushed_output():
            if argv and argv[0] in ("-V", "--version"):
                print(f"mjax {__version__}")
                return 0
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
    if isinstance(error, BrokenPipeError) and output_is_unread():
        return UNREAD
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = UsageError(f"{error.filename} is a name longer than the file system takes; choose a shorter one")
    if isinstance(error, OSError):
        print(
            f"mjax: error: {error}; what was saved before is intact, the same command continues from it",
            file=sys.stderr,
        )
    elif isinstance(error, UsageError | RunError):
        print(f"mjax: error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return exit_code(error)


def _usage(group: str, commands: Commands) -> str:
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in commands.items())
    usage = (
        f"usage: {group} COMMAND …\n\n"
        f"{listed}\n\n"
        f"`{group} COMMAND --help` lists a command's flags with units and defaults."
    )
    return usage if commands is not COMMANDS else f"{usage}\nconfigs: {', '.join(available_configs())}"
