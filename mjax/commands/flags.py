"""Parsing flags with tyro, with a suggestion for an unknown flag.

Users of Megatron-LM, nanoGPT or Hugging Face type the names they know. Each is in `ELSEWHERE` and is answered with our
name in one sentence, as is a field without its section (--learning-rate), in the wrong one (--train.learning-rate) or
misspelt.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import tyro

from mjax.config.bounds import check_bounds, fields_of, is_unsectioned
from mjax.config.model import KIND_FLAG, kinds_with
from mjax.errors import UsageError, either, suggestion
from mjax.utils.files import without_parents

T = TypeVar("T")
WIDTH_OF_HELP = 110

NAMES_ELSEWHERE = {
    # --- model
    "model.layers": "num-layers n-layer n-layers num-hidden-layers", "model.hidden": "hidden-size n-embd d-model dim",
    "model.heads": "num-attention-heads n-head n-heads num-heads",
    "model.feed-forward": "ffn-hidden-size intermediate-size n-inner d-ff",
    "model.sequence sequence": "seq-length seq-len sequence-length max-seq-length max-seq-len",
    "model.sequence sequence tokens": "max-length",
    "model.sequence": "block-size context-length encoder-seq-length",
    "model.max-position-embeddings": "n-positions",
    "model.vocabulary": "vocab-size padded-vocab-size", "model.vocabulary-multiple": "make-vocab-size-divisible-by",
    "model.positions": "position-embedding-type", "model.hidden-dropout model.attention-dropout": "dropout",
    "model.hidden-dropout": "resid-pdrop embd-pdrop", "model.attention-dropout": "attn-pdrop",
    "model.init-std": "init-method-std initializer-range",
    "model.layernorm-epsilon": "norm-epsilon layer-norm-epsilon layer-norm-eps",
    "model.attention": "use-flash-attn attention-backend attn-implementation",
    "model.activation": "activation-function", "model.experts": "num-experts num-local-experts n-routed-experts",
    "model.experts-per-token": "moe-router-topk num-experts-per-tok",
    "model.expert-width": "moe-ffn-hidden-size moe-intermediate-size",
    "model.shared-width": "moe-shared-expert-intermediate-size", "model.router": "moe-router-score-function",
    "model.router-scale": "moe-router-topk-scaling-factor routed-scaling-factor",
    "model.balance-loss": "moe-aux-loss-coeff router-aux-loss-coef",
    "model.balance-over": "moe-router-load-balancing-type", "model.z-loss": "moe-z-loss-coeff",
    "model.balance-bias": "moe-router-bias-update-rate moe-router-enable-expert-bias",
    "model.grouped": "moe-grouped-gemm", "model.expert-interval": "moe-layer-freq decoder-sparse-step",
    "model.dense-layers": "first-k-dense-replace",
    # --- mesh
    "mesh.replica": "num-distributed-optimizer-instances hsdp dp-replicate data-parallel-replicate-degree",
    "mesh.expert": "expert-model-parallel-size expert-parallel-size ep ep-size",
    "mesh.context": "context-parallel-size cp cp-size context-parallel-degree ulysses-parallel-degree "
    "sequence-parallel-size",
    "mesh.context-attention": "cp-comm-type context-parallel-load-balance",
    "mesh.model": "tensor-model-parallel-size tensor-parallel-size tensor tp tp-size model-parallel-size",
    "mesh.pipe": "pipeline-model-parallel-size pipeline-parallel-size pipeline pp pp-size",
    "mesh.data": "data-parallel-size dp dp-size num-gpus gpus nproc-per-node", "mesh.sequence-parallel": "sp",
    "mesh.zero": "use-distributed-optimizer zero-stage use-megatron-fsdp fsdp",
    "mesh.chunks": "num-virtual-stages-per-pipeline-rank num-layers-per-virtual-pipeline-stage",
    # --- optimizer
    "optimizer.learning-rate learning-rate": "lr", "optimizer.learning-rate": "peak-lr max-lr",
    "optimizer.min-learning-rate": "min-lr",
    "optimizer.schedule": "lr-decay-style lr-scheduler lr-scheduler-type lr-schedule decay-lr",
    "optimizer.warmup-steps": "lr-warmup-iters warmup-iters lr-warmup-steps num-warmup-steps warmup",
    "optimizer.warmup-steps warmup": "lr-warmup-fraction warmup-ratio",
    "optimizer.decay-steps": "lr-decay-iters lr-decay-steps", "optimizer.wsd-decay-steps": "lr-wsd-decay-iters",
    "optimizer.wsd-decay": "lr-wsd-decay-style", "optimizer.weight-decay weight-decay": "wd",
    "optimizer.beta1": "adam-beta1", "optimizer.beta2": "adam-beta2", "optimizer.epsilon": "adam-eps adam-epsilon eps",
    "optimizer.clip-norm": "clip-grad grad-clip gradient-clip-val max-grad-norm",
    "optimizer.muon-adjust-lr": "adjust-lr-fn muon-scale-mode",
    # --- length and batch
    "train.steps": "train-iters max-iters max-steps iters num-steps train-steps iterations total-steps "
    "train-samples epochs",
    "train.tokens": "train-tokens total-tokens",
    "train.steps epochs": "num-epochs num-train-epochs max-epochs",
    "train.global-batch batch train.micro-batch": "batch-size",
    "train.global-batch batch": "global-batch-size train-batch-size",
    "train.micro-batch": "micro-batch-size device-batch-size per-device-train-batch-size "
    "per-device-eval-batch-size train-micro-batch-size-per-gpu",
    "train.global-batch train.micro-batch": "gradient-accumulation-steps", "train.batch-rampup": "rampup-batch-size",
    "train.recompute": "recompute-activations recompute-granularity gradient-checkpointing "
    "activation-checkpointing checkpoint-activations cpu-offloading-num-layers",
    "train.seed seed": "random-seed",
    "train.eval-batches": "eval-iters", "train.eval-interval": "eval-steps val-check-interval eval-every",
    # --- precision
    "precision.compute": "fp16 bf16 dtype fp8 fp8-format fp8-recipe mixed-precision",
    "precision.initial-loss-scale": "initial-loss-scale",
    # --- data
    "data.path": "data", "data.path data": "dataset data-dir data-file", "data.path train": "train-file",
    "data.train-path train": "train-data", "data.train-path": "train-data-path", "data.valid-path": "valid-data-path",
    "data.valid-path validation": "val-data validation-file",
    "data.reset-positions": "reset-position-ids", "data.reset-attention": "reset-attention-mask",
    "data.mask-eod-loss": "eod-mask-loss", "data.mask-probability": "mask-prob",
    "data.short-probability": "short-seq-prob", "data.cache": "data-cache-path", "data.mock": "mock-data",
    # --- checkpoints, logging, the run
    "checkpoint.interval": "save-interval save-steps save-every checkpoint-every checkpoint-interval",
    "checkpoint.interval log.interval": "every", "log.interval": "log-every log-interval logging-steps",
    "stride": "overlap", "checkpoint.keep-last": "save-total-limit", "log.wandb": "wandb-project wandb",
    "log.tensorboard": "tensorboard-dir", "runs output": "save output-dir out-dir save-dir",
    "name": "run-name wandb-run-name",
    "run": "load ckpt checkpoint-path model-path resume-from-checkpoint continue checkpoint resume",
    "init run": "model-name-or-path pretrained pretrained-checkpoint init-from", "init": "finetune",
    # --- text
    "tokens": "max-new-tokens num-tokens", "tokens train.tokens": "max-tokens", "temperature": "temp",
    "prompt": "text start", "num-samples": "num-return-sequences", "chat": "interactive", "system": "system-prompt",
}  # fmt: skip
"""Our name → the names in other projects. Of several names of ours, those that the command has are offered."""
ELSEWHERE = {theirs: ours for ours, names in NAMES_ELSEWHERE.items() for theirs in names.split()}

EPOCHS = "mjax counts steps; an epoch is the tokens of the data / (global batch × sequence) steps"
NAMES_BY_NOTE = {
    EPOCHS: "epochs num-epochs num-train-epochs max-epochs",
    "steps are samples / global batch": "train-samples",
    "it is global batch / (data replicas × micro-batch)": "gradient-accumulation-steps",
    "it is the number of virtual stages per device": "num-layers-per-virtual-pipeline-stage",
    "the number of steps between validations; --train.eval-batches is the length of one": "eval-steps",
    "with the value fp8": "fp8",
    "with the value fp16": "fp16",
    "with the value bf16, which is the default": "bf16",
    "with the value selective": "recompute-activations",
    "with the value full": "gradient-checkpointing checkpoint-activations activation-checkpointing",
    "with the value offload, for all layers": "cpu-offloading-num-layers",
    "with the value 1": "use-distributed-optimizer",
    "with the value 3": "fsdp use-megatron-fsdp",
    "it counts steps": "lr-warmup-fraction warmup-ratio",
    "it takes no value": "mock-data",
    "constant does not decay": "decay-lr",
    "the folder is RUNS/NAME": "save output-dir out-dir",
}
"""Notes on names elsewhere whose values mean something else in mjax."""
NOTES = {name: note for note, names in NAMES_BY_NOTE.items() for name in names.split()}
UNITS = {
    "train.global-batch": "sequences per step over all devices", "train.micro-batch": "sequences per replica at a time",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments:
    """Flags of the commands that use a trained model."""

    checkpoint: Annotated[Path, tyro.conf.arg(aliases=["--run"])]
    """Run folder, such as runs/demo: its config.json, tokenizer and newest checkpoint are used."""
    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.py")] = None
    """The file that defines a model of your own; every setting stays that of the run."""
    step: int | None = None
    """Checkpoint to use; by default the newest intact one."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="KIND:FILES")] = None
    """Tokenizer that the model was trained with, as in `mjax prepare`; by default that of the run."""


