"""The planner's search for the mesh, micro-batch and recomputation that run a config fastest on a number of GPUs.

A candidate is the config with another mesh, micro-batch and recomputation, never another model: all have the same loss
curve. Sizes are divisors, so `mjax.config.checks` accepts every candidate:

    model         divides devices, heads, feed-forward width and padded vocabulary
    pipe          divides the remaining devices, and the layers
    context       divides the remaining devices and the positions; a rank has at least `MIN_POSITIONS`
    data          is the rest, and divides the global batch
    replicate     divides `data`; a group fills servers
    micro-batch   divides a replica's share of the global batch
    virtual stages  divide the layers of a stage; several take micro-batches in groups of `pipe`

With a batch ramp-up, this holds for the greatest common divisor of its sizes.

Of settings that do the same, only the simplest is a candidate: no schedule and no virtual stages without a pipeline, no
sequence parallelism on one rank of `model`, no ZeRO on one rank of `data` and `context`, no groups of replicas without
FSDP. Several ranks of `model` have sequence parallelism where tokens divide: as many bytes, and less memory. The
schedule of the config does not change: gpipe has the same bubble as 1f1b and at least its memory.

The time of all candidates is predicted, and in this order their memory, until the rest is slower than the ranked ones.
A candidate that runs out of memory at the logits is tried with the loss in chunks too. The time is the mean over the
run: with a batch ramp-up, its small batches count too.

Predictions are off by a few percent. So two times that agree in four digits are a tie, and the simpler one wins; and
candidates that leave less than HEADROOM of the memory free count as out of memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import chain, product
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, get_args

from mjax.cluster.hardware import Gpu
from mjax.config import Config, MeshConfig, axes, marks, to_flag, with_values
from mjax.config.axes import shards
from mjax.config.batch_size import BatchSizes, format_tokens
from mjax.config.checks import can_run_layers, clip_warmup, divisors, validate
from mjax.config.kernels import context_attention_choices, is_unrolled
from mjax.config.marks import fields_with
from mjax.config.model import ModelConfig
from mjax.config.pattern import count_groups
from mjax.config.run import Recompute
from mjax.errors import UsageError
from mjax.models.build import count_active, mixing_class
from mjax.planner.layer import model_flops, scores_in_chunks
from mjax.planner.memory import HEADROOM, Memory, count_weights, predict_memory
from mjax.planner.scaling import ScalingLaw
from mjax.planner.time import Calibration, StepTime, TimePredictor
from mjax.utils.figures import GIB
from mjax.utils.progress import progress

SEARCHED = fields_with(marks.SEARCHED, Config())  # in which candidates differ
RECOMPUTE = get_args(Recompute)
MemoryOf = Callable[[Config], Memory]
TimeOf = Callable[[Config], StepTime]

# Candidates that take longer than this multiple of the fastest that fits are counted, not ranked.
MAX_SLOWDOWN = 1.1

# Ranks of `expert` and `model` together, at most, unless the config has more: they communicate in every layer.
SERVER_GPUS = 8

# Positions of a rank of `context`, at least: with fewer, its matmuls and collectives are small.
MIN_POSITIONS = 4096

# Chunks of the loss that are proposed. The logits then take less than the gradient of the table that scores them; more
# chunks save little.
LOSS_CHUNKS = 8

# --- Candidates -------------------------------------------------------------------------------------------------------


def candidates(config: Config, devices: int, fix: Collection[str] = ()) -> Iterator[Config]:
    """All configs with the model, data and training of `config` that use exactly `devices` devices.

    Args:
      config: valid except for its mesh, its micro-batch and its recomputation.
      devices: number of devices.
      fix: fields of `SEARCHED` that stay as in `config`.
    """
    fixed = {name: attrgetter(name)(config) for name in fix}
    zeros = (1, 3) if "mesh.replicate" in fixed else (3,)  # ZeRO-1 gathers once a step: groups save it little
    mesh_of = cache(MeshConfig)  # caches by mesh are faster if it is the same object
    train_of, recomputations = cache(partial(replace, config.train)), cache(partial(_recomputations, config))
    for layout in meshes(config, devices, fixed.get("mesh.context")):
        for possible in _possible_values(config, *layout, fixed):
            possible["train.recompute"] = recomputations(layout[0])
            options = [[value for value in possible[name] if fixed.get(name, value) == value] for name in SEARCHED]
            for *sizes, micro_batch, recompute, chunks in product(*options):
                mesh = mesh_of(*sizes)
                are_whole = mesh.data // mesh.expert % mesh.replicate == 0
                if mesh.stage_layers and len(mesh.stage_layers) != mesh.pipe * mesh.virtual_stages:
                    continue
                if mesh.replicate == 1 or (mesh.zero in zeros and are_whole and shards(mesh) > 1):
                    train = train_of(micro_batch=micro_batch, recompute=recompute, loss_chunks=chunks)
                    yield replace(config, mesh=mesh, train=train)


def _recomputations(config: Config, pipe: int) -> list[str]:
    """The kinds of recomputation that the layers can run with on this many stages."""
    staged = replace(config, mesh=MeshConfig(pipe=pipe))
    return [kind for kind in RECOMPUTE if can_run_layers(replace(staged, train=replace(config.train, recompute=kind)))]


def _attentions_across(config: Config, context: int, tensor: int, fixed: str | None) -> Collection[str]:
    """The possible values of `mesh.context_attention`."""
    if context == 1:
        return [fixed or "auto"]  # even if it has no effect on this mesh
    ways = context_attention_choices(replace(config, mesh=MeshConfig(context=context, model=tensor)))
    return ["auto"] * bool(ways) if fixed == "auto" else ways


def _possible_values(
    config: Config, pipe: int, data: int, context: int, tensor: int, fixed: dict[str, Any]
) -> Iterator[dict[str, Collection]]:
    """Yield, for each micro-batch on a mesh, the possible values of each field of `SEARCHED` but the recomputation;
    some `fixed` fields have their value even if it has no effect on this mesh."""
    model, share = config.model, batch_unit(config) // data
    across = _attentions_across(config, context, tensor, fixed.get("mesh.context_attention"))
    limit = max(SERVER_GPUS, tensor * config.mesh.expert)
    expert = [ranks for ranks in divisors(math.gcd(data, model.experts or 1)) if ranks * tensor <= limit]
    groups = [n for n in divisors(data) if n == 1 or data * context * tensor // n % SERVER_GPUS == 0]
    for micro_batch in divisors(share):
        tokens = micro_batch * model.sequences * model.sequence // context
        splits = tokens % tensor == 0 and (tensor > 1 or "mesh.sequence_parallel" in fixed)
        in_groups = pipe > 1 and share // micro_batch % pipe == 0
        yield {
            "mesh.pipe": [pipe],
            "mesh.data": [data],
            "mesh.model": [tensor],
            "mesh.expert": expert,
            "mesh.context": [context],
            "mesh.context_attention": across,
            "mesh.sequence_parallel": [splits and fixed.get("mesh.sequence_parallel", True)],
            "mesh.schedule": [config.mesh.schedule],
            "mesh.virtual_stages": _virtual_stages(count_groups(model), pipe) if in_groups else [1],
            "mesh.zero": [0, 1, 3] if data * context > 1 else [0],
            "mesh.replicate": groups,
            "mesh.stage_layers": [fixed.get("mesh.stage_layers", ())],
            "train.micro_batch": [micro_batch],
            "train.loss_chunks": sorted({1, config.train.loss_chunks}),
        } | {name: [fixed[name]] for name in ("mesh.zero", "mesh.replicate") if name in fixed}


def meshes(config: Config, devices: int, context: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """(pipe, data, context, model) with `devices` as their product, which divide the model and the global batch.
    `context` is this value, or any that leaves a rank `MIN_POSITIONS`. `model` is at most `SERVER_GPUS`, or the
    config's value."""
    model, unit, limit = config.model, batch_unit(config), max(SERVER_GPUS, config.mesh.model)
    matrices = math.gcd(*model.columns().values())
    for tensor in (n for n in divisors(math.gcd(devices, matrices)) if n <= limit and model.splits(n)):
        for pipe in (n for n in divisors(devices // tensor) if n <= count_groups(model)):
            rest = devices // (tensor * pipe)
            for part in _sequence_splits(model) if context is None else [context]:
                if rest % part == 0 and unit % (rest // part) == 0 and model.sequence % part == 0:
                    yield pipe, rest // part, part, tensor


def _virtual_stages(groups: int, pipe: int) -> list[int]:
    """Possible numbers of virtual stages: the smallest for each number of groups of the largest one."""
    smallest = {-(-groups // (pipe * chunks)): chunks for chunks in range(groups // pipe, 0, -1)}
    return sorted(smallest.values())


def _sequence_splits(model: ModelConfig) -> Iterator[int]:
    """Possible numbers of ranks of `context`."""
    yield 1  # all others need a trace of the model
    if model.sequence >= 2 * MIN_POSITIONS and not mixing_class(model):
        yield from (n for n in divisors(model.sequence)[1:] if n * MIN_POSITIONS <= model.sequence)


def with_loss_chunks(config: Config, memory: Memory) -> list[Config]:
    """`config` with the loss in CHUNKS chunks, if its memory peaks with the logits and the model supports chunks."""
    if memory.moment != "head" or config.train.loss_chunks > 1 or not scores_in_chunks(config):
        return []
    return [replace(config, train=replace(config.train, loss_chunks=LOSS_CHUNKS))]


def with_alltoall(config: Config) -> list[Config]:
    """`config` with all-to-alls to experts, if auto gathers all tokens, which needs more memory."""
    model, ranks = config.model, config.mesh.expert
    if ranks == 1 or model.moe_token_dispatcher != "auto" or model.token_dispatcher(ranks) == "alltoall":
        return []
    return [with_values(config, {"model.moe_token_dispatcher": "alltoall"})]


def batch_unit(config: Config) -> int:
    """The largest number of sequences that divides every global batch size of the run."""
    return math.gcd(*BatchSizes.from_config(config).sizes())


# --- The search -------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A config that fits, with its memory in bytes on the fullest device and its seconds per step."""

    config: Config
    memory: Memory
    time: StepTime


class SearchResult(NamedTuple):
    """The result of a search.

    Attributes:
      devices: number of devices of the candidates.
      capacity: bytes of a device for the program.
      ranked: candidates that fit and leave HEADROOM of that free, fastest first.
      out_of_memory: candidates that exceed it, or the memory of the host, with their bytes.
      pruned_by_time: number of candidates over `MAX_SLOWDOWN` times the fastest, whose memory was not predicted.
    """

    devices: int
    capacity: float
    ranked: list[Candidate]
    out_of_memory: list[tuple[Config, float]]
    pruned_by_time: int = 0

    @property
    def tried(self) -> int:
        """Number of candidates."""
        return len(self.ranked) + len(self.out_of_memory) + self.pruned_by_time


def search(
    config: Config,
    devices: int,
    memory_of: MemoryOf,
    time_of: TimeOf,
    capacity: float,
    fix: Collection[str] = (),
    host: float | None = None,
    top: int = 10,
    among: Collection[Config] | None = None,
    mean_of: Callable[[Config], float] | None = None,
    balance: Callable[[Config], Config] = lambda config: config,
    least_of: Callable[[Config], float] = lambda config: 0.0,
) -> SearchResult:
    """Rank the candidates that fit: at least the `top` fastest, and all within `MAX_SLOWDOWN` times the fastest.

    Args:
      config: valid except for its mesh, its micro-batch and its recomputation (`command.check_searchable`).
      devices: number of devices.
      memory_of: bytes of a config on its fullest device; called in the order of their time.
      time_of: seconds of its step, and their mean over the run.
      capacity: bytes of a device for the program.
      fix: fields of `SEARCHED` that stay as in `config`.
      host: limit of host memory for each device in bytes; None if it is not known.
      top: number of candidates to rank at least.
      among: the candidates; by default all.
      mean_of: the mean of `time_of` alone, which is called for all candidates.
      balance: moves layers between the stages of a pipeline, so that the slowest is faster.
      least_of: a lower bound of the bytes of a config and of its changes in the search; others are not timed.
    """
    mean_of, timed = mean_of or (lambda config: time_of(config).mean), []
    among = candidates(config, devices, fix) if among is None else among
    among, out_of_memory = divide_by_memory(among, least_of, (1 - HEADROOM) * capacity)
    with progress("searching", len(among), transient=True) as advance:
        for candidate in among:
            timed.append((candidate, mean_of(candidate)))
            advance(1)
    timed.sort(key=itemgetter(1))
    ranked, fastest, tried = [], [], 0
    for candidate, mean in timed:
        if len(fastest) >= top and mean > max(MAX_SLOWDOWN * fastest[0], 1.001 * fastest[top - 1]):
            break
        tried, options = tried + 1, [(candidate, memory_of(candidate))]
        if not options[0][1].fits(capacity):
            smaller = with_alltoall(candidate)
            smaller += with_loss_chunks(*options[0]) if "train.loss_chunks" not in fix else []
            options += [(option, memory_of(option)) for option in smaller]
        for option, memory in options:
            if memory.fits(capacity, host) and "mesh.stage_layers" not in fix:
                balanced = balance(option)
                if (needed := memory_of(balanced)).fits(capacity, host):
                    option, memory = balanced, needed
            if memory.fits(capacity, host):
                ranked.append(Candidate(option, memory, time_of(option)))
                insort(fastest, ranked[-1].time.mean)
            else:
                out_of_memory.append((option, memory.total))
    return SearchResult(devices, capacity, sorted(ranked, key=sort_key), out_of_memory, len(timed) - tried)


def divide_by_memory(
    candidates: Iterable[Config], least_of: Callable[[Config], float], limit: float
) -> tuple[list[Config], list[tuple[Config, float]]]:
    """The candidates whose least memory is within the limit, and the others with their least memory or less."""
    groups: dict[Any, dict[str, list[Config]]] = {}  # with ascending micro-batches, which need ever more
    for candidate in candidates:
        train = candidate.train
        group = groups.setdefault((candidate.mesh, train.loss_chunks, candidate.micro_batches == 1), {})
        group.setdefault(train.recompute, []).append(candidate)
    possible, excluded = [], []
    for ways in groups.values():
        count = None
        for group in filter(None, map(ways.get, RECOMPUTE[::-1])):  # each needs more than the one before
            count = bisect_right(group, limit, hi=count, key=least_of)
            possible += group[:count]
            if larger := group[count:]:
                excluded += product(larger, [least_of(larger[0])])
    return possible, excluded


@lru_cache(maxsize=8)
def search_and_time(
    config: Config,
    devices: int,
    gpu: Gpu,
    calibration: Calibration | None = None,
    fix: tuple[str, ...] = (),
    among: tuple[Config, ...] | None = None,
) -> SearchResult:
    """`search` with the planner's predictions of memory and time."""
    memory_of, time_of = make_predictors(gpu, calibration)
    usable, host = gpu.usable_bytes, gpu.host_bytes
    least_of = lambda config: predict_memory(config, gpu.compute_capability, least=True).total  # noqa: E731
    functions = {"mean_of": time_of.mean, "balance": time_of.balance, "least_of": least_of}
    return search(config, devices, memory_of, time_of, usable, fix, host, among=among, **functions)


@lru_cache(maxsize=4)
def make_predictors(gpu: Gpu, calibration: Calibration | None) -> tuple[MemoryOf, TimePredictor]:
    """The functions that predict the memory and the time of a config on a GPU."""
    return partial(predict_memory, capability=gpu.compute_capability), TimePredictor(gpu, calibration)


def sort_key(candidate: Candidate) -> tuple:
    """The sort key of candidates: seconds of the run to four digits, then the simplest first."""
    mesh, train = candidate.config.mesh, candidate.config.train
    # The most important fields for a reader of the config come first.
    return (
        float(f"{candidate.time.mean:.4g}"),
        *(mesh.pipe, mesh.model, mesh.context, mesh.virtual_stages, mesh.zero, mesh.replicate),
        *(RECOMPUTE.index(train.recompute), mesh.sequence_parallel, train.micro_batch, train.loss_chunks),
        *(mesh.expert, mesh.context_attention),
    )


# --- The cheapest change that fits ------------------------------------------------------------------------------------

# Ranks of the cost of a change, not times; a combination costs their sum.
PRICES = {
    "mesh.sequence_parallel": {False: 0, True: 1},
    "mesh.zero": {0: 0, 1: 2, 3: 24},
    "train.loss_chunks": {1: 0, LOSS_CHUNKS: 3},
    "train.recompute": {"none": 0, "selective": 4, "full": 16, "offload": 20},
    "train.unroll": {"auto": 0, "on": 0, "off": 6},
    "model.moe_token_dispatcher": {"auto": 0, "alltoall": 5},
}
MICRO_BATCH_PRICE, OTHER_MESH_PRICE, MORE_GPUS_PRICE = 8, 32, 128
FACTORS = (1, 2, 4, 8, 16, 32, 64)  # times as many GPUs


@dataclass(frozen=True)
class Change:
    """A change of a config that makes it fit.

    Attributes:
      values: the changed fields, by dotted name.
      config: the changed config.
      memory: its memory.
      price: the rank of its cost.
    """

    values: dict[str, Any]
    config: Config
    memory: Memory
    price: int

    @property
    def flags(self) -> str:
        """What to type, such as '--mesh.sequence-parallel --train.micro-batch 2'."""
        return " ".join(map(to_flag, self.values, self.values.values()))

    def needs(self, config: Config) -> str:
        """'20.2 GiB', or '20.2 GiB on each of 16' on another number of devices than `config`; and its host memory."""
        devices = self.config.mesh.devices
        more = f" on each of {devices:,}" if devices != config.mesh.devices else ""
        host = f" and {self.memory.host / GIB:.1f} GiB of host memory" if self.memory.host else ""
        return f"{self.memory.total / GIB:.1f} GiB{host}{more}"


def changes_that_fit(config: Config, usable: float, count: int = 3, host: float | None = None) -> list[Change]:
    """The cheapest changes with which `config` leaves HEADROOM of `usable` bytes free, cheapest first.

    No proposal contains another. The global batch and the results do not change. `host` limits the bytes of host memory
    for each device; None if they are not known.
    """
    proposed: list[Change] = []
    unused = set() if with_loss_chunks(config, predict_memory(config)) else {"train.loss_chunks"}
    unused |= set() if is_unrolled(config, on_gpu=True) else {"train.unroll"}
    unused |= set() if with_alltoall(config) else {"model.moe_token_dispatcher"}
    for factor in FACTORS:
        for price, values in sorted(_changes(config, factor, unused), key=itemgetter(0)):
            changed = with_values(config, values)
            if any(_includes(values, change.values) for change in proposed) or not _can_run(changed, config, values):
                continue
            memory = predict_memory(changed)
            if memory.fits(usable, host):
                proposed.append(Change(values, changed, memory, price))
                if len(proposed) == count:
                    return proposed
    return proposed


def _changes(config: Config, factor: int, unused: Collection[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The changed fields of configs that take less memory, on `factor` times as many GPUs, with their prices; besides
    `data`, at most one axis has more ranks."""
    mesh, size, replicas = config.mesh, config.train.micro_batch, factor * config.mesh.data
    smaller = [(MICRO_BATCH_PRICE * int(math.log2(size // n)), {"train.micro_batch": n}) for n in divisors(size)]
    options = []
    for name in (name for name in PRICES if name not in unused):
        now = PRICES[name].get(attrgetter(name)(config), math.inf)
        options.append([(0, {}), *((cost - now, {name: value}) for value, cost in PRICES[name].items() if cost > now)])
    options.append([(price, values) if price else (0, {}) for price, values in smaller])
    wider = [(times, axis) for axis in ("pipe", "context", "model") for times in divisors(replicas)[1:]]
    for times, axis in [(1, "data"), *wider]:
        layout = {"mesh.data": replicas // times} if replicas // times != mesh.data else {}
        layout |= {f"mesh.{axis}": getattr(mesh, axis) * times} if times > 1 else {}
        cost = OTHER_MESH_PRICE * (times > 1) + MORE_GPUS_PRICE * factor * (factor > 1)
        for prices, values in (zip(*choice, strict=True) for choice in product(*options)):
            if changed := dict(chain(layout.items(), *(option.items() for option in values))):
                yield cost + sum(prices), changed


def _can_run(changed: Config, config: Config, values: Collection[str]) -> bool:
    """True if a config with these `values` changed can run as in a search."""
    mesh, sequence = changed.mesh, config.model.sequence
    if "mesh.model" in values and mesh.model > max(SERVER_GPUS, config.mesh.model):
        return False
    if "mesh.context" in values and sequence // mesh.context < MIN_POSITIONS:
        return False
    try:
        validate(replace(changed, data=replace(config.data, mock=True)))
    except UsageError:
        return False
    return True


def _includes(values: dict[str, Any], proposed: dict[str, Any]) -> bool:
    """True if `values` include the `proposed` ones, or go further, such as a smaller micro-batch."""

    def strength(name: str, value: Any) -> int:
        return -value if name == "train.micro_batch" else PRICES.get(name, {}).get(value, value)

    return all(name in values and strength(name, values[name]) >= strength(name, proposed[name]) for name in proposed)


# --- The longest sequence ---------------------------------------------------------------------------------------------

# Unit of the positions per GPU; the multiple to try first.
SEQUENCE_STEP, FIRST_GUESS = 1024, 16


def longest_sequence(
    config: Config,
    devices: int,
    recompute: str,
    gpus_per_node: int,
    memory_of: MemoryOf,
    time_of: TimeOf,
    capacity: float,
    host: float | None = None,
) -> Candidate | None:
    """The longest sequence that fits on this many GPUs, which share it over `context` and `model`; None if not even
    `SEQUENCE_STEP` positions per GPU fit.

    Weights and optimizer are sharded over all ranks (ZeRO-3), layers are recomputed, the loss is in chunks. Memory
    grows almost in proportion to the length: two lengths of each mesh show which mesh has the longest.

    Args:
      config: its model and training; length, mesh, micro-batch and recomputation are replaced.
      devices: number of GPUs.
      recompute: full or offload.
      gpus_per_node: `model` stays within them.
      memory_of, time_of, capacity, host: as in `search`.
    """
    train = replace(
        config.train,
        micro_batch=1,
        global_batch=math.lcm(config.train.global_batch, devices),
        batch_rampup=None,
        batch_history=(),
        recompute=recompute,
        unroll="off" if recompute == "offload" else config.train.unroll,
        loss_chunks=max(LOSS_CHUNKS, config.train.loss_chunks) if scores_in_chunks(config) else 1,
    )

    def make_config(steps: int, mesh: MeshConfig) -> Config:
        model = replace(config.model, sequence=steps * SEQUENCE_STEP * devices)
        return replace(config, model=model, mesh=mesh, train=train)

    def memory_share(mesh: MeshConfig, steps: int) -> float:
        """The share of the memory of device and host that a sequence needs."""
        memory = memory_of(make_config(steps, mesh))
        return max(memory.total / ((1 - HEADROOM) * capacity), memory.host / host if host else 0.0)

    def extrapolate(mesh: MeshConfig) -> float:
        """The length at the limit, on the line through two."""
        near, far = memory_share(mesh, FIRST_GUESS), memory_share(mesh, 2 * FIRST_GUESS)
        return FIRST_GUESS * (1 + (1 - near) / (far - near)) if far > near else FIRST_GUESS

    fix = set(SEARCHED) - {"mesh.model", "mesh.sequence_parallel", "mesh.context", "mesh.context_attention"}
    start = make_config(FIRST_GUESS, MeshConfig(zero=3))
    layouts = dict.fromkeys(candidate.mesh for candidate in candidates(start, devices, fix))
    guesses = {mesh: extrapolate(mesh) for mesh in layouts if mesh.data == 1 and mesh.model <= gpus_per_node}
    if not guesses:
        return None
    best = max(guesses, key=lambda mesh: (int(guesses[mesh]), -time_of(make_config(FIRST_GUESS, mesh)).mean))
    steps = largest_within(partial(memory_share, best), 1.0, max(int(guesses[best]), 1))
    if not steps:
        return None
    config = make_config(steps, best)
    return Candidate(config, memory_of(config), time_of(config))


def largest_within(size: Callable[[int], float], limit: float, first: int = FIRST_GUESS, end: int | None = None) -> int:
    """The largest number up to `end` whose size is at most `limit`; 0 if there is none.

    Sizes grow with the number. Each guess after the `first` is on the line through the last two points.
    """
    low, high, guess, points = 0, None if end is None else end + 1, first, []
    while high is None or high - low > 1:
        points.append((guess, size(guess)))
        low, high = (guess, high) if points[-1][1] <= limit else (low, guess)
        if end is not None:
            guess += guess == low  # a neighbor of the first
        else:
            guess = 2 * guess if high is None else (low + high) // 2
        if len(points) > 1:
            (first, small), (second, large) = sorted(points[-2:])
            if large > small:
                guess = int(first + (limit - small) * (second - first) / (large - small))
        guess = max(guess, low + 1)
        guess = min(guess, 8 * max(low, FIRST_GUESS) if high is None else max(high - 1, 1))
    return low


# --- The largest model of a budget ------------------------------------------------------------------------------------
#
# The models are those of the config in other widths and depths (`size_grid`). Each is trained on `Budget.tokens`: 20
# tokens per parameter are compute-optimal (arXiv 2203.15556, section 3.4), or a scaling law has another optimum. The
# first is searched as with --devices alone, all others among its fastest settings; a model that fits with none of them
# is searched too.


MAX_WIDTH_FACTOR = 4  # times the width of the config: 64 times its parameters, and more with the deeper models


class Budget(NamedTuple):
    """GPUs for a number of days, and the training tokens for each parameter that a token uses: of a number that was
    given, or at the optimum of a scaling law, or 20."""

    devices: int
    gpu: Gpu
    days: float
    tokens_per_parameter: float | None = None
    law: ScalingLaw | None = None

    def tokens(self, size: ModelSize) -> int:
        """Training tokens of a model."""
        active = count_active(size.config.model)
        if self.law is None or self.tokens_per_parameter:
            return math.ceil((self.tokens_per_parameter or 20.0) * active)
        return math.ceil(self.law.optimal_tokens(active))

    def peak(self, config: Config) -> float:
        """FLOP/s of all devices at their peak."""
        return self.devices * self.gpu.peak_tflops.get(config.precision.compute, math.inf) * 1e12


class ModelSize(NamedTuple):
    """A model of `size_grid`: its config, of any number of steps, and its parameters."""

    config: Config
    parameters: int


class TrialResult(NamedTuple):
    """A model size with the length of its training, and its fastest candidate; None if none fits or divides.

    Attributes:
      flops: of the model, in all steps.
      days_at_peak: duration at the peak speed of the devices; a size that exceeds the days at peak is not searched.
    """

    config: Config
    parameters: int
    tokens: int
    flops: float
    days_at_peak: float
    best: Candidate | None

    @property
    def days(self) -> float:
        """Duration of the run; infinite if it does not fit."""
        return math.inf if self.best is None else self.best.time.mean * self.config.train.steps / 86_400

    @property
    def duration(self) -> str:
        """'34.5 days', or why there is no prediction."""
        if self.best is None:
            return f"out of memory, or {self.days_at_peak:,.3g} days at peak speed"
        return f"{self.days:.3g} days"


def size_grid(config: Config) -> list[ModelSize]:
    """The model of `config` in other sizes, smallest first, with its head size, ratio of widths and vocabulary.

    The number of heads is a multiple of the key-value heads, or of 8 for multi-head attention. For each number the
    depth goes from the config's ratio of depth to width to three quarters more, for a fine grid.
    """
    model = config.model
    unit = getattr(model, "kv_heads", None) or math.gcd(model.heads, 8)
    depth = 4 if model.layers % 4 == 0 else 1
    widths = [name for name in marks.names_with(marks.WIDE, type(model)) if getattr(model, name)]
    sizes: dict[ModelConfig, int] = {model: count_weights(model)}
    for heads in range(unit, MAX_WIDTH_FACTOR * model.heads + 1, unit):
        wide = replace(model, heads=heads, **{name: getattr(model, name) * heads // model.heads for name in widths})
        least = max(round(model.layers * heads / model.heads / depth), 1)
        # All layers of a width have the same number of parameters: two models tell the size of the rest.
        first, second = (count_weights(replace(wide, layers=depth * n)) for n in (least, least + 1))
        for n in range(least, max(7 * least // 4, least + 1)):
            sizes[replace(wide, layers=depth * n)] = first + (n - least) * (second - first)
    return [ModelSize(replace(config, model=scaled), sizes[scaled]) for scaled in sorted(sizes, key=sizes.__getitem__)]


def has_candidates(config: Config, devices: int, fix: Collection[str]) -> bool:
    """True if the model is valid and can be divided among the devices."""
    try:
        config.model.check(config)
    except UsageError:
        return False
    return any(candidates(config, devices, fix))


def search_known_settings(
    devices: int, gpu: Gpu, calibration: Calibration, fix: tuple[str, ...] = ()
) -> Callable[[Config], SearchResult]:
    """A search of a config among the fastest settings of the last full search, or in full if none of them fits."""
    fastest: list[dict[str, Any]] = []

    def search_config(config: Config) -> SearchResult:
        known = (known for values in fastest for known in candidates(with_values(config, values), devices, SEARCHED))
        result = search_and_time(config, devices, gpu, calibration, SEARCHED, among=tuple(known))
        if not result.ranked:
            result = search_and_time(config, devices, gpu, calibration, fix)
            fastest[:] = [{name: attrgetter(name)(best.config) for name in SEARCHED} for best in result.ranked[:10]]
        return result

    return search_config


def largest_model(
    sizes: list[ModelSize], budget: Budget, search: Callable[[Config], SearchResult], print_line: Callable[[str], None]
) -> tuple[TrialResult, list[TrialResult]]:
    """The largest model that is trained within the days, and all that were tried, smallest first.

    Args:
      sizes: smallest first.
      budget: devices and days.
      search: ranks the candidates of a config.
      print_line: called with a line about each trial.

    Raises:
      UsageError: not even the smallest is.
    """
    tried: dict[int, TrialResult] = {}

    def log_days(number: int) -> float:
        """The logarithm of the days of a size, counted from 1: about proportional to the number."""
        tried[number] = trial = try_size(sizes[number - 1], budget, search)
        parameters, tokens = format_tokens(trial.parameters), format_tokens(trial.tokens)
        print_line(f"{parameters} parameters on {tokens} tokens: {trial.duration}")
        return math.log(trial.days if trial.best else max(2 * trial.days_at_peak, 1.01 * budget.days))

    # Tokens grow with parameters, so days with their square: at first 6 N D FLOPs at half of the peak.
    flops = budget.days * 86_400 * budget.peak(sizes[0].config) / 2
    first = bisect_right(sizes, flops / 6, key=lambda size: size.parameters * budget.tokens(size))
    best = largest_within(log_days, math.log(budget.days), min(max(first, 1), len(sizes)), len(sizes))
    if not best:
        none = f"{budget.devices} × {budget.gpu.name} in {budget.days:g} days train none of these models"
        size = f"{format_tokens(tried[1].parameters)} parameters on {format_tokens(tried[1].tokens)} tokens"
        fix = "give more --days or --devices, or fewer --tokens-per-parameter"
        raise UsageError(f"{none}: the smallest, {size}, takes {tried[1].duration}; {fix}")
    return tried[best], [tried[number] for number in sorted(tried)]


def try_size(size: ModelSize, budget: Budget, search: Callable[[Config], SearchResult]) -> TrialResult:
    """A model size with its length and fastest candidate; not searched if peak speed would not be enough."""
    config = with_tokens(size.config, budget.tokens(size))
    samples = BatchSizes.from_config(config).samples_before(config.train.steps)
    flops = model_flops(config) * samples / config.train.global_batch
    days_at_peak = flops / budget.peak(config) / 86_400
    ranked = search(config).ranked if days_at_peak <= budget.days else []
    tokens = samples * config.model.sequences * config.model.sequence
    return TrialResult(config, size.parameters, tokens, flops, days_at_peak, ranked[0] if ranked else None)


def with_tokens(config: Config, tokens: int) -> Config:
    """`config` with the steps for this many tokens, and a schedule that ends with them."""
    steps = BatchSizes.from_config(config).steps_for(-(-tokens // (config.model.sequences * config.model.sequence)))
    optimizer = replace(config.optimizer, decay_steps=None, wsd_decay_steps=None)
    shorter = replace(config, train=replace(config.train, steps=steps), optimizer=optimizer)
    warmup = clip_warmup(shorter, config)
    return shorter if warmup is None else replace(shorter, optimizer=replace(optimizer, warmup_steps=warmup))


def describe(config: Config) -> str:
    """A candidate in words: 'pipe 4 × data 16 × model 8, …'."""
    mesh, train = config.mesh, config.train
    stages = f" with {mesh.virtual_stages} virtual stages" * (mesh.virtual_stages > 1)
    words = (
        axes.describe_mesh(mesh, axes.PIPE),
        f"{mesh.schedule}{stages}" * (mesh.pipe > 1),
        f"stages of {' '.join(map(str, mesh.stage_layers))} layers" * bool(mesh.stage_layers),
        f"micro-batches of {train.micro_batch}",
        f"{train.recompute.replace('none', 'no')} recomputation",
        "sequence parallelism" if mesh.splits_tokens else "",
        f"ZeRO-{mesh.zero}" if mesh.zero else "",
        f"the loss in {train.loss_chunks} chunks" if train.loss_chunks > 1 else "",
    )
    return ", ".join(filter(None, words))
