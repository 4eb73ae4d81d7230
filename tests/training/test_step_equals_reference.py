"""Loss and every gradient of the parallel step against a serial GPT in float64 that shares no code with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mjax.parallel import layers, mappings
from tests import reference
from tests.small import batch_of, gradient_program, named, small_config

STEP = 3


def _largest_error(config, scale=1.0):
    with jax.enable_x64(True):
        program, build = gradient_program(config)
        weights, batch = build(), batch_of(config)
        loss, gradients = program(weights, batch, jnp.int32(STEP), jnp.float64(scale))
        masks = None
        if config.model.hidden_dropout:
            masks = reference.dropout_masks(config.model, config.train.global_batch, config.train.seed, STEP)
        whole = {name: jnp.asarray(value) for name, value in named(weights).items()}
        expected_loss, expected = reference.loss_and_gradients(whole, config.model, batch, masks)
        errors = {"loss": abs(float(loss) - float(expected_loss))}
        for name, gradient in named(gradients).items():
            assert gradient.dtype == np.float64
            assert np.abs(expected[name]).max() > 1e-6, f"{name} has no gradient to compare"
            errors[name] = float(np.abs(gradient - expected[name]).max())
        assert errors.keys() == {"loss", *whole}
        return errors


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("data", "model"), [(1, 1), (2, 4), (8, 1), (1, 8)])
def test_loss_and_every_gradient_equal_the_serial_reference(data, model, recompute, dropout):
    config = small_config(
        data, model, micro_batch=8 // data // 2 or 1, recompute=recompute, dropout=dropout, compute="fp64"
    )
    errors = _largest_error(config)
    assert max(errors.values()) < 1e-12, errors


def test_blocked_attention_equals_the_serial_reference():
    errors = _largest_error(small_config(2, 2, micro_batch=2, compute="fp64", attention="xla_blocks"))
    assert max(errors.values()) < 1e-12, errors


def test_the_loss_scale_is_divided_out():
    errors = _largest_error(small_config(1, 1, micro_batch=4, compute="fp64"), scale=2.0**20)
    assert max(errors.values()) < 1e-12, errors


# --- Breaking f and g -------------------------------------------------------------------------------------------------


def test_a_region_that_f_does_not_open_is_refused(monkeypatch):
    monkeypatch.setattr(mappings, "enter", lambda x: x)
    with pytest.raises(ValueError, match="manual axis types do not match"):
        _largest_error(small_config(2, 4, compute="fp64"))


def test_a_region_that_g_does_not_close_is_refused(monkeypatch):
    monkeypatch.setattr(mappings, "leave", lambda x: x)
    with pytest.raises(ValueError, match="a leave\\(\\) is missing"):
        _largest_error(small_config(2, 4, compute="fp64"))


def test_closing_a_region_twice_is_refused(monkeypatch):
    once = mappings.leave
    monkeypatch.setattr(mappings, "leave", lambda x: once(once(x)))
    with pytest.raises(ValueError, match="already the same on every rank"):
        _largest_error(small_config(2, 4, compute="fp64"))


def test_an_f_without_its_backward_sum_is_seen_in_the_gradients(monkeypatch):
    @jax.custom_vjp
    def enter(x):
        return lax.pcast(x, "model", to="varying")

    def backward(_, gradient):  # rank 0's part alone, where f would have summed all
        return (lax.psum(jnp.where(lax.axis_index("model") == 0, gradient, 0), "model"),)

    enter.defvjp(lambda x: (enter(x), None), backward)
    monkeypatch.setattr(mappings, "enter", enter)
    errors = _largest_error(small_config(2, 4, compute="fp64"))
    assert errors["loss"] < 1e-12
    assert errors["blocks.mlp_norm.scale"] > 1e-4


def test_a_bias_added_before_g_is_seen_in_the_loss(monkeypatch):
    def call(self, x):
        kernel = self.kernel[...]
        return mappings.leave(jnp.tensordot(x, kernel, kernel.ndim - 1) + self.bias[...])

    monkeypatch.setattr(layers.RowParallelLinear, "__call__", call)
    assert _largest_error(small_config(2, 4, compute="fp64"))["loss"] > 1e-4
