"""The same run on every mesh: weights, losses and dropout are functions of the seed, not of the devices.

A checkpoint of one mesh continues on every other.
"""

import numpy as np
import pytest

from mjax.checkpoint.checkpoint import Checkpoints
from tests.against_reference import in_layer_order
from tests.small import batch_of, initial_state, named, program_of, small_config
from tests.training.test_optimizer import poisoned

INTERLEAVED = {"pipe": 2, "data": 2, "model": 2, "virtual_stages": 2}


class Run:
    """Four layers on a mesh: its steps, and their losses."""

    def __init__(self, data=1, model=1, **mesh):
        self.config = small_config(data, model, 1, layers=4, heads=4, mesh=mesh)
        self.program = program_of(self.config)
        self.state = None

    def begin(self):
        self.state = initial_state(self.program)
        return self

    @property
    def weights(self):
        return in_layer_order(self.state.model, self.config)

    def take(self, steps):
        """Losses of `steps`, and the norms of their gradients [n, 2]."""
        found = []
        for step in steps:
            batch = self.program.put_on_devices(batch_of(self.config, seed=step))
            self.state, metrics = self.program.train_step(self.state, batch)
            found.append([float(metrics.loss), float(metrics.grad_norm)])
        return np.array(found)

    def evaluate(self):
        batch = self.program.put_on_devices(batch_of(self.config, seed=99))
        return float(self.program.eval_step(self.state.model, batch).loss)


@pytest.fixture(scope="module")
def one_device():
    """Weights before training, six losses and norms, and the loss of an evaluation after them."""
    run = Run().begin()
    return run.weights, run.take(range(6)), run.evaluate()


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory):
    """A run after three steps on an interleaved pipeline, what it began with, and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp("interleaved")
    run = Run(**INTERLEAVED).begin()
    initial, losses = run.weights, run.take(range(3))
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, run.state)
    return run, initial, losses, folder


def test_interleaved_pipeline_begins_as_one_device(interleaved, one_device):
    _, initial, losses, _ = interleaved
    for name, value in one_device[0].items():
        np.testing.assert_array_equal(value, initial[name], err_msg=name)
    np.testing.assert_allclose(losses, one_device[1][:3], rtol=1e-5)


def test_broken_weight_of_a_pipeline_is_named(interleaved):
    run = interleaved[0]
    state = poisoned(run.state, "model.blocks.mlp.up.kernel", np.nan)  # of the second chunk
    [index] = np.flatnonzero(run.program.broken(state))
    assert run.program.gradient_names[index] == "blocks.mlp.up.kernel of layer 3"


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 4, "model": 2, "zero": 3},
        {"pipe": 3, "data": 2, "zero": 1},
        pytest.param({}, marks=pytest.mark.ci),
        pytest.param({"pipe": 4, "model": 2, "sequence_parallel": True}, marks=pytest.mark.ci),
        pytest.param({"pipe": 2, "data": 2, "model": 2, "virtual_stages": 1, "zero": 1}, marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_checkpoint_of_interleaved_pipeline_continues_elsewhere(mesh, interleaved, one_device):
    before, _, _, folder = interleaved
    run = Run(**mesh)
    with Checkpoints(folder) as checkpoints:
        _, run.state = checkpoints.restore(run.program.abstract_state)
    for name, value in run.weights.items():
        np.testing.assert_array_equal(value, before.weights[name], err_msg=name)
    np.testing.assert_allclose(run.take(range(3, 6)), one_device[1][3:], rtol=1e-5)
    assert run.evaluate() == pytest.approx(one_device[2], rel=1e-5)


@pytest.mark.ci
def test_layer_has_its_weights_at_any_depth():
    shallow, deep = (named(initial_state(program_of(small_config(layers=layers))).model) for layers in (2, 3))
    for name in ("blocks.attention.qkv.kernel", "blocks.mlp.up.kernel"):
        np.testing.assert_array_equal(shallow[name], deep[name][:2])
