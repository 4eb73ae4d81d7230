"""`mjax scale`: a ladder of small runs of a config, and the scaling law that they follow.

    OUTPUT/ladder.json       the plan: the same command continues it
    OUTPUT/N-D/              runs, each as by `python train.py`: `mjax runs --runs OUTPUT` lists them
    OUTPUT/scaling.json      the law, for `mjax plan --scaling` and `train.py --log.scaling`
    OUTPUT/scaling.png       its picture

All sizes have the config's head size and ratios of widths and depth, but at least four of its layers. Warm-up and final
decay have the config's share of the steps. The runs have compute C, C/4, C/16, …, each with the same tokens per
parameter, which is best for a forecast there. One more run has four times the tokens of the second largest, because on
one line the effects of parameters and tokens are the same:

    parameters    N/8   N/4   N/2   N     N/2
    tokens        D/8   D/4   D/2   D     2 D
"""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from mjax.cluster.launch import SET_BY_MJAX
from mjax.commands.arguments import ScaleArguments
from mjax.commands.flags import flag_names, parse
from mjax.commands.runs import TAIL
from mjax.commands.train import choose_config, default_name
from mjax.config import Config, differing_fields, load_config, read_config, read_settings, to_flag
from mjax.config.batch_size import BatchSizes, format_tokens
from mjax.config.checks import resolve, validate
from mjax.config.marks import FREE, field_marks
from mjax.config.model import ModelConfig
from mjax.config.plain_values import read
from mjax.config.run import from_dict, to_dict
from mjax.data.corpus.tasks import run_command
from mjax.data.indexed import digest_folder
from mjax.errors import RunError, UsageError
from mjax.pictures.figures import PALETTE, add_heading, save
from mjax.planner.scaling import COVERAGE, Point, ScalingLaw, describe_settings, fit_law, make_point
from mjax.run.continuing import DIGESTS
from mjax.run.metrics import read_end, read_metrics
from mjax.step.learning_rate import decay_end
from mjax.utils.figures import format_table
from mjax.utils.files import make_folder, write_whole

PLAN, SCALING = "ladder.json", "scaling.json"
PREEMPTED = 75  # exit code of a run that was stopped after a save
RATIO, MAX_WIDTH_FACTOR, MIN_LAYERS, EVALUATIONS, FURTHER = 2, 4, 4, 10, 100
MISFIT = 0.03  # standard deviation of log L from the law, of runs that do not follow it
PROBE_STEPS, SECONDS_PER_RUN = 8, 20.0
"""Steps of the run that measures the speed; and seconds in which a run starts, compiles and ends."""


class Plan(TypedDict):
    """Contents of ladder.json: the runs, and the flags and the config that they were planned with."""

    flags: dict[str, float]
    config: dict[str, Any]
    runs: list[Point]


class Size(NamedTuple):
    """A model in the config's proportions, and its parameters."""

    model: ModelConfig
    parameters: int


def scale(argv: Sequence[str]) -> int:
    """`mjax scale`; returns the exit code.

    Raises:
      UsageError: the runs cannot be planned or fitted.
      RunError: a run has failed.
    """
    chosen = choose_config(argv)
    default = ScaleArguments(config=chosen.config, settings=chosen.settings)
    arguments = parse(ScaleArguments, argv, "mjax scale", default)
    folder = arguments.output or Path("scaling") / default_name(arguments.config)
    folders = arguments.runs
    if folders and arguments.output is None:
        raise UsageError("runs that exist are fitted into another folder; add --output, such as scaling/mine")
    make_folder(folder)
    if not folders:
        config, taken = resolve(arguments.settings, chosen.settings, flag_names(argv), arguments.config, folder)
        print("".join(f"{line}\n" for line in taken), end="", file=sys.stderr)
        validate(config, arguments.config)
        plan = _plan(arguments, config, folder)
        for run in plan:
            if code := _train(run_config(config, run), arguments, folder, run["name"]):
                return code
        folders = [folder / run["name"] for run in plan]
        if arguments.sbatch and not all(map(_is_done, folders)):
            print(f"logs: {folder}/*.out; when the jobs are done, repeat the command: it fits their losses")
            return 0
    check_comparable(folders)
    runs = [read_run(run) for run in folders]
    law = replace(fit_law(runs), settings=describe_settings(read_settings(folders[0] / "config.json")))
    law.write(folder / SCALING)
    _draw(law, folder / "scaling.png")
    print((folder / SCALING).read_text() if arguments.json else describe(law, folder))
    return 0


# --- The ladder -------------------------------------------------------------------------------------------------------


