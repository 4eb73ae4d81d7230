"""Parsing flags with tyro, with a suggestion for an unknown flag.

Users of Megatron-LM, nanoGPT or Hugging Face type the names they know. Each stands in the mark `Synonyms` of our field
and is answered with our name in one sentence, as is a field without its section (--learning-rate), in the wrong one
(--train.learning-rate) or misspelt.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import tyro

from mjax.config.bounds import check_bounds, describe_choice, is_unsectioned, section_fields
from mjax.config.marks import FILE_ONLY, PLANNED, RUN_SYNONYMS, Mark, Synonyms
from mjax.config.model import KIND_FLAG, REGISTRY
from mjax.config.plain_values import describe, fits, get_type_hints
from mjax.config.run import OLD_NAMES, RENAMED, RENAMED_VALUES, available_configs
from mjax.errors import UsageError, either, suggestion
from mjax.utils.files import resolve_parents

T = TypeVar("T")
WIDTH_OF_HELP = 110
NO_FLAG = {
    "tokenizer-type tokenizer-model tokenizer-name tokenizer-path vocab-file merge-file": (
        "the data have a tokenizer, that of `mjax prepare --tokenizer`"
    ),
    "nproc-per-node nnodes node-rank master-addr master-port": (
        "type --distributed.coordinator HOST:PORT, --distributed.processes and --distributed.process, or use a launcher"
    ),
    "normalization position-embedding-type group-query-attention": "use --model.kind llama",
    "overlap-grad-reduce overlap-param-gather tp-comm-overlap compile compile.enable torch-compile transformer-impl "
    "use-mcore-models distributed-backend dataloader-num-workers num-workers do-train": "remove it",
}
"""Flags of other programs without a field here, and the replacement."""
OLD_FLAGS = OLD_NAMES["flags"]  # flags of mjax 0.2.0 by command, and their names since. They are accepted until 0.4.0
OLD_FIELDS = {
    f"{section}.{old}".replace("_", "-"): f"{section}.{new}".replace("_", "-")
    for section, names in RENAMED.items()
    for old, new in names.items()
}
_SHORT_NAMES = {"pp": "pipe", "dp": "data", "tp": "model", "cp": "context", "ep": "expert"}
SHORT_AXES = {f"mesh.{short}": f"mesh.{name}" for short, name in _SHORT_NAMES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Flags of the commands that use a trained model."""

    run: Annotated[Path, RUN_SYNONYMS]
    """Run folder, such as runs/demo: its config.json, tokenizer and newest checkpoint are used."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.py")] = None
    """The file that defines the run's model, if you wrote it. The run's settings do not change."""
    step: int | None = None
    """Checkpoint to use (by default the newest intact one)."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND:FILES")] = None
    """Tokenizer that the model was trained with, as in `mjax prepare` (by default the run's)."""


