"""Checkpoints written and read a layer at a time are those that Orbax writes and reads whole."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mjax.checkpoint import arrays
from mjax.checkpoint.arrays import read_in_blocks
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.config import MeshConfig
from mjax.interop.convert import write_checkpoint
from mjax.parallel.mesh import make_mesh
from mjax.parallel.weights import COLUMNS, IN, LAYER, OUT, PART

RANDOM = np.random.default_rng(0)
NAMES = {
    "blocks.up": RANDOM.normal(size=(4, 8, 2, 16)).astype(np.float32),
    "blocks.norm": RANDOM.normal(size=(4, 8)).astype(np.float32),
    "table": RANDOM.normal(size=(50, 8)).astype(np.float32),
    "norm": np.zeros(8, np.float32),  # which TensorStore would leave out
}


def tree_of(leaves):
    dims = {"blocks.up": (LAYER, IN, PART, COLUMNS), "blocks.norm": (LAYER, OUT)}
    layers = {name.removeprefix("blocks."): nnx.Param(leaves[name], dims=card) for name, card in dims.items()}
    return {"blocks": layers} | {name: leaf for name, leaf in leaves.items() if "." not in name}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 256)


def quiet(folder):
    return Checkpoints(folder, on_notice=lambda line: None)


def test_checkpoint_in_blocks_is_restored_on_a_mesh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, asked = Path("a b%20?#ü"), []

    def read(name, first, end):
        asked.append((name, first, end))
        return NAMES[name][first:end]

    mesh = make_mesh(MeshConfig(data=2))
    specs = dict.fromkeys(NAMES, PartitionSpec()) | {"blocks.up": PartitionSpec(None, "data")}
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, array in NAMES.items()
    }
    write_checkpoint(folder, {"model": tree_of(target)}, read)
    assert [request[1:] for request in asked if request[0] == "blocks.up"] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with quiet(folder) as checkpoints:
        step, found = checkpoints.restore(tree_of(target), field="model")
    assert step == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), tree_of(NAMES))


@pytest.mark.parametrize("chunks", [1, 2], ids=["layers in order", "two chunks of a pipeline per stage"])
def test_trained_checkpoint_is_read_by_layer(chunks, tmp_path):
    mesh = make_mesh(MeshConfig(pipe=2, model=2))
    specs = {"blocks.up": ("pipe", "model"), "blocks.norm": ("pipe", None), "table": ("model",), "norm": ()}

    def stored(name, array):
        spec = specs[name]
        if chunks == 2 and name in ("blocks.up", "blocks.norm"):
            array, spec = array.reshape(2, 2, *array.shape[1:]), (None, *spec)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    with quiet(tmp_path) as checkpoints:
        checkpoints.save(7, {"model": tree_of({name: stored(name, array) for name, array in NAMES.items()})})
    for name, expected in NAMES.items():
        found = list(read_in_blocks(tmp_path / "7", f"model.{name}", expected.ndim))
        assert [first for first, _ in found] == np.cumsum([0, *(len(block) for _, block in found[:-1])]).tolist()
        np.testing.assert_array_equal(np.concatenate([block for _, block in found]), expected)
    assert len(list(read_in_blocks(tmp_path / "7", "model.blocks.up", 4))) == 4
