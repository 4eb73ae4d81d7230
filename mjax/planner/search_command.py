"""The search of `mjax plan --gpu … --devices …`: another batch, refusals, progress, the report, the written config.

Each refusal of a number of GPUs names one that works.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from mjax.cluster.hardware import GIB, Gpu, gpu_named
from mjax.config import Config, DataConfig, MeshConfig
from mjax.config.batch_size import BatchSizes, at_batch
from mjax.config.checks import validate
from mjax.errors import UsageError, suggestion
from mjax.models.build import count_parameters
from mjax.models.kernels import attention_on_gpu
from mjax.planner.calibration import Calibration
from mjax.planner.memory import HEADROOM, free_share, least_memory, predict_memory
from mjax.planner.search import (
    SEARCHED,
    WITHIN,
    Alternative,
    Bounds,
    Candidate,
    Found,
    MemoryOf,
    TimeOf,
    alternatives,
    batch_unit,
    candidates,
    compared,
    describe,
    divisors,
    rank,
    search,
    value_of,
    with_values,
    word,
)
from mjax.planner.search_flags import WIDTH, SearchArguments
from mjax.planner.section import Section, good_to, table
from mjax.planner.time import LeastTime, StepTime, predict_time, run_tokens

LIKE_THE_BEST = (
    "mesh.model",
    "mesh.sequence_parallel",
    "mesh.schedule",
    "mesh.zero",
    "train.recompute",
    "train.loss_chunks",
)
"""Fields that do not depend on divisors of the batch. They are kept: all ways at the full batch take minutes."""
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
      kernel_of: the attention kernel of a config on the GPU.
    """

    name: str
    config: Config
    gpu: Gpu
    price: float | None
    top: int
    time_of: TimeOf
    kernel_of: Callable[[Config], str]

    @property
    def hardware(self) -> str:
        """The GPU, and the size of its server if it is not the usual one."""
        usual = gpu_named(self.gpu.name).gpus_per_node
        return self.gpu.name + (f", {self.gpu.gpus_per_node} a server" * (self.gpu.gpus_per_node != usual))


LeftOut = tuple[dict[str, Any] | None, str]
"""What a batch ramp-up excludes from a search: plain values for JSON, and a sentence; None and empty if nothing."""


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
    kernel_of = partial(attention_on_gpu, capability=gpu.compute_capability)
    memory_of, time_of = predictions(gpu, calibration)

    began = time.perf_counter()
    found = find(config, devices, gpu, calibration, keep, top=arguments.top)
    refuse_too_big(found, config, name, gpu.name, memory_of, gpu.gpus_per_node, keep)
    found = with_alternatives(found, config, gpu, calibration, keep)
    seconds = time.perf_counter() - began

    question = Question(name, config, gpu, arguments.price, arguments.top, time_of, kernel_of)
    best, file = found.ranked[0].config, arguments.write
    left_out = narrowed(found, config, memory_of, time_of, keep)
    section = report(found, question, seconds, None if file is None else str(file), left_out)
    return best, section, _about(found, question)


def find(
    config: Config, devices: int, gpu: Gpu, calibration: Calibration | None, keep: Collection[str] = (), **ranked: Any
) -> Found:
    """The fastest ways to run `config` on this many GPUs, with a progress bar on a terminal; `ranked` as for `search`:
    `top`, `within`, `among`."""
    bounds = Bounds(LeastTime(gpu, calibration), partial(least_memory, capability=gpu.compute_capability))
    memory_of, time_of = predictions(gpu, calibration)
    return search(
        config, devices, memory_of, time_of, gpu.usable_bytes, keep, _showing, gpu.host_bytes, bounds, **ranked
    )


def with_alternatives(
    found: Found, config: Config, gpu: Gpu, calibration: Calibration | None, keep: Collection[str] = ()
) -> Found:
    """`found` with the fastest candidate that has another value, of each field of which all that are ranked have the
    same."""
    best = found.ranked[0].config
    for name in compared(best):
        value = value_of(best, name)
        others = [each for each in found.slower if value_of(each, name) != value]
        if others and all(value_of(each.config, name) == value for each in found.ranked):
            also = find(config, found.devices, gpu, calibration, keep, top=1, within=1.0, among=others)
            tried = set(others).difference(also.slower)
            found = replace(
                found,
                roomy=sorted(found.roomy + also.roomy, key=rank),
                tight=sorted(found.tight + also.tight, key=rank),
                too_big=found.too_big + also.too_big,
                without_host=found.without_host + also.without_host,
                slower=tuple(each for each in found.slower if each not in tried),
            )
    return found


