"""Muon on every mesh against a serial twin in float64 that orthogonalises by singular values, and its refusals."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import MeshConfig, OptimizerConfig
from mjax.parallel.mesh import make_mesh
from mjax.step.layout import build_layout
from mjax.step.muon import newton_schulz
from mjax.step.optimizer import make_optimizer
from tests.against_reference import in_layer_order
from tests.products import one_in
from tests.small import QUICKLY, small_config, weights_of

LLAMA = small_config(kind="llama", dropout=0.0, kv_heads=4, feed_forward=24).model

# --- The serial twin --------------------------------------------------------------------------------------------------


def orthogonal(u: np.ndarray) -> np.ndarray:
    """Apply five iterations to the singular values of a matrix, by its decomposition."""
    left, values, right = np.linalg.svd(u, full_matrices=False)
    values = values / max(np.linalg.norm(u), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def by_matrix(name, weight, function):
    """`function` of each matrix of one layer's weight: an output's rows are heads, other weights' rows the residual
    stream."""
    if name.endswith("attention.out.kernel"):
        return function(weight.reshape(-1, weight.shape[-1])).reshape(weight.shape)
    if name.endswith(("qkv.kernel", "key_value.kernel")) or (name.endswith("up.kernel") and weight.ndim == 3):
        parts = [weight[:, i] for i in range(weight.shape[1])]
        return np.stack([function(part.reshape(len(part), -1)).reshape(part.shape) for part in parts], axis=1)
    return function(weight.reshape(len(weight), -1)).reshape(weight.shape)


def scaled(u):
    return 0.2 * math.sqrt(max(u.shape)) * orthogonal(u)


def serial_direction(name, weight, gradients, optimizer):
    """The direction of the last of several steps with the same weight, weight decay included."""
    decay = 0.0 if name.endswith(("bias", "scale")) else optimizer.weight_decay
    if name.startswith("blocks.") and name.endswith("kernel"):
        moment = np.zeros_like(weight)
        for gradient in gradients:
            moment = 0.95 * moment + (1 - 0.95) * gradient
        update = 0.95 * moment + (1 - 0.95) * gradient
        direction = np.stack([by_matrix(name, layer, scaled) for layer in update])
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


def test_iteration_in_bf16_is_near_and_keeps_zeros():
    matrices = np.random.default_rng(0).normal(size=(3, 16, 64)).astype(np.float32)
    matrices[1] = 0
    found = jax.jit(newton_schulz)(jnp.asarray(matrices, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    expected = np.stack([orthogonal(each) for each in matrices])
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=0.02)
    assert not np.asarray(found[1]).any()


# --- Meshes -----------------------------------------------------------------------------------------------------------


# Of all choices that go together, every two are in one row at least.
# fmt: off
CASES = [
    # model, pipe, chunks, data, tensor, ZeRO
    ("gpt",   1, 1, 1, 2, 0),
    ("gpt",   2, 1, 2, 4, 0),
    ("gpt",   2, 2, 2, 1, 1),
    ("gpt",   4, 1, 3, 1, 3),
    ("llama", 1, 1, 2, 2, 3),
    ("llama", 1, 1, 3, 4, 1),
    ("llama", 2, 2, 1, 1, 0),
    ("llama", 4, 1, 2, 2, 1),
    ("bert",  1, 1, 2, 1, 1),
    ("bert",  2, 2, 2, 4, 3),
    ("bert",  2, 2, 3, 2, 0),
    ("bert",  4, 1, 1, 4, 0),
]
# fmt: on
MODELS = {
    "gpt": small_config(layers=4).model,
    "llama": replace(LLAMA, layers=4, kv_heads=2),  # fewer than four ranks of `model`
    "bert": small_config(layers=4, kind="bert").model,
}


@pytest.mark.parametrize(("model", "pipe", "chunks", "data", "tensor", "zero"), one_in(5, CASES))
def test_direction_of_every_weight_equals_the_serial_twin(model, pipe, chunks, data, tensor, zero):
    groups = 2 if zero == 3 and data == 4 else 1
    mesh = MeshConfig(pipe, data, tensor, virtual_stages=chunks, zero=zero, replicate=groups)
    optimizer = OptimizerConfig(name="muon", weight_decay=0.1)
    config = replace(small_config(compute="fp64"), model=MODELS[model], mesh=mesh, optimizer=optimizer)
    with jax.enable_x64(True):
        layout = build_layout(config, make_mesh(mesh))
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
    """Return the directions of the last of some steps with the same weights."""
    transform = make_optimizer(config, layout)

    def steps(weights, gradients):
        state = transform.init(weights)
        for gradient in gradients:
            direction, state = transform.update(gradient, state, weights)
        return direction

    specs = (layout.specs, [layout.specs] * len(gradients))
    run = jax.shard_map(steps, mesh=make_mesh(config.mesh), in_specs=specs, out_specs=layout.specs, check_vma=True)
    return jax.jit(run, compiler_options=QUICKLY)(weights, gradients)


def test_fp16_step_iterates_in_float32():
    """These gradients would become 0 in fp16."""
    found = []
    for compute in ("fp16", "fp32"):
        config = replace(small_config(layers=1, compute=compute), optimizer=OptimizerConfig(name="muon"))
        weights = weights_of(config)
        gradients = jax.tree.map(lambda weight: weight * np.float32(1e-5), weights)
        found.append(_directions(config, build_layout(config, make_mesh(config.mesh)), weights, [gradients]))
    jax.tree.map(np.testing.assert_array_equal, *found)
