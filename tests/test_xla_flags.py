"""XLA flags that mjax sets: which, when, and what of the user's stays."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from mjax.cluster import launch
from mjax.commands import cli
from mjax.errors import UsageError
from mjax.parallel.mesh import make_mesh
from mjax.step.step import build_program
from tests.conftest import ROOT
from tests.small import small_config


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    monkeypatch.setenv("XLA_FLAGS", "")


def test_deterministic_adds_flags_to_those_of_user(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_gpu_autotune_level=0")
    for _ in range(2):
        launch.be_repeatable()
        assert os.environ["XLA_FLAGS"] == (
            "--xla_dump_to=/x --xla_gpu_autotune_level=0 "
            "--xla_gpu_exclude_nondeterministic_ops=true --xla_gpu_enable_triton_gemm=false"
        )
    assert {"XLA_FLAGS": os.environ["XLA_FLAGS"]} == launch.SET_BY_MJAX


@pytest.mark.parametrize("given", ["--xla_gpu_enable_triton_gemm", "--xla_gpu_enable_triton_gemm=true"])
def test_contradiction_of_deterministic_is_refused(given, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", given)
    with pytest.raises(UsageError, match=r"needs --xla_gpu_enable_triton_gemm=false, and XLA_FLAGS has --xla.*=true;"):
        launch.be_repeatable()
    flags = ["--config", str(ROOT / "tests" / "tiny_config.py"), "--name", "never", "--deterministic"]
    assert cli.main(["train", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_initial_weights_have_same_bits_with_less_optimization(monkeypatch):
    options = launch.options_for_one_call("cpu")
    assert options
    assert launch.options_for_one_call("gpu") == {}
    lowered = build_program(small_config(), make_mesh(small_config().mesh)).initialize.lower()
    quick, usual = (lowered.compile(how)() for how in (options, {"xla_backend_optimization_level": 3}))
    jax.tree.map(np.testing.assert_array_equal, quick, usual)
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # as typed by the user
    assert launch.options_for_one_call("cpu") == {}


def test_xla_for_cpus_starts_with_all_flags():
    """A flag that XLA does not know ends every process."""
    flags = " ".join(f"--{name}={value}" for name, value in launch.REPEATABLE.items())
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    subprocess.run(command, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, check=True)
