"""The weights that generation computes with, and their layers, one after the other.

For every token a loop over layers would copy what it cuts out of stacks: all weights, and the whole cache. Here each
layer is cut out once (docs/results/log/2026-11-28-generation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from mjax.models.block import groups_with_weights, map_layers, period_of
from mjax.models.causal import CausalModel, Layers
from mjax.models.context import Context
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
        sharding = NamedSharding(leaf.sharding.mesh, spec_for_inference(storage))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def of_layer(leaf: jax.ShapeDtypeStruct, repetition: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)

    weights = jax.tree.map(used, layout.abstract_model, layout.plan)
    if config.mesh.pipe == 1:
        weights.blocks = nnx.List(unstacked(weights.blocks, of_layer))
    return jax.tree.map(lambda leaf: leaf.sharding.spec, weights)


def layers_of(config: Config, layout: Layout, weights: CausalModel) -> Layers:
    """Inside `shard_map`: the layers of `inference_weights`, with the interface of one."""
    dtype = COMPUTE_TYPES[config.precision.compute]
    gathered = map_layers(lambda stack: layer_gather(stack, dtype, inference=True), layout.plan.blocks)
    if config.mesh.pipe == 1:
        return LayerList.of(weights.blocks, layout.abstract_model.blocks, gathered, cache_axes(config))
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
    layers = []
    for group, _, count in groups_with_weights(blocks, None):
        for number in range(count):
            repetition, which = divmod(number, len(group))
            layers.append(jax.tree.map(lambda weight: take(weight, repetition), group[which]))  # noqa: B023
    return layers


class LayerList(NamedTuple):
    """Layers one after the other. Not a loop: that would copy what it cuts out of stacks, the weights and the whole
    cache, for every token.

    Attributes:
      layers: each with what gathers its weights, or None, and its number in the group.
      axes: as `cache_axes`.
    """

    layers: list[tuple[Any, Callable | None, int]]
    axes: frozenset[str]

    @classmethod
    def of(cls, layers: Sequence, blocks, gathered, axes: Iterable[str]) -> LayerList:
        """The `unstacked` layers of `blocks`; `gathered` is the `weights_of` of `run_blocks`."""
        places = [
            (gathers[number % len(group)], number % period_of(group))
            for group, gathers, count in groups_with_weights(blocks, gathered)
            for number in range(count)
        ]
        return cls([(layer, *place) for layer, place in zip(layers, places, strict=True)], frozenset(axes))

    def empty_cache(self, sequences: int, slots: int, dtype) -> list:
        """That of each layer."""
        empty = [layer.empty_cache(sequences, slots, dtype) for layer, _, _ in self.layers]
        return jax.tree.map(lambda leaf: mappings.vary(leaf, self.axes), empty)

    def decode(
        self, x: Float[Array, "t h"], context: Context, cached: list, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], list]:
        """As `Block.decode`, with the cache of each layer."""
        new = []
        for (layer, gather, number), of_layer in zip(self.layers, cached, strict=True):
            block = layer if gather is None else gather(layer)
            x, of_layer = block.decode(x, replace(context, layer_in_group=number), of_layer, lengths)
            new.append(of_layer)
        return x, jax.tree.map(lambda leaf: mappings.vary(leaf, self.axes), new)


class PipelineLayers(NamedTuple):
    """The layers of all stages of a pipeline, in turn; caches have a leading dim of a stage's chunks."""

    config: Config
    blocks: Any
    gathered: list

    def _of(self, chunk) -> LayerList:
        return LayerList.of(unstacked(chunk), chunk, self.gathered, cache_axes(self.config))

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
