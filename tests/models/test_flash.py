"""Flash attention in Pallas, interpreted: equal to the kernel `xla` with the same dropout masks, on one device and on a
mesh. Compiled for an H100 where the CUDA wheels are installed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig, load_config
from mjax.hardware import gpu_named
from mjax.models.attention_kernels import FLASH_INTERPRETED, attend
from mjax.parallel.mesh import make_mesh
from mjax.parallel.random import DropoutKey
from mjax.planner.compile import compile_step
from mjax.planner.memory import predict_memory
from mjax.planner.roofline import ATTENTION, roofline
from mjax.planner.time import predict_time
from tests.compiler import needs_compiler

POSITIONS, SIZE = 512, 24  # eight blocks; Triton's tiles are padded to 32
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 4, (2, POSITIONS)), axis=1).astype(np.int32)
SLOPES = np.float32([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "causal": {},
    "window of a block": {"window": 64},
    "both ways": {"causal": False, "rate": 0.1},
    "documents, both ways": {"causal": False, "documents": DOCUMENTS},
    "ALiBi": {"slopes": SLOPES},
    "all": {"window": 70, "rate": 0.3, "documents": DOCUMENTS, "slopes": SLOPES},
}


def on_one_device(function, *arrays):
    mesh = make_mesh(MeshConfig())
    # JAX does not interpret a kernel where it checks types; compiled ahead of time, below, it does check them.
    run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(run)(*arrays)


def outputs(options, kernel, q, k, v, upstream, **places):
    """Attention, and the gradients of queries, keys and values."""
    key = DropoutKey.of(7, jnp.int32(3), jnp.arange(2)) if "rate" in options else None
    attended = partial(attend, kernel=kernel, key=key, **options, **places)
    out, pullback = jax.vjp(lambda q, k, v: attended(q, k, v), q, k, v)
    return out, *pullback(upstream)


def arrays(heads):
    random = np.random.default_rng(0)
    q, upstream = (jnp.asarray(random.standard_normal((2, POSITIONS, 4, SIZE)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(random.standard_normal((2, POSITIONS, heads, SIZE)), jnp.float32) for _ in range(2))
    return q, k, v, upstream


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("causal", 4),
        ("all", 2),
        ("documents, both ways", 2),
        pytest.param("window of a block", 4, marks=pytest.mark.ci),
        pytest.param("both ways", 2, marks=pytest.mark.ci),
        pytest.param("ALiBi", 2, marks=pytest.mark.ci),
    ],
)
def test_flash_equals_xla(name, heads):
    """Outputs and gradients, with the same dropout masks; of grouped heads too."""
    given = arrays(heads)
    found, expected = (
        on_one_device(partial(outputs, OPTIONS[name], kernel), *given) for kernel in (FLASH_INTERPRETED, "xla")
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("name", "rank", "kernel"),
    [
        ("all", 1, FLASH_INTERPRETED),
        ("causal", 0, FLASH_INTERPRETED),
        pytest.param("all", 0, FLASH_INTERPRETED, marks=pytest.mark.ci),
        pytest.param("both ways", 0, FLASH_INTERPRETED, marks=pytest.mark.ci),
        pytest.param("all", 1, "xla", marks=pytest.mark.ci),
    ],
)
def test_queries_at_places_equal_those_of_all(name, rank, kernel):
    """Balanced over two ranks, each has two of four chunks: outputs, and its part of the gradients of all keys."""
    (q, k, v, upstream), chunk = arrays(2), POSITIONS // 4
    places = jnp.concatenate([first * chunk + jnp.arange(chunk) for first in (rank, 3 - rank)])
    alone = jnp.zeros(POSITIONS, bool).at[places].set(True)[None, :, None, None]
    expected = on_one_device(partial(outputs, OPTIONS[name], "xla"), q, k, v, jnp.where(alone, upstream, 0))
    of_rank = partial(outputs, OPTIONS[name], kernel, places=places)
    found = on_one_device(of_rank, q[:, places], k, v, upstream[:, places])
    out, to_q, to_k, to_v = expected
    for one, other in zip(found, (out[:, places], to_q[:, places], to_k, to_v), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)


def test_flash_on_mesh_has_masks_of_one_device():
    random = np.random.default_rng(0)
    given = [jnp.asarray(random.standard_normal((4, 64, 4, 32)), jnp.float32) for _ in range(4)]

    def on(data, model):
        def both(samples, q, k, v, upstream):
            key = DropoutKey.of(7, jnp.int32(3), samples)
            out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, FLASH_INTERPRETED, 0.2, key), q, k, v)
            return out, *pullback(upstream)

        specs, mesh = P("data", None, "model"), make_mesh(MeshConfig(1, data, model))
        run = jax.shard_map(both, mesh=mesh, in_specs=(P("data"), *[specs] * 4), out_specs=specs, check_vma=False)
        return jax.jit(run)(jnp.arange(4), *given)

    for found, expected in zip(on(2, 2), on(1, 1), strict=True):
        np.testing.assert_array_equal(found, expected)


def gpt_1b(attention):
    """Two layers, written out, with dropout of the probabilities."""
    config = load_config("gpt_1b")
    model = replace(config.model, layers=2, hidden_dropout=0.0, attention_dropout=0.1, attention=attention)
    train = replace(config.train, global_batch=8, micro_batch=8, recompute="none", unroll="on")
    return replace(config, model=model, train=train, data=replace(config.data, mock=True))


def test_plan_counts_no_scores_of_flash():
    flash, xla = (gpt_1b(attention) for attention in ("flash", "xla"))
    assert predict_memory(flash).total < 0.8 * predict_memory(xla).total
    step = predict_time(flash, gpu_named("h100"))
    assert step.error is None
    assert step.caveats[-1] == "nobody has timed the attention kernel flash, which counts as cuDNN's here"


@needs_compiler
def test_flash_compiles_to_three_kernels_for_h100():
    """Of a layer, without scores."""
    config = gpt_1b("flash")
    found = compile_step(config, "h100", options={"xla_gpu_enable_triton_gemm": False})
    assert "1024,1024]" not in found.text
    table = roofline(found.text, gpu_named("h100"), 1)
    assert table.rows[ATTENTION].kernels == 2 * 3
    assert table.rows[ATTENTION].flops == 2 * 9 * 8 * 16 * 1024**2 * 96  # half of the nine products of each layer
    assert found.memory.total == pytest.approx(predict_memory(config).total, rel=0.05)
