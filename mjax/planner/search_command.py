"""The search of `mjax plan --gpu … --devices …`: another batch, refusals, progress, the report, the written config.

Each refusal of a number of GPUs names one that works.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

from mjax.cluster.hardware import Gpu, gpu_named
from mjax.config import Config, DataConfig, MeshConfig
from mjax.config.batch_size import BatchSizes, at_batch
from mjax.config.checks import validate
from mjax.config.kernels import attention_on_gpu
from mjax.errors import UsageError, suggestion
from mjax.models.build import count_parameters
from mjax.planner.calibration import WIDTHS, Calibration
from mjax.planner.memory import HEADROOM, free_share, least_memory, predict_memory
from mjax.planner.search import (
    SEARCHED,
    WITHIN,
    Alternative,
    Bounds,
    Candidate,
    MemoryOf,
    SearchResult,
    TimeOf,
    alternatives,
    batch_unit,
    candidates,
    compared_fields,
    describe,
    divisors,
    rank,
    search,
    value_of,
    with_values,
    word,
)
from mjax.planner.search_flags import WIDTH, SearchArguments
from mjax.planner.section import Section, good_to
from mjax.planner.time import LeastTime, StepTime, TimePredictor, run_tokens
from mjax.utils.figures import GIB, table
from mjax.utils.progress import progress

INDEPENDENT_OF_BATCH = (
    "mesh.model", "mesh.sequence_parallel", "mesh.schedule", "mesh.zero", "train.recompute", "train.loss_chunks",
)  # fmt: skip
LARGEST = 16_384
"""The largest number of GPUs tried when looking for how many are enough."""


@dataclass(frozen=True)
class Question:
    """The question of a search.

    Attributes:
      name: of the config.
      config: as given, with its own mesh.
      gpu: the GPU and its server.
      price: of a GPU-hour, or None.
      top: number of candidates to show.
      time_of: seconds of a step.
    """

    name: str
    config: Config
    gpu: Gpu
    price: float | None
    top: int
    time_of: TimeOf

    @property
    def hardware(self) -> str:
        """The GPU, and the size of its server if it is not the usual one."""
        usual = gpu_named(self.gpu.name).gpus_per_node
        return self.gpu.name + (f", {self.gpu.gpus_per_node} a server" * (self.gpu.gpus_per_node != usual))


Excluded = tuple[dict[str, Any] | None, str]
"""Candidates that a batch ramp-up excludes: plain values for JSON, and a sentence; None and empty if nothing."""


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
    memory_of, time_of = predictions(gpu, calibration)

    result, searched = find_all(config, devices, gpu, calibration, keep, arguments.top)
    began = time.perf_counter() - searched
    refuse_too_big(result, config, name, gpu.name, memory_of, gpu.gpus_per_node, keep)
    result = with_alternatives(result, config, gpu, calibration, keep)
    seconds = time.perf_counter() - began

    question = Question(name, config, gpu, arguments.price, arguments.top, time_of)
    excluded = excluded_by_rampup(result, config, memory_of, time_of, keep)
    section = report(result, question, seconds, arguments.write and str(arguments.write), excluded)
    return result.ranked[0].config, section, _about(result, question)


@lru_cache(maxsize=2)
def find_all(
    config: Config, devices: int, gpu: Gpu, calibration: Calibration | None, keep: tuple[str, ...], top: int
) -> tuple[SearchResult, float]:
    """`find` among all candidates, once for a config that is searched again, and the seconds that it took."""
    began = time.perf_counter()
    return find(config, devices, gpu, calibration, keep, top=top), time.perf_counter() - began


def find(
    config: Config, devices: int, gpu: Gpu, calibration: Calibration | None, keep: Collection[str] = (), **ranked: Any
) -> SearchResult:
    """The fastest ways to run `config` on this many GPUs, with a progress bar on a terminal.

    `ranked` are arguments of `search`: `top`, `within`, `among`.
    """
    memory_of, time_of = predictions(gpu, calibration)
    bar, bounds = partial(progress, "searching", transient=True), bounds_on(gpu, calibration)
    return search(config, devices, memory_of, time_of, gpu.usable_bytes, keep, bar, gpu.host_bytes, bounds, **ranked)


def with_alternatives(
    result: SearchResult, config: Config, gpu: Gpu, calibration: Calibration | None, keep: Collection[str] = ()
) -> SearchResult:
    """Add the fastest candidate with another value, for each field that is the same in all ranked candidates."""
    best = result.ranked[0].config
    for name in compared_fields(best):
        field = attrgetter(name)
        value = field(best)
        others = [config for config in result.slower if field(config) != value]
        if others and all(field(candidate.config) == value for candidate in result.ranked):
            more = find(config, result.devices, gpu, calibration, keep, top=1, within=1.0, among=others)
            tried = set(others).difference(more.slower)
            result = replace(
                result,
                roomy=sorted(result.roomy + more.roomy, key=rank),
                tight=sorted(result.tight + more.tight, key=rank),
                too_big=result.too_big + more.too_big,
                without_host=result.without_host + more.without_host,
                slower=tuple(config for config in result.slower if config not in tried),
            )
    return result


@lru_cache(maxsize=4)
def bounds_on(gpu: Gpu, calibration: Calibration | None) -> Bounds:
    """The bounds of configs on a GPU."""
    return Bounds(LeastTime(gpu, calibration), partial(least_memory, capability=gpu.compute_capability))


@lru_cache(maxsize=4)
def predictions(gpu: Gpu, calibration: Calibration | None) -> tuple[MemoryOf, TimeOf]:
    """The functions that predict the memory and the time of a config on a GPU."""
    return (
        partial(predict_memory, capability=gpu.compute_capability),
        TimePredictor(gpu, calibration),
    )


def _about(result: SearchResult, question: Question) -> str:
    """Docstring of the written config: what it is and how it was chosen."""
    best, config = result.ranked[0], question.config
    spent = cost(best, result.devices, question.price)
    mfu = "" if best.time.mfu is None else f", {best.time.mfu:.1%} MFU"
    rows = {
        "parameters": f"{count_parameters(config.model):,}",
        "hardware": f"{result.devices:,} × {question.hardware}: {describe(best.config)}",
        "predicted": f"{best.time.total:.3g} s a step ({good_to(best.time.error)}), {best.time.model_tflops:.0f} model "
        f"TFLOP/s a GPU{mfu}; {best.memory.total / GIB:.1f} of {result.capacity / GIB:.1f} GiB a GPU",
        "cost": f"{run_tokens(config):,} tokens in {spent.days:.3g} days, {spent.gpu_hours:,.0f} GPU-hours",
        "chosen": f"by `mjax plan`: the fastest of {len(result.ranked):,} ways that fit, of {result.tried:,} to run "
        f"{question.name} at a global batch of {config.train.global_batch:,}; model and learning rate are its own",
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
        usual = _usual_counts(gpus_per_node)
        sides = [n for n in reversed(usual) if n < devices], [n for n in usual if n > devices]
        nearest = (next((n for n in side if any(candidates(config, n, keep))), None) for side in sides)
        counts = [count for count in nearest if count is not None]
        layers, heads, batch = config.model.layers, config.model.heads, config.train.global_batch
        unit = batch_unit(config)
        rampup = f" that grows there by multiples of {unit}" if unit != batch else ""
        kept = f" with {', '.join(keep)} kept" if keep else ""
        use = f"use --devices {' or '.join(map(str, counts))}" if counts else "give it another --target-batch"
        raise UsageError(
            f"--devices {devices} cannot be divided among {layers} layers, {heads} heads and a global batch of {batch}"
            f"{rampup}{kept}; {use}"
        )


def refuse_too_big(
    result: SearchResult,
    config: Config,
    name: str,
    gpu: str,
    memory_of: MemoryOf,
    gpus_per_node: int,
    keep: Collection[str],
) -> None:
    """Refuse a search in which nothing fits, with the closest candidate, and how many GPUs would be enough.

    Raises:
      UsageError: nothing fits.
    """
    if result.ranked:
        return
    if not result.too_big:
        raise UsageError(
            f"all {result.tried:,} ways to run {name} on {result.devices} × {gpu} need more host memory than there is; "
            "leave out --keep train.recompute"
        )
    nearest, least = _smallest(result.too_big, memory_of)
    enough = enough_devices(config, result.devices, memory_of, result.capacity, gpus_per_node, keep)
    advice = f"use --devices {enough}, where it fits" if enough else f"no number up to {LARGEST:,} is enough either"
    raise UsageError(
        f"none of {result.tried:,} ways to run {name} on {result.devices} × {gpu} fits: the smallest, "
        f"{describe(nearest)}, takes {least / GIB:.1f} GiB of {result.capacity / GIB:.1f}; {advice}"
    )


def _smallest(too_big: list[tuple[Config, float]], memory_of: MemoryOf) -> tuple[Config, float]:
    """The candidate that takes least, and its bytes; candidates come with a lower bound."""
    nearest, least = too_big[0][0], math.inf
    for candidate, at_least in sorted(too_big, key=lambda pair: pair[1]):
        if at_least >= least:
            break
        nearest, least = min((nearest, least), (candidate, memory_of(candidate).total), key=lambda pair: pair[1])
    return nearest, least


def enough_devices(
    config: Config,
    devices: int,
    memory_of: MemoryOf,
    capacity: float,
    gpus_per_node: int,
    keep: Collection[str] = (),
) -> int | None:
    """The smallest number of GPUs above `devices` on which a frugal candidate leaves HEADROOM free, or None.

    Only candidates with one sequence per micro-batch, full recomputation and one chunk are tried: those that need least
    memory. So the answer is enough; that fewer would not be is likely, not certain.
    """
    # The minimum on a device: float32 masters and two moments, with Muon one, divided over all.
    # Frozen weights are as they are stored.
    trained, each = count_parameters(config.model, trained=True), 12 if config.optimizer.name == "adamw" else 8
    frozen = count_parameters(config.model) - trained
    needed = (each * trained + WIDTHS[config.precision.compute] * frozen) / capacity
    thrifty = {"train.micro_batch": 1, "train.recompute": "full", "mesh.chunks": 1}
    free = {name: value for name, value in thrifty.items() if name not in keep}
    small = with_values(config, free)
    for count in _usual_counts(gpus_per_node):
        if count <= max(devices, int(needed) - 1):
            continue
        needs = (memory_of(candidate).total for candidate in candidates(small, count, {*keep, *free}))
        if any(free_share(needed, capacity) >= HEADROOM for needed in needs):
            return count
    return None


def _usual_counts(gpus_per_node: int) -> list[int]:
    """Common numbers of GPUs: whole servers, or a half, a quarter … of one."""
    parts = [n for n in range(1, gpus_per_node) if gpus_per_node % n == 0]
    return [*parts, *range(gpus_per_node, LARGEST + 1, gpus_per_node)]


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


# --- A batch ramp-up --------------------------------------------------------------------------------------------------


def excluded_by_rampup(
    result: SearchResult, config: Config, memory_of: MemoryOf, time_of: TimeOf, keep: Collection[str] = ()
) -> Excluded:
    """Candidates that the ramp-up or schedule of the batch excludes, because each of its sizes has to divide.

    Args:
      result: with at least one candidate that fits.
      config, memory_of, time_of, keep: as passed to `search`.
    """
    train, unit, best = config.train, batch_unit(config), result.ranked[0]
    if unit == train.global_batch:
        return None, ""
    rampup = train.batch_rampup
    ramp = "" if rampup is None else f"--train.batch-rampup {' '.join(map(str, rampup))}"
    flag = ramp or f"--train.batch-schedule '{train.batch_schedule}'"
    values = {"flag": flag, "unit": unit, "seconds": None, "left_out": None, "needs": None}
    start = (
        f"{flag} narrows the search: what is left divides each of its {len(BatchSizes.of(config).sizes())} batch "
        f"sizes, multiples of {unit}"
    )
    # All candidates at the full batch take minutes, so fields that do not depend on divisors of the batch are fixed.
    fixed = {name: value_of(best.config, name) for name in INDEPENDENT_OF_BATCH}
    whole = with_values(at_batch(config, train.global_batch), fixed)
    first = search(whole, result.devices, memory_of, time_of, result.capacity, {*keep, *fixed}).ranked[:1]
    if not first or float(f"{first[0].time.total:.4g}") >= float(f"{best.time.total:.4g}"):
        return values, f"{start}; nothing like the best would be faster without it"

    faster, seconds = first[0].config, first[0].time.total
    mesh, micro_batch = faster.mesh, faster.train.micro_batch
    needs, product = mesh.data * micro_batch, f"data {mesh.data} × micro-batch {micro_batch}"
    if mesh.chunks > 1:
        needs, product = needs * mesh.pipe, f"{product} × pipe {mesh.pipe} for the chunks"
    instead = f": --train.batch-rampup {needs} {needs} {rampup[2]}" if rampup and needs < train.global_batch else ""
    return values | {"seconds": seconds, "left_out": describe(faster), "needs": needs}, (
        f"{start}. It leaves out {describe(faster)}: {seconds:.3g} s at the whole batch, "
        f"{seconds / best.time.total - 1:+.1%}. That takes sizes that are multiples of {needs} ({product}){instead}"
    )


# --- The report: the fastest candidates, what holds them back, what each choice is worth ------------------------------


def report(
    result: SearchResult,
    question: Question,
    seconds: float,
    written: str | None = None,
    excluded: Excluded = (None, ""),
) -> Section:
    """The section `search` of a plan.

    Args:
      result: with at least one candidate that fits.
      question: the question of the search.
      seconds: duration of the search.
      written: the file into which the best was written.
      excluded: candidates that a batch ramp-up excludes.
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
            "alternatives": [_alternative_values(other) for other in others],
            "own": None if rank is None else {"rank": rank, "seconds": result.ranked[rank - 1].time.mean},
            "narrowed": excluded[0],
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
            *filter(None, [excluded[1], f"written to {written}" if written else ""]),
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


