"""Rates: what is slow beside a data sheet, what has none, and sums that are wrong."""

import jax
import jax.numpy as jnp
import pytest

from mjax.doctor import rates
from mjax.doctor.finding import FIGURE, GREEN, RED, YELLOW
from mjax.doctor.rates import check_all_reduce, check_copy, check_matmul, judge_matmul

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("tflops", "kind", "status", "words"),
    [
        (720, H100, GREEN, "73% of NVIDIA H100 80GB HBM3's 989"),
        (300, H100, YELLOW, "slow"),
        (1200, H100, YELLOW, "that cannot be"),
        (300, "NVIDIA Z9", FIGURE, "no peak of bf16 is known for NVIDIA Z9"),
    ],
)
def test_a_product_is_judged_by_the_devices_own_peak_or_not_at_all(tflops, kind, status, words):
    (finding,) = judge_matmul(tflops, "bf16", 8192, kind)
    assert finding.status == status
    assert words in finding.found


def test_a_step_is_timed_by_itself_and_not_with_its_compilation():
    @jax.jit
    def step(x):
        return x @ x / 512

    seconds = rates.seconds_of(step, jnp.ones((512, 512)), budget=0.05)
    assert 1e-6 < seconds < 0.1


@pytest.mark.skipif(jax.device_count() < 2, reason="one device")
def test_devices_that_add_up_wrongly_are_red(monkeypatch):
    monkeypatch.setattr(rates, "MEASURED_SECONDS", 0.01)
    monkeypatch.setattr(rates, "SIMULATED_COUNT", 2**10)
    (finding,) = check_all_reduce()
    assert finding.status == FIGURE
    assert ("simulated" in finding.found) == (jax.default_backend() == "cpu")

    right = rates.mappings.leave
    monkeypatch.setattr(rates.mappings, "leave", lambda x: right(x) + 1)
    (finding,) = check_all_reduce()
    assert finding.status == RED
    total = jax.device_count() * (jax.device_count() + 1) // 2
    assert f"is {total + 1} to {total + 1} where it is {total}" in finding.found


@pytest.mark.gpu
def test_on_a_gpu_a_product_runs_at_a_rate_that_its_peak_allows():
    (product,), (copy,) = check_matmul(), check_copy()
    assert 1 < product.figures["matmul_tflops"] < 1.05 * product.figures.get("peak_tflops", 1e9)
    assert copy.figures["to_device_gb_per_s"] < copy.figures["memory_gb_per_s"]