def _plan(arguments: ScaleArguments, config: Config, folder: Path) -> list[Point]:
    """The runs in the folder's plan, or new ones that fit into the time, which are written there.

    Raises:
      UsageError: the folder has runs of other settings, or as `choose_runs`.
    """
    file = folder / PLAN
    flags = {name: getattr(arguments, name) for name in ("minutes", "ladder", "tokens_per_parameter")}
    if file.exists():
        plan = read(Plan, file, "remove it to plan again")
        changed = differing_fields(from_dict(plan["config"], str(file)), config)
        changed = {name: pair for name, pair in changed.items() if FREE not in field_marks(config, name)}
        pairs = {name: (plan["flags"].get(name), now) for name, now in flags.items()}
        changed |= {name: (then, now) for name, (then, now) in pairs.items() if then != now}
        for name, (then, now) in changed.items():
            raise UsageError(f"{folder} was planned with {name} {then}, now {now}; choose another --output")
        return plan["runs"]
    if config.optimizer.parametrization == "standard":
        advice = "the best learning rate differs between sizes; in completep it does not"
        print(f"note: optimizer.parametrization is standard, in which {advice}", file=sys.stderr)
    sizes = list_sizes(config)
    runs = choose_runs(arguments, config, sizes)
    for _ in range(2):  # small models reach fewer FLOP/s
        runs = choose_runs(arguments, config, sizes, _measure_speed(arguments, config, runs[-2], folder))
    write_whole(file, json.dumps(Plan(flags=flags, config=to_dict(config), runs=runs), indent=1) + "\n")
    return runs


