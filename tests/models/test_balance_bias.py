"""Experts that are balanced by a bias: steps on meshes against serial ones in float64, and what the bias follows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import PrecisionConfig
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.interop.convert import export_family
from mjax.models.parts.router import bias_update_sign
from tests import reference
from tests.against_reference import in_layer_order, merged, of_trained
from tests.models.test_mixture import DEEPSEEK, config_of
from tests.small import batch_of, compiled_step, named, state_of, weights_of

BIAS = "blocks.mlp.router.bias"
STEPS = 5


def biased(data=1, model=1, micro_batch=2, compute="fp64", **changes):
    """Scores with differences about as large as the first biases', so that both matter."""
    defaults = {"dropout": 0.0, "aux_loss_coef": 0.0, "z_loss": 0.0, "sequence": 16, "init_std": 0.1, **DEEPSEEK}
    config = config_of(data, model, micro_batch, **{**defaults, "router_bias_update_rate": 0.02, **changes})
    optimizer = replace(config.optimizer, schedule="constant", epsilon=1e-3, clip_norm=100.0)  # clips nothing
    return replace(config, optimizer=optimizer, precision=PrecisionConfig(compute=compute))


def steps_on_mesh(config, seeds=range(STEPS), state=None, limit=np.inf):
    """The state after these steps; its weights by name, layers as [l, …]; loss and load of each step."""
    program, step = compiled_step(config)
    state, found = state_of(config) if state is None else state, []
    for seed in seeds:
        batch = program.put_on_devices(batch_of(config, seed))
        state, metrics = step(state, batch, jnp.float32(limit))
        found.append([float(metrics.loss), float(metrics.metrics["expert_load"])])
    return state, in_layer_order(state.model, config), np.array(found).T


def trained(weights, model, batches, optimizer):
    """Loss of each step and weights after the last one: AdamW (arXiv 1711.05101) with a constant learning rate, and
    the bias of routers, which counts tokens; with adapters nothing else moves."""
    weights, losses = dict(weights), []
    first, second = (dict.fromkeys(weights, 0.0) for _ in range(2))
    for step, batch in enumerate(batches, 1):
        whole = merged(weights, model), model.without_lora()
        (_, (found, loads)), gradients = reference.differentiated(*whole, batch)
        gradients = of_trained(gradients, weights, model)
        losses.append(float(found[0]))
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        for name, gradient in gradients.items():
            gradient = gradient * min(1, optimizer.clip_norm / (norm + 1e-6))
            first[name] = optimizer.beta1 * first[name] + (1 - optimizer.beta1) * gradient
            second[name] = optimizer.beta2 * second[name] + (1 - optimizer.beta2) * gradient**2
            root = np.sqrt(second[name] / (1 - optimizer.beta2**step))
            update = first[name] / (1 - optimizer.beta1**step) / (root + optimizer.epsilon)
            if not name.endswith(("bias", "scale")):
                update = update + optimizer.weight_decay * weights[name]
            weights[name] = weights[name] - np.float32(optimizer.learning_rate) * update
        if model.lora_rank:
            continue
        fewer = np.asarray(loads) * model.experts < np.asarray(loads).sum(-1, keepdims=True)
        more = np.asarray(loads) * model.experts > np.asarray(loads).sum(-1, keepdims=True)
        (bias,) = (name for name in weights if name.endswith("router.bias"))
        weights[bias] = weights[bias] + model.router_bias_update_rate * (1.0 * fewer - more)
    return losses, weights


@pytest.mark.parametrize(
    ("data", "model", "mesh"),
    [
        pytest.param(4, 1, {}, marks=pytest.mark.ci),
        pytest.param(1, 2, {"sequence_parallel": True}, marks=pytest.mark.ci),
        pytest.param(2, 1, {"pipe": 2, "virtual_stages": 2, "zero": 1}, marks=pytest.mark.ci),
        pytest.param(4, 1, {"zero": 3}, marks=pytest.mark.ci),
        (4, 1, {"expert": 2, "zero": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.ci)])
def test_five_steps_equal_serial_ones(data, model, mesh, rank):
    config = biased(data, model, mesh=mesh, lora_rank=rank)
    with jax.enable_x64(True):
        start, batches = named(weights_of(config)), [batch_of(config, seed) for seed in range(STEPS)]
        expected, weights = trained(start, config.model, batches, config.optimizer)
        _, found, (losses, _) = steps_on_mesh(config)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for name, weight in weights.items():
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-11, err_msg=name)
    np.testing.assert_array_equal(found[BIAS], weights[BIAS])
    if rank:
        return
    moves = np.unique(np.round((weights[BIAS] - start[BIAS]) / config.model.router_bias_update_rate))
    assert {-STEPS, STEPS} < set(moves), "the test should have experts that are always chosen, and some that change"


@pytest.mark.ci
def test_micro_batch_size_changes_no_bit_of_the_bias():
    (_, one, _), (_, four, _) = (steps_on_mesh(biased(micro_batch=size, compute="fp32")) for size in (1, 4))
    assert one[BIAS].dtype == np.float32
    np.testing.assert_array_equal(one[BIAS], four[BIAS])


@pytest.mark.parametrize(
    ("load", "signs"),
    [
        ([40, 40, 40, 40, 40, 40], [0, 0, 0, 0, 0, 0]),
        ([40, 41, 39], [0, -1, 1]),
        ([2, 2, 3], [1, 1, -1]),  # the mean is not a whole number
        ([0, 0, 0, 7], [1, 1, 1, -1]),
        ([12.000001, 11.999999, 12], [0, 0, 0]),  # of a loss scale that is not a power of two
        ([2**24, 2**24, 2**24 - 2], [-1, -1, 1]),  # in float32 their sum would round
    ],
)
def test_expert_with_the_mean_of_tokens_keeps_its_bias(load, signs):
    for order in (slice(None), slice(None, None, -1)):
        found = jax.jit(bias_update_sign)(jnp.array([load[order]], jnp.float32))
        assert found.tolist() == [signs[order]]


@pytest.mark.ci
def test_skipped_step_leaves_the_bias():
    config = biased(compute="fp32")
    before = named(weights_of(config))
    _, after, _ = steps_on_mesh(config, limit=0.0)
    np.testing.assert_array_equal(after[BIAS], before[BIAS])


def test_bias_is_refused_when_all_experts_are_chosen():
    with pytest.raises(
        UsageError, match=r"--model\.router-bias-update-rate 0\.01 does nothing where a token uses all 4 experts"
    ):
        validate(config_of(router_bias_update_rate=0.01, experts_per_token=4), "a test")


def test_export_of_the_bias_is_refused():
    with pytest.raises(
        UsageError, match=r"^transformers has no class for .* --model\.router-bias-update-rate 0\.01; Mixtral"
    ):
        export_family(replace(config_of(dropout=0.0).model, router_bias_update_rate=0.01))
