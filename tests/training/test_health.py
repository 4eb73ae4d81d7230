"""The health of a run from its losses alone: nothing is compiled."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mjax.config import HealthConfig
from mjax.run import health as health_module
from mjax.run.health import HEALTHY, SPIKE, Guard, Health
from tests.small import small_config
from tests.training.test_metrics import record

CONFIG = HealthConfig()


@pytest.fixture(autouse=True)
def short_window(monkeypatch):
    monkeypatch.setattr(health_module, "WINDOW", 8)
    monkeypatch.setattr(health_module, "MAX_SKIPPED_STEPS", 4)


def losses(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [4.0 - 0.01 * step + draw.gauss(0, 0.05) for step in range(count)]


def observed(values, config=CONFIG, health=None):
    """Verdicts on losses; None is a skipped step."""
    health = health or Health(config)
    return health, [health.observe(health.step + 1, loss, skipped=loss is None) for loss in values]


def test_spike_is_far_above_the_mean_and_does_not_move_it():
    health, verdicts = observed(losses(20))
    assert set(verdicts) == {HEALTHY}
    limit = health.limit(21)
    assert 4.0 < limit < 4.5
    assert observed([limit + 0.01, 1e30, 3.8], health=health)[1] == [SPIKE, SPIKE, HEALTHY]
    assert health.limit(24) < 4.5


@pytest.mark.parametrize(
    ("values", "window", "spike", "last"),
    [
        ([4.0, 4.0, 39.0], 100, "warn", HEALTHY),  # the first losses have no deviation
        ([4.0, 4.0, 41.0], 100, "warn", SPIKE),
        ([1e30], 8, "warn", HEALTHY),  # nothing to compare with
        ([4.0] * 20 + [1e30], 8, "ignore", HEALTHY),
    ],
)
def test_spike_needs_something_to_compare_with(values, window, spike, last, monkeypatch):
    monkeypatch.setattr(health_module, "WINDOW", window)
    _, verdicts = observed(values, HealthConfig(spike=spike))
    assert verdicts == [HEALTHY] * (len(values) - 1) + [last]


def test_limit_knows_losses_up_to_two_steps_before():
    early, late = Health(CONFIG), Health(CONFIG)
    for step, loss in enumerate(losses(30), start=1):
        ahead = early.limit(step + 1) if step > 1 else math.inf  # asked for before step's own loss is known
        early.observe(step, loss)
        late.observe(step, loss)
        assert late.limit(step + 1) == ahead


def test_health_goes_through_json_bit_for_bit():
    values = [*losses(12), None, 9.0, *losses(5, seed=1), None]
    for cut in range(len(values)):
        before, _ = observed(values[:cut])
        after = Health(CONFIG, cut, json.loads(json.dumps(before.as_dict(), allow_nan=False)))
        assert after.as_dict() == before.as_dict()
        rest = values[cut:] + losses(3, seed=2)
        assert observed(rest, health=after)[1] == observed(rest, health=before)[1]
        assert after.as_dict() == before.as_dict()


@pytest.mark.parametrize(
    ("values", "suspect", "problem"),
    [
        ([4.0] * 5 + [None], True, ""),
        ([4.0] * 5 + [None, 4.0], False, ""),
        ([None, None, 4.0], True, ""),  # two of the last three
        ([None, None, 4.0, 4.0], False, ""),
        ([4.0] * 10 + [None] * 4, True, "4 steps in a row were skipped"),
        ([*losses(20), *[8.0] * 5], True, "5 of the last 8 steps"),
    ],
)
def test_unhealthy_steps_make_suspect_and_end_a_run(values, suspect, problem):
    health, _ = observed(values)
    assert health.suspect == suspect
    assert (health.problem() or "")[: len(problem) or None] == problem


def test_short_run_ends_unhealthy_only_at_its_end():
    health, _ = observed([None, 4.0, None, None, 4.0, None, 4.0])
    assert health.problem() is None
    assert health.problem(ended=True).startswith("4 of the last 7 steps were skipped or had a loss far above")


def test_evaluation_of_poisoned_weights_is_suspect():
    for loss in (math.nan, 1e30):
        health, _ = observed([4.0] * 5)
        assert (health.observe_validation(5.0), health.suspect) == (True, False)
        assert (health.observe_validation(loss), health.suspect) == (False, True)


# --- What a run makes of it, without checkpoints ----------------------------------------------------------------------


def guard_of(compute="fp32", **health):
    config = small_config(compute=compute)
    checkpoints = SimpleNamespace(folder=Path("checkpoints"), steps=list, good=lambda: None)
    return Guard(replace(config, health=replace(CONFIG, **health)), checkpoints, print)


def test_guard_lets_fp16_look_for_its_scale():
    def skip(guard, step, scale, grad_norm=None):
        values = {"loss": None, "skipped": True, "nonfinite": "not finite"}
        return guard.observe(record(step, loss_scale=scale, grad_norm=grad_norm, **values))

    guard = guard_of("fp16")
    for step in range(1, 33):
        scale = 2.0 ** (33 - step)
        assert skip(guard, step, scale) == f"skipped at loss scale {scale:g}: not finite"
    assert (guard.health.problem(ended=True), guard.health.suspect) == (None, False)
    for step in range(33, 37):  # the scale cannot fall any more
        skip(guard, step, 1.0)
    assert guard.health.problem() == "4 steps in a row were skipped"
    for guard, grad_norm in ((guard_of("bf16"), None), (guard_of("fp16"), 1.0)):  # no scale, or one that stays
        for step in range(1, 5):
            skip(guard, step, 2.0**20, grad_norm)
        assert guard.health.suspect
        assert guard.health.problem() == "4 steps in a row were skipped"


@pytest.mark.parametrize("spike", ["warn", "skip"])
def test_guard_warns_of_a_spike_and_limits_the_loss(spike):
    guard, limits = guard_of(spike=spike), []
    for step in range(1, 11):
        limits.append(guard.limit(step))
        assert guard.observe(record(step, loss=4.0)) is None
    assert (limits[0], limits[9]) == ((math.inf, pytest.approx(4.24)) if spike == "skip" else (None, None))
    text = guard.observe(record(11, loss=9.0, skipped=spike == "skip"))
    assert text.startswith("loss spike: 9.0000 is 125.0 standard deviations above its running mean 4.0000 (limit 4.24")
    assert text.endswith("; its update was dropped") == (spike == "skip")
