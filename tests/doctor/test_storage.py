"""The folder of checkpoints: read-only, full, small and slow."""

import errno
import os
from collections import namedtuple
from unittest.mock import Mock

import pytest

from mjax.config import load_config
from mjax.doctor import GREEN, RED, YELLOW, host
from mjax.doctor.host import check_storage, judge_storage


@pytest.fixture(autouse=True)
def small_file(monkeypatch):
    monkeypatch.setattr(host, "FILE_BYTES", 2**20)
    monkeypatch.setattr(host, "SLOW", 1.0)  # this machine's disk is not what is tested here


def test_absent_folder_is_not_made(tmp_path):
    (finding,) = check_storage(tmp_path / "runs" / "deep")
    assert finding.status == GREEN
    assert f"{tmp_path} (where" in finding.found
    assert finding.figures["write_mb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "code", "advice"),
    [(host.tempfile, "mkstemp", errno.EROFS, "make it writable"), (os, "fsync", errno.ENOSPC, "free some space")],
    ids=["read-only", "full"],
)
def test_failing_disk_is_red(tmp_path, monkeypatch, module, name, code, advice):
    monkeypatch.setattr(module, name, Mock(side_effect=OSError(code, os.strerror(code))))
    (finding,) = check_storage(tmp_path)
    assert finding.status == RED
    assert finding.advice.startswith(advice)
    assert list(tmp_path.iterdir()) == []


def test_lost_bytes_are_red(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.ftruncate(descriptor, 10))
    (finding,) = check_storage(tmp_path)
    assert finding.status == RED
    assert "of 1048576 bytes written, 10 were read" in finding.found


def test_room_and_speed_are_judged(monkeypatch):
    config = load_config("gpt_8b")  # 93 GiB a checkpoint, two are kept while a third is written
    (finding,) = judge_storage("runs", 270 * 2**30, 1e9, 1e9, config)
    assert finding.status == RED
    assert "for 3 of them" in finding.found
    assert judge_storage("runs", 300 * 2**30, 1e9, 1e9, config)[0].status == GREEN
    assert judge_storage("runs", 2**20, 1e9, 1e9, None)[0].status == YELLOW
    monkeypatch.undo()
    assert [judge_storage("runs", 2**40, speed, 1e9, None)[0].status for speed in (20e6, 900e6)] == [YELLOW, GREEN]


def test_written_checkpoints_need_no_room_again(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage(400 * 2**30, 300 * 2**30, 100 * 2**30))
    config = load_config("gpt_8b")
    for name, status in (("200", RED), ("300.writing", RED), ("300", GREEN), ("400", GREEN)):
        (tmp_path / "gpt_8b/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "gpt_8b/checkpoints" / name / "manifest.json").touch()
        (finding,) = check_storage(tmp_path, config, "gpt_8b")
        assert finding.status == status
        assert status == GREEN or "185.9 GiB are needed for 2 of them, besides the 1 already there" in finding.found
    assert check_storage(tmp_path / "gpt_8b", config, "gpt_8b")[0].status == GREEN
    assert check_storage(tmp_path, config, "another")[0].status == RED


def test_compiled_programs_have_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    (finding,) = host.check_programs()
    assert finding.status == GREEN
    assert finding.found.startswith(f"compiled ones are kept in {tmp_path}/mjax/programs/")

    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    (finding,) = host.check_programs()
    assert finding.status == YELLOW
    assert finding.advice == "name a folder: export JAX_COMPILATION_CACHE_DIR=/path/to/folder"
