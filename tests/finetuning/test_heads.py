"""The heads of tasks: their parameters and the order of their gradients; tests/training has the numbers."""

import jax
import pytest

from mjax.models.bert.model import BERT
from mjax.models.build import build_model, count_parameters
from mjax.step.optimizer import backward_order, gradient_names
from tests.small import small_config

HEADS = {
    "classification": {"head": "classification", "num_labels": 3},
    "multiple_choice": {"head": "multiple_choice", "num_labels": 4},
    "span": {"head": "span"},
}


@pytest.mark.parametrize("head", HEADS)
def test_parameters_are_counted(head):
    config = small_config(kind="bert", **HEADS[head])
    shapes = jax.eval_shape(lambda: build_model(0, config.model))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count_parameters(config.model)


def test_gradients_of_head_come_first():
    config = small_config(kind="bert", **HEADS["classification"])
    names = gradient_names(jax.eval_shape(lambda: build_model(0, config.model)), config.model)
    first = [names[index].partition(".")[0] for index in backward_order(names, BERT.after_layers)[:6]]
    assert set(first) == {"head", "pooler", "final_norm"}
