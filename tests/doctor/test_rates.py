"""Rates: what is slow beside a data sheet, what has none, and sums that are wrong."""

import jax
import pytest

from mjax.doctor import FIGURE, GREEN, RED, YELLOW, devices
from mjax.doctor.devices import called, check_all_reduce, check_matmul, judge_all_reduce, judge_copy, judge_matmul

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("tflops", "status", "words"),
    [
        (720, GREEN, "73% of the 989 TFLOP/s of NVIDIA H100 80GB HBM3"),
        (300, YELLOW, "slow"),
        (1200, YELLOW, "impossible"),
    ],
)
def test_product_is_judged_by_own_peak(tflops, status, words):
    (finding,) = judge_matmul(tflops * 1e12, "bf16", 8192, H100)
    assert finding.status == status
    assert words in finding.found


def test_slow_memory_and_links_are_yellow():
    assert judge_copy(2900e9, H100, (20e9, 15e9))[0].status == GREEN
    (finding,) = judge_copy(1500e9, H100)
    assert finding.status == YELLOW
    assert "45% of the 3,352 GB/s" in finding.found
    for rate, status in ((360e9, GREEN), (20e9, YELLOW)):
        assert judge_all_reduce(rate, 8, H100, simulated=False)[0].status == status


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_slowest_of_each_kind_is_judged(monkeypatch):
    first, second, *_ = jax.local_devices()
    seconds = {first.id: 1e-3, second.id: 2e-3}
    monkeypatch.setattr(devices, "by_kind", lambda: {H100: [first, second], "NVIDIA Z9": [first]})
    monkeypatch.setattr(devices, "seconds_of", lambda step, x: seconds[x.device.id])
    of_two, alone = check_matmul()
    assert f"on {called(second)}, the slowest of 2, " in of_two.found
    assert of_two.figures["matmul_tflops"] == alone.figures["matmul_tflops"] / 2
    assert alone.found.endswith("no data sheet for NVIDIA Z9")


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_wrong_sum_is_red(monkeypatch):
    monkeypatch.setattr(devices, "MEASURED_SECONDS", 0.01)
    monkeypatch.setattr(devices, "SIMULATED_COUNT", 2**10)
    (finding,) = check_all_reduce()
    assert finding.status == FIGURE
    assert ("simulated" in finding.found) == (jax.default_backend() == "cpu")

    right = devices.mappings.leave
    monkeypatch.setattr(devices.mappings, "leave", lambda x: right(x) + 1)
    (finding,) = check_all_reduce()
    assert finding.status == RED
    total = jax.device_count() * (jax.device_count() + 1) // 2
    assert f"is {total + 1} to {total + 1}, not {total}" in finding.found
    # In a few places only.
    monkeypatch.setattr(devices.mappings, "leave", lambda x: right(x).at[0].add(1))
    assert check_all_reduce()[0].status == RED
