"""Muon on every mesh against a serial twin in float64 that orthogonalises by singular values, and its refusals."""

import math
from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mjax
from mjax.config import DataConfig, MeshConfig, OptimizerConfig
from mjax.errors import UsageError
from mjax.parallel.mesh import make_mesh
from mjax.state.layout import lay_out
from mjax.training.muon import matrices_of, newton_schulz
from mjax.training.optimizer import optimizer_of
from mjax.validation import validate
from tests.against_reference import in_layer_order
from tests.products import one_in
from tests.small import QUICKLY, named, small_config
from tests.training.test_trainer import CONFIG, batch, losses

LLAMA = small_config(kind="llama", dropout=0.0, kv_heads=4, feed_forward=24).model

# --- The serial twin --------------------------------------------------------------------------------------------------


def orthogonal(u: np.ndarray) -> np.ndarray:
    """What five iterations do to the singular values of a matrix, by its decomposition."""
    left, values, right = np.linalg.svd(u, full_matrices=False)
    values = values / max(np.linalg.norm(u), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def by_matrix(name, weight, function):
    """`function` of each matrix of one layer's weight: the rows of an output are heads, those of others the stream."""
    if name.endswith("attention.out.kernel"):
        return function(weight.reshape(-1, weight.shape[-1])).reshape(weight.shape)
    if name.endswith(("qkv.kernel", "key_value.kernel")) or (name.endswith("up.kernel") and weight.ndim == 3):
        parts = [weight[:, i] for i in range(weight.shape[1])]
        return np.stack([function(part.reshape(len(part), -1)).reshape(part.shape) for part in parts], axis=1)
    return function(weight.reshape(len(weight), -1)).reshape(weight.shape)


def scaled(adjust):
    def function(u):
        into, out = u.shape
        scale = {"original": math.sqrt(max(1, out / into)), "match_rms_adamw": 0.2 * math.sqrt(max(into, out))}
        return scale[adjust] * orthogonal(u)

    return function


def serial_direction(name, weight, gradients, optimizer):
    """The direction of the last of several steps with the same weight, weight decay included."""
    decay = 0.0 if name.endswith(("bias", "scale")) else optimizer.weight_decay
    if name.startswith("blocks.") and name.endswith("kernel"):
        moment = np.zeros_like(weight)
        for gradient in gradients:
            moment = optimizer.muon_momentum * moment + (1 - optimizer.muon_momentum) * gradient
        update = optimizer.muon_momentum * moment + (1 - optimizer.muon_momentum) * gradient
        direction = np.stack([by_matrix(name, layer, scaled(optimizer.muon_adjust_lr)) for layer in update])
    else:
        first = second = 0.0
        for gradient in gradients:
            first = optimizer.beta1 * first + (1 - optimizer.beta1) * gradient
            second = optimizer.beta2 * second + (1 - optimizer.beta2) * gradient**2
        steps = len(gradients)
        root = np.sqrt(second / (1 - optimizer.beta2**steps))
        direction = first / (1 - optimizer.beta1**steps) / (root + optimizer.epsilon)
    return direction + decay * weight


# --- The iteration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 7)])
def test_iteration_maps_singular_values_by_its_polynomial(shape):
    matrices = np.random.default_rng(0).normal(size=(3, *shape))
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(newton_schulz)(matrices))
    np.testing.assert_allclose(found, np.stack([orthogonal(each) for each in matrices]), atol=1e-12)


