"""Checkpoints: bit for bit on any mesh, complete or absent."""

import dataclasses
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import absl.logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp

from mjax.errors import RunError, UsageError
from mjax.state.checkpoint import Checkpoints
from tests.training.saved import (
    abstract,
    assert_same_bits,
    data_file,
    mesh_of,
    save_all,
    save_large,
    state_on,
)

ROOT = Path(__file__).resolve().parents[2]


# --- What is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "spec"), [((4, 2), P("data", "model")), ((2, 4), P("model", "data")), ((1, 1), P())])
def test_a_checkpoint_of_one_mesh_is_restored_bit_for_bit_on_another(checkpoints, shape, spec):
    saved = state_on(mesh_of(4, 2), P("data", "model"))
    checkpoints.save(100, saved)
    target = abstract(state_on(mesh_of(*shape), spec))
    step, restored = checkpoints.restore(target)
    assert step == 100
    assert_same_bits(restored, saved)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding


def float64_state():
    saved = {"model": jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)))}
    assert saved["model"].dtype == jnp.float64
    return saved


def test_float64_is_restored_bit_for_bit(checkpoints):
    jax.config.update("jax_enable_x64", True)
    try:
        saved = float64_state()
        checkpoints.save(1, saved)
        assert_same_bits(checkpoints.restore(abstract(saved))[1], saved)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_float64_that_would_be_read_as_float32_is_refused(checkpoints):
    with jax.enable_x64(True):  # this thread only; Orbax reads in others
        saved = float64_state()
        checkpoints.save(1, saved)
        with pytest.raises(RunError, match="model of checkpoint 1 came back in float32, not float64"):
            checkpoints.restore(abstract(saved))


def test_arrays_are_named_by_dotted_path_on_disk(checkpoints):
    save_all(checkpoints, 1)
    manifest = json.loads((checkpoints.folder / "1" / "manifest.json").read_text())
    assert manifest["arrays"] == {
        "model.bias": ["float32", [16]],
        "model.up": ["float32", [8, 16]],
        "optimizer.count": ["uint32", [3]],
        "optimizer.mu": ["bfloat16", [8, 16]],
        "optimizer.nu": ["float16", [8, 16]],
        "step": ["int32", []],
    }


def test_one_field_is_restored_without_the_bytes_of_the_others(checkpoints):
    target = save_all(checkpoints, 5)
    shutil.rmtree(checkpoints.folder / "5" / "optimizer")
    step, model = checkpoints.restore(target.model, field="model")
    assert step == 5
    assert_same_bits(model, state_on(mesh_of(4, 2), value=5).model)
    with pytest.raises(RunError, match=r"optimizer/.* is missing"):
        checkpoints.restore(target)


@pytest.mark.parametrize("spec", [P("data", "model"), P("data"), P()])
def test_buffers_donated_right_after_save_do_not_reach_the_checkpoint(checkpoints, spec):
    mesh = mesh_of(4, 2)
    sharding = NamedSharding(mesh, spec)
    weights = {"model": jax.jit(lambda: jnp.full((2048, 2048), 1.0), out_shardings=sharding)()}
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    target = abstract(weights)
    jax.block_until_ready(overwrite(jax.tree.map(jnp.copy, weights)))  # compiled before the race
    checkpoints.save(1, weights)
    for _ in range(5):
        weights = overwrite(weights)
    jax.block_until_ready(weights)
    _, restored = checkpoints.restore(target)
    assert (np.asarray(restored["model"]) == 1.0).all()


def test_saving_returns_before_the_checkpoint_is_there_and_says_saved_only_after(tmp_path):
    seen = []
    with Checkpoints(tmp_path, on_notice=lambda line: seen.append((line, checkpoints.steps()))) as checkpoints:
        big = {"model": jax.random.normal(jax.random.key(0), (2048, 2048))}
        checkpoints.save(1, big)
        assert (checkpoints.steps(), seen) == ([], [])
        checkpoints.wait()
    [(line, steps)] = seen
    assert re.fullmatch(r"checkpoint 1 saved: 1\d\.\d MB in \d+\.\d s", line)
    assert steps == [1]


