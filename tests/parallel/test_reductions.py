"""Sums over rows and over micro-batches: in float32, whatever the compute dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.parallel.reductions import add_bias, lookup, tile_rows

ROWS = 8192
IDS = jnp.asarray(np.random.default_rng(1).permutation(np.r_[np.zeros(4000, int), 1 + np.arange(ROWS - 4000) % 60]))


def rows_of_bias(bias):
    return add_bias(jnp.zeros((ROWS, 16), jnp.bfloat16), bias)


def rows_of_table(table):
    return lookup(table, IDS)


def rows_of_positions(positions):
    return tile_rows(positions, ROWS // 16)


def summed_by_id(gradient):
    total = np.zeros((64, 16))
    np.add.at(total, IDS, gradient)
    return total


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (rows_of_bias, (16,), lambda gradient: gradient.sum(0)),
        (rows_of_table, (64, 16), summed_by_id),
        (rows_of_positions, (16, 16), lambda gradient: gradient.reshape(-1, 16, 16).sum(0)),
    ],
)
def test_bf16_gradient_is_float32_sum_over_8192_tokens(function, shape, expected, mean):
    """Terms with mean 1 add up, like the gradients of common tokens."""
    gradient = jnp.asarray(np.random.default_rng(0).normal(mean, 1.0, (ROWS, 16)), jnp.bfloat16)
    weight = jnp.zeros(shape, jnp.bfloat16)
    found = jax.jit(lambda weight, gradient: jax.vjp(function, weight)[1](gradient)[0])(weight, gradient)
    assert found.dtype == jnp.bfloat16
    expected = expected(np.float64(gradient))
    for ours, exact in ((found, expected), (found[0], expected[0])):  # of a table, the row that is used 4,000 times
        assert np.linalg.norm(np.float64(ours) - exact) < 2e-3 * np.linalg.norm(exact)
