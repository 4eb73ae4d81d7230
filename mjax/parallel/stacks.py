"""Weights of stacked layers in other forms, where layers are written out one after the other (`train.unroll`).

The model keeps its structure; a stacked weight [l, …] is replaced by

    Apart          an array for each layer: a loop over micro-batches would cut them out of the stack in each of them
    Accumulated    what the last micro-batch needs to sum the gradients of all micro-batches layer by layer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from mjax.parallel import mappings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Apart:
    """A weight of stacked layers as one array for each.

    Attributes:
      layers: […] each.
    """

    layers: tuple[Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulated:
    """A weight in the last micro-batch of a step whose gradient is summed over `data` with those of the others.

    Attributes:
      shard: as stored; its gradient is this rank's part of the sum. Its values are not used.
      weight: gathered, in the compute dtype.
      gradient: sum of the gradients of the micro-batches before, in float32 or wider.
    """

    shard: Array
    weight: Array | Apart
    gradient: Array


def apart(stacked: Array) -> Apart:
    """A stacked weight, cut into its layers."""
    return Apart(tuple(layer[0] for layer in jax.lax.split(stacked, [1] * stacked.shape[0])))


def joined(tree):
    """`tree` with each `Apart` as one stacked array."""

    def one(leaf: Array | Apart) -> Array:
        return jax.lax.concatenate([layer[None] for layer in leaf.layers], 0) if _is_apart(leaf) else leaf

    return jax.tree.map(one, tree, is_leaf=_is_apart)


def zeros_like(tree, dtype):
    """Zeros of the shapes in `joined(tree)`."""

    def one(leaf: Array | Apart) -> Array:
        if not _is_apart(leaf):
            return jnp.zeros_like(leaf, dtype=dtype)
        first = leaf.layers[0]
        return mappings.vary(jnp.zeros((len(leaf.layers), *first.shape), dtype), mappings.varying_axes(first))

    return jax.tree.map(one, tree, is_leaf=_is_apart)


def layers_of(stack) -> list:
    """The layers of a stack. Their gradients are joined once: those of slices would be added up layer by layer."""
    leaves, tree = jax.tree.flatten(stack, is_leaf=_is_apart)
    parts = [(leaf if _is_apart(leaf) else apart(leaf)).layers for leaf in leaves]
    return [jax.tree.unflatten(tree, layer) for layer in zip(*parts, strict=True)]


def depth(stack) -> int:
    """The number of layers of a stack."""
    first = jax.tree.leaves(stack, is_leaf=_is_apart)[0]
    return len(first.layers) if _is_apart(first) else first.shape[0]


def shards_of(layer):
    """The stored shards of a layer's weights."""
    return jax.tree.map(lambda leaf: leaf.shard if _is_accumulated(leaf) else leaf, layer, is_leaf=_is_accumulated)


def with_shards(layer, shards):
    """The reverse of `shards_of`: `layer` with these instead of its own."""

    def one(leaf, shard: Array):
        return replace(leaf, shard=shard) if _is_accumulated(leaf) else shard

    return jax.tree.map(one, layer, shards, is_leaf=_is_accumulated)


def _is_apart(leaf) -> bool:
    return isinstance(leaf, Apart)


def _is_accumulated(leaf) -> bool:
    return isinstance(leaf, Accumulated)


# --- Names ------------------------------------------------------------------------------------------------------------

STACK = re.compile(r"^blocks\.(?:(\d+)\.)?(?:turns\.(\d+)\.)?")
"""What the name of a stacked weight begins with: the number of its stack, and of its turn (`models/block.py`)."""


def name_in_layer(name: str) -> str:
    """The name of a stacked weight as in a model whose layers are all alike: 'blocks.1.mlp.up' → 'blocks.mlp.up'."""
    return STACK.sub("blocks.", name)


def stack_and_turn(name: str) -> tuple[int, int]:
    """The numbers of the stack and of the turn of a stacked weight: 'blocks.1.mlp.up' → (1, 0)."""
    stack, turn = (int(number or 0) for number in STACK.match(name).groups())
    return stack, turn


def numbers_of_layers(depths: Mapping[str, int]) -> dict[str, range]:
    """The layers of the model, from 1, whose weights are stacked in each array, from the number of layers in it."""
    turns, of_stack = {}, {}
    for name, layers in depths.items():
        stack, turn = stack_and_turn(name)
        turns[stack] = max(turns.get(stack, 1), turn + 1)
        of_stack[stack] = layers
    first = {stack: 1 + sum(of_stack[other] * turns[other] for other in of_stack if other < stack) for stack in turns}
    found = {}
    for name, layers in depths.items():
        stack, turn = stack_and_turn(name)
        start, step = first[stack] + turn, turns[stack]
        found[name] = range(start, start + layers * step, step)
    return found
