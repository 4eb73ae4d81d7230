"""Dropout masks: the same on every mesh, and as random as a random-number generator's."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.parallel.random import DropoutKey, dropout, keep_mask

RATE = 0.1


@partial(jax.jit, static_argnames=("seed", "samples", "rows", "rate"))
def kept(seed=1, step=0, layer=1, site=2, samples=16, rows=64, rate=RATE):
    key = DropoutKey.make(seed, jnp.int32(step), jnp.arange(samples)).fold_in(layer).fold_in(site)
    return keep_mask(rate, key.row_words(jnp.arange(rows)), 256)


def mask(**changes):
    return np.asarray(kept(**changes))


def spread(counts, size, rate=RATE):
    """Return by how many standard deviations each number of kept elements of `size` is off."""
    return (counts - size * (1 - rate)) / np.sqrt(size * rate * (1 - rate))


def correlation(a, b):
    """Correlation of two masks, in standard deviations."""
    a, b = a - (1 - RATE), b - (1 - RATE)
    return abs((a * b).mean() / (RATE * (1 - RATE))) * np.sqrt(a.size)


def test_share_of_dropped_elements_is_rate():
    for rate in (0.01, 0.1, 0.5, 0.9):
        found = mask(rate=rate)
        assert abs(spread(found.sum(), found.size, rate)) < 4
    for axes in ((0, 1), (1, 2), (0, 2)):  # of every column, sample and row
        counts = mask().sum(axes)
        off = spread(counts, mask().size // counts.size)
        assert np.abs(off).max() < 5
        assert 0.7 < off.std() < 1.3  # as spread as independent draws, neither wilder nor tamer


def test_neighbors_are_uncorrelated():
    found = mask()
    for axis, lag in product((0, 1, 2), (1, 2, 3, 8)):
        later = np.take(found, range(lag, found.shape[axis]), axis)
        assert correlation(np.take(found, range(found.shape[axis] - lag), axis), later) < 4.5


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 1}, {"layer": 2}, {"site": 3}], ids=str)
def test_masks_are_unrelated_when_one_input_differs(change):
    assert correlation(mask(), mask(**change)) < 4.5


def test_no_row_is_shifted_copy_of_another():
    rows = mask(samples=8, rate=0.5).reshape(512, 256)
    prefixes = {rows[i, start : start + 64].tobytes() for i in range(512) for start in range(64)}
    assert len(prefixes) == 512 * 64


def test_every_bit_of_seed_and_step_counts():
    """Each changes half of a mask of rate 0.5."""
    base = mask(samples=4, rate=0.5)
    for bit in range(0, 32, 5):
        for change in ({"seed": 1 ^ (1 << bit)}, {"step": 1 << min(bit, 30)}):
            changed = (mask(samples=4, rate=0.5, **change) != base).mean()
            assert abs(changed - 0.5) < 0.01


def test_masks_are_those_of_global_indices():
    """Masks follow the samples, rows and columns of a device: also blocks of columns, as `xla_blocks` draws them."""
    key = DropoutKey.make(1, jnp.int32(0), jnp.arange(8))
    x = jnp.ones((8, 16, 32))
    whole = jax.jit(lambda: dropout(x, 0.5, key, jnp.arange(16)))()
    part = DropoutKey.make(1, jnp.int32(0), jnp.arange(4, 8))
    found = jax.jit(lambda: dropout(x[4:, 3:, 9:], 0.5, part, jnp.arange(3, 16), first_column=9))()
    np.testing.assert_array_equal(found, whole[4:, 3:, 9:])


def test_dropout_keeps_mean_in_bf16():
    key = DropoutKey.make(1, jnp.int32(0), jnp.arange(64))
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (64, 64, 256)), jnp.bfloat16)
    found = np.asarray(dropout(x, RATE, key, jnp.arange(64)), np.float32)
    factors = found[found > 0] / np.asarray(x, np.float32)[found > 0]
    assert factors.mean() == pytest.approx(1 / (1 - RATE), rel=3e-4)  # 1 / 0.9 as a bf16 is off by five times that
