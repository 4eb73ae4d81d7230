"""The folder of checkpoints: read-only, full, small and slow."""

import errno
import os

import pytest

from mjax.config import load_config
from mjax.doctor import storage
from mjax.doctor.finding import GREEN, RED, YELLOW
from mjax.doctor.storage import check_storage, judge_storage


@pytest.fixture(autouse=True)
def small_file(monkeypatch):
    monkeypatch.setattr(storage, "FILE_BYTES", 2**20)
    monkeypatch.setattr(storage, "SLOW", 1.0)  # this machine's disk is not what is tested here


def test_a_folder_is_written_read_and_left_as_it_was(tmp_path):
    (finding,) = check_storage(tmp_path)
    assert finding.status == GREEN
    assert list(tmp_path.iterdir()) == []
    assert finding.figures["write_mb_per_s"] > 0


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path):
    (finding,) = check_storage(tmp_path / "runs" / "deep")
    assert finding.status == GREEN
    assert f"{tmp_path} (where" in finding.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_folder_is_red(tmp_path, monkeypatch, number):
    def refuse(**_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(storage.tempfile, "mkstemp", refuse)
    (finding,) = check_storage(tmp_path)
    assert finding.status == RED
    assert os.strerror(number) in finding.found
    assert finding.advice == "make it writable, or choose another folder with --runs"


def test_a_folder_of_the_kernels_own_is_red():
    assert check_storage(storage.Path("/proc/1"))[0].status == RED


def test_a_disk_that_fills_up_is_red_and_the_file_is_removed(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    (finding,) = check_storage(tmp_path)
    assert finding.status == RED
    assert finding.advice.startswith("free some space")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_shorter_when_read_is_red(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.ftruncate(descriptor, 10))
    (finding,) = check_storage(tmp_path)
    assert finding.status == RED
    assert "of 1048576 bytes written, 10 were read" in finding.found


def test_a_slow_disk_is_yellow(monkeypatch):
    monkeypatch.undo()
    (finding,) = judge_storage("runs", 2**40, 20e6, 1e9, None)
    assert finding.status == YELLOW
    assert finding.found.endswith("slow")
    assert judge_storage("runs", 2**40, 900e6, 1e9, None)[0].status == GREEN


def test_room_is_compared_with_the_checkpoints_of_the_config():
    config = load_config("gpt_8b")  # 93 GiB a checkpoint, two are kept while a third is written
    (finding,) = judge_storage("runs", 200 * 2**30, 1e9, 1e9, config)
    assert finding.status == RED
    assert "for 3 of them" in finding.found
    assert judge_storage("runs", 300 * 2**30, 1e9, 1e9, config)[0].status == GREEN
    assert judge_storage("runs", 2**20, 1e9, 1e9, None)[0].status == YELLOW
