"""The model of a config, built or only traced."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from mjax.config.axes import EXPERT
from mjax.config.model import ModelConfig
from mjax.lora.add import add_adapters
from mjax.models.protocol import Model
from mjax.parallel.weights import Dims, dims_of, metadata_of, muon_matrices
from mjax.utils.names import leaf_name
from mjax.utils.stacks import STACK, stack_and_turn


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
def weight_dims(config: ModelConfig) -> dict[str, Dims | None]:
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


def has_several_stacks(config: ModelConfig) -> bool:
    """Whether the model's layers are an `nnx.List` of stacks rather than one."""
    return any(name.startswith("blocks.0.") for name in abstract_weights(config))


def layers_differ(config: ModelConfig) -> bool:
    """Whether the model has layers of several kinds, one after the other or in turns."""
    return len(layers_of_kinds(config)) > 1


@lru_cache(maxsize=64)
def layers_of_kinds(config: ModelConfig) -> dict[tuple[int, int], int]:
    """The layers of each stack and turn (`models/block.py`), by their numbers; of one stack alone under (0, 0)."""
    weights = abstract_weights(config).items()
    return {stack_and_turn(name): shape[0] for name, (shape, _) in weights if STACK.match(name)}


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
        return size * config.taken_experts() // config.parted_experts() if EXPERT in spec else size

    return sum(used(*weight) for weight in abstract_weights(config).values())
