"""Samples of several documents: their loss mask, and positions and attention that begin again at each."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.batch_size import BatchSizes
from mjax.models.build import build_model
from mjax.parallel.axes import MODEL
from mjax.parallel.mesh import make_mesh
from mjax.planner.comms import ledger
from mjax.training import loop
from mjax.training.step import build_program
from tests import reference
from tests.small import BLOOM, QUICKLY, batch_of, gradient_program, named, packing_of, small_config

PACKED = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}


@pytest.mark.parametrize(
    "changes",
    [{"attention": "xla_blocks"}, pytest.param({}, marks=pytest.mark.ci), BLOOM],
    ids=["blocks", "xla", "bloom"],
)
def test_documents_of_a_sample_have_their_logits_alone(changes):
    config = small_config(model=2, **changes)
    build = jax.jit(lambda: build_model(0, config.model))
    forward = jax.shard_map(
        lambda weights, tokens, packing: weights(tokens, **packing),
        mesh=make_mesh(config.mesh),
        in_specs=(nnx.get_partition_spec(jax.eval_shape(build)), P(), P()),
        out_specs=P(None, None, MODEL),
    )
    logits = jax.jit(forward, compiler_options=QUICKLY)
    tokens, packing = batch_of(config)["tokens"], packing_of(8, 16)
    del packing["loss_mask"]
    if config.model.positions == "alibi":
        del packing["positions"]
    packed = logits(build(), tokens, packing)
    places = [(row, packing["documents"][row] == document) for row in (0, 4) for document in range(4)]
    # Alone: first in a sample whose rest, which causal attention does not see, is something else.
    samples = np.stack([np.concatenate([tokens[row][own], np.full((~own).sum(), 7)]) for row, own in places])
    alone = logits(build(), samples, {})
    for (row, own), found in zip(places, np.asarray(alone), strict=True):
        np.testing.assert_allclose(found[: own.sum()], packed[row][own], atol=2e-6)


def test_batch_in_which_no_label_counts_has_no_gradient():
    config = small_config(2, 2, micro_batch=2, recompute="selective", compute="fp64", dropout=0.0, samples=PACKED)
    with jax.enable_x64(True):
        program, build = gradient_program(config)
        batch = batch_of(config) | {"loss_mask": np.zeros((8, 16), bool)}
        loss, gradients = program(build(), batch, jnp.int32(3), jnp.float64(1.0))
    assert float(loss) == 0.0
    assert all((gradient == 0).all() for gradient in named(gradients).values())


@pytest.fixture(scope="module")
def evaluating():
    """A run whose evaluations alone have a loss mask, and weights for it."""
    config = small_config(2, 1, mesh={"pipe": 2}, dropout=0.0, samples={"validation_tail": True})
    config = replace(config, train=replace(config.train, eval_batches=2))
    mesh = make_mesh(config.mesh)
    run = loop.Run(config, mesh, build_program(config, mesh), None, None, None, None)
    return run, gradient_program(config)[1]()


def test_evaluation_is_the_mean_over_labels_that_count(evaluating):
    run, weights = evaluating
    assert "loss_mask" not in run.program.abstract_batch
    batch = batch_of(run.config) | {"loss_mask": packing_of(8, 16)["loss_mask"]}
    found = run.program.eval_step(weights, run.program.on_devices(batch))
    whole = {name: jnp.asarray(value) for name, value in named(weights).items()}
    expected, _ = reference.loss_and_gradients(whole, run.config.model, batch)
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-5)
    assert int(found.counts["loss"]) == batch["loss_mask"].sum()
    nothing = batch | {"loss_mask": np.zeros((8, 16), bool)}
    found = run.program.eval_step(weights, run.program.on_devices(nothing))
    assert (float(found.loss), int(found.counts["loss"])) == (0.0, 0)


def test_evaluation_weighs_batches_by_their_labels(evaluating):
    run, weights = evaluating
    batches = [batch_of(run.config, seed) | {"loss_mask": np.ones((8, 16), bool)} for seed in range(2)]
    batches[1]["loss_mask"][:, 2:] = False  # a tail

    class Validation:
        sizes = BatchSizes.constant(8)

        def at(self, step, rows, positions):
            return {name: array[rows, positions] for name, array in batches[step].items()}

    placed = [run.program.on_devices(batch) for batch in batches]
    whole, tail = (float(run.program.eval_step(weights, batch).loss) for batch in placed)
    assert abs(whole - tail) > 1e-3
    loss, metrics = run.evaluate(1, weights, Validation())
    assert loss == pytest.approx((whole * 128 + tail * 16) / 144, rel=1e-6)
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


def test_batch_has_only_the_arrays_of_its_config():
    names = {
        field: set(small_config(samples={field: True}).data.batch_types()) - {"tokens", "labels"}
        for field in (*PACKED, "validation_tail")
    }
    assert names == {
        "reset_positions": {"positions"}, "reset_attention": {"documents"}, "mask_eod_loss": {"loss_mask"},
        "validation_tail": set(),
    }  # fmt: skip
    evaluation = small_config(samples={"validation_tail": True}).data.batch_types(evaluation=True)
    assert evaluation == {"tokens": "int32", "labels": "int32", "loss_mask": "bool"}