def predictions(gpu: Gpu, calibration: Calibration | None) -> tuple[MemoryOf, TimeOf]:
    """The functions that predict the memory and the time of a config on a GPU."""
    return (
        partial(predict_memory, capability=gpu.compute_capability),
        partial(predict_time, gpu=gpu, calibration=calibration),
    )


@contextmanager
def _showing(total: int) -> Iterator[Callable[[int], None]]:
    """On a terminal a progress bar, after the first second."""
    from mjax.utils.progress import progress

    began, before, show = time.perf_counter(), 0, None

    def advance(done: int) -> None:
        nonlocal before, show
        before += done
        if show is None and time.perf_counter() - began > 1:
            show, done = bar.enter_context(progress("searching", total, transient=True)), before
        if show is not None:
            show(done)

    with ExitStack() as bar:
        yield advance


def _about(found: Found, question: Question) -> str:
    """Docstring of the written config: what it is and how it was chosen."""
    best, config = found.ranked[0], question.config
    spent = cost(best, found.devices, question)
    mfu = "" if best.time.mfu is None else f", {best.time.mfu:.1%} MFU"
    rows = {
        "parameters": f"{count_parameters(config.model):,}",
        "hardware": f"{found.devices:,} × {question.hardware}: {describe(best.config)}",
        "predicted": f"{best.time.total:.3g} s a step ({good_to(best.time.error)}), {best.time.model_tflops:.0f} model "
        f"TFLOP/s a GPU{mfu}; {best.memory.total / GIB:.1f} of {found.capacity / GIB:.1f} GiB a GPU",
        "cost": f"{run_tokens(config):,} tokens in {spent.days:.3g} days, {spent.gpu_hours:,.0f} GPU-hours",
        "chosen": f"by `mjax plan`: the fastest of {len(found.ranked):,} ways that fit, of {found.tried:,} to run "
        f"{question.name} at a global batch of {config.train.global_batch:,}; model and learning rate are its own",
    }
    if warning := tight_warning(found):
        rows["memory"] = warning
    lines = [
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<13}", subsequent_indent=" " * 13)
        for name, text in rows.items()
    ]
    return f"{question.name} for {found.devices:,} × {question.hardware}, found by the planner.\n\n" + "\n".join(lines)


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
        kept = f" with {', '.join(keep)} kept" if keep else ""
        use = f"use --devices {' or '.join(map(str, counts))}" if counts else "give it another --target-batch"
        raise UsageError(
            f"--devices {devices} cannot be divided among {layers} layers, {heads} heads and a global batch of {batch}"
            f"{_of_rampup(config)}{kept}; {use}"
        )


def refuse_too_big(
    found: Found, config: Config, name: str, gpu: str, memory_of: MemoryOf, gpus_per_node: int, keep: Collection[str]
) -> None:
    """Refuse a search in which nothing fits, with the closest candidate, and how many GPUs would be enough.

    Raises:
      UsageError: nothing fits.
    """
    if found.ranked:
        return
    if not found.too_big:
        raise UsageError(
            f"all {found.tried:,} ways to run {name} on {found.devices} × {gpu} need more host memory than there is; "
            "leave out --keep train.recompute"
        )
    nearest, least = _smallest(found.too_big, memory_of)
    enough = enough_devices(config, found.devices, memory_of, found.capacity, gpus_per_node, keep)
    advice = f"use --devices {enough}, where it fits" if enough else f"no number up to {LARGEST:,} is enough either"
    raise UsageError(
        f"none of {found.tried:,} ways to run {name} on {found.devices} × {gpu} fits: the smallest, "
        f"{describe(nearest)}, takes {least / GIB:.1f} GiB of {found.capacity / GIB:.1f}; {advice}"
    )


