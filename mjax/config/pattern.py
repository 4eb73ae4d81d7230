"""The pattern of a model's layers, and the stacks of their weights. No JAX is imported here.

    Pattern((LayerKind(512),) * 5 + (LayerKind(),))                    five layers with a window, one without, repeated
    Pattern((LayerKind(weights="experts"),), (LayerKind(),) * 3)       three layers, then layers of another kind

A run is a repeated group of layers: one scan. Layers of a group with equal weights are one stack, whose weights have a
leading dim; otherwise each layer of the group has a stack. Prefixes of the weight names:

    all layers have equal weights               blocks.
    layers of a group have different weights    blocks.turns.0.  blocks.turns.1.  …     layers 1, 3, 5 …  2, 4, 6 …
    several runs                                blocks.0.  blocks.1.  …                 layers 1, 2, 3    4, 5, 6 …
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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


LAYERS = "blocks"
"""First part of the names of all layer weights."""
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


def stage_unit(model) -> int:
    """The number that divides the layers of a pipeline stage: a group, or with several runs all layers."""
    runs = model.pattern.runs(model.layers)
    return len(runs[0][0]) if len(runs) == 1 else model.layers


def check_stages(model, mesh) -> None:
    """Check that pipeline stages have whole groups of layers.

    Raises:
      UsageError: a stage would split a group.
    """
    runs, unit, stages = model.pattern.runs(model.layers), stage_unit(model), mesh.pipe * mesh.virtual_stages
    if mesh.pipe > 1 and len(runs) > 1:
        groups = [(count * len(kinds), len(kinds)) for kinds, count in runs]
        parts = ", then ".join(f"{layers} in groups of {size}" if size > 1 else f"{layers}" for layers, size in groups)
        stacks = f"cannot split {model.title}, which has several stacks of layers: {parts}"
        raise UsageError(f"--mesh.pipe {mesh.pipe} {stacks}; use --mesh.pipe 1 with --mesh.zero 3")
    if mesh.pipe > 1 and model.layers // stages % unit:
        stage = f"the {model.layers // stages} layers that a pipeline stage runs in a row"
        fix = "change --model.layers, --mesh.pipe or --mesh.virtual-stages"
        raise UsageError(f"the layers of {model.title} repeat every {unit}, which does not divide {stage}; {fix}")


def _shortest(kinds: tuple, groups: int = 1) -> tuple[tuple, int]:
    """The shortest group that repeats to `groups` times `kinds`, and its number of repeats."""
    size = next(n for n in range(1, len(kinds) + 1) if kinds == kinds[:n] * (len(kinds) // n))
    return kinds[:size], groups * len(kinds) // size
