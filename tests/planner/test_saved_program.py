"""A step in a file: it computes what the step computes, and a file from outside is opened without harm."""

import json
import zipfile

import jax
import numpy as np
import pytest

from mjax import cli
from mjax.errors import UsageError
from mjax.parallel.mesh import make_mesh
from mjax.planner import compile as ahead
from mjax.planner.saved_program import check_save, open_program, save_program
from mjax.training.step import build_program
from tests.small import QUICKLY, batch_of, small_config


def test_a_step_that_was_saved_computes_the_same_bits(tmp_path):
    pytest.importorskip("flatbuffers", reason="the format of saved programs; in requirements-dev.txt")
    config = small_config(2, 2, micro_batch=4, dropout=0.0, layers=1)
    program, file = build_program(config, make_mesh(config.mesh)), tmp_path / "step.mjax"
    save_program(file, config, program, "cpu", {"gpu": "none"}, "HloModule")
    assert [path.name for path in tmp_path.iterdir()] == ["step.mjax"], "no temporary file is left"

    saved = open_program(file)
    assert saved.manifest["mesh"] == {"pipe": 1, "data": 2, "model": 2}
    assert saved.manifest["config"]["model"]["layers"] == 1
    assert saved.step.nr_devices == 4
    state, batch = program.initialize(), jax.device_put(batch_of(config), program.batch_sharding)
    leaves = jax.tree.leaves((state, batch))
    described = [(tuple(a["shape"]), a["dtype"]) for a in saved.manifest["arguments"]]
    assert described == [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    assert "model.embedding.table" in {argument["name"] for argument in saved.manifest["arguments"]}
    found = jax.jit(saved.step.call, compiler_options=QUICKLY)(*leaves)
    expected = jax.jit(program.train_step, compiler_options=QUICKLY)(state, batch)
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_no_saved_program_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "step.mjax"
    file.write_bytes(b"\x80\x04\x95 a pickle, perhaps")
    with pytest.raises(UsageError, match="is no program that mjax plan --save-program wrote"):
        open_program(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("manifest.json", json.dumps({"format": 2}))
        archive.writestr("step.stablehlo", b"")
    with pytest.raises(UsageError, match="has format 2 and this mjax reads 1"):
        open_program(file)


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_compiled(tmp_path, capsys, monkeypatch):
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere; make it"):
        check_save(tmp_path / "nowhere" / "step.mjax")
    monkeypatch.setattr(ahead, "_has_cuda_wheels", lambda: True)
    folder = str(tmp_path / "nowhere" / "step.mjax")
    assert cli.main(["plan", "--config", "gpt_8b", "--compile", "--gpu", "h100", "--save-program", folder]) == 2
    assert "--save-program" in capsys.readouterr().err
    assert cli.main(["plan", "--config", "gpt_8b", "--save-program", "step.mjax"]) == 2
    assert "add --compile" in capsys.readouterr().err
