"""The pattern of a model's layers, and the stacks in which their weights are. No JAX is imported here.

    Pattern((LayerKind(512),) * 5 + (LayerKind(),))                    five layers with a window, one without, and again
    Pattern((LayerKind(weights="experts"),), (LayerKind(),) * 3)       three layers, then others to the end

A run is a group of layers, repeated: one scan. Layers of a group with equal weights are one stack, whose weights have a
leading dim; else each layer of the group has a stack. So the names of weights begin, where

    all layers have equal weights             blocks.
    layers of the group have other weights    blocks.turns.0.  blocks.turns.1.  …     layers 1, 3, 5 …  2, 4, 6 …
    runs follow each other                    blocks.0.  blocks.1.  …                 layers 1, 2, 3    4, 5, 6 …
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mjax.errors import UsageError


class LayerKind(NamedTuple):
    """What distinguishes a layer from others of the same model.

    Attributes:
      window: tokens that a position sees in attention, itself included; None: all up to its own.
      weights: a name; layers with different names have different weights.
    """

    window: int | None = None
    weights: str = ""


LAYERS = "blocks"
"""The first part of the name of every weight of layers."""
PLAIN = LayerKind()


@dataclass(frozen=True)
class Pattern:
    """Kinds of layers: `first`, then `group` again and again."""

    group: tuple[LayerKind, ...] = (PLAIN,)
    first: tuple[LayerKind, ...] = ()

    def runs(self, layers: int) -> list[tuple[tuple[LayerKind, ...], int]]:
        """The kinds of a group, and the number of groups, of each run of a model with so many layers. Layers after the
        last whole group are a run."""
        first = self.first[:layers]
        groups, rest = divmod(layers - len(first), len(self.group))
        runs = (first, 1), (self.group, groups), (self.group[:rest], 1)
        return [_shortest(kinds, count) for kinds, count in runs if kinds and count]


@dataclass(frozen=True)
class Stack:
    """Layers with equal weights, which are stacked.

    Attributes:
      name: the beginning of the names of the weights, without the last dot.
      run: number of the run, from 0.
      kinds: of the layers of a group that are in the stack.
      numbers: of the layers in the model, from 1.
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
        behind = first + groups * len(kinds)
        for i in range(count):
            of_stack = f"{name}.turns.{i}" if count > 1 else name
            stacks.append(Stack(of_stack, run, kinds[i::count], range(first + i, behind, count)))
        first = behind
    return tuple(stacks)


def find_stack(model, weight: str) -> Stack | None:
    """The stack of the weight with this name; None for one outside layers."""
    return next((stack for stack in layer_stacks(model) if weight.startswith(f"{stack.name}.")), None)


def stage_unit(model) -> int:
    """The number of layers of which a stage of a pipeline has a multiple: a group, or all of several runs."""
    runs = model.pattern.runs(model.layers)
    return len(runs[0][0]) if len(runs) == 1 else model.layers


def check_stages(model, mesh) -> None:
    """Check that the stages of a pipeline have whole groups of layers.

    Raises:
      UsageError: they do not.
    """
    runs, unit, stages = model.pattern.runs(model.layers), stage_unit(model), mesh.pipe * mesh.virtual_stages
    if mesh.pipe > 1 and len(runs) > 1:
        groups = [(count * len(kinds), len(kinds)) for kinds, count in runs]
        parts = ", then ".join(f"{layers} in groups of {size}" if size > 1 else f"{layers}" for layers, size in groups)
        raise UsageError(
            f"--mesh.pipe {mesh.pipe} cannot split {model.title}, which has several stacks of layers: {parts}; "
            "use --mesh.pipe 1 with --mesh.zero 3"
        )
    if mesh.pipe > 1 and model.layers // stages % unit:
        raise UsageError(
            f"the layers of {model.title} repeat every {unit}, which does not divide the {model.layers // stages} "
            "layers that a pipeline stage runs in a row; choose other --model.layers, --mesh.pipe or "
            "--mesh.virtual-stages"
        )


def _shortest(kinds: tuple, groups: int = 1) -> tuple[tuple, int]:
    """The shortest group that, repeated, gives `groups` times `kinds`; and how often."""
    size = next(n for n in range(1, len(kinds) + 1) if kinds == kinds[:n] * (len(kinds) // n))
    return kinds[:size], groups * len(kinds) // size
