"""Proofs that a GPU computes correctly: attention with its gradients, steps against float64, fp16, bits.

On a CPU the same tests run at toy sizes, with XLA's attention. On a machine with a GPU:

    MJAX_TEST_PLATFORM=cuda,cpu python -m pytest tests/test_gpu.py
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config.kernels import FLASH_INTERPRETED
from mjax.data.sources import open_data
from mjax.models.parts.attention_kernels import attend
from mjax.models.parts.mask import AttentionMask
from mjax.parallel.mesh import make_mesh
from mjax.parallel.random import DropoutKey
from mjax.step.step import build_program
from tests.small import small_config

GPU = jax.default_backend() == "gpu"
KERNEL = "cudnn" if GPU else "xla_blocks"
FLASH = "flash" if GPU else FLASH_INTERPRETED
in_ci = pytest.mark.gpu if GPU else pytest.mark.ci
"""On a CPU these prove little that other tests do not."""


@pytest.mark.parametrize(
    ("kernel", "rate"), [(KERNEL, 0.0), (FLASH, 0.0), pytest.param("flash", 0.1, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize(
    ("size", "values", "positions"),
    [(64, 64, 1024), (96, 96, 1024), (128, 128, 2048), (128, 64, 1024), (192, 128, 1024)],
)
@in_ci
def test_attention_equals_xla_in_float32(size, values, positions, kernel, rate):
    if kernel == "flash" and size > 128:
        pytest.skip("flash has heads of up to 128")
    shape = (2, positions, 4) if GPU else (1, 64, 2)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((*shape, width)), jnp.bfloat16) for width in (size, size, values, values)]

    def outputs(kernel, dtype):
        q, k, v, upstream = (x.astype(dtype) for x in arrays)
        key = DropoutKey.make(0, jnp.int32(1), jnp.arange(shape[0])) if rate else None
        mask = AttentionMask(rate=rate, key=key)
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask, kernel), q, k, v)
        return out, *pullback(upstream)

    found = jax.jit(outputs, static_argnums=(0, 1))(kernel, jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(outputs, static_argnums=(0, 1))("xla", jnp.float32)
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)


def config_of(compute, recompute="none", **precision):
    sizes = {"hidden": 256, "heads": 4, "sequence": 128, "vocabulary": 1000} if GPU else {"layers": 1}
    attention = KERNEL if compute in ("bf16", "fp16") else "xla"
    config = small_config(compute=compute, recompute=recompute, dropout=0.0, attention=attention, **sizes)
    return replace(config, precision=replace(config.precision, **precision))


def _with_values(x, values):
    return jax.device_put(jnp.asarray(values, x.dtype), x.sharding)


def weights_of_float32(device):
    """The initial weights of every type but float64, which draws others."""
    config = config_of("fp32")
    with jax.default_device(device), jax.enable_x64(False):
        model = build_program(config, make_mesh(config.mesh, [device])).initialize().model
        return jax.tree.map(np.asarray, model)


def steps_of(config, count, device):
    """Metrics of the first steps, and the weights after them; in every type from the same weights."""
    drawn = open_data(replace(config, data=replace(config.data, mock=True))).training
    with jax.default_device(device), jax.enable_x64(config.precision.compute == "fp64"):
        program = build_program(config, make_mesh(config.mesh, [device]))
        state, metrics = program.initialize(), []
        if config.precision.compute == "fp64":
            state = replace(state, model=jax.tree.map(_with_values, state.model, weights_of_float32(device)))
        for index in range(count):
            state, found = program.train_step(state, program.put_on_devices(drawn.batch_at(index)))
            metrics.append(jax.device_get(found))
        return metrics, [np.asarray(x) for x in jax.tree.leaves(state.model)]


@pytest.mark.parametrize(
    ("compute", "recompute", "tolerance"),
    [("bf16", "none", 2e-2), ("fp16", "selective", 4e-3), ("fp32", "full", 1e-3)],
)
@in_ci
def test_two_steps_equal_float64_on_cpu(compute, recompute, tolerance):
    scale = {"initial_loss_scale": 2.0**10} if compute == "fp16" else {}
    found, _ = steps_of(config_of(compute, recompute, **scale), 2, jax.devices()[0])
    expected, _ = steps_of(config_of("fp64"), 2, jax.devices("cpu")[0])
    for a, b in zip(found, expected, strict=True):
        assert float(a.loss) == pytest.approx(float(b.loss), rel=tolerance)
        assert float(a.grad_norm) == pytest.approx(float(b.grad_norm), rel=5 * tolerance)


def test_fp16_trains_when_loss_scale_fits():
    """Until then it skips steps; the scale halves at every overflow but the first."""
    config = config_of("fp16", initial_loss_scale=2.0**32)
    found, weights = steps_of(config, 30, jax.devices()[0])
    skipped = [bool(metrics.skipped) for metrics in found]
    scales = [float(metrics.loss_scale) for metrics in found]
    assert skipped[0]
    assert 2 < sum(skipped) < 30
    assert scales == [2.0 ** (32 - max(0, sum(skipped[:step]) - 1)) for step in range(30)]
    assert all(np.isfinite(weight).all() for weight in weights)


@in_ci
def test_same_steps_give_same_bits():
    (_, one), (_, other) = (steps_of(config_of("bf16"), 3, jax.devices()[0]) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
