"""The search of `mjax plan --gpu … --devices …`: another batch, refusals, progress, the written config.

Each refusal of a number of GPUs names one that works.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from mjax.batch_size import BatchSizes, at_batch
from mjax.config import Config, DataConfig, MeshConfig, suggestion
from mjax.errors import UsageError
from mjax.hardware import GIB, Gpu
from mjax.models.build import count_parameters
from mjax.models.kernels import attention_on_gpu
from mjax.planner.calibration import Calibration
from mjax.planner.config_file import WIDTH
from mjax.planner.memory import HEADROOM, free_share, least_memory, predict_memory
from mjax.planner.search import (
    SEARCHED,
    Bounds,
    Found,
    MemoryOf,
    TimeOf,
    batch_unit,
    candidates,
    compared,
    describe,
    divisors,
    rank,
    search,
    value_of,
    with_values,
)
from mjax.planner.search_flags import SearchArguments
from mjax.planner.search_report import LeftOut, Question, cost, report, tight_warning
from mjax.planner.section import Section, good_to
from mjax.planner.time import LeastTime, predict_time
from mjax.planner.time_section import run_tokens
from mjax.validation import validate

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
    from mjax.progress import progress

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
