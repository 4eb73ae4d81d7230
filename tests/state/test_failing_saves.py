"""Saves that fail: before the first step, once, twice in a row, and at the end of a run."""

import errno
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from mjax.checkpoint import checkpoint, folders
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import checkpoint_steps, steps_in
from mjax.commands import cli
from mjax.config import MeshConfig
from mjax.errors import RunError
from mjax.parallel.mesh import make_mesh
from mjax.run.health import Guard
from mjax.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.small import small_config
from tests.training.test_metrics import record
from tests.training.test_what_fails_beside_training import error_of, fail_with

pytestmark = pytest.mark.usefixtures("quick_runs", "fewer_devices")

CONFIG = str(ROOT / "tests" / "tiny_config.py")


def train(*flags, runs="runs"):
    return cli.main(["train", "--config", CONFIG, "--runs", str(runs), "--name", "run", *flags])


@pytest.fixture
def fail(monkeypatch):
    """A function that makes the saves of some steps fail, each as often as it is named."""
    put = checkpoint.put

    def fail(*names, number=errno.EIO):
        names = list(names)

        def failing(folder, final):
            if final.name in names:
                names.remove(final.name)
                raise OSError(number, os.strerror(number))
            put(folder, final)

        monkeypatch.setattr(checkpoint, "put", failing)

    return fail


# --- Before the first step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_run_that_cannot_save_ends_before_its_first_step(number, tmp_path, monkeypatch, fail, capsys):
    monkeypatch.setattr("mjax.run.loop.first_state", None)
    fail("0.deleting", number=number)
    assert train(runs=tmp_path) == 2
    told = capsys.readouterr().err.strip().splitlines()
    words = f"mjax: error: {tmp_path}/run can hold no checkpoints: {os.strerror(number)}; correct that, or choose"
    assert [line[: len(words)] for line in told] == [words]
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize("existing", [False, True])
def test_trial_leaves_nothing_and_removes_remains(existing, tmp_path):
    notices, folder = [], tmp_path / "run" / "checkpoints"
    if existing:
        for left in ("0.writing", "0.deleting"):  # of one that was killed
            (folder / left).mkdir(parents=True)
    with Checkpoints(folder, on_notice=notices.append) as checkpoints:
        checkpoints.try_save(make_mesh(MeshConfig(data=4, model=2)))
    assert list(tmp_path.rglob("*")) == [tmp_path / "run", *[folder] * existing]
    assert notices == ["removed 0.writing: an unfinished save of checkpoint 0"] * existing


