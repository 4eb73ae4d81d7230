"""A sliding window in attention: the serial reference on meshes, and what of a plan it changes."""

from dataclasses import replace

import pytest

from mjax.planner.layer import hardware_flops, model_flops
from tests.against_reference import largest_error
from tests.small import BLOOM, small_config

PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "mesh", "changes"),
    [
        (2, {"sequence_parallel": True}, {"window": 6, "attention": "xla_blocks", "recompute": "selective"}),
        (1, {"pipe": 2}, {"window": 3, "attention": "xla", "dropout": 0.0, **BLOOM}),
    ],
)
def test_window_equals_serial_reference(model, mesh, changes):
    """Loss and every gradient."""
    errors = largest_error(small_config(2, model, compute="fp64", mesh=mesh, samples=PACKED, **changes))
    assert max(errors.values()) < 1e-12, errors


def test_flops_are_those_without_window():
    """An MFU counts all scores."""
    config = small_config(recompute="selective")
    cut = replace(config, model=replace(config.model, window=4))
    assert (model_flops(cut), hardware_flops(cut)) == (model_flops(config), hardware_flops(config))
