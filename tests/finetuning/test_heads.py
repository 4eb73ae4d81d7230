"""The heads of tasks on every kind of mesh: loss and every gradient against a serial BERT in float64."""

import jax
import pytest

from mjax.models.build import build_model, count_parameters
from mjax.training.optimizer import backward_order, gradient_names
from tests.against_reference import largest_error
from tests.small import small_config

HEADS = {
    "classification": {"head": "classification", "answers": 3},
    "multiple_choice": {"head": "multiple_choice", "answers": 4},
    "span": {"head": "span"},
}
SP = {"sequence_parallel": True}
FSDP = {"zero": 3}
MESHES = {  # layernorm, data, model, and what small_config takes besides
    "one device": ("pre", 1, 1, {"micro_batch": 4}),
    "model": ("post", 1, 2, {"micro_batch": 4, "recompute": "full", "mesh": SP}),
    "data": ("post", 2, 1, {"micro_batch": 2, "recompute": "selective", "mesh": FSDP}),
    "data, model": ("pre", 2, 2, {"micro_batch": 4, "mesh": SP | FSDP}),
    "pipe, data, model": ("pre", 2, 2, {"micro_batch": 1, "mesh": SP | {"pipe": 2}}),
    "pipe, data": ("post", 2, 1, {"micro_batch": 2, "recompute": "full", "mesh": {"pipe": 2, "schedule": "zb-h1"}}),
}
SOMETIMES = [
    ("span", "model"),
    ("classification", "one device"),
    ("classification", "pipe, data, model"),
    ("multiple_choice", "pipe, data"),
    ("span", "data"),
    ("span", "pipe, data, model"),
]


@pytest.mark.parametrize(
    ("head", "mesh"),
    [("multiple_choice", "data, model"), *(pytest.param(*case, marks=pytest.mark.ci) for case in SOMETIMES)],
)
def test_gradients_equal_serial_reference(head, mesh):
    layernorm, data, model, changes = MESHES[mesh]
    config = small_config(data, model, kind="bert", compute="fp64", layernorm=layernorm, **changes, **HEADS[head])
    errors = largest_error(config)
    assert {"head.kernel", "head.bias", "loss"} <= errors.keys()
    assert ("pooler.kernel" in errors) == (head != "span")
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("head", HEADS)
def test_parameters_are_counted(head):
    config = small_config(kind="bert", **HEADS[head])
    shapes = jax.eval_shape(lambda: build_model(0, config.model))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count_parameters(config.model)


def test_gradients_of_head_come_first():
    config = small_config(kind="bert", **HEADS["classification"])
    names = gradient_names(jax.eval_shape(lambda: build_model(0, config.model)), config.mesh)
    first = [names[index].partition(".")[0] for index in backward_order(names)[:6]]
    assert set(first) == {"head", "pooler", "final_norm"}
