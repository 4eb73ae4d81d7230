"""AdamW, weight decay, schedules, the loss scale and the handling of steps that are not finite."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import OptimizerConfig, PrecisionConfig
from mjax.models.bert.model import BERT
from mjax.models.build import build_model
from mjax.parallel.weights import leaf_name
from mjax.step.learning_rate import learning_rate
from mjax.step.optimizer import backward_order, gradient_names, scale_by_adam
from mjax.step.precision import LossScale
from tests.small import batch_of, named, program_of, small_config

# --- Schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "samples", "expected"),
    [
        ("cosine", 3, 0.3),
        ("cosine", 55, 0.1 + 0.9 * 0.5),
        ("linear", 1000, 0.1),
        ("constant", 1000, 1.0),
        ("inverse_square_root", 40, math.sqrt(10 / 40)),
        ("wsd", 95, 0.1 + 0.9 * (2 * 0.5**0.5 - 1)),
    ],
)
def test_schedule_passes_its_landmarks(schedule, samples, expected):
    """Here without megatron-core, whose rates `parity/test_megatron_schedules.py` compares at every step."""
    config = small_config(global_batch=1)
    rates = {"learning_rate": 1.0, "min_learning_rate": 0.1, "warmup_steps": 10}
    optimizer = OptimizerConfig(schedule=schedule, **rates)
    found = learning_rate(replace(config, optimizer=optimizer), jnp.int32(samples), jnp)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.0, 0.9999)])
def test_direction_equals_float64(beta1, beta2):
    """The means of the first steps lose no digits."""
    adam, gradients = scale_by_adam(beta1, beta2, 1e-8), np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    state, m, v = adam.init(jnp.zeros(8)), np.zeros(8), np.zeros(8)
    for t, g in enumerate(gradients.astype(np.float64), start=1):
        direction, state = adam.update(jnp.float32(g), state)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        expected = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)
        np.testing.assert_allclose(direction, expected, rtol=1.5e-6)


# --- Loss scale -------------------------------------------------------------------------------------------------------

SCALED = {"loss_scale_window": 3, "initial_loss_scale": 8.0}


@pytest.mark.parametrize(
    ("finite", "changes", "scales"),
    [
        # Halves after the hysteresis is used up; a window of clean steps doubles it and refills the hysteresis.
        ("--+++--", SCALED, [8, 4, 4, 4, 8, 8, 4]),
        ("----", {"initial_loss_scale": 2.0}, [2, 1, 1, 1]),
        ("-+-", SCALED, [8, 8, 4]),  # a clean step alone refills nothing
    ],
)
def test_loss_scale_follows_megatrons_rule(finite, changes, scales):
    config = PrecisionConfig(compute="fp16", **changes)
    scale, found = LossScale.initial(config), []
    for step in finite:
        scale = scale.update(jnp.bool_(step == "+"), config)
        found.append(float(scale.scale))
    assert found == scales


# --- One step, on data 2 × model 2, in fp16 ---------------------------------------------------------------------------

CONFIG = small_config(2, 2, micro_batch=2, compute="fp16")
CONFIG = replace(CONFIG, optimizer=replace(CONFIG.optimizer, clip_norm=0.5, weight_decay=0.1, epsilon=1e-3))
UP = "blocks.mlp.up.kernel"


def _state(scale=2.0**8):
    """The first state, with a loss scale at which nothing overflows."""
    state = program_of(CONFIG).initialize()
    return replace(state, loss_scale=replace(state.loss_scale, scale=_like(state.loss_scale.scale, scale)))


def _like(leaf, value):
    return jax.device_put(np.full(leaf.shape, value, leaf.dtype), leaf.sharding)


def poisoned(tree, name, value):
    """`tree` with `value` in one element of layer 2 of a parameter."""

    def change(path, leaf):
        array = np.array(leaf)
        if leaf_name(path).endswith(name):
            array.reshape(len(array), -1)[1, 0] = value
        return jax.device_put(array, leaf.sharding)

    return jax.tree_util.tree_map_with_path(change, tree)


def _step(state, *limit):
    """The state and the metrics after a step, and whether weights and moments are unchanged, bit for bit."""
    program = program_of(CONFIG)
    before = named((state.model, state.optimizer))
    state, metrics = program.train_step(state, program.put_on_devices(batch_of(CONFIG)), *limit)
    after = named((state.model, state.optimizer))
    return state, metrics, [np.array_equal(after[name], before[name], equal_nan=True) for name in before]


def test_first_adam_step_equals_numpy():
    """Clips gradients; `models/test_balance_bias.py` compares steps that are not clipped."""
    state = _state()
    before = named(state.model)
    state, metrics, _ = _step(state)
    after, moments = named(state.model), named(state.optimizer[0].mu)
    norm = math.sqrt(sum(float(np.square(m.astype(np.float64) / 0.1).sum()) for m in moments.values()))
    assert float(metrics.grad_norm) > 0.5
    assert norm == pytest.approx(0.5, rel=1e-4)
    for name, weight in before.items():
        gradient = moments[name] / 0.1  # the first moment is a tenth of the clipped gradient
        update = gradient / (np.abs(gradient) + 1e-3) + (0 if name.endswith(("bias", "scale")) else 0.1 * weight)
        np.testing.assert_allclose(after[name], weight - 1e-2 * update, rtol=1e-4, atol=2e-6, err_msg=name)


def test_overflow_with_finite_loss_is_not_applied():
    """The case that loss scaling is for: the loss is finite, and a gradient is not."""
    state, rates, scale = _state(scale=2.0**32), [], 2.0**32
    for overflows in (1, 2, 3):
        state, metrics, same = _step(state)
        assert all(same)
        assert (bool(metrics.skipped), int(state.step), int(state.samples)) == (True, overflows, 0)
        assert int(metrics.nonfinite) > 0
        assert math.isfinite(float(metrics.loss))
        assert not math.isfinite(float(metrics.grad_norm))
        scale = scale / 2 if overflows > 1 else scale  # the hysteresis forgives the first
        assert float(state.loss_scale.scale) == scale
        rates.append(float(metrics.learning_rate))
    state = replace(state, loss_scale=replace(state.loss_scale, scale=_like(state.loss_scale.scale, 2.0**8)))
    state, metrics, same = _step(state)
    assert not any(same[: len(named(state.model))])
    assert int(state.samples) == CONFIG.train.global_batch
    assert {*rates, float(metrics.learning_rate)} == {rates[0]}, "the schedule moved on a skipped step"


@pytest.mark.parametrize(("limit", "skipped"), [(3.0, True), (np.inf, False), (-np.inf, True)])
def test_update_is_dropped_when_loss_exceeds_limit(limit, skipped):
    begun = _state()
    begun = replace(begun, loss_scale=replace(begun.loss_scale, hysteresis=_like(begun.loss_scale.hysteresis, 0)))
    state, metrics, same = _step(begun, np.float32(limit))
    assert 3.5 < float(metrics.loss) < 5
    assert (bool(metrics.skipped), int(metrics.nonfinite)) == (skipped, 0)
    assert (int(state.step), int(state.samples)) == (1, 0 if skipped else CONFIG.train.global_batch)
    assert all(same) if skipped else not any(same)
    assert float(state.loss_scale.scale) == 2.0**8, "nothing overflowed"


def test_infinite_loss_with_finite_gradients_is_not_applied():
    """A logit below fp16's range: its label has no probability, and the softmax has no slope there."""
    state, label = _state(scale=1.0), batch_of(CONFIG)["labels"][0, 0]
    changed = {"final_norm.scale": 0.0, "final_norm.bias": 240.0, "embedding.table": -240.0}

    def change(path, leaf):
        value, array = changed.get(leaf_name(path)), np.array(leaf)
        if value is not None:
            array[label if array.ndim == 2 else slice(None)] = value
        return jax.device_put(array, leaf.sharding)

    state = replace(state, model=jax.tree_util.tree_map_with_path(change, state.model))
    _, metrics, same = _step(state)
    assert (float(metrics.loss), int(metrics.nonfinite)) == (math.inf, 0)
    assert bool(metrics.skipped)
    assert all(same)


