"""Checkpoints: bit for bit on any mesh, complete or absent."""

import errno
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import Base, save_base
from mjax.errors import RunError, UsageError
from tests.training.saved import abstract, assert_same_bits, data_file, entries, mesh_of, save_all, save_large, state_on

# --- What is saved comes back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "spec"), [((2, 4), P("model", "data")), ((1, 1), P())])
def test_checkpoint_is_restored_bit_for_bit_on_another_mesh(checkpoints, shape, spec):
    saved = state_on(mesh_of(4, 2), P("data", "model"))
    checkpoints.save(100, saved)
    target = abstract(state_on(mesh_of(*shape), spec))
    step, restored = checkpoints.restore(target)
    assert step == 100
    assert_same_bits(restored, saved)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding


def test_float64_is_restored_or_refused(checkpoints):
    """Orbax reads in other threads, where the mode of this one does not hold."""
    with jax.enable_x64(True):
        saved = {"model": jnp.asarray(np.random.default_rng(0).standard_normal((4, 4)))}
        checkpoints.save(1, saved)
        with pytest.raises(RunError, match="model of checkpoint 1 came back in float32, not float64"):
            checkpoints.restore(abstract(saved))
        jax.config.update("jax_enable_x64", True)
        try:
            assert_same_bits(checkpoints.restore(abstract(saved))[1], saved)
        finally:
            jax.config.update("jax_enable_x64", False)


def test_field_is_restored_without_the_others(checkpoints):
    target = save_all(checkpoints, 5)
    shutil.rmtree(checkpoints.folder / "5" / "optimizer")
    step, model = checkpoints.restore(target["model"], field="model")
    assert step == 5
    assert_same_bits(model, state_on(mesh_of(4, 2), value=5)["model"])
    with pytest.raises(RunError, match=r"optimizer/.* is missing"):
        checkpoints.restore(target)


@pytest.mark.parametrize("spec", [P("data", "model"), P()])
def test_save_returns_early_and_copies_donated_buffers(tmp_path, spec):
    sharding = NamedSharding(mesh_of(4, 2), spec)
    weights = {"model": jax.jit(lambda: jnp.full((2048, 2048), 1.0), out_shardings=sharding)()}
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    target, seen = abstract(weights), []
    jax.block_until_ready(overwrite(jax.tree.map(jnp.copy, weights)))  # compiled before the race
    with Checkpoints(tmp_path, on_notice=lambda line: seen.append((line, checkpoints.steps()))) as checkpoints:
        checkpoints.save(1, weights)
        assert (checkpoints.steps(), seen) == ([], [])
        for _ in range(5):
            weights = overwrite(weights)
        jax.block_until_ready(weights)
        _, restored = checkpoints.restore(target)
    assert (np.asarray(restored["model"]) == 1.0).all()
    [(line, steps)] = seen
    assert (line.startswith("checkpoint 1 saved: "), steps) == (True, [1])


# --- What stays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "saved", "kept"),
    [
        ({}, (1, 2, 3, 10), [3, 10]),
        ({"keep_last": 1, "keep_every": 4}, (2, 4, 6, 8, 10, 11), [4, 8, 11]),
        ({}, (100, 200, 50), [50, 100, 200]),  # the newest save stays
    ],
)
def test_rotation_keeps_the_last_and_every_nth(tmp_path, options, saved, kept):
    with Checkpoints(tmp_path, on_notice=lambda _: None, **options) as checkpoints:
        save_large(checkpoints, *saved)
        assert checkpoints.steps() == kept
        assert entries(checkpoints) == sorted(map(str, kept))


def test_saving_an_existing_step_changes_nothing(checkpoints):
    target = save_all(checkpoints, 3)
    checkpoints.save(3, state_on(mesh_of(4, 2), value=99))
    assert_same_bits(checkpoints.restore(target)[1], state_on(mesh_of(4, 2), value=3))


def test_first_checkpoint_stays_until_one_is_good(checkpoints):
    """The run decides which checkpoints are good, as training does."""
    for step in (1, 2, 3, 4):
        checkpoints.save(step, {"model": jnp.ones(3)}, host={"step": step})
    checkpoints.check_for_errors()
    assert checkpoints.steps() == [1, 3, 4]
    assert checkpoints.host_values(4) == {"step": 4}
    checkpoints.mark_good(3)
    checkpoints.save(5, {"model": jnp.ones(3)}, host={})
    checkpoints.save(6, {"model": jnp.ones(3)}, host={})
    checkpoints.check_for_errors()
    assert (checkpoints.last_good(), checkpoints.steps()) == (3, [3, 5, 6])


def test_base_of_adapters_stays_until_they_are_removed(checkpoints, notices):
    """The base of adapters next to the run stays, also after both were moved; unreadable adapters remove nothing."""
    run, adapters = checkpoints.folder.parent, checkpoints.folder.parent.with_name("adapters")
    adapters.mkdir()

    def steps_after(save, **base):
        save_base(adapters, Base(digest="", **base))
        checkpoints.save(save, {"model": jnp.ones(3)})
        checkpoints.check_for_errors()
        return checkpoints.steps()

    checkpoints.keep_last = 1
    assert steps_after(1, run=str(run), step=1) == [1]
    assert steps_after(2, run=str(run), step=1) == [1, 2]
    assert steps_after(3, run=f"/gone/{run.name}", step=1) == [1, 3]
    assert steps_after(4, run=str(run), step="1") == [1, 3, 4]
    assert notices[-1].startswith("no older checkpoint is removed, as it may be the base of adapters: ")
    assert steps_after(5, run=str(run.parent), step=1) == [5]


def test_other_model_is_refused_by_name_and_shape(checkpoints):
    target = save_all(checkpoints, 200)
    had, wide = target["optimizer"], abstract(state_on(mesh_of(4, 2), width=32))["model"]
    wider = had["nu"].update(dtype=jnp.float32)
    for changes, message in (
        ({"model": wide}, "model.bias of shape (16,), this config needs (32,)"),
        ({"optimizer": had | {"nu": wider}}, "optimizer.nu in float16, this config needs float32"),
        ({"optimizer": {}}, "optimizer.count of shape (3,), and this config has no such array"),
    ):
        with pytest.raises(UsageError, match=re.escape(f"checkpoint 200 has {message}; use the config.json")):
            checkpoints.restore(target | changes)


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def test_kill_during_removal_leaves_no_half_checkpoint(checkpoints, notices, monkeypatch):
    save_large(checkpoints, 1, 2)

    def killed_half_way(folder):
        data_file(folder).unlink()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed_half_way)
        save_large(checkpoints, 3)
    assert notices[-1] == "checkpoint 1 could not be removed: Permission denied"
    assert checkpoints.steps() == [2, 3]


def test_remains_of_a_killed_save_are_removed(checkpoints):
    save_large(checkpoints, 1)
    for left in ("2.writing", "3.writing.orbax-checkpoint-tmp", "0.deleting", "1.kept-by-a-person"):
        shutil.copytree(checkpoints.folder / "1", checkpoints.folder / left)
    target = save_large(checkpoints, 2)
    assert entries(checkpoints) == ["1", "1.kept-by-a-person", "2"]
    assert checkpoints.restore(target)[0] == 2