def _smallest(too_big: list[tuple[Config, float]], memory_of: MemoryOf) -> tuple[Config, float]:
    """The candidate that takes least, and its bytes; each comes with what it takes at least."""
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
    """The smallest number of GPUs above `devices` on which a frugal candidate leaves HEADROOM free, or None if none was
    found.

    Only candidates with one sequence per micro-batch, full recomputation and one chunk are tried: those that need least
    memory. So the answer is enough; that fewer would not be is likely, not certain.
    """
    # The minimum on a device: float32 masters and two moments, with Muon one, divided over all.
    needed = (12 if config.optimizer.name == "adamw" else 8) * count_parameters(config.model) / capacity
    thrifty = {"train.micro_batch": 1, "train.recompute": "full", "mesh.chunks": 1}
    free = {name: value for name, value in thrifty.items() if name not in keep}
    small = with_values(config, free)
    for count in _usual_counts(gpus_per_node):
        if count <= max(devices, int(needed) - 1):
            continue
        needs = (memory_of(each).total for each in candidates(small, count, {*keep, *free}))
        if any(free_share(each, capacity) >= HEADROOM for each in needs):
            return count
    return None


def _of_rampup(config: Config) -> str:
    train = config.train
    if train.batch_rampup is None and train.batch_schedule is None:
        return ""
    return f" that grows there by multiples of {batch_unit(config)}"


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


def narrowed(found: Found, config: Config, memory_of: MemoryOf, time_of: TimeOf, keep: Collection[str] = ()) -> LeftOut:
    """Candidates that the ramp-up or schedule of the batch excludes from a search, since each of its sizes has to
    divide.

    Args:
      found: with at least one candidate that fits.
      config, memory_of, time_of, keep: as passed to `search`.
    """
    train, unit, best = config.train, batch_unit(config), found.ranked[0]
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
    like = {name: value_of(best.config, name) for name in LIKE_THE_BEST}
    whole = with_values(at_batch(config, train.global_batch), like)
    first = search(whole, found.devices, memory_of, time_of, found.capacity, {*keep, *like}).ranked[:1]
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
    found: Found, question: Question, seconds: float, written: str | None = None, left_out: LeftOut = (None, "")
) -> Section:
    """The section `search` of a plan.

    Args:
      found: with at least one candidate that fits.
      question: the question of the search.
      seconds: duration of the search.
      written: the file into which the best was written.
      left_out: excluded by a batch ramp-up.
    """
    shown = found.ranked[: question.top]
    costs = [cost(each, found.devices, question) for each in shown]
    others, rank = alternatives(found), _own_rank(found, question.config)
    return Section(
        title=f"Search: {question.name} on {found.devices:,} × {question.hardware}",
        values={
            "gpu": question.gpu.name,
            "devices_per_node": question.gpu.gpus_per_node,
            "network_bytes_per_second": question.gpu.network_bandwidth_per_node,
            "devices": found.devices,
            "global_batch": question.config.train.global_batch,
            "tokens": run_tokens(question.config),
            "usable_bytes": found.capacity,
            "tried": found.tried,
            "too_big": len(found.too_big),
            "tight": len(found.tight),
            "without_host": found.without_host,
            "slower": len(found.slower),
            "seconds": seconds,
            "best": [_values(*each) for each in zip(shown, costs, strict=True)],
            "alternatives": [_alternative_values(each) for each in others],
            "own": None if rank is None else {"rank": rank, "seconds": found.ranked[rank - 1].time.mean},
            "narrowed": left_out[0],
            "written": written,
        },
        lines=[
            f"{found.tried:,} ways to run it: {len(found.too_big):,} are too big for {found.capacity / GIB:.1f} GiB, "
            f"{len(found.tight):,} leave less than {HEADROOM:.0%} of it free, "
            + (f"{found.without_host:,} need more host memory than there is, " if found.without_host else "")
            + f"{len(found.roomy):,} fit"
            + (f", and {len(found.slower):,} take {WITHIN - 1:.0%} longer or more" if found.slower else "")
            + f" ({seconds:.1f} s)",
            "",
            *_table(found, shown, costs),
            "",
            *_reasons(found, others),
            "",
            *_remarks(found, question, costs[0]),
            *filter(None, [left_out[1], f"written to {written}" if written else ""]),
        ],
    )


# --- The report: cost -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Cost of the whole run: days, GPU-hours, and money if a GPU-hour has a price."""

    days: float
    gpu_hours: float
    money: float | None