def test_only_a_new_run_tries_to_save(tmp_path, monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(Checkpoints, "try_save", lambda self, mesh: tried.append(self.folder.parent.name))
    for _ in range(2):
        assert train(runs=tmp_path) == 0
    assert tried == ["run"]


# --- While a run trains -----------------------------------------------------------------------------------------------


def test_failed_save_is_told_and_next_is_tried(tmp_path, fail, capsys):
    fail("8")
    assert train(runs=tmp_path) == 0
    said = " ".join(capsys.readouterr().out.split())
    folder = tmp_path / "run" / "checkpoints"
    failed = f"checkpoint 8 could not be saved in {folder}: Input/output error; intact checkpoints: 4; the next save is"
    assert said.count(failed) == 1
    assert said.index(failed) < said.index("checkpoint 12 saved")
    assert (checkpoint_steps(tmp_path / "run"), json.loads((folder / "good.json").read_text())) == (
        [4, 12],
        {"step": 4},
    )
    assert sorted(entry.name for entry in folder.iterdir()) == ["12", "4", "good.json"]


@pytest.mark.ci
def test_two_failed_saves_in_a_row_end_the_run(tmp_path, fail, capsys):
    fail("4", "8", "12", "12")
    assert train(runs=tmp_path) == 1
    told = capsys.readouterr().err
    assert "mjax: error: two saves in a row failed: checkpoint 8 could not be saved in" in told
    assert "Input/output error; intact checkpoints: none" in told
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 8  # none was computed in vain
    fail("12")
    assert train(runs=tmp_path) == 0


@pytest.mark.ci
@pytest.mark.parametrize("stop", [False, True], ids=["done", "stopped"])
def test_last_save_is_tried_twice(stop, tmp_path, fail, monkeypatch, capsys):
    if stop:  # as at SIGTERM
        monkeypatch.setattr("mjax.run.display.Display.on_step", lambda display, run, step, metrics: run.stop())
    last, code = ("2", 75) if stop else ("12", 0)
    for tries in (1, 2):
        fail("8", *[last] * tries)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        assert train(runs=tmp_path) == (code if tries == 1 else 1)
        told = capsys.readouterr()
        said = " ".join(told.out.split())
        assert f"checkpoint {last} could not be saved in" in said
        assert said.count("; trying it again") == 1
        assert ("two saves in a row failed" in told.err) == (tries == 2)
        assert (int(last) in checkpoint_steps(tmp_path / "run")) == (tries == 1)


def test_failure_at_the_start_of_a_save_counts(tmp_path, monkeypatch):
    notices, state = [], {"model": {"up": jnp.ones(3)}}
    with Checkpoints(tmp_path / "checkpoints", on_notice=notices.append) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "make_folder", lambda folder: folder.joinpath("no", "where").mkdir())
            checkpoints.save(1, state)
            checkpoints.wait_until_finished()
        checkpoints.save(2, state)
    assert checkpoints.failed == {1}
    assert "checkpoint 1 could not be saved in" in notices[0]
    assert checkpoint_steps(tmp_path) == [2]


def test_rename_that_is_not_on_disk_is_undone(tmp_path, monkeypatch):
    sync, fails = os.fsync, []

    def failing(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path) and (tmp_path / "1").exists() and not fails:
            fails.append(1)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with Checkpoints(tmp_path, on_notice=lambda line: None) as checkpoints:
        checkpoints.save(1, {"model": jnp.ones(3)})
        with pytest.raises(RunError, match="checkpoint 1 could not be saved"):
            checkpoints.check_for_errors()
        assert list(tmp_path.iterdir()) == []
        checkpoints.save(1, {"model": jnp.ones(3)}, last=True)
        assert checkpoints.steps() == [1]


def test_checkpoint_that_failed_is_never_good(tmp_path, fail):
    """Ten healthy steps after a checkpoint make it good, if it was saved."""
    state = {"model": jnp.ones(3)}
    with Checkpoints(tmp_path / "checkpoints", on_notice=lambda line: None) as checkpoints:
        guard = Guard(small_config(), checkpoints, print)
        guard.begin(0)
        fail("40")
        for step in range(1, 60):
            guard.observe(record(step, loss=4.0))
            if step % 20 == 0:
                guard.save(step, state, ends=False)
        assert guard.good == 40  # not known yet
        guard.spike = 60, 9.0
        assert guard.go_back() == 20
        assert (guard.good, checkpoints.last_good(), checkpoints.steps()) == (20, 20, [20])
        checkpoints.save(40, state)


def test_failing_rotation_keeps_the_save(tmp_path, monkeypatch):
    notices = []
    with Checkpoints(tmp_path, on_notice=notices.append) as checkpoints:
        monkeypatch.setattr(folders, "read_manifest", fail_with(error_of(errno.EIO)))
        checkpoints.save(1, {"model": jnp.ones(3)})
        checkpoints.wait_until_finished()
    assert (checkpoints.failed, checkpoints.steps()) == (set(), [1])
    assert notices[-1] == "older checkpoints could not be removed: Input/output error"


def test_folder_that_trial_save_removes_has_no_steps(tmp_path, monkeypatch):
    """Process 0 may remove it after another process has seen it."""
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert steps_in(tmp_path / "checkpoints") == []