def list_sizes(config: Config) -> list[Size]:
    """The model in other widths and depths, smallest first, with its head size and ratios."""
    from mjax.models.build import count_active

    model, sizes = config.model, []
    step = max(model.heads // model.groups, 1)
    for heads in range(2 * step, MAX_WIDTH_FACTOR * model.heads + 1, step):
        layers = max(round(model.layers * heads / model.heads), min(model.layers, MIN_LAYERS))
        resized = model.resize(model.hidden * heads // model.heads, layers)
        with contextlib.suppress(UsageError):  # a width that something does not divide
            validate(replace(config, model=resized))
            sizes.append(Size(resized, count_active(resized)))
    return sizes


def choose_runs(
    arguments: ScaleArguments, config: Config, sizes: Sequence[Size], speed: float = math.inf
) -> list[Point]:
    """The largest ladder that fits into the time, or for infinite speed the smallest one; its last two runs are the
    largest.

    Args:
      speed: FLOP/s, of 6 N D.

    Raises:
      UsageError: the config has too few sizes, or nothing fits.
    """
    ladders = [_ladder(arguments, config, sizes[: end + 1]) for end in range(len(sizes))]
    ladders = [ladder for ladder in ladders if ladder]
    if not ladders:
        few = f"{arguments.config} has {len(sizes)} sizes with its head size, too few for --ladder {arguments.ladder}"
        raise UsageError(f"{few}; use a config with more heads, or a smaller --ladder")
    if math.isinf(speed):
        return ladders[0]
    minutes = [sum(run["flops"] / speed + SECONDS_PER_RUN for run in ladder) / 60 for ladder in ladders]
    fitting = [ladder for ladder, needed in zip(ladders, minutes, strict=True) if needed <= arguments.minutes]
    if not fitting:
        short = f"--minutes {arguments.minutes:g} is too short for {arguments.ladder} runs of {arguments.config}"
        fix = f"the smallest take about {math.ceil(minutes[0])}; give more, or fewer --tokens-per-parameter"
        raise UsageError(f"{short}: {fix}")
    return fitting[-1]


def _ladder(arguments: ScaleArguments, config: Config, sizes: Sequence[Size]) -> list[Point]:
    """The runs whose largest model is the last of `sizes`; empty if there are too few smaller ones."""
    rest, chosen = list(sizes), []
    for number in range(arguments.ladder - 1):
        wanted = math.log(sizes[-1].parameters / RATIO**number)
        if not rest:
            return []
        chosen.append(min(rest, key=lambda size: abs(math.log(size.parameters) - wanted)))
        rest = [size for size in rest if size.parameters < chosen[-1].parameters]
    lengths = [(size, arguments.tokens_per_parameter) for size in chosen[::-1]]
    return [make_run(config, *run) for run in (*lengths, (chosen[1], RATIO**2 * arguments.tokens_per_parameter))]


def make_run(config: Config, size: Size, tokens_per_parameter: float) -> Point:
    """A run of about so many tokens per parameter, in whole steps."""
    sample, sizes = config.model.sequences * config.model.sequence, BatchSizes.from_config(config)
    tokens = sizes.samples_before(sizes.steps_for(round(tokens_per_parameter * size.parameters / sample))) * sample
    return make_point(f"{format_tokens(size.parameters)}-{format_tokens(tokens)}", size.model, size.parameters, tokens)


def run_config(config: Config, run: Point) -> Config:
    """The config of a run; warm-up and final decay have the same share of its steps as in `config`."""
    optimizer, sizes = config.optimizer, BatchSizes.from_config(config)
    steps = sizes.steps_for(run["tokens"] // (config.model.sequences * config.model.sequence))
    share, interval = steps / decay_end(config), max(steps // EVALUATIONS, 1)
    decay = optimizer.wsd_decay_steps and max(round(optimizer.wsd_decay_steps * share), 1)
    warmup = min(round(optimizer.warmup_steps * share), steps - 1)
    return replace(
        config,
        model=config.model.resize(run["hidden"], run["layers"]),
        optimizer=replace(optimizer, warmup_steps=warmup, wsd_decay_steps=decay, decay_steps=None),
        train=replace(config.train, steps=steps, eval_interval=interval),
        checkpoint=replace(config.checkpoint, interval=interval),
        log=replace(config.log, sample_tokens=0),
    )


# --- The runs ---------------------------------------------------------------------------------------------------------


def _train(config: Config, arguments: ScaleArguments, runs: Path, name: str, wait: bool = False) -> int:
    """Train a run, or submit it to Slurm, unless it is done; returns 0, or 75 if it was stopped after a save.

    Raises:
      RunError: it failed.
    """
    if _is_done(runs / name):
        return 0
    changes = differing_fields(load_config(arguments.config), config).items()
    command = [sys.executable, "-m", "mjax", "train", "--config", arguments.config, "--name", name, "--runs", str(runs)]
    command += [] if arguments.simulate is None else ["--simulate", str(arguments.simulate)]
    command += [word for field, (_, new) in changes for word in shlex.split(to_flag(field, new))]
    if arguments.sbatch:
        options = [f"--{option}" for option in arguments.sbatch] + ["--wait"] * wait
        label = f"mjax-{runs}-{name}"
        if run_command("squeue", "--me", "--noheader", "--format=%A", f"--name={label}").split():
            return 0
        flags = (f"--job-name={label}", f"--output={runs}/{name}.out", "--parsable", *options)
        job = run_command("sbatch", *flags, script=f"#!/bin/sh\nexec {shlex.join(command)}\n")
        print(f"submitted {name} as job {job.strip()}", file=sys.stderr)
        return 0
    print(f"{name}: {shlex.join(command[1:])}", file=sys.stderr, flush=True)
    environment = {key: value for key, value in os.environ.items() if key not in SET_BY_MJAX}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    # A terminal sends Ctrl-C to both, and a launcher SIGTERM to this process: the run saves and ends, then this one.
    handlers = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda *_: process.terminate()}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code not in (0, PREEMPTED):
        raise RunError(f"{runs / name} ended with exit code {code}; solve the problem above, and repeat the command")
    return code


def _measure_speed(arguments: ScaleArguments, config: Config, run: Point, folder: Path) -> float:
    """FLOP/s of 6 N D in a few steps of a run."""
    config = run_config(config, run)
    config = replace(
        config,
        optimizer=replace(config.optimizer, warmup_steps=0, wsd_decay_steps=None),
        train=replace(config.train, steps=PROBE_STEPS, eval_interval=0),
        checkpoint=replace(config.checkpoint, interval=0),
    )
    shutil.rmtree(folder / "probe", ignore_errors=True)
    if _train(config, arguments, folder, "probe", wait=True):
        raise RunError("the run that measures the speed was stopped; repeat the command")
    speeds = sorted(record["tokens_per_second"] for record in read_metrics(folder / "probe" / "metrics.jsonl"))
    shutil.rmtree(folder / "probe")
    return 6 * run["parameters"] * speeds[len(speeds) // 2]


def _is_done(folder: Path) -> bool:
    """True if a run has taken all its steps."""
    file, last = folder / "config.json", read_end(folder / "metrics.jsonl", TAIL).last
    return file.exists() and last.get("step") == read_settings(file).train.steps


def read_run(folder: Path) -> Point:
    """The size, length and validation losses of a finished run.

    Raises:
      UsageError: it is not finished, or has no validation.
    """
    from mjax.models.build import count_active

    config = read_config(folder / "config.json")
    steps, records = config.train.steps, read_metrics(folder / "metrics.jsonl")
    if not _is_done(folder):
        done = records[-1]["step"] if records else 0
        fix = f"continue it with python train.py --run {folder}"
        raise UsageError(f"{folder} has taken {done} of {steps} steps; {fix}")
    curve = [[one["step"] / steps, one["val_loss"]] for one in records if "val_loss" in one]
    if not curve:
        raise UsageError(f"{folder} has no validation loss; train it with --train.eval-interval above 0")
    size, shown = (config.model, count_active(config.model)), [point for point in curve if point[1] is not None]
    return make_point(folder.name, *size, records[-1]["tokens"], curve[-1][1], shown)


def check_comparable(folders: Sequence[Path]) -> None:
    """Check that losses of runs can be compared.

    Raises:
      UsageError: two have different models, vocabularies, data or tokenizers.
    """
    first: dict[str, str] = {}
    for folder in folders:
        model = read_settings(folder / "config.json").model
        data, tokenizer = folder / DIGESTS, folder / "tokenizer"
        values = {"model kinds": model.kind, "vocabularies": f"{model.vocabulary:,}"}
        values["tokenizers"] = digest_folder(tokenizer) if tokenizer.is_dir() else "none"
        values["data"] = data.read_text() if data.exists() else "none"
        first = first or values
        for name, value in values.items():
            if value != first[name]:
                what = f" ({first[name]} and {value})" if name in ("model kinds", "vocabularies") else ""
                raise UsageError(f"{folders[0]} and {folder} have different {name}{what}; leave one of them out")


def _draw(law: ScalingLaw, file: Path) -> None:
    """Draw the losses of the runs over their compute, and the law with its interval to `FURTHER` times their compute.

    Runs that the curve is not of have other tokens per parameter.
    """
    from matplotlib.figure import Figure

    ratio, flops = law.largest["tokens"] / law.largest["parameters"], [run["flops"] for run in law.runs]
    compute = np.geomspace(min(flops), FURTHER * max(flops), 60)
    loss, low, high = zip(*(law.predict(size, ratio * size) for size in np.sqrt(compute / (6 * ratio))), strict=True)
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log")
    axes.plot(compute, loss, color=PALETTE[0], linewidth=1.8, label=f"law at {ratio:.3g} tokens per parameter")
    axes.fill_between(compute, low, high, color=PALETTE[0], alpha=0.2, linewidth=0, label="95% interval")
    for run in law.runs:
        is_on_curve = abs(run["tokens"] / run["parameters"] / ratio - 1) < 0.1
        axes.plot(run["flops"], run["loss"], "o" if is_on_curve else "D", color=PALETTE[0 if is_on_curve else 6])
        fit = law.predict(run["parameters"], run["tokens"]).loss
        label = run["name"] if is_on_curve else f"{run['name']}, law {fit:.3f}"
        # The longer run has about the compute of the largest: their labels lie on two sides.
        side = {"xytext": (6, 4)} if is_on_curve else {"xytext": (-6, -10), "horizontalalignment": "right"}
        point = run["flops"], run["loss"]
        axes.annotate(label, point, textcoords="offset points", size=8, parse_math=False, **side)
    axes.set(xlabel="compute 6 N D (FLOPs)", ylabel="validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    add_heading(axes, "Loss forecast from small runs", f"{law.formula}, {law.source}")
    save(figure, file)


def describe(law: ScalingLaw, folder: Path) -> str:
    """The runs, the constants and a forecast."""
    header = ("run", "parameters", "tokens", "FLOPs", "loss", "fit", "error")
    rows = []
    for run in sorted(law.runs, key=lambda run: run["flops"]):
        fit = law.predict(run["parameters"], run["tokens"]).loss
        sizes = f"{run['parameters']:,}", format_tokens(run["tokens"]), f"{run['flops']:.3g}"
        rows.append((run["name"], *sizes, f"{run['loss']:.4f}", f"{fit:.4f}", f"{fit / run['loss'] - 1:+.2%}"))
    names, tails = ("log A", "log B", "log E", "α", "β"), (50 - COVERAGE / 2, 50 + COVERAGE / 2)
    ends = zip(names, *np.percentile(law.draws, tails, axis=0), strict=True)
    parameters, tokens = (round(10**0.5 * law.largest[name]) for name in ("parameters", "tokens"))
    further = f"{format_tokens(parameters)} parameters and {format_tokens(tokens)} tokens"
    lines = [
        *format_table(header, rows),
        f"\n{law.formula}, {law.source}",
        f"{COVERAGE}%: {', '.join(f'{name} {low:.2f} to {high:.2f}' for name, low, high in ends)}",
        f"10 × the compute of {law.largest['name']}, {further}: {law.predict(parameters, tokens)}",
        *["the law misses the runs: look at their curves before you rely on the forecast"] * (law.noise > MISFIT),
        f"\n{folder / SCALING} is for mjax plan --scaling and --log.scaling; picture: {folder / 'scaling.png'}",
    ]
    return "\n".join(lines)
