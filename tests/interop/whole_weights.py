"""Weights as whole arrays, where `mjax convert` has a layer of one at a time."""

import json
from pathlib import Path

import numpy as np

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.config import Config, read_config
from mjax.interop.convert import abstract_model, find_family
from mjax.interop.tensor_files import open_tensors
from mjax.interop.weights import iterate_tensors, make_block_reader, match_tensors, weights_by_name, with_stored_experts
from mjax.models.huggingface.family import model_config
from tests.small import named


def read_weights(family, tensors, model, where):
    """The weights by name, out of the tensors of a folder that a message calls `where`."""
    names = match_tensors(family, tensors, model, where)
    read = make_block_reader(family, tensors, names, model, lambda size: None)
    return {
        name: read(name, 0, leaf.shape[0])
        for name, leaf in weights_by_name(abstract_model(Config(model=model))).items()
    }


def weight_arrays(family, weights, model):
    """The tensors of a model folder by name, from whole weights."""
    arrays = {name: np.asarray(leaf) for name, leaf in weights_by_name(weights).items()}
    return {
        name: rows
        for name, _, rows in iterate_tensors(
            family, model, lambda name, rank: [(0, arrays[name.removeprefix("model.")])]
        )
    }


def reader_of(weights):
    """Return a reader for `write_run`, from whole weights."""
    arrays = {name: np.asarray(leaf) for name, leaf in weights_by_name(weights).items()}
    return lambda name, first, end: arrays[name][first:end]


def folder_weights(folder: Path) -> dict[str, np.ndarray]:
    """The weights in a model folder by name, as `mjax convert` reads them."""
    values, tensors = json.loads((folder / "config.json").read_text()), open_tensors(folder)
    family = with_stored_experts(find_family(values, folder), tensors)
    model = model_config(family, values, str(folder), 128)
    return read_weights(family, tensors, model, str(folder))


def weights_of(run: Path) -> dict[str, np.ndarray]:
    """The weights of a run folder by name."""
    config = read_config(run / "config.json")
    with Checkpoints(run / "checkpoints") as checkpoints:
        return named(checkpoints.restore(abstract_model(config), field="model")[1])


def assert_same(ours, theirs):
    """Arrays by name, equal in every bit and of the same dtype."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name, strict=True)
