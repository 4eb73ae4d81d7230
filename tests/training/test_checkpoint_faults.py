"""Saves on a failing disk, and what is never removed: nothing is lost, and nothing is called saved that is not."""

import errno
import os
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mjax.checkpoint import folders as manifests
from mjax.checkpoint.checkpoint import Checkpoints
from mjax.checkpoint.folders import checkpoint_steps
from mjax.errors import RunError, UsageError
from tests.training.saved import (
    data_file,
    entries,
    flip_a_bit,
    save_all,
    save_large,
    small_disk,
)
from tests.training.test_what_fails_beside_training import error_of, fail_with


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(manifests, "RETRY_INTERVAL", 0.0)


# --- Saves that fail --------------------------------------------------------------------------------------------------


def test_checkpoint_is_on_disk_before_called_saved(tmp_path, monkeypatch):
    synced, renamed, after, fsync, replace = [], {}, [], os.fsync, os.replace

    def recording_fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recording_replace(old, new):
        renamed[Path(new)] = list(synced)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    with Checkpoints(tmp_path / "run" / "checkpoints", on_notice=lambda _: after.extend(synced)) as checkpoints:
        save_all(checkpoints, 1)
    place, writing = checkpoints.folder / "1", checkpoints.folder / "1.writing"
    before = {str(path.relative_to(writing)) for path in renamed[place] if "writing" in str(path)}
    assert before == {".", *(str(path.relative_to(place)) for path in place.rglob("*"))}
    assert {tmp_path, tmp_path / "run", checkpoints.folder} <= set(after)  # names of run/, checkpoints/ and 1/
    assert after[-1] == checkpoints.folder


def fails(checkpoints, number):
    """Saving checkpoint 2 fails in one sentence, and holds up nothing: Orbax's threads would wait for 300 s."""
    big = {"model": jax.random.normal(jax.random.key(1), (512, 512)), "step": jnp.int32(2)}  # incompressible
    words = rf"^checkpoint 2 could not be saved in .*: {os.strerror(number)}; intact checkpoints: 1$"
    with pytest.raises(RunError, match=words):  # noqa: PT012
        checkpoints.save(2, big)
        checkpoints.check_for_errors()
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread != threading.main_thread()]
    assert [one.name for one in left if not one.name.startswith(("checkpoint", "asyncio", "ThreadPool"))] == []
    assert entries(checkpoints) == ["1"]  # the space is given back


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_save_not_kept_by_disk_fails(checkpoints, notices, monkeypatch, number):
    target = save_large(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(error_of(number)))
        fails(checkpoints, number)
    assert not any("checkpoint 2 saved" in line for line in notices)
    assert checkpoints.restore(target)[0] == 1


def test_full_and_read_only_disks_keep_earlier_checkpoints(tmp_path, capfd):
    with small_disk(tmp_path / "disk"), Checkpoints(tmp_path / "disk" / "saved", on_notice=print) as checkpoints:
        target = save_large(checkpoints, 1)
        fails(checkpoints, errno.ENOSPC)
        assert checkpoints.restore(target)[0] == 1
        subprocess.run(["mount", "-o", "remount,ro", tmp_path / "disk"], check=True)
        fails(checkpoints, errno.EROFS)
        subprocess.run(["mount", "-o", "remount,rw", tmp_path / "disk"], check=True)
        save_large(checkpoints, 2)
        assert checkpoints.restore(target)[0] == 2
    assert capfd.readouterr().err == ""


# --- Damage: each kind is named, and none gets through ----------------------------------------------------------------


def truncate(folder):
    os.truncate(data_file(folder), data_file(folder).stat().st_size // 2)
    return r"model/.* has \d+ bytes of \d+"


def remove_a_file(folder):
    data_file(folder).unlink()
    return "model/.* is missing, so it was not finished or not copied completely"


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()
    return "manifest.json is missing, so it was not finished or not copied completely"


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove_a_file, remove_the_manifest])
def test_damage_is_named_and_previous_checkpoint_used(checkpoints, notices, damage):
    whole = save_large(checkpoints, 200, 300)
    words = damage(checkpoints.folder / "300")
    for target, field in ((whole, None), (whole["model"], "model")):
        notices.clear()
        assert checkpoints.restore(target, field=field)[0] == 200
        [notice] = notices
        assert re.fullmatch(f"checkpoint 300 is damaged: {words}; using 200", notice)
    with pytest.raises(RunError, match=rf"checkpoint 300 is damaged: {words}; there are also 200"):
        checkpoints.restore(whole, step=300)


