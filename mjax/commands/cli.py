"""The command line: `mjax COMMAND …`, and `train.py`, which is `mjax train`.

Exit codes: 0 success · 2 a usage or config error, one sentence, nothing was started · 3 the run is unhealthy, look at
it before restarting · 75 stopped after saving, run the same command again · 141 the output is no longer read (`mjax
plan | head`) · 1 any other error.
"""

import contextlib
import gc
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_type_hints

from mjax import __version__
from mjax.cluster import launch
from mjax.commands.flags import parse, rename_old_flags
from mjax.config.run import config_folders
from mjax.errors import RunError, UsageError, explain, suggestion
from mjax.utils.figures import format_rows
from mjax.utils.stores import with_addresses


class Command(NamedTuple):
    """A command, or a group of them.

    Attributes:
      run: MODULE:FUNCTION in mjax/commands, imported when the command is run. The function takes a dataclass, whose
        fields are the flags, or `argv`; it returns the exit code, or anything else for success.
      about: one line.
      on_cpu: whether JAX must see the CPU only.
      early: whether `run` imports more than its flags need, which are in `arguments.py`: --help does not wait for it.
    """

    run: "str | Commands"
    about: str
    on_cpu: bool = False
    early: bool = False


Commands = dict[str, Command]

DATA_COMMANDS: Commands = {
    "inspect": Command("data:inspect", "show a dataset: documents, tokens, lengths, a sample", early=True),
    "merge": Command("data:merge", "merge several datasets into one", early=True),
}
CONVERT_COMMANDS: Commands = {
    "from-hf": Command("convert:from_hf", "convert a Hugging Face model into a run folder", True, True),
    "from-megatron": Command("convert:from_megatron", "convert a Megatron-LM checkpoint into a run folder", True, True),
    "to-hf": Command("convert:to_hf", "export a checkpoint as a folder for transformers", True, True),
    "to-megatron": Command("convert:to_megatron", "export a checkpoint for Megatron-LM", True, True),
}
RUNS_COMMANDS: Commands = {
    "list": Command("runs:list_runs", "list runs, one line each; same as `mjax runs` alone"),
    "compare": Command("runs:compare_runs", "compare runs: results, different settings, a figure of the loss curves"),
    "remove": Command("runs:remove_runs", "remove runs, after asking"),
}
COMMANDS: Commands = {
    "train": Command("train:train", "train a model"),
    "sft": Command("sft:sft", "fine-tune a model on conversations, so that it answers"),
    "prepare": Command("prepare:prepare", "tokenize text into an indexed dataset", early=True),
    "dedup": Command("dedup:dedup", "remove exact and near-duplicate documents from text", early=True),
    "clean": Command("clean:clean", "fix Unicode, remove evaluation sets, short and unwanted documents", early=True),
    "data": Command(DATA_COMMANDS, "inspect or merge datasets"),
    "runs": Command(RUNS_COMMANDS, "list, compare or remove runs"),
    "evaluate": Command("evaluate:evaluate", "evaluate a model: WikiText103, LAMBADA, perplexity, a task", early=True),
    "lm-eval": Command("lm_eval:lm_eval", "run tasks of EleutherAI's lm-evaluation-harness on a model"),
    "finetune": Command("finetune:finetune", "fine-tune a BERT for a task: MNLI, QQP, RACE, SQuAD"),
    "convert": Command(CONVERT_COMMANDS, "convert checkpoints from and to Hugging Face and Megatron-LM"),
    "generate": Command("generate:generate", "generate text with a trained model", early=True),
    "plan": Command("plan:plan", "predict memory, communication and time of a run, without a device", on_cpu=True),
    "scale": Command("scale:scale", "train small runs, and forecast the loss of a large one", True, True),
    "check-scaling": Command("check_scaling:check_scaling", "check that a learning rate fits other sizes", True, True),
    "configs": Command("cli:list_configs", "list the configs of models and demos, one line each"),
    "doctor": Command("doctor:doctor", "check this installation and machine, and suggest fixes"),
}


