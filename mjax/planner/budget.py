"""`mjax plan --gpu … --devices … --days …`: the largest model that a budget of GPU time trains.

The models are a ladder: those of the config scaled in width and depth, or the published ones of a family. Each rung is
trained on `tokens_per_parameter` tokens for each of its parameters (20 are compute-optimal: arXiv 2203.15556, section
3.4). The time of a rung grows with its size; the largest that stays within the days is looked for where the speed of
the last one tried puts it. The fastest ways to run the first are searched as with --devices alone, and the others are
tried in these ways; where none fits, they are searched too. Parameters, FLOPs, memory and time are those of the traced
program.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from mjax.cluster.hardware import Gpu
from mjax.config import Config, as_flag, available_configs, differences, load_config
from mjax.config.batch_size import BatchSizes, in_units
from mjax.config.model import ModelConfig
from mjax.config.resolve import shorter_warmup
from mjax.errors import UsageError, either
from mjax.models.build import count_parameters
from mjax.planner.calibration import Calibration
from mjax.planner.search import (
    SEARCHED,
    Candidate,
    SearchResult,
    candidates,
    find,
    largest,
    predictions,
    search,
    value_of,
    with_values,
)
from mjax.planner.search_command import check_searchable, with_batch
from mjax.planner.section import SearchArguments, Section, good_to
from mjax.trace.flops import model_flops
from mjax.utils.figures import GIB, table

WIDEST = 4  # times the width of the config: 64 times its parameters, and more with the deeper rungs
Search = Callable[[Config], SearchResult]


@dataclass(frozen=True)
class Rung:
    """A model of the ladder: the config it comes from, by name, its own config, of any length, and its parameters."""

    base: str
    config: Config
    parameters: int


@dataclass(frozen=True)
class Trial:
    """A rung with the length of its training, and the fastest way to run it; None if none fits or divides.

    Attributes:
      flops: of the model, in all steps.
      days_at_peak: duration at the peak speed of the devices; a rung for which it is too long is not searched.
    """

    rung: Rung
    config: Config
    parameters: int
    tokens: int
    flops: float
    days_at_peak: float
    best: Candidate | None

    @property
    def days(self) -> float:
        """Duration of the run; infinite if it does not fit."""
        return math.inf if self.best is None else self.best.time.mean * self.config.train.steps / 86_400


# --- Ladders ----------------------------------------------------------------------------------------------------------


def ladder(name: str, config: Config) -> list[Rung]:
    """The model of `config` in other sizes, smallest first, with its head size, ratio of widths and vocabulary.

    The number of heads is a multiple of that of key-value heads, or of 8 where each head has its own; for each number
    the depth goes from the config's ratio of depth to width to three quarters more, so that rungs are close to each
    other.
    """
    model = config.model
    unit = getattr(model, "kv_heads", None) or math.gcd(model.heads, 8)
    depth = 4 if model.layers % 4 == 0 else 1
    widths = [name for name in ("hidden", "feed_forward") if getattr(model, name, None) is not None]
    sizes: dict[ModelConfig, int] = {model: count_parameters(model)}
    for heads in range(unit, WIDEST * model.heads + 1, unit):
        wide = replace(model, heads=heads, **{name: getattr(model, name) * heads // model.heads for name in widths})
        least = max(round(model.layers * heads / model.heads / depth), 1)
        # All layers of a width have the same number of parameters: two models tell the size of the rest.
        first, second = (count_parameters(replace(wide, layers=depth * n)) for n in (least, least + 1))
        for n in range(least, max(7 * least // 4, least + 1)):
            sizes[replace(wide, layers=depth * n)] = first + (n - least) * (second - first)
    return [Rung(name, replace(config, model=scaled), sizes[scaled]) for scaled in sorted(sizes, key=sizes.__getitem__)]


def _is_possible(config: Config, devices: int, keep: Collection[str]) -> bool:
    """True if the model is valid and can be divided among the devices."""
    try:
        config.model.check(config)
    except UsageError:
        return False
    return any(candidates(config, devices, keep))


def family_ladder(family: str) -> list[Rung]:
    """The configs whose name begins with `family`, smallest first, without demonstrations.

    Of configs with the same model at several lengths, the shortest is chosen.

    Raises:
      UsageError: there are none.
    """
    names = [name for name in available_configs() if not name.endswith("_demo")]
    chosen = [name for name in names if name.startswith(family)]
    if not chosen:
        families = sorted({re.match("[a-z]+", name)[0] for name in names})
        raise UsageError(f"--family {family}: no config's name begins so; use {either(families)}")
    rungs = defaultdict(list)
    for name in chosen:
        config = load_config(name)
        size = count_parameters(config.model)
        rungs[size].append(Rung(name, config, size))
    lengths = {size: min(rung.config.model.sequence for rung in rungs[size]) for size in sorted(rungs)}
    return [rung for size in lengths for rung in rungs[size] if rung.config.model.sequence == lengths[size]]


def run_budget(
    arguments: SearchArguments,
    name: str,
    config: Config,
    base: Config,
    gpu: Gpu,
    calibration: Calibration,
    say: Callable[[str], None],
) -> tuple[str, Config, Section]:
    """The name and the config of the largest model that the budget trains, and the plan section on it.

    Args:
      arguments: checked, with devices and days.
      name: of the config, or of its file.
      config: with the flags of the command line; valid except for its mesh.
      base: without them, as `name` has it.
      gpu, calibration: the GPU and its rates.
      say: told about each model that is tried.

    Raises:
      UsageError: there is no such family, no model can be split, or none is trained in time.
    """
    rungs = ladder(name, config) if arguments.family is None else family_ladder(arguments.family)
    if arguments.target_batch is not None:
        rungs = [replace(rung, config=with_batch(rung.config, arguments.target_batch)) for rung in rungs]
    devices, keep = arguments.devices, arguments.keep
    possible = [rung for rung in rungs if _is_possible(rung.config, devices, keep)]
    check_searchable((possible or rungs)[-1].config, devices, gpu.gpus_per_node, keep)

    best, tried = largest_model(possible, arguments, gpu, _in_known_ways(arguments, gpu, calibration), say)
    base = base if arguments.family is None else load_config(best.rung.base)
    title = f"{best.rung.base} at {in_units(best.parameters)} parameters"
    return title, best.config, budget_section(best, tried, base, arguments, gpu)


def _in_known_ways(arguments: SearchArguments, gpu: Gpu, calibration: Calibration) -> Search:
    """A search for one rung after the other, among the settings that were the fastest for the first."""
    fastest: list[dict[str, Any]] = []
    machine = *predictions(gpu, calibration), gpu.usable_bytes

    def ways(config: Config) -> SearchResult:
        known = [
            way for values in fastest for way in candidates(with_values(config, values), arguments.devices, SEARCHED)
        ]
        result = search(config, arguments.devices, *machine, SEARCHED, host=gpu.host_bytes, among=known)
        if not result.roomy:
            top = max(arguments.top, 10)  # as the plan of it does
            result = find(config, arguments.devices, gpu, calibration, arguments.keep, top)
            fastest[:] = [{name: value_of(way.config, name) for name in SEARCHED} for way in result.ranked[:10]]
        return result

    return ways


# --- The largest ------------------------------------------------------------------------------------------------------


def largest_model(
    rungs: list[Rung], arguments: SearchArguments, gpu: Gpu, search: Search, say: Callable[[str], None]
) -> tuple[Trial, list[Trial]]:
    """The largest rung that is trained within the days, and all that were tried, smallest first.

    Args:
      rungs: smallest first.
      arguments: with devices and days.
      gpu: each of the devices.
      search: all ways to run a config.
      say: told about each trial.

    Raises:
      UsageError: not even the smallest is.
    """
    tried: dict[int, Trial] = {}

    def order(number: int) -> float:
        """The logarithm of the days of a rung, counted from 1: about proportional to the number."""
        tried[number] = trial = attempt(rungs[number - 1], arguments, gpu, search)
        say(f"{in_units(trial.parameters)} parameters on {in_units(trial.tokens)} tokens: {duration(trial, arguments)}")
        return math.log(trial.days if trial.best else max(2 * trial.days_at_peak, 1.01 * arguments.days))

    seconds, peak = arguments.days * 86_400, gpu.peak_tflops.get(rungs[0].config.precision.compute, math.inf) * 1e12
    # Tokens grow with parameters, so days with their square: at first as by arXiv 2203.15556 at half of the peak.
    fitting = math.sqrt(seconds * arguments.devices * peak / 2 / (6 * arguments.tokens_per_parameter))
    first = bisect_right(rungs, fitting, key=lambda rung: rung.parameters)
    best = largest(order, math.log(arguments.days), min(max(first, 1), len(rungs)), len(rungs))
    if not best:
        smallest = tried[1]
        raise UsageError(
            f"{arguments.devices} × {gpu.name} in {arguments.days:g} days train no model of this ladder: the smallest, "
            f"{in_units(smallest.parameters)} parameters on {in_units(smallest.tokens)} tokens, takes "
            f"{duration(smallest, arguments)}; give more --days or --devices, or fewer --tokens-per-parameter"
        )
    return tried[best], [tried[number] for number in sorted(tried)]


def duration(trial: Trial, arguments: SearchArguments) -> str:
    """'34.5 days', or why there is no prediction."""
    if trial.best is not None:
        return f"{trial.days:.3g} days"
    if trial.days_at_peak > arguments.days:
        return f"{trial.days_at_peak:,.0f} days at peak speed"
    return "more memory than there is"


def attempt(rung: Rung, arguments: SearchArguments, gpu: Gpu, search: Search) -> Trial:
    """A rung with its length and the fastest way to run it; not searched if peak speed would not be enough."""
    config = with_tokens(rung.config, math.ceil(arguments.tokens_per_parameter * rung.parameters))
    sample = config.model.sequences * config.model.sequence
    samples = BatchSizes.of(config).samples_before(config.train.steps)
    flops = model_flops(config) * samples / config.train.global_batch
    peak = gpu.peak_tflops.get(config.precision.compute, math.inf) * 1e12
    days_at_peak = flops / (arguments.devices * peak) / 86_400
    ranked = search(config).ranked if days_at_peak <= arguments.days else []
    return Trial(rung, config, rung.parameters, samples * sample, flops, days_at_peak, ranked[0] if ranked else None)


def with_tokens(config: Config, tokens: int) -> Config:
    """`config` with the steps for this many tokens, and a schedule that ends with them."""
    steps = BatchSizes.of(config).steps_for(-(-tokens // (config.model.sequences * config.model.sequence)))
    optimizer = replace(config.optimizer, decay_steps=None, wsd_decay_steps=None)
    shorter = replace(config, train=replace(config.train, steps=steps), optimizer=optimizer)
    warmup = shorter_warmup(shorter, config)
    return shorter if warmup is None else replace(shorter, optimizer=replace(optimizer, warmup_steps=warmup))


# --- In words ---------------------------------------------------------------------------------------------------------


def budget_section(best: Trial, tried: list[Trial], base: Config, arguments: SearchArguments, gpu: Gpu) -> Section:
    """The section `budget` of a plan: the model, those tried beside it, and the command to train it.

    Args:
      best, tried: as returned by `largest_model`.
      base: the config that `best.rung.base` names.
      arguments: with devices and days.
      gpu: each of the devices.
    """
    flags = (as_flag(name, new) for name, (_, new) in differences(base, best.best.config).items())
    command = f"mjax train --config {best.rung.base} {' '.join(flags)} --data.path PREFIX"
    header = ["parameters", "layers", "hidden", "tokens", "FLOPs", "mesh", "s/step", "MFU", "GiB", "days", "GPU-hours"]
    time, limit, hours = best.best.time, f"{arguments.days:g} days", 24 * best.days * arguments.devices
    remarks = [
        f"* fits into {limit}" + ("" if time.error is None else f", by a prediction good to {good_to(time.error)}"),
        *time.caveats,
    ]
    if arguments.price is not None:
        remarks.append(f"{hours * arguments.price:,.0f} at {arguments.price:g} a GPU-hour")
    if best.config.model != base.model:
        remarks.append(
            f"batch and learning rate are those of {best.rung.base}: a larger model usually takes a lower rate"
        )
    if best is tried[-1]:
        remarks.append("it is the largest of the ladder, so the budget would train a larger one too")
    return Section(
        f"Budget: {arguments.devices:,} × {gpu.name} for {limit}",
        {
            "devices": arguments.devices,
            "days": arguments.days,
            "tokens_per_parameter": arguments.tokens_per_parameter,
            "best": _values(best),
            "tried": [_values(trial) for trial in tried],
            "command": command,
        },
        [
            f"the largest within the budget, at {arguments.tokens_per_parameter:g} tokens a parameter:",
            "",
            *table(header, [_row(trial, arguments, trial is best) for trial in tried]),
            "",
            *remarks,
            "to train it:",
            f"  {command}",
        ],
    )


def _row(trial: Trial, arguments: SearchArguments, is_best: bool) -> list[Any]:
    model, best = trial.config.model, trial.best
    row = [f"{trial.parameters:,}" + " *" * is_best, model.layers, model.hidden]
    row += [in_units(trial.tokens), f"{trial.flops:.3g}"]
    if best is None:
        return [*row, *[""] * 4, duration(trial, arguments), ""]
    mesh = best.config.mesh
    sizes = [mesh.pipe, mesh.data, *([mesh.context] if mesh.context > 1 else []), mesh.model]
    row += [" × ".join(map(str, sizes)), f"{best.time.mean:.3g}", f"{best.time.mfu:.1%}"]
    return [*row, f"{best.memory.total / GIB:.1f}", f"{trial.days:.3g}", f"{24 * trial.days * arguments.devices:,.0f}"]


def _values(trial: Trial) -> dict[str, Any]:
    best, model = trial.best, trial.config.model
    found = best and {"seconds": best.time.mean, "mfu": best.time.mfu, "bytes": best.memory.total, "days": trial.days}
    return {
        "config": trial.rung.base,
        "model": {"layers": model.layers, "hidden": model.hidden, "heads": model.heads},
        "parameters": trial.parameters,
        "tokens": trial.tokens,
        "steps": trial.config.train.steps,
        "flops": trial.flops,
        "days_at_peak": trial.days_at_peak,
        **(found or dict.fromkeys(("seconds", "mfu", "bytes", "days"))),
    }
