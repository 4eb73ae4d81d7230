"""Rates that are found again from the times they imply, and the command that measures them."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fitting import Measurement, calibrate
from mjax.cluster.hardware import gpu_named
from mjax.planner.time import H100 as H100_RATES
from mjax.planner.time import Rates, read_calibration
from tests.conftest import ROOT

H100 = gpu_named("h100")
TRUE = {
    "launch": 3e-6,
    "memory": 0.9,
    "attention": ((96, 1024, 0.41, 0.33), (128, 1024, 0.5, 0.4), (128, 4096, 0.62, 0.55)),
    "matmul": 0.71,
    "inner": 160.0,
    "node": 0.81,
    "collective": 2e-5,
}


def _measurements():
    rates = Rates(H100, replace(H100_RATES, **TRUE), "bf16")
    sizes = [
        ("launch", (10,)),
        ("copy", (2e9,)),
        *(("attention", (5e11, *row[:2], backward)) for row in TRUE["attention"] for backward in (0, 1)),
        *(("product", shape) for shape in ((8192,) * 3, (2048,) * 3, (8192, 384, 3072), (512, 512, 4096))),
        *(("sum", (8, size)) for size in (2.0**16, 2.0**22, 2.0**28)),
    ]
    return [Measurement(kind, size, Measurement(kind, size, 0.0).predicted(rates)) for kind, size in sizes]


def test_rates_are_found_again():
    found, unsettled = calibrate(_measurements(), H100, "bf16")
    assert unsettled == []
    assert found.gpu == "h100"
    for name, value in TRUE.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-3, err_msg=name)
    assert found.network == H100_RATES.network


@pytest.mark.ci
def test_calibrate_writes_what_is_read(tmp_path):
    file = tmp_path / "rates.json"
    flags = ["--output", str(file), "--gpu", "h100", "--shrink", "128", "--rounds", "1", "--kinds", "copy", "sum"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(ROOT / "benchmarks" / "calibrate.py"), *flags]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    found = read_calibration(file)
    assert found.date
    assert found.versions.keys() == {"jax", "jaxlib"}
    assert found.measured == ("memory", "node", "collective")
    assert found.memory < 0.1, "no CPU copies as fast as an H100"
    assert found.matmul == H100_RATES.matmul
    assert "not settled by what was measured, and left as published: launch, attention, matmul" in result.stdout
