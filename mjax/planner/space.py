"""Every way to run a config on so many devices: what the planner's search looks through.

A candidate is the config with another mesh, micro-batch and recomputation, never another model: the loss curve is the
same for all of them. What `mjax.validation` would refuse is never made, because sizes are taken from divisors:

    model         divides devices, heads, feed-forward width and padded vocabulary
    pipe          divides what is left of the devices, and the layers
    data          is the rest, and divides the global batch
    micro-batch   divides the share of the global batch that a replica has
    chunks        divide the layers of a stage, and above 1 take micro-batches in groups of `pipe`

With a ramp-up or a schedule of the batch, each of these holds for each of its sizes, so for their greatest common
divisor.

Of settings that do the same, only the simplest is a candidate: no schedule and no chunks without a pipeline, no
sequence parallelism on one rank of `model`, no ZeRO on one rank of `data`. The schedule gpipe is left out: it has the
bubble of 1f1b and holds at least as much.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product

from mjax.batch_size import BatchSizes
from mjax.config import Config, MeshConfig, suggestion
from mjax.errors import UsageError

SEARCHED = (
    "mesh.pipe", "mesh.data", "mesh.model", "mesh.sequence_parallel", "mesh.schedule", "mesh.chunks", "mesh.zero",
    "train.micro_batch", "train.recompute",
)  # fmt: skip
"""Fields in which candidates differ."""

RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "zb-h1")
ZERO = (0, 1, 3)


def candidates(config: Config, devices: int, keep: Collection[str] = ()) -> Iterator[Config]:
    """All configs with the model, data and training of `config` that use exactly `devices` devices.

    Args:
      config: valid but for its mesh, its micro-batch and its recomputation.
      devices: how many there are.
      keep: those of `SEARCHED` that stay as they are in `config`.
    """
    fixed = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in keep}
    train, unit = config.train, batch_unit(config)

    def options(name: str, possible: Sequence) -> Sequence:
        """What a field can be: if it is kept, only its own value, where that is possible."""
        return [value for value in possible if fixed.get(name, value) == value]

    for pipe, data, model in meshes(config, devices):
        if not (options("mesh.pipe", [pipe]) and options("mesh.data", [data]) and options("mesh.model", [model])):
            continue
        # Where it changes nothing, a kept value stays all the same.
        schedules = SCHEDULES if pipe > 1 else SCHEDULES[:1]
        schedules = [fixed["mesh.schedule"]] if "mesh.schedule" in fixed else schedules
        zeros = [fixed["mesh.zero"]] if "mesh.zero" in fixed else ZERO if data > 1 else ZERO[:1]
        for micro_batch in options("train.micro_batch", divisors(unit // data)):
            in_groups = pipe > 1 and unit // data // micro_batch % pipe == 0
            chunk_counts = options("mesh.chunks", divisors(config.model.layers // pipe) if in_groups else [1])
            tokens = micro_batch * config.model.choices * config.model.sequence
            by_tokens = (
                [False, True] if tokens % model == 0 and (model > 1 or "mesh.sequence_parallel" in fixed) else [False]
            )
            trains = [
                replace(train, micro_batch=micro_batch, recompute=recompute)
                for recompute in options("train.recompute", RECOMPUTE)
            ]
            for sequence_parallel, schedule, chunks, zero in product(
                options("mesh.sequence_parallel", by_tokens), schedules, chunk_counts, zeros
            ):
                mesh = MeshConfig(pipe, data, model, sequence_parallel, schedule, chunks, zero)
                for portions in trains:
                    yield replace(config, mesh=mesh, train=portions)


def meshes(config: Config, devices: int) -> Iterator[tuple[int, int, int]]:
    """(pipe, data, model) whose product is `devices` and over which the model and the global batch divide."""
    model, unit = config.model, batch_unit(config)
    matrices = math.gcd(model.heads, model.mlp_width, model.padded_vocabulary)
    for tensor in divisors(math.gcd(devices, matrices)):
        for pipe in divisors(math.gcd(devices // tensor, model.layers)):
            data = devices // (tensor * pipe)
            if unit % data == 0:
                yield pipe, data, tensor


def batch_unit(config: Config) -> int:
    """The largest number of sequences that divides every global batch of the run."""
    return math.gcd(*BatchSizes.of(config).sizes())


def divisors(n: int) -> list[int]:
    """The divisors of `n`, ascending."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return low + [n // k for k in reversed(low) if k * k != n]


def check_kept(keep: Collection[str]) -> None:
    """Refuse to keep what is never changed.

    Raises:
      UsageError: a name is none of `SEARCHED`.
    """
    for name in keep:
        if name not in SEARCHED:
            raise UsageError(
                f"--keep {name}: the search does not change it{suggestion(name, list(SEARCHED))}; "
                f"use any of {', '.join(SEARCHED)}"
            )
