"""What `mjax plan` finds and says: the search of --devices, --longest, --days, and whether a config fits.

Each refusal of a number of GPUs names one that works; what does not fit is refused with the cheapest changes that make
it fit (`search.changes_that_fit`), also before training.
"""

from __future__ import annotations

import itertools
import os
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mjax.cluster.hardware import USABLE_FRACTION, Gpu, gpu_named
from mjax.cluster.launch import MEMORY_FRACTIONS, host_memory
from mjax.config import Config, DataConfig, MeshConfig, as_flag, axes, differences, load_config
from mjax.config.axes import PIPE, in_words
from mjax.config.batch_size import BatchSizes, in_units
from mjax.config.checks import can_run_layers, validate
from mjax.config.kernels import HOPPER, capability_of, resolved_on_gpu
from mjax.config.source import WIDTH
from mjax.errors import UsageError, suggestion
from mjax.planner.calibration import Calibration
from mjax.planner.layer import kinds_of, layer_forward
from mjax.planner.memory import HEADROOM, fits_host, free_share, predict_memory, usable_memory
from mjax.planner.search import (
    RECOMPUTE,
    SEARCHED,
    WAYS,
    WITHIN,
    Candidate,
    MemoryOf,
    SearchResult,
    Trial,
    Way,
    alternatives,
    batch_unit,
    candidates,
    changes_that_fit,
    describe,
    divisors,
    duration,
    family_ladder,
    find,
    in_known_ways,
    is_possible,
    ladder,
    largest_model,
    longest,
    predictions,
    value_of,
    with_values,
    word,
)
from mjax.planner.section import SearchArguments, Section, good_to, layers_in_words
from mjax.planner.time import StepTime, run_tokens
from mjax.step.precision import in_float8
from mjax.step.unrolling import is_unrolled, repeats_in_stack
from mjax.utils.figures import GIB, named_rows, table
from mjax.utils.progress import progress

LARGEST = 16_384
"""The largest number of GPUs tried when looking for how many are enough."""


class Question(NamedTuple):
    """The question of a search: the name of the config, the config as given with its own mesh, the GPU and its server,
    the price of a GPU-hour or None, and the number of candidates to show."""

    name: str
    config: Config
    gpu: Gpu
    price: float | None
    top: int

    @property
    def hardware(self) -> str:
        """The GPU, and the size of its server if it is not the usual one."""
        usual = gpu_named(self.gpu.name).gpus_per_node
        return self.gpu.name + (f", {self.gpu.gpus_per_node} a server" * (self.gpu.gpus_per_node != usual))


def run_search(
    arguments: SearchArguments, name: str, config: Config, gpu: Gpu, calibration: Calibration | None = None
) -> tuple[Config, Section, str]:
    """Search; nothing is written yet.

    Args:
      arguments: checked, with `devices`.
      name: of the config.
      config: valid except for what the search decides.
      gpu: the GPU.
      calibration: its rates; by default the planner's own.

    Returns:
      The fastest config, the plan section on the search, and the docstring of its file.

    Raises:
      UsageError: there is nothing to search, or nothing fits.
    """
    keep, devices = arguments.keep, arguments.devices
    if arguments.target_batch is not None:
        config = with_batch(config, arguments.target_batch)
    check_searchable(config, devices, gpu.gpus_per_node, keep)
    began = time.perf_counter()
    result = find(config, devices, gpu, calibration, keep, max(arguments.top, 10))
    seconds = time.perf_counter() - began
    if not result.ranked:
        refuse_too_big(result, config, name, gpu.name, predictions(gpu, calibration)[0], keep)
    question = Question(name, config, gpu, arguments.price, arguments.top)
    section = report(result, question, seconds, arguments.write and str(arguments.write))
    return result.ranked[0].config, section, _about(result, question)


def _about(result: SearchResult, question: Question) -> str:
    """Docstring of the written config: what it is and how it was chosen."""
    best, config = result.ranked[0], question.config
    spent = cost(best, result.devices, question.price)
    rows = {
        "hardware": f"{result.devices:,} × {question.hardware}: {describe(best.config)}",
        "predicted": f"{best.time.total:.3g} s a step ({good_to(best.time.error)}), {best.time.mfu:.1%} MFU; "
        f"{best.memory.total / GIB:.1f} of {result.capacity / GIB:.1f} GiB a GPU",
        "cost": f"{run_tokens(config):,} tokens in {spent.days:.3g} days, {spent.gpu_hours:,.0f} GPU-hours",
        "chosen": f"by `mjax plan`: the fastest of {len(result.ranked):,} ways that fit to run {question.name} at a "
        f"global batch of {config.train.global_batch:,}; model and learning rate are its own",
    }
    if warning := tight_warning(result):
        rows["memory"] = warning
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<13}", subsequent_indent=" " * 13)
        for name, text in rows.items()
    ]
    return f"{question.name} for {result.devices:,} × {question.hardware}, found by the planner.\n\n" + "\n".join(lines)


