"""Loss and every gradient of the parallel step against a serial GPT in float64 that shares no code with it."""

from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mjax.parallel import layers, mappings
from tests.against_reference import largest_error
from tests.small import small_config

MESHES = [(1, 1), (2, 4), (8, 1), (1, 8)]
RECOMPUTE = ["none", "selective", "full"]


def _the_rest_is_long(cases, default):
    return [case if case in default else pytest.param(*case, marks=pytest.mark.long) for case in cases]


@pytest.mark.parametrize(
    ("data", "model", "recompute", "dropout"),
    _the_rest_is_long(
        [(*mesh, recompute, dropout) for mesh, recompute, dropout in product(MESHES, RECOMPUTE, (0.1, 0.0))],
        default=[
            *((2, 4, recompute, 0.1) for recompute in RECOMPUTE),
            *((1, 1, "none", 0.1), (8, 1, "full", 0.1), (1, 8, "selective", 0.1)),
        ],
    ),
)
def test_loss_and_every_gradient_equal_the_serial_reference(data, model, recompute, dropout):
    config = small_config(
        data, model, micro_batch=8 // data // 2 or 1, recompute=recompute, dropout=dropout, compute="fp64"
    )
    errors = largest_error(config)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("data", "model", "recompute", "mesh"),
    [
        (2, 4, "none", {"sequence_parallel": True}),
        pytest.param(1, 8, "selective", {"sequence_parallel": True}, marks=pytest.mark.long),
        (2, 2, "full", {"sequence_parallel": True, "zero": 1}),
        pytest.param(4, 2, "none", {"zero": 1}, marks=pytest.mark.long),
        pytest.param(2, 2, "none", {"zero": 3}, marks=pytest.mark.long),
        (4, 2, "selective", {"sequence_parallel": True, "zero": 3}),
        (3, 2, "full", {"zero": 3}),  # three divide few dims of a weight: most stay whole
    ],
)
def test_sequence_parallelism_and_sharded_storage_change_no_number(data, model, recompute, mesh):
    batch = {"global_batch": 4 * data, "micro_batch": 2}
    errors = largest_error(small_config(data, model, recompute=recompute, compute="fp64", mesh=mesh, **batch))
    assert max(errors.values()) < 1e-12, errors


def test_blocked_attention_equals_the_serial_reference():
    errors = largest_error(small_config(2, 2, micro_batch=2, compute="fp64", attention="xla_blocks"))
    assert max(errors.values()) < 1e-12, errors


def test_the_loss_scale_is_divided_out():
    errors = largest_error(small_config(1, 1, micro_batch=4, compute="fp64"), scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


# --- Breaking f and g -------------------------------------------------------------------------------------------------


def test_a_region_that_f_does_not_open_is_refused(monkeypatch):
    monkeypatch.setattr(mappings, "enter", lambda x: x)
    with pytest.raises(ValueError, match="manual axis types do not match"):
        largest_error(small_config(2, 4, compute="fp64"))


def test_a_region_that_g_does_not_close_is_refused(monkeypatch):
    monkeypatch.setattr(mappings, "leave", lambda x: x)
    with pytest.raises(ValueError, match="a leave\\(\\) is missing"):
        largest_error(small_config(2, 4, compute="fp64"))


def test_closing_a_region_twice_is_refused(monkeypatch):
    once = mappings.leave
    monkeypatch.setattr(mappings, "leave", lambda x: once(once(x)))
    with pytest.raises(ValueError, match="already the same on every rank"):
        largest_error(small_config(2, 4, compute="fp64"))


def test_an_f_without_its_backward_sum_is_seen_in_the_gradients(monkeypatch):
    @jax.custom_vjp
    def enter(x):
        return lax.pcast(x, "model", to="varying")

    def backward(_, gradient):  # rank 0's part alone, where f would have summed all
        return (lax.psum(jnp.where(lax.axis_index("model") == 0, gradient, 0), "model"),)

    enter.defvjp(lambda x: (enter(x), None), backward)
    monkeypatch.setattr(mappings, "enter", enter)
    errors = largest_error(small_config(2, 4, compute="fp64"))
    assert errors["loss"] < 1e-12
    assert errors["blocks.mlp_norm.scale"] > 1e-4


def test_a_bias_added_before_g_is_seen_in_the_loss(monkeypatch):
    def call(self, x, tokens):
        kernel = self.kernel[...]
        return mappings.leave(jnp.tensordot(x, kernel, kernel.ndim - 1) + self.bias[...])

    monkeypatch.setattr(layers.RowParallelLinear, "__call__", call)
    assert largest_error(small_config(2, 4, compute="fp64"))["loss"] > 1e-4
