"""Devices that JAX sees, compared with the driver's, and their rates with data sheets."""

from types import SimpleNamespace

import jax
import pytest

from mjax.doctor import FIGURE, GREEN, RED, YELLOW, MachineInfo, devices
from mjax.doctor.devices import check_all_reduce, check_devices, check_matmul, judge
from mjax.doctor.host import Driver

H100, T400, SLICE = "NVIDIA H100 80GB HBM3", "NVIDIA T400", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
GIB = 2**30
EIGHT = Driver("580.65.06", (H100,) * 8, (80 * GIB,) * 8, (0.0,) * 8)


@pytest.mark.parametrize(
    ("kinds", "driver", "cuda", "environment", "status", "words"),
    [
        (["cpu"] * 16, Driver(), None, {}, GREEN, "16 simulated devices of the CPU"),
        (["cpu"], EIGHT, 13, {}, RED, "the driver lists 8 GPUs"),
        (["cpu"], EIGHT, 13, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, YELLOW, "with CUDA_VISIBLE_DEVICES=NoDevFiles"),
        (["cpu"], EIGHT, 13, {"JAX_PLATFORMS": "cpu"}, YELLOW, "JAX_PLATFORMS=cpu; the driver lists 8 GPUs"),
        (["cpu"], EIGHT, None, {}, YELLOW, "the driver lists 8 GPUs"),
        ([H100] * 8, EIGHT, 13, {}, GREEN, f"8 × {H100}"),
        ([H100] * 7, EIGHT, 13, {}, YELLOW, f"7 × {H100}; the driver lists 8"),
        ([H100] * 2, EIGHT, 13, {"CUDA_VISIBLE_DEVICES": "0,1"}, GREEN, "with CUDA_VISIBLE_DEVICES=0,1"),
        ([H100], EIGHT, 13, {"CUDA_VISIBLE_DEVICES": "0,9,1"}, YELLOW, "with CUDA_VISIBLE_DEVICES=0,9,1"),
        ([H100, T400], Driver("580", (H100, T400)), 13, {}, YELLOW, "waits for the slowest"),
        ([SLICE], EIGHT, 13, {}, GREEN, "a slice of a GPU"),
    ],
)
def test_devices_are_compared_with_driver(monkeypatch, kinds, driver, cuda, environment, status, words):
    local = [SimpleNamespace(platform="cpu" if kind == "cpu" else "gpu", device_kind=kind) for kind in kinds]
    monkeypatch.setattr(devices.jax, "local_devices", lambda: local)
    monkeypatch.setattr(devices, "read_driver", lambda: driver)
    monkeypatch.setattr(devices.packages, "cuda_build", lambda: cuda)
    finding = check_devices(MachineInfo(environment=environment))
    assert finding.status == status
    assert words in finding.message


@pytest.mark.parametrize(
    ("limit", "environment", "status"),
    [
        (72, {}, GREEN),
        (60, {}, YELLOW),
        (72, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, YELLOW),
        (0, {}, FIGURE),
    ],
)
def test_share_of_memory_is_judged(monkeypatch, limit, environment, status):
    device = SimpleNamespace(platform="gpu", device_kind=H100, memory_stats=lambda: {"bytes_limit": limit * GIB})
    monkeypatch.setattr(devices.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(devices, "read_driver", lambda: EIGHT)
    assert devices.check_device_memory(MachineInfo(environment=environment)).status == status


@pytest.mark.parametrize(
    ("check", "rate", "peak", "status", "words"),
    [
        ("matmul", 720e12, 989e12, GREEN, "73% of the 989 TFLOP/s of the data sheet"),
        ("matmul", 300e12, 989e12, YELLOW, "slow"),
        ("matmul", 1200e12, 989e12, YELLOW, "impossible"),
        ("matmul", 300e12, 0.0, FIGURE, "no data sheet"),
        ("copy", 1500e9, 3352e9, YELLOW, "45% of the 3,352 GB/s of the data sheet"),
        ("all-reduce", 360e9, 450e9, GREEN, "360 GB/s"),
        ("all-reduce", 20e9, 450e9, YELLOW, "slow"),
    ],
)
def test_rate_is_judged_by_data_sheet(check, rate, peak, status, words):
    finding = judge(check, rate, peak, "here")
    assert finding.status == status
    assert words in finding.message


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_slowest_device_is_judged(monkeypatch):
    first, second, *_ = jax.local_devices()
    seconds = {first.id: 1e-3, second.id: 2e-3}
    monkeypatch.setattr(devices, "devices_to_check", lambda: [first, second])
    monkeypatch.setattr(devices, "time_step", lambda step, x: seconds[x.device.id])
    finding = check_matmul(MachineInfo())
    assert f"on {devices.device_name(second)} (no data sheet" in finding.message
    assert finding.figures["rate"] == 2 * 1024**3 / 2e-3


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_wrong_sum_is_red(monkeypatch):
    monkeypatch.setattr(devices, "REPEATS", 1)
    monkeypatch.setattr(devices, "SIMULATED_COUNT", 2**10)
    finding = check_all_reduce(MachineInfo())
    assert finding.status == FIGURE
    assert ("simulated" in finding.message) == (jax.default_backend() == "cpu")
    right, total = devices.mappings.reduce_from_region, jax.device_count() * (jax.device_count() + 1) // 2
    monkeypatch.setattr(devices.mappings, "reduce_from_region", lambda x: right(x) + 1)
    finding = check_all_reduce(MachineInfo())
    assert finding.status == RED
    assert f"gives {total + 1} to {total + 1}, not {total}" in finding.message
    monkeypatch.setattr(
        devices.mappings, "reduce_from_region", lambda x: right(x).at[0].add(1)
    )  # in a few elements only
    assert check_all_reduce(MachineInfo()).status == RED