# --- Refusals ---------------------------------------------------------------------------------------------------------


def check_searchable(config: Config, devices: int, gpus_per_node: int, keep: Collection[str] = ()) -> None:
    """Refuse a search without any candidate.

    Raises:
      UsageError: one sentence, with numbers of GPUs that work.
    """
    for name in keep:
        if name not in SEARCHED:
            raise UsageError(
                f"--keep {name}: the search does not change it{suggestion(name, list(SEARCHED))}; "
                f"use any of {', '.join(SEARCHED)}"
            )
    if devices < 1:
        raise UsageError(f"--devices is {devices}; it must be at least 1")
    if devices > gpus_per_node and devices % gpus_per_node:
        below = devices // gpus_per_node * gpus_per_node
        smaller = [n for n in divisors(devices) if 1 < n < gpus_per_node]
        servers = f", or --devices-per-node {smaller[-1]} for servers of {smaller[-1]}" if smaller else ""
        raise UsageError(
            f"--devices {devices} is not a multiple of the {gpus_per_node} GPUs of a server; "
            f"use {below} or {below + gpus_per_node}{servers}"
        )
    # Without the fields that the search decides, and without data, which a plan does not need.
    alone = replace(config.train, micro_batch=1, recompute="none")
    validate(replace(config, mesh=MeshConfig(), data=replace(config.data, mock=True), train=alone))
    if not any(candidates(config, devices, keep)):
        parts = [n for n in divisors(gpus_per_node) if n < gpus_per_node]
        counts = [
            n for n in (*parts, *range(gpus_per_node, LARGEST, gpus_per_node)) if any(candidates(config, n, keep))
        ]
        sides = [n for n in counts if n < devices][-1:] + [n for n in counts if n > devices][:1]
        layers, heads, batch = config.model.layers, config.model.heads, config.train.global_batch
        unit = batch_unit(config)
        rampup = f" that grows there by multiples of {unit}" if unit != batch else ""
        kept = f" with {', '.join(keep)} kept" if keep else ""
        use = f"use --devices {' or '.join(map(str, sides))}" if sides else "give it another --target-batch"
        raise UsageError(
            f"--devices {devices} cannot be divided among {layers} layers, {heads} heads and a global batch of {batch}"
            f"{rampup}{kept}; {use}"
        )


def refuse_too_big(
    result: SearchResult, config: Config, name: str, gpu: str, memory_of: MemoryOf, keep: Collection[str]
) -> None:
    """Refuse a search in which nothing fits, with the closest candidate, and how many GPUs would be enough.

    Raises:
      UsageError: always.
    """
    if not result.too_big:
        raise UsageError(
            f"all {result.tried:,} ways to run {name} on {result.devices} × {gpu} need more host memory than there is; "
            "leave out --keep train.recompute"
        )
    nearest, least = min(result.too_big, key=lambda pair: pair[1])
    enough = enough_devices(config, result.devices, memory_of, result.capacity, keep)
    advice = f"use --devices {enough}, where it fits" if enough else f"no number up to {LARGEST:,} is enough either"
    raise UsageError(
        f"none of {result.tried:,} ways to run {name} on {result.devices} × {gpu} fits: the smallest, "
        f"{describe(nearest)}, takes {least / GIB:.1f} GiB of {result.capacity / GIB:.1f}; {advice}"
    )


def enough_devices(
    config: Config, devices: int, memory_of: MemoryOf, capacity: float, keep: Collection[str] = ()
) -> int | None:
    """Twice, four times … as many GPUs, on which a candidate leaves HEADROOM free; None if `LARGEST` are not enough.

    Only candidates with one sequence per micro-batch, full recomputation and one chunk are tried: those that need least
    memory.
    """
    thrifty = {"train.micro_batch": 1, "train.recompute": "full", "mesh.chunks": 1}
    fixed = {name: value for name, value in thrifty.items() if name not in keep}
    small, count = with_values(config, fixed), 2 * devices
    while count <= LARGEST:
        ways = candidates(small, count, {*keep, *fixed})
        if any(free_share(memory_of(way).total, capacity) >= HEADROOM for way in ways):
            return count
        count *= 2
    return None


