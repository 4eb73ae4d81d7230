"""`mjax train`, the same as train.py: turns flags into a checked config, then starts the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import tyro

from mjax.checkpoint.folders import check_run_folder, checkpoint_steps
from mjax.checkpoint.mirror import localize_arguments, run_to_train
from mjax.cluster import launch
from mjax.cluster.launch import Distributed, set_deterministic_flags
from mjax.commands.flags import first_values, flag_names, parse
from mjax.config import Config, has_user_model, load_config, load_user_model, read_config
from mjax.config.checks import resolve, resolve_steps, validate
from mjax.config.marks import RUN_SYNONYMS, Synonyms
from mjax.config.model import KIND_FLAG, convert_kind
from mjax.config.run import describe_missing_run
from mjax.errors import RunError, UsageError, either, exit_code, explain, split_lines
from mjax.profiling import parse_steps
from mjax.run.callbacks import Callback
from mjax.utils.files import check_run_name, resolve_parents, write_whole
from mjax.utils.stores import with_addresses

if TYPE_CHECKING:
    from mjax.generation.generate import Generator
    from mjax.generation.text import TextContinuation
    from mjax.run.continuing import Origin
    from mjax.run.loop import Run
    from mjax.run.metrics import Record


INIT_SYNONYMS = Synonyms("pretrained pretrained-checkpoint init-from finetune model-name-or-path")


@dataclass(frozen=True)
class TrainArguments:
    """Train a model. Any config field is a flag, such as --mesh.data 8 or --train.steps 1000."""

    config: str = "gpt_demo"
    """Config name in configs/, or a .py file. With --run: the file that defines the run's model, if you wrote it."""
    name: Annotated[str | None, Synonyms("run-name wandb-run-name wandb-exp-name")] = None
    """Run name: the run folder is RUNS/NAME (by default the config's name). An existing run is continued."""
    runs: Annotated[Path, Synonyms("save~ output-dir~ out-dir~ save-dir~ dump-folder~")] = Path("runs")
    """Folder that contains the run folders."""
    run: Annotated[Path | None, RUN_SYNONYMS] = None
    """Continue the run in this folder with its saved config."""
    init: Annotated[Path | None, INIT_SYNONYMS] = None
    """Start a new run from the weights alone of the run in this folder, trained or converted. Optimizer, step and data
    order start from scratch. Later starts continue the new run."""
    step: int | None = None
    """With --run: continue from this checkpoint and set later ones aside. With --init: load the weights of this
    checkpoint. By default the newest."""
    simulate: int | None = None
    """Number of CPU devices to simulate, in each process."""
    allow_change: bool = False
    """Continue a run even if a setting that changes what it learns is different (optimizer, data, seed, batch,
    precision, model). Steps, mesh, intervals and logging may change without it."""
    force: bool = False
    """Train even if the run is predicted not to fit into GPU memory."""
    deterministic: bool = False
    """Only bit-reproducible GPU kernels: a repeated or resumed run has the same losses. Slower. CPUs need no flag."""
    profile: str | None = None
    """START:END, as a Python slice: profile these steps. Prints where their time went; a trace is in RUN/profile."""
    usual: ClassVar = {
        "the run": ("config", "name", "run", "init", "step"),
        "data and length": ("data.path", "train.steps", "train.tokens", "train.global-batch", "train.micro-batch"),
        "devices": ("mesh.data", "mesh.model", "mesh.pipe", "mesh.zero", "simulate"),
        "learning": ("optimizer.learning-rate", "optimizer.warmup-steps", "precision.compute", "train.recompute"),
        "checkpoints and validation": ("checkpoint.interval", "train.eval-interval"),
    }
    examples: ClassVar = (
        "python train.py --config gpt_demo --data.path data/corpus --name first --train.steps 500",
        "python train.py --run runs/first --train.steps 1000            # and longer",
        "python train.py --config gpt_demo --data.mock --simulate 4 --mesh.data 2 --mesh.model 2",
    )

    distributed: Distributed = field(default_factory=Distributed)
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


ChooseDefaults = Callable[[Sequence[str]], TrainArguments]