def parse(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """The dataclass `cls` from the command line; `--help` ends the process, as in tyro.

    A class with more flags than a screen has lines lists the `usual` ones by topic; its --help shows these, and
    --help-all every flag. A class with required flags has `examples`. Defaults that follow from other flags are
    `derived`.

    Raises:
      UsageError: a flag does not exist in `cls` or is missing, or a number is out of its bounds.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        short = "--help-all" not in argv and hasattr(cls, "usual")
        print((_short_help if short else _whole_help)(cls, default, prog), flush=True)
        raise SystemExit(0)
    fields = {flag.name: flag for flag in list_fields(cls, default)}
    _check(argv, fields, prog)
    default = tyro.MISSING_NONPROP if default is None else default
    try:
        parsed, rest = tyro.cli(cls, args=argv, default=default, return_unknown_args=True, console_outputs=False)
    except SystemExit:  # after a box with all flags
        typed, example = flag_names(argv), getattr(cls, "examples", [f"{prog} --help"])[0]
        required = [flag for flag in fields.values() if flag.default is dataclasses.MISSING and flag.name not in typed]
        needed = either(map(_format_required, required), "and") if required else "its arguments in another form"
        raise UsageError(f"{prog} needs {needed}; type {example}") from None
    if rest:
        raise UsageError(f"{rest[0]} belongs to no flag of {prog}; {_flag_for(rest[0], fields, prog)}")
    check_bounds(parsed)
    paths = {name: value for name, value in vars(parsed).items() if isinstance(value, Path)}
    return dataclasses.replace(parsed, **{name: resolve_parents(path) for name, path in paths.items()})


def parse_known(cls: type[T], argv: Sequence[str], prog: str) -> tuple[T, list[str]]:
    """The dataclass `cls` from a command line, and the words that are for another program, whose flags are unknown.

    Raises:
      UsageError: a flag of `cls` has a value of another type.
    """
    if argv[:1] in (["-h"], ["--help"]):
        parse(cls, argv, prog)
    flags = {flag.name: flag for flag in list_flags(cls, None)}
    for name, words, _ in _words(argv):
        if name in flags:
            _check_value(flags[name], words)
    return tyro.cli(cls, args=argv, prog=prog, return_unknown_args=True, add_help=False)


def rename_old_flags(argv: Sequence[str], prog: str) -> list[str]:
    """Return `argv` with today's names of flags, and full names of axes; a line on stderr reports each old one."""
    renamed, words = SHORT_AXES | OLD_FIELDS | OLD_FLAGS.get(prog.rpartition(" ")[2], {}), []
    for word in argv:
        flag, equals, value = word.partition("=")
        typed = flag.removeprefix("--").replace("_", "-") if flag.startswith("--") else ""
        if name := renamed.get(_positive(typed)):
            name = name if typed == _positive(typed) else _negative(name)
            if typed not in SHORT_AXES:
                print(f"note: {flag} is now --{name}; mjax 0.4 will not accept {flag}", file=sys.stderr)
            flag = f"--{name}"
        words.append(f"{flag}{equals}{value}")
    return words


def flag_names(argv: Sequence[str]) -> set[str]:
    """Names of the flags in a command line, without leading dashes: 'config', 'train.steps'."""
    return {name for name, _, _ in _words(argv)}


def first_values(argv: Sequence[str]) -> dict[str, str | None]:
    """The first value of each flag in a command line, before it is parsed; None for a flag without one."""
    return {name: words[0] if words else None for name, words, _ in _words(argv)}


# --- Flags that are not there, and values of another type -------------------------------------------------------------


def _words(argv: Sequence[str]) -> list[tuple[str, list[str], bool]]:
    """Each flag of a command line, the words after it, and whether the first of them is joined to it by `=`."""
    flags: list[tuple[str, list[str], bool]] = []
    for word in argv:
        if word.startswith("--") and word != "--":
            name, equals, value = word[2:].partition("=")
            flags.append((name.replace("_", "-"), [value] if equals else [], bool(equals)))
        elif flags:
            flags[-1][1].append(word)
    return flags


def _check(argv: Sequence[str], fields: dict[str, Flag], prog: str) -> None:
    """Refuse unknown flags, values of another type or number, and lists given twice."""
    flags, lists = {name: flag for name, flag in fields.items() if not flag.hidden}, set()
    for name, words, joined in _words(argv):
        flag, switch = flags.get(name), flags.get(_positive(name))
        if flag is None and (switch is None or switch.kind is not bool):
            raise UsageError(_explain_unknown(name, words, fields, prog))
        if flag is None or flag.kind is bool:
            if words and (joined or words[0].lower() in ("true", "false")):
                switches = f"--{_positive(name)} or --{_negative(_positive(name))}"
                raise UsageError(f"--{name} {words[0]}: it takes no value; type {switches}")
            continue
        if new := RENAMED_VALUES.get(name.replace("-", "_"), {}).get("".join(words[:1])):
            raise UsageError(f"--{name} {words[0]} has a new name; type --{name} {new}")
        if name in lists:
            raise UsageError(f"--{name} is given twice; give all values after one: --{name} A B")
        if "." in name and any(... in get_args(option) for option in _options(flag.kind)):  # others may add up
            lists.add(name)
        _check_value(flag, words)


def _check_value(flag: Flag, words: Sequence[str]) -> None:
    """Reject values with another type or number than this flag has."""
    needs_word = tyro.conf.UseAppendAction in flag.marks
    if (words or not needs_word) and any(_accepts(option, words) for option in _options(flag.kind)):
        return
    option, typed = _options(flag.kind)[0], f"--{flag.name}"
    if get_origin(option) is Literal and words:
        raise UsageError(describe_choice(typed, words[0], get_args(option), flag.marks))
    example = f"{typed} {_example(flag)}"
    if get_origin(option) is tuple and not needs_word:
        raise UsageError(f"{' '.join([typed, *words[: len(get_args(option))]])} needs {flag.form}, such as {example}")
    if not words:
        raise UsageError(f"{typed} needs a value, such as {example}")
    raise UsageError(f"{typed} {words[0]} is not {describe(option)}; write {example}")


def _example(flag: Flag) -> str:
    """A value of a flag: its default, an example from its docstring, or its form."""
    if flag.default not in (None, "", (), dataclasses.MISSING):
        return str(flag.default)
    known = re.search(r"such as ([\w./-]+( \d+)*)", flag.help_text)
    return known[1].rstrip(".") if known else flag.form


def _options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a kind."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _accepts(kind: Any, words: Sequence[str]) -> bool:
    """True if the first of `words` can be read as `kind`; later ones may belong to the command."""
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return ... in parts or fits([_plain(word) for word in words[: len(parts)]], kind)
    if get_origin(kind) is Literal:
        return words[:1] in [[str(choice)] for choice in parts]
    return bool(words) and (kind in (str, Path) or fits(_plain(words[0]), kind))


def _plain(word: str) -> Any:
    """A word as the number or None that it spells."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(word)
    return None if word == "None" else word


def _format_required(flag: Flag) -> str:
    """`--run RUN`, or the form of a positional argument."""
    return f"--{flag.name} {_form(flag.marks)}".rstrip() if not flag.hidden else _form(flag.marks)


def _flag_for(word: str, fields: dict[str, Flag], prog: str) -> str:
    """The flag to type before a word that belongs to none."""
    matches = {"config": word in available_configs(), "run": (Path(word) / "config.json").is_file()}
    name = next((name for name, fits in matches.items() if fits and name in fields), None)
    return f"type --{name} {word}" if name else f"`{prog} --help` lists its flags"


def _positive(name: str) -> str:
    """'data.no-mock' → 'data.mock'."""
    section, dot, knob = name.rpartition(".")
    return section + dot + knob.removeprefix("no-")


def _negative(name: str) -> str:
    """'data.mock' → 'data.no-mock'."""
    section, dot, knob = name.rpartition(".")
    return f"{section}{dot}no-{knob}"


def _explain_unknown(name: str, words: Sequence[str], fields: dict[str, Flag], prog: str) -> str:
    """The sentence about an unknown flag, with the one to type instead."""
    name, unknown = name.lower(), f"{prog} has no --{name}"
    if (field := fields.get(_positive(name))) and field.hidden:  # not on the command line
        return f"{unknown}; {field.hidden}"
    flags, last = [flag for flag in fields.values() if not flag.hidden], name.rpartition(".")[2]
    if matches := _match_flags(name, words, flags):
        return f"{unknown}; type " + either([_format_flag(flag, value, len(matches) > 1) for flag, value in matches])
    for flag in fields.values():
        if last == flag.name.rpartition(".")[2] or _translate_value(flag.marks, name, "") is not None:
            return f"{unknown}; {flag.hidden}"
    for names, advice in NO_FLAG.items():
        if {name, last} & set(names.split()):
            return f"{unknown}; {advice}"
    for field, kinds in _model_fields(name).items():
        models = f"an option of {either(kinds)} models"
        return f"--model.{field} is {models}; remove it, or choose one: {KIND_FLAG} {kinds[0]}"
    near = suggestion(name, sorted(flag.name for flag in flags), f"`{prog} --help` lists its flags", "--{}")
    return f"{unknown}; {near}"


def _match_flags(name: str, words: Sequence[str], flags: Sequence[Flag]) -> list[tuple[Flag, str]]:
    """Flags that have a name elsewhere, or without its section, each with its value; of its section if there are."""
    section, _, last = name.rpartition(".")
    typed = [(flag, " ".join(words if get_origin(_options(flag.kind)[0]) is tuple else words[:1])) for flag in flags]
    translated = ((flag, _translate_value(flag.marks, name, value)) for flag, value in typed)
    matches = [match for match in translated if match[1] is not None]
    matches = matches or [pair for pair in typed if pair[0].name.rpartition(".")[2] == last]
    return [match for match in matches if match[0].name.startswith(f"{section}.")] or matches


def _translate_value(marks: Sequence, name: str, value: str) -> str | None:
    """The value to type for a field in place of `name`, which it has elsewhere; None: it has no such name."""
    names = name, name.rpartition(".")[2]
    values = (mark.value(part, value) for mark in marks if isinstance(mark, Synonyms) for part in names)
    return next((value for value in values if value is not None), None)


def _format_flag(flag: Flag, value: str, is_choice: bool) -> str:
    """A flag and its value; its meaning, where one of several has to be chosen or the value would be another."""
    meaning = re.split(r"[.;]( |$)" if is_choice else r"\.( |$)", flag.help_text)[0]
    needed = is_choice or not (value or flag.kind is bool)
    meaning = f" ({meaning[0].lower()}{meaning[1:]})" if needed else ""
    return f"--{flag.name}{f' {value}' if value and flag.kind is not bool else ''}{meaning}"


def _model_fields(name: str) -> dict[str, list[str]]:
    """The kinds of registered models with a field of this name, here or elsewhere, by the field's flag."""
    kinds: dict[str, list[str]] = {}
    for kind, cls in REGISTRY.items():
        for _, flag, _, marks in section_fields(cls):
            if flag == name.rpartition(".")[2] or _translate_value(marks, name, "") is not None:
                kinds.setdefault(flag, []).append(kind)
    return kinds


# --- Help -------------------------------------------------------------------------------------------------------------


def _short_help(cls: type, default: object, prog: str) -> str:
    """The usual flags of a command by topic, each in a sentence with its default, and examples."""
    known = {flag.name: flag for flag in list_flags(cls, cls() if default is None else default)}
    lines = [f"usage: {prog} [flags]", "", inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]]
    for topic, names in cls.usual.items():
        lines += ["", f"{topic}:"]
        for flag in map(known.get, names):
            sentence = flag.help_text.partition(". ")[0].rstrip(".")
            lines += _entry(f"--{flag.name} {flag.form}".rstrip(), sentence + _format_default(cls, flag))
    return "\n".join([*lines, *_examples(cls), "", f"{len(known)} flags in all: {prog} --help-all"])


