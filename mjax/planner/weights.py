"""Weights that one device stores and computes with, and the work of Muon on them.

The model is traced once. Its storage on a mesh (`parallel/zero.py`) is then arithmetic on shapes, thousands of meshes
per second. Muon's matrices have the shapes of the weights (`parallel/matrices.py`); its matmuls are those of the traced
iteration (`step/muon.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mjax.config import Config, MeshConfig, axes
from mjax.config.model import ModelConfig
from mjax.models.build import abstract_weights, frozen_weights, matrix_dims
from mjax.parallel.matrices import Matrices
from mjax.parallel.zero import computed_spec, is_layer, storage_of
from mjax.planner.calibration import WIDTHS, Rates
from mjax.step.muon import ITERATE_IN, newton_schulz
from mjax.trace.program import Product, Program
from mjax.utils.stacks import stack_and_turn


@dataclass(frozen=True)
class DeviceWeights:
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


def weights_of_device(
    model: ModelConfig, mesh: MeshConfig, kind: tuple[int, int] | None = None, trained: bool = False
) -> DeviceWeights:
    """Elements of `model` that one device of `mesh` holds, or of those that are `trained`; with `kind`
    (`trace.kinds_of`) of the layers of that kind alone."""
    return all_and_trained(model, mesh, kind)[trained]


def all_and_trained(
    model: ModelConfig, mesh: MeshConfig, kind: tuple[int, int] | None = None
) -> tuple[DeviceWeights, DeviceWeights]:
    """`weights_of_device` of all weights, and of those that are trained."""
    return _device_weights(model, _sizes(mesh), kind)


def matrices_of(model: ModelConfig, mesh: MeshConfig) -> tuple[Matrices, ...]:
    """The matrices of `model` on `mesh`, one entry a weight."""
    return _matrices(model, _sizes(mesh))


@lru_cache(maxsize=16384)
def of_layers(mesh: MeshConfig) -> MeshConfig:
    """The mesh as far as the work of layers depends on it, without a pipeline and gathers of weights."""
    return MeshConfig(
        data=mesh.expert,
        model=mesh.model,
        expert=mesh.expert,
        context=mesh.context,
        context_attention=mesh.context_attention,
        sequence_parallel=mesh.sequence_parallel,
    )


_sizes = attrgetter("pipe", "data", "model", "expert", "context", "zero", "replica")
"""Everything of a mesh that the storage of weights depends on, but for the shape that chunks give them."""


def _mesh(pipe: int, data: int, model: int, expert: int, context: int, zero: int, replica: int) -> MeshConfig:
    return MeshConfig(pipe, data, model, expert, context, zero=zero, replica=replica)


@lru_cache(maxsize=4096)
def _device_weights(
    model: ModelConfig, sizes: tuple[int, ...], kind: tuple[int, int] | None
) -> tuple[DeviceWeights, DeviceWeights]:
    """Return the elements of all weights, and of those that are trained."""
    every = _elements(model, _mesh(*sizes), kind, trained=False)
    return every, _elements(model, _mesh(*sizes), kind, trained=True) if frozen_weights(model) else every


def _elements(model: ModelConfig, mesh: MeshConfig, kind: tuple[int, int] | None, trained: bool) -> DeviceWeights:
    total: Counter[str] = Counter()
    for name, (shape, spec) in abstract_weights(model).items():
        if trained and name in frozen_weights(model):
            continue
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
        total["experts"] += computed if axes.EXPERT in computed_as else 0
        total["largest"] = max(total["largest"], computed)
        if storage.gather_per_layer:
            total["gathered"] += computed
            total["gathered_shards"] += stored
            ((_, dim),) = storage.gathers
            if _local(shape[1:dim], P(*computed_as[1:dim]), mesh) > 1:
                total["transposed"] = max(total["transposed"], computed)
    return DeviceWeights(**total)


@lru_cache(maxsize=4096)
def _matrices(model: ModelConfig, sizes: tuple[int, ...]) -> tuple[Matrices, ...]:
    mesh = _mesh(*sizes)
    return tuple(
        Matrices(shape, storage_of(name, shape, spec, mesh).spec, *matrix_dims(model)[name], mesh)
        for name, (shape, spec) in abstract_weights(model).items()
        if name in matrix_dims(model)
    )


def _local(shape: tuple[int, ...], spec: P, mesh: MeshConfig) -> int:
    """Elements per device of an array that is sharded so."""
    split = (axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))
    return math.prod(shape) // math.prod(axes.sizes(mesh)[axis] for axis in split)


# --- Muon: matmuls of its iteration, collectives that make each matrix whole, memory ----------------------------------


class MuonCollective(NamedTuple):
    """A collective of the update of one weight.

    Attributes:
      operation: all-to-all, all-gather or all-reduce.
      axis: of the mesh.
      elements: in the whole tensor of an all-gather or all-reduce, in a device's operand of an all-to-all.
      times: in a step.
    """

    operation: str
    axis: str
    elements: int
    times: int


def muon_width(config: Config) -> int:
    """Bytes of an element in the iteration."""
    return WIDTHS[ITERATE_IN[config.precision.compute]]


def muon_workspace(config: Config) -> float:
    """Bytes of the temporaries of the largest weight."""

    def elements(matrices: Matrices) -> int:
        # Of an iteration x, its product, the next x and a copy, and three squares; what is sent and received.
        whole, squares = math.prod(matrices.size), min(matrices.size) ** 2
        moved = math.prod(matrices.shape) // math.prod(axes.sizes(matrices.mesh)[axis] for axis in matrices.splits)
        return matrices.per_rank * (4 * whole + 3 * squares) + (2 * moved if matrices.moves else 0)

    return muon_width(config) * max(map(elements, matrices_of(config.model, config.mesh)), default=0)


def muon_iteration_seconds(config: Config, rates: Rates) -> float:
    """Seconds in which the busiest device orthogonalizes its matrices."""
    rates = Rates(rates.gpu, rates.calibration, ITERATE_IN[config.precision.compute])
    return sum(
        rates.product(product.m, product.n, product.k, product.batch)
        for matrices in matrices_of(config.model, config.mesh)
        for product in muon_products(matrices.per_rank, *matrices.size)
    )


def muon_exchange_seconds(config: Config, rates: Rates) -> dict[str, float]:
    """Seconds in which matrices become whole and results go back, by mesh axis."""
    sizes, seconds = axes.sizes(config.mesh), dict.fromkeys(axes.NAMES, 0.0)
    for sent in muon_collectives(config):
        inner = axes.NAMES[axes.NAMES.index(sent.axis) + 1 :]
        stride = math.prod(sizes[axis] for axis in inner)
        # An all-to-all sends as much as a gather.
        collective = rates.sum if sent.operation == "all-reduce" else rates.gather
        seconds[sent.axis] += sent.times * collective(sizes[sent.axis], stride, sent.elements * muon_width(config))
    return seconds


def muon_collectives(config: Config) -> Iterator[MuonCollective]:
    """The collectives of a device's update, weight by weight."""
    sizes = axes.sizes(config.mesh)
    for matrices in matrices_of(config.model, config.mesh):
        count, part = matrices.count, math.prod(matrices.size)  # elements of a matrix that a device has
        for axis, dim in matrices.moves:
            part //= 1 if dim is None else sizes[axis]
        for axis, dim in matrices.moves:
            ranks = sizes[axis]
            share = -(-count // ranks)
            if dim is not None:
                yield MuonCollective("all-to-all", axis, share * ranks * part, times=2)
                part *= ranks
            elif ranks <= count:
                yield MuonCollective("all-gather", axis, share * ranks * part, times=1)
            else:
                yield MuonCollective("all-reduce", axis, count * part, times=1)
            count = share


@lru_cache(maxsize=4096)
def muon_products(count: int, rows: int, columns: int) -> tuple[Product, ...]:
    """The matmuls of the iteration on `count` matrices."""
    stack = jax.ShapeDtypeStruct((count, rows, columns), jnp.float32)
    return Program(jax.make_jaxpr(newton_schulz)(stack)).products