def test_iteration_in_bf16_is_near_and_keeps_zeros():
    matrices = np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32)
    matrices[1] = 0
    found = jax.jit(newton_schulz)(jnp.asarray(matrices, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = np.stack([orthogonal(each) for each in matrices])
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.02)
    assert not np.asarray(found[1]).any()


# --- Which weights are matrices ---------------------------------------------------------------------------------------


def _matrices(config):
    mesh = make_mesh(config.mesh)
    return matrices_of(lay_out(config, mesh), config.mesh)


def test_matrices_are_those_of_layers():
    found = {name: (each.count, each.size) for name, each in _matrices(small_config(layers=3)).items()}
    assert found == {
        "blocks.attention.qkv.kernel": (9, (32, 32)),
        "blocks.attention.out.kernel": (3, (32, 32)),
        "blocks.mlp.up.kernel": (3, (32, 128)),
        "blocks.mlp.down.kernel": (3, (128, 32)),
    }
    llama = replace(small_config(), model=LLAMA)
    grouped = {name: (each.count, each.size) for name, each in _matrices(llama).items()}
    assert grouped == {
        "blocks.attention.query.kernel": (2, (32, 32)),
        "blocks.attention.key_value.kernel": (4, (32, 16)),
        "blocks.attention.out.kernel": (2, (32, 32)),
        "blocks.mlp.up.kernel": (4, (32, 24)),
        "blocks.mlp.down.kernel": (2, (24, 32)),
    }


# --- Every two choices of a mesh --------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A mesh and a model; `adjust` is the factor of the update."""

    model: str
    pipe: int
    chunks: int
    data: int
    tensor: int
    zero: int
    adjust: str


CHOICES = Case(
    model=("gpt", "llama", "bert"),
    pipe=(1, 2, 4),
    chunks=(1, 2),
    data=(1, 2, 3),
    tensor=(1, 2, 4),
    zero=(0, 1, 3),
    adjust=("match_rms_adamw", "original"),
)
# Of all choices that go together, every two stand in one row at least.
# fmt: off
CASES = [
    #    model    pp cp dp tp ZeRO factor
    Case("gpt",   1, 1, 1, 2, 0, "original"),
    Case("gpt",   2, 1, 2, 4, 0, "match_rms_adamw"),
    Case("gpt",   2, 2, 2, 1, 1, "original"),
    Case("gpt",   4, 1, 3, 1, 3, "match_rms_adamw"),
    Case("llama", 1, 1, 2, 2, 3, "match_rms_adamw"),
    Case("llama", 1, 1, 3, 4, 1, "original"),
    Case("llama", 2, 2, 1, 1, 0, "match_rms_adamw"),
    Case("llama", 4, 1, 2, 2, 1, "match_rms_adamw"),
    Case("bert",  1, 1, 2, 1, 1, "match_rms_adamw"),
    Case("bert",  2, 2, 2, 4, 3, "original"),
    Case("bert",  2, 2, 3, 2, 0, "match_rms_adamw"),
    Case("bert",  4, 1, 1, 4, 0, "original"),
]
# fmt: on
MODELS = {
    "gpt": small_config(layers=4).model,
    "llama": replace(LLAMA, layers=4, kv_heads=2),  # fewer than four ranks of `model`
    "bert": small_config(layers=4, kind="bert").model,
}


def _config(model, mesh=None, adjust="match_rms_adamw", **optimizer):
    optimizer = OptimizerConfig(name="muon", muon_adjust_lr=adjust, weight_decay=0.1, **optimizer)
    return replace(small_config(compute="fp64"), model=model, mesh=mesh or MeshConfig(), optimizer=optimizer)


@pytest.mark.parametrize("case", one_in(5, zip(CASES, strict=True)), ids=lambda case: "-".join(map(str, case)))
def test_direction_of_every_weight_equals_the_serial_twin(case):
    mesh = MeshConfig(case.pipe, case.data, case.tensor, chunks=case.chunks, zero=case.zero)
    config = _config(MODELS[case.model], mesh, case.adjust)
    with jax.enable_x64(True):
        layout = lay_out(config, make_mesh(mesh))
        random = np.random.default_rng(0)
        weights, *gradients = (
            jax.tree.map(lambda leaf: random.normal(size=leaf.shape), layout.abstract_model) for _ in range(4)
        )
        found = in_layer_order(_directions(config, layout, weights, gradients), config)
    weights, *gradients = (in_layer_order(tree, config) for tree in (weights, *gradients))
    assert found.keys() == weights.keys()
    for name, direction in found.items():
        given = [gradient[name] for gradient in gradients]
        expected = serial_direction(name, weights[name], given, config.optimizer)
        np.testing.assert_allclose(direction, expected, atol=1e-11, err_msg=name)


def _directions(config, layout, weights, gradients):
    """Of the last of some steps with the same weights."""
    transform = optimizer_of(config, layout)

    def steps(weights, gradients):
        state = transform.init(weights)
        for gradient in gradients:
            direction, state = transform.update(gradient, state, weights)
        return direction

    specs = (layout.specs, [layout.specs] * len(gradients))
    run = jax.shard_map(steps, mesh=make_mesh(config.mesh), in_specs=specs, out_specs=layout.specs, check_vma=True)
    return jax.jit(run, compiler_options=QUICKLY)(weights, gradients)


def test_every_two_choices_meet():
    def goes_together(case):
        return (
            (case.chunks == 1 or case.pipe == 2)
            and (case.data > 1 or not case.zero)
            and case.pipe * case.data * case.tensor <= 16
        )

    def pairs(case):
        return combinations(enumerate(case), 2)

    assert all(map(goes_together, CASES))
    possible = {pair for case in map(Case._make, product(*CHOICES)) if goes_together(case) for pair in pairs(case)}
    assert possible == {pair for case in CASES for pair in pairs(case)}


# --- A run ------------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_run_continues_bit_for_bit_and_on_another_mesh(tmp_path, fewer_devices):
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, name="muon"), mesh=MeshConfig(data=2, model=2, zero=1))
    config = replace(config, train=replace(config.train, micro_batch=4))
    other = replace(config, mesh=MeshConfig(pipe=2, data=2, model=1), train=replace(config.train, micro_batch=2))

    def trained(config, name, **options):
        return mjax.Trainer(config, tmp_path / name, data=batch, show=False, **options).train()

    whole = trained(config, "whole")
    for name in ("again", "moved"):
        stopped = trained(config, name, callbacks=[lambda record: record.step == 2])
        assert (stopped.exit_code, stopped.step < 6) == (75, True)
    chex.assert_trees_all_equal(named(trained(config, "again").state), named(whole.state))
    trained(other, "moved")
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    with pytest.raises(UsageError, match=r"trained with muon, .*; type --optimizer\.name muon to continue it, or"):
        mjax.Trainer(replace(config, optimizer=CONFIG.optimizer), tmp_path / "again", data=batch, allow_change=True)


def test_setting_of_muon_without_it_is_refused():
    for setting in ({"muon_momentum": 0.9}, {"muon_adjust_lr": "original"}):
        flag = f"--optimizer.{next(iter(setting)).replace('_', '-')}"
        with pytest.raises(UsageError, match=f"{flag} .* is for --optimizer.name muon, and this run has adamw; add"):
            validate(replace(CONFIG, data=DataConfig(mock=True), optimizer=OptimizerConfig(**setting)))
