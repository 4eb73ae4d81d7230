"""Samples of several documents: their loss mask, and positions and attention that begin again at each."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.planner.ledger import ledger
from mjax.run.loop import Evaluate
from tests.small import batch_of, gradient_program, named, packing_of, small_config
from tests.training.test_bert_step import Validation, expected_of, run_of

PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


def test_batch_in_which_no_label_counts_has_no_gradient():
    config = small_config(2, 2, micro_batch=2, recompute="selective", compute="fp64", dropout=0.0, samples=PACKED)
    with jax.enable_x64(True):
        program, build = gradient_program(config)
        batch = batch_of(config) | {"loss_mask": np.zeros((8, 16), bool)}
        loss, gradients = program(build(), batch, jnp.int32(3), jnp.float64(1.0))
    assert float(loss) == 0.0
    assert all((gradient == 0).all() for gradient in named(gradients).values())


def test_evaluation_is_the_mean_over_unmasked_labels():
    """The mean is over all batches together."""
    config = small_config(2, 1, mesh={"pipe": 2}, dropout=0.0, samples={"mask_eod_loss": True})
    run = run_of(replace(config, train=replace(config.train, eval_batches=3)))
    masks = packing_of(8, 16)["loss_mask"], np.arange(16) < np.full((8, 1), 2), np.zeros((8, 16), bool)
    batches = [batch_of(config, seed) | {"loss_mask": mask} for seed, mask in enumerate(masks)]
    each = expected_of(run, run.state.model, batches[:2])
    assert abs(each[0] - each[1]) > 1e-3
    loss, metrics = Evaluate(Validation(batches)).measure(run, 1)
    assert loss == pytest.approx(np.average(each, weights=[mask.sum() for mask in masks[:2]]), rel=1e-5)
    assert metrics == {}


def test_evaluation_runs_one_batch_ahead(monkeypatch):
    """More programs in flight would hold more batches, and hang XLA for CPUs."""
    running, in_flight = [], []

    class Sums:
        def __init__(self, *_):
            running.append(self)
            in_flight.append(len(running))

        def block_until_ready(self):
            running.remove(self)

    monkeypatch.setattr("mjax.run.loop.weighted_mean", lambda *_: (0.5, {}))
    model, train = SimpleNamespace(loss_weights={}, metrics=()), SimpleNamespace(eval_batches=40)
    state = SimpleNamespace(model=model)
    run = SimpleNamespace(
        config=SimpleNamespace(train=train, model=model),
        state=state,
        program=SimpleNamespace(eval_step=Sums, abstract_state=state),
        to_devices=lambda *_: {},
    )
    assert Evaluate(Validation([])).measure(run, 1) == (0.5, {})
    assert (len(in_flight), max(in_flight)) == (40, 2)


@pytest.mark.parametrize("mesh", [{"zero": 3}, pytest.param({"pipe": 2, "virtual_stages": 2}, marks=pytest.mark.ci)])
def test_loss_mask_adds_one_number_over_data(mesh):
    """Outside of every loop, and nothing else."""
    plain, packed = (
        Counter(ledger(small_config(2, 2, mesh=mesh, samples=samples, layers=4)).records) for samples in ({}, PACKED)
    )
    (added,) = (packed - plain).elements()
    found = added.operation, added.axes, added.shape, added.dtype, added.loops
    assert found == ("all-reduce", ("data",), (), "int32", ())
    assert not plain - packed
