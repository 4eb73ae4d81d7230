"""The health of a run from its losses alone: nothing is compiled."""

import json
import math
import random
from dataclasses import replace

import pytest

from mjax.config import HealthConfig
from mjax.training.guard import Guard
from mjax.training.health import HEALTHY, SPIKE, Health
from mjax.training.metrics import Record
from tests.small import small_config

CONFIG = HealthConfig(window=8, skipped_in_a_row=4, good_after=3)


def losses(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [4.0 - 0.01 * step + draw.gauss(0, 0.05) for step in range(count)]


def observed(values, config=CONFIG, health=None):
    """Verdicts on losses; None is a skipped step."""
    health = health or Health(config)
    return health, [health.observe(health.step + 1, loss, skipped=loss is None) for loss in values]


def record(step, loss=4.0, **changes):
    numbers = dict.fromkeys(["grad_norm", "learning_rate", "seconds", "tokens_per_second", "tflops"], 1.0)
    values = {"loss_scale": 1.0, "skipped": changes.get("nonfinite") is not None, "tokens": 1, "mfu": None}
    return Record(step=step, loss=loss, **numbers, **values | changes)


def test_a_loss_far_above_its_mean_is_a_spike_and_does_not_move_the_mean():
    health, verdicts = observed(losses(20))
    assert set(verdicts) == {HEALTHY}
    limit = health.limit(21)
    assert 4.0 < limit < 4.5
    _, verdicts = observed([limit + 0.01, 1e30, 3.8], health=health)
    assert verdicts == [SPIKE, SPIKE, HEALTHY]
    assert health.limit(24) < 4.5


def test_the_first_losses_know_no_deviation_and_a_loss_of_ten_times_their_mean_is_a_spike():
    config = replace(CONFIG, window=100)
    assert observed([4.0, 4.0, 39.0], config)[1] == [HEALTHY] * 3
    assert observed([4.0, 4.0, 41.0], config)[1] == [HEALTHY, HEALTHY, SPIKE]
    assert observed([1e30], config)[1] == [HEALTHY]  # nothing to compare with


def test_without_deviations_nothing_is_a_spike():
    assert set(observed([4.0] * 20 + [1e30], replace(CONFIG, spike_deviations=0.0))[1]) == {HEALTHY}


def test_the_limit_of_a_step_knows_the_losses_up_to_two_steps_before_it():
    values = losses(30)
    early, late = Health(CONFIG), Health(CONFIG)
    for step, loss in enumerate(values, start=1):
        ahead = early.limit(step + 1) if step > 1 else math.inf  # asked for before step's own loss is known
        early.observe(step, loss)
        late.observe(step, loss)
        assert late.limit(step + 1) == ahead


def test_health_goes_through_json_bit_for_bit():
    values = [*losses(12), None, 9.0, *losses(5, seed=1), None]
    for cut in range(len(values)):
        before, _ = observed(values[:cut])
        after = Health(CONFIG, cut, json.loads(json.dumps(before.as_dict(), allow_nan=False)))
        rest = values[cut:] + losses(3, seed=2)
        assert observed(rest, health=after)[1] == observed(rest, health=before)[1]
        assert after.as_dict() == before.as_dict()


def test_skipped_steps_in_a_row_and_their_share_end_a_run():
    health, _ = observed([4.0] * 10 + [None] * 3)
    assert health.problem() is None
    health.observe(14, None, skipped=True)
    assert health.problem() == "4 steps in a row were skipped"
    health, _ = observed([None, 4.0, None, None, 4.0, None, 4.0])
    assert health.problem() is None
    assert health.problem(ended=True) == "4 of the last 7 steps were skipped or had a loss far above its running mean"
    health.observe(8, None, skipped=True)
    assert health.problem().startswith("5 of the last 8 steps")


def test_a_loss_that_stays_far_from_its_mean_ends_a_run():
    health, verdicts = observed([*losses(20), *[8.0] * 5])
    assert verdicts[20:] == [SPIKE] * 5
    assert health.problem().startswith("5 of the last 8 steps")


def test_the_state_is_suspect_after_an_unhealthy_step_and_while_most_are():
    health, _ = observed([4.0] * 5)
    assert not health.suspect
    health.observe(6, None, skipped=True)
    assert health.suspect
    health.observe(7, 4.0)
    assert not health.suspect
    _, _ = observed([None, None, 4.0], health=health)
    assert health.suspect  # two of the last three
    health.observe(11, 4.0)
    assert not health.suspect


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e30])
def test_an_evaluation_of_poisoned_weights_makes_the_state_suspect(loss):
    health, _ = observed([4.0] * 5)
    assert health.observe_validation(5.0)
    assert not health.suspect
    assert not health.observe_validation(loss)
    assert health.suspect


# --- What a run makes of it, without checkpoints ----------------------------------------------------------------------


def guard_of(compute="fp32", **health):
    config = small_config(compute=compute)
    return Guard(replace(config, health=replace(CONFIG, **health)), None, print)


def test_the_first_steps_of_fp16_look_for_the_loss_scale_and_are_not_unhealthy():
    guard = guard_of("fp16")
    for step in range(1, 33):
        text = guard.observe(record(step, None, loss_scale=2.0 ** (33 - step), nonfinite="gradients are not finite"))
        assert text == f"skipped at loss scale {2.0 ** (33 - step):g}: gradients are not finite"
    assert (guard.health.problem(ended=True), guard.health.suspect) == (None, False)
    for step in range(33, 37):  # the scale cannot fall any more
        guard.observe(record(step, None, loss_scale=1.0, nonfinite="gradients are not finite"))
    assert guard.health.problem() == "4 steps in a row were skipped"


def test_a_skip_in_bf16_is_unhealthy_at_any_scale():
    guard = guard_of("bf16")
    guard.observe(record(1, None, loss_scale=2.0**20, nonfinite="…"))
    assert guard.health.suspect


def test_a_spike_is_announced_in_one_line():
    guard = guard_of()
    for step in range(1, 11):
        assert guard.observe(record(step, 4.0)) is None
    assert guard.limit(11) is None
    text = guard.observe(record(11, 9.0))
    assert text == "loss spike: 9.0000 is 125.0 standard deviations above its running mean 4.0000 (limit 4.2400)"


def test_skip_gives_the_compiled_step_the_limit_of_its_loss():
    guard = guard_of(spike="skip")
    limits = []
    for step in range(1, 11):
        limits.append(guard.limit(step))
        guard.observe(record(step, 4.0))
    assert limits[:2] == [math.inf, math.inf]
    assert limits[2] == 40.0 or limits[2] == pytest.approx(4.24)
    assert limits[9] == pytest.approx(4.24)
    assert guard.observe(record(11, 9.0, skipped=True)).endswith("(limit 4.2400); its update was dropped")
