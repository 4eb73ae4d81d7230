"""Sharded storage: the same training as plain data parallelism, with a state that shrinks by the data axis."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.parallel.mesh import abstract_mesh, make_mesh
from mjax.parallel.zero import local_shard
from mjax.step.step import build_program
from tests.against_reference import in_layer_order
from tests.small import batch_of, program_of, small_config


def after_five_steps(**mesh):
    with jax.enable_x64(True):
        config = small_config(4, 2, compute="fp64", dropout=0.0, unroll="off", mesh=mesh)
        program = program_of(config)
        state = program.initialize()
        for step in range(5):
            state, metrics = program.train_step(state, program.put_on_devices(batch_of(config, seed=step)))
        return in_layer_order(state.model, config), float(metrics.grad_norm)


@pytest.mark.parametrize(("zero", "replicate"), [pytest.param(1, 2, marks=pytest.mark.ci), (3, 1), (3, 2)])
def test_zero_trains_like_plain_data_parallelism(zero, replicate):
    """The weights after five steps, and the norm of the last gradient."""
    weights, norm = after_five_steps()
    found, found_norm = after_five_steps(zero=zero, replicate=replicate)
    assert found_norm == pytest.approx(norm, rel=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def bytes_on_a_device(tree):
    return sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def abstract_state(data=1, **mesh):
    config = small_config(data, vocabulary=500, hidden=64, layers=4, mesh=mesh)
    return build_program(config, abstract_mesh(config.mesh)).abstract_state


def test_state_on_device_shrinks_by_data_axis():
    whole = bytes_on_a_device(abstract_state(zero=0))
    for data, zero in ((2, 1), (8, 1), (8, 3)):
        part = bytes_on_a_device(abstract_state(data, zero=zero))
        assert whole / data <= part < 1.001 * whole / data + 100  # besides: counters and the loss scale


@pytest.mark.parametrize("spec", [P(("pipe", "data"), "model"), P(("model", "pipe"), None, "data")])
def test_shard_is_cut_as_spec_says(spec):
    whole = np.arange(8 * 4 * 6.0).reshape(8, 4, 6)
    mesh = make_mesh(MeshConfig(pipe=2, data=2, model=2))
    cut = jax.shard_map(lambda array: local_shard(array, spec), mesh=mesh, in_specs=P(), out_specs=spec, check_vma=True)
    np.testing.assert_array_equal(jax.jit(cut)(whole), whole)


def test_ranks_of_model_are_neighbors():
    """`model` communicates in every layer: its devices are on one server, the devices of `pipe` and `data` far
    apart."""
    numbers = [device.id for device in make_mesh(MeshConfig(pipe=2, data=2, model=4)).devices.flatten()]
    assert numbers == list(range(16))
    names = ["pipe", "replicate", "data", "expert", "context", "model"]
    assert list(make_mesh(MeshConfig(data=2, model=4)).axis_names) == names
