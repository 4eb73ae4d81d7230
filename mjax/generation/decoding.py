"""The weights that generation computes with, and their layers, one after the other.

For every token a loop over layers would copy what it cuts out of stacks: all weights, and the whole cache. Here each
layer is cut out once (docs/results/log/2026-11-28-generation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from mjax.config import Config
from mjax.config.pattern import LayerKind
from mjax.models.causal import CausalModel, DecodeLayers
from mjax.models.context import Context
from mjax.models.parts.attention import KeyValues
from mjax.models.stack import kinds_in, map_stacks, runs_with_weights
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


def decoder(config: Config, layout: Layout, weights: CausalModel) -> DecodeLayers:
    """Inside `shard_map`: what runs the layers of `inference_weights`, also over stages of a pipeline."""
    mesh, dtype = config.mesh, COMPUTE_TYPES[config.precision.compute]
    gathered = map_stacks(lambda stack: layer_gather(stack, dtype, inference=True), layout.plan.blocks)
    if mesh.pipe == 1:
        return partial(decode_layers, decoders_of(weights.blocks, layout.abstract_model.blocks, gathered))

    def decode(x, context, cached, lengths):
        def stage(chunk, x, cached):
            return decode_layers(decoders_of(unstacked(chunk), chunk, gathered), x, context, cached, lengths)

        return pipeline_decode(mesh.pipe, mesh.chunks, stage, weights.blocks, x, cached)

    return decode


def spec_for_inference(storage: Storage) -> P:
    """The PartitionSpec of a weight of `gather_for_inference`."""
    gathered = () if storage.gather_per_layer else {axis for names, _ in storage.gathers for axis in names}
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in storage.spec)
    return P(*(tuple(axis for axis in entry if axis not in gathered) or None for entry in entries))


def unstacked(blocks, take: Callable[[Any, int], Any] = lambda weight, repetition: weight[repetition]) -> list:
    """Each layer of `blocks` by itself, in order; `take` gives a weight of one of the repetitions."""
    layers = []
    for stacks, _, count in runs_with_weights(blocks, None):
        for number in range(count):
            repetition, which = divmod(number, len(stacks))
            layers.append(jax.tree.map(lambda weight: take(weight, repetition), stacks[which]))  # noqa: B023
    return layers


def decoders_of(
    layers: Sequence, blocks, weights_of: Sequence[Sequence[Callable | None]] | None = None
) -> list[Callable]:
    """`Block.decode` of each of the `unstacked` layers of `blocks`; `weights_of` is as in `run_blocks`."""
    places = []
    for stacks, gathers, count in runs_with_weights(blocks, weights_of):
        group = [(gathers[which], kind) for which, _, kind in kinds_in(stacks)]
        places += group * (count // len(group))
    return [partial(_decode, layer, *place) for layer, place in zip(layers, places, strict=True)]


def _decode(block, gather: Callable | None, kind: LayerKind, x, context, cached, lengths) -> tuple:
    block = block if gather is None else gather(block)
    return block.decode(x, replace(context, kind=kind), cached, lengths)


def decode_layers(
    decoders: Sequence[Callable],
    x: Float[Array, "t h"],
    context: Context,
    cached: Sequence[KeyValues] | None,
    lengths: Int[Array, " b"],
) -> tuple[Float[Array, "t h"], list[KeyValues]]:
    """Run `decoders_of` a model, with a cache for each. Not a loop: that would copy what it cuts out of stacks, the
    weights and the whole cache, for every token."""
    new = []
    for decode, of_layer in zip(decoders, cached or [None] * len(decoders), strict=True):
        x, of_layer = decode(x, context, of_layer, lengths)
        new.append(of_layer)
    return x, new