def test_a_target_without_a_sharding_is_refused(checkpoints):
    target = save_all(checkpoints, 1)
    bare = dataclasses.replace(target, step=jax.ShapeDtypeStruct((), jnp.int32))
    with pytest.raises(ValueError, match="step of the target has no sharding"):
        checkpoints.restore(bare)


def test_saving_a_step_that_is_there_changes_nothing(checkpoints):
    target = save_all(checkpoints, 3)
    checkpoints.save(3, state_on(mesh_of(4, 2), value=99))
    assert_same_bits(checkpoints.restore(target)[1], state_on(mesh_of(4, 2), value=3))


# --- What stays -------------------------------------------------------------------------------------------------------


def test_the_last_two_stay_and_the_others_go(checkpoints):
    save_all(checkpoints, 1, 2, 3, 10)
    assert checkpoints.steps() == [3, 10]
    assert sorted(entry.name for entry in checkpoints.folder.iterdir()) == ["10", "3"]


def test_every_nth_stays_for_good(tmp_path):
    with Checkpoints(tmp_path, keep_last=1, keep_every=4, on_notice=lambda _: None) as checkpoints:
        save_all(checkpoints, 2, 4, 6, 8, 10, 11)
        assert checkpoints.steps() == [4, 8, 11]


def test_a_checkpoint_saved_below_the_others_is_not_removed_at_once(checkpoints):
    save_all(checkpoints, 100, 200, 50)
    assert checkpoints.steps() == [50, 100, 200]


def test_a_process_killed_while_it_removes_leaves_no_half_checkpoint(checkpoints, notices, monkeypatch):
    save_all(checkpoints, 1, 2)

    def killed_half_way(folder):
        data_file(folder).unlink()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed_half_way)
        save_all(checkpoints, 3)
    assert notices[-1] == "checkpoint 1 could not be removed: Permission denied"
    assert checkpoints.steps() == [2, 3]


# --- Another model ----------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shapes(checkpoints):
    target = save_all(checkpoints, 200)

    def refused(other, message):
        with pytest.raises(UsageError, match=re.escape(f"checkpoint 200 has {message}; use the config.json beside it")):
            checkpoints.restore(other)

    wider = abstract(state_on(mesh_of(4, 2), width=32))
    refused(wider, "model.bias of shape (16,), this config needs (32,)")
    mu = target.optimizer["mu"]
    other_type = {**target.optimizer, "mu": jax.ShapeDtypeStruct(mu.shape, jnp.float32, sharding=mu.sharding)}
    refused(dataclasses.replace(target, optimizer=other_type), "optimizer.mu in bfloat16, this config needs float32")
    more = dataclasses.replace(target, optimizer={**target.optimizer, "extra": mu})
    refused(more, "no optimizer.extra, this config needs one of shape (8, 16)")
    fewer = dataclasses.replace(target, optimizer={"mu": mu, "nu": target.optimizer["nu"]})
    refused(fewer, "optimizer.count of shape (3,), this config has none")


# --- Noise ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_does_not_talk_over_the_run_and_other_users_of_absl_do(checkpoints, caplog):
    save_all(checkpoints, 1)
    metadata = checkpoints.folder / "1" / "_CHECKPOINT_METADATA"
    metadata.write_bytes(metadata.read_bytes()[:-10])
    ocp.load_checkpointables(checkpoints.folder / "1")  # logs an error: the metadata is no JSON
    absl.logging.warning("from someone else")
    assert [record.getMessage() for record in caplog.records] == ["from someone else"]


# --- Saves that fail --------------------------------------------------------------------------------------------------


