"""Batch sizes by step: ramp-up and schedule against a walk over the samples, one step after the other."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.batch_size import BatchSizes, at_batch, in_units, parse_schedule, parse_tokens, training_samples
from mjax.config import from_dict, to_dict
from mjax.errors import UsageError
from tests.small import small_config
from tests.work import calls_of


def _sizes(global_batch=8, rampup=None, schedule=None) -> BatchSizes:
    return BatchSizes.of(_config(global_batch, rampup, schedule))


def _config(global_batch=8, rampup=None, schedule=None):
    config = small_config()
    train = replace(config.train, global_batch=global_batch, batch_rampup=rampup, batch_schedule=schedule)
    return replace(config, train=train)


def _walk(steps, size_after):
    """Sizes of the first steps, each chosen by the samples before it."""
    samples, sizes = 0, []
    for _ in range(steps):
        sizes.append(size_after(samples))
        samples += sizes[-1]
    return sizes


def _agrees_with(sizes, expected):
    found = [sizes.size(step) for step in range(len(expected))]
    assert found == expected
    assert [sizes.samples_before(step) for step in range(len(expected) + 1)] == [
        sum(expected[:step]) for step in range(len(expected) + 1)
    ]


def test_a_ramp_up_by_hand():
    sizes = _sizes(6, rampup=(2, 2, 8))
    _agrees_with(sizes, [2, 2, 4, 6, 6, 6])
    assert sizes.sizes() == [2, 4, 6]


def test_a_step_larger_than_a_portion_leaves_sizes_out():
    sizes = _sizes(100, rampup=(10, 1, 30))
    assert [sizes.size(step) for step in range(4)] == [10, 40, 100, 100]
    assert sizes.sizes() == [10, 40, 100]


@given(
    start=st.integers(1, 20), increment=st.integers(1, 7), increments=st.integers(1, 12), samples=st.integers(1, 3000)
)
def test_a_ramp_up_is_megatrons_rule_at_every_step(start, increment, increments, samples):
    end = start + increments * increment

    def size_after(n):
        return end if n > samples else start + int(n / (samples / increments)) * increment

    steps = samples // start + 3
    _agrees_with(_sizes(end, rampup=(start, increment, samples)), _walk(min(steps, 400), size_after))


def test_a_quotient_that_a_float_rounds_down_delays_the_change_as_in_megatron():
    assert 29 / (29 / 7) < 7  # after exactly 29 samples the ramp is not over
    _agrees_with(_sizes(15, rampup=(8, 1, 29)), _walk(8, lambda n: 15 if n > 29 else 8 + int(n / (29 / 7))))


def test_a_schedule_counts_tokens():
    # Samples have 16 tokens: 100 tokens lie in the seventh, so the step that begins at or after it is the first.
    sizes = _sizes(8, schedule="0:2 100:4 1K:8")
    expected = _walk(60, lambda n: 2 if n * 16 < 100 else 4 if n * 16 < 1000 else 8)
    assert expected.count(2) == 4
    _agrees_with(sizes, expected)


def test_a_schedule_may_fall_and_come_back():
    sizes = _sizes(2, schedule="0:2 64:8 256:2")
    _agrees_with(sizes, [2, 2, 8, 8, 2, 2])
    assert sizes.sizes() == [2, 8]


def test_units_are_thousands_to_trillions_of_tokens():
    assert parse_schedule("0:768 250B:1536") == [(0, 768), (250_000_000_000, 1536)]
    assert parse_schedule(" 0:1  1.5K:2 2M:3 0.3T:4") == [(0, 1), (1500, 2), (2 * 10**6, 3), (3 * 10**11, 4)]


@pytest.mark.parametrize(
    "schedule",
    ["", "8", "0:8 16", "10:8", "0:8 5:4 5:2", "0:8 5:4 3:2", "0:0", "0:8,5:4", "0:8 1Q:16", "0:-8", "0:1.5"],
)
def test_a_schedule_of_another_form_is_refused(schedule):
    with pytest.raises(UsageError, match="is not a list of TOKENS:BATCH with ascending tokens from 0 on"):
        parse_schedule(schedule)


def test_without_either_the_size_is_constant_and_a_schedule_of_one_entry_is_the_same():
    assert _sizes() == _sizes(schedule="0:8") == BatchSizes.constant(8)
    assert BatchSizes.constant(8).samples_before(10**9) == 8 * 10**9


def test_the_size_of_any_of_a_million_steps_takes_a_few_calls():
    sizes = _sizes(3072, rampup=(32, 32, 10**9))
    assert sum(sizes.size(step) for step in range(10**6)) == sizes.samples_before(10**6)
    assert len(sizes.pieces) > 90
    assert max(calls_of(sizes.size, step)[0] for step in (0, 10**3, 10**6)) < 20


def test_training_samples_are_the_exact_sum():
    config = _config(6, rampup=(2, 2, 8))
    config = replace(config, train=replace(config.train, steps=5))
    assert training_samples(config) == 2 + 2 + 4 + 6 + 6


def test_a_ramp_up_survives_json():
    config = _config(6, rampup=(2, 2, 8))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    values = to_dict(config)
    values["train"]["batch_rampup"] = [2, 2]
    with pytest.raises(UsageError, match=r"batch_rampup is \[2, 2\], which is not \[a whole number, a whole number"):
        from_dict(values)


def test_at_batch_is_the_same_run_at_a_constant_size():
    config = _config(6, rampup=(2, 2, 8))
    assert at_batch(config, 4) == _config(4)
    assert at_batch(_config(8), 8) == _config(8)


# --- Tokens in place of steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [_sizes(), _sizes(8, rampup=(2, 2, 12)), _sizes(8, schedule="0:2 100:4 9K:8")], ids=["one", "up", "list"]
)
def test_steps_for_samples_are_the_fewest_that_have_them(sizes):
    for samples in range(1, 90):
        steps = sizes.steps_for(samples)
        assert sizes.samples_before(steps - 1) < samples <= sizes.samples_before(steps)


@pytest.mark.parametrize(
    ("written", "tokens"), [("300B", 300 * 10**9), ("1.5T", 15 * 10**11), ("20.5K", 20_500), ("7", 7), ("0.1M", 10**5)]
)
def test_tokens_are_read_exactly(written, tokens):
    assert parse_tokens(written) == tokens


@pytest.mark.parametrize("written", ["", "300 B", "300b", "1e9", "-1B", "B", "1,000", "300GB"])
def test_another_form_is_not_tokens(written):
    assert parse_tokens(written) is None


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(0, "0"), (999, "999"), (1_310_720, "1.31M"), (999_960_000, "1B"), (999_400, "999K"), (1_680 * 10**12, "1,680T")],
)
def test_a_number_of_tokens_is_said_in_units_without_an_exponent(tokens, said):
    assert in_units(tokens) == said
