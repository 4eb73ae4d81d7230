"""The heads of tasks on every kind of mesh: loss and every gradient against a serial BERT in float64."""

from itertools import product

import jax
import pytest

from mjax.models.build import build_model, count_parameters
from mjax.training.optimizer import backward_order, gradient_names
from tests.against_reference import largest_error
from tests.products import diagonal, seldom
from tests.small import small_config

HEADS = {
    "classification": {"head": "classification", "answers": 3},
    "multiple_choice": {"head": "multiple_choice", "answers": 4},
    "span": {"head": "span"},
}
SP = {"sequence_parallel": True}
FSDP = {"zero": 3}
BERT = {"kind": "bert", "compute": "fp64"}


def assert_equals_reference(head, layernorm, data, model, recompute, mesh, changes):
    config = small_config(
        data, model, recompute=recompute, mesh=mesh, layernorm=layernorm, **BERT, **changes, **HEADS[head]
    )
    errors = largest_error(config)
    assert {"head.kernel", "head.bias", "loss"} <= errors.keys()
    assert ("pooler.kernel" in errors) == (head != "span")
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(("head", "layernorm", "mesh"), [("multiple_choice", "pre", SP | FSDP), ("span", "post", SP)])
def test_loss_and_every_gradient_equal_the_serial_reference(head, layernorm, mesh):
    assert_equals_reference(head, layernorm, 2, 2, "none", mesh, {"micro_batch": 4})


MESHES = (
    ("pre", 1, 1, "none", {}, {"micro_batch": 4}),
    ("post", 1, 1, "none", {}, {"micro_batch": 8, "dropout": 0.0}),
    ("pre", 1, 2, "none", {}, {"micro_batch": 8}),
    ("post", 1, 2, "full", SP, {"micro_batch": 4}),
    ("pre", 2, 1, "none", {}, {"micro_batch": 4}),
    ("post", 2, 1, "selective", FSDP, {"micro_batch": 2}),
    ("pre", 2, 2, "none", SP | FSDP, {"micro_batch": 2}),
    ("post", 2, 2, "none", {"zero": 1}, {"micro_batch": 4}),
    ("pre", 2, 2, "none", SP | {"pipe": 2}, {"micro_batch": 1}),
    ("post", 2, 1, "full", {"pipe": 2, "schedule": "zb-h1"}, {"micro_batch": 2}),
)


@pytest.mark.parametrize(("head", "on"), seldom(product(HEADS, MESHES), some=diagonal(3, HEADS, MESHES)))
def test_they_do_on_every_mesh(head, on):
    assert_equals_reference(head, *on)


@pytest.mark.parametrize("head", HEADS)
def test_the_number_of_parameters_is_that_of_the_weights(head):
    config = small_config(kind="bert", **HEADS[head])
    shapes = jax.eval_shape(lambda: build_model(0, config.model))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count_parameters(config.model)


def test_the_gradients_of_the_head_are_reached_first():
    config = small_config(kind="bert", **HEADS["classification"])
    names = gradient_names(jax.eval_shape(lambda: build_model(0, config.model)), config.mesh)
    first = [names[index].partition(".")[0] for index in backward_order(names)[:6]]
    assert set(first) == {"head", "pooler", "final_norm"}
