"""The same run on every mesh: weights, losses and dropout are functions of the seed, not of the devices."""

import chex
import numpy as np
import pytest

from tests.small import batch_of, initial_state, named, program_of, small_config

MESHES = [(2, 4), (1, 8), *(pytest.param(*mesh, marks=pytest.mark.ci) for mesh in ((8, 1), (2, 2)))]
STEPS = 8


def _run(data, model, **changes):
    config = small_config(data, model, micro_batch=8 // data, **changes)
    program = program_of(config)
    state = initial_state(program)
    initial, losses = named(state.model), []
    for step in range(STEPS):
        batch = program.on_devices(batch_of(config, seed=step))
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics.loss))
    return initial, losses, state, float(program.eval_step(state.model, batch).loss)


@pytest.fixture(scope="module")
def one_device():
    return _run(1, 1)


@pytest.mark.parametrize(("data", "model"), MESHES)
def test_a_mesh_has_the_weights_and_losses_of_one_device(data, model, one_device):
    initial, losses, _, evaluated = _run(data, model)
    chex.assert_trees_all_equal(initial, one_device[0])
    np.testing.assert_allclose(losses, one_device[1], rtol=1e-5)
    assert evaluated == pytest.approx(one_device[3], rel=1e-5)


def test_a_layer_has_the_same_weights_at_any_depth():
    shallow, deep = (_run_initial(layers) for layers in (2, 3))
    for name in ("blocks.attention.qkv.kernel", "blocks.mlp.up.kernel"):
        np.testing.assert_array_equal(shallow[name], deep[name][:2])


def _run_initial(layers):
    config = small_config(layers=layers)
    return named(initial_state(program_of(config)).model)


def test_two_runs_are_the_same_bit_for_bit(one_device):
    assert _run(1, 1)[1] == one_device[1]
