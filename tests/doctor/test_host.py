"""The machine around the devices, on machines that are made up, and the folder of checkpoints."""

import errno
import os
from collections import namedtuple
from dataclasses import replace
from unittest.mock import Mock

import pytest

from mjax.config import load_config
from mjax.doctor import GREEN, RED, YELLOW, Facts, host
from mjax.doctor.host import check_memory, check_storage, state_bytes
from mjax.models.build import count_parameters

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A host with 64 GiB, 60 of them free, and the control groups of this process."""

    def machine(groups="0::/\n"):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable:  {60 * 2**20} kB\n")
        (tmp_path / "proc/self/cgroup").write_text(groups)
        monkeypatch.setattr(host, "ROOT", tmp_path)
        return tmp_path

    return machine


def group(root, path, limit, used, inactive=0):
    """A control group of version 2 with this limit, in GiB or 'max'."""
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text("max\n" if limit == "max" else f"{limit * GIB}\n")
    (folder / "memory.current").write_text(f"{used * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive * GIB}\nactive_file 7\n")


def test_limit_of_slurm_job_counts(machine):
    root = machine("1:name=systemd:/\n0::/slurm/job_7/step_0/task_1\n")  # which has no limit of memory
    group(root, "slurm/job_7", 32, used=20, inactive=8)
    group(root, "slurm/job_7/step_0", "max", used=20)
    assert check_memory(Facts()).found == "20.00 GiB of 32.00 GiB free, the limit of this container or job"
    group(root, "slurm", 48, used=45)  # its other jobs
    group(root, "slurm/job_8", 1, used=0)  # somebody else's
    assert check_memory(Facts()).found.startswith("3.00 GiB of 48.00 GiB")


def test_limit_of_cgroup_version_1_counts(machine):
    root = machine("5:cpuset,cpu:/slurm/job_7\n4:memory:/slurm/job_7\n0::/\n")
    for path, limit in (("", 2**63 - 4096), ("slurm/job_7", 24 * GIB)):
        folder = root / "sys/fs/cgroup/memory" / path
        folder.mkdir(parents=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{16 * GIB}\n")
        (folder / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n")
    assert check_memory(Facts()).found == "10.00 GiB of 24.00 GiB free, the limit of this container or job"


def test_memory_below_checkpoint_copy_is_yellow(machine):
    machine()
    config = load_config("gpt_8b")
    assert state_bytes(config) == 12 * count_parameters(config.model)
    finding = check_memory(Facts(config=replace(config, mesh=replace(config.mesh, data=1))))
    assert finding.status == YELLOW
    assert "takes 92.95 GiB of a host with 8 of its 8 GPUs" in finding.found
    finding = check_memory(Facts(config=config))
    assert finding.status == GREEN
    assert "takes 1.45 GiB of a host with 8 of its 512 GPUs" in finding.found


# --- The disk ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """Make a disk with so much room and such rates; this machine's is not what is tested here."""

    def disk(free=400 * GIB, write=1e9):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage(GIB, GIB, free))
        monkeypatch.setattr(host, "measure", lambda folder: (write, 1e9))

    return disk


@pytest.fixture
def small_file(monkeypatch):
    monkeypatch.setattr(host, "FILE_BYTES", 2**20)
    monkeypatch.setattr(host, "SLOW", 1.0)


def test_absent_folder_is_not_made(tmp_path, small_file):
    finding = check_storage(Facts(runs=tmp_path / "runs" / "deep"))
    assert finding.status == GREEN
    assert f"{tmp_path} (where" in finding.found
    assert finding.figures["write_mb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "name", "code", "advice"),
    [
        (host.tempfile, "TemporaryFile", errno.EROFS, "make it writable"),
        (os, "fsync", errno.ENOSPC, "free some space"),
    ],
    ids=["read-only", "full"],
)
def test_failing_disk_is_red(tmp_path, small_file, monkeypatch, module, name, code, advice):
    monkeypatch.setattr(module, name, Mock(side_effect=OSError(code, os.strerror(code))))
    finding = check_storage(Facts(runs=tmp_path))
    assert finding.status == RED
    assert finding.advice.startswith(advice)
    assert list(tmp_path.iterdir()) == []


def test_lost_bytes_are_red(tmp_path, small_file, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.ftruncate(descriptor, 10))
    finding = check_storage(Facts(runs=tmp_path))
    assert finding.status == RED
    assert "the bytes read are not those written" in finding.found


@pytest.mark.parametrize(
    ("config", "free", "write", "status"),
    [
        ("gpt_8b", 270, 1e9, RED),  # 93 GiB a checkpoint, two are kept while a third is written
        ("gpt_8b", 300, 1e9, GREEN),
        (None, 0.5, 1e9, YELLOW),
        (None, 10, 20e6, YELLOW),
        (None, 10, 900e6, GREEN),
    ],
)
def test_room_and_speed_are_judged(tmp_path, disk, config, free, write, status):
    disk(free * GIB, write)
    finding = check_storage(Facts(config=config and load_config(config), runs=tmp_path))
    assert finding.status == status
    assert config is None or "; 3 checkpoints of 92.95 GiB are to be saved" in finding.found


def test_written_checkpoints_need_no_room_again(tmp_path, disk):
    disk(100 * GIB)
    facts = Facts(config=load_config("gpt_8b"), name="gpt_8b", runs=tmp_path)
    for name, status in (("200", RED), ("300.writing", RED), ("300", GREEN), ("400", GREEN)):
        (tmp_path / "gpt_8b/checkpoints" / name).mkdir(parents=True)
        (tmp_path / "gpt_8b/checkpoints" / name / "manifest.json").touch()
        finding = check_storage(facts)
        assert finding.status == status
        assert status == GREEN or finding.found.endswith("185.90 GiB are needed")
    assert check_storage(replace(facts, runs=tmp_path / "gpt_8b")).status == GREEN
    assert check_storage(replace(facts, name="another")).status == RED


def test_link_to_nowhere_is_red(tmp_path):
    (tmp_path / "runs").symlink_to("absent")
    assert check_storage(Facts(runs=tmp_path / "runs")).status == RED