def _examples(cls: type) -> list[str]:
    examples = [f"  {example}" for example in getattr(cls, "examples", ())]
    return ["", "examples:", *examples] if examples else []


def _whole_help(cls: type, default: object, prog: str) -> str:
    """Every flag of a command: required ones first, then the others by section, each with its default."""
    sections: dict[str, list[str]] = {"": [], "required": []}
    positional = {}
    for name, _, _, marks in section_fields(cls):
        if tyro.conf.Positional in marks:
            positional[name] = _form(marks) or name.upper()
            sections[""] += _entry(positional[name], _field_texts(cls)[name])
    for flag in list_flags(cls, default):
        typed = f"--{flag.name} {flag.form}".rstrip()
        if flag.kind is bool and flag.default is True:
            typed += f", --{_negative(flag.name)}"
        title = "required" if flag.default is dataclasses.MISSING else flag.name.rpartition(".")[0] or "flags"
        shown = "" if flag.kind is bool else _format_default(cls, flag)
        sections.setdefault(title, []).extend(_entry(typed, flag.help_text + shown))
    lines = [f"usage: {' '.join([prog, *positional.values()])} [flags]", ""]
    lines += textwrap.wrap(" ".join((cls.__doc__ or "").split()), WIDTH_OF_HELP)
    for title, entries in sections.items():
        if entries:
            lines += ["", *([f"{title}:"] if title else []), *entries]
    return "\n".join([*lines, *_examples(cls)])