# --- Names of non-finite arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "part", "name", "value", "broken"),
    [
        ("adamw", "model", UP, 1e30, True),
        ("adamw", "mu", UP, -1e-9, False),
        ("adamw", "nu", UP, -1e-9, True),  # it must have a root
        ("muon", "trace", UP, 1e30, True),
        ("muon", "nu", "blocks.mlp.up.bias", -1e-9, True),
    ],
)
def test_broken_weight_or_moment_is_named(optimizer, part, name, value, broken):
    program = program_of(replace(CONFIG, optimizer=replace(CONFIG.optimizer, name=optimizer)))
    state = program.initialize()
    state = poisoned(state, f"model.{name}" if part == "model" else f"{part}.{name}", value)
    counts = np.asarray(program.broken(state))
    found = [program.gradient_names[index] for index in np.flatnonzero(counts)]
    assert found == [f"{name} of layer 2"] * broken


def test_backward_order_goes_from_heads_to_embedding():
    config = small_config(kind="bert")
    names = gradient_names(jax.eval_shape(lambda: build_model(0, config.model)), config.model)
    ordered = [names[i] for i in backward_order(names, BERT.after_layers)]
    assert {name.partition(".")[0] for name in ordered[:11]} == {"final_norm", "mlm", "order", "pooler"}
    assert ordered[11] == "blocks.mlp.down.bias of layer 2"
    assert set(ordered[-3:]) == {"embedding.table", "positions", "token_types"}
