"""A training step in float8: the same on every mesh, in bf16 where nothing is trained, and skipped if not finite.

In float64 a step with operands rounded to float8 is as exact as one without, if all ranks round the same way.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import MeshConfig
from mjax.planner import layer as trace
from mjax.planner.ledger import ledger
from mjax.step import forward
from mjax.step import step as one_step
from tests.against_reference import STEP, in_layer_order
from tests.small import batch_of, gradient_program, initial_state, program_of, small_config
from tests.training.test_step_equals_reference import config_of, simplest_row

CASES = [
    simplest_row(data=2, model=2, zero=3, recompute="selective", packed=True),
    simplest_row(architecture="pre-LN", data=2, pipe=2, schedule="gpipe", zero=3),
    simplest_row(
        data=2, model=2, pipe=2, schedule="1f1b", virtual_stages=2, zero=3, sequence_parallel=True, recompute="full"
    ),
    simplest_row(architecture="bloom", data=4, model=4, zero=3, sequence_parallel=True, layers="apart"),
    simplest_row(architecture="bloom", data=2, pipe=2, virtual_stages=2, zero=1, recompute="selective", packed=True),
    simplest_row(architecture="post-LN", data=2, model=2, pipe=4, schedule="1f1b", zero=1, kernel="xla_blocks"),
    simplest_row(architecture="llama", model=2, context=2, data=2, zero=3),
]


@pytest.fixture
def in_float8(monkeypatch):
    """Float8 operands in a step of another compute dtype."""
    for module in (forward, one_step):
        monkeypatch.setattr(module, "uses_float8", lambda precision: True)


def _without_mesh(config):
    """The config of one device with as many sequences in a micro-batch as all replicas have, and the order of the
    batch in which they are the same ones."""
    train, data = config.train, config.mesh.data
    order = np.arange(train.global_batch).reshape(data, -1, train.micro_batch).swapaxes(0, 1).flatten()
    train = replace(train, micro_batch=data * train.micro_batch, recompute="none", unroll="auto")
    return replace(config, mesh=MeshConfig(), train=train, model=replace(config.model, attention="xla")), tuple(order)


@cache
def _loss_and_gradients(config, order=None):
    program, place = gradient_program(config)
    batch = batch_of(config)
    if order is not None:
        batch = {name: rows[list(order)] for name, rows in batch.items()}
    loss, gradients = program(place(), batch, jnp.int32(STEP), jnp.float64(1.0))
    return np.asarray(loss), in_layer_order(gradients, config)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.ci if i else ()) for i, case in enumerate(CASES)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_gradients_are_those_of_one_device(case, in_float8):
    config = config_of(case)  # without dropout: masks follow the sample, which is at another place here
    with jax.enable_x64(True):
        loss, gradients = _loss_and_gradients(config)
        expected_loss, expected = _loss_and_gradients(*_without_mesh(config))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[name], atol=1e-11, err_msg=name)


# --- In bf16 ----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_step_is_near_bf16_evaluates_equally_and_is_skipped():
    """Skipped when a weight is not finite, which no float8 number could show."""
    batch, found = batch_of(small_config(), seed=9), {}
    for compute in ("bf16", "fp8"):
        program = program_of(small_config(1, 2, 4, compute=compute, dropout=0.0))
        state, placed = initial_state(program), program.put_on_devices(batch)
        evaluated = float(program.eval_step(state.model, placed).loss)
        state, metrics = program.train_step(state, placed)
        found[compute] = np.array([float(metrics.loss), float(metrics.grad_norm)])
        assert found.setdefault("evaluated", evaluated) == evaluated
    apart = np.abs(found["fp8"] / found["bf16"] - 1)
    assert (apart > 1e-6).all()
    assert (apart < [2e-3, 5e-2]).all()
    state.model.blocks.mlp.up.kernel[...] = state.model.blocks.mlp.up.kernel[...].at[0, 3, 5].set(jnp.inf)
    assert bool(program.train_step(state, program.put_on_devices(batch))[1].skipped)


# --- What is kept and sent --------------------------------------------------------------------------------------------


def test_layer_keeps_inputs_of_products_in_one_byte():
    kept = {}
    for compute in ("bf16", "fp8"):
        of = trace.TraceSpec.from_config(small_config(compute=compute, dropout=0.0))
        kept[compute] = trace.layer_backward(of, "cudnn", "none").saved
    elements = 16 * 32  # of the stream of one sample
    inputs = (1 + 1 + 1 + 4) * elements  # of qkv, projection, up and down
    scales = 4 * (4 + 4)  # of these, and of the weights
    assert kept["bf16"] - kept["fp8"] == inputs - scales


@pytest.mark.parametrize(
    ("data", "model", "mesh", "source", "dtypes"),
    [
        (1, 2, {"sequence_parallel": True}, "layer forward", {"float8_e4m3fn"}),
        (1, 2, {"sequence_parallel": True}, "layer backward", {"float8_e5m2"}),
        (2, 1, {"zero": 3}, "weights forward", {"float8_e4m3fn"}),
        (2, 2, {"zero": 1}, "weights", {"float8_e4m3fn", "bfloat16"}),  # matrices; and what else is not split
    ],
)
def test_gathers_are_in_float8(data, model, mesh, source, dtypes):
    records = ledger(small_config(data, model, 4, compute="fp8", mesh=mesh)).records
    gathers = [each for each in records if each.operation == "all-gather" and each.operand_bytes > 128]
    assert {each.dtype for each in gathers if each.source == source} == dtypes


@pytest.mark.ci
@pytest.mark.parametrize("mesh", [{"zero": 1}, {"zero": 1, "pipe": 2}], ids=str)
def test_weights_gathered_in_float8_give_equal_bits(mesh, monkeypatch):
    config = small_config(2, 2, 2, compute="fp8", dropout=0.0, mesh=mesh)
    found = []
    for narrow in (True, False):
        monkeypatch.setattr(one_step, "uses_float8", lambda precision, narrow=narrow: narrow)
        program, place = gradient_program(config)
        weights = place()
        kernel = weights.blocks.mlp.up.kernel[...]
        row = (0,) * (kernel.ndim - 3) + (0, 3)  # the largest is in the shard of one rank, and in one layer
        weights.blocks.mlp.up.kernel[...] = kernel.at[row].multiply(100)
        found.append(program(weights, batch_of(config), jnp.int32(STEP), jnp.float32(1.0)))
    (loss, gradients), (expected_loss, expected) = found
    assert float(loss) == float(expected_loss)
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)