def _format_default(cls: type, flag: Flag) -> str:
    """' [24]'; in words if it follows from other flags: `derived` of `cls` has the flags and whole sections."""
    derived, value = getattr(cls, "derived", {}), flag.default
    for words, names in derived.items():
        value = words if {flag.name, flag.name.partition(".")[0]} & set(names.split()) else value
    if value in (None, "", (), dataclasses.MISSING) or value is False:
        return ""
    return f" [{' '.join(map(str, value)) if isinstance(value, tuple) else value}]"


def _entry(typed: str, text: str) -> list[str]:
    """A flag and its text, in two columns; a long flag has a separate line."""
    before = [f"  {typed}"] if len(typed) > 33 else []
    typed = "" if before else f"  {typed}"
    column = " " * 37
    return before + textwrap.wrap(text, WIDTH_OF_HELP, initial_indent=f"{typed:<36} ", subsequent_indent=column)


class Flag(NamedTuple):
    """A flag of a command.

    Attributes:
      name: without leading dashes: 'mesh.data'.
      kind: type of its value.
      default: `dataclasses.MISSING` if it is required.
      owner: the dataclass that has it as a `field`.
      marks: annotations of the field.
      hidden: advice for a field that is not a flag.
    """

    name: str
    kind: Any
    default: Any
    owner: type
    field: str
    marks: tuple[Any, ...]
    hidden: str

    @property
    def help_text(self) -> str:
        """The docstring of the field, on one line."""
        return _field_texts(self.owner).get(self.field, "")

    @property
    def form(self) -> str:
        """Its value in --help: 'KIND:FILES', 'N'."""
        return _form(self.marks) or _placeholder(self.kind)