@dataclass(frozen=True)
class ConfigsArguments:
    """List the configs of published models and of demos; --config NAME selects one in the other commands."""


def list_configs(arguments: ConfigsArguments) -> None:
    """`mjax configs`: print the first line of each file."""
    files = {file.stem: file for folder in reversed(config_folders()) for file in folder.glob("[!_]*.py")}
    lines = {name: files[name].read_text(errors="replace").partition("\n")[0].strip('"') for name in sorted(files)}
    print("\n".join(format_rows(lines)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors are printed as one sentence."""
    gc.set_threshold(50_000)  # imports and tracing make many objects and few cycles
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # none, or not a real one
            stream.reconfigure(errors="replace")  # of a terminal that cannot show … or ×
    try:
        result = _parse_command(list(sys.argv[1:] if argv is None else argv))()
        if sys.stdout is not None:  # None if a shell has closed it: mjax plan >&-
            sys.stdout.flush()  # here a closed pipe is an error of the command, and while Python exits it is not
        return result if isinstance(result, int) else 0
    except (UsageError, RunError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, UsageError | RunError):
            error.args = (with_addresses(str(error)),)
        return explain(error)


def _parse_command(argv: Sequence[str]) -> Callable[[], Any]:
    """The call of the command that `argv` names; `int`, which returns 0, if the commands were listed instead."""
    if argv and argv[0] in ("-V", "--version"):
        return partial(print, f"mjax {__version__}")
    if (chosen := _find("mjax", COMMANDS, argv)) is None:
        return int
    command, prog, rest = chosen
    rest = rename_old_flags(rest, prog)
    if command.on_cpu:
        launch.hide_accelerators()
    if command.early and {"-h", "--help", "--help-all"} & set(rest):
        words = prog.rpartition(" ")[2].split("-")
        parse(_import_object(f"arguments:{''.join(map(str.title, words))}Arguments"), rest, prog)
    if command.run != "train:train":  # `train` fetches the run, and reports an error of it to the other processes
        from mjax.checkpoint.mirror import localize_arguments

        also = prog in ("mjax runs compare", "mjax runs remove", "mjax convert to-hf", "mjax convert to-megatron")
        rest = localize_arguments(rest, also, trains=prog == "mjax sft")
    function = _import_object(command.run)
    parameter = next(iter(inspect.signature(function).parameters))
    return partial(function, rest if parameter == "argv" else parse(get_type_hints(function)[parameter], rest, prog))


def _import_object(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(f"mjax.commands.{module}"), name)


def _find(group: str, commands: Commands, argv: Sequence[str]) -> tuple[Command, str, list[str]] | None:
    """The command that `argv` names, its full name and its arguments; None if the commands are listed instead."""
    if commands is RUNS_COMMANDS and (not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help"))):
        argv = ["list", *argv]
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage(group, commands))
        return None
    name, *rest = argv
    if name.startswith("-"):
        first = "python train.py" if commands is COMMANDS else f"{group} {next(iter(commands))}"
        raise UsageError(f"{name} follows a command; type `{first} {shlex.join(argv)}`")
    if name not in commands:
        same_way = [known for known in commands if known.partition("-")[0] == name.partition("-")[0]] or commands
        near = suggestion(name, same_way, f"`{group} --help` lists them", f"`{group} {{}}`")
        raise UsageError(f"{group} has no command {name!r}; {near}")
    command, prog = commands[name], f"{group} {name}"
    return _find(prog, command.run, rest) if isinstance(command.run, dict) else (command, prog, rest)


def _usage(group: str, commands: Commands) -> str:
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:<{width}}  {command.about}" for name, command in commands.items())
    about = f"`{group} COMMAND --help` lists a command's flags with units and defaults."
    return f"usage: {group} COMMAND …\n\n{listed}\n\n{about}"
