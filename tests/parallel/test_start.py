"""How a process finds out what it is: the environments of launchers, with JAX's own start replaced by a recorder."""

from types import SimpleNamespace

import jax
import pytest

from mjax.errors import UsageError
from mjax.launch import Distributed
from mjax.parallel import processes

SLURM = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}  # fmt: skip


@pytest.fixture
def started(monkeypatch):
    """Starts with an environment; returns what jax.distributed.initialize was called with, or None."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(processes, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS")

    def start(environment, **where):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        processes.start(Distributed(**where))
        return calls[-1] if calls else None

    return start


def test_a_process_that_nobody_launched_with_others_is_alone(started):
    assert started({"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "5"}) is None


def test_under_slurm_jax_finds_the_others(started):
    (coordinator, count, index), named = started(SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"})
    assert (coordinator, count, index) == (None, None, None)
    assert named == {"local_device_ids": [3], "initialization_timeout": 360, "heartbeat_timeout_seconds": 60}


def test_open_mpi_says_count_and_index_and_a_flag_may_say_where(started):
    given, named = started(OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, coordinator="node0:1234", heartbeat=15)
    assert given == ("node0:1234", 8, 6)
    assert named["local_device_ids"] == [2]
    assert named["heartbeat_timeout_seconds"] == 40


def test_a_kubernetes_indexed_job_is_left_to_jax(started):
    given, named = started({"JOB_COMPLETION_INDEX": "0", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert given == (None, None, None)
    assert named["local_device_ids"] == []


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, []),  # srun --gpus-per-task=1: each sees its own only
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8,4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [3]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [6, 7]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, []),
        (SLURM | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, []),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "5"}, None),
    ],
)
def test_a_process_owns_its_share_of_the_gpus_it_sees(environment, devices, started, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes.local_devices() == devices


@pytest.mark.parametrize(
    ("environment", "where", "words"),
    [
        ({}, {"processes": 2}, "go together"),
        ({}, {"coordinator": "node0:1234"}, "go together"),
        ({}, {"coordinator": "node0", "processes": 2, "process": 0}, "use HOST:PORT"),
        ({}, {"heartbeat": 0}, "--distributed.heartbeat is 0; it must be at least 5"),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, {}, "8 processes on this host cannot divide its 3 GPUs evenly"),
    ],
)
def test_what_cannot_start_is_refused(environment, where, words, started):
    with pytest.raises(UsageError, match=words):
        started(environment, **where)


def test_processes_that_own_different_numbers_of_devices_are_refused(started, monkeypatch):
    devices = [SimpleNamespace(process_index=index) for index in (0, 0, 1, 1, 2)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(UsageError, match="different numbers of devices: 1 on process 2, 2 on the others; give each"):
        started(SLURM | {"CUDA_VISIBLE_DEVICES": "3"})


def test_processes_that_find_nobody_say_what_to_give(started, monkeypatch):
    def fail(*_, **__):
        raise ValueError("coordinator_address should be defined.\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(UsageError, match=r"\(coordinator_address should be defined\.\); give each --distributed"):
        started({"JOB_COMPLETION_INDEX": "1"})