def cost(candidate: Candidate, devices: int, question: Question) -> Cost:
    """The cost of all steps of a candidate."""
    hours = candidate.time.mean * candidate.config.train.steps / 3600
    return Cost(hours / 24, hours * devices, None if question.price is None else hours * devices * question.price)


# --- The report: lines ------------------------------------------------------------------------------------------------


# Columns that are left out where every row has this.
OPTIONAL = {"expert": 1, "context": "1", "loss chunks": "-", "host GiB": "-", "cost": "-"}


def _table(found: Found, shown: list[Candidate], costs: list[Cost]) -> list[str]:
    pairs = enumerate(zip(shown, costs, strict=True), 1)
    rows = [_cells(number, candidate, spent, found) for number, (candidate, spent) in pairs]
    header = [name for name in rows[0] if any(row[name] != OPTIONAL.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows])


def _cells(number: int, candidate: Candidate, spent: Cost, found: Found) -> dict[str, Any]:
    config, memory, time = candidate.config, candidate.memory, candidate.time
    mesh, train = config.mesh, config.train
    chunks = f" × {mesh.chunks}" if mesh.chunks > 1 else ""
    return {
        "": number, "pipe": mesh.pipe, "data": mesh.data, "expert": mesh.expert,
        "context": f"{mesh.context} ({config.across})" if config.across else "1", "model": mesh.model,
        "schedule": f"{mesh.schedule}{chunks}" if mesh.pipe > 1 else "-", "micro-batch": train.micro_batch,
        "recompute": train.recompute, "seq. par.": "yes" if mesh.splits_tokens else "-", "ZeRO": mesh.zero or "-",
        "loss chunks": train.loss_chunks if train.loss_chunks > 1 else "-", "s/step": f"{time.mean:.3g}",
        "TFLOP/s": f"{time.model_tflops:.0f}", "MFU": "-" if time.mfu is None else f"{time.mfu:.1%}",
        "GiB": f"{memory.total / GIB:.1f}", "host GiB": f"{memory.host / GIB:.1f}" if memory.host else "-",
        "days": f"{spent.days:.3g}", "GPU-hours": f"{spent.gpu_hours:,.0f}",
        "cost": f"{spent.money:,.0f}" if spent.money else "-", "held back by": held_back_by(candidate, found),
    }  # fmt: skip


def held_back_by(candidate: Candidate, found: Found) -> str:
    """The parts that take most time besides the matrix products, and the memory if too little of it is free."""
    parts = {name: seconds for name, seconds in candidate.time.parts.items() if name != "matmul"}
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    words = [f"{name} {parts[name] / candidate.time.total:.0%}" for name in largest if parts[name] > 0]
    free = found.free(candidate)
    return ", ".join([*words, *([f"memory, {free:.1%} free"] if free < HEADROOM else [])])


def _reasons(found: Found, others: list[Alternative]) -> list[str]:
    best = found.ranked[0]
    lines = []
    if len(found.ranked) > 1:
        lines += [f"1 before 2: {faster_by(best, found.ranked[1])}", ""]
    rows = []
    for other in others:
        if other.candidate is None:
            what = "nothing fits" if other.least > found.capacity else f"nothing leaves {HEADROOM:.0%} free"
            verdict = f"{what}: {other.least / GIB:.1f} GiB at least"
        else:
            verdict = _beside(other.candidate.time, best.time)
        with_it = ", ".join(other.others(best.config))
        rows.append([other.field, word(other.best), word(other.value), verdict, with_it])
    return lines + table(["what a choice is worth", "best", "else", "the fastest so", "which also has"], rows, left=5)


def _beside(time: StepTime, best: StepTime) -> str:
    """The seconds per step of a candidate, and the difference from the best one."""
    return f"{time.mean:.3g} s, {time.mean / best.mean - 1:+.1%}"


def faster_by(first: Candidate, second: Candidate) -> str:
    """Parts in which the second of two candidates takes more, or less, time."""
    change = second.time.mean - first.time.mean
    if abs(change) < 1e-4 * first.time.mean:
        return "the same time to four digits; the simpler one comes first"
    parts = {name: second.time.parts[name] - seconds for name, seconds in first.time.parts.items()}
    largest = sorted(parts, key=lambda name: -abs(parts[name]))[:3]
    words = [f"{name} {1e3 * parts[name]:+,.1f} ms" for name in largest if abs(parts[name]) > 0.05 * abs(change)]
    where = "" if first.time.mean == first.time.total else "at the whole batch: "
    return f"2 takes {1e3 * change:,.1f} ms more ({where}{', '.join(words)})"


