"""A checkpoint of one mesh continues on every other: pipelines, chunks and sharded storage included."""

import numpy as np
import pytest

from mjax.state.checkpoint import Checkpoints
from tests.against_reference import in_layer_order
from tests.small import batch_of, initial_state, program_of, small_config


class _Run:
    def __init__(self, pipe, data, model, **mesh):
        self.config = small_config(
            data, model, 1, compute="fp32", layers=8, heads=4, global_batch=8, mesh={"pipe": pipe, **mesh}
        )
        self.program = program_of(self.config)
        self.state = None

    def take(self, steps):
        losses = []
        for step in steps:
            batch = self.program.on_devices(batch_of(self.config, seed=step))
            self.state, metrics = self.program.train_step(self.state, batch)
            losses.append(float(metrics.loss))
        return losses

    def evaluate(self):
        batch = self.program.on_devices(batch_of(self.config, seed=99))
        return float(self.program.eval_step(self.state.model, batch).loss)


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory):
    """The folder of a checkpoint after 3 steps at pipe 2 × data 2 × model 2 with 2 chunks, and what follows it."""
    folder = tmp_path_factory.mktemp("interleaved")
    run = _Run(2, 2, 2, chunks=2)
    run.state = initial_state(run.program)
    initial = in_layer_order(run.state.model, run.config)
    first = run.take(range(3))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, run.state)
    saved = in_layer_order(run.state.model, run.config)
    return folder, initial, first, saved, run.take(range(3, 6)), run.evaluate()


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"pipe": 1, "data": 1, "model": 1}, marks=pytest.mark.ci),
        {"pipe": 1, "data": 4, "model": 2, "zero": 3},
        pytest.param(
            {"pipe": 4, "data": 1, "model": 2, "schedule": "zb-h1", "sequence_parallel": True}, marks=pytest.mark.ci
        ),
        pytest.param({"pipe": 2, "data": 2, "model": 2, "chunks": 4, "zero": 1}, marks=pytest.mark.ci),
    ],
)
def test_a_checkpoint_of_an_interleaved_pipeline_opens_on_another_mesh_and_continues_the_losses(mesh, interleaved):
    folder, _, _, saved, losses, evaluated = interleaved
    run = _Run(**mesh)
    with Checkpoints(folder) as checkpoints:
        _, run.state = checkpoints.restore(run.program.abstract_state)
    for name, value in in_layer_order(run.state.model, run.config).items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)
    np.testing.assert_allclose(run.take(range(3, 6)), losses, rtol=1e-5)
    assert run.evaluate() == pytest.approx(evaluated, rel=1e-5)


def test_an_interleaved_pipeline_starts_from_the_weights_of_one_device_and_has_its_losses(interleaved):
    _, initial, losses, *_ = interleaved
    run = _Run(1, 1, 1)
    run.state = initial_state(run.program)
    for name, value in in_layer_order(run.state.model, run.config).items():
        np.testing.assert_array_equal(value, initial[name], err_msg=name)
    np.testing.assert_allclose(run.take(range(3)), losses, rtol=1e-5)
