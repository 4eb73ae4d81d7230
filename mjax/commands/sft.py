"""`mjax sft`: train a model further on conversations, so that it answers.

It is `train.py` with other defaults, which it prints, and takes its flags.
"""

import contextlib
import hashlib
import json
import math
import re
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from mjax import __version__
from mjax.cluster import launch
from mjax.commands.arguments import PrepareArguments
from mjax.commands.flags import first_values, flag_names, parse
from mjax.commands.train import TrainArguments, train
from mjax.config import Config, DataConfig, OptimizerConfig, TrainConfig, load_user_model, read_config
from mjax.config.bounds import Bounds
from mjax.config.marks import Synonyms
from mjax.config.run import differing_fields, to_flag
from mjax.data.corpus.documents import TABULAR
from mjax.errors import UsageError
from mjax.utils.files import cache_home, make_folder

DEFAULTS = Config(
    data=DataConfig(conversations=True),
    optimizer=OptimizerConfig(learning_rate=2e-5, min_learning_rate=2e-6, weight_decay=0.0),
    train=TrainConfig(steps=1, global_batch=16, micro_batch=1, eval_interval=0),
)
"""Of a run that trains all weights; its steps and validations follow from the data."""
LORA_RATES = {"learning_rate": 2e-4, "min_learning_rate": 2e-5}
"""Of a run that trains adapters: ten times those of all weights."""
EVALUATIONS = 5  # validations of a run


@dataclass(frozen=True)
class SftArguments(TrainArguments):
    """Fine-tune a model on conversations; all flags of `train.py` work."""

    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE|PREFIX"), Synonyms("dataset data-file")] = ()
    """Conversations: a .jsonl or .parquet file, or prefixes of `mjax prepare --chat`. Short for --data.path."""
    name: str | None = None
    """Run name: the run folder is RUNS/NAME. An existing run is continued."""
    epochs: Annotated[float, Bounds(gt=0), Synonyms("epochs train-epochs")] = 3.0
    """Passes over the conversations. --train.steps sets an exact number of steps instead."""
    chat_template: Annotated[str | None, tyro.conf.arg(metavar="FILE|plain")] = None
    """Chat template for a file of conversations (by default the model's, or else plain)."""
    train_on: Literal["all", "last"] = "all"
    """For a file of conversations: train on all turns of the assistant, or the last."""
    usual: ClassVar = {
        "the run": ("data", "init", "epochs", "name", "chat-template", "train-on"),
        "length": ("train.steps", "train.global-batch", "train.micro-batch", "data.pack"),
        "adapters": ("lora.rank", "lora.alpha", "lora.targets"),
        **{topic: TrainArguments.usual[topic] for topic in ("devices", "learning", "checkpoints and validation")},
    }
    derived: ClassVar = {
        "of --init": "config model precision train.loss-chunks train.recompute",
        "INIT-sft": "name",
        "2e-05, of adapters 0.0002": "optimizer.learning-rate",
        "2e-06, of adapters 2e-05": "optimizer.min-learning-rate",
        "1, or as --init was trained": "train.micro-batch",
        "by --epochs and the data": "train.steps data.train-samples train.eval-batches train.eval-interval",
        "3% of the steps": "optimizer.warmup-steps",
    }
    examples: ClassVar = (
        "mjax sft --init runs/q --data chat.jsonl --name q-chat",
        "mjax sft --init runs/q --data chat.jsonl --name q-lora --lora.rank 16",
        "mjax generate --run runs/q-chat --chat --prompt 'What is Paris?'",
    )


def sft(argv: Sequence[str]) -> int:
    """`mjax sft`; returns the exit code."""
    argv = ["--data.path" + word[6:] if word == "--data" or word.startswith("--data=") else word for word in argv]
    if {"-h", "--help", "--help-all"} & set(argv):
        parse(SftArguments, argv, "mjax sft", SftArguments(settings=DEFAULTS))
    if "run" in flag_names(argv):
        return train(argv)
    first = first_values(argv)
    if first.get("init") is None:
        raise UsageError(f"mjax sft needs --init RUN; type {SftArguments.examples[0]}")
    init = Path(first["init"])
    load_user_model(first.get("config"), init, print)
    saved = read_config(init / "config.json")
    if not saved.model.causal:
        raise UsageError(f"{init} holds {saved.model.title}, which writes no answers; see mjax finetune --help")
    defaults = _defaults(saved, trained=any((init / "checkpoints").glob("[1-9]*")))  # not only converted
    parsed = parse(SftArguments, argv, "mjax sft", SftArguments(settings=defaults))
    data = parsed.settings.data
    if not data.path and not data.train_path:
        raise UsageError("there are no conversations; add --data FILE.jsonl, or the prefix of `mjax prepare --chat`")
    paths = dict.fromkeys((*data.path, *data.train_path, *data.valid_path))
    for file in (path for path in paths if path.endswith(TABULAR)):
        prefix = _prepare_file(parsed, file, parsed.settings.model.sequence + 1 if "model.sequence" in first else None)
        argv = [prefix if word == file else word.replace(f"={file}", f"={prefix}") for word in argv]
    chosen = _chosen(parse(SftArguments, argv, "mjax sft", parsed), defaults, first)
    _print_defaults(chosen.settings, first)
    return train(argv, lambda _: chosen, "mjax sft")


