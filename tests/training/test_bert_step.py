"""Metrics of a BERT: two losses, over masked tokens and over pairs."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import BERTConfig
from mjax.config.batch_size import BatchSizes
from mjax.parallel.mesh import make_mesh
from mjax.run import loop
from mjax.run.display import format_losses, format_verdict
from mjax.step.step import build_program
from tests import reference
from tests.small import batch_of, gradient_program, named, small_config

pytestmark = pytest.mark.usefixtures("quick_runs")


def run_of(config):
    """A run that has not begun, with weights."""
    mesh, checkpoints = make_mesh(config.mesh), SimpleNamespace(folder=Path("checkpoints"))
    run = loop.Run(config, mesh, build_program(config, mesh), checkpoints, None, None, None, None)
    run.state = SimpleNamespace(model=gradient_program(config)[1]())
    return run


@pytest.fixture(scope="module")
def run():
    config = small_config(2, 1, mesh={"pipe": 2}, dropout=0.0, kind="bert")
    return run_of(replace(config, train=replace(config.train, eval_batches=2)))


class Validation:
    """Data for an evaluation: these batches."""

    def __init__(self, batches):
        self.batches, self.sizes = batches, BatchSizes.constant(8)

    def batch_at(self, step, rows=slice(None)):
        return {name: array[rows] for name, array in self.batches[step].items()}


def expected_of(run, weights, batches):
    """Return the serial reference's metrics of each batch."""
    whole = {name: jnp.asarray(value) for name, value in named(weights).items()}
    return np.array([reference.loss_and_gradients(whole, run.config.model, batch)[0] for batch in batches])


def test_evaluation_weighs_masked_tokens_by_number_and_pairs_equally(run):
    weights, batches = run.state.model, [batch_of(run.config, seed) for seed in range(2)]
    batches[1]["loss_mask"] &= np.arange(16) < 3
    counts = [int(batch["loss_mask"].sum()) for batch in batches]
    assert counts[0] > 2 * counts[1] > 0
    loss, metrics = loop.Evaluate(Validation(batches)).measure(run, 1)
    assert {metric.name for metric in BERTConfig.metrics} == metrics.keys() - {"unigram_entropy"}
    each = expected_of(run, weights, batches)
    masked, (_, order, found) = np.average(each[:, 0], weights=counts), each.mean(0)
    guessed = np.concatenate([batch["labels"][batch["loss_mask"]] for batch in batches])
    entropy = -np.mean([math.log(np.mean(guessed == label)) for label in guessed])
    assert metrics == pytest.approx(
        {"mlm_loss": masked, "order_loss": order, "order_accuracy": found, "unigram_entropy": entropy}, rel=1e-5
    )
    assert loss == pytest.approx(masked + order, rel=1e-5)


def test_batch_without_masks_has_the_order_loss_alone(run):
    batch = batch_of(run.config) | {"loss_mask": np.zeros((8, 16), bool)}
    found = run.program.eval_step(run.state.model, run.program.put_on_devices(batch))
    assert float(found.means["mlm_loss"]) == 0.0
    assert float(found.loss) == float(found.means["order_loss"]) > 0.1


def test_verdict_compares_with_guessing():
    figures = {"mlm_loss": math.log(20), "order_loss": 0.6, "order_accuracy": 0.8, "unigram_entropy": math.log(500)}
    masked, order = format_verdict(math.log(20) + 0.6, figures, 1600, BERTConfig.metrics)
    assert "perplexity 20.00 of masked tokens" in masked
    assert "alone 500.00" in masked
    assert "80.0% ± 1.0%" in order


def test_progress_line_has_the_metrics_of_the_model():
    figures = {"mlm_loss": math.log(20), "order_loss": 0.6, "order_accuracy": 0.8}
    shown = BERTConfig.metrics
    assert format_losses(3.6, figures, shown) == "mlm loss 2.9957  ppl 20  sop loss 0.6000  sop accuracy 80%"
    assert format_losses(3.6, {"z_loss": 0.5}, shown) == "loss 3.6000  z loss 0.5000"
    assert format_losses(math.log(20), {}) == "loss 2.9957  ppl 20"
