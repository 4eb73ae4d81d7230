"""Bytes between the products of programs small enough to count them by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from mjax.planner.layer import OF_FLOAT8, moved
from mjax.planner.program import Program

ROWS, WIDTH, WIDE = 8, 16, 64
OF = SimpleNamespace(ranks=1, scores=(ROWS, ROWS))


def traced(function, *shapes):
    return Program(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)))


def test_fused_operations_move_arrays_at_products():
    """The stream read, its double written, the activation read and written, the branch read, the sum written."""

    def layer(x, up, down):
        return x + jnp.tanh((2 * x) @ up) @ down

    program = traced(layer, (ROWS, WIDTH), (WIDTH, WIDE), (WIDE, WIDTH))
    found = moved(program, program.inputs[:1], OF)
    assert (found.bytes, found.scores, found.kernels) == (2 * ROWS * (4 * WIDTH + 2 * WIDE), 0, 3)


def test_scores_of_attention_are_counted_alone():
    def attention(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v

    shape = (2, ROWS, WIDTH)
    program = traced(attention, shape, shape, shape)
    found = moved(program, program.inputs, OF)
    assert (found.bytes, found.scores) == (0, 2 * 2 * 2 * ROWS * ROWS)


def test_float8_passes_over_arrays_and_weights():
    def layer(x, weight):
        x, weight = (each.astype(jnp.float8_e4m3fn) for each in (2 * x, weight))
        return jnp.matmul(x, weight, preferred_element_type=jnp.bfloat16)

    program = traced(layer, (ROWS, WIDTH), (WIDTH, WIDE))
    found = moved(program, program.inputs[:1], OF)
    assert found.bytes == pytest.approx(ROWS * WIDTH * (2 + OF_FLOAT8))
    assert found.weights == OF_FLOAT8 * WIDTH * WIDE