def _print_defaults(settings: Config, typed: Container[str]) -> None:
    """Print, as flags, the settings of training that are neither typed nor the defaults of `train.py`."""
    changed = differing_fields(settings, Config())
    names = [name for section in ("train.", "optimizer.") for name in changed if name.startswith(section)]
    shown = [name for name in names if name.replace("_", "-") not in typed]
    print(f"sft     {' '.join(to_flag(name, changed[name][0]) for name in shown)}")


def _prepare_file(parsed: SftArguments, file: str, max_length: int | None) -> str:
    """The prefix of a file of conversations in the folder of caches, prepared unless that was done before.

    Args:
      max_length: of conversations, in tokens; None: one more than the model's sequence.
    """
    from mjax.commands.prepare import prepare
    from mjax.data.indexed import index_file
    from mjax.generation.chat import TEMPLATE

    if (home := cache_home()) is None:
        raise UsageError(f"--data {file} is prepared in a folder of caches; set XDG_CACHE_HOME to one")
    template = parsed.chat_template
    if template is None and not (parsed.init / "tokenizer" / TEMPLATE).is_file():
        template = "plain"
        print(f"{parsed.init} has no chat template and learns the plain one, User: … Assistant: …")
    arguments = PrepareArguments(
        inputs=(Path(file),),
        output="",
        tokenizer=f"run:{parsed.init}",
        chat=True,
        chat_template=template,
        train_on=parsed.train_on,
        max_length=max_length,
    )
    name = re.sub(r"[^\w.-].*", "", Path(file).name)[:64]  # without the query of an address
    prefix = home.absolute() / "conversations" / f"{name}-{cache_key(arguments, parsed.init)}"
    if index_file(prefix).is_file():
        print(f"data    {prefix}, prepared before")
        return str(prefix)
    if parsed.distributed.is_multiprocess or launch.find_launcher() is not None:
        command = f"mjax prepare {shlex.quote(file)} --chat --tokenizer run:{parsed.init} --output data/chat"
        raise UsageError(f"--data {file} is prepared by one process; type {command}, then --data data/chat")
    make_folder(prefix.parent)
    prepare(replace(arguments, output=str(prefix)), following=False)
    return str(prefix)


def cache_key(arguments: PrepareArguments, init: Path) -> str:
    """A name for all that prepared conversations depend on: flags and contents of the files, never their times."""
    from mjax.utils.remote import locate

    files = [locate(*arguments.inputs), *sorted(path for path in (init / "tokenizer").rglob("*") if path.is_file())]
    files += [] if arguments.chat_template in (None, "plain") else [Path(arguments.chat_template)]
    parts = [__version__, str(replace(arguments, inputs=())), read_config(init / "config.json").model.sequence]
    for path in files:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:  # `prepare` says which is missing
            parts += [path.name, hashlib.file_digest(stream, "sha256").hexdigest()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _defaults(saved: Config, trained: bool) -> Config:
    """The settings of the model's run, for a short run on conversations."""
    train_config = replace(
        DEFAULTS.train,
        micro_batch=math.gcd(saved.train.micro_batch, DEFAULTS.train.global_batch) if trained else 1,
        recompute=saved.train.recompute,
        loss_chunks=saved.train.loss_chunks,
    )
    return replace(DEFAULTS, model=saved.model, precision=saved.precision, train=train_config)


def _chosen(parsed: SftArguments, defaults: Config, typed: Container[str]) -> SftArguments:
    """The defaults of flags that are not typed, which follow from the data and from those that are."""
    from mjax.data.sources import count_sequences

    sequences, batch = count_sequences(parsed.settings), parsed.settings.train.global_batch
    samples = max(1, math.ceil(parsed.epochs * sequences["training"]))
    steps, validation = math.ceil(samples / batch), math.ceil(sequences["validation"] / batch)
    if "train.steps" in typed or "data.train-samples" in typed:
        samples = parsed.settings.data.train_samples
        steps = parsed.settings.train.steps if "train.steps" in typed else steps
    rates = LORA_RATES if parsed.settings.model.lora_rank else {}
    settings = replace(
        defaults,
        data=replace(defaults.data, train_samples=samples),
        optimizer=replace(defaults.optimizer, warmup_steps=min(math.ceil(0.03 * steps), steps - 1), **rates),
        train=replace(
            defaults.train,
            steps=steps,
            eval_interval=math.ceil(steps / EVALUATIONS) if validation else 0,
            eval_batches=max(validation, 1),
        ),
    )
    name = parsed.name or f"{parsed.init.resolve().name}-sft"
    return replace(parsed, config=f"{parsed.init}/config.json", name=name, settings=settings)
