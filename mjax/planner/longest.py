"""`mjax plan --gpu … --longest N`: the longest sequence that a model can be trained on with 1, 2, 4, … N GPUs.

All GPUs share one sequence at a time, over `model`, within a server, and over `context`; weights and optimizer are
sharded over all ranks (ZeRO-3), layers are recomputed, from inputs on the GPU or in host memory (`offload`), and the
loss is computed in chunks. Beside it stands the same without `context`, where GPUs that `model` leaves have sequences
of their own. A length counts if it leaves HEADROOM of the memory free, as in the search.

Memory grows with the length of a sequence, almost in proportion: attention never writes out its scores (`flash`, or
cuDNN's). So the longest is found by a few predictions along straight lines, each from a traced program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mjax.config import Config, MeshConfig
from mjax.errors import UsageError
from mjax.hardware import GIB, Gpu
from mjax.models.build import scores_in_chunks
from mjax.parallel import axes
from mjax.planner.calibration import Calibration
from mjax.planner.loss_chunks import CHUNKS
from mjax.planner.memory import HEADROOM, Memory
from mjax.planner.search import MemoryOf, divisors
from mjax.planner.search_command import predictions
from mjax.planner.section import Section, table
from mjax.planner.step_time import StepTime
from mjax.progress import progress
from mjax.validation import validate

STEP = 1024
"""Positions of a rank of `context` come in multiples of this."""
FIRST = 16
"""Steps of a rank of `context` to try first."""


@dataclass(frozen=True)
class Way:
    """A way to make room for long sequences: a name, whether GPUs share a sequence over `context`, and
    `train.recompute`."""

    name: str
    over_context: bool
    recompute: str = "full"


WAYS = (Way("over context, offloaded", True, "offload"), Way("over context", True), Way("without context", False))


@dataclass(frozen=True)
class Longest:
    """The longest sequence on a number of GPUs, in one way: the config with it, its memory and its time."""

    way: Way
    config: Config
    memory: Memory
    time: StepTime

    @property
    def devices(self) -> int:
        """Number of GPUs."""
        return self.config.mesh.devices

    @property
    def sequence(self) -> int:
        """Positions."""
        return self.config.model.sequence

    @property
    def tokens_per_second(self) -> float:
        """Of a GPU."""
        return self.config.train.global_batch * self.sequence / self.time.total / self.devices


def longest(
    config: Config,
    devices: int,
    way: Way,
    gpus_per_node: int,
    memory_of: MemoryOf,
    capacity: float,
    host: float | None = None,
) -> tuple[Config, Memory] | None:
    """The config with the longest sequence that fits on this many GPUs, and its memory; of equals that with the fewest
    ranks of `model`. None: not even `STEP` positions a rank fit.

    Args:
      config: its model and training; length, mesh, micro-batch and recomputation are replaced.
      devices: number of GPUs.
      way: how they share a sequence.
      gpus_per_node: `model` stays within them.
      memory_of: bytes of a config on its fullest device.
      capacity: bytes of a device for the program.
      host: bytes of host memory for each device; None: unknown, and taken to be enough.
    """

    def share(memory: Memory) -> float:
        return max(memory.total / ((1 - HEADROOM) * capacity), memory.host / host if host else 0.0)

    found = []
    for mesh in _meshes(config, devices, way, gpus_per_node):
        train = replace(
            config.train,
            micro_batch=1,
            global_batch=math.lcm(config.train.global_batch, mesh.data),
            batch_rampup=None,
            batch_schedule=None,
            taken=(),
            recompute=way.recompute,
            unroll="off" if way.recompute == "offload" else config.train.unroll,
            streams=1,
            loss_chunks=max(CHUNKS, config.train.loss_chunks) if scores_in_chunks(config.model) else 1,
        )

        def of(steps: int, mesh=mesh, train=train) -> Config:
            model = replace(config.model, sequence=steps * STEP * mesh.context)
            return replace(config, model=model, mesh=mesh, train=train)

        if not _runs(of(FIRST)):
            continue
        steps = largest(lambda steps, of=of: share(memory_of(of(steps))), 1.0)
        if steps:
            found.append(of(steps))
    if not found:
        return None
    best = max(found, key=lambda each: (each.model.sequence, -each.mesh.model))
    return best, memory_of(best)


def _runs(config: Config) -> bool:
    """Whether training would take a config: not with gathered keys and values if cuDNN's kernel is asked for."""
    try:
        validate(replace(config, data=replace(config.data, mock=True)))
    except UsageError:
        return False
    return True


