"""Weights as whole arrays, where `mjax convert` has a layer of one at a time."""

import json
from pathlib import Path

import jax
import numpy as np

from mjax.config import Config, read_config
from mjax.interop.convert import abstract_weights, find_family
from mjax.interop.settings import model_config
from mjax.interop.tensor_files import open_tensors
from mjax.interop.weights import as_stored, block_reader, find_tensors, leaves, tensor_parts
from mjax.names import leaf_name
from mjax.state.checkpoint import Checkpoints
from tests.small import named


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


def folder_weights(folder: Path, mesh=None):
    """The weights in a model folder, as `mjax convert` reads them, in the shards of a mesh."""
    values, tensors = json.loads((folder / "config.json").read_text()), open_tensors(folder)
    family = as_stored(find_family(values, folder), tensors)
    model = model_config(family, values, str(folder), 128)
    names = find_tensors(family, tensors, model, str(folder))
    return read_weights(family, tensors, names, model, abstract_weights(Config(model=model), mesh))


def weights_of(run: Path) -> dict[str, np.ndarray]:
    """The weights of a run folder by name."""
    config = read_config(run / "config.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        return named(checkpoints.restore(abstract_weights(config), field="model")[1])


def assert_same(ours, theirs):
    """Arrays by name, equal in every bit and of the same dtype."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name, strict=True)
