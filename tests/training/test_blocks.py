"""Checkpoints written and read a layer at a time are those that Orbax writes and reads whole."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mjax.config import MeshConfig
from mjax.parallel.mesh import make_mesh
from mjax.state import arrays, blocks
from mjax.state.blocks import read_in_blocks, write_in_blocks
from mjax.state.checkpoint import Checkpoints

RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "blocks": {"up": RANDOM.normal(size=(4, 8, 2, 16)), "norm": RANDOM.normal(size=(4, 8))},
    "table": RANDOM.normal(size=(50, 8)),
    "norm": np.zeros(8),  # which TensorStore would leave out
}
WEIGHTS = jax.tree.map(lambda array: array.astype(np.float32), WEIGHTS)
NAMES = {"blocks.up": WEIGHTS["blocks"]["up"], "blocks.norm": WEIGHTS["blocks"]["norm"]}
NAMES |= {"table": WEIGHTS["table"], "norm": WEIGHTS["norm"]}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (arrays, blocks):
        monkeypatch.setattr(module, "CHUNK_BYTES", 256)


def on(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def quiet(folder):
    return Checkpoints(folder, on_notice=lambda line: None)


@pytest.mark.parametrize("axis", [None, "data", "model"])
def test_a_checkpoint_written_in_blocks_is_restored_whole_on_any_mesh(axis, tmp_path):
    asked = []

    def read(name, first, end):
        asked.append((name, first, end))
        return NAMES[name][first:end]

    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), WEIGHTS)
    write_in_blocks(tmp_path, "model", shapes, read)
    assert [request for request in asked if request[0] == "blocks.up"] == [
        ("blocks.up", layer, layer + 1) for layer in range(4)
    ]
    mesh = make_mesh(MeshConfig() if axis is None else MeshConfig(**{axis: 2}))
    specs = {"blocks": {"up": PartitionSpec(None, axis), "norm": PartitionSpec()}}
    places = on(mesh, specs | {"table": PartitionSpec(axis), "norm": PartitionSpec()})
    target = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )
    with quiet(tmp_path) as checkpoints:
        step, found = checkpoints.restore(target, field="model")
    assert step == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), WEIGHTS)


@pytest.mark.parametrize("chunks", [1, 2], ids=["layers in order", "two chunks of a pipeline per stage"])
def test_a_checkpoint_of_training_is_read_a_layer_at_a_time(chunks, tmp_path):
    mesh = make_mesh(MeshConfig(pipe=2, model=2))

    def stored(array, spec):
        if chunks == 2 and len(spec) > 1:
            array, spec = array.reshape(2, 2, *array.shape[1:]), (None, *spec)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    state = {
        "blocks": {"up": stored(WEIGHTS["blocks"]["up"], ("pipe", "model")),
                   "norm": stored(WEIGHTS["blocks"]["norm"], ("pipe", None))},
        "table": stored(WEIGHTS["table"], ("model",)),
        "norm": stored(WEIGHTS["norm"], ()),
    }  # fmt: skip
    with quiet(tmp_path) as checkpoints:
        checkpoints.save(7, {"model": state})
    for name, expected in NAMES.items():
        found = list(read_in_blocks(tmp_path / "7", f"model.{name}", expected.ndim))
        assert [first for first, _ in found] == np.cumsum([0, *(len(block) for _, block in found[:-1])]).tolist()
        np.testing.assert_array_equal(np.concatenate([block for _, block in found]), expected)
    assert len(list(read_in_blocks(tmp_path / "7", "model.blocks.up", 4))) == 4


def test_a_folder_may_be_relative_and_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("a b%20?#ü")
    write_in_blocks(folder, "model", {"norm": jax.ShapeDtypeStruct((8,), np.float32)}, lambda *_: WEIGHTS["norm"] + 1)
    ((first, found),) = read_in_blocks(folder / "0", "model.norm", 1)
    assert (first, found.tolist()) == (0, [1.0] * 8)
