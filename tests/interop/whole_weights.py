"""Weights as whole arrays, where `mjax convert` has a layer of one at a time."""

import jax
import numpy as np

from mjax.interop.weights import block_reader, leaves, tensor_parts
from mjax.names import leaf_name


def read_weights(family, tensors, names, model, target):
    """The weights in the shards of `target`, a model of ShapeDtypeStructs."""
    read = block_reader(family, tensors, names, model, lambda size: None)

    def leaf(path, target):
        whole = read(leaf_name(path), 0, target.shape[0])
        return jax.make_array_from_callback(target.shape, target.sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(leaf, target)


def weight_arrays(family, weights, model):
    """The tensors of a model folder by name, from whole weights."""
    arrays = {name: np.asarray(leaf) for name, leaf in leaves(weights).items()}
    return {name: rows for name, _, rows in tensor_parts(family, model, lambda name, rank: [(0, arrays[name])])}


def reader_of(weights):
    """What `write_run` reads, from whole weights."""
    arrays = {name: np.asarray(leaf) for name, leaf in leaves(weights).items()}
    return lambda name, first, end: arrays[name][first:end]
