"""environment.json: what a start of a run ran on, as far as packages, JAX and the environment tell."""

import json

import jax
import pytest

from mjax.cluster import launch
from mjax.config import Config
from mjax.run import agreement, start


def test_environment_keeps_flags_and_no_secrets(tmp_path, monkeypatch):
    jax.devices()  # with the flags of the tests, which are about to be taken away
    for name in [name for name in start.os.environ if start.FLAGS.fullmatch(name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "SET_BY_MJAX", {})
    flags = {"NCCL_DEBUG": "1", "JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_dump_to=/x"}
    for name, value in (flags | {"HF_TOKEN": "secret", "MY_XLA_KEY": "secret"}).items():
        monkeypatch.setenv(name, value)
    launch.set_variable("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", start.os.environ)
    monkeypatch.setattr(
        agreement, "list_versions", lambda: {"jax": "0.11.2", "numpy": "2.4", "nvidia-nccl-cu13": "2.32.3"}
    )
    start.write_environment(Config(), tmp_path, pytest.fail)
    [found] = json.loads((tmp_path / "environment.json").read_text())
    assert found["flags"] == flags | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    assert found["set_by_mjax"] == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    assert found["driver"] is None  # on a CPU
    assert {"jax", "numpy", "nvidia-nccl-cu13"} <= found["packages"].keys()
