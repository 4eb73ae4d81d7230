"""Discovery of a process's place: the environments of launchers, with JAX's own start replaced by a recorder."""

import signal
import socket
import threading
from types import SimpleNamespace

import jax
import pynvml
import pytest

from mjax.cluster import processes
from mjax.cluster.launch import Distributed
from mjax.errors import UsageError

SLURM = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}  # fmt: skip
TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1"}


def gpus(count):
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}


@pytest.fixture
def start(monkeypatch):
    """Starts with an environment; returns what jax.distributed.initialize was called with, or None."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **named: calls.append((given, named)))
    monkeypatch.setattr(processes, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS")

    def started(environment, **where):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        processes.start(Distributed(**where))
        return calls[-1] if calls else None

    return started


@pytest.mark.parametrize(
    ("environment", "where", "given", "devices"),
    [
        (SLURM | gpus(8), {}, (None, None, None), [3]),
        (OPEN_MPI | gpus(4), {"coordinator": "node0:1234"}, ("node0:1234", 8, 6), [2]),
        (KUBERNETES | gpus(2), {}, (None, None, None), []),
        ({}, {"coordinator": "node0:1234", "processes": 2, "process": 1}, ("node0:1234", 2, 1), []),
    ],
    ids=["srun", "mpirun", "Kubernetes", "flags"],
)
def test_process_joins_others_of_launcher(environment, where, given, devices, start):
    before = set(threading.enumerate())
    found, named = start(environment, **where)
    assert found == given
    # JAX's limits are longer than ours, which have a better message.
    assert named == {"local_device_ids": devices, "initialization_timeout": 360, "heartbeat_timeout_seconds": 60}
    for thread in set(threading.enumerate()) - before:  # the timer that ends a process without peers
        thread.join(5)
        assert not thread.is_alive()


FLAGS = {"processes": 2, "process": 0}


@pytest.mark.parametrize("host", ["", "127.0.0.1", "localhost"])
@pytest.mark.parametrize(
    ("environment", "where"),
    [({}, FLAGS), (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}, {}), (SLURM | {"SLURM_PROCID": "0"}, {})],
    ids=["flags", "mpirun", "srun"],
)
def test_start_refuses_port_that_is_taken(environment, where, host, start):
    """JAX ended process 0 in a segmentation fault. The others wait for process 0."""
    with socket.create_server((host, 0)) as other:
        address = f"node0:{other.getsockname()[1]}"
        with pytest.raises(UsageError, match=r"cannot use port \d+ of .* \(Address already in use\); give every"):
            start(environment, coordinator=address, **where)
        assert start({}, coordinator=address, processes=2, process=1)
    start(environment, coordinator=address, **where)  # what was tried does not occupy the port
    with pytest.raises(UsageError, match=r"port 70000 of .* at most 65535"):
        start(environment, coordinator="node0:70000", **where)


def test_port_of_open_mpi_is_jaxs():
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    assert Distributed().coordinator_port(uri) == 62624
    assert Distributed().coordinator_port(uri | {"JAX_COORDINATOR_PORT": "5"}) == 5
    assert Distributed().coordinator_port(uri | {"JAX_COORDINATOR_BIND_ADDRESS": "[::1]:7"}) is None
    assert Distributed().coordinator_port({}) is None


@pytest.mark.parametrize("number", processes.STOP_SIGNALS)
def test_warning_before_first_step_becomes_sigterm(number, start):
    """JAX reports SIGTERM to the other processes. A handler of the user's own stays."""
    heard = []
    signal.signal(number, signal.SIG_DFL)  # also under nohup
    signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    start({}, coordinator="node0:1234", processes=2, process=1)
    signal.raise_signal(number)
    signal.signal(number, lambda *_: heard.append("mine"))
    processes.forward_stop_signals()
    signal.raise_signal(number)
    assert heard == ["SIGTERM", "mine"]


def test_single_process_starts_alone(start):
    assert start({"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "5"}) is None


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        (SLURM | {"CUDA_VISIBLE_DEVICES": "3"}, []),  # srun --gpus-per-task=1: each sees its own only
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8,4"} | gpus(4), [3]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"} | gpus(8), [6, 7]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"} | gpus(2), []),
        (gpus(4), []),
        (SLURM | {"JAX_PLATFORMS": "cpu"} | gpus(2), []),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "5"}, None),
    ],
)
def test_process_owns_its_share_of_gpus(environment, devices, start, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert processes.local_devices() == devices


def test_gpus_are_counted_by_the_driver(start, monkeypatch):
    """Without CUDA_VISIBLE_DEVICES; those that belong to another job do not count."""

    def handle(index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 9)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert processes.local_devices() == [3]


@pytest.mark.parametrize(
    ("environment", "where", "words"),
    [
        ({}, {"processes": 2}, "go together"),
        ({}, {"coordinator": "node0:1234"}, "go together"),
        ({}, {"coordinator": "node0", "processes": 2, "process": 0}, "use HOST:PORT"),
        (SLURM | gpus(3), {}, "8 processes on this host cannot divide its 3 GPUs evenly"),
        (SLURM | TORCHRUN | {"LOCAL_RANK": "abc"}, {}, "LOCAL_RANK is abc, but must be a number from 0 to 3; correct"),
        (SLURM | TORCHRUN | {"LOCAL_RANK": "4"}, {}, "LOCAL_RANK is 4, but must be a number from 0 to 3"),
        (SLURM | TORCHRUN | {"LOCAL_WORLD_SIZE": "0"}, {}, "LOCAL_WORLD_SIZE is 0, but must be a number from 1 to"),
        (SLURM | {"SLURM_NODEID": "2"}, {}, "SLURM_NODEID is 2, but must be a number from 0 to 1"),
        (SLURM | {"SLURM_LOCALID": ""}, {}, "SLURM_LOCALID is not set, but must be a number from 0 to 7"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "x"}, {}, "OMPI_COMM_WORLD_SIZE is x, but must be a number from 1 to"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, {}, "OMPI_COMM_WORLD_RANK is x, but must be a number from 0 to 7"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, {}, "LOCAL_RANK is -1, but must be a number from 0 to 3"),
    ],
)
def test_start_refuses_what_cannot_work(environment, where, words, start):
    with pytest.raises(UsageError, match=words):
        start(environment, **where)


def test_start_refuses_unequal_numbers_of_devices(start, monkeypatch):
    devices = [SimpleNamespace(process_index=index) for index in (0, 0, 1, 1, 2)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(UsageError, match="different numbers of devices: 1 on process 2, 2 on the others; give each"):
        start(SLURM | {"CUDA_VISIBLE_DEVICES": "3"})


def test_start_explains_failure_of_jax(start, monkeypatch):
    def fail(*_, **__):
        raise ValueError("coordinator_address should be defined.\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(UsageError, match=r"\(coordinator_address should be defined\.\); give each --distributed"):
        start({"SLURM_STEP_NUM_TASKS": "2"})
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    with pytest.raises(UsageError, match=r"for a single pod unset JOB_COMPLETION_INDEX, else give each"):
        start(KUBERNETES)


def test_memory_is_returned_after_long_compilations(monkeypatch):
    returned, heard = [], []
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=returned.append))
    processes.trim_memory.__wrapped__()
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: heard.append(event))
    jax.jit(lambda x: x * 1.6180339)(1.0).block_until_ready()
    [name] = {event for event in heard if "backend_compile" in event}
    assert not returned
    jax.monitoring.record_event_duration_secs(name, 1.5)
    assert returned == [0]