# --- Another batch ----------------------------------------------------------------------------------------------------


def with_batch(config: Config, batch: int) -> Config:
    """`config` with a global batch of `batch` and as many samples, to a step, in total, in warm-up and in decay.

    The learning rate stays; the right one for another batch is the user's choice.

    Raises:
      UsageError: batch is below 1 or above the samples of the run, or the config's ramp-up or schedule does not end
        with it.
    """
    if batch < 1:
        raise UsageError(f"--target-batch is {batch}; it must be at least 1")
    train, optimizer = replace(config.train, global_batch=batch), config.optimizer
    changed = replace(config, train=train)
    validate(replace(changed, mesh=MeshConfig(), train=replace(train, micro_batch=1), data=DataConfig(mock=True)))
    before, after = BatchSizes.of(config), BatchSizes.of(changed)
    samples = before.samples_before(config.train.steps)
    if _steps_of(after, samples) < 1:
        raise UsageError(
            f"--target-batch {batch} is more than the {samples:,} samples of the run; use {samples} or less"
        )

    def rescaled(steps: int, least: int = 1) -> int:
        """The most steps that take no more samples than `steps` did."""
        return max(least, _steps_of(after, before.samples_before(steps)))

    decay, end = optimizer.decay_steps, optimizer.wsd_decay_steps
    return replace(
        changed,
        train=replace(train, steps=rescaled(train.steps)),
        optimizer=replace(
            optimizer,
            warmup_steps=rescaled(optimizer.warmup_steps, least=0),
            decay_steps=None if decay is None else rescaled(decay),
            # A length, counted from the end, where the batch has its last size.
            wsd_decay_steps=None if end is None else max(1, end * config.train.global_batch // batch),
        ),
    )


def _steps_of(sizes: BatchSizes, samples: int) -> int:
    """The most steps that take no more than `samples` samples."""
    first, done, size = next(piece for piece in reversed(sizes.pieces) if piece[1] <= samples)
    return first + (samples - done) // size


# --- The report: the fastest candidates, what holds them back, what each choice is worth ------------------------------


def report(
    result: SearchResult,
    question: Question,
    seconds: float,
    written: str | None = None,
) -> Section:
    """The section `search` of a plan.

    Args:
      result: with at least one candidate that fits.
      question: the question of the search.
      seconds: duration of the search.
      written: the file into which the best was written.
    """
    shown = result.ranked[: question.top]
    costs = [cost(candidate, result.devices, question.price) for candidate in shown]
    others, rank = alternatives(result), _own_rank(result, question.config)
    return Section(
        title=f"Search: {question.name} on {result.devices:,} × {question.hardware}",
        values={
            "gpu": question.gpu.name,
            "devices_per_node": question.gpu.gpus_per_node,
            "network_bytes_per_second": question.gpu.network_bandwidth_per_node,
            "devices": result.devices,
            "global_batch": question.config.train.global_batch,
            "tokens": run_tokens(question.config),
            "usable_bytes": result.capacity,
            "tried": result.tried,
            "too_big": len(result.too_big),
            "tight": len(result.tight),
            "without_host": result.without_host,
            "slower": len(result.slower),
            "seconds": seconds,
            "best": [_values(*pair) for pair in zip(shown, costs, strict=True)],
            "alternatives": [_alternative_values(result.ranked[0], *other) for other in others.items()],
            "own": None if rank is None else {"rank": rank, "seconds": result.ranked[rank - 1].time.mean},
            "written": written,
        },
        lines=[
            f"{result.tried:,} ways to run it: {len(result.too_big):,} are too big for "
            f"{result.capacity / GIB:.1f} GiB, {len(result.tight):,} leave less than {HEADROOM:.0%} of it free, "
            + (f"{result.without_host:,} need more host memory than there is, " if result.without_host else "")
            + f"{len(result.roomy):,} fit"
            + (f", and {len(result.slower):,} take {WITHIN - 1:.0%} longer or more" if result.slower else "")
            + f" ({seconds:.1f} s)",
            "",
            *_table(result, shown, costs),
            "",
            *_reasons(result, others),
            "",
            *_remarks(result, question, costs[0]),
            *([f"written to {written}"] if written else []),
        ],
    )


class Cost(NamedTuple):
    """Cost of the whole run: days, GPU-hours, and money if a GPU-hour has a price."""

    days: float
    gpu_hours: float
    money: float | None


def cost(candidate: Candidate, devices: int, price: float | None) -> Cost:
    """The cost of all steps of a candidate."""
    hours = candidate.time.mean * candidate.config.train.steps / 3600
    return Cost(hours / 24, hours * devices, None if price is None else hours * devices * price)


# Columns that are left out where every row has this.
OPTIONAL = {"groups": 1, "expert": 1, "context": "1", "loss chunks": "-", "host GiB": "-", "cost": "-"}


def _table(result: SearchResult, shown: list[Candidate], costs: list[Cost]) -> list[str]:
    rows = [{"": number, **_cells(*pair, result)} for number, pair in enumerate(zip(shown, costs, strict=True), 1)]
    header = [name for name in rows[0] if any(row[name] != OPTIONAL.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows])


def _cells(candidate: Candidate, spent: Cost, result: SearchResult) -> dict[str, Any]:
    config, memory, time = candidate.config, candidate.memory, candidate.time
    mesh, train = config.mesh, config.train
    chunks = f" × {mesh.chunks}" if mesh.chunks > 1 else ""
    return {
        "pipe": mesh.pipe, "data": mesh.data, "groups": mesh.replica,
        "expert": mesh.expert,
        "context": f"{mesh.context} ({config.across})" if config.across else "1", "model": mesh.model,
        "schedule": f"{mesh.schedule}{chunks}" if mesh.pipe > 1 else "-", "micro-batch": train.micro_batch,
        "recompute": train.recompute, "seq. par.": "yes" if mesh.splits_tokens else "-", "ZeRO": mesh.zero or "-",
        "loss chunks": train.loss_chunks if train.loss_chunks > 1 else "-", "s/step": f"{time.mean:.3g}",
        "TFLOP/s": f"{time.model_tflops:.0f}", "MFU": "-" if time.mfu is None else f"{time.mfu:.1%}",
        "GiB": f"{memory.total / GIB:.1f}", "host GiB": f"{memory.host / GIB:.1f}" if memory.host else "-",
        "days": f"{spent.days:.3g}", "GPU-hours": f"{spent.gpu_hours:,.0f}",
        "cost": f"{spent.money:,.0f}" if spent.money else "-", "held back by": _bottlenecks(candidate, result),
    }  # fmt: skip


def _bottlenecks(candidate: Candidate, result: SearchResult) -> str:
    """The two slowest parts besides the matmuls, and the memory if too little of it is free."""
    time, free = candidate.time, result.free(candidate)
    parts = sorted((-seconds, name) for name, seconds in time.parts.items() if seconds > 0 and name != "matmul")
    words = [f"{name} {-seconds / time.total:.0%}" for seconds, name in parts[:2]]
    return ", ".join(words + [f"memory, {free:.1%} free"] * (free < HEADROOM))


def _reasons(result: SearchResult, others: dict[str, Candidate]) -> list[str]:
    """What a choice is worth: the fastest candidate with another value of each field."""
    best, rows = result.ranked[0], []
    for name, other in others.items():
        values = [(each, value_of(best.config, each), value_of(other.config, each)) for each in SEARCHED]
        more = [f"{each.split('.')[1].replace('_', '-')} {word(b)}" for each, a, b in values if a != b and each != name]
        chosen = [word(value_of(candidate.config, name)) for candidate in (best, other)]
        rows.append([name, *chosen, _compared(other.time, best.time), ", ".join(more)])
    return table(["what a choice is worth", "best", "else", "the fastest so", "which also has"], rows, left=5)


def _compared(time: StepTime, best: StepTime) -> str:
    """The seconds per step of a candidate, and the difference from the best one."""
    return f"{time.mean:.3g} s, {time.mean / best.mean - 1:+.1%}"


def _remarks(result: SearchResult, question: Question, spent: Cost) -> list[str]:
    best, config = result.ranked[0], question.config
    money = "" if spent.money is None else f", {spent.money:,.0f} at {question.price:g} a GPU-hour"
    lines = [
        f"{run_tokens(config):,} tokens in {config.train.steps:,} steps: {spent.days:.3g} days, "
        f"{spent.gpu_hours:,.0f} GPU-hours{money}; the prediction "
        + ("has no error bar" if best.time.error is None else f"is good to {good_to(best.time.error)}"),
        *best.time.caveats,
    ]
    if best.time.mean != best.time.total:
        lines.append(
            f"s/step is the mean of the run, whose batch grows; at the whole batch, of {config.train.global_batch:,}, "
            f"the best takes {best.time.total:.3g} s"
        )
    if config.mesh.devices == result.devices:
        rank = _own_rank(result, config)
        found = None if rank is None else f"{_compared(result.ranked[rank - 1].time, best.time)}, rank {rank:,}"
        lines.append(f"the config's own mesh, {describe(config)}: {found or 'not among those that are ranked'}")
    if warning := tight_warning(result):
        lines.append(warning)
    elif result.tight and result.tight[0].time.mean < best.time.mean:
        fast = result.tight[0]
        lines.append(
            f"not ranked, because it leaves {result.free(fast):.1%} of the memory free and the prediction may be off "
            f"by {HEADROOM:.0%}: {describe(fast.config)}, {_compared(fast.time, best.time)}"
        )
    return lines


def tight_warning(result: SearchResult) -> str:
    """A warning if no candidate leaves enough memory free; else an empty string."""
    if result.roomy:
        return ""
    return (
        f"warning: no way to run it leaves {HEADROOM:.0%} of the memory free, by which the prediction may be off; the "
        f"best leaves {result.free(result.ranked[0]):.1%} and may not fit"
    )


def _own_rank(result: SearchResult, config: Config) -> int | None:
    """The rank of the config itself among those that fit, counted from 1; with `model` 1 the flag of sequence
    parallelism means nothing."""
    flag = {} if config.mesh.model > 1 else {"sequence_parallel": False}
    alike = replace(config, mesh=replace(config.mesh, **flag))
    return next((rank for rank, ranked in enumerate(result.ranked, 1) if ranked.config == alike), None)


def _values(candidate: Candidate, spent: Cost) -> dict[str, Any]:
    time, memory = candidate.time, candidate.memory
    return {
        **_settings(candidate.config),
        "seconds": time.mean,
        "seconds_at_global_batch": time.total,
        "error": time.error,
        "parts": time.parts,
        "model_tflops": time.model_tflops,
        "mfu": time.mfu,
        "memory": {**memory._asdict(), "total": memory.total},
        **spent._asdict(),
    }


def _alternative_values(best: Candidate, field: str, other: Candidate) -> dict[str, Any]:
    return {
        "field": field,
        "best": value_of(best.config, field),
        "else": value_of(other.config, field),
        "seconds": other.time.mean,
        "settings": _settings(other.config),
        "bytes": other.memory.total,
    }


def _settings(config: Config) -> dict[str, Any]:
    """The fields in which candidates differ, by dotted name."""
    return {name: value_of(config, name) for name in SEARCHED}


# --- The longest sequences --------------------------------------------------------------------------------------------


def run_longest(
    config: Config, name: str, most: int, gpu: Gpu, calibration: Calibration | None, file: Path | None
) -> Section:
    """The section of a plan on the longest sequences, drawn into `file` if it is given.

    Raises:
      UsageError: `most` is not a power of two, layers differ from each other, or nothing fits on any number of GPUs.
    """
    counts = [2**power for power in range(most.bit_length())]
    if counts[-1] != most:
        raise UsageError(f"--longest {most} is not a power of two; use {counts[-1]} or {2 * counts[-1]}")
    machine = gpu.gpus_per_node, *predictions(gpu, calibration), gpu.usable_bytes, gpu.host_bytes
    results: list[tuple[Way, Candidate]] = []
    with progress("longest sequences", len(counts) * len(WAYS), transient=True) as advance:
        for way, count in itertools.product(WAYS, counts):
            best = longest(config, count, way, *machine)
            results += [] if best is None else [(way, best)]
            advance(1)
    if not results:
        raise UsageError(f"{name} does not fit on {most} × {gpu.name} with any length; use --longest {2 * most}")
    values = [_length_values(way, best) for way, best in results]
    if file is not None:
        from mjax.pictures.plan import draw_longest

        points = defaultdict(list)
        for row in values:
            points[row["way"]].append((row["devices"], row["sequence"]))
        draw_longest(points, file, name, gpu.name)
    cells = [
        [
            row["way"], axes.in_words(best.config.mesh), row["context_attention"] or "", row["recompute"],
            f"{row['devices']:,}", f"{row['sequence']:,}", f"{row['bytes'] / GIB:.1f}",
            f"{row['tokens_per_second']:,.0f}", "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        ]
        for row, (_, best) in zip(values, results, strict=True)
    ]  # fmt: skip
    header = ("way", "mesh", "attention", "recomputation", "GPUs", "positions", "GiB", "tokens/s a GPU", "MFU")
    lines = table(header, cells, left=4) + ([] if file is None else [f"picture  {file}"])
    plan = {"gpu": gpu.name, "figure": None if file is None else str(file), "found": values}
    return Section(f"Longest sequence on {gpu.name}", plan, lines)


def _length_values(way: Way, best: Candidate) -> dict:
    config, seconds = best.config, best.time.total
    return {
        "devices": config.mesh.devices,
        "way": way.name,
        "sequence": config.model.sequence,
        "mesh": axes.as_typed(config.mesh),
        "context_attention": config.across,
        "recompute": way.recompute,
        "bytes": best.memory.total,
        "seconds": seconds,
        "tokens_per_second": config.train.global_batch * config.model.sequence / seconds / config.mesh.devices,
        "mfu": best.time.mfu,
    }


# --- The largest model of a budget ------------------------------------------------------------------------------------


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
    possible = [rung for rung in rungs if is_possible(rung.config, devices, keep)]
    check_searchable((possible or rungs)[-1].config, devices, gpu.gpus_per_node, keep)

    best, tried = largest_model(possible, arguments, gpu, in_known_ways(arguments, gpu, calibration), say)
    base = base if arguments.family is None else load_config(best.rung.base)
    title = f"{best.rung.base} at {in_units(best.parameters)} parameters"
    return title, best.config, budget_section(best, tried, base, arguments, gpu)


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
            "best": _trial_values(best),
            "tried": [_trial_values(trial) for trial in tried],
            "command": command,
        },
        [
            f"the largest within the budget, at {arguments.tokens_per_parameter:g} tokens a parameter:",
            "",
            *table(header, [_trial_row(trial, arguments, trial is best) for trial in tried]),
            "",
            *remarks,
            "to train it:",
            f"  {command}",
        ],
    )


