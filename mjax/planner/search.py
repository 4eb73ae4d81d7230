"""The planner's search for the mesh, micro-batch and recomputation that run a config fastest on a number of GPUs.

A candidate is the config with another mesh, micro-batch and recomputation, never another model: all have the same loss
curve. Candidates that `mjax.config.checks` would refuse are never made, because sizes are taken from divisors:

    model         divides devices, heads, feed-forward width and padded vocabulary
    pipe          divides the remaining devices, and the layers
    context       divides the remaining devices and the positions, of which a rank keeps `LEAST_POSITIONS`
    data          is the rest, and divides the global batch
    replica       divides `data`; a group fills servers
    micro-batch   divides a replica's share of the global batch
    chunks        divide the layers of a stage, and above 1 take micro-batches in groups of `pipe`

With a ramp-up or a schedule of the batch, each of these holds for each of its sizes, so for their greatest common
divisor.

Of settings that do the same, only the simplest is a candidate: no schedule and no chunks without a pipeline, no
sequence parallelism on one rank of `model`, no ZeRO on one rank of `data` and `context`, no groups
of replicas without FSDP. The schedule gpipe is left out: it has the bubble of 1f1b and at least its memory.

Candidates are taken in the order of what they take at least, in bytes and seconds (`Bounds`), which is known before
their layers are traced; the search ends where the rest is slower than what it ranks. The memory of the others is
predicted; one that lacks memory where the logits are the peak is tried with the loss in chunks too. Candidates that do
not fit are dropped, and the others ranked by the predicted time of the whole run: with a batch ramp-up, its small
batches count too. No rule says what goes where: that `model` stays within a server and
pipelines span servers (arXiv 2104.04473, section 5) has to follow from the time model, and does.

Predictions are off by a few percent. So two times that agree in four digits are a tie, and the simpler one wins; and
candidates that leave less than HEADROOM of the memory free are ranked only if none leaves more.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

from mjax.config import Config, MeshConfig, TrainConfig, axes
from mjax.config.axes import shards
from mjax.config.batch_size import BatchSizes
from mjax.config.checks import can_run_layers
from mjax.config.kernels import ways_across
from mjax.models.build import mixing_class, scores_in_chunks
from mjax.planner.memory import HEADROOM, Memory, fits_host, free_share
from mjax.planner.time import StepTime

SEARCHED = (
    "mesh.pipe", "mesh.data", "mesh.model", "mesh.expert", "mesh.context", "mesh.context_attention",
    "mesh.sequence_parallel", "mesh.schedule", "mesh.chunks", "mesh.zero", "mesh.replica", "train.micro_batch",
    "train.recompute", "train.loss_chunks",
)  # fmt: skip
"""Fields in which candidates differ."""

RECOMPUTE = ("none", "selective", "full", "offload")
SCHEDULES = ("1f1b",)
ZERO = (0, 1, 3)
MemoryOf = Callable[[Config], Memory]
TimeOf = Callable[[Config], StepTime]
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]

WITHIN = 1.1
"""Candidates that take longer than so many times the fastest are counted, not ranked."""

SERVER = 8
"""Ranks of `expert` and `model` together, at most: they communicate in every layer."""

LEAST_POSITIONS = 2048
"""Positions of a rank of `context`, at least: with fewer, its products and collectives are small."""

CHUNKS = 8
"""Chunks of the loss that are proposed. The logits then take less than the gradient of the table that scores them; more
chunks save little."""

# --- Candidates -------------------------------------------------------------------------------------------------------


def candidates(config: Config, devices: int, keep: Collection[str] = ()) -> Iterator[Config]:
    """All configs with the model, data and training of `config` that use exactly `devices` devices.

    Args:
      config: valid except for its mesh, its micro-batch and its recomputation.
      devices: number of devices.
      keep: fields of `SEARCHED` that stay as in `config`.
    """
    fixed = {name: value_of(config, name) for name in keep}
    zeros = (1, 3) if "mesh.replica" in fixed else (3,)  # ZeRO-1 gathers once a step: groups save it little
    train, unit, experts = config.train, batch_unit(config), config.model.parted_experts()
    portions: dict[tuple, TrainConfig] = {}
    mesh_of = cache(MeshConfig)  # what depends on a mesh is found again sooner if it is the same object

    def or_fixed(name: str, possible: Sequence) -> Sequence:
        """The fixed value, even if the field has no effect on this mesh, or the possible ones."""
        return [fixed[name]] if name in fixed else possible

    def expert_ranks(data: int, model: int) -> list[int]:
        possible = divisors(math.gcd(data, experts)) if experts else [1]
        return [ranks for ranks in possible if ranks * model <= max(SERVER, model) or ranks == fixed.get("mesh.expert")]

    def context_attention(model: int, context: int) -> Sequence[str]:
        if context == 1:
            return or_fixed("mesh.context_attention", ["auto"])
        possible = ways_across(replace(config, mesh=MeshConfig(context=context, model=model)))
        if fixed.get("mesh.context_attention") == "auto":
            return ["auto"] * bool(possible)
        return possible

    def replica(data: int, context: int, model: int) -> list[int]:
        """Numbers of groups whose devices fill servers."""
        fills = [n for n in divisors(data) if n == 1 or data * context * model // n % SERVER == 0]
        return or_fixed("mesh.replica", fills)

    @cache
    def recomputations(pipe: int) -> list[str]:
        staged = replace(config, mesh=MeshConfig(pipe=pipe))
        return [kind for kind in RECOMPUTE if can_run_layers(replace(staged, train=replace(train, recompute=kind)))]

    for pipe, data, context, model in meshes(config, devices, fixed.get("mesh.context")):
        for micro_batch in divisors(unit // data):
            tokens = micro_batch * config.model.sequences * config.model.sequence // context
            splits = tokens % model == 0 and (model > 1 or "mesh.sequence_parallel" in fixed)
            in_groups = pipe > 1 and unit // data // micro_batch % pipe == 0
            possible = {
                "mesh.pipe": [pipe],
                "mesh.data": [data],
                "mesh.model": [model],
                "mesh.expert": expert_ranks(data, model),
                "mesh.context": [context],
                "mesh.context_attention": context_attention(model, context),
                "mesh.sequence_parallel": [False, True] if splits else [False],
                "mesh.schedule": or_fixed("mesh.schedule", SCHEDULES if pipe > 1 else SCHEDULES[:1]),
                "mesh.chunks": divisors(config.model.layers // config.model.period // pipe) if in_groups else [1],
                "mesh.zero": or_fixed("mesh.zero", ZERO if data * context > 1 else ZERO[:1]),
                "mesh.replica": replica(data, context, model),
                "train.micro_batch": [micro_batch],
                "train.recompute": recomputations(pipe),
                "train.loss_chunks": sorted({1, train.loss_chunks}),
            }
            options = [[value for value in possible[name] if fixed.get(name, value) == value] for name in SEARCHED]
            for *mesh, _, recompute, chunks in product(*options):
                if (portion := portions.get((micro_batch, recompute, chunks))) is None:
                    portion = replace(train, micro_batch=micro_batch, recompute=recompute, loss_chunks=chunks)
                    portions[micro_batch, recompute, chunks] = portion
                made = mesh_of(*mesh)
                groups, inside = made.replica, data // made.expert
                if groups > 1 and (made.zero not in zeros or inside % groups or shards(made) == 1):
                    continue
                yield replace(config, mesh=made, train=portion)


def meshes(config: Config, devices: int, context: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """(pipe, data, context, model) whose product is `devices` and which divide the model and the global batch; with
    this `context`, or with those that leave a rank `LEAST_POSITIONS`."""
    model, unit = config.model, batch_unit(config)
    matrices = math.gcd(*model.columns().values())
    most = 1 if mixing_class(model) else max(model.sequence // LEAST_POSITIONS, 1)
    parts = [n for n in divisors(model.sequence) if n <= most]
    for tensor in filter(model.splits, divisors(math.gcd(devices, matrices))):
        for pipe in divisors(math.gcd(devices // tensor, model.layers // model.period)):
            rest = devices // (tensor * pipe)
            for part in parts if context is None else [context]:
                if rest % part == 0 and unit % (rest // part) == 0 and model.sequence % part == 0:
                    yield pipe, rest // part, part, tensor


def with_loss_chunks(config: Config, memory: Memory) -> list[Config]:
    """`config` with the loss in CHUNKS chunks, if its memory peaks with the logits and the model supports chunks."""
    if memory.moment != "head" or config.train.loss_chunks > 1 or not scores_in_chunks(config.model):
        return []
    return [replace(config, train=replace(config.train, loss_chunks=CHUNKS))]


def batch_unit(config: Config) -> int:
    """The largest number of sequences that divides every global batch size of the run."""
    return math.gcd(*BatchSizes.of(config).sizes())


def divisors(n: int) -> list[int]:
    """The divisors of `n`, ascending."""
    low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return low + [n // k for k in reversed(low) if k * k != n]


# --- The search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A way to run the config that fits, with its memory in bytes on the fullest device and its seconds per step."""

    config: Config
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
      devices: number of devices of the candidates.
      capacity: bytes of a device for the program.
      roomy: all that fit and leave HEADROOM of that free, fastest first.
      tight: those that fit and leave less, fastest first.
      too_big: those that do not fit, with bytes that they take at least.
      without_host: number of those that fit but need more host memory than there is.
      slower: those that were not predicted, since they take longer than `WITHIN` times the fastest; in the order of
        what they take at least.
    """

    devices: int
    capacity: float
    roomy: list[Candidate]
    tight: list[Candidate]
    too_big: list[tuple[Config, float]]
    without_host: int = 0
    slower: tuple[Config, ...] = ()

    @property
    def ranked(self) -> list[Candidate]:
        """The candidates to choose from, fastest first."""
        return self.roomy or self.tight

    @property
    def tried(self) -> int:
        """Number of candidates."""
        return len(self.roomy) + len(self.tight) + len(self.too_big) + self.without_host + len(self.slower)

    def free(self, candidate: Candidate) -> float:
        """The fraction of the memory that a candidate leaves free."""
        return free_share(candidate.memory.total, self.capacity)


class Bounds(NamedTuple):
    """Lower bounds of a config, without a trace for each mesh.

    Attributes:
      seconds: as mean over the run, the same for candidates that differ in `UNBOUND` alone; nearer to the truth, after
        a trace of the layer on its mesh, if the second argument is true.
      memory: on the fullest device.
    """

    seconds: Callable[[Config, bool], float]
    memory: MemoryOf


UNBOUND = ("mesh.schedule", "mesh.chunks", "mesh.zero", "mesh.replica", "train.loss_chunks")


def search(
    config: Config,
    devices: int,
    memory_of: MemoryOf,
    time_of: TimeOf,
    capacity: float,
    keep: Collection[str] = (),
    progress: Progress = lambda total: nullcontext(lambda done: None),
    host: float | None = None,
    bounds: Bounds | None = None,
    top: int = 10,
    within: float = WITHIN,
    among: Collection[Config] | None = None,
) -> SearchResult:
    """Rank the candidates that fit: with `bounds` at least the `top` fastest, and all within `within` times the
    fastest.

    Args:
      config: valid except for its mesh, its micro-batch and its recomputation (`search_command.check_searchable`).
      devices: number of devices.
      memory_of: bytes of a config on its fullest device.
      time_of: seconds of its step, and their mean over the run; called only for candidates that fit.
      capacity: bytes of a device for the program.
      keep: fields of `SEARCHED` that stay as in `config`.
      progress: opened with the number of candidates; what it yields is called with how many were done since.
      host: bytes of host memory for each device, more than which no candidate may need; None if they are not known.
      bounds: by default nothing is known before, and every candidate is predicted.
      top, within: see above.
      among: of candidates; by default all.
    """
    roomy, tight, too_big, without_host, slower, fastest = [], [], [], 0, [], []
    every = list(candidates(config, devices, keep) if among is None else among)

    def with_chunks(candidate: Config, memory_of: MemoryOf) -> list[tuple[Config, Memory]]:
        """The candidate, and if it lacks memory the same with the loss in chunks; each with its memory."""
        memory = memory_of(candidate)
        lacks = free_share(memory.total, capacity) < HEADROOM and "train.loss_chunks" not in keep
        chunked = with_loss_chunks(candidate, memory) if lacks else []
        return [(candidate, memory), *((other, memory_of(other)) for other in chunked)]

    def predict(candidate: Config) -> None:
        nonlocal without_host
        for variant, memory in with_chunks(candidate, memory_of):
            if memory.total > capacity:
                too_big.append((variant, memory.total))
                continue
            if not fits_host(memory, host):
                without_host += 1
                continue
            fitting = roomy if free_share(memory.total, capacity) >= HEADROOM else tight
            fitting.append(Candidate(variant, memory, time_of(variant)))
            if fitting is roomy:
                insort(fastest, roomy[-1].time.mean)

    def limit() -> float:
        """Seconds above which nothing is ranked."""
        return max(within * fastest[0], 1.001 * fastest[top - 1]) if len(fastest) >= top else math.inf

    with progress(len(every)) as advance:
        waiting = [(0.0, 0, True, every)] if bounds is None else _groups(every, bounds)
        while waiting:
            least, number, traced, group = heappop(waiting)
            left = []
            if least > limit():
                slower += group
            elif traced:
                for candidate in group:
                    predict(candidate)
            else:
                for candidate in group:
                    least_bytes = min(memory.total for _, memory in with_chunks(candidate, bounds.memory))
                    too_big.append((candidate, least_bytes)) if least_bytes > capacity else left.append(candidate)
            if left:
                heappush(waiting, (bounds.seconds(left[0], True), number, True, left))
            advance(len(group) - len(left))
    roomy, tight = sorted(roomy, key=rank), sorted(tight, key=rank)
    return SearchResult(devices, capacity, roomy, tight, too_big, without_host, tuple(slower))


def _groups(every: list[Config], bounds: Bounds) -> list[tuple[float, int, bool, list[Config]]]:
    """Return a heap of candidates with the same lower bound.

    Entries are the seconds, the number of the group, whether the seconds come from a traced layer, and the candidates.
    """
    groups, key = defaultdict(list), attrgetter(*(name for name in SEARCHED if name not in UNBOUND))
    for candidate in every:
        groups[key(candidate)].append(candidate)
    waiting = [(bounds.seconds(group[0], False), n, False, group) for n, group in enumerate(groups.values())]
    heapify(waiting)
    return waiting


def rank(candidate: Candidate) -> tuple:
    """The sort key of candidates: seconds of the run to four digits, then the simplest first."""
    mesh, train = candidate.config.mesh, candidate.config.train
    schedule = SCHEDULES.index(mesh.schedule) if mesh.schedule in SCHEDULES else len(SCHEDULES)
    # The most important fields for a reader of the config come first.
    return (
        float(f"{candidate.time.mean:.4g}"),
        *(mesh.pipe, mesh.model, mesh.context, mesh.chunks, schedule, mesh.zero, mesh.replica),
        *(RECOMPUTE.index(train.recompute), mesh.sequence_parallel, train.micro_batch, train.loss_chunks),
        *(mesh.expert, mesh.context_attention),
    )


# --- Why it is the fastest --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alternative:
    """The fastest candidate with a value of one field other than the best candidate's.

    Attributes:
      field: dotted name, one of `SEARCHED`.
      best: its value in the best candidate.
      value: its value here.
      candidate: the candidate, or None if everything with another value is too big, or leaves too little free.
      least: bytes of the smallest of those, if there is no candidate.
    """

    field: str
    best: Any
    value: Any
    candidate: Candidate | None
    least: float | None

    def others(self, best: Config) -> list[str]:
        """Other fields in which the candidate differs from the best: ['model 4', 'micro-batch 2']."""
        if self.candidate is None:
            return []
        pairs = [(name, value_of(self.candidate.config, name)) for name in SEARCHED if name != self.field]
        differ = [(name.split(".")[1], word(value)) for name, value in pairs if value != value_of(best, name)]
        return [f"{name.replace('_', '-')} {value}" for name, value in differ]


def compared_fields(best: Config) -> list[str]:
    """Fields for which the report says what a choice is worth, without fields that follow from others.

    `data` is what `pipe` and `model` leave. Without a pipeline there are no schedule and no chunks, and without
    `context` no attention over it.
    """
    follow = {"mesh.data"} if best.mesh.pipe > 1 else {"mesh.data", "mesh.schedule", "mesh.chunks"}
    if best.mesh.context == 1:
        follow.add("mesh.context_attention")
    return [name for name in SEARCHED if name not in follow]


def alternatives(result: SearchResult) -> list[Alternative]:
    """For each compared field, the fastest candidate with another value of it.

    Fields with the same value in every candidate are left out.
    """
    best, listed = result.ranked[0], []
    for name in compared_fields(best.config):
        value = value_of(best.config, name)
        other = next((ranked for ranked in result.ranked if value_of(ranked.config, name) != value), None)
        if other is not None:
            listed.append(Alternative(name, value, value_of(other.config, name), other, None))
            continue
        unranked = [(tight.config, tight.memory.total) for tight in result.tight if result.roomy] + result.too_big
        sizes = [(size, value_of(config, name)) for config, size in unranked if value_of(config, name) != value]
        if sizes:
            least, instead = min(sizes, key=lambda pair: pair[0])
            listed.append(Alternative(name, value, instead, None, least))
    return listed


def value_of(config: Config, name: str) -> Any:
    """The field with a dotted name: mesh.pipe."""
    return attrgetter(name)(config)


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """`config` with other values for the fields with these dotted names."""
    for name, value in values.items():
        section, field = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return config


# --- In words ---------------------------------------------------------------------------------------------------------


def word(value: Any) -> str:
    """A value of a field, in words."""
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def describe(config: Config) -> str:
    """A candidate in words: 'pipe 4 × data 16 × model 8, …'."""
    mesh, train = config.mesh, config.train
    words = [axes.in_words(mesh, axes.PIPE)]
    if mesh.pipe > 1:
        words.append(f"{mesh.schedule} with {mesh.chunks} chunks" if mesh.chunks > 1 else mesh.schedule)
    words.append(f"micro-batches of {train.micro_batch}")
    if train.recompute == "offload":
        words.append("full recomputation from inputs in host memory")
    else:
        words.append(f"{'no' if train.recompute == 'none' else train.recompute} recomputation")
    if mesh.splits_tokens:
        words.append("sequence parallelism")
    if mesh.zero:
        words.append(f"ZeRO-{mesh.zero}")
    if train.loss_chunks > 1:
        words.append(f"the loss in {train.loss_chunks} chunks")
    return ", ".join(words)
