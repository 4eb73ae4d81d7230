"""What JAX sees, beside what the driver shows."""

from types import SimpleNamespace

import pytest

from mjax.doctor import devices
from mjax.doctor.devices import check_device_memory, check_devices, judge_device_memory
from mjax.doctor.driver import Driver
from mjax.doctor.finding import GREEN, RED, YELLOW

H100, T400, SLICE = "NVIDIA H100 80GB HBM3", "NVIDIA T400", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
GIB = 2**30
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * GIB,) * 8, (0.0,) * 8)
TWO = Driver("580", (H100, T400))


def sees(monkeypatch, platform, *kinds):
    found = [SimpleNamespace(platform=platform, device_kind=kind) for kind in kinds]
    monkeypatch.setattr(devices.jax, "local_devices", lambda: found)
    return found


@pytest.mark.parametrize(
    ("kinds", "driver", "cuda", "environment", "status", "words"),
    [
        (["cpu"], Driver(), None, {"JAX_PLATFORMS": "cpu"}, GREEN, "by JAX_PLATFORMS=cpu"),
        (["cpu"] * 16, Driver(), None, {}, GREEN, "16 simulated devices of the CPU"),
        (["cpu"], EIGHT, 13, {}, RED, "although 8 GPUs are here: Unable to load cuPTI"),
        (["cpu"], EIGHT, 13, {"JAX_PLATFORMS": "cpu"}, GREEN, "by JAX_PLATFORMS=cpu"),
        (["cpu"], EIGHT, 13, {"CUDA_VISIBLE_DEVICES": ""}, GREEN, "the CPU"),
        (["cpu"], EIGHT, None, {}, YELLOW, "the GPU cannot be used"),
        ([H100] * 7, EIGHT, 13, {}, YELLOW, f"7 × {H100}; the driver shows 8"),
        ([H100] * 7, EIGHT, 13, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}, GREEN, f"7 × {H100}"),
        ([H100, T400], TWO, 13, {}, YELLOW, "of different kinds"),
        ([SLICE], EIGHT, 13, {}, GREEN, "a slice of a GPU"),
    ],
)
def test_devices_are_compared_with_driver(monkeypatch, kinds, driver, cuda, environment, status, words):
    sees(monkeypatch, "cpu" if kinds[0] == "cpu" else "gpu", *kinds)
    (finding,) = check_devices(driver, cuda, ["Unable to load cuPTI"], environment)
    assert finding.status == status
    assert words in finding.found


def test_no_device_is_red_with_its_variable(monkeypatch):
    def refuse():
        raise AssertionError

    monkeypatch.setattr(devices.jax, "local_devices", refuse)
    (finding,) = check_devices(Driver(), None, environment={"JAX_PLATFORMS": "cuda"})
    assert (finding.status, finding.found) == (RED, "JAX has no device with JAX_PLATFORMS=cuda (AssertionError)")


@pytest.mark.parametrize(
    ("limit", "environment", "status", "words"),
    [
        (72, {}, GREEN, "JAX may use 72.0 GiB of 80.0 GiB"),
        (60, {}, YELLOW, "75%"),
        (72, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, YELLOW, "piece by piece"),
        (72, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, YELLOW, "slow"),
    ],
)
def test_unused_memory_is_yellow(limit, environment, status, words):
    (finding,) = judge_device_memory(limit * GIB, 80 * GIB, environment, H100)
    assert finding.status == status
    assert words in finding.found


def test_memory_is_judged_by_kind(monkeypatch):
    found = sees(monkeypatch, "gpu", H100, T400, T400, SLICE)
    for device, limit in zip(found, (72, 3.6, 2, 9), strict=True):
        device.memory_stats = lambda limit=limit: {"bytes_limit": limit * GIB}
    driver = Driver("580", (H100, T400, T400), (80 * GIB, 4 * GIB, 4 * GIB))
    large, small, part = check_device_memory(driver, {})
    assert (large.status, large.found) == (GREEN, f"JAX may use 72.0 GiB of 80.0 GiB of {H100}")
    assert (small.status, small.found) == (YELLOW, f"JAX may use 2.0 GiB of 4.0 GiB of {T400}, 50%")
    assert part.found == f"JAX may use 9.0 GiB of {SLICE}; the driver does not report its memory"


@pytest.mark.gpu
def test_real_gpu_and_its_memory_are_found():
    from mjax.doctor.driver import read_driver
    from mjax.packages import cuda_build

    driver = read_driver()
    (finding,) = check_devices(driver, cuda_build())
    assert finding.status == GREEN
    assert driver.gpus[0] in finding.found
    assert check_device_memory(driver)[0].figures["total_gib"] > 1
