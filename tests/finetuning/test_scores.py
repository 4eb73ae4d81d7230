"""The scores of a validation set on every kind of mesh, against the serial BERT in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.finetuning.tuning import mean_loss
from mjax.generation.inference import inference_config
from mjax.parallel.mesh import make_mesh
from mjax.tasks.labelled_task import Examples
from mjax.tasks.scoring import TaskScorer
from tests import reference
from tests.finetuning.test_heads import HEADS
from tests.small import examples_of, gradient_program, named, small_config

COUNT = 11  # no multiple of any batch
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("head", "data", "model", "mesh", "micro_batch"),
    [
        ("multiple_choice", 2, 1, {"pipe": 2}, 1),
        pytest.param("span", 2, 2, SP | {"zero": 3}, 2, marks=pytest.mark.ci),
        pytest.param("classification", 2, 2, SP | {"pipe": 2, "virtual_stages": 1}, 1, marks=pytest.mark.ci),
    ],
)
def test_scores_and_loss_equal_serial_reference(head, data, model, mesh, micro_batch):
    config = small_config(data, model, mesh=mesh, dropout=0.0, kind="bert", compute="fp64", **HEADS[head])
    batch = examples_of(replace(config, train=replace(config.train, global_batch=COUNT)), seed=1)
    labels = {name: batch[name] for name in config.model.label_names}
    examples = Examples(batch["tokens"], batch["token_types"], batch["documents"] == 0, labels)
    with jax.enable_x64(True):
        weights = gradient_program(config)[1]()
        config = inference_config(config, config.mesh, config.model.attention, micro_batch)
        scores = TaskScorer(config, make_mesh(config.mesh))(weights, examples)
        whole = {name: jnp.asarray(value) for name, value in named(weights).items()}
        expected = np.asarray(reference.task_scores(whole, config.model, batch))
        expected_loss = float(reference.task_loss(whole, config.model, batch)[0])
    assert len(scores) == COUNT
    assert scores.dtype == np.float32
    is_text = np.isfinite(expected)
    np.testing.assert_allclose(scores[is_text], expected[is_text], rtol=0, atol=1e-6)
    assert (scores[~is_text] < -1e29).all()
    assert mean_loss({"validation": scores}, {"validation": examples}) == pytest.approx(expected_loss, rel=1e-6)
