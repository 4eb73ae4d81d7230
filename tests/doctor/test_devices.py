"""Devices that JAX sees, compared with the driver's."""

from types import SimpleNamespace

import pytest

from mjax.doctor import GREEN, RED, YELLOW, devices
from mjax.doctor.devices import check_devices
from mjax.doctor.driver import Driver

H100, T400, SLICE = "NVIDIA H100 80GB HBM3", "NVIDIA T400", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
GIB = 2**30
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * GIB,) * 8, (0.0,) * 8)
TWO = Driver("580", (H100, T400))


@pytest.mark.parametrize(
    ("kinds", "driver", "cuda", "environment", "status", "words"),
    [
        (["cpu"] * 16, Driver(), None, {}, GREEN, "16 simulated devices of the CPU"),
        (["cpu"], EIGHT, 13, {}, RED, "although 8 GPUs are here: Unable to load cuPTI"),
        (["cpu"], EIGHT, 13, {"CUDA_VISIBLE_DEVICES": ""}, GREEN, "the CPU"),
        (["cpu"], EIGHT, None, {}, YELLOW, "the GPU cannot be used"),
        ([H100] * 7, EIGHT, 13, {}, YELLOW, f"7 × {H100}; the driver shows 8"),
        ([H100, T400], TWO, 13, {}, YELLOW, "of different kinds"),
        ([SLICE], EIGHT, 13, {}, GREEN, "a slice of a GPU"),
    ],
)
def test_devices_are_compared_with_driver(monkeypatch, kinds, driver, cuda, environment, status, words):
    found = [SimpleNamespace(platform="cpu" if kind == "cpu" else "gpu", device_kind=kind) for kind in kinds]
    monkeypatch.setattr(devices.jax, "local_devices", lambda: found)
    (finding,) = check_devices(driver, cuda, ["Unable to load cuPTI"], environment)
    assert finding.status == status
    assert words in finding.found
