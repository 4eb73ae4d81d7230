"""The model of a config, built or only traced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from mjax.config.axes import EXPERT
from mjax.config.model import ModelConfig
from mjax.lora.adapters import add_adapters
from mjax.models.parts.positions import Positions
from mjax.models.protocol import Model
from mjax.parallel.weights import Dims, dims_of, metadata_of, muon_matrices
from mjax.utils.names import leaf_name


def build_model(seed: int | Array, config: ModelConfig, dtype=jnp.float32) -> Model:
    """The model whose initial weights are a function of `seed` and `config`, whatever the mesh it is sharded over."""
    model = config.build(jax.random.key(seed), dtype)
    return add_adapters(model, jax.random.key(seed), dtype) if config.lora_rank else model


@lru_cache(maxsize=64)
def abstract_weights(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shape and PartitionSpec of every weight by name, from the traced model; nothing is allocated."""
    shapes = _traced(config)
    specs = jax.tree.leaves(nnx.get_partition_spec(shapes), is_leaf=lambda spec: isinstance(spec, P))
    named = jax.tree_util.tree_leaves_with_path(shapes)
    return {leaf_name(path): (leaf.shape, spec) for (path, leaf), spec in zip(named, specs, strict=True)}


@lru_cache(maxsize=64)
def matrix_dims(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rows and columns, as in `matrices.Matrices`, of every weight that is a matrix or a stack of them, by name."""
    matrices = zip(abstract_weights(config), muon_matrices(_traced(config)), strict=True)
    return {name: matrix for name, matrix in matrices if matrix}


@lru_cache(maxsize=64)
def weight_dims(config: ModelConfig) -> dict[str, Dims]:
    """What the dims of each weight are (`parallel/weights.py`), by name."""
    return dict(zip(abstract_weights(config), dims_of(_traced(config)), strict=True))


@lru_cache(maxsize=64)
def frozen_weights(config: ModelConfig) -> frozenset[str]:
    """The names of the weights that are not trained."""
    return frozenset(
        name
        for name, frozen in zip(abstract_weights(config), metadata_of(_traced(config), "frozen"), strict=True)
        if frozen
    )


@lru_cache(maxsize=64)
def _traced(config: ModelConfig) -> Model:
    return jax.eval_shape(lambda: build_model(0, config))


@lru_cache(maxsize=64)
def mixing_class(config: ModelConfig) -> str | None:
    """The name of the first class of the model that may mix or count positions by itself; None: there is none.

    A class of yours may, unless its `mixes_positions` is False; a layer says that for the modules in it, too, a model
    for its `embed` and `loss` alone.
    """
    model = _traced(config)
    if _mixes_positions(type(model)):
        return type(model).__name__
    return next((name for part in _parts(model) for name in _mixing_classes(part)), None)


def _mixing_classes(part: nnx.Module | Positions) -> Iterator[str]:
    mixes = _mixes_positions(type(part))
    if mixes:
        yield type(part).__name__
    elif mixes is None:
        for inner in _parts(part):
            yield from _mixing_classes(inner)


def _parts(whole: Any) -> list[nnx.Module | Positions]:
    return [part for part in vars(whole).values() if isinstance(part, nnx.Module | Positions)]


def _mixes_positions(cls: type) -> bool | None:
    """The `mixes_positions` of a class; None if it computes nothing, or is one of mjax."""
    for base in cls.__mro__:
        if base.__module__.startswith("mjax."):
            return None
        if "mixes_positions" in vars(base):
            return base.mixes_positions
        if vars(base).keys() & {"__call__", "turn", "embed", "loss"}:
            return True
    return None


def scores_in_chunks(config: ModelConfig) -> bool:
    """Whether the model has a loss in chunks (`train.loss_chunks`)."""
    return _traced(config).scores_in_chunks()


def count_parameters(config: ModelConfig, trained: bool = False) -> int:
    """Exact number of parameters, or of those that are `trained`; a tied embedding counts once."""
    left_out = frozen_weights(config) if trained else ()
    return sum(math.prod(shape) for name, (shape, _) in abstract_weights(config).items() if name not in left_out)


def count_active(config: ModelConfig) -> int:
    """Parameters that a token uses: all, but of the experts of a mixture those that it takes."""

    def used(shape: tuple[int, ...], spec: P) -> int:
        size = math.prod(shape)
        return size * config.experts_per_token // config.experts if EXPERT in spec else size

    return sum(used(*weight) for weight in abstract_weights(config).values())