def test_a_full_disk_is_named_and_earlier_checkpoints_stay_intact(tmp_path, capfd):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    try:
        with Checkpoints(folder / "checkpoints", on_notice=lambda _: None) as checkpoints:
            target = save_large(checkpoints, 200)
            big = {"model": jax.random.normal(jax.random.key(1), (512, 512)), "step": jnp.int32(300)}
            checkpoints.save(300, big)
            with pytest.raises(RunError, match=r"checkpoint 300 .*: No space left on device; intact checkpoints: 200"):
                checkpoints.wait()
            assert [entry.name for entry in checkpoints.folder.iterdir()] == ["200"]  # the space is given back
            assert checkpoints.restore(target)[0] == 200
            save_large(checkpoints, 300)
            assert checkpoints.restore(target)[0] == 300
    finally:
        subprocess.run(["umount", folder], check=True)
    assert capfd.readouterr().err == ""


def test_a_file_size_limit_is_named(checkpoints):
    target = save_large(checkpoints, 200)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        checkpoints.save(300, {"model": jax.random.normal(jax.random.key(1), (512, 512)), "step": jnp.int32(300)})
        with pytest.raises(RunError, match=r"checkpoint 300 .*: File too large; intact checkpoints: 200"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.restore(target)[0] == 200


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with (
        Checkpoints(tmp_path / "file" / "checkpoints", on_notice=lambda _: None) as checkpoints,
        pytest.raises(
            RunError, match=r"checkpoint 1 could not be saved in .*: Not a directory; intact checkpoints: none"
        ),
    ):
        checkpoints.save(1, {"model": jnp.ones(3)})


# --- kill -9 ----------------------------------------------------------------------------------------------------------

SAVING_FOR_EVER = """
import itertools, sys
import jax, jax.numpy as jnp
from mjax.state.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], on_notice=lambda line: print(line, flush=True))
first = max(checkpoints.steps(), default=0)
for step in itertools.count(first + 1):
    checkpoints.save(step, {"model": jnp.full((1024, 1024), step, jnp.float32), "step": jnp.int32(step)})
"""


def test_a_process_killed_while_it_saves_leaves_only_whole_checkpoints(tmp_path, notices):
    script = tmp_path / "save.py"
    script.write_text(SAVING_FOR_EVER)
    folder = tmp_path / "checkpoints"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    draw = random.Random(0)
    announced = 0
    target = abstract({"model": jnp.zeros((1024, 1024)), "step": jnp.int32(0)})
    with Checkpoints(folder, on_notice=notices.append) as checkpoints:
        for _ in range(5):
            process = subprocess.Popen(
                [sys.executable, script, folder],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            saved = 0
            while saved < 2:  # it runs, and old checkpoints are being removed too
                line = process.stdout.readline()
                assert line, process.stderr.read()
                saved += " saved: " in line
            time.sleep(draw.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate()
            announced = max(map(int, re.findall(r"checkpoint (\d+) saved", line + rest)))
            step, restored = checkpoints.restore(target)
            assert step >= announced  # what was called saved is there
            assert int(restored["step"]) == step
            assert (np.asarray(restored["model"]) == step).all()
        assert notices == []  # an unfinished folder is no damaged checkpoint
        checkpoints.save(step + 1, {"model": jnp.zeros((1024, 1024)), "step": jnp.int32(step + 1)})
        checkpoints.wait()
        assert all(entry.name.isdecimal() for entry in folder.iterdir())


def test_what_a_killed_save_left_behind_is_removed_and_named_by_the_next(checkpoints, notices):
    save_all(checkpoints, 1)
    for left in ("2.writing", "3.writing.orbax-checkpoint-tmp", "0.deleting"):
        shutil.copytree(checkpoints.folder / "1", checkpoints.folder / left)
    shutil.copytree(checkpoints.folder / "1", checkpoints.folder / "1.kept-by-a-person")
    notices.clear()
    target = save_all(checkpoints, 2)
    assert notices[:2] == [
        "removed 2.writing: an unfinished save of checkpoint 2",
        "removed 3.writing.orbax-checkpoint-tmp: an unfinished save of checkpoint 3",
    ]
    assert sorted(entry.name for entry in checkpoints.folder.iterdir()) == ["1", "1.kept-by-a-person", "2"]
    assert checkpoints.restore(target)[0] == 2
