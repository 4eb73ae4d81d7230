"""Saves on a failing disk, and what is never removed: nothing is lost, and nothing is called saved that is not."""

import errno
import json
import os
import shutil
import subprocess
import threading
import zlib
from pathlib import Path

import pytest

from mjax.errors import RunError, UsageError
from mjax.state import manifest as manifests
from mjax.state.checkpoint import Checkpoints
from mjax.state.runs import has_checkpoint
from tests.training.saved import data_file, save_all, save_large


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(manifests, "PAUSE", 0.0)


def fail_with(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


# --- On the disk ------------------------------------------------------------------------------------------------------


def test_all_files_and_names_of_a_checkpoint_are_on_the_disk_before_it_is_called_saved(tmp_path, monkeypatch):
    synced, renamed, fsync, replace = [], {}, os.fsync, os.replace

    def recording_fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recording_replace(old, new):
        renamed[Path(new)] = list(synced)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    after = []
    with Checkpoints(tmp_path / "run" / "checkpoints", on_notice=lambda _: after.extend(synced)) as checkpoints:
        save_all(checkpoints, 1)
    place = checkpoints.folder / "1"
    before = {
        str(path.relative_to(checkpoints.folder / "1.writing")) for path in renamed[place] if "writing" in str(path)
    }
    assert before == {".", *(str(path.relative_to(place)) for path in place.rglob("*"))}
    assert {tmp_path, tmp_path / "run", checkpoints.folder} <= set(after)  # names of run/, checkpoints/ and 1/
    assert after[-1] == checkpoints.folder


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_save_that_the_disk_does_not_keep_fails_in_one_sentence(checkpoints, notices, monkeypatch, number):
    target = save_all(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_with(number))
        with pytest.raises(
            RunError,
            match=rf"^checkpoint 2 could not be saved in .*: {os.strerror(number)}; intact checkpoints: 1$",
        ):
            save_all(checkpoints, 2)
    assert not any("checkpoint 2 saved" in line for line in notices)
    assert [entry.name for entry in checkpoints.folder.iterdir()] == ["1"]
    assert checkpoints.restore(target)[0] == 1


def assert_fails_at_once(checkpoints):
    with pytest.raises(RunError, match=r"checkpoint 2 could not .*: Read-only file system; intact checkpoints: 1"):
        save_all(checkpoints, 2)
    left = [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread.ident != threading.main_thread().ident
    ]
    assert [name for name in left if not name.startswith(("checkpoint", "asyncio", "ThreadPool"))] == []


def test_a_folder_that_became_read_only_holds_the_process_no_longer(checkpoints, monkeypatch):
    """Orbax's threads would wait for it for 300 s, and the process for them."""
    save_all(checkpoints, 1)
    make = os.mkdir
    monkeypatch.setattr(
        os,
        "mkdir",
        lambda path, *rest, **more: (fail_with(errno.EROFS) if "2.writing" in str(path) else make)(path, *rest, **more),
    )
    assert_fails_at_once(checkpoints)


def test_a_disk_that_was_remounted_read_only_holds_the_process_no_longer(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    try:
        with Checkpoints(disk / "checkpoints", on_notice=lambda _: None) as checkpoints:
            save_all(checkpoints, 1)
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
            assert_fails_at_once(checkpoints)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# --- Whose checkpoint it is -------------------------------------------------------------------------------------------


def test_a_checkpoint_under_the_name_of_another_step_is_recognised(checkpoints, notices):
    target = save_large(checkpoints, 30, 60)
    (checkpoints.folder / "30").rename(checkpoints.folder / "1000")
    notices.clear()
    assert checkpoints.restore(target)[0] == 60
    folder = checkpoints.folder
    assert notices == [
        "checkpoint 1000 is misnamed: manifest.json says that it is checkpoint 30; "
        f"type: mv {folder}/1000 {folder}/30; using 60"
    ]
    with pytest.raises(RunError, match=r"checkpoint 1000 is misnamed: manifest.json says that it is checkpoint 30"):
        checkpoints.restore(target, step=1000)
    save_large(checkpoints, 90, 120)
    assert checkpoints.steps() == [90, 120, 1000]  # neither counted nor removed


def test_a_checkpoint_renamed_while_the_run_goes_on_is_not_counted(checkpoints, notices):
    save_large(checkpoints, 30, 60)
    (checkpoints.folder / "30").rename(checkpoints.folder / "1000")
    save_large(checkpoints, 90)
    assert checkpoints.steps() == [60, 90, 1000]
    assert "checkpoint 1000 is misnamed, so it is not counted and stays: manifest.json says" in notices[-1]


def test_a_manifest_of_an_older_version_has_no_step_and_opens(checkpoints):
    target = save_large(checkpoints, 30)
    file = checkpoints.folder / "30" / "manifest.json"
    content = json.loads(file.read_text())
    assert content.pop("step") == 30
    del content["checksum"]
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    file.write_text(json.dumps({"checksum": checksum, **content}))
    assert checkpoints.restore(target)[0] == 30


# --- What is never removed --------------------------------------------------------------------------------------------


def flip_a_bit(folder):
    content = bytearray(data_file(folder).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(folder).write_bytes(content)


def fail_reading(monkeypatch, folder, times):
    """Reading the data file of a checkpoint fails that often; returns how often it was tried."""
    file, opened, tried = data_file(folder), Path.open, []

    def open_(path, *arguments, **options):
        if path == file and len(tried) < times:
            tried.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_)
    return tried


def test_one_read_error_is_announced_and_the_newest_checkpoint_is_used(checkpoints, notices, monkeypatch):
    target = save_large(checkpoints, 30, 60)
    fail_reading(monkeypatch, checkpoints.folder / "60", 1)
    notices.clear()
    assert checkpoints.restore(target)[0] == 60
    [notice] = notices
    assert notice.startswith(
        f"reading {data_file(checkpoints.folder / '60')} failed, attempt 1 of 3: Input/output error"
    )


def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged_and_no_later_save_removes_it(
    checkpoints, notices, monkeypatch
):
    target = save_large(checkpoints, 30, 60)
    with monkeypatch.context() as patch:
        tried = fail_reading(patch, checkpoints.folder / "60", 100)
        assert checkpoints.restore(target)[0] == 30
        assert len(tried) == 3
    assert "checkpoint 60 is unreadable: model" in notices[-1]
    assert notices[-1].endswith("cannot be read: Input/output error; using 30")
    save_large(checkpoints, 70, 80, 90)
    assert checkpoints.steps() == [60, 80, 90]
    assert checkpoints.restore(target, step=60)[0] == 60


def test_an_unreadable_checkpoint_is_set_aside_when_the_run_gets_there_again(checkpoints, notices, monkeypatch):
    target = save_large(checkpoints, 30, 60)
    with monkeypatch.context() as patch:
        fail_reading(patch, checkpoints.folder / "60", 100)
        checkpoints.restore(target)
    save_large(checkpoints, 60)
    assert sorted(entry.name for entry in checkpoints.folder.iterdir()) == ["30", "60", "60.unreadable"]
    assert any("renamed 60 to 60.unreadable" in line for line in notices)


@pytest.mark.parametrize("step", [50, 60])
def test_a_damaged_checkpoint_is_set_aside_and_announced_by_the_next_save(checkpoints, notices, step):
    target = save_large(checkpoints, 30, 60)
    flip_a_bit(checkpoints.folder / "60")
    damaged = data_file(checkpoints.folder / "60").read_bytes()
    assert checkpoints.restore(target)[0] == 30
    save_large(checkpoints, step)
    assert checkpoints.steps() == [30, step]
    assert data_file(checkpoints.folder / "60.damaged").read_bytes() == damaged
    assert f"renamed 60 to 60.damaged in {checkpoints.folder}; remove it when you do not need it" in notices


def test_a_folder_of_a_person_is_no_checkpoint_and_stays(checkpoints, notices):
    for name in ("2024", "0099"):
        (checkpoints.folder / name).mkdir(parents=True)
        (checkpoints.folder / name / "notes.txt").write_text("mine")
    (checkpoints.folder / "7.writing-of-mine").write_text("mine")
    assert checkpoints.steps() == []
    assert not has_checkpoint(checkpoints.folder.parent)
    target = save_large(checkpoints, 30, 60, 90)
    assert checkpoints.steps() == [60, 90]
    assert checkpoints.restore(target)[0] == 90
    with pytest.raises(UsageError, match="has no checkpoint 2024; there are 60, 90"):
        checkpoints.restore(target, step=2024)
    save_large(checkpoints, 2024)
    kept = {file.name: file.read_text() for file in checkpoints.folder.glob("*/notes.txt")}
    assert kept == {"notes.txt": "mine"}
    names = sorted(entry.name for entry in checkpoints.folder.iterdir())
    assert names == ["0099", "2024", "2024.not-a-checkpoint", "7.writing-of-mine", "90"]
    assert any("renamed 2024 to 2024.not-a-checkpoint" in line for line in notices)


def test_a_checkpoint_being_copied_here_is_neither_counted_nor_removed(checkpoints, notices):
    save_large(checkpoints, 30, 60)
    shutil.copytree(
        checkpoints.folder / "30", checkpoints.folder / "45", ignore=shutil.ignore_patterns("manifest.json")
    )
    save_large(checkpoints, 90)
    assert checkpoints.steps() == [45, 60, 90]
    assert "checkpoint 45 is damaged, so it is not counted and stays: manifest.json is missing" in notices[-1]
