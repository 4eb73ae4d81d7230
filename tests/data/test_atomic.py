"""Atomic writes: what is renamed is on the disk, errors of the disk are errors, and no other module renames."""

import ast
import errno
import fcntl
import os
from pathlib import Path

import pytest

from mjax.config import Config, save_config
from mjax.data import atomic
from tests.conftest import ROOT

REAL_ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE]


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def disk(monkeypatch):
    """What reaches the disk, in order: ("sync", path) and ("rename", new name)."""
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


@pytest.mark.parametrize("number", REAL_ERRORS)
@pytest.mark.parametrize(
    "write", [lambda file: atomic.write_whole(file, "new"), lambda file: save_config(Config(), file)]
)
def test_an_error_of_fsync_is_raised_with_its_file_and_the_old_content_stays(tmp_path, monkeypatch, number, write):
    file = tmp_path / "config.json"
    file.write_text("old")
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(OSError, match=f"{os.strerror(number)}: '{file}.tmp'"):
        write(file)
    assert file.read_text() == "old"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP])
def test_a_file_system_without_fsync_is_written_all_the_same(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", failing(number))
    atomic.write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.parametrize(
    "write", [lambda file: atomic.write_whole(file, "new"), lambda file: save_config(Config(), file)]
)
def test_a_file_is_on_the_disk_before_its_rename_and_the_rename_after_it(tmp_path, disk, write):
    write(tmp_path / "file")
    assert disk == [("sync", tmp_path / "file.tmp"), ("rename", tmp_path / "file"), ("sync", tmp_path)]


def test_a_folder_is_on_the_disk_with_all_in_it_before_its_rename(tmp_path, disk):
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "file").touch()
    (tmp_path / "new" / "link").symlink_to("nowhere")
    atomic.put(tmp_path / "new", tmp_path / "place")
    inside = [tmp_path / "new" / "deep" / "file", tmp_path / "new" / "deep", tmp_path / "new"]
    assert disk == [*(("sync", place) for place in inside), ("rename", tmp_path / "place"), ("sync", tmp_path)]


def test_the_names_of_new_folders_are_on_the_disk(tmp_path, disk):
    atomic.make_folder(tmp_path / "runs" / "new")
    atomic.make_folder(tmp_path / "runs" / "new")
    assert disk == [("sync", tmp_path), ("sync", tmp_path / "runs")]


def test_what_is_set_aside_replaces_nothing(tmp_path):
    for content in ("first", "second", "third"):
        (tmp_path / "60").write_text(content)
        atomic.set_aside(tmp_path / "60")
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {"60.damaged": "first", "60.damaged.2": "second", "60.damaged.3": "third"}


def test_only_this_module_renames_and_syncs():
    """A rename elsewhere would be one that a power failure can undo, or whose file is empty after it."""
    found = []
    for file in [*(ROOT / "mjax").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            arguments, name = len(node.args) + len(node.keywords), node.func.attr
            path = name in ("rename", "replace") and arguments == 1  # str.replace takes two
            system = owner in ("os", "shutil") and name in (
                "rename",
                "renames",
                "replace",
                "move",
                "fsync",
                "fdatasync",
            )
            if (path or system) and file != Path(atomic.__file__):
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert [place for place in found if not place.startswith("mjax/doctor/storage.py")] == []  # it times fsync


# --- Locks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_announced_once_and_used(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", failing(number))
    said = []
    with (tmp_path / "tokens.tmp").open("wb") as stream:
        assert atomic.lock(stream, tmp_path / "tokens.tmp", said.append)
    assert said == [
        f"{tmp_path} is on a file system without locks ({os.strerror(number)}): "
        "start only one process that writes there"
    ]


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with (tmp_path / "tokens.tmp").open("wb") as stream, pytest.raises(OSError, match="Input/output error"):
        atomic.lock(stream, tmp_path / "tokens.tmp", print)
