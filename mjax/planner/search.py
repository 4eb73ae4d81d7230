"""The planner's search: which mesh, micro-batch and recomputation run a config fastest on so many GPUs.

Every candidate of `space.py` is asked for its memory; what does not fit is dropped, and what fits is asked for its time
and ranked by it. There is no rule about what goes where: that `model` stays within a server and `pipe` goes across
(arXiv 2104.04473, section 5) has to come out of the model of time, and does.

Predictions are off by a few percent, so two of them that agree in four digits are a tie, and the simpler one wins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mjax.config import Config
from mjax.planner.space import RECOMPUTE, SCHEDULES, SEARCHED, candidates

if TYPE_CHECKING:
    from mjax.planner.memory import Memory
    from mjax.planner.time import StepTime

MemoryOf = Callable[[Config], "Memory"]
TimeOf = Callable[[Config], "StepTime"]


@dataclass(frozen=True)
class Candidate:
    """A way to run the config that fits, with its memory in bytes on the busiest device and its seconds a step."""

    config: Config
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      devices: how many the candidates use.
      capacity: bytes that a device has for the program.
      ranked: all that fit, the fastest first.
      too_big: those that do not fit, with their bytes.
    """

    devices: int
    capacity: float
    ranked: list[Candidate]
    too_big: list[tuple[Config, float]]

    @property
    def tried(self) -> int:
        """How many candidates there were."""
        return len(self.ranked) + len(self.too_big)


def search(
    config: Config,
    devices: int,
    memory_of: MemoryOf,
    time_of: TimeOf,
    capacity: float,
    keep: Collection[str] = (),
    progress: Callable[[list[Config]], Iterable[Config]] = iter,
) -> Found:
    """Try every candidate and rank those that fit.

    Args:
      config: valid but for its mesh, its micro-batch and its recomputation (`search_limits.check_searchable`).
      devices: how many there are.
      memory_of: bytes of a config on its busiest device.
      time_of: seconds of its step; asked for what fits only.
      capacity: bytes that a device has for the program.
      keep: those of `space.SEARCHED` that stay as they are in `config`.
      progress: hands the candidates on one after the other, and may show how far it is.
    """
    ranked, too_big = [], []
    for candidate in progress(list(candidates(config, devices, keep))):
        memory = memory_of(candidate)
        if memory.total > capacity:
            too_big.append((candidate, memory.total))
        else:
            ranked.append(Candidate(candidate, memory, time_of(candidate)))
    ranked.sort(key=rank)
    return Found(devices, capacity, ranked, too_big)


def rank(candidate: Candidate) -> tuple:
    """What candidates are sorted by: seconds to four digits, then how much there is of each thing."""
    return float(f"{candidate.time.total:.4g}"), complexity(candidate.config)


def complexity(config: Config) -> tuple[int, ...]:
    """The less, the simpler; what a reader of the config has to know more about comes first."""
    mesh, train = config.mesh, config.train
    schedule = SCHEDULES.index(mesh.schedule) if mesh.schedule in SCHEDULES else len(SCHEDULES)
    recompute = RECOMPUTE.index(train.recompute)
    return mesh.pipe, mesh.model, mesh.chunks, schedule, mesh.zero, recompute, mesh.sequence_parallel, train.micro_batch


# --- Why it is the best -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """The fastest candidate with another value of one field than the best has.

    Attributes:
      field: dotted name, one of `space.SEARCHED`.
      best: its value in the best candidate.
      value: its value here.
      candidate: what it is, or None where everything with another value is too big.
      least: bytes of the smallest of those, where all are too big.
    """

    field: str
    best: Any
    value: Any
    candidate: Candidate | None
    least: float | None

    def others(self, best: Config) -> list[str]:
        """What else differs between the candidate and the best: ['model 4', 'micro-batch 2']."""
        if self.candidate is None:
            return []
        pairs = [(name, value_of(self.candidate.config, name)) for name in SEARCHED if name != self.field]
        return [f"{short(name)} {word(value)}" for name, value in pairs if value != value_of(best, name)]


def alternatives(found: Found) -> list[Alternative]:
    """For each field, what the best candidate would lose by another value of it: all else is searched anew.

    Fields of which every candidate has the same value are left out, and those that follow from others: `data` is what
    `pipe` and `model` leave, and without a pipeline there are no schedule and no chunks.
    """
    best = found.ranked[0]
    follow = {"mesh.data"} if best.config.mesh.pipe > 1 else {"mesh.data", "mesh.schedule", "mesh.chunks"}
    listed = []
    for name in SEARCHED:
        if name in follow:
            continue
        value = value_of(best.config, name)
        other = next((each for each in found.ranked if value_of(each.config, name) != value), None)
        if other is not None:
            listed.append(Alternative(name, value, value_of(other.config, name), other, None))
            continue
        big = [(size, value_of(each, name)) for each, size in found.too_big if value_of(each, name) != value]
        if big:
            least, instead = min(big, key=lambda pair: pair[0])
            listed.append(Alternative(name, value, instead, None, least))
    return listed


def value_of(config: Config, name: str) -> Any:
    """The field of a dotted name: mesh.pipe."""
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


# --- In words ---------------------------------------------------------------------------------------------------------


def short(name: str) -> str:
    """The last part of a dotted name, in words: train.micro_batch → micro-batch."""
    return name.split(".")[1].replace("_", "-")


def word(value: Any) -> str:
    """A value of a field as a person says it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def describe(config: Config) -> str:
    """A candidate in words: 'pipe 4 × data 16 × model 8, …'."""
    mesh, train = config.mesh, config.train
    words = [f"pipe {mesh.pipe} × data {mesh.data} × model {mesh.model}"]
    if mesh.pipe > 1:
        words.append(f"{mesh.schedule} with {mesh.chunks} chunks" if mesh.chunks > 1 else mesh.schedule)
    words.append(f"micro-batches of {train.micro_batch}")
    words.append({"none": "no", "selective": "selective", "full": "full"}[train.recompute] + " recomputation")
    if mesh.sequence_parallel:
        words.append("sequence parallelism")
    if mesh.zero:
        words.append(f"ZeRO-{mesh.zero}")
    return ", ".join(words)
