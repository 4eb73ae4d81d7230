"""Samples of several documents: masked labels, positions and attention that begin anew, on every kind of mesh."""

from collections import Counter
from dataclasses import replace
from itertools import product

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
from tests.against_reference import largest_error
from tests.products import seldom
from tests.small import QUICKLY, batch_of, gradient_program, named, packing_of, small_config

ALL = {"reset_positions": True, "reset_attention": True, "mask_eod_loss": True}
PIPE = {"layers": 4, "heads": 4}


# --- Loss and gradients: products of choices --------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    ("data", "model", "recompute", "mesh", "changes"),
    [
        (1, 1, "none", {}, {"dropout": 0.1}),
        (2, 2, "selective", {}, {"micro_batch": 2}),
        (2, 2, "full", {"sequence_parallel": True}, {"dropout": 0.1}),
        (2, 2, "none", {"sequence_parallel": True, "zero": 3}, {"micro_batch": 2}),
        (2, 2, "none", {"pipe": 2, "chunks": 2}, PIPE),
        (2, 2, "full", {"pipe": 2, "schedule": "zb-h1", "sequence_parallel": True, "zero": 1}, PIPE),
    ],
)
def test_loss_and_every_gradient_equal_the_serial_reference(data, model, recompute, mesh, changes):
    changes = {"dropout": 0.0, **changes}
    config = small_config(data, model, recompute=recompute, compute="fp64", mesh=mesh, samples=ALL, **changes)
    errors = largest_error(config)
    assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize(
    ("schedule", "chunks", "zero", "recompute"),
    seldom(product(("gpipe", "1f1b", "zb-h1"), (1, 2), (0, 3), ("none", "selective", "full"))),
)
def test_every_schedule_equals_the_serial_reference(schedule, chunks, zero, recompute):
    mesh = {"pipe": 2, "schedule": schedule, "chunks": chunks, "zero": zero}
    errors = largest_error(small_config(2, 2, recompute=recompute, compute="fp64", mesh=mesh, samples=ALL, **PIPE))
    assert max(errors.values()) < 1e-12, errors


# --- What it means ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["xla", "xla_blocks"])
def test_the_documents_of_a_sample_have_the_logits_they_have_alone(kernel):
    config = small_config(model=2, attention=kernel)
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
    packed = logits(build(), tokens, packing)
    places = [(row, packing["documents"][row] == document) for row in (0, 4) for document in range(4)]
    # Alone: first in a sample whose rest, which causal attention does not see, is something else.
    samples = np.stack([np.concatenate([tokens[row][own], np.full((~own).sum(), 7)]) for row, own in places])
    alone = logits(build(), samples, {})
    for (row, own), found in zip(places, np.asarray(alone), strict=True):
        np.testing.assert_allclose(found[: own.sum()], packed[row][own], atol=2e-6)


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient():
    config = small_config(2, 2, micro_batch=2, recompute="selective", compute="fp64", dropout=0.0, samples=ALL)
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


def test_evaluation_gives_the_mean_over_the_labels_that_count_and_their_number(evaluating):
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


def test_an_evaluation_weighs_its_batches_by_the_labels_that_count(evaluating):
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


# --- What it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [{}, {"sequence_parallel": True, "zero": 3}, {"pipe": 2, "chunks": 2}])
def test_a_loss_mask_adds_one_number_over_data_outside_every_loop_and_nothing_else_communicates(mesh):
    plain, packed = (
        Counter(ledger(small_config(2, 2, mesh=mesh, samples=samples, **PIPE)).records) for samples in ({}, ALL)
    )
    (added,) = (packed - plain).elements()
    found = added.operation, added.axes, added.shape, added.dtype, added.loops
    assert found == ("all-reduce", ("data",), (), "int32", ())
    assert not plain - packed


def test_only_the_arrays_that_the_config_asks_for_are_in_a_batch():
    names = {
        field: set(small_config(samples={field: True}).data.batch_types()) - {"tokens", "labels"}
        for field in (*ALL, "validation_tail")
    }
    assert names == {
        "reset_positions": {"positions"}, "reset_attention": {"documents"}, "mask_eod_loss": {"loss_mask"},
        "validation_tail": set(),
    }  # fmt: skip
    evaluation = small_config(samples={"validation_tail": True}).data.batch_types(evaluation=True)
    assert evaluation == {"tokens": "int32", "labels": "int32", "loss_mask": "bool"}
