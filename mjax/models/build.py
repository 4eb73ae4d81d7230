"""Weights and classes of the model of a config, from the traced model: nothing is allocated."""

import math
from functools import lru_cache

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config.axes import EXPERT
from mjax.config.model import ModelConfig
from mjax.models.parts.positions import Positions
from mjax.models.protocol import Model, build_model
from mjax.parallel.weights import Dims, leaf_name, muon_matrices, read_dims, weight_metadata


@lru_cache(maxsize=64)
def abstract_weights(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shape and PartitionSpec of every weight by name, from the traced model; nothing is allocated."""
    shapes = trace_model(config)
    specs = jax.tree.leaves(nnx.get_partition_spec(shapes), is_leaf=lambda spec: isinstance(spec, P))
    named = jax.tree_util.tree_leaves_with_path(shapes)
    return {leaf_name(path): (leaf.shape, spec) for (path, leaf), spec in zip(named, specs, strict=True)}


@lru_cache(maxsize=64)
def matrix_dims(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """`weights.matrix_dims` of every weight that is a matrix or a stack of them, by name."""
    matrices = zip(abstract_weights(config), muon_matrices(trace_model(config)), strict=True)
    return {name: matrix for name, matrix in matrices if matrix}


@lru_cache(maxsize=64)
def weight_dims(config: ModelConfig) -> dict[str, Dims]:
    """The names of the dims of each weight (`parallel/weights.py`), by name of the weight."""
    return dict(zip(abstract_weights(config), read_dims(trace_model(config)), strict=True))


@lru_cache(maxsize=64)
def frozen_weights(config: ModelConfig) -> frozenset[str]:
    """The names of the weights that are not trained."""
    marks = zip(abstract_weights(config), weight_metadata(trace_model(config), "frozen"), strict=True)
    return frozenset(name for name, frozen in marks if frozen)


@lru_cache(maxsize=64)
def trace_model(config: ModelConfig) -> Model:
    """The model of ShapeDtypeStructs."""
    return jax.eval_shape(lambda: build_model(0, config))


@lru_cache(maxsize=64)
def mixing_class(config: ModelConfig) -> str | None:
    """Name the model's first class that may mix or count positions on its own; None if no class does.

    A user-defined class may, unless its `mixes_positions` is False. A layer's counts for the modules in it, too, a
    model's for its `embed` and `loss` alone.
    """
    return _mixing_class(trace_model(config))


def _mixing_class(part: nnx.Module | Positions | Model) -> str | None:
    if mixes := _mixes_positions(type(part)):
        return type(part).__name__
    if mixes is False and not isinstance(part, Model):
        return None
    inner = (module for module in vars(part).values() if isinstance(module, nnx.Module | Positions))
    return next(filter(None, map(_mixing_class, inner)), None)


def _mixes_positions(cls: type) -> bool | None:
    """The `mixes_positions` of a class, by default True; None for a class of mjax, and for one without a forward."""
    for base in cls.__mro__:
        if base.__module__.startswith("mjax."):
            return None
        if "mixes_positions" in vars(base):
            return base.mixes_positions
        if vars(base).keys() & {"__call__", "apply_to_qk", "embed", "loss"}:
            return True
    return None


def count_parameters(config: ModelConfig, trained: bool = False) -> int:
    """Exact number of parameters, or of the `trained` ones; a tied embedding counts once."""
    omitted = frozen_weights(config) if trained else ()
    return sum(math.prod(shape) for name, (shape, _) in abstract_weights(config).items() if name not in omitted)


def count_active(config: ModelConfig) -> int:
    """Parameters that a token uses: all, but of a mixture's experts only `experts_per_token`."""

    def count_used(shape: tuple[int, ...], spec: P) -> int:
        size = math.prod(shape)
        return size * config.experts_per_token // config.experts if EXPERT in spec else size

    return sum(count_used(*weight) for weight in abstract_weights(config).values())
