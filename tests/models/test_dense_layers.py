"""Mixtures of experts with dense layers, the first ones or all but every n-th."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from mjax.cluster.hardware import gpu_named
from mjax.config import MeshConfig
from mjax.config.checks import validate
from mjax.errors import UsageError
from mjax.generation.generate import Generator, Sampling
from mjax.models.build import build_model, count_parameters
from mjax.parallel.mesh import abstract_mesh, make_mesh
from mjax.parallel.zero import split_into_virtual_stages
from mjax.planner.layer import model_flops
from mjax.planner.memory import predict_memory
from mjax.planner.time import predict_time
from mjax.step.step import build_program
from tests import reference
from tests.against_reference import largest_error
from tests.models.test_balance_bias import biased, steps_on_mesh, trained
from tests.models.test_mixture import config_of
from tests.small import batch_of, named, small_config, weights_of

FIRST = {"layers": 4, "first_dense_layers": 1, "feed_forward": 40}
SECOND = {"layers": 4, "moe_layer_freq": 2, "feed_forward": 40}
THIRD = {"layers": 6, "moe_layer_freq": 3, "feed_forward": 40}


@pytest.mark.parametrize(
    ("data", "mesh", "changes"),
    [(1, {}, {**FIRST, "layers": 2}), pytest.param(2, {"pipe": 2, "zero": 1}, SECOND, marks=pytest.mark.ci)],
    ids=["first", "every second"],
)
def test_bias_of_layers_with_a_router_follows_their_tokens(data, mesh, changes):
    config = biased(data, 1, mesh=mesh, **changes)
    with jax.enable_x64(True):
        batches = [batch_of(config, seed) for seed in range(3)]
        expected, weights = trained(named(weights_of(config)), config.model, batches, config.optimizer)
        _, found, (losses, _) = steps_on_mesh(config, range(3))
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    (bias,) = (name for name in weights if name.endswith("router.bias"))
    assert weights[bias].shape == (config.model.expert_layers, 8)
    np.testing.assert_array_equal(found[bias], weights[bias])


@pytest.mark.parametrize(
    "changes",
    [
        {**FIRST, "layers": 6, "moe_layer_freq": 2, "window": 3, "global_attention_interval": 2},
        pytest.param({**SECOND, "layers": 5}, marks=pytest.mark.ci),
    ],
    ids=["first, then every second", "more after the last group"],
)
def test_unlike_runs_equal_serial_reference(changes):
    """Loss and every gradient."""
    errors = largest_error(config_of(**changes))
    assert max(errors.values()) < 1e-12, errors


# --- Numbers and names of layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mesh", "router", "dense"),
    [
        ({**FIRST, "first_dense_layers": 2, "layers": 5}, {}, ("blocks.1", [3, 4, 5]), ("blocks.0", [1, 2])),
        (SECOND, {}, ("blocks.turns.1", [2, 4]), ("blocks.turns.0", [1, 3])),
        (THIRD, {}, ("blocks.turns.2", [3, 6]), ("blocks.turns.1", [2, 5])),
        ({**SECOND, "first_dense_layers": 1}, {}, ("blocks.1.turns.1", [3]), ("blocks.2", [4])),
        (
            {**SECOND, "layers": 8}, {"pipe": 2, "virtual_stages": 2},
            ("blocks.turns.1", [2, 4, 6, 8]), ("blocks.turns.0", [1, 3, 5, 7]),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_named_by_their_layer(changes, mesh, router, dense):
    config = small_config(kind="mixture", mesh=mesh, **changes)
    names = build_program(config, abstract_mesh(config.mesh)).gradient_names
    for weight, (stack, numbers) in (("mlp.router.kernel", router), ("mlp.down.kernel", dense)):
        mine = [name for name in names if name.startswith(f"{stack}.{weight}")]
        assert mine == [f"{stack}.{weight} of layer {number}" for number in numbers]


@pytest.mark.ci
@pytest.mark.parametrize("changes", [FIRST, SECOND], ids=["first", "every second"])
def test_layer_has_its_initial_weights_of_a_uniform_model(changes):
    uniform = {**changes, "first_dense_layers": 0, "moe_layer_freq": 1}
    layers = [
        reference.layers_of(named(build_model(0, small_config(kind="mixture", **each).model)))
        for each in (changes, uniform)
    ]
    for found, expected in zip(*layers, strict=True):
        np.testing.assert_array_equal(found["attention.qkv.kernel"], expected["attention.qkv.kernel"])


def test_parameters_flops_memory_and_time_are_those_of_layers_added():
    def planned(**changes):
        config = small_config(kind="mixture", feed_forward=512, moe_ffn_hidden=24, attention="xla", **changes)
        parts = predict_time(config, gpu_named("h100")).parts
        predicted = [predict_memory(config).activations, *map(parts.get, ("matmul", "attention", "elementwise"))]
        return np.array([count_parameters(config.model), model_flops(config), *predicted])

    sparse = planned(layers=5) - planned(layers=4)
    dense = planned(layers=5, first_dense_layers=2) - planned(layers=4, first_dense_layers=1)
    mlp, experts, router, tokens = 3 * 32 * 512, 3 * 32 * 24, 32 * 8, 8 * 16  # matrices, and two experts a token
    assert (sparse - dense)[:2].tolist() == [8 * experts + router - mlp, 6 * tokens * (2 * experts + router - mlp)]
    assert (abs(dense / sparse - 1)[[2, 3, 5]] > 0.005).all()  # attention is the same
    np.testing.assert_allclose(planned(layers=7, first_dense_layers=3), planned(layers=4) + 3 * dense, rtol=5e-4)
    np.testing.assert_allclose(planned(layers=6, moe_layer_freq=3), planned(layers=2) + 4 * dense, rtol=5e-4)


# --- Generation, checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    ("changes", "mesh"),
    [
        (FIRST, {}),
        ({**THIRD, "window": 3, "global_attention_interval": 2}, {}),
        ({**SECOND, "layers": 8}, {"pipe": 2, "virtual_stages": 2}),
        ({"layers": 5, "first_dense_layers": 2, "feed_forward": 40}, {"pipe": 3}),
        ({**FIRST, "layers": 5}, {"pipe": 2, "virtual_stages": 2, "data": 2, "zero": 3}),
        ({"layers": 2, "experts": 8}, {"data": 4, "expert": 4, "model": 2}),
    ],
    ids=str,
)
def test_greedy_text_is_that_of_whole_forward_passes(changes, mesh):
    config = small_config(kind="mixture", dropout=0.0, moe_kernel="xla", **changes)
    config = replace(config, mesh=MeshConfig(**mesh))
    weights = jax.tree.map(lambda w: 4 * w, build_model(3, config.model))
    prompt, generator = [5, 17, 31], Generator(config, make_mesh(config.mesh))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, generator.abstract_model)
    there = jax.device_put(split_into_virtual_stages(weights, config.mesh), shardings)
    (found,) = generator.generate(there, [prompt], Sampling(tokens=6, temperature=0.0), eod=-1)
    ids = list(prompt)
    for _ in range(6):
        tokens = np.array([ids + [0] * (9 - len(ids))])  # what follows is not seen
        scores = reference.scores(named(weights), config.model, {"tokens": tokens})
        ids.append(int(scores[0, len(ids) - 1].argmax()))
    assert found.tokens == ids[3:]


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layers": 4, "first_dense_layers": 4},
            r"--model\.first-dense-layers 4 and .* leave no layer of --model\.layers 4 with",
        ),
        (
            {"layers": 4, "first_dense_layers": 1, "mesh": {"pipe": 2, "virtual_stages": 3}},
            r"--mesh\.pipe 2 × --mesh\.virtual-stages 3 is more than a mixture of experts can fill with 4 layers;",
        ),
        (
            {"layers": 24, "moe_layer_freq": 4, "window": 4, "global_attention_interval": 3, "mesh": {"pipe": 4}},
            "with 24 layers in 2 groups, which stages cannot split; use at most 2 stages",
        ),
        (
            {"layers": 5, "moe_layer_freq": 2, "mesh": {"pipe": 2, "stage_layers": (3, 2)}},
            r"--mesh\.stage-layers 3 2 splits a group of layers, and .* 2 × 2, 1 × 1; move the border",
        ),
        (
            {"layers": 5, "mesh": {"pipe": 2, "stage_layers": (4, 2)}},
            r"--mesh\.stage-layers 4 2 does not fit: .* needs 2 numbers with sum 5",
        ),
        ({"layers": 5, "mesh": {"stage_layers": (5,)}}, r"--mesh\.stage-layers needs a pipeline; set --mesh.pipe too"),
    ],
)
def test_impossible_pattern_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        validate(config_of(micro_batch=1, **changes), "a test")
