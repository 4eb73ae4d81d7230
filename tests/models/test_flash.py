"""Flash attention in Pallas, interpreted: equal to the kernel `xla` with the same dropout masks, on one device and on a
mesh. Compiled for an H100 where the CUDA wheels are installed."""

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig, load_config
from mjax.errors import UsageError
from mjax.hardware import gpu_named
from mjax.models.attention_kernels import FLASH_INTERPRETED, attend
from mjax.models.kernels import choose_kernel
from mjax.parallel.mesh import make_mesh
from mjax.parallel.random import DropoutKey
from mjax.planner.compile import compile_step
from mjax.planner.memory import predict_memory
from mjax.planner.roofline import ATTENTION, roofline
from mjax.planner.time import predict_time
from tests.compiler import needs_compiler
from tests.planner.test_waste import gpt_1b
from tests.products import diagonal, seldom

POSITIONS = 192  # three blocks
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 4, (2, POSITIONS)), axis=1).astype(np.int32)
OPTIONS = {
    "causal": {},
    "dropout": {"rate": 0.1},
    "both ways": {"causal": False, "rate": 0.1},
    "a window that ends in a block": {"window": 70, "rate": 0.3},
    "a window of a block": {"window": 64},
    "documents": {"documents": DOCUMENTS, "rate": 0.2},
    "documents, both ways": {"documents": DOCUMENTS, "causal": False},
    "ALiBi": {"slopes": np.float32([0.5, 0.25, 0.125, 0.0625]), "rate": 0.1},
}


@pytest.mark.parametrize(("name", "heads"), seldom(product(OPTIONS, (4, 2)), diagonal(2, OPTIONS, (4, 2)), some=()))
def test_output_and_gradients_are_those_of_xla_with_the_same_masks(name, heads):
    options = OPTIONS[name]
    rng = np.random.default_rng(0)
    q, upstream = (jnp.asarray(rng.standard_normal((2, POSITIONS, 4, 24)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, POSITIONS, heads, 24)), jnp.float32) for _ in range(2))

    def outputs(kernel, q, k, v, upstream):
        key = DropoutKey.of(7, jnp.int32(3), jnp.arange(2)) if "rate" in options else None
        out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, kernel, key=key, **options), q, k, v)
        return out, *pullback(upstream)

    def on_one_device(kernel):
        mesh = make_mesh(MeshConfig())
        run = jax.shard_map(partial(outputs, kernel), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(run)(q, k, v, upstream)

    for found, expected in zip(on_one_device(FLASH_INTERPRETED), on_one_device("xla"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("name", "rank", "kernel"),
    [
        pytest.param(name, rank, kernel, marks=() if i % 4 == rank and kernel != "xla" else pytest.mark.ci)
        for i, name in enumerate(OPTIONS)
        for rank in (0, 1)
        for kernel in ([FLASH_INTERPRETED, "xla"] if i < 3 else [FLASH_INTERPRETED])
    ],
)
def test_queries_of_some_positions_get_what_they_get_among_all(name, rank, kernel):
    """Balanced over two ranks, each has two of four chunks: outputs, and its part of the gradients of all keys."""
    options, positions, chunk = OPTIONS[name], 512, 128
    if "documents" in options:
        documents = np.sort(np.random.default_rng(1).integers(0, 4, (2, positions)), axis=1).astype(np.int32)
        options = {**options, "documents": documents}
    rng = np.random.default_rng(0)
    q, upstream = (jnp.asarray(rng.standard_normal((2, positions, 4, 24)), jnp.float32) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, positions, 2, 24)), jnp.float32) for _ in range(2))
    places = jnp.concatenate([first * chunk + jnp.arange(chunk) for first in (rank, 3 - rank)])

    def outputs(q, k, v, upstream, **which):
        key = DropoutKey.of(7, jnp.int32(3), jnp.arange(2)) if "rate" in options else None
        attended = partial(attend, kernel="xla" if not which else kernel, key=key, **options, **which)
        out, pullback = jax.vjp(lambda q, k, v: attended(q, k, v), q, k, v)
        return out, *pullback(upstream)

    def run(function, *arrays):
        mesh = make_mesh(MeshConfig())
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))(*arrays)

    alone = jnp.zeros(positions, bool).at[places].set(True)[None, :, None, None]
    out, to_q, to_k, to_v = run(outputs, q, k, v, jnp.where(alone, upstream, 0))
    found = run(partial(outputs, places=places), q[:, places], k, v, upstream[:, places])
    for one, expected in zip(found, (out[:, places], to_q[:, places], to_k, to_v), strict=True):
        np.testing.assert_allclose(one, expected, rtol=0, atol=5e-6)


