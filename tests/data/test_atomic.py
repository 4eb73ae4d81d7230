"""Atomic writes: what is renamed is on the disk, errors of the disk are errors, and no other module renames."""

import ast
import errno
import fcntl
import os
import re
import shutil
from pathlib import Path

import pytest

from mjax.config import Config, save_config
from mjax.errors import UsageError
from mjax.utils import files
from tests.conftest import ROOT

WRITES = [lambda file: files.write_whole(file, "new"), lambda file: save_config(Config(), file)]


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def disk(monkeypatch):
    """Record what reaches the disk, in order: ("sync", path) and ("rename", new name)."""
    events, fsync, replace = [], os.fsync, os.replace

    def recording_fsync(descriptor):
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recording_replace(old, new):
        events.append(("rename", Path(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    return events


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("write", WRITES)
def test_fsync_error_keeps_the_old_content(tmp_path, monkeypatch, number, write):
    file = tmp_path / "config.json"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(OSError, match=rf"{os.strerror(number)}: '{file}\.\w+\.tmp'"):
        write(file)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["config.json"]


def test_disk_without_fsync_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.ENOTSUP))
    files.write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize("write", WRITES)
def test_file_is_synced_before_and_after_rename(tmp_path, disk, write):
    write(tmp_path / "file")
    (_, temporary), *others = disk
    assert re.fullmatch(r"file\.[0-9a-f]{8}\.tmp", temporary.name)
    assert others == [("rename", tmp_path / "file"), ("sync", tmp_path)]


def test_folder_is_synced_with_its_content(tmp_path, disk):
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "file").touch()
    (tmp_path / "new" / "link").symlink_to("nowhere")
    files.put(tmp_path / "new", tmp_path / "place")
    inside = [tmp_path / "new" / "deep" / "file", tmp_path / "new" / "deep", tmp_path / "new"]
    assert disk == [*(("sync", place) for place in inside), ("rename", tmp_path / "place"), ("sync", tmp_path)]
    disk.clear()
    for _ in range(2):
        files.make_folder(tmp_path / "runs" / "new")
    assert disk == [("sync", tmp_path), ("sync", tmp_path / "runs")]


def test_only_one_module_renames_and_syncs():
    """A rename elsewhere would be one that a power failure can undo, or whose file is empty after it."""
    names = {"rename", "renames", "replace", "move", "fsync", "fdatasync"}
    found = []
    for file in [*(ROOT / "mjax").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        source = file.read_text()
        if not re.search(rf"\.({'|'.join(names)})\(", source) or file == Path(files.__file__):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                of_path = node.func.attr in ("rename", "replace") and len(node.args) + len(node.keywords) == 1
                if of_path or owner in ("os", "shutil"):  # str.replace takes two
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in found if not place.startswith("mjax/doctor/host.py")] == []  # it times fsync


# --- Locks ------------------------------------------------------------------------------------------------------------


def test_disk_without_locks_is_announced(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    sentences = []
    with (tmp_path / "tokens.tmp").open("wb") as stream:
        assert files.take_lock(stream, sentences.append)
        (sentence,) = sentences
        assert f"{tmp_path} is on a file system without locks ({os.strerror(errno.ENOLCK)}): start only one" in sentence
        monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            files.take_lock(stream, print)


def test_folder_is_not_locked_when_it_was_replaced(tmp_path, monkeypatch):
    """Another process finished between opening the plan and locking it, and a third one began."""

    def replaced(stream, say):
        shutil.rmtree(tmp_path / "d.tmp")
        (tmp_path / "d.tmp").mkdir()
        (tmp_path / "d.tmp" / "plan.json").touch()
        return True

    monkeypatch.setattr(files, "take_lock", replaced)
    with pytest.raises(UsageError, match="another process is writing d; wait for it"):
        files.lock_folder(tmp_path / "d.tmp", "d")
