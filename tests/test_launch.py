"""Surroundings of a process before JAX starts: launchers, devices, memory, folders; and the exit codes at its end."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mjax.cluster import launch
from mjax.commands import cli
from mjax.doctor import RED, MachineInfo
from mjax.doctor.checks import run_check
from mjax.errors import UsageError
from mjax.parallel.mesh import make_mesh
from mjax.step.step import build_program
from mjax.utils.files import cache_home
from tests.conftest import ROOT
from tests.small import small_config

OF_JAX = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "node0:29500"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ("srun", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("mpirun", 2)),
        ({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # the only pod
        ({"JOB_COMPLETION_INDEX": "1"}, ("Kubernetes", None)),
        (TORCHRUN, ("torchrun", 2)),
        ({**TORCHRUN, "SLURM_STEP_NUM_TASKS": "4"}, ("torchrun", 2)),  # srun torchrun
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, None),
        ({**OF_JAX, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "JOB_COMPLETION_INDEX": "0"}, None),
        ({**OF_JAX, **SKYPILOT, "JOB_COMPLETION_INDEX": "1"}, ("JAX_NUM_PROCESSES", 2)),
        ({**OF_JAX, **SKYPILOT, "SLURM_STEP_NUM_TASKS": "4"}, ("srun", 4)),
        ({"JAX_COORDINATOR_ADDRESS": "node0:29500"}, None),  # for srun, which is not here
        (SKYPILOT, ("SkyPilot", 2)),
        ({"WORLD_SIZE": "8", "RANK": "0"}, None),  # of something else
        ({"SLURM_STEP_NUM_TASKS": "", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpirun", 4)),  # Slurm leaves some empty
    ],
)
def test_launcher_is_found_in_environment(environment, launcher):
    assert launch.find_launcher(environment) == launcher


def test_first_pod_joins_others_with_kubernetes_package(monkeypatch):
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    in_cluster = {"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert launch.find_launcher(in_cluster) == ("Kubernetes", None)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu1,gpu[3-4]", "gpu1"),
        ("gpu[008-011,13],cpu1", "gpu008"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu[01-02]-ib", "gpu01-ib"),
        ("gpu[07,09]-ib,gpu10", "gpu07-ib"),
    ],
)
def test_slurm_processes_meet_at_first_host(nodes, host):
    srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "4097"}
    none = launch.Distributed()
    assert none.with_launcher(srun).coordinator == f"{host}:61441"  # JAX's port
    assert none.with_launcher(srun | {"JAX_COORDINATOR_PORT": "5"}).coordinator == f"{host}:5"
    assert none.with_launcher(srun | {"JAX_COORDINATOR_ADDRESS": "a:1"}) == none
    assert launch.Distributed("a:2").with_launcher(srun).coordinator == "a:2"


def test_rendezvous_of_torchrun():
    none = launch.Distributed()
    assert none.with_launcher({}) == none
    assert none.with_launcher(TORCHRUN) == launch.Distributed("node0:29500", 2, 1)  # a PyTorchJob
    listens = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert none.with_launcher(listens) == launch.Distributed("node0:29501", 2, 1)
    assert none.with_launcher(TORCHRUN | {"MASTER_ADDR": "fd00::1"}).coordinator == "[fd00::1]:29500"


@pytest.mark.parametrize("environment", [TORCHRUN, OF_JAX, SKYPILOT])
def test_flags_precede_launcher(environment):
    typed = launch.Distributed("other:1", 4, 3)
    assert typed.with_launcher(environment | {"RANK": "x"}) == typed
    assert launch.Distributed("other:1").with_launcher(environment) == launch.Distributed("other:1", 2, 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (TORCHRUN | {"RANK": "one"}, "RANK is one, but must be a number from 0 to 1; "),
        (TORCHRUN | {"RANK": "2"}, "RANK is 2, but must be a number from 0 to 1; "),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "but must be a number from 1 to 999999; "),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is http, but must be a number from 1 to 65534; "),
        (OF_JAX | {"JAX_NUM_PROCESSES": "1"}, "JAX_PROCESS_ID is 1, but must be a number from 0 to 0; "),
        (
            {"JAX_NUM_PROCESSES": "2"},
            "JAX_PROCESS_ID is not set, but must be a number from 0 to 1; correct it, or unset",
        ),
        ({"JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES is not set"),
        (OF_JAX | {"JAX_COORDINATOR_ADDRESS": ""}, "JAX_COORDINATOR_ADDRESS is not set, but must be HOST:PORT"),
        (OF_JAX | {"JAX_COORDINATOR_ADDRESS": "node0"}, "JAX_COORDINATOR_ADDRESS is node0, but must be HOST:PORT"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "-1"}, "SKYPILOT_NODE_RANK is -1, but must be a number from 0 to 1; "),
    ],
)
def test_wrong_variable_is_named(environment, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        launch.Distributed().with_launcher(environment)
    (finding,) = run_check("processes", MachineInfo(environment=environment))
    assert (finding.status, "; " in finding.message) == (RED, False)
    assert finding.advice.startswith("correct it, or unset")


def test_process_0_is_one_of_several():
    assert launch.Distributed("host:1", 2, 0).is_multiprocess
    assert not launch.Distributed("host:1", 2).is_multiprocess


def test_simulated_devices_are_on_cpu(monkeypatch):
    updates = []
    config = SimpleNamespace(update=lambda *values: updates.append(values))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_x")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.delenv("PJRT_NPROC")
    launch.simulate_devices(4)
    assert updates == [("jax_platforms", "cpu"), ("jax_num_cpu_devices", 4)]
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["XLA_FLAGS"] == f"{launch.IN_ORDER} --xla_x --xla_force_host_platform_device_count=4"
    assert os.environ["PJRT_NPROC"] == "16"  # a device may wait in several collectives, in a thread each


@pytest.mark.parametrize("name", launch.MEMORY_FRACTIONS)
def test_memory_share_of_user_stays(name, monkeypatch):
    monkeypatch.setattr(launch, "host_memory", lambda: 2**30)
    environment = {name: "0.5"}
    launch.claim_gpu_memory(environment)
    assert environment == {name: "0.5"}  # JAX refuses both at once


def test_cache_is_off_without_home(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert str(cache_home()) == "/cache/mjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_home() is None


# --- XLA flags --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_set(monkeypatch):
    jax.devices()  # the flags of this process are read before they are gone
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    monkeypatch.setenv("XLA_FLAGS", "")


def test_deterministic_adds_flags_to_those_of_user(monkeypatch, nothing_set):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_gpu_autotune_level=0")
    for _ in range(2):
        launch.set_deterministic_flags()
        assert os.environ["XLA_FLAGS"] == (
            "--xla_dump_to=/x --xla_gpu_autotune_level=0 "
            "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_enable_triton_gemm=false"
        )
    assert {"XLA_FLAGS": os.environ["XLA_FLAGS"]} == launch.SET_BY_MJAX


@pytest.mark.parametrize("given", ["--xla_gpu_enable_triton_gemm", "--xla_gpu_enable_triton_gemm=true"])
def test_contradiction_of_deterministic_is_refused(given, monkeypatch, capsys, nothing_set):
    monkeypatch.setenv("XLA_FLAGS", given)
    with pytest.raises(UsageError, match=r"needs --xla_gpu_enable_triton_gemm=false, and XLA_FLAGS has --xla.*=true;"):
        launch.set_deterministic_flags()
    flags = ["--config", str(ROOT / "tests" / "tiny_config.py"), "--name", "never", "--deterministic"]
    assert cli.main(["train", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_initial_weights_have_same_bits_with_less_optimization(monkeypatch, nothing_set):
    options = launch.quick_compile_options("cpu")
    assert options
    assert launch.quick_compile_options("gpu") == {}
    lowered = build_program(small_config(), make_mesh(small_config().mesh)).initialize.lower()
    quick, usual = (lowered.compile(how)() for how in (options, {"xla_backend_optimization_level": 3}))
    jax.tree.map(np.testing.assert_array_equal, quick, usual)
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # as typed by the user
    assert launch.quick_compile_options("cpu") == {}


def test_xla_for_cpus_starts_with_all_flags():
    """A flag that XLA does not know ends every process."""
    flags = " ".join(f"--{name}={value}" for name, value in launch.DETERMINISTIC_FLAGS.items())
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=True)
