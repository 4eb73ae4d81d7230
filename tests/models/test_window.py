"""A sliding window in attention: the serial reference on meshes, and what of a plan it changes."""

from dataclasses import replace

import jax
import pytest

from mjax.models.attention_kernels import FLASH_STAND_IN, attend
from mjax.training.flops import hardware_flops, model_flops
from mjax.training.trace import Traced, layer_backward
from tests.against_reference import largest_error
from tests.small import BLOOM, small_config

PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        (2, {"sequence_parallel": True}, {"window": 6, "attention": "xla_blocks", "recompute": "selective"}),
        pytest.param(1, {"pipe": 2}, {"window": 3, "attention": "xla", "dropout": 0.0, **BLOOM}, marks=pytest.mark.ci),
    ],
)
def test_window_equals_serial_reference(model, mesh, changes):
    """Loss and every gradient."""
    errors = largest_error(small_config(2, model, compute="fp64", mesh=mesh, samples=PACKED, **changes))
    assert max(errors.values()) < 1e-12, errors


def test_flops_are_those_without_window():
    """An MFU counts all scores; and cuDNN's kernel keeps the same for the backward pass."""
    config = small_config(recompute="selective")
    cut = replace(config, model=replace(config.model, window=4))
    assert (model_flops(cut), hardware_flops(cut)) == (model_flops(config), hardware_flops(config))
    q = jax.ShapeDtypeStruct((2, 16, 4, 8), "bfloat16")
    assert jax.eval_shape(lambda q: attend(q, q, q, FLASH_STAND_IN, window=4), q) == q
    kept = [layer_backward(Traced.of(small_config(window=w)), "cudnn", "none").kept for w in (None, 4)]
    assert kept[0] == kept[1]
