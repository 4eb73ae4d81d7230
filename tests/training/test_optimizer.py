"""AdamW, weight decay, schedules, the loss scale and the handling of steps that are not finite."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import PrecisionConfig
from mjax.models.build import build_model
from mjax.names import leaf_name
from mjax.parallel.mesh import make_mesh
from mjax.state.precision import LossScale
from mjax.training.optimizer import backward_order, gradient_names, is_decayed, sums_by_parameter
from mjax.training.schedule import learning_rate
from tests.against_reference import in_layer_order
from tests.small import batch_of, named, program_of, small_config


def _schedule(samples, steps=100, **optimizer):
    config = small_config()
    optimizer = {"learning_rate": 1.0, "min_learning_rate": 0.1, **optimizer}
    config = replace(
        config,
        optimizer=replace(config.optimizer, **optimizer),
        train=replace(config.train, steps=steps, global_batch=1),
    )
    return float(learning_rate(config, jnp.int32(samples)))


@pytest.mark.parametrize(
    ("schedule", "samples", "expected"),
    [
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.1 + 0.9 * 0.5),
        ("cosine", 100, 0.1),
        ("cosine", 1000, 0.1),
        ("linear", 55, 0.1 + 0.9 * 0.5),
        ("linear", 100, 0.1),
        ("constant", 1000, 1.0),
        ("inverse_square_root", 40, math.sqrt(10 / 40)),
        ("inverse_square_root", 10_000, 0.1),
        ("wsd", 90, 1.0),
        ("wsd", 95, 0.1 + 0.9 * (2 * 0.5**0.5 - 1)),
        ("wsd", 100, 0.1),
    ],
)
def test_schedules_pass_through_their_landmarks(schedule, samples, expected):
    assert _schedule(samples, schedule=schedule, warmup_steps=10) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_square_root", "wsd"])
def test_warm_up_is_linear_from_zero(schedule):
    rates = [_schedule(n, schedule=schedule, warmup_steps=10) for n in range(11)]
    np.testing.assert_allclose(rates, np.arange(11) / 10, rtol=1e-6)


def test_a_warm_up_may_begin_above_zero():
    rates = [_schedule(n, warmup_steps=10, warmup_from=0.5) for n in range(11)]
    np.testing.assert_allclose(rates, 0.5 + np.arange(11) / 20, rtol=1e-6)


def test_wsd_with_a_linear_decay_is_optaxs_pieces_joined():
    pieces = [
        optax.linear_schedule(0.0, 1.0, 10), optax.constant_schedule(1.0), optax.linear_schedule(1.0, 0.1, 30)
    ]  # fmt: skip
    theirs = optax.join_schedules(pieces, [10, 70])
    wsd = {"schedule": "wsd", "wsd_decay": "linear", "wsd_decay_steps": 30, "warmup_steps": 10}
    ours = [_schedule(n, **wsd) for n in range(110)]
    np.testing.assert_allclose(ours, [float(theirs(n)) for n in range(110)], rtol=1e-6)


def test_weight_decay_spares_biases_and_layer_norms_and_nothing_else():
    model = jax.eval_shape(lambda: build_model(0, small_config().model))
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(model)[0]]
    assert {name for name in names if is_decayed(name)} == {
        "embedding.table",
        "positions",
        "blocks.attention.qkv.kernel",
        "blocks.attention.out.kernel",
        "blocks.mlp.up.kernel",
        "blocks.mlp.down.kernel",
    }


# --- Clipping and the global norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "model"), [(1, 1), (2, 4)])
def test_the_first_adam_step_of_a_clipped_gradient_equals_numpy(data, model):
    config = small_config(data, model, micro_batch=8 // data)
    config = replace(config, optimizer=replace(config.optimizer, clip_norm=0.5, weight_decay=0.1, epsilon=1e-3))
    program = program_of(config)
    state = program.initialize()
    before = named(state.model)
    batch = program.on_devices(batch_of(config))
    state, metrics = program.train_step(state, batch)
    after, moments = named(state.model), named(state.optimizer[0].mu)
    norm = math.sqrt(sum(float(np.square(m.astype(np.float64) / 0.1).sum()) for m in moments.values()))
    assert float(metrics.grad_norm) > 0.6, "nothing was clipped"
    assert norm == pytest.approx(0.5, rel=1e-4)  # the first moment is a tenth of the clipped gradient
    for name, weight in before.items():
        gradient = moments[name] / 0.1
        update = gradient / (np.abs(gradient) + 1e-3) + (0.1 * weight if is_decayed(name) else 0)
        np.testing.assert_allclose(after[name], weight - 1e-2 * update, rtol=1e-4, atol=2e-6, err_msg=name)


# --- Loss scale -------------------------------------------------------------------------------------------------------


def _scales(finite, **changes):
    config = PrecisionConfig(compute="fp16", **changes)
    scale, values = LossScale.initial(config), []
    for ok in finite:
        scale = scale.update(jnp.bool_(ok), config)
        values.append(float(scale.scale))
    return values


def test_the_scale_starts_at_2_to_32_and_halves_after_the_hysteresis_is_used_up():
    assert _scales([False, False, False, True, False]) == [2.0**32, 2.0**31, 2.0**30, 2.0**30, 2.0**29]


def test_a_window_of_clean_steps_doubles_the_scale_and_refills_the_hysteresis():
    finite = [False, False, True, True, True, False, False]
    assert _scales(finite, loss_scale_window=3, initial_loss_scale=8.0) == [8, 4, 4, 4, 8, 8, 4]


def test_the_scale_stays_above_its_minimum():
    assert _scales([False] * 10, initial_loss_scale=4.0, min_loss_scale=2.0)[-1] == 2.0


def test_a_constant_scale_does_not_move():
    assert _scales([False, True, False], loss_scale=128.0) == [128.0] * 3


# --- Steps that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step_and_names_its_gradient(compute):
    config = small_config(2, 2, micro_batch=4, compute=compute)
    program = program_of(config)
    state = program.initialize()
    name = "blocks.mlp.up.kernel"

    def poison(path, weight):
        return weight.at[1, 0, 0].set(jnp.nan) if leaf_name(path) == name else weight

    shardings = jax.tree.map(lambda x: x.sharding, state.model)
    poisoned = jax.jit(lambda m: jax.tree_util.tree_map_with_path(poison, m), out_shardings=shardings)(state.model)
    state = replace(state, model=poisoned)
    before, moments = named(state.model), named(state.optimizer)
    batch = program.on_devices(batch_of(config))
    state, metrics = program.train_step(state, batch)
    assert bool(metrics.skipped)
    assert int(metrics.nonfinite) > 0
    assert (int(state.step), int(state.samples)) == (1, 0)
    for old, new in ((before, named(state.model)), (moments, named(state.optimizer))):
        for key, value in old.items():
            np.testing.assert_array_equal(new[key], value, err_msg=key)


def _changed(tree, name, value):
    """`tree` with `value` in one element of layer 2 of a parameter."""

    def change(path, leaf):
        return leaf.at[1, 0, 0].set(value) if leaf_name(path) == name else leaf

    shardings = jax.tree.map(lambda x: x.sharding, tree)
    return jax.jit(lambda t: jax.tree_util.tree_map_with_path(change, t), out_shardings=shardings)(tree)


def test_a_weight_or_a_moment_that_cannot_be_right_is_named():
    config = small_config(2, 2, micro_batch=4)
    program = program_of(config)
    name = "blocks.mlp.up.kernel"

    def poisoned(field, value):
        state = program.initialize()
        if field == "weight":
            return replace(state, model=_changed(state.model, name, value))
        adam, *rest = state.optimizer
        return replace(state, optimizer=(adam._replace(**{field: _changed(getattr(adam, field), name, value)}), *rest))

    broken = [("weight", math.nan), ("weight", 1e30), ("mu", math.nan), ("mu", 1e30), ("nu", math.nan), ("nu", -1e-9)]
    for field, value in broken:
        counts = np.asarray(program.broken(poisoned(field, value)))
        assert [program.gradient_names[index] for index in np.flatnonzero(counts)] == [f"{name} of layer 2"], field
    assert not np.asarray(program.broken(program.initialize())).any()


def test_the_moments_of_muon_are_checked_too_and_a_second_one_must_have_a_root():
    config = small_config(2, 2, micro_batch=4)
    program = program_of(replace(config, optimizer=replace(config.optimizer, name="muon")))

    def poisoned(moment, name, value):
        def change(path, leaf):
            return leaf.at[1].set(value) if leaf_name(path).endswith(f"{moment}.{name}") else leaf

        state = program.initialize()
        shardings = jax.tree.map(lambda x: x.sharding, state.optimizer)
        changed = jax.jit(lambda t: jax.tree_util.tree_map_with_path(change, t), out_shardings=shardings)
        return replace(state, optimizer=changed(state.optimizer))

    matrix, bias = "blocks.mlp.up.kernel", "blocks.mlp.up.bias"
    for moment, name, value, broken in [
        ("trace", matrix, math.nan, 1), ("trace", matrix, 1e30, 1), ("trace", matrix, -1e-9, 0),
        ("mu", bias, math.inf, 1), ("mu", bias, -1e-9, 0), ("nu", bias, -1e-9, 1),
    ]:  # fmt: skip
        counts = np.asarray(program.broken(poisoned(moment, name, value)))
        found = [program.gradient_names[index] for index in np.flatnonzero(counts)]
        assert found == [f"{name} of layer 2"] * broken, (moment, value)


@pytest.mark.parametrize("mesh", [pytest.param({}, marks=pytest.mark.ci), {"pipe": 2, "zero": 1}])
def test_the_update_of_a_batch_whose_loss_is_above_the_limit_is_dropped(mesh):
    config = small_config(2, 2, micro_batch=2, mesh=mesh)
    program = program_of(config)
    batch = program.on_devices(batch_of(config))
    before = named(program.initialize().model)
    for limit, skipped in ((3.0, True), (np.inf, False), (-np.inf, True)):
        state, metrics = program.train_step(program.initialize(), batch, np.float32(limit))
        assert 3.5 < float(metrics.loss) < 5
        assert (bool(metrics.skipped), int(metrics.nonfinite)) == (skipped, 0)
        assert (int(state.step), int(state.samples)) == (1, 0 if skipped else config.train.global_batch)
        same = [np.array_equal(weight, before[key]) for key, weight in named(state.model).items()]
        assert all(same) if skipped else not all(same)


def test_fp16_overflows_halve_the_scale_until_a_step_succeeds():
    config = small_config(2, 2, micro_batch=2, compute="fp16")
    program = program_of(config)
    state = program.initialize()
    batch = program.on_devices(batch_of(config))
    skipped, rates = 0, []
    for _ in range(40):
        state, metrics = program.train_step(state, batch)
        skipped += bool(metrics.skipped)
        rates.append(float(metrics.learning_rate))
        if not metrics.skipped:
            break
    assert 2 < skipped < 34
    assert float(metrics.loss_scale) == 2.0 ** (32 - skipped + 1)  # the hysteresis forgave the first
    assert len(set(rates)) == 1, "the schedule moved on a skipped step"
    assert int(state.samples) == config.train.global_batch


def test_the_backward_order_goes_from_the_last_layer_to_the_embedding():
    config = small_config()
    names = gradient_names(jax.eval_shape(lambda: build_model(0, config.model)), config.mesh)
    ordered = [names[i] for i in backward_order(names)]
    assert ordered[0].startswith("final_norm")
    assert ordered[2] == "blocks.mlp.down.bias of layer 2"
    assert set(ordered[-2:]) == {"embedding.table", "positions"}
    assert sorted(ordered) == sorted(names)


def test_the_backward_order_takes_layers_with_parts_of_other_names():
    names = ["embedding.table", *(f"blocks.{part} of layer {i}" for part in ("gate.kernel", "mlp.up") for i in (1, 2))]
    ordered = [names[i] for i in backward_order(names)]
    assert ordered == [f"blocks.{part} of layer {i}" for i in (2, 1) for part in ("mlp.up", "gate.kernel")] + names[:1]


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"pipe": 2, "chunks": 2, "zero": 1}, {"pipe": 4, "zero": 3}])
def test_each_gradient_has_its_own_squared_norm_on_a_pipeline(mesh):
    config = small_config(2, 2, layers=8, mesh=mesh)
    program = program_of(config)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state.model)
    drawn = np.random.default_rng(0)
    whole = jax.tree.map(lambda leaf: drawn.normal(size=leaf.shape).astype(np.float32), program.abstract_state.model)
    norms = jax.shard_map(
        lambda gradients: sums_by_parameter([[jax.tree.map(jnp.square, gradients)]], config.mesh)[0],
        mesh=make_mesh(config.mesh),
        in_specs=(jax.tree.map(lambda sharding: sharding.spec, shardings),),
        out_specs=P(),
    )
    found = dict(zip(program.gradient_names, jax.jit(norms)(jax.device_put(whole, shardings)), strict=True))
    expected = {}
    for name, gradient in in_layer_order(whole, config).items():
        layers = enumerate(gradient, start=1) if name.startswith("blocks.") else []
        expected |= {f"{name} of layer {number}": np.square(part).sum() for number, part in layers} or {
            name: np.square(gradient).sum()
        }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-5), name
