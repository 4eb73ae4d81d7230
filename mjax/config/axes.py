"""The mesh axes: one row each, from which specs, reductions and the commands' tables are derived.

    axis      splits     gradient of a weight that ranks of the axis share
    pipe      layers     partial sums of the stages that use it: summed after the backward pass
    replicate batch      of the rank's samples: summed after the backward pass
    data      batch      the same; ZeRO splits weights over it, never over `replicate`
    expert    batch      the same; the experts of a mixture are split over it, and no two ranks share one
    context   positions  of the rank's positions: summed after the backward pass
    model     columns    equal on all ranks; with sequence parallelism of the rank's tokens: summed after it

The first axis is outermost, the last innermost: its devices are neighbors. `expert` and `replicate` divide the
data-parallel replicas, as in Megatron. For example, `--mesh.data 8 --mesh.expert 4` are 8 replicas, in 2 groups of 4
that share all experts; `--mesh.data 8 --mesh.replicate 2` are 2 groups of 4 that share all weights. The axis `data` of
the mesh then has size 2 or 4, and these axes together split the batch.

A new axis is a row here, a field of the same name in `MeshConfig`, and the code that computes with it. This module
imports no JAX.
"""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

Splits = Literal["layers", "batch", "positions", "columns"]


@dataclass(frozen=True)
class Axis:
    """A mesh axis.

    Attributes:
      name: in PartitionSpecs; `--mesh.NAME` is its size (`sizes` divides `data` by the virtual axes).
      splits: what it divides: layers, samples of the batch, positions of every sample, or
        columns and rows of matrices.
      sums: when ranks that share a weight have different gradients for it, to be summed after the backward pass:
        always, if its size is above 1, or with sequence parallelism.
      shards: True if ZeRO splits replicated weights over it.
    """

    name: str
    splits: Splits
    sums: Literal["always", "above 1", "with sequence parallelism"]
    shards: bool = True


AXES = (
    Axis("pipe", "layers", "above 1"),
    Axis("replicate", "batch", "always", shards=False),
    Axis("data", "batch", "always"),
    Axis("expert", "batch", "always"),
    Axis("context", "positions", "always"),
    Axis("model", "columns", "with sequence parallelism"),
)
NAMES = tuple(axis.name for axis in AXES)
PIPE, REPLICATE, DATA, EXPERT, CONTEXT, MODEL = NAMES
VIRTUAL_AXES = (REPLICATE, EXPERT)  # axes without devices: they divide the replicas of `--mesh.data`


def sizes(mesh) -> dict[str, int]:
    """Size of each axis of a `MeshConfig`, by name: `data` divided by `replicate` and `expert`."""
    return cli_sizes(mesh) | {DATA: mesh.data // (mesh.replicate * mesh.expert)}


def cli_sizes(mesh) -> dict[str, int]:
    """Sizes of the axes as typed, by name: `data` counts all replicas."""
    return {name: getattr(mesh, name) for name in NAMES}


def describe_mesh(mesh, *shown: str) -> str:
    """`data 8 (expert 4) × model 2`: data, model, the axes `shown`, and those above 1."""
    typed = cli_sizes(mesh)
    virtual = ", ".join(f"{name} {size}" for name in VIRTUAL_AXES if (size := typed.pop(name)) > 1)
    words = {name: f"{name} {size}" for name, size in typed.items() if size > 1 or name in (DATA, MODEL, *shown)}
    words[DATA] += f" ({virtual})" if virtual else ""
    return " × ".join(words.values())


@lru_cache(maxsize=16384)
def copies(mesh) -> int:
    """Number of copies of a weight that neither layers nor columns nor experts split."""
    return math.prod(sizes(mesh)[name] for name in axes_sharing_weights())


@lru_cache(maxsize=16384)
def shards(mesh) -> int:
    """Number of shards into which ZeRO splits such a weight."""
    return math.prod(sizes(mesh)[name] for name in sharding())


@cache
def axes_splitting(what: Splits) -> tuple[str, ...]:
    """Names of the axes that split `what`, outermost first."""
    return tuple(axis.name for axis in AXES if axis.splits == what)


def axes_sharing_weights() -> tuple[str, ...]:
    """Names of the axes whose ranks have copies of a weight and different tokens, outermost first."""
    return axes_splitting("batch") + axes_splitting("positions")


@cache
def sharding() -> tuple[str, ...]:
    """Names of the axes of `axes_sharing_weights` over which ZeRO splits a weight."""
    return tuple(axis.name for axis in AXES if axis.shards and axis.name in axes_sharing_weights())


def gradient_sum_axes(mesh) -> frozenset[str]:
    """Axes over which the gradients of weights are summed after the backward pass rather than in it."""
    sums = {"always": True, "with sequence parallelism": mesh.splits_tokens}
    return frozenset(axis.name for axis in AXES if sums.get(axis.sums, sizes(mesh)[axis.name] > 1))
