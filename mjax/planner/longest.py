"""`mjax plan --gpu … --longest N`: the longest sequence that a model can be trained on with 1, 2, 4, … N GPUs.

A loop over the candidates of the search, at one length after the other. All GPUs share one sequence at a time, over
`model`, within a server, and over `context`; weights and optimizer are sharded over all ranks (ZeRO-3), layers are
recomputed, from inputs on the GPU or in host memory (`offload`), and the loss is computed in chunks. The same without
`context`, where GPUs that `model` leaves have separate sequences, is for comparison. A length counts if it leaves
HEADROOM of the memory free, as in the search.

Memory grows with the length of a sequence, almost in proportion: attention never writes out its scores (`flash`, or
cuDNN's). So the longest is found by a few predictions along straight lines, each from a traced program.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mjax.cluster.hardware import Gpu
from mjax.config import Config, MeshConfig, axes
from mjax.errors import UsageError
from mjax.models.build import scores_in_chunks
from mjax.planner.calibration import Calibration
from mjax.planner.memory import HEADROOM
from mjax.planner.search import CHUNKS, SEARCHED, Candidate, MemoryOf, TimeOf, candidates, search
from mjax.planner.search_command import predictions
from mjax.planner.section import Section
from mjax.utils.figures import GIB, table
from mjax.utils.progress import progress

STEP = 1024
"""Positions of a GPU, where all share a sequence, come in multiples of this."""
FIRST = 16
"""Steps to try first."""


@dataclass(frozen=True)
class Way:
    """A way to make room for long sequences: a name, whether GPUs share a sequence over `context`, and
    `train.recompute`."""

    name: str
    over_context: bool
    recompute: str = "full"


WAYS = (Way("over context, offloaded", True, "offload"), Way("over context", True), Way("without context", False))


def longest(
    config: Config,
    devices: int,
    way: Way,
    gpus_per_node: int,
    memory_of: MemoryOf,
    time_of: TimeOf,
    capacity: float,
    host: float | None = None,
) -> Candidate | None:
    """The fastest way to run the longest sequence that fits on this many GPUs; None: not even `STEP` positions a GPU
    fit.

    Args:
      config: its model and training; length, mesh, micro-batch and recomputation are replaced.
      devices: number of GPUs.
      way: how they share a sequence.
      gpus_per_node: `model` stays within them.
      memory_of, time_of, capacity, host: as in `search`.
    """
    train = replace(
        config.train,
        micro_batch=1,
        global_batch=math.lcm(config.train.global_batch, devices),
        batch_rampup=None,
        batch_schedule=None,
        taken=(),
        recompute=way.recompute,
        unroll="off" if way.recompute == "offload" else config.train.unroll,
        loss_chunks=max(CHUNKS, config.train.loss_chunks) if scores_in_chunks(config.model) else 1,
    )
    fixed = replace(config, mesh=MeshConfig(zero=3), train=train)
    keep = set(SEARCHED) - {"mesh.model", "mesh.sequence_parallel", "mesh.context" if way.over_context else "mesh.data"}
    unit = STEP * devices if way.over_context else STEP

    def ways_at(steps: int) -> list[Config]:
        longer = replace(fixed, model=replace(config.model, sequence=steps * unit))
        in_server = (way for way in candidates(longer, devices, keep) if way.mesh.model <= gpus_per_node)
        return [way for way in in_server if way.mesh.sequence_parallel == (way.mesh.model > 1)]

    def memory_share(steps: int) -> float:
        """The smallest share of the memory of device and host that a way needs."""
        memories = [memory_of(way) for way in ways_at(steps)]
        shares = [max(m.total / ((1 - HEADROOM) * capacity), m.host / host if host else 0.0) for m in memories]
        return min(shares, default=math.inf)

    steps = largest(memory_share, 1.0)
    if not steps:
        return None
    among = ways_at(steps)
    return search(fixed, devices, memory_of, time_of, capacity, SEARCHED, host=host, among=among).roomy[0]


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
    values = [_values(way, best) for way, best in results]
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


def _values(way: Way, best: Candidate) -> dict:
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
