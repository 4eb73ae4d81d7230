"""Weights that one device stores and computes with: the traced model, sharded by `parallel/zero.py`.

The model is traced once; its storage on a mesh is then arithmetic on shapes, thousands of meshes per second.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.config.model import ModelConfig
from mjax.models.build import abstract_weights, matrix_dims
from mjax.parallel.axes import EXPERT
from mjax.parallel.axes import sizes as sizes_of
from mjax.parallel.matrices import Matrices
from mjax.parallel.stacks import stack_and_turn
from mjax.parallel.zero import computed_spec, is_layer, storage_of


@dataclass(frozen=True)
class Held:
    """Elements that one device holds, on the pipeline stage with its share of the layers.

    Attributes:
      stored: master weights between steps, of layers and everything else; as many float32 gradients.
      matrices: of `stored`, those of which Muon keeps one moment rather than two.
      layers: weights of its layers, as used in the computation: split over `model`, and experts over `expert`.
      experts: of `layers`, those that `expert` splits: they are shared by fewer replicas than all other weights.
      shared: all other weights, as used in the computation.
      gathered: of `layers`, those gathered layer by layer inside the loop (ZeRO-3) and never held as a whole.
      gathered_shards: of `stored`, their shards.
      table: of `shared`, the embedding of the tokens.
      largest: of `layers`, the largest weight.
      transposed: of `gathered`, the largest weight whose shards are not contiguous: gathering it, and scattering its
        gradient, takes a copy in another order.
    """

    stored: int = 0
    matrices: int = 0
    layers: int = 0
    experts: int = 0
    shared: int = 0
    gathered: int = 0
    gathered_shards: int = 0
    table: int = 0
    largest: int = 0
    transposed: int = 0


def held_by(model: ModelConfig, mesh: MeshConfig, kind: tuple[int, int] | None = None) -> Held:
    """Elements of `model` that one device of `mesh` holds; with `kind` (`trace.kinds_of`) of the layers of that kind
    alone."""
    return _held(model, _sizes(mesh), kind)


def matrices_of(model: ModelConfig, mesh: MeshConfig) -> tuple[Matrices, ...]:
    """The matrices of `model` on `mesh`, one entry a weight."""
    return _matrices(model, _sizes(mesh))


def _sizes(mesh: MeshConfig) -> MeshConfig:
    """Everything of a mesh that the storage of weights depends on, but for the shape that chunks give them."""
    return MeshConfig(mesh.pipe, mesh.data, mesh.model, mesh.expert, mesh.context, zero=mesh.zero)


@lru_cache(maxsize=4096)
def _held(model: ModelConfig, mesh: MeshConfig, kind: tuple[int, int] | None) -> Held:
    total: Counter[str] = Counter()
    for name, (shape, spec) in abstract_weights(model).items():
        if kind is not None and not (is_layer(name) and stack_and_turn(name) == kind):
            continue
        storage, computed_as = storage_of(name, shape, spec, mesh), computed_spec(shape, spec, mesh)
        stored, computed = _local(shape, storage.spec, mesh), _local(shape, computed_as, mesh)
        total["stored"] += stored
        total["matrices"] += stored if name in matrix_dims(model) else 0
        if not is_layer(name):
            total["shared"] += computed
            total["table"] += computed if name == "embedding.table" else 0
            continue
        computed //= mesh.pipe
        total["layers"] += computed
        total["experts"] += computed if EXPERT in computed_as else 0
        total["largest"] = max(total["largest"], computed)
        if storage.in_loop:
            total["gathered"] += computed
            total["gathered_shards"] += stored
            ((_, dim),) = storage.gathers
            if _local(shape[1:dim], P(*computed_as[1:dim]), mesh) > 1:
                total["transposed"] = max(total["transposed"], computed)
    return Held(**total)


@lru_cache(maxsize=4096)
def _matrices(model: ModelConfig, mesh: MeshConfig) -> tuple[Matrices, ...]:
    return tuple(
        Matrices(shape, storage_of(name, shape, spec, mesh).spec, *matrix_dims(model)[name], mesh)
        for name, (shape, spec) in abstract_weights(model).items()
        if name in matrix_dims(model)
    )


def _local(shape: tuple[int, ...], spec: P, mesh: MeshConfig) -> int:
    """Elements per device of an array that is sharded so."""
    axes = (axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))
    sizes = sizes_of(mesh)
    return math.prod(shape) // math.prod(sizes[axis] for axis in axes)