def _remarks(found: Found, question: Question, spent: Cost) -> list[str]:
    best, config = found.ranked[0], question.config
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
    if config.mesh.devices == found.devices:
        verdict = _own_verdict(found, config, question.time_of)
        lines.append(f"the config's own mesh, {describe(config)}: {verdict}")
    if warning := tight_warning(found):
        lines.append(warning)
    elif found.tight and found.tight[0].time.mean < best.time.mean:
        fast = found.tight[0]
        lines.append(
            f"not ranked, because it leaves {found.free(fast):.1%} of the memory free and the prediction may be off by "
            f"{HEADROOM:.0%}: {describe(fast.config)}, {_beside(fast.time, best.time)}"
        )
    without = replace(best.config, model=replace(best.config.model, attention_dropout=0.0))
    if question.kernel_of(best.config) != question.kernel_of(without):
        change = question.time_of(without).total / best.time.total - 1
        less = f"{abs(change):.1%} {'less' if change < 0 else 'more'} time"
        lines.append(
            f"attention dropout {config.model.attention_dropout:g} rules out cuDNN's attention; with "
            f"--model.attention-dropout 0 the best would take {less}, and others may fit"
        )
    return lines


def tight_warning(found: Found) -> str:
    """A warning if no candidate leaves enough memory free; else an empty string."""
    if found.roomy:
        return ""
    return (
        f"warning: no way to run it leaves {HEADROOM:.0%} of the memory free, by which the prediction may be off; the "
        f"best leaves {found.free(found.ranked[0]):.1%} and may not fit"
    )


def _own_verdict(found: Found, config: Config, time_of: TimeOf) -> str:
    best, rank = found.ranked[0], _own_rank(found, config)
    if rank is not None:
        return f"{_beside(found.ranked[rank - 1].time, best.time)}, rank {rank:,}"
    for tight in found.tight:
        if _is_own(tight.config, config):
            return f"{_beside(tight.time, best.time)}, not ranked: it leaves {found.free(tight):.1%} of the memory free"
    sizes = [size for each, size in found.too_big if _is_own(each, config)]
    for slower in filter(lambda each: _is_own(each, config), found.slower):
        return f"{_beside(time_of(slower), best.time)}, not ranked"
    return f"{sizes[0] / GIB:.1f} GiB at least, which is too big" if sizes else "is not among those that were tried"


def _own_rank(found: Found, config: Config) -> int | None:
    """The rank of the config itself among those that fit, counted from 1."""
    ranks = (rank for rank, each in enumerate(found.ranked, 1) if _is_own(each.config, config))
    return next(ranks, None)


def _is_own(each: Config, config: Config) -> bool:
    """True if a candidate is the config itself; the flag of sequence parallelism means nothing with `model` 1."""
    flag = config.mesh.sequence_parallel if config.mesh.model == 1 else each.mesh.sequence_parallel
    return replace(each, mesh=replace(each.mesh, sequence_parallel=flag)) == config


# --- The report: plain values -----------------------------------------------------------------------------------------


def _values(candidate: Candidate, spent: Cost) -> dict[str, Any]:
    time, memory = candidate.time, candidate.memory
    return {
        **settings(candidate.config),
        "seconds": time.mean,
        "seconds_at_global_batch": time.total,
        "error": time.error,
        "parts": time.parts,
        "model_tflops": time.model_tflops,
        "mfu": time.mfu,
        "memory": {**asdict(memory), "total": memory.total},
        **asdict(spent),
    }


def _alternative_values(other: Alternative) -> dict[str, Any]:
    candidate, values = other.candidate, {"field": other.field, "best": other.best, "else": other.value}
    if candidate is None:
        return values | {"seconds": None, "settings": None, "bytes": other.least}
    time, memory = candidate.time, candidate.memory
    return values | {"seconds": time.mean, "settings": settings(candidate.config), "bytes": memory.total}


def settings(config: Config) -> dict[str, Any]:
    """The fields in which candidates differ, by dotted name."""
    return {name: value_of(config, name) for name in SEARCHED}