def train(argv: Sequence[str], choose: ChooseDefaults | None = None, prog: str = "python train.py") -> int:
    """Train and return the exit code. `choose` sets the default flags, instead of `choose_config`."""
    try:
        argv = localize_arguments(argv, trains=True)
        arguments, label, origin, changes = _train_arguments(argv, choose or choose_config, prog)
    except (UsageError, RunError) as error:
        _report_to_processes(argv, error)
        raise

    from mjax.cluster import processes
    from mjax.cluster.watchdog import make_watchdog
    from mjax.planner.command import check_local_gpus
    from mjax.profiling.recorder import Recorder
    from mjax.run import loop
    from mjax.run.loop import Options

    config = arguments.settings
    done = max(checkpoint_steps(arguments.run), default=0) if arguments.step is None else 0
    processes.start(arguments.distributed)
    with make_watchdog(arguments.distributed, explain) as watchdog:
        if processes.is_first():
            if config.train.steps < done:
                changes = [f"--train.steps {config.train.steps} is below the {done} steps already done; nothing to do"]
            for line in changes:
                print(with_addresses(line))
        if config.train.steps < done:
            return 0
        check_local_gpus(config, label, arguments.force, print if processes.is_first() else lambda line: None)
        step = None if arguments.init else arguments.step
        file = config.log.sample_prompts
        callbacks = [_SampleWriter([] if file is None else read_prompts(file))]
        if config.log.scaling is not None:
            callbacks.append(_LossForecast(Path(config.log.scaling), config))
        if arguments.profile is not None:
            callbacks.append(Recorder(parse_steps(arguments.profile, config.train.steps)))
        options = Options(name=label, step=step, origin=origin, callbacks=callbacks, watchdog=watchdog)
        result = loop.train(config, arguments.run, options)
    return result.exit_code


class _SampleWriter(Callback):
    """Continue prompts with the model of a run: `log.sample_prompts` at each validation, and one prompt at the end."""

    def __init__(self, prompts: Sequence[str]):
        """`prompts`: the lines of `log.sample_prompts`."""
        self.prompts = prompts
        self._generator: Generator | None = None

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """After a validation print the continuations, and add them to samples.jsonl."""
        folder = run.data.tokenizer
        if metrics.val_loss is None or not self.prompts or folder is None or not run.config.model.causal:
            return
        from mjax.data.tokenizers import tokenizer_from_folder
        from mjax.generation.chat import Chat

        tokenizer, texts = tokenizer_from_folder(folder), self.prompts
        encode, decode, ends = tokenizer.encode_prompt, tokenizer.decode, tokenizer.eod
        if run.config.data.conversations:
            chat = Chat(folder)
            texts = [chat.render([{"role": "user", "content": prompt}]) for prompt in self.prompts]
            encode, decode, ends = chat.encode, chat.decode, chat.stops
        samples = self._continue(run, texts, [encode(text) for text in texts], decode, ends)
        for prompt, sample in zip(self.prompts, samples, strict=True):
            run.print_line(f"step {step}: {prompt} → {sample.continuation.strip()}")
        if run.log:
            run.log.write_samples(step, self.prompts, [sample.continuation for sample in samples])

    def on_end(self, run: Run) -> None:
        """Print how the model continues `log.prompt`, or the beginning of a validation sample; nothing if
        `log.sample_tokens` is 0."""
        log, display, data = run.config.log, run.display, run.data
        if data.tokenizer is None or log.sample_tokens == 0 or not run.config.model.causal:
            return
        from rich.text import Text

        from mjax.data.tokenizers import stop_token_ids, tokenizer_from_folder
        from mjax.generation.chat import Chat

        tokenizer, is_chat = tokenizer_from_folder(data.tokenizer), run.config.data.conversations
        if log.prompt is None:  # as ids: their text may spell tokens that no text encodes to
            batch = (data.validation or data.training).batch_at(0)
            end = int(batch["loss_mask"][0].argmax()) + 1 if is_chat else 8  # before an answer
            ids = batch["tokens"][0, :end].tolist()
            prompt = Chat(data.tokenizer).decode(ids, special=True) if is_chat else tokenizer.decode(ids)
        else:
            prompt, ids = log.prompt, tokenizer.encode_prompt(log.prompt)
        display.print_line("")
        ends = stop_token_ids(data.tokenizer, tokenizer.eod)
        (sample,) = self._continue(run, [prompt], [ids], tokenizer.decode, ends)
        text = Text(prompt, style="dim") + Text(sample.continuation)
        display.console.print(text, soft_wrap=True, highlight=False)
        display.print_line("")

    def _continue(self, run: Run, prompts, encoded, decode, ends) -> list[TextContinuation]:
        from mjax.generation.generate import Generator, Sampling
        from mjax.generation.text import continue_ids
        from mjax.utils.progress import status

        sampling = Sampling(tokens=max(run.config.log.sample_tokens, 1), seed=run.config.train.seed)
        with status("writing samples", run.display.console):
            self._generator = self._generator or Generator(run.config, run.mesh)
            return continue_ids(self._generator, run.state.model, decode, prompts, encoded, sampling, ends)


