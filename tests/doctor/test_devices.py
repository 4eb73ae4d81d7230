"""What JAX sees, beside what the driver shows."""

from types import SimpleNamespace

import jax
import pytest

from mjax.doctor import devices
from mjax.doctor.devices import check_device_memory, check_devices, judge_device_memory
from mjax.doctor.driver import Driver
from mjax.doctor.finding import GREEN, RED, YELLOW

H100 = "NVIDIA H100 80GB HBM3"
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * 2**30,) * 8, (0.0,) * 8)
GIB = 2**30


def sees(monkeypatch, platform, *kinds):
    found = [SimpleNamespace(platform=platform, device_kind=kind) for kind in kinds]
    monkeypatch.setattr(devices.jax, "local_devices", lambda: found)


def test_simulated_devices_are_called_so():
    if jax.default_backend() == "cpu":
        (finding,) = check_devices(Driver(), None, environment={})
        assert (finding.status, finding.found) == (GREEN, "16 simulated devices of the CPU")


def test_a_cpu_is_what_jax_for_cpus_finds(monkeypatch):
    sees(monkeypatch, "cpu", "cpu")
    (finding,) = check_devices(Driver(), None, environment={"JAX_PLATFORMS": "cpu"})
    assert finding.status == GREEN
    assert finding.found.endswith("by JAX_PLATFORMS=cpu")


def test_a_cpu_where_there_is_a_gpu_is_red_with_the_reason_that_jax_logged(monkeypatch):
    sees(monkeypatch, "cpu", "cpu")
    (finding,) = check_devices(EIGHT, 13, ["RuntimeError: Unable to load cuPTI. Is it installed?"], {})
    assert finding.status == RED
    assert "although 8 GPUs are here: RuntimeError: Unable to load cuPTI" in finding.found
    # What the person asked for is not an error, and the driver's own line says the rest.
    assert check_devices(EIGHT, 13, [], {"JAX_PLATFORMS": "cpu"})[0].status == GREEN
    assert check_devices(EIGHT, 13, [], {"CUDA_VISIBLE_DEVICES": ""})[0].status == GREEN
    assert check_devices(EIGHT, None, [], {})[0].status == YELLOW


def test_no_device_at_all_is_red_with_the_variable_that_asked_for_one(monkeypatch):
    def refuse():
        raise AssertionError

    monkeypatch.setattr(devices.jax, "local_devices", refuse)
    (finding,) = check_devices(Driver(), None, environment={"JAX_PLATFORMS": "cuda"})
    assert (finding.status, finding.found) == (RED, "JAX has no device with JAX_PLATFORMS=cuda (AssertionError)")


def test_fewer_gpus_than_the_driver_shows_are_yellow(monkeypatch):
    sees(monkeypatch, "gpu", *[H100] * 7)
    (finding,) = check_devices(EIGHT, 13, environment={})
    assert (finding.status, finding.found) == (YELLOW, f"7 × {H100}; the driver shows 8")
    assert check_devices(EIGHT, 13, environment={"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"})[0].status == GREEN


def test_gpus_of_different_kinds_are_yellow(monkeypatch):
    sees(monkeypatch, "gpu", H100, "NVIDIA T400")
    assert check_devices(Driver("580", (H100, "NVIDIA T400")), 13, environment={})[0].status == YELLOW


@pytest.mark.parametrize(
    ("limit", "environment", "status", "words"),
    [
        (72, {}, GREEN, "JAX may use 72.0 GiB of 80.0 GiB"),
        (60, {}, YELLOW, "75%"),
        (72, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, YELLOW, "piece by piece"),
        (72, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, YELLOW, "slow"),
    ],
)
def test_memory_that_is_left_unused_or_broken_up_is_yellow(limit, environment, status, words):
    (finding,) = judge_device_memory(limit * GIB, 80 * GIB, environment, H100)
    assert finding.status == status
    assert words in finding.found


def test_the_memory_of_each_kind_of_gpu_is_its_own_and_that_of_a_slice_is_not_known(monkeypatch):
    t400, slice_of_one = "NVIDIA T400", f"{H100} MIG 1g.10gb"
    sees(monkeypatch, "gpu", H100, t400, t400, slice_of_one)
    for device, limit in zip(devices.jax.local_devices(), (72, 3.6, 2, 9), strict=True):
        device.memory_stats = lambda limit=limit: {"bytes_limit": limit * GIB}
    driver = Driver("580", (H100, t400, t400), (80 * GIB, 4 * GIB, 4 * GIB))
    large, small, part = check_device_memory(driver, {})
    assert (large.status, large.found) == (GREEN, f"JAX may use 72.0 GiB of 80.0 GiB of {H100}")
    assert (small.status, small.found) == (YELLOW, f"JAX may use 2.0 GiB of 4.0 GiB of {t400}, 50%")
    assert part.found == f"JAX may use 9.0 GiB of {slice_of_one}; the driver does not report its memory"


def test_a_slice_of_a_gpu_is_not_a_gpu_that_is_missing(monkeypatch):
    sees(monkeypatch, "gpu", f"{H100} MIG 1g.10gb")
    (finding,) = check_devices(EIGHT, 13, environment={})
    assert (finding.status, finding.found) == (GREEN, f"1 × {H100} MIG 1g.10gb, a slice of a GPU")


@pytest.mark.gpu
def test_on_a_gpu_its_kind_and_its_memory_are_found():
    from mjax.doctor.driver import read_driver
    from mjax.packages import cuda_build

    driver = read_driver()
    (finding,) = check_devices(driver, cuda_build())
    assert finding.status == GREEN
    assert driver.gpus[0] in finding.found
    assert check_device_memory(driver)[0].figures["total_gib"] > 1
