"""The machine around the devices, on machines that are made up."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest

from mjax.config import load_config
from mjax.doctor.finding import GREEN, RED, YELLOW, guarded
from mjax.doctor.host import check_memory, check_open_files, check_processes, check_shared_memory, state_bytes


def machine(folder, total=64, available=60, limit=None, used=0):
    """A host with so many GiB, in a container with this limit."""
    (folder / "proc").mkdir()
    (folder / "proc/meminfo").write_text(f"MemTotal: {total * 2**20} kB\nMemAvailable:  {available * 2**20} kB\n")
    if limit is not None:
        group = folder / "sys/fs/cgroup"
        group.mkdir(parents=True)
        (group / "memory.max").write_text("max\n" if limit == "max" else f"{limit * 2**30}\n")
        (group / "memory.current").write_text(f"{used * 2**30}\n")
    return folder


def test_free_memory_is_that_of_the_host(tmp_path):
    (finding,) = check_memory(root=machine(tmp_path, limit="max"))
    assert (finding.status, finding.found) == (GREEN, "60.0 GiB of 64.0 GiB free")


def test_the_limit_of_a_container_counts_and_not_the_memory_of_its_host(tmp_path):
    (finding,) = check_memory(root=machine(tmp_path, limit=16, used=4))
    assert finding.found == "12.0 GiB of 16.0 GiB free, the limit of this container"


def test_memory_that_a_checkpoints_copy_does_not_fit_into_is_yellow(tmp_path):
    config = load_config("gpt_8b")
    root = machine(tmp_path)
    assert state_bytes(config) == 12 * config.model.parameters
    one_host = replace(config, mesh=replace(config.mesh, data=1))
    (finding,) = check_memory(one_host, root)
    assert finding.status == YELLOW
    assert "takes 93.0 GiB of a host with 8 of its 8 GPUs" in finding.found
    (finding,) = check_memory(config, root)
    assert finding.status == GREEN
    assert "takes 1.5 GiB of a host with 8 of its 512 GPUs" in finding.found


def test_little_shared_memory_is_yellow_between_gpus_and_fine_for_one(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(64 * 2**20, 0, 64 * 2**20))
    (finding,) = check_shared_memory(8, tmp_path)
    assert (finding.status, finding.advice.split(";")[0]) == (YELLOW, "docker run --shm-size=8g")
    assert check_shared_memory(1, tmp_path)[0].status == GREEN


def test_no_shared_memory_is_red_between_gpus(tmp_path):
    assert check_shared_memory(2, tmp_path / "absent")[0].status == RED
    assert check_shared_memory(1, tmp_path / "absent") == []


def test_few_open_files_are_yellow():
    (finding,) = check_open_files(1024)
    assert (finding.status, finding.advice) == (YELLOW, "ulimit -n 65536")
    assert check_open_files(65536)[0].status == check_open_files(-1)[0].status == GREEN


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({}, GREEN, "no launcher"),
        ({"SLURM_STEP_NUM_TASKS": "16"}, GREEN, "srun started 16 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, GREEN, "mpirun started 4 processes"),
        ({"JOB_COMPLETION_INDEX": "0"}, GREEN, "Kubernetes started an indexed job"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, YELLOW, "outside srun: train.py would run alone"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, GREEN, "job 7"),
    ],
)
def test_the_processes_that_a_launcher_started_are_named(environment, status, words):
    (finding,) = check_processes(environment)
    assert finding.status == status
    assert words in finding.found


def test_a_check_that_fails_itself_is_red_with_its_sentence(tmp_path):
    (finding,) = guarded("memory", lambda: check_memory(root=tmp_path))
    assert (finding.check, finding.status) == ("memory", RED)
    assert "could not be checked: FileNotFoundError" in finding.found