class _LossForecast(Callback):
    """Draws the forecast of `log.scaling` into loss.png, and reports validation losses outside of its interval."""

    def __init__(self, file: Path, config: Config):
        """`file`: the scaling.json; a copy of the forecast for `config` is written into the run folder."""
        from mjax.models.build import count_active
        from mjax.planner.scaling import read_scaling
        from mjax.planner.time import run_tokens

        self.law, steps = read_scaling(file, config), config.train.steps
        size = count_active(config.model), run_tokens(config)
        self.end = self.law.predict(*size)
        self.curve = {share * steps: forecast for share, forecast in self.law.curve(*size).items()} or {steps: self.end}

    def on_start(self, run: Run) -> None:
        """Write forecast.json, before the first step."""
        if run.log:
            run.log.forecast = self.curve
            values = {"source": self.law.source, "steps": {f"{step:.12g}": one for step, one in self.curve.items()}}
            write_whole(run.folder / "forecast.json", json.dumps(values, indent=1).replace("NaN", "null") + "\n")
        run.print_line(f"forecast of the last validation loss: {self.end}, by {self.law.source}")

    def on_step(self, run: Run, step: int, metrics: Record) -> None:
        """Compare a validation loss with the interval at its step."""
        if metrics.val_loss is None or step < min(self.curve):
            return
        import numpy as np

        _, low, high = (np.interp(step, [*self.curve], part) for part in zip(*self.curve.values(), strict=True))
        if not (np.isnan(low) or low <= metrics.val_loss <= high):  # no interval is known
            side = "below" if metrics.val_loss < low else "above"
            line = f"validation loss {metrics.val_loss:.4f} is {side} its forecast, {low:.4f} to {high:.4f}"
            run.print_line(f"step {step}: {line} ({run.config.log.scaling})")