def test_on_a_mesh_it_has_the_masks_of_one_device():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal((4, 64, 4, 32)), jnp.float32) for _ in range(4)]

    def on(data, model):
        def outputs(samples, q, k, v, upstream):
            key = DropoutKey.of(7, jnp.int32(3), samples)
            out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, FLASH_INTERPRETED, 0.2, key), q, k, v)
            return out, *pullback(upstream)

        # JAX does not interpret a kernel where it checks types; compiled ahead of time, below, it does check them.
        specs, mesh = P("data", None, "model"), make_mesh(MeshConfig(1, data, model))
        run = jax.shard_map(outputs, mesh=mesh, in_specs=(P("data"), *[specs] * 4), out_specs=specs, check_vma=False)
        return jax.jit(run)(jnp.arange(4), *arrays)

    for found, expected in zip(on(2, 2), on(1, 1), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "platform", "compute", "capability", "why"),
    [
        ({}, "cpu", "bf16", (9, 0), "it needs an NVIDIA GPU and this process runs on cpu"),
        ({}, "gpu", "bf16", (7, 5), "it needs compute capability 8.0 or more, as an A100 has, and the GPU has 7.5"),
        ({}, "gpu", "fp32", (9, 0), "it computes in bf16 or fp16 and --precision.compute is fp32"),
        ({"sequence": 1000}, "gpu", "bf16", (9, 0), "it needs a multiple of 64 positions and --model.sequence is 1000"),
        ({"heads": 8}, "gpu", "bf16", (9, 0), "it needs a head size from 16 to 128 and hidden / heads is 192"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_way_out(changes, platform, compute, capability, why):
    model = replace(load_config("gpt_1b").model, attention="flash", **changes)
    with pytest.raises(UsageError) as refusal:
        choose_kernel(model, compute, platform, capability=capability)
    found = f"--model.attention flash cannot be used: {why}; change that, or use --model.attention auto"
    assert str(refusal.value) == found


def test_auto_does_not_choose_what_no_gpu_has_run():
    model = load_config("gpt_1b").model
    assert model.attention_dropout > 0
    assert choose_kernel(model, "bf16", "gpu")[0] == "xla"
    assert choose_kernel(model.without_dropout(), "bf16", "gpu")[0] == "cudnn"


def _gpt_1b(attention):
    config, _ = gpt_1b(2, "on", micro_batch=8)
    return replace(config, model=replace(config.model, attention_dropout=0.1, attention=attention))


def test_the_plan_counts_no_scores_and_says_that_nobody_has_timed_it():
    flash, xla = (_gpt_1b(attention) for attention in ("flash", "xla"))
    assert predict_memory(flash).total < 0.8 * predict_memory(xla).total
    step = predict_time(flash, gpu_named("h100"))
    assert step.error is None
    assert step.caveats[-1] == "nobody has timed the attention kernel flash, which counts as cuDNN's here"


@needs_compiler
def test_compiled_for_an_h100_it_has_three_kernels_a_layer_and_no_scores():
    config = _gpt_1b("flash")
    found = compile_step(config, "h100", options={"xla_gpu_enable_triton_gemm": False})
    assert "1024,1024]" not in found.text
    table = roofline(found.text, gpu_named("h100"), 1)
    assert table.rows[ATTENTION].kernels == 2 * 3
    assert table.rows[ATTENTION].flops == 2 * 9 * 8 * 16 * 1024**2 * 96  # half of the nine products of each layer
    assert found.memory.total == pytest.approx(predict_memory(config).total, rel=0.05)