def _trial_row(trial: Trial, arguments: SearchArguments, is_best: bool) -> list[Any]:
    model, best = trial.config.model, trial.best
    row = [f"{trial.parameters:,}" + " *" * is_best, model.layers, model.hidden]
    row += [in_units(trial.tokens), f"{trial.flops:.3g}"]
    if best is None:
        return [*row, *[""] * 4, duration(trial, arguments), ""]
    mesh = best.config.mesh
    sizes = [mesh.pipe, mesh.data, *([mesh.context] if mesh.context > 1 else []), mesh.model]
    row += [" × ".join(map(str, sizes)), f"{best.time.mean:.3g}", f"{best.time.mfu:.1%}"]
    return [*row, f"{best.memory.total / GIB:.1f}", f"{trial.days:.3g}", f"{24 * trial.days * arguments.devices:,.0f}"]


def _trial_values(trial: Trial) -> dict[str, Any]:
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


# --- Whether it fits --------------------------------------------------------------------------------------------------


DEFAULT_FRACTION = 0.75  # of a GPU's memory, JAX's default


ADA = (8, 9)
"""Compute capability of the first GPUs with float8 products; Hopper's is 9.0."""
MULTIPLE = 16
"""cuBLAS multiplies float8 matrices whose sizes are multiples of this."""


