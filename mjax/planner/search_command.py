"""What `mjax plan` finds and says: the search of --devices, --longest; refusals, another batch, the written config.

Each refusal of a number of GPUs names one that works.
"""

from __future__ import annotations

import itertools
import textwrap
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mjax.cluster.hardware import Gpu, gpu_named
from mjax.config import Config, DataConfig, MeshConfig, axes
from mjax.config.batch_size import BatchSizes
from mjax.config.checks import validate
from mjax.config.source import WIDTH
from mjax.errors import UsageError, suggestion
from mjax.planner.calibration import Calibration
from mjax.planner.memory import HEADROOM, free_share
from mjax.planner.search import (
    SEARCHED,
    WAYS,
    WITHIN,
    Candidate,
    MemoryOf,
    SearchResult,
    Way,
    alternatives,
    batch_unit,
    candidates,
    describe,
    divisors,
    find,
    longest,
    predictions,
    value_of,
    with_values,
    word,
)
from mjax.planner.section import SearchArguments, Section, good_to
from mjax.planner.time import StepTime, run_tokens
from mjax.utils.figures import GIB, table
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
        f"{describe(nearest)}, takes at least {least / GIB:.1f} GiB of {result.capacity / GIB:.1f}; {advice}"
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
