"""The weights that generation computes with, and their layers, one after the other.

For every token a loop over layers would copy what it cuts out of stacks: all weights, and the whole cache. Here each
layer is cut out once (docs/results/log/2026-11-28-generation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from mjax.config import Config
from mjax.config.axes import CONTEXT, MODEL, PIPE
from mjax.models.causal import CausalModel, Layers
from mjax.models.context import Context
from mjax.models.stack import map_stacks, runs_with_weights
from mjax.parallel import mappings
from mjax.parallel.pipeline import pipeline_decode
from mjax.parallel.zero import Storage, gather_for_inference, layer_gather
from mjax.step.layout import Layout
from mjax.step.precision import COMPUTE_TYPES


def inference_weights(config: Config, layout: Layout, model: CausalModel) -> CausalModel:
    """Inside `shard_map`: the weights to compute with. Without a pipeline each layer is by itself, not in a stack."""
    weights = gather_for_inference(model, layout.plan, COMPUTE_TYPES[config.precision.compute])
    if config.mesh.pipe == 1:
        weights.blocks = nnx.List(unstacked(weights.blocks))
    return weights


def weight_specs(config: Config, layout: Layout):
    """PartitionSpecs of `inference_weights`."""

    def used(leaf: jax.ShapeDtypeStruct, storage: Storage) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=NamedSharding(leaf.sharding.mesh, spec_for_inference(storage)))

    def of_layer(leaf: jax.ShapeDtypeStruct, repetition: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:]))
        return leaf.update(shape=leaf.shape[1:], sharding=sharding)

    weights = jax.tree.map(used, layout.abstract_model, layout.plan)
    if config.mesh.pipe == 1:
        weights.blocks = nnx.List(unstacked(weights.blocks, of_layer))
    return jax.tree.map(lambda leaf: leaf.sharding.spec, weights)


def layers_of(config: Config, layout: Layout, weights: CausalModel) -> Layers:
    """Inside `shard_map`: the layers of `inference_weights`, with the interface of one."""
    dtype = COMPUTE_TYPES[config.precision.compute]
    gathered = map_stacks(lambda stack: layer_gather(stack, dtype, inference=True), layout.plan.blocks)
    if config.mesh.pipe == 1:
        return LayerList(weights.blocks, _places(layout.abstract_model.blocks, gathered), cache_axes(config))
    return PipelineLayers(config, weights.blocks, gathered)


def cache_axes(config: Config) -> tuple[str, ...]:
    """Axes of the mesh along which each rank has a cache of its own: one of its layers, heads or positions."""
    return (*[PIPE] * (config.mesh.pipe > 1), MODEL, *[CONTEXT] * (config.across is not None))


def spec_for_inference(storage: Storage) -> P:
    """The PartitionSpec of a weight of `gather_for_inference`."""
    gathered = () if storage.gather_per_layer else {axis for names, _ in storage.gathers for axis in names}
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in storage.spec)
    return P(*(tuple(axis for axis in entry if axis not in gathered) or None for entry in entries))


def unstacked(blocks, take: Callable[[Any, int], Any] = lambda weight, repetition: weight[repetition]) -> list:
    """Each layer of `blocks` by itself, in order; `take` gives a weight of one of the repetitions."""
    return [jax.tree.map(lambda weight: take(weight, i), stack) for stack, i, *_ in _places(blocks)]  # noqa: B023


def _places(blocks, gathered: Sequence[Sequence[Callable | None]] | None = None) -> list[tuple]:
    """For each layer of `blocks`, in order, its stack, its repetition, what gathers its weights (`weights_of` of
    `run_blocks`), and its kind."""
    places = []
    for stacks, gathers, count in runs_with_weights(blocks, gathered):
        for number in range(count):
            repetition, i = divmod(number, len(stacks))
            kinds = stacks[i].kinds
            places.append((stacks[i], repetition, gathers[i], kinds[repetition % len(kinds)]))
    return places


class LayerList(NamedTuple):
    """Layers one after the other. Not a loop: that would copy what it cuts out of stacks, the weights and the whole
    cache, for every token.

    Attributes:
      layers: each by itself.
      places: of these layers.
      axes: as `cache_axes`.
    """

    layers: Sequence
    places: list[tuple]
    axes: tuple[str, ...]

    def empty_cache(self, sequences: int, slots: int, dtype) -> list:
        """That of each layer."""
        return self._of_rank([layer.empty_cache(sequences, slots, dtype) for layer in self.layers])

    def decode(
        self, x: Float[Array, "t h"], context: Context, cached: list, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], list]:
        """As `Block.decode`, with the cache of each layer."""
        new = []
        for layer, (_, _, gather, kind), of_layer in zip(self.layers, self.places, cached, strict=True):
            block = layer if gather is None else gather(layer)
            x, of_layer = block.decode(x, replace(context, kind=kind), of_layer, lengths)
            new.append(of_layer)
        return x, self._of_rank(new)

    def _of_rank(self, cache: list) -> list:
        """The cache, typed to vary over `axes`, so that the types stay the same in loops."""
        return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset(self.axes)), cache)


class PipelineLayers(NamedTuple):
    """The layers of all stages of a pipeline, in turn; caches have a leading dim of a stage's chunks."""

    config: Config
    blocks: Any
    gathered: list

    def _of(self, chunk) -> LayerList:
        return LayerList(unstacked(chunk), _places(chunk, self.gathered), cache_axes(self.config))

    def empty_cache(self, sequences: int, slots: int, dtype) -> list:
        """That of each chunk of this stage."""
        chunks = self.config.mesh.chunks
        chunk = self.blocks if chunks == 1 else jax.tree.map(itemgetter(0), self.blocks)
        empty = self._of(chunk).empty_cache(sequences, slots, dtype)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (chunks, *leaf.shape)), empty)

    def decode(
        self, x: Float[Array, "t h"], context: Context, cached: list, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], list]:
        """As `Block.decode`, with the caches of the chunks."""
        mesh = self.config.mesh

        def stage(chunk, x, cached):
            return self._of(chunk).decode(x, context, cached, lengths)

        return pipeline_decode(mesh.pipe, mesh.chunks, stage, self.blocks, x, cached)