def parse(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """The dataclass `cls` from the command line; `--help` ends the process, as in tyro.

    A class with more flags than a screen has lines says which are `usual`, by topic, and gives `examples`; its --help
    shows these, and --help-all every flag. Defaults that follow from other flags are `derived`.

    Raises:
      UsageError: a flag does not exist in `cls`, or a number is out of its bounds.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        short = "--help-all" not in argv and hasattr(cls, "usual")
        print((_short_help if short else _whole_help)(cls, default, prog))
        raise SystemExit(0)
    kinds = {flag.name: flag.kind for flag in shown_flags(cls, default)}
    for name in typed_flags(argv) & {flag.name for flag in documented_flags(cls, default)} - kinds.keys():
        raise UsageError(f"--{name} has no effect in {prog}; leave it out")
    _check_names(argv, kinds, prog)
    _check_values(argv, kinds)
    parsed = tyro.cli(cls, args=argv, prog=prog, **({} if default is None else {"default": default}))
    check_bounds(parsed)
    paths = {name: value for name, value in vars(parsed).items() if isinstance(value, Path)}
    return dataclasses.replace(parsed, **{name: without_parents(path) for name, path in paths.items()})


def typed_flags(argv: Sequence[str]) -> set[str]:
    """Names of the flags in a command line, without leading dashes: 'config', 'train.steps'."""
    return {word[2:].partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}


# --- Flags that are not there, and values of flags that take none ----------------------------------------------------


def _check_names(argv: Sequence[str], kinds: dict[str, Any], prog: str) -> None:
    for word, after in itertools.pairwise([*argv, "--"]):
        if not word.startswith("--") or word == "--":
            continue
        name, _, value = word[2:].partition("=")
        name = name.replace("_", "-")
        ours = name if name in kinds else _positive(name)
        if ours not in kinds:
            value = value or ("" if after.startswith("--") else after)
            raise UsageError(f"{prog} has no --{name}{_instead(name, value, set(kinds), prog)}")
        value = value or (after if after.lower() in ("true", "false") else "")
        if kinds[ours] is bool and value:
            raise UsageError(f"--{name} {value}: it takes no value; type --{ours} or --{_negative(ours)}")


def _check_values(argv: Sequence[str], kinds: dict[str, Any]) -> None:
    """Refuse values of another type or number, and lists given twice; what is left to tyro it prints in a box."""
    lists: set[str] = set()
    for index, word in enumerate(argv):
        name, equals, value = word[2:].partition("=")
        kind = kinds.get(name.replace("_", "-")) if word.startswith("--") else None
        if kind is None or kind is bool:
            continue
        after = itertools.takewhile(lambda next_word: not next_word.startswith("--"), argv[index + 1 :])
        values = [value] if equals else list(after)
        if name in lists:
            raise UsageError(
                f"--{name} is given twice, and only the last would count; give all after one: --{name} A B"
            )
        if "." in name and any(... in get_args(option) for option in _options(kind)):  # others may add up: --prompt
            lists.add(name)
        if not _can_be(values, kind):
            typed = " ".join([f"--{name}", *values[: len(_parts(kind)) or 1]])
            raise UsageError(f"{typed}: it takes {_takes(kind)}")


def _parts(kind: Any) -> tuple[Any, ...]:
    """The kinds of the values of a flag with a fixed number of several."""
    kind = next((option for option in _options(kind) if option is not type(None)), kind)
    return get_args(kind) if get_origin(kind) is tuple and ... not in get_args(kind) else ()


def _options(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a kind, without their annotations."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    is_union = get_origin(kind) in (Union, types.UnionType)
    return tuple(one for option in get_args(kind) for one in _options(option)) if is_union else (kind,)


def _can_be(values: Sequence[str], kind: Any) -> bool:
    """True if the first of `values` can be read as `kind`; later ones may belong to the command."""
    for option in _options(kind):
        if get_origin(option) is tuple:
            parts = get_args(option)
            if ... in parts or (len(values) >= len(parts) and all(map(_can_be, ([value] for value in values), parts))):
                return True
        elif values and _is_one(values[0], option):
            return True
    return False


def _is_one(value: str, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in map(str, get_args(kind))
    if kind is type(None):
        return value == "None"
    try:
        return kind not in (int, float) or kind(value) is not None
    except ValueError:
        return False


def _takes(kind: Any) -> str:
    """'a whole number', 'one of bf16, fp16'."""
    if several := _parts(kind):
        return f"{len(several)} {_takes(several[0]).removeprefix('a ')}s"
    words = {int: "a whole number", float: "a number"}
    options = [option for option in _options(kind) if option is not type(None)]
    return " or ".join(
        f"one of {', '.join(map(str, get_args(option)))}"
        if get_origin(option) is Literal
        else words.get(option, "a text")
        for option in options
    )


def _positive(name: str) -> str:
    """'data.no-mock' → 'data.mock'."""
    section, dot, knob = name.rpartition(".")
    return section + dot + knob.removeprefix("no-")


def _negative(name: str) -> str:
    """'data.mock' → 'data.no-mock'."""
    section, dot, knob = name.rpartition(".")
    return f"{section}{dot}no-{knob}"


def _instead(name: str, value: str, known: set[str], prog: str) -> str:
    """The flag to type instead of an unknown one."""
    section, _, last = name.lower().rpartition(".")
    theirs = ELSEWHERE.get(last, "").split()
    if section == "model" and (kinds := list(kinds_with(last.replace("-", "_")))):
        return f" for this model; it is for {KIND_FLAG} {either(kinds)}: leave it out"
    ours = [flag for flag in theirs if flag in known]
    if not ours and theirs and (kinds := list(kinds_with(theirs[0].removeprefix("model.").replace("-", "_")))):
        return f" for this model; it is --{theirs[0]}, for {KIND_FLAG} {either(kinds)}: leave it out"
    ours = ours or sorted(flag for flag in known if flag.rpartition(".")[2] == last)
    ours = [flag for flag in ours if flag.startswith(f"{section}.")] or ours
    if ours:
        note = NOTES.get(last)
        typed_value = f" {value}" if value and note is None else ""
        units = {flag: f" ({UNITS[flag]})" for flag in ours if len(ours) > 1 and flag in UNITS}
        choices = [f"--{flag}{typed_value}{units.get(flag, '')}" for flag in ours]
        return f"; type {either(choices)}" + (f" ({note})" if note else "")
    close = suggestion(name, sorted(known)).replace("'", "--", 1).replace("'", "")
    return f"{close or f'; `{prog} --help` lists its flags'}"


# --- Help -------------------------------------------------------------------------------------------------------------


def _short_help(cls: type, default: object, prog: str) -> str:
    """The usual flags of a command by topic, each in a sentence with its default, and examples."""
    known = {flag.name: flag for flag in shown_flags(cls, cls() if default is None else default)}
    lines = [f"usage: {prog} [flags]", "", inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]]
    for topic, names in cls.usual.items():
        lines += ["", f"{topic}:"]
        for flag in map(known.get, names):
            sentence = flag.text.partition(". ")[0].rstrip(".")
            lines += _entry(f"--{flag.name} {flag.form}".rstrip(), sentence + _shown_default(cls, flag))
    lines += ["", "examples:", *(f"  {example}" for example in cls.examples)]
    return "\n".join([*lines, "", f"{len(known)} flags in all: {prog} --help-all"])


def _whole_help(cls: type, default: object, prog: str) -> str:
    """Every flag of a command: what it needs first, then the others by section, each with its default."""
    sections: dict[str, list[str]] = {"": [], "required": []}
    positional = {}
    for name, _, _, marks in fields_of(cls):
        if tyro.conf.Positional in marks:
            positional[name] = _form(marks) or name.upper()
            sections[""] += _entry(positional[name], _field_texts(cls)[name])
    by_field = lambda flag: (flag.owner, flag.field, flag.name.count("."))  # noqa: E731
    for _, group in itertools.groupby(shown_flags(cls, default), by_field):  # a flag and its aliases
        flag, *aliases = group
        typed = ", ".join(f"--{one.name}" for one in (*reversed(aliases), flag)) + f" {flag.form}".rstrip()
        if flag.kind is bool and flag.default is True:
            typed += f", --{_negative(flag.name)}"
        title = "required" if flag.default is dataclasses.MISSING else flag.name.rpartition(".")[0] or "flags"
        shown = "" if flag.kind is bool else _shown_default(cls, flag)
        sections.setdefault(title, []).extend(_entry(typed, flag.text + shown))
    lines = [f"usage: {' '.join([prog, *positional.values()])} [flags]", ""]
    lines += textwrap.wrap(" ".join((cls.__doc__ or "").split()), WIDTH_OF_HELP)
    for title, entries in sections.items():
        if entries:
            lines += ["", *([f"{title}:"] if title else []), *entries]
    return "\n".join(lines)


def _shown_default(cls: type, flag: Flag) -> str:
    """' [24]'; in words if it follows from other flags, which `derived` of `cls` says for flags and whole sections."""
    derived = getattr(cls, "derived", {})
    value = derived.get(flag.name) or derived.get(flag.name.partition(".")[0], flag.default)
    if value in (None, "", (), dataclasses.MISSING) or value is False:
        return ""
    return f" [{' '.join(map(str, value)) if isinstance(value, tuple) else value}]"


def _entry(typed: str, text: str) -> list[str]:
    """A flag and its text, in two columns; a long flag has a line of its own."""
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
      form: its value in --help: 'KIND:FILES', 'N'.
    """

    name: str
    kind: Any
    default: Any
    owner: type
    field: str
    form: str

    @property
    def text(self) -> str:
        """The docstring of the field, on one line."""
        return _field_texts(self.owner).get(self.field, "")


def documented_flags(cls: type, default: object, prefix: str = "") -> Iterator[Flag]:
    """Every field of `cls` that is a flag, once for each of its names.

    A field may hold a subclass of its type, as the config's model does: its flags are those of `default`.
    """
    for field, (name, flag, kind, marks) in zip(dataclasses.fields(cls), fields_of(cls), strict=True):
        value = getattr(default, name, None) if default is not None else field.default
        if dataclasses.is_dataclass(kind):
            if value is dataclasses.MISSING:
                value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            inner = kind if value is None else type(value)
            yield from documented_flags(inner, value, f"{prefix}{flag}." if flag else prefix)
        elif tyro.conf.Positional not in marks and tyro.conf.Fixed not in marks:
            aliases = (alias.lstrip("-") for mark in marks for alias in getattr(mark, "aliases", None) or ())
            for typed in (flag if is_unsectioned(marks) else prefix + flag, *aliases):
                yield Flag(typed, kind, value, cls, name, _form(marks) or _placeholder(kind))


def shown_flags(cls: type, default: object) -> Iterator[Flag]:
    """The flags of a command: of `documented_flags` those that `cls.shows`, by default all."""
    shows = getattr(cls, "shows", lambda name: True)
    return (flag for flag in documented_flags(cls, default) if shows(flag.name))


def _form(marks: Sequence) -> str:
    """The form of a value, if its field gives one: 'KIND:FILES'."""
    return next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), "")


def _placeholder(kind: Any) -> str:
    options = [option for option in _options(kind) if option is not type(None)]
    if kind is bool:
        return ""
    if get_origin(options[0]) is Literal:
        return "|".join(map(str, get_args(options[0])))
    return {int: "N", float: "X"}.get(options[0], "PATH" if options[0] is Path else "TEXT")


@functools.cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
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
        known = _classes_of(base.__module__).get(base.__qualname__)
        known = known or ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        for assignment, text in itertools.pairwise(known.body):
            match assignment, text:
                case ast.AnnAssign(), ast.Expr(ast.Constant(str(words))):
                    texts[assignment.target.id] = " ".join(words.split())
    return texts
