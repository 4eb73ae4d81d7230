"""Dropout masks: the same everywhere, and as good as those of a random-number generator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.parallel.random import DropoutKey, dropout, keep_mask

RATE = 0.1


def _mask(seed=1, step=0, layer=1, site=2, samples=16, rows=64, columns=256, rate=RATE):
    key = DropoutKey.of(seed, jnp.int32(step), jnp.arange(samples)).fold(layer).fold(site)
    return np.asarray(keep_mask(rate, key.rows(jnp.arange(rows)), columns))


def _z(kept, rate=RATE):
    """How many standard deviations the number of kept elements is from its expectation."""
    n = kept.size
    return (kept.sum() - n * (1 - rate)) / np.sqrt(n * rate * (1 - rate))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_kept_elements_is_the_rate(rate):
    assert abs(_z(_mask(rate=rate), rate)) < 4


def test_every_row_and_every_column_has_its_share():
    mask = _mask()
    for axis in ((0, 1), (1, 2), (0, 2)):
        counts = mask.sum(axis)
        n = mask.size // counts.size
        z = (counts - n * (1 - RATE)) / np.sqrt(n * RATE * (1 - RATE))
        assert np.abs(z).max() < 5
        assert 0.7 < z.std() < 1.3  # as spread as independent draws, neither wilder nor tamer


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 3, 8])
def test_neighbours_are_uncorrelated(axis, lag):
    mask = _mask()
    a = np.take(mask, range(mask.shape[axis] - lag), axis) - (1 - RATE)
    b = np.take(mask, range(lag, mask.shape[axis]), axis) - (1 - RATE)
    correlation = (a * b).mean() / (RATE * (1 - RATE))
    assert abs(correlation) * np.sqrt(a.size) < 4.5


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 1}, {"layer": 2}, {"site": 3}])
def test_another_seed_step_layer_or_site_has_an_unrelated_mask(change):
    a, b = _mask() - (1 - RATE), _mask(**change) - (1 - RATE)
    assert abs((a * b).mean() / (RATE * (1 - RATE))) * np.sqrt(a.size) < 4.5


def test_no_row_is_a_shifted_copy_of_another():
    rows = _mask(samples=8, rows=64, rate=0.5).reshape(512, 256)
    prefixes = {rows[i, start : start + 64].tobytes() for i in range(512) for start in range(64)}
    assert len(prefixes) == 512 * 64


@pytest.mark.parametrize("bit", range(0, 32, 5))
def test_every_bit_of_seed_and_step_changes_half_of_a_fair_mask(bit):
    base = _mask(samples=4, rate=0.5)
    for change in ({"seed": 1 ^ (1 << bit)}, {"step": 1 << min(bit, 30)}):
        changed = (_mask(samples=4, rate=0.5, **change) != base).mean()
        assert abs(changed - 0.5) < 0.01


def test_masks_do_not_depend_on_how_samples_are_dealt_out():
    whole = _mask(samples=8)
    key = DropoutKey.of(1, jnp.int32(0), jnp.arange(4, 8)).fold(1).fold(2)
    np.testing.assert_array_equal(np.asarray(keep_mask(RATE, key.rows(jnp.arange(64)), 256)), whole[4:])


def test_the_mean_is_kept_in_bf16_too():
    key = DropoutKey.of(1, jnp.int32(0), jnp.arange(64))
    x = dropout(jnp.ones((64, 64, 256), jnp.bfloat16), RATE, key, jnp.arange(64))
    assert float(x.astype(jnp.float32).mean()) == pytest.approx(1.0, abs=3e-3)


def test_the_gradient_passes_where_the_value_did():
    key = DropoutKey.of(1, jnp.int32(0), jnp.arange(2))
    x = jnp.full((2, 4, 8), 3.0)
    y, pullback = jax.vjp(lambda x: dropout(x, 0.5, key, jnp.arange(4)), x)
    (gradient,) = pullback(jnp.ones_like(y))
    np.testing.assert_array_equal(np.asarray(gradient), np.asarray(y) / 3.0)
    assert 0.2 < (np.asarray(y) == 0).mean() < 0.8


def test_without_a_key_or_a_rate_nothing_happens():
    x = jnp.ones((2, 4, 8))
    assert dropout(x, 0.5, None, jnp.arange(4)) is x
    assert dropout(x, 0.0, DropoutKey.of(1, jnp.int32(0), jnp.arange(2)), jnp.arange(4)) is x