def _reasons(result: SearchResult, others: list[Alternative]) -> list[str]:
    best = result.ranked[0]
    lines = [f"1 before 2: {_faster_by(best.time, result.ranked[1].time)}", ""] if len(result.ranked) > 1 else []
    rows = []
    for other in others:
        if other.candidate is None:
            what = "nothing fits" if other.least > result.capacity else f"nothing leaves {HEADROOM:.0%} free"
            verdict = f"{what}: {other.least / GIB:.1f} GiB at least"
        else:
            verdict = _compared(other.candidate.time, best.time)
        rows.append([other.field, word(other.best), word(other.value), verdict, ", ".join(other.others(best.config))])
    return lines + table(["what a choice is worth", "best", "else", "the fastest so", "which also has"], rows, left=5)


def _compared(time: StepTime, best: StepTime) -> str:
    """The seconds per step of a candidate, and the difference from the best one."""
    return f"{time.mean:.3g} s, {time.mean / best.mean - 1:+.1%}"


def _faster_by(first: StepTime, second: StepTime) -> str:
    """Parts in which the second of two candidates takes more, or less, time."""
    change = second.mean - first.mean
    if abs(change) < 1e-4 * first.mean:
        return "the same time to four digits; the simpler one comes first"
    parts = {name: second.parts[name] - seconds for name, seconds in first.parts.items()}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:3]
    words = [f"{name} {1e3 * parts[name]:+,.1f} ms" for name in largest if abs(parts[name]) > 0.05 * abs(change)]
    where = "" if first.mean == first.total else "at the whole batch: "
    return f"2 takes {1e3 * change:,.1f} ms more ({where}{', '.join(words)})"


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
        verdict = _own_verdict(result, config, question.time_of)
        lines.append(f"the config's own mesh, {describe(config)}: {verdict}")
    if warning := tight_warning(result):
        lines.append(warning)
    elif result.tight and result.tight[0].time.mean < best.time.mean:
        fast = result.tight[0]
        lines.append(
            f"not ranked, because it leaves {result.free(fast):.1%} of the memory free and the prediction may be off "
            f"by {HEADROOM:.0%}: {describe(fast.config)}, {_compared(fast.time, best.time)}"
        )
    without, capability = best.config, question.gpu.compute_capability
    if config.model.attention_dropout > 0:  # a model of one's own may have no such field
        without = with_values(best.config, {"model.attention_dropout": 0.0})
    if attention_on_gpu(best.config, capability) != attention_on_gpu(without, capability):
        change = question.time_of(without).total / best.time.total - 1
        less = f"{abs(change):.1%} {'less' if change < 0 else 'more'} time"
        lines.append(
            f"attention dropout {config.model.attention_dropout:g} rules out cuDNN's attention; with "
            f"--model.attention-dropout 0 the best would take {less}, and others may fit"
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


def _own_verdict(result: SearchResult, config: Config, time_of: TimeOf) -> str:
    best, rank = result.ranked[0], _own_rank(result, config)
    if rank is not None:
        return f"{_compared(result.ranked[rank - 1].time, best.time)}, rank {rank:,}"
    for tight in result.tight:
        if _is_own(tight.config, config):
            free = f"it leaves {result.free(tight):.1%} of the memory free"
            return f"{_compared(tight.time, best.time)}, not ranked: {free}"
    for slower in result.slower:
        if _is_own(slower, config):
            return f"{_compared(time_of(slower), best.time)}, not ranked"
    sizes = [size for candidate, size in result.too_big if _is_own(candidate, config)]
    return f"{sizes[0] / GIB:.1f} GiB at least, which is too big" if sizes else "is not among those that were tried"


def _own_rank(result: SearchResult, config: Config) -> int | None:
    """Return the rank of the config itself among those that fit, counted from 1."""
    return next((rank for rank, ranked in enumerate(result.ranked, 1) if _is_own(ranked.config, config)), None)


def _is_own(candidate: Config, config: Config) -> bool:
    """True if a candidate is the config itself; the flag of sequence parallelism means nothing with `model` 1."""
    flag = config.mesh.sequence_parallel if config.mesh.model == 1 else candidate.mesh.sequence_parallel
    return replace(candidate, mesh=replace(candidate.mesh, sequence_parallel=flag)) == config


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


def _alternative_values(other: Alternative) -> dict[str, Any]:
    candidate, values = other.candidate, {"field": other.field, "best": other.best, "else": other.value}
    if candidate is None:
        return values | {"seconds": None, "settings": None, "bytes": other.least}
    time, memory = candidate.time, candidate.memory
    return values | {"seconds": time.mean, "settings": _settings(candidate.config), "bytes": memory.total}


def _settings(config: Config) -> dict[str, Any]:
    """The fields in which candidates differ, by dotted name."""
    return {name: value_of(config, name) for name in SEARCHED}