def _meshes(config: Config, devices: int, way: Way, gpus_per_node: int) -> Iterator[MeshConfig]:
    columns = math.gcd(*config.model.columns().values())
    for model in filter(config.model.splits, divisors(math.gcd(devices, columns))):
        if model > gpus_per_node:
            continue
        others = devices // model
        data, context = (1, others) if way.over_context else (others, 1)
        yield MeshConfig(
            data=data, model=model, context=context, sequence_parallel=model > 1, zero=3 if others > 1 else 0
        )


def largest(size: Callable[[int], float], limit: float) -> int:
    """The largest number whose size is at most `limit`; 0 if there is none. Sizes grow with the number, best in
    proportion: each guess is read off a line through the two last."""
    low, high, guess, points = 0, None, FIRST, []
    while high is None or high - low > 1:
        points.append((guess, size(guess)))
        if points[-1][1] <= limit:
            low = guess
        else:
            high = guess
        guess = 2 * guess if high is None else (low + high) // 2
        if len(points) > 1:
            (first, small), (second, large) = sorted(points[-2:])
            if large > small:
                guess = int(first + (limit - small) * (second - first) / (large - small))
        guess = max(guess, low + 1)
        guess = min(guess, 8 * max(low, FIRST) if high is None else max(high - 1, 1))
    return low


def run_longest(
    config: Config, name: str, most: int, gpu: Gpu, calibration: Calibration | None, file: Path | None
) -> Section:
    """The section of a plan on the longest sequences, drawn into `file` if it is given.

    Raises:
      UsageError: `most` is no power of two, layers differ from each other, or nothing fits on any number of GPUs.
    """
    counts = [2**power for power in range(most.bit_length())]
    if counts[-1] != most:
        raise UsageError(f"--longest {most} is not a power of two; use {counts[-1]} or {2 * counts[-1]}")
    memory_of, time_of = predictions(gpu, calibration)
    found = []
    with progress("longest sequences", len(counts) * len(WAYS), transient=True) as advance:
        for way in WAYS:
            for count in counts:
                fits = longest(config, count, way, gpu.gpus_per_node, memory_of, gpu.usable_bytes, gpu.host_bytes)
                if fits is not None:
                    found.append(Longest(way, *fits, time_of(fits[0])))
                advance(1)
    if not found:
        raise UsageError(f"{name} does not fit on {most} × {gpu.name} with any length; use --longest {2 * most}")
    if file is not None:
        from mjax.pictures.longest import draw_longest

        points = {
            way.name: [(each.devices, each.sequence) for each in found if each.way == way]
            for way in WAYS
            if any(each.way == way for each in found)
        }
        draw_longest(points, file, name, gpu.name)
    values = {
        "gpu": gpu.name,
        "figure": None if file is None else str(file),
        "found": [_values(each) for each in found],
    }
    lines = table(
        ["way", "mesh", "attention", "recomputation", "GPUs", "positions", "GiB", "tokens/s a GPU", "MFU"],
        [_row(each) for each in found],
        left=4,
    )
    if file is not None:
        lines += [f"picture  {file}"]
    return Section(f"Longest sequence on {gpu.name}", values, lines)


def _values(found: Longest) -> dict:
    return {
        "devices": found.devices,
        "way": found.way.name,
        "sequence": found.sequence,
        "mesh": axes.as_typed(found.config.mesh),
        "context_attention": found.config.across,
        "recompute": found.way.recompute,
        "bytes": found.memory.total,
        "seconds": found.time.total,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.time.mfu,
    }


def _row(found: Longest) -> list[str]:
    return [
        found.way.name,
        axes.in_words(found.config.mesh),
        found.config.across or "",
        found.way.recompute,
        f"{found.devices:,}",
        f"{found.sequence:,}",
        f"{found.memory.total / GIB:.1f}",
        f"{found.tokens_per_second:,.0f}",
        "" if found.time.mfu is None else f"{found.time.mfu:.1%}",
    ]
