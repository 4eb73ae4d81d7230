"""BERT on every kind of mesh: figures and every gradient against a serial BERT in float64 that shares no code."""

import pytest

from tests.against_reference import largest_error
from tests.small import small_config

BERT = {"kind": "bert", "compute": "fp64"}
SP = {"sequence_parallel": True}
PIPE = {"layers": 4, "heads": 4}


@pytest.mark.parametrize("layernorm", ["pre", "post"])
@pytest.mark.parametrize(
    ("data", "model", "recompute", "mesh", "changes"),
    [
        (1, 1, "none", {}, {"micro_batch": 4}),
        (2, 2, "selective", {}, {"micro_batch": 2, "dropout": 0.0}),
        (2, 2, "full", SP, {"micro_batch": 4, "activation": "gelu_erf"}),
        (2, 2, "none", {**SP, "zero": 3}, {"micro_batch": 2}),
        (2, 2, "selective", {"pipe": 2, **SP}, PIPE),
    ],
)
def test_figures_and_every_gradient_equal_the_serial_reference(layernorm, data, model, recompute, mesh, changes):
    if changes.get("activation") == "gelu_erf" and layernorm == "pre":
        changes = {**changes, "attention": "xla_blocks"}
    changes = {**BERT, **changes}
    errors = largest_error(small_config(data, model, recompute=recompute, mesh=mesh, layernorm=layernorm, **changes))
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("layernorm", "mesh"),
    [
        ("pre", {"pipe": 2, "chunks": 2, "zero": 1}),
        ("post", {"pipe": 2, "schedule": "zb-h1", **SP, "zero": 3}),
        ("pre", {"pipe": 4, "schedule": "gpipe"}),  # four stages divide no dim of the order head's bias
    ],
)
def test_schedules_and_sharded_storage_change_no_number(layernorm, mesh):
    config = small_config(2, 2, recompute="full", mesh=mesh, layernorm=layernorm, **BERT, **PIPE)
    errors = largest_error(config)
    assert max(errors.values()) < 1e-12, errors
