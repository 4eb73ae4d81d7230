"""Batch sizes by step: the ramp-up against a walk over the samples, one step after the other."""

import random
from dataclasses import replace

import pytest

from mjax.config.batch_size import BatchSizes, format_tokens, parse_tokens, training_samples, with_batch_size
from tests.small import small_config


def _config(global_batch=8, rampup=None):
    config = small_config()
    return replace(config, train=replace(config.train, global_batch=global_batch, batch_rampup=rampup))


def _sizes(*arguments, **changes) -> BatchSizes:
    return BatchSizes.from_config(_config(*arguments, **changes))


def _assert_sizes(sizes, expected):
    assert [sizes.size(step) for step in range(len(expected))] == expected
    assert [sizes.samples_before(step) for step in range(len(expected) + 1)] == [
        sum(expected[:step]) for step in range(len(expected) + 1)
    ]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ((6, (2, 2, 8)), [2, 2, 4, 6, 6, 6]),
        ((100, (10, 1, 30)), [10, 40, 100, 100]),  # a step larger than a portion leaves sizes out
        ((8, None), [8] * 5),
    ],
)
def test_batch_sizes_by_hand(config, expected):
    sizes, train = _sizes(*config), _config(*config).train
    _assert_sizes(sizes, expected)
    assert sizes.sizes() == list(dict.fromkeys(expected))
    assert training_samples(replace(_config(*config), train=replace(train, steps=len(expected)))) == sum(expected)
    assert sizes.size(10**12) == expected[-1]  # not by a walk


def _rampups():
    """A quotient that a float rounds down: after exactly 18 samples the ramp is not over. And random ones."""
    draw = random.Random(0)
    yield 6, 3, 7, 18
    for _ in range(60):
        yield draw.randint(1, 20), draw.randint(1, 7), draw.randint(1, 12), draw.randint(1, 3000)


@pytest.mark.parametrize(("start", "increment", "increments", "samples"), list(_rampups()))
def test_rampup_is_megatrons_rule_at_every_step(start, increment, increments, samples):
    end, expected = start + increments * increment, []
    for _ in range(min(samples // start + 3, 400)):
        before = sum(expected)
        expected.append(end if before > samples else start + int(before / (samples / increments)) * increment)
    _assert_sizes(_sizes(end, rampup=(start, increment, samples)), expected)


def test_at_batch_is_the_run_at_a_constant_size():
    assert with_batch_size(_config(6, rampup=(2, 2, 8)), 4) == _config(4)


@pytest.mark.parametrize("changes", [{}, {"rampup": (2, 2, 12)}], ids=str)
def test_steps_for_samples_are_the_fewest(changes):
    sizes = _sizes(8, **changes)
    for samples in range(1, 90):
        steps = sizes.steps_for(samples)
        assert sizes.samples_before(steps - 1) < samples <= sizes.samples_before(steps)


@pytest.mark.parametrize(
    ("written", "tokens"),
    [("300B", 300 * 10**9), ("1.5T", 15 * 10**11), ("20.5K", 20_500), ("7", 7), ("0.1M", 10**5), ("", None)]
    + [(other, None) for other in ("300 B", "300b", "1e9", "-1B", "B", "1,000", "300GB")],
)
def test_tokens_are_read_exactly_or_not(written, tokens):
    assert parse_tokens(written) == tokens


def test_tokens_are_shown_in_units():
    shown = {0: "0", 999: "999", 1_310_720: "1.31M", 999_960_000: "1B", 999_400: "999K", 1_680 * 10**12: "1,680T"}
    assert {tokens: format_tokens(tokens) for tokens in shown} == shown
