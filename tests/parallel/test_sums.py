"""Sums over the rows of a micro-batch: in float32, whatever the compute type."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.parallel.sums import add_bias, lookup, tile_rows
from tests.products import one_in
from tests.small import BLOOM, small_config
from tests.traced import traced_step

ROWS = 8192


def gradient_of(function, weight, gradient):
    """In bf16, of `weight`, when `gradient` comes back to what `function` gives."""
    return jax.jit(lambda w, g: jax.vjp(function, w)[1](g)[0])(weight, gradient)


def bf16(shape, mean=1.0):
    """Terms that add up rather than cancel, as the gradients of common tokens do."""
    return jnp.asarray(np.random.default_rng(0).normal(mean, 1.0, shape), jnp.bfloat16)


def off_by(found, expected):
    """Distance of `found` from the float64 sum, relative to its norm."""
    assert found.dtype == jnp.bfloat16
    return np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_gradient_of_a_bias_is_a_float32_sum_over_8192_tokens(mean):
    gradient = bf16((ROWS, 3, 8), mean)
    found = gradient_of(lambda b: add_bias(gradient, b), jnp.zeros((3, 8), jnp.bfloat16), gradient)
    assert off_by(found, np.float64(gradient).sum(0)) < 2e-3


def test_the_gradient_of_a_row_that_is_looked_up_4000_times_is_a_float32_sum():
    ids = np.random.default_rng(1).permutation(np.r_[np.zeros(4000, int), 1 + np.arange(ROWS - 4000) % 60])
    gradient = bf16((ROWS, 16))
    found = gradient_of(lambda table: lookup(table, ids), jnp.zeros((64, 16), jnp.bfloat16), gradient)
    expected = np.zeros((64, 16))
    np.add.at(expected, ids, np.float64(gradient))
    assert off_by(found[0], expected[0]) < 2e-3
    assert off_by(found, expected) < 2e-3
    assert not found[61:].any()


def test_the_gradient_of_positions_is_a_float32_sum_over_sequences():
    gradient = bf16((ROWS, 16))
    found = gradient_of(lambda rows: tile_rows(rows, ROWS // 16), jnp.zeros((16, 16), jnp.bfloat16), gradient)
    assert off_by(found, np.float64(gradient).reshape(-1, 16, 16).sum(0)) < 2e-3


def sums_in_16_bits(jaxpr, found):
    """Count reductions and scatters that give 16-bit numbers, at any depth. Sums over devices are not among them."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("reduce_sum", "cumsum") or name.startswith("scatter"):
            found.update(f"{name} → {out.aval.str_short()}" for out in equation.outvars if out.aval.dtype.itemsize == 2)
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                item = getattr(item, "jaxpr", item)
                if hasattr(item, "eqns"):
                    sums_in_16_bits(item, found)


SPLIT = {"data": 2, "model": 2, "mesh": {"sequence_parallel": True}}


@pytest.mark.parametrize(
    "changes",
    one_in(
        3,
        [
            {},
            {"recompute": "selective", **SPLIT},
            {"compute": "fp16", "micro_batch": 2},
            {"mesh": {"pipe": 2}},
            {"mesh": {"pipe": 2, "schedule": "zb-h1"}},
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
def test_no_step_adds_up_rows_in_16_bits(changes):
    found = Counter()
    sums_in_16_bits(traced_step(small_config(**{"compute": "bf16", **changes}))[1], found)
    assert not found