def check_float8(config: Config, gpu: str, capability: tuple[int, ...]) -> None:
    """Refuse float8 on a GPU without it, and sizes that its products do not take.

    Args:
      config: validated.
      gpu: its name, for the message.
      capability: its compute capability.

    Raises:
      UsageError: one sentence, with what to change.
    """
    if not in_float8(config.precision):
        return
    if capability < ADA:
        raise UsageError(
            f"--precision.compute fp8 needs a GPU with compute capability 8.9 or more, such as an H100, and {gpu} has "
            f"{'.'.join(map(str, capability))}; use --precision.compute bf16"
        )
    model, train = config.model, config.train
    tokens = train.micro_batch * model.sequences * model.sequence
    if tokens % MULTIPLE:
        raise UsageError(
            f"--precision.compute fp8 multiplies micro-batches of a multiple of {MULTIPLE} tokens, and --train.micro-"
            f"batch {train.micro_batch} has {tokens}; use a --train.micro-batch that is a multiple of {MULTIPLE}"
        )
    for _, of in kinds_of(config):
        for k, n in layer_forward(of).weights:
            if k % MULTIPLE or n % MULTIPLE:
                raise UsageError(
                    f"--precision.compute fp8 multiplies matrices whose sizes are multiples of {MULTIPLE}, and a rank "
                    f"of --mesh.model {config.mesh.model} has a weight of {k} × {n}; change the mesh "
                    "or the model, or use --precision.compute bf16"
                )