def test_flipped_bit_in_any_file_is_noticed(checkpoints):
    target = save_all(checkpoints, 1)
    draw = random.Random(0)
    for file in sorted((checkpoints.folder / "1").rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        if content:
            at = draw.randrange(len(content))
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
            words = r"checkpoint 1 is damaged: .* is not what was written.*; there is no other"
            with pytest.raises(RunError, match=words):
                checkpoints.restore(target)
            file.write_bytes(content)
    assert checkpoints.restore(target)[0] == 1


@pytest.mark.parametrize("step", [250, 300])
def test_damaged_checkpoint_is_set_aside_by_next_save(checkpoints, notices, step):
    target = save_large(checkpoints, 200, 300)
    flip_a_bit(checkpoints.folder / "300")
    damaged = data_file(checkpoints.folder / "300").read_bytes()
    assert checkpoints.restore(target)[0] == 200
    save_large(checkpoints, step)
    assert checkpoints.steps() == [200, step]
    assert checkpoints.restore(target)[0] == step
    assert data_file(checkpoints.folder / "300.damaged").read_bytes() == damaged
    assert f"renamed 300 to 300.damaged in {checkpoints.folder}; remove it when you do not need it" in notices


# --- Whose checkpoint it is -------------------------------------------------------------------------------------------


def test_renamed_checkpoint_is_neither_used_nor_removed(checkpoints, notices):
    target = save_large(checkpoints, 30, 60)
    folder = checkpoints.folder
    (folder / "30").rename(folder / "1000")
    notices.clear()
    assert checkpoints.restore(target)[0] == 60
    misnamed = "checkpoint 1000 is misnamed: manifest.json belongs to checkpoint 30"
    assert notices == [f"{misnamed}; type: mv {folder}/1000 {folder}/30; using 60"]
    with pytest.raises(RunError, match=misnamed):
        checkpoints.restore(target, step=1000)
    shutil.copytree(folder / "60", folder / "45", ignore=shutil.ignore_patterns("manifest.json"))  # is being copied
    save_large(checkpoints, 90)
    assert checkpoints.steps() == [45, 60, 90, 1000]
    assert "checkpoint 45 is damaged, so it is not counted and stays: manifest.json is missing" in notices[-1]
    save_all(checkpoints, 150)  # nor is it renamed while it is copied
    assert "45" in entries(checkpoints)


# --- What cannot be read, and what is never removed -------------------------------------------------------------------


def test_unreadable_checkpoint_is_kept(checkpoints, notices, monkeypatch):
    target = save_large(checkpoints, 30, 60)
    file, opened, fails = data_file(checkpoints.folder / "60"), Path.open, [error_of(errno.EIO)]

    def open_(path, *arguments, **options):
        if path == file and fails:
            raise fails.pop()
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        assert checkpoints.restore(target)[0] == 60  # by a second attempt
        assert "failed, attempt 1 of 3: Input/output error" in notices[-1]
        fails += [error_of(errno.EIO)] * 3
        assert checkpoints.restore(target)[0] == 30
    assert "checkpoint 60 is unreadable: model" in notices[-1]
    assert notices[-1].endswith("cannot be read: Input/output error; using 30")
    save_large(checkpoints, 70, 80, 90)
    assert checkpoints.steps() == [60, 80, 90]
    assert checkpoints.restore(target, step=60)[0] == 60
    save_large(checkpoints, 60)  # the run gets there again
    assert entries(checkpoints) == ["60", "60.unreadable", "80", "90"]
    assert any("renamed 60 to 60.unreadable" in line for line in notices)


def test_folders_of_a_person_stay(checkpoints, notices):
    for name in ("2024", "0099"):
        (checkpoints.folder / name).mkdir(parents=True)
        (checkpoints.folder / name / "notes.txt").write_text("mine")
    (checkpoints.folder / "7.writing-of-mine").write_text("mine")
    assert not checkpoint_steps(checkpoints.folder.parent)
    target = save_large(checkpoints, 30, 60, 90)
    assert checkpoints.steps() == [60, 90]
    with pytest.raises(UsageError, match="has no checkpoint 2024; there are 60, 90"):
        checkpoints.restore(target, step=2024)
    save_large(checkpoints, 2024)
    assert entries(checkpoints) == ["0099", "2024", "2024.not-a-checkpoint", "7.writing-of-mine", "90"]
    assert (checkpoints.folder / "2024.not-a-checkpoint" / "notes.txt").read_text() == "mine"
    assert any("renamed 2024 to 2024.not-a-checkpoint" in line for line in notices)
