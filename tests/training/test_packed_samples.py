"""Samples of several documents: their loss mask, and positions and attention that begin again at each."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.batch_size import BatchSizes
from mjax.parallel.mesh import make_mesh
from mjax.planner.comms import ledger
from mjax.training import loop
from mjax.training.step import build_program
from tests import reference
from tests.small import batch_of, gradient_program, named, packing_of, small_config

PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


def test_batch_in_which_no_label_counts_has_no_gradient():
    config = small_config(2, 2, micro_batch=2, recompute="selective", compute="fp64", dropout=0.0, samples=PACKED)
    with jax.enable_x64(True):
        program, build = gradient_program(config)
        batch = batch_of(config) | {"loss_mask": np.zeros((8, 16), bool)}
        loss, gradients = program(build(), batch, jnp.int32(3), jnp.float64(1.0))
    assert float(loss) == 0.0
    assert all((gradient == 0).all() for gradient in named(gradients).values())


def test_evaluation_is_the_mean_over_labels_that_count():
    """Of all batches together, also where their training has no loss mask."""
    config = small_config(2, 1, mesh={"pipe": 2}, dropout=0.0, samples={"validation_tail": True})
    config = replace(config, train=replace(config.train, eval_batches=3))
    mesh = make_mesh(config.mesh)
    run = loop.Run(config, mesh, build_program(config, mesh), None, None, None, None)
    weights = gradient_program(config)[1]()
    assert "loss_mask" not in run.program.abstract_batch
    masks = packing_of(8, 16)["loss_mask"], np.arange(16) < np.full((8, 1), 2), np.zeros((8, 16), bool)
    batches = [batch_of(config, seed) | {"loss_mask": mask} for seed, mask in enumerate(masks)]

    class Validation:
        sizes = BatchSizes.constant(8)

        def at(self, step, rows, positions):
            return {name: array[rows, positions] for name, array in batches[step].items()}

    whole = {name: jnp.asarray(value) for name, value in named(weights).items()}
    expected = [float(reference.loss_and_gradients(whole, config.model, batch)[0]) for batch in batches[:2]]
    assert abs(expected[0] - expected[1]) > 1e-3
    loss, metrics = run.evaluate(1, weights, Validation())
    assert loss == pytest.approx(np.average(expected, weights=[mask.sum() for mask in masks[:2]]), rel=1e-5)
    assert metrics == {}


@pytest.mark.parametrize("mesh", [{"zero": 3}, pytest.param({"pipe": 2, "chunks": 2}, marks=pytest.mark.ci)])
def test_loss_mask_adds_one_number_over_data(mesh):
    """Outside of every loop, and nothing else."""
    plain, packed = (
        Counter(ledger(small_config(2, 2, mesh=mesh, samples=samples, layers=4)).records) for samples in ({}, PACKED)
    )
    (added,) = (packed - plain).elements()
    found = added.operation, added.axes, added.shape, added.dtype, added.loops
    assert found == ("all-reduce", ("data",), (), "int32", ())
    assert not plain - packed