def check_gpu_at_hand(config: Config, name: str, force: bool, say: Callable[[str], None]) -> None:
    """Refuse what does not fit on the GPUs of this process, and warn if it barely fits, before compiling.

    On a CPU nothing is refused: its memory is shared with other processes and may be swapped. A wrong number of devices
    is refused elsewhere.

    Args:
      config: validated.
      name: name of the config in messages.
      force: only report and continue.
      say: called with that sentence, or the warning.

    Raises:
      UsageError: the config does not fit, or needs an attention kernel or float8 products that are not available.
    """
    import jax  # a plan does not need it

    from mjax.cluster.processes import place_on_host

    device = jax.local_devices()[0]
    usable = usable_memory(device)
    if usable is None or config.mesh.devices != jax.device_count():
        return
    check_float8(config, device.device_kind, capability_of(device))
    config = resolved_on_gpu(config, capability_of(device))
    try:
        host = host_memory() / (jax.local_device_count() * place_on_host()[1])
        if warning := check_memory(config, usable, device.device_kind, name, host):
            say(f"memory  {warning}")
    except UsageError as error:
        if not force:
            raise UsageError(f"{error}; --force tries it anyway") from None
        say(f"memory  {error}; continuing because of --force")


def check_memory(config: Config, usable: float, gpu: str, name: str = "this config", host: float | None = None) -> str:
    """Refuse what does not fit, with the numbers and changes that would fit.

    Args:
      config: validated.
      usable: bytes that XLA may allocate on each device.
      gpu: name of the device.
      name: name of the config in messages.
      host: bytes of this machine's memory for each device; None if they are not known.

    Returns:
      A warning if it fits but leaves less than HEADROOM free, else an empty string.

    Raises:
      UsageError: it needs more than `usable`, or more than `host`.
    """
    memory = predict_memory(config)
    if not fits_host(memory, host):
        raise UsageError(
            f"{name} keeps {memory.host / GIB:.1f} GiB of activations in host memory for each GPU, and this machine "
            f"has {host / GIB:.1f} GiB for each; use --train.recompute full, or a smaller --train.micro-batch"
        )
    free = free_share(memory.total, usable)
    if free >= HEADROOM:
        return ""
    changes = changes_that_fit(config, usable, host=host)
    nearest = "; or ".join(f"{change.flags} ({change.needs(config)})" for change in changes)
    if free >= 0:
        advice = f"what leaves more, cheapest first: {nearest}" if changes else "no change of mesh leaves more"
        return (
            f"{name} is predicted to need {memory.total / GIB:.1f} of the {usable / GIB:.1f} GiB that are usable on "
            f"{gpu}, which leaves {free:.1%}; the prediction may be off by {HEADROOM:.0%}, so it may not fit; {advice}"
        )
    advice = f"what fits, cheapest first: {nearest}" if changes else "no change of mesh or recomputation makes it fit"
    largest_first = sorted(memory.parts.items(), key=lambda part: -part[1])
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest_first if size / GIB >= 0.05)
    raise UsageError(
        f"{name} needs {memory.total / GIB:.1f} GiB on each GPU ({kinds}) and {usable / GIB:.1f} GiB of {gpu} are "
        f"usable{_larger_fraction(memory.total, usable)}; {advice}"
    )


