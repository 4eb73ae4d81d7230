"""environment.json: what a start of a run ran on, as far as packages, JAX and the environment tell."""

import json
from types import SimpleNamespace

import jax
import pytest

from mjax import launch
from mjax.config import Config
from mjax.training import environment


@pytest.fixture
def variables(monkeypatch):
    jax.devices()  # with the flags of the tests, which are about to be taken away
    for name in list(environment.os.environ):
        if environment.FLAGS.fullmatch(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    return monkeypatch.setenv


def entry(tmp_path):
    environment.write(Config(), tmp_path, pytest.fail)
    return json.loads((tmp_path / "environment.json").read_text())[-1]


def test_flags_of_the_user_and_of_mjax_are_kept_apart_and_nothing_else_is_kept(tmp_path, variables):
    for name in ("NCCL_DEBUG", "JAX_ENABLE_X64", "HF_TOKEN", "MY_XLA_KEY"):
        variables(name, "1")
    variables("XLA_FLAGS", "--xla_dump_to=/x")
    launch.set_variable("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", environment.os.environ)
    found = entry(tmp_path)
    assert found["flags"] == {
        "JAX_ENABLE_X64": "1",
        "NCCL_DEBUG": "1",
        "XLA_FLAGS": "--xla_dump_to=/x",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
    }
    assert found["set_by_mjax"] == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    assert found["memory_fraction"] == "0.9"
    assert found["nvidia"] == {}  # on a CPU


def test_on_a_gpu_the_driver_and_nvidias_libraries_have_their_versions(monkeypatch):
    wheels = {
        "nvidia-cudnn-cu13": "9.28.1.4", "nvidia-nccl-cu13": "2.32.3", "nvidia-cuda-runtime": "13.5.37",
        "nvidia-cublas-cu12": "12.9", "nvidia-nvvm": "13", "jax": "0.11.2",
    }  # fmt: skip
    monkeypatch.setattr(environment.packages, "installed", lambda: wheels)
    monkeypatch.setattr(environment.jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(launch, "nvidia_driver", lambda: "580.65.06")
    assert environment.nvidia() == {
        "driver": "580.65.06", "CUDA": "13.5.37", "cuBLAS": "12.9", "cuDNN": "9.28.1.4", "NCCL": "2.32.3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12\n", "580.65.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1  Release Build\n", "570.1"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_the_driver_is_read_from_what_the_kernel_says(text, version, tmp_path):
    if text is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert launch.nvidia_driver(tmp_path) == version
