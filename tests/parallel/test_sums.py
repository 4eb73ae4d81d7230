"""Sums over rows and over micro-batches: in float32, whatever the compute dtype."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.parallel.sums import add_bias, lookup, tile_rows
from tests.products import one_in
from tests.small import BLOOM, small_config
from tests.traced import carried, equations, traced_step

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


def sums_in_16_bits(jaxpr):
    """Reductions and scatters whose result has 16 bits. Sums over devices are not among them."""
    for equation in equations(jaxpr):
        name = equation.primitive.name
        if name in ("reduce_sum", "cumsum") or name.startswith("scatter"):
            yield from (f"{name} → {out.aval}" for out in equation.outvars if out.aval.dtype.itemsize == 2)


def carried_in_16_bits(program, jaxpr):
    """Return 16-bit carries of loops in the shape of the matrices of layers: sums over micro-batches."""
    leaves = jax.tree.leaves(program.abstract_state.model)
    matrices = {leaf.sharding.shard_shape(leaf.shape) for leaf in leaves if leaf.ndim > 2}
    for loop in equations(jaxpr, "scan"):
        yield from (str(x) for x in carried(loop) if x.dtype.itemsize == 2 and x.shape in matrices)


SPLIT = {"data": 2, "model": 2, "mesh": {"sequence_parallel": True}}


@pytest.mark.parametrize(
    "changes",
    one_in(
        3,
        [
            {"unroll": "on"},
            {"recompute": "selective", **SPLIT},
            {"compute": "fp16"},
            {"mesh": {"pipe": 2}},
            {"data": 2, "mesh": {"zero": 3}},
            {"samples": {"reset_positions": True, "reset_attention": True, "eod": 0}},
            BLOOM,
            {"kind": "bert"},
            {"kind": "bert", "layernorm": "post", **SPLIT},
            {"kind": "bert", "head": "span"},
            {"kind": "bert", "head": "multiple_choice", "answers": 4},
        ],
    ),
    ids=str,
)
def test_step_sums_nothing_in_16_bits(changes):
    program, jaxpr = traced_step(small_config(**{"compute": "bf16", **changes}))
    assert not Counter(sums_in_16_bits(jaxpr))
    assert not Counter(carried_in_16_bits(program, jaxpr))
