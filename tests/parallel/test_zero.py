"""Sharded storage: the same training as plain data parallelism, with a state that shrinks by the data axis."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.parallel.mesh import abstract_mesh, make_mesh
from mjax.parallel.zero import own_shard
from mjax.planner.comms import ledger
from mjax.training.step import build_program
from tests.against_reference import in_layer_order
from tests.small import batch_of, program_of, small_config


def _after_five_steps(**mesh):
    with jax.enable_x64(True):
        config = small_config(4, 2, micro_batch=1, compute="fp64", global_batch=8, mesh=mesh)
        program = program_of(config)
        state = program.initialize()
        for step in range(5):
            batch = program.on_devices(batch_of(config, seed=step))
            state, metrics = program.train_step(state, batch)
        return in_layer_order(state.model, config), float(metrics.grad_norm)


@pytest.fixture(scope="module")
def plain():
    return _after_five_steps()


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.ci), 3])
def test_five_steps_give_the_parameters_of_plain_data_parallelism(zero, plain):
    found, norm = _after_five_steps(zero=zero)
    assert norm == pytest.approx(plain[1], rel=1e-12)
    for name, value in plain[0].items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def _bytes_on_a_device(tree):
    return sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _state(data=1, **mesh):
    config = small_config(data, vocabulary=500, hidden=64, layers=4, mesh=mesh)
    return build_program(config, abstract_mesh(config.mesh)).abstract_state


@pytest.mark.parametrize("zero", [1, 3])
def test_the_state_on_a_device_shrinks_by_the_data_axis(zero):
    whole = _bytes_on_a_device(_state(zero=0))
    for data in (2, 4, 8):
        part = _bytes_on_a_device(_state(data, zero=zero))
        assert whole / data <= part < 1.001 * whole / data + 100  # besides: counters and the loss scale


def test_a_pipeline_holds_one_copy_of_the_embedding_and_its_moments_in_all():
    state = _state(pipe=4)
    for name in ("embedding", "positions", "final_norm"):
        for tree in (state.model, state.optimizer[0].mu, state.optimizer[0].nu):
            weights = getattr(tree, name)
            whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
            assert _bytes_on_a_device(weights) * 4 == whole


def test_gradients_are_scattered_over_data_in_float32_once_a_step_or_once_a_layer():
    for zero in (1, 3):
        config = small_config(4, 2, compute="bf16", mesh={"zero": zero}, global_batch=16, layers=3)
        found = [c for c in ledger(config).records if "data" in c.axes]
        scatters = [c for c in found if c.operation == "reduce-scatter"]
        gathers = [c for c in found if c.operation == "all-gather"]
        assert {c.dtype for c in scatters} == {"float32"}
        assert {c.dtype for c in gathers} == {"bfloat16"}
        layers = [c for c in found if 3 in c.loops]
        assert bool(layers) == (zero == 3)
        if zero == 3:  # for each of 3 layers and 4 micro-batches
            gathered, scattered = (
                Counter(c.shape for c in layers if c.operation == kind for _ in range(c.count // 12))
                for kind in ("all-gather", "reduce-scatter")
            )
            assert scattered.total() == 12  # weights of a layer
            kernels = {(8, 3, 4, 4), (1, 4, 32), (8, 64), (16, 32)}  # shards of QKV, projection, MLP up and down
            assert {shape for shape, times in gathered.items() if times == 2} >= kernels  # forward and backward


def test_the_mesh_says_how_a_stage_holds_its_chunks():
    config = small_config(layers=8, mesh={"pipe": 2, "chunks": 2})
    kernel = build_program(config, abstract_mesh(config.mesh)).abstract_state.model.blocks.mlp.up.kernel.get_value()
    assert kernel.shape == (2, 4, 32, 128)
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 2, 32, 128)
    assert MeshConfig(pipe=2, chunks=2).devices == 2


@pytest.mark.parametrize(
    "spec", [P(), P(None, "model"), P(("pipe", "data"), "model"), P(("model", "pipe"), None, "data")]
)
def test_the_shard_of_a_replicated_array_is_the_one_that_its_spec_says(spec):
    whole = np.arange(8 * 4 * 6.0).reshape(8, 4, 6)
    mesh = make_mesh(MeshConfig(pipe=2, data=2, model=2))
    cut = jax.shard_map(lambda array: own_shard(array, spec), mesh=mesh, in_specs=P(), out_specs=spec, check_vma=True)
    np.testing.assert_array_equal(jax.jit(cut)(whole), whole)