def list_flags(cls: type, default: object, prefix: str = "") -> Iterator[Flag]:
    """Every field of `cls` that is a flag.

    A field may hold a subclass of its type, as the config's model does: its flags are the fields of `default`.
    """
    return (flag for flag in list_fields(cls, default, prefix) if not flag.hidden)


def list_fields(
    cls: type, default: object, prefix: str = "", hidden: str = "", without: Mark | None = None
) -> Iterator[Flag]:
    """The flags of `cls`, and its other fields (`hidden`): by default those with the mark `cls.without`."""
    without = without or getattr(cls, "without", None)
    kinds = get_type_hints(cls)
    for field, (name, flag, _, marks) in zip(dataclasses.fields(cls), section_fields(cls), strict=True):
        kind = kinds[name]
        value = getattr(default, name, None) if default is not None else field.default
        reason = f"no result depends on {prefix}{name}: remove it" if without in marks else hidden
        if dataclasses.is_dataclass(kind):
            if value is dataclasses.MISSING:
                value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            inner = kind if value is None else type(value)
            yield from list_fields(inner, value, f"{prefix}{flag}." if flag else prefix, reason, without)
        else:
            reason = f"set {prefix}{name} in a config file" if FILE_ONLY in marks else reason * (PLANNED not in marks)
            if tyro.conf.Positional in marks:
                reason = f"give {_form(marks)} by its place, without a flag"
            yield Flag(flag if is_unsectioned(marks) else prefix + flag, kind, value, cls, name, marks, reason)


def _form(marks: Sequence) -> str:
    """The form of a value, if its field gives one: 'KIND:FILES'."""
    return next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), "")


def _placeholder(kind: Any) -> str:
    option = _options(kind)[0]
    if get_origin(option) is Literal:
        return "|".join(map(str, get_args(option)))
    return {bool: "", int: "N", float: "X", Path: "PATH"}.get(option, "TEXT")


@functools.cache
def _model_classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name, from one parse of it: `inspect` parses it for each class."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # of a notebook
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@functools.cache
def _field_texts(cls: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each on one line."""
    texts = {}
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        known = _model_classes(base.__module__).get(base.__qualname__)
        known = known or ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        for assignment, text in itertools.pairwise(known.body):
            match assignment, text:
                case ast.AnnAssign(), ast.Expr(ast.Constant(str(words))):
                    texts[assignment.target.id] = " ".join(words.split())
    return texts