def _larger_fraction(needed: float, usable: float) -> str:
    """A hint if the memory exists but JAX was not told to use it."""
    possible = usable / DEFAULT_FRACTION * USABLE_FRACTION
    if any(name in os.environ for name in MEMORY_FRACTIONS) or needed > possible:
        return ""
    return f" ({possible / GIB:.1f} with {MEMORY_FRACTIONS[0]}={USABLE_FRACTION} in the environment, where it fits)"


# --- The memory section of a plan, and its picture --------------------------------------------------------------------


WHEN = {
    "head": "with the logits of a micro-batch",
    "backward": "in the backward pass of the layers",
    "reduction": "when gradients are summed over data",
    "update": "when Muon orthogonalises matrices",
}


def memory_section(config: Config, gpu: Gpu | None = None, figure: Path | None = None, name: str = "") -> Section:
    """The section of a plan.

    Args:
      gpu: the GPU it has to fit into.
      figure: output file of the plot.
    """
    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    memory = predict_memory(config)
    values: dict[str, Any] = {
        "total": memory.total,
        **memory.parts,
        "host": memory.host,
        "moment": memory.moment,
        "attention": config.model.attention,
        "unrolled": is_unrolled(config, on_gpu=True),
        "float8": in_float8(config.precision),
        "loss_chunks": config.train.loss_chunks,
        "figure": None if figure is None else str(figure),
    }
    rows = {kind: f"{size / GIB:8.2f} GiB" for kind, size in memory.parts.items()}
    rows["total"] = f"{memory.total / GIB:8.2f} GiB on each device, {WHEN[memory.moment]}"
    if memory.host:
        rows["host memory"] = f"{memory.host / GIB:8.2f} GiB for each device: the inputs of all layers"
    rows["attention"] = f"by {values['attention']}"
    if values["float8"]:
        rows["products"] = "with the layers' weights in float8: e4m3, gradients e5m2; all others in bf16"
    if values["loss_chunks"] > 1:
        chunks, local = config.train.loss_chunks, config.model.padded_vocabulary // config.mesh.model
        logits = f"{-(-local // chunks):,} logits of a token at a time"
        rows["loss"] = f"in {chunks} chunks of the vocabulary, {logits}, computed twice"
    lines = []
    if gpu is not None:
        rows["layers"] = layers_in_words(values["unrolled"])
        if values["unrolled"] and config.mesh.context > 1 and config.train.recompute != "none":
            rows["layers"] += " (over context XLA then recomputed many at once: llama3_8b_128k took 64 GiB, not 34)"
        if not values["unrolled"] and repeats_in_stack(config.model):
            rows["layers"] += (
                " (a pattern of windows then took more: 16 layers of qwen3_8b on 8 GPUs 14.7 GiB, not 9.3)"
            )
        free, in_host = free_share(memory.total, gpu.usable_bytes), fits_host(memory, gpu.host_bytes)
        changes = [] if free >= HEADROOM else changes_that_fit(config, gpu.usable_bytes, host=gpu.host_bytes)
        values |= {"gpu": gpu.name, "usable": gpu.usable_bytes, "fits": free >= 0 and in_host, "free": free}
        values["changes"] = [
            {"flags": change.flags, "total": change.memory.total, "devices": change.config.mesh.devices}
            for change in changes
        ]
        if memory.host:
            needed, available = min(gpu.gpus_per_node, config.mesh.devices) * memory.host, gpu.host_memory_per_node
            values |= {"host_of_server": needed, "host_memory": available}
            of_server = "unknown memory" if available is None else f"{available / GIB:,.0f} GiB"
            rows["host memory"] += f"; {needed / GIB:,.1f} of the {of_server} of a server"
            rows["host memory"] += "" if in_host else ", which is too much: use --train.recompute full"
        verdict = "it fits" if free >= HEADROOM else "it may not fit" if free >= 0 else "it does not fit"
        rows["verdict"] = f"{verdict} into the {gpu.usable_bytes / GIB:.1f} GiB that are usable on {gpu.name}"
        if 0 <= free < HEADROOM:
            rows["verdict"] += f": {free:.1%} are left free, and the prediction may be off by {HEADROOM:.0%}"
        rows["verdict"] += "" if in_host else ", but not into the host memory of its server"
        if changes:
            listed = (f"  {change.flags}  →  {change.needs(config)}" for change in changes)
            lines = [f"what fits and leaves {HEADROOM:.0%}, cheapest first:", *listed]
        elif free < HEADROOM:
            lines = [f"no change of mesh or recomputation makes it fit and leaves {HEADROOM:.0%}"]
    if figure is not None:
        draw_modes(config, figure, gpu, name)
        rows["picture"] = str(figure)
    return Section("Memory", values, [*named_rows(rows), *lines])


def draw_modes(config: Config, file: Path | BinaryIO, gpu: Gpu | None = None, name: str = "") -> None:
    """Draw the memory of a validated config and of the same with each recomputation mode; `name` is for the title."""
    from mjax.pictures.plan import draw_memory  # matplotlib takes a second to import

    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    modes = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in RECOMPUTE:
            changed = with_values(config, {"mesh.sequence_parallel": split, "train.recompute": recompute})
            if can_run_layers(changed):
                modes[recompute + ", sequence parallel" * split] = predict_memory(changed).parts
    heading = f"Memory of a device by recomputation mode{', for ' * bool(name)}{name}"
    micro_batch, attention = config.train.micro_batch, config.model.attention
    about = f"{in_words(config.mesh, PIPE)}, micro-batches of {micro_batch}, attention by {attention}"
    draw_memory(modes, file, heading, about, gpu, HEADROOM)
