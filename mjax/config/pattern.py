"""The pattern of a model's layers, and the stacks of their weights. No JAX is imported here.

    Pattern((LayerKind(512),) * 5 + (LayerKind(),))                    five layers with a window, one without, repeated
    Pattern((LayerKind(weights="experts"),), (LayerKind(),) * 3)       three layers, then layers of another kind

A run is a repeated group of layers: one scan. Layers of a group with equal weights are one stack, whose weights have a
leading dim; otherwise each layer of the group has a stack. Prefixes of the weight names:

    all layers have equal weights               blocks.
    layers of a group have different weights    blocks.turns.0.  blocks.turns.1.  …     layers 1, 3, 5 …  2, 4, 6 …
    several runs                                blocks.0.  blocks.1.  …                 layers 1, 2, 3    4, 5, 6 …
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from operator import mul
from typing import NamedTuple

from mjax.errors import UsageError


class LayerKind(NamedTuple):
    """The kind of a layer within its model.

    Attributes:
      window: tokens that a position attends to, including itself; None: all tokens up to the position.
      weights: a name; layers with different names have different weights.
    """

    window: int | None = None
    weights: str = ""


LAYERS = "blocks"  # first part of the names of all layer weights
PLAIN = LayerKind()


@dataclass(frozen=True)
class Pattern:
    """Kinds of layers: `first`, then `group`, repeated."""

    group: tuple[LayerKind, ...] = (PLAIN,)
    first: tuple[LayerKind, ...] = ()

    def runs(self, layers: int) -> list[tuple[tuple[LayerKind, ...], int]]:
        """The kinds of a group and the number of groups of each run, in a model with so many layers. Layers after the
        last whole group are a run."""
        first = self.first[:layers]
        groups, rest = divmod(layers - len(first), len(self.group))
        runs = (first, 1), (self.group, groups), (self.group[:rest], 1)
        return [_shortest(kinds, count) for kinds, count in runs if kinds and count]


@dataclass(frozen=True)
class Stack:
    """Layers with equal weights, which are stacked.

    Attributes:
      name: prefix of the weight names, without the last dot.
      run: index of the run.
      kinds: kinds of the stack's layers in a group.
      numbers: numbers of the layers in the model, from 1.
    """

    name: str
    run: int
    kinds: tuple[LayerKind, ...]
    numbers: range

    def name_in_layer(self, weight: str) -> str:
        """The name of a weight of the stack as in a model with equal layers: 'blocks.1.mlp.up' → 'blocks.mlp.up'."""
        return f"{LAYERS}{weight.removeprefix(self.name)}"


@lru_cache(maxsize=256)
def layer_stacks(model) -> tuple[Stack, ...]:
    """The stacks of the layers of a model, a `ModelConfig`, in order."""
    runs, stacks, first = model.pattern.runs(model.layers), [], 1
    for run, (kinds, groups) in enumerate(runs):
        name = LAYERS if len(runs) == 1 else f"{LAYERS}.{run}"
        count = len(_shortest(tuple(kind.weights for kind in kinds))[0])
        end = first + groups * len(kinds)
        for i in range(count):
            prefix = f"{name}.turns.{i}" if count > 1 else name
            stacks.append(Stack(prefix, run, kinds[i::count], range(first + i, end, count)))
        first = end
    return tuple(stacks)


def find_stack(model, weight: str) -> Stack | None:
    """The stack of the weight with this name; None for one outside layers."""
    return next((stack for stack in layer_stacks(model) if weight.startswith(f"{stack.name}.")), None)


@dataclass(frozen=True)
class StackRows:
    """The layers of a stack on the virtual stages of a pipeline; chunk c of stage i is virtual stage c p + i.

    Attributes:
      counts: layers of each virtual stage.
      stages: p.
    """

    counts: tuple[int, ...]
    stages: int = 1

    @property
    def chunks(self) -> int:
        """Virtual stages per stage, V."""
        return len(self.counts) // self.stages

    @cached_property
    def even(self) -> bool:
        """True if all virtual stages have equally many."""
        return len({*self.counts}) == 1

    @cached_property
    def slots(self) -> int:
        """Layers of the stage with most, for which every stage has memory."""
        return max(sum(self.counts[stage :: self.stages]) for stage in range(self.stages))

    def list_slots(self) -> list[list[int]]:
        """For each stage the layers in its slots, counted from 0 in the stack, chunk by chunk; -1 in unused slots."""
        ends = [0, *accumulate(self.counts)]
        rows = [[*range(first, last)] for first, last in pairwise(ends)]
        stages = ([*chain(*rows[stage :: self.stages])] for stage in range(self.stages))
        return [used + [-1] * (self.slots - len(used)) for used in stages]

    @property
    def offsets(self) -> list[int]:
        """For each virtual stage the place of its first layer among those of its stage."""
        return [sum(self.counts[v % self.stages : v : self.stages]) for v in range(len(self.counts))]


def find_rows(model, mesh, weight: str) -> StackRows | None:
    """The layers with the weight of this name, on the stages of a mesh; None for one outside layers."""
    rows = zip(layer_stacks(model), stack_rows(model, mesh), strict=True)
    return next((layers for stack, layers in rows if weight.startswith(f"{stack.name}.")), None)


def stack_rows(model, mesh) -> tuple[StackRows, ...]:
    """The layers of each stack on the stages of a mesh."""
    return _stack_rows(model, mesh.pipe, mesh.virtual_stages, mesh.stage_layers)


@lru_cache(maxsize=4096)
def _stack_rows(model, *mesh) -> tuple[StackRows, ...]:
    stages = _stage_groups(model, *mesh)
    counts = (tuple(groups[stack.run] * len(stack.kinds) for groups in stages) for stack in layer_stacks(model))
    return tuple(StackRows(numbers, mesh[0]) for numbers in counts)


def count_groups(model) -> int:
    """The number of groups of layers, which stages cannot split."""
    return sum(count for _, count in model.pattern.runs(model.layers))


def stage_groups(model, mesh) -> tuple[tuple[int, ...], ...]:
    """For each virtual stage its number of groups of each run: `mesh.stage_layers`, or as equal as possible, with more
    layers on the first ones, since the head is on the last.

    Raises:
      UsageError: there are fewer groups than stages, or the given layers are not the model's or split a group.
    """
    return _stage_groups(model, mesh.pipe, mesh.virtual_stages, mesh.stage_layers)


def layers_of_stages(model, mesh) -> list[int]:
    """The number of layers of each virtual stage."""
    sizes = [len(kinds) for kinds, _ in model.pattern.runs(model.layers)]
    return [sum(map(mul, sizes, groups)) for groups in stage_groups(model, mesh)]


def stage_kinds(model, mesh) -> tuple[int, ...]:
    """The kind of each virtual stage, from 0: those with equal `stage_groups` run one program."""
    groups = stage_groups(model, mesh)
    return tuple(map([*dict.fromkeys(groups)].index, groups))


@lru_cache(maxsize=4096)
def _stage_groups(model, pipe: int, chunks: int, layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    runs = model.pattern.runs(model.layers)
    run_of = [run for run, (_, count) in enumerate(runs) for _ in range(count)]  # of each group
    layers_before = [0, *accumulate(len(runs[run][0]) for run in run_of)]
    if layers:
        borders = _given_borders(model, pipe, chunks, layers, layers_before)
    else:
        borders = _equal_borders(model, pipe, chunks, layers_before)
    return tuple(tuple(map(run_of[first:last].count, range(len(runs)))) for first, last in pairwise(borders))


def _given_borders(model, pipe: int, chunks: int, layers: tuple[int, ...], layers_before: list[int]) -> list[int]:
    """The number of groups before each virtual stage, and of all, if the stages have these layers."""
    flag, stages = f"--mesh.stage-layers {' '.join(map(str, layers))}", pipe * chunks
    if len(layers) != stages or sum(layers) != model.layers or min(layers) < 0:
        needs = f"--mesh.pipe {pipe} × --mesh.virtual-stages {chunks} needs {stages} numbers with sum {model.layers}"
        raise UsageError(f"{flag} does not fit: {needs}; or give it no value, for equal stages")
    borders = [0, *accumulate(layers)]
    if not {*layers_before}.issuperset(borders):
        sizes = ", ".join(f"{count} × {len(kinds)}" for kinds, count in model.pattern.runs(model.layers))
        groups = f"splits a group of layers, and {model.title} has groups of {sizes}"
        raise UsageError(f"{flag} {groups}; move the border")
    return list(map(layers_before.index, borders))


def _equal_borders(model, pipe: int, chunks: int, layers_before: list[int]) -> list[int]:
    """The same for stages with as equal numbers of layers as possible, and at least one group each."""
    groups, stages, borders = len(layers_before) - 1, pipe * chunks, [0]
    if stages > groups:
        several = f" in {groups} groups, which stages cannot split" if groups < model.layers else ""
        virtual = f" × --mesh.virtual-stages {chunks}" if chunks > 1 else ""
        has = f"{model.layers} layers{several}; use at most {groups} stages"
        raise UsageError(f"--mesh.pipe {pipe}{virtual} is more than {model.title} can fill with {has}")
    for left in range(stages, 0, -1):
        before = layers_before[borders[-1]]
        wanted = before + -(-(model.layers - before) // left)
        borders.append(min(bisect_left(layers_before, wanted), groups - left + 1))
    return borders


def _shortest(kinds: tuple, groups: int = 1) -> tuple[tuple, int]:
    """The shortest group that repeats to `groups` times `kinds`, and its number of repeats."""
    size = next(n for n in range(1, len(kinds) + 1) if kinds == kinds[:n] * (len(kinds) // n))
    return kinds[:size], groups * len(kinds) // size
