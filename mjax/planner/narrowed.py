"""What a batch that grows takes from the search: each of its sizes has to divide, so meshes are left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mjax.batch_size import BatchSizes, at_batch
from mjax.config import Config
from mjax.planner.search import Candidate, Found, MemoryOf, TimeOf, describe, search, value_of
from mjax.planner.search_limits import with_values
from mjax.planner.space import batch_unit

LIKE_THE_BEST = ("mesh.model", "mesh.sequence_parallel", "mesh.schedule", "mesh.zero", "train.recompute")
"""Fields that do not depend on what divides the batch. They stay: all ways at the whole batch take minutes."""


@dataclass(frozen=True)
class Narrowed:
    """What is left out because the batch grows.

    Attributes:
      flag: what makes it grow, as it is typed.
      sizes: how many sizes it has.
      unit: what divides each of them.
      faster: the fastest of what is left out, at the whole batch, where it is faster than the best that was found.
      change: seconds of `faster` over those of the best at the whole batch, less 1.
      needs: of what the sizes would have to be multiples, for `faster`.
      instead: a flag with such sizes, or an empty text.
    """

    flag: str
    sizes: int
    unit: int
    faster: Candidate | None = None
    change: float = 0.0
    needs: int = 0
    instead: str = ""

    @property
    def sentence(self) -> str:
        """What a person is told."""
        start = (
            f"{self.flag} narrows the search: what is left divides each of its {self.sizes} batch sizes, "
            f"multiples of {self.unit}"
        )
        if self.faster is None:
            return f"{start}; nothing like the best would be faster without it"
        config, seconds = self.faster.config, self.faster.time.total
        product = f"data {config.mesh.data} × micro-batch {config.train.micro_batch}"
        product += f" × pipe {config.mesh.pipe} for the chunks" * (config.mesh.chunks > 1)
        return (
            f"{start}. It leaves out {describe(config)}: {seconds:.3g} s at the whole batch, {self.change:+.1%}. That "
            f"takes sizes that are multiples of {self.needs} ({product})" + f": {self.instead}" * bool(self.instead)
        )

    def values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "flag": self.flag,
            "unit": self.unit,
            "seconds": None if self.faster is None else self.faster.time.total,
            "left_out": None if self.faster is None else describe(self.faster.config),
            "needs": self.needs or None,
        }


def narrowed(
    found: Found, config: Config, memory_of: MemoryOf, time_of: TimeOf, keep: Collection[str] = ()
) -> Narrowed | None:
    """What the ramp-up or schedule of the batch has left out of a search, or None where it leaves out nothing.

    Args:
      found: with at least one candidate that fits.
      config, memory_of, time_of, keep: as they were given to `search`.
    """
    train, unit, best = config.train, batch_unit(config), found.ranked[0]
    if unit == train.global_batch:
        return None
    rampup = train.batch_rampup
    flag = (
        f"--train.batch-schedule '{train.batch_schedule}'"
        if rampup is None
        else f"--train.batch-rampup {' '.join(map(str, rampup))}"
    )
    said = Narrowed(flag, len(BatchSizes.of(config).sizes()), unit)
    like = {name: value_of(best.config, name) for name in LIKE_THE_BEST}
    whole = with_values(at_batch(config, train.global_batch), like)
    first = search(whole, found.devices, memory_of, time_of, found.capacity, {*keep, *like}).ranked[:1]
    if not first or float(f"{first[0].time.total:.4g}") >= float(f"{best.time.total:.4g}"):
        return said
    (faster,) = first
    mesh = faster.config.mesh
    needs = mesh.data * faster.config.train.micro_batch * (mesh.pipe if mesh.chunks > 1 else 1)
    fits = rampup is not None and needs < train.global_batch
    instead = f"--train.batch-rampup {needs} {needs} {rampup[2]}" if fits else ""
    return Narrowed(said.flag, said.sizes, unit, faster, faster.time.total / best.time.total - 1, needs, instead)
