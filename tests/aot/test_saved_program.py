"""A step in a file: it computes what the step computes, and a file from outside is opened without harm."""

import zipfile
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.aot import saved_program
from benchmarks.aot.saved_program import open_program, save_program
from mjax.config.axes import DATA
from mjax.errors import UsageError
from mjax.parallel import mappings
from mjax.parallel.mesh import make_mesh, sharded_shapes
from tests.small import small_config


def tiny_program(mesh):
    """A step of one matrix on a mesh, instead of a `TrainProgram`: no seconds of compilation."""

    def step(state, batch):
        gradient = mappings.psum(batch["x"].T @ (batch["x"] @ state["weight"]), frozenset({DATA}))
        return {"weight": state["weight"] - 0.1 * gradient}, gradient.sum()

    mapped = jax.shard_map(step, mesh=mesh, in_specs=({"weight": P()}, {"x": P(DATA)}), out_specs=(P(), P()))
    shapes = {"weight": jax.ShapeDtypeStruct((4, 3), np.float32)}, {"x": jax.ShapeDtypeStruct((8, 4), np.float32)}
    specs = {"weight": P()}, {"x": P(DATA)}
    state, batch = sharded_shapes(shapes, specs, mesh)
    return SimpleNamespace(train_step=jax.jit(mapped, donate_argnums=0), abstract_state=state, abstract_batch=batch)


def test_saved_step_computes_same_bits(tmp_path):
    pytest.importorskip("flatbuffers", reason="the format of saved programs; in requirements-dev.txt")
    config, file = small_config(4, 1), tmp_path / "step.mjax"
    program = tiny_program(make_mesh(config.mesh))
    save_program(file, config, program, "cpu", {"gpu": "none"}, "HloModule")
    assert [path.name for path in tmp_path.iterdir()] == ["step.mjax"], "no temporary file is left"

    saved = open_program(file)
    assert saved.step.nr_devices == 4
    assert saved.manifest["config"]["model"]["hidden"] == config.model.hidden
    assert [(a["name"], a["shape"], a["dtype"]) for a in saved.manifest["arguments"]] == [
        ("weight", [4, 3], "float32"),
        ("x", [8, 4], "float32"),
    ]
    leaves = jax.tree.leaves((program.abstract_state, program.abstract_batch))
    values = (np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32) for leaf in leaves)
    placed = [jax.device_put(value, leaf.sharding) for value, leaf in zip(values, leaves, strict=True)]
    found = jax.jit(saved.step.call)(*placed)
    expected = program.train_step({"weight": placed[0]}, {"x": placed[1]})
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (" " * 200_001, "it is damaged .its .* has more than 200,000 bytes"),  # a zip bomb
        (None, "is not a program that benchmarks/aot/step.py wrote"),
        ('{"format": 2}', "has format 2 and this mjax reads 1"),
        ("[" * 100_000, "or it is damaged .maximum recursion"),
        ('{"format": 1}', "the step in it is damaged"),
    ],
    ids=["bomb", "pickle", "format", "deep", "step"],
)
def test_damaged_program_is_rejected(tmp_path, monkeypatch, manifest, words):
    monkeypatch.setattr(saved_program, "LARGEST", 200_000)
    file = tmp_path / "step.mjax"
    file.write_bytes(b"\x80\x04\x95 a pickle, perhaps")
    if manifest is not None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", manifest)
            archive.writestr("step.stablehlo", b"")
    with pytest.raises(UsageError, match=words):
        open_program(file)