def read_prompts(file: str) -> list[str]:
    """The prompts of `--log.sample-prompts`, one a line.

    Raises:
      UsageError: the file is missing, is not text, or has no line.
    """
    try:
        lines = [line for line in split_lines(Path(file).read_text(encoding="utf-8")) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--log.sample-prompts {file} cannot be read ({reason}); give a text file") from None
    if not lines:
        raise UsageError(f"--log.sample-prompts {file} has no prompt; write one a line")
    return lines


def _train_arguments(
    argv: Sequence[str], choose: ChooseDefaults, prog: str
) -> tuple[TrainArguments, str, Origin | None, list[str]]:
    """The arguments of `mjax train`, with the run folder in `run`; the label of the config; the origin of a new run;
    and lines about settings taken from the data and changed in the run.

    Every check that needs no device is made here, before jax is imported.
    """
    chosen = choose(argv)
    arguments = parse(type(chosen), argv, prog, chosen)
    name = default_name(arguments.config) if arguments.name is None else arguments.name
    folder, label = arguments.run, str(arguments.run)
    if folder is None:
        check_run_name(name)
        folder, label = arguments.runs / name, arguments.config
    check_run_folder(folder)
    run_to_train(folder)
    if arguments.step is not None and arguments.init is None:
        if arguments.run is None:
            raise UsageError(f"--step {arguments.step} goes with --run or --init; add --run {folder}")
        if arguments.step not in (steps := checkpoint_steps(folder)):
            raise UsageError(f"--step {arguments.step}: {folder} has no such checkpoint; use {either(steps)}")
    from mjax.run.continuing import after_steps_taken, changes_since, choose_origin, with_positions

    step = arguments.step if arguments.run is not None else None
    settings, typed = after_steps_taken(arguments.settings, folder, step), flag_names(argv)
    if arguments.run is None:
        weights = folder if arguments.init is None or checkpoint_steps(folder) else arguments.init
        settings, taken = resolve(settings, chosen.settings, typed, label, weights)
    else:
        settings, taken = resolve_steps(settings, typed)
    settings = with_positions(settings, folder, arguments.init)
    validate(settings, label)
    if settings.log.sample_prompts is not None:
        read_prompts(settings.log.sample_prompts)
    if settings.log.scaling is not None:
        from mjax.planner.scaling import read_scaling

        read_scaling(Path(settings.log.scaling), settings)
    if arguments.profile is not None:
        parse_steps(arguments.profile, settings.train.steps)
    origin = choose_origin(folder, settings, arguments.init, arguments.step)
    if settings.model.lora_rank and origin is None and not checkpoint_steps(folder) and not settings.data.mock:
        example = "`mjax convert from-hf MODEL RUN`"
        raise UsageError(f"--lora.rank {settings.model.lora_rank} adapts a model: add --init RUN, such as of {example}")
    changes = changes_since(folder, settings, arguments.allow_change, arguments.run is not None, step)
    if arguments.simulate is not None:
        launch.simulate_devices(arguments.simulate)
    if arguments.deterministic:
        set_deterministic_flags()
    from mjax.run.metrics import check_trackers

    check_trackers(settings.log)
    return replace(arguments, run=folder, settings=settings), label, origin, [*taken, *changes]


def _report_to_processes(argv: Sequence[str], error: UsageError | RunError) -> None:
    """Report why this process does not train and, if it is one of several, join the others to tell them; otherwise they
    would wait for it."""
    typed = first_values(argv).items()  # other flags may be wrong
    words = [f"--{name}={value}" for name, value in typed if value and name.startswith(("distributed.", "simulate"))]
    if not words and launch.find_launcher() is None:
        return
    arguments = parse(TrainArguments, words, "python train.py", TrainArguments())
    if not arguments.distributed.is_multiprocess:
        return
    explain(error)  # at once: the others may start late
    from mjax.cluster import processes
    from mjax.cluster.watchdog import make_watchdog

    processes.start(arguments.distributed, arguments.simulate)
    with make_watchdog(arguments.distributed, exit_code):
        raise error


def default_name(config: str) -> str:
    """The default name of a run: its config's name, or the name of the run that its config.json comes from."""
    file = Path(config)
    return file.resolve().parent.name if file.name == "config.json" else file.stem


def choose_config(argv: Sequence[str]) -> TrainArguments:
    """The defaults of the other flags: from --run's folder, or from --config's file."""
    typed = first_values(argv)
    name, init, architecture = (typed.get(flag) for flag in ("name", "init", KIND_FLAG.removeprefix("--")))
    run, config = typed.get("run"), typed.get("config")
    if run is None:
        settings = load_config(config or TrainArguments.config)
        if architecture is not None and architecture != settings.model.kind:
            settings = replace(settings, model=convert_kind(settings.model, architecture))
        return TrainArguments(config=config or TrainArguments.config, settings=settings)
    folder = resolve_parents(Path(run))
    if not (folder / "config.json").exists():
        raise UsageError(describe_missing_run(folder))
    if not checkpoint_steps(folder):
        raise UsageError(f"{folder} has no checkpoint to continue from; start it again: --config {folder}/config.json")
    is_model_file = config is not None and has_user_model(folder)
    useless = {"--init": init, "--name": name, "--config": None if is_model_file else config}
    for flag, value in useless.items():
        if value is not None:
            new = f"for a new run type --config {config if is_model_file else folder / 'config.json'} --name NEW"
            raise UsageError(f"{flag} {value} has no effect with --run {folder}, which continues that run; {new}")
    load_user_model(config, folder, lambda line: None)  # `changes_since` has the note
    return TrainArguments(run=folder, settings=read_config(folder / "config.json"))
