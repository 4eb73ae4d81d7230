"""Flash attention in Pallas, interpreted: equal to the kernel `xla` with the same dropout masks, on one device and on a
mesh. Compiled for an H100 where the CUDA wheels are installed."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.aot.roofline import ATTENTION, roofline
from mjax.cluster.hardware import gpu_named
from mjax.config import MeshConfig, load_config
from mjax.config.kernels import FLASH_INTERPRETED
from mjax.models.parts.attention_kernels import attend
from mjax.models.parts.mask import AttentionMask
from mjax.parallel.mesh import make_mesh
from mjax.parallel.random import DropoutKey
from mjax.planner.command import compile_step
from mjax.planner.memory import predict_memory
from mjax.planner.time import predict_time

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


def outputs(name, kernel, samples, documents, slopes, places, q, k, v, upstream):
    """Attention, and the gradients of queries, keys and values."""
    options = dict(OPTIONS[name])
    if "rate" in options:
        options["key"] = DropoutKey.make(7, jnp.int32(3), samples)
    if "documents" in options:
        options["documents"] = documents
    if "slopes" in options:
        options["slopes"] = slopes
    mask = AttentionMask(position_ids=places, **options)
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, mask, kernel), q, k, v)
    return out, *pullback(upstream)


def on_mesh(mesh, function, *arrays):
    rows, heads, whole = P("data"), P("model"), P("data", None, "model")
    specs = rows, rows, heads, P(), *[whole] * 4
    # JAX does not interpret a kernel where it checks types; compiled ahead of time, below, it does check them.
    run = jax.shard_map(function, mesh=make_mesh(mesh), in_specs=specs, out_specs=whole, check_vma=False)
    return jax.jit(run)(jnp.arange(2), DOCUMENTS, SLOPES, *arrays)


@pytest.mark.parametrize(
    ("name", "heads", "rank", "kernel"),
    [
        ("all", 2, None, FLASH_INTERPRETED),
        ("documents, both ways", 4, 0, FLASH_INTERPRETED),
        ("all", 2, 1, FLASH_INTERPRETED),
        *(
            pytest.param(name, 2, rank, FLASH_INTERPRETED, marks=pytest.mark.ci)
            for name in ("causal", "window of a block", "both ways", "ALiBi")
            for rank in (None, 0, 1)
        ),
        pytest.param("all", 2, 1, "xla", marks=pytest.mark.ci),
    ],
)
def test_flash_on_mesh_equals_xla_on_one_device(name, heads, rank, kernel):
    """Outputs and gradients, with the same dropout masks. With a rank of two: the queries of two of four chunks, and
    their part of the gradients of all keys, as with `context`."""
    random, chunk = np.random.default_rng(0), POSITIONS // 4
    values = 16 if name == "all" else SIZE  # narrower than keys
    shapes = ((4, SIZE), (heads, SIZE), (heads, values), (4, values))
    q, k, v, upstream = (jnp.asarray(random.standard_normal((2, POSITIONS, *shape)), jnp.float32) for shape in shapes)
    places, mine = None, jnp.arange(POSITIONS)
    if rank is not None:
        places = mine = jnp.concatenate([first * chunk + jnp.arange(chunk) for first in (rank, 3 - rank)])
    alone = jnp.zeros(POSITIONS, bool).at[mine].set(True)[None, :, None, None]
    of_all = None, q, k, v, jnp.where(alone, upstream, 0)
    out, to_q, to_k, to_v = on_mesh(MeshConfig(), partial(outputs, name, "xla"), *of_all)
    of_rank = places, q[:, mine], k, v, upstream[:, mine]
    found = on_mesh(MeshConfig(data=2, model=2), partial(outputs, name, kernel), *of_rank)
    for one, other in zip(found, (out[:, mine], to_q[:, mine], to_k, to_v), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)


def gpt_1b(attention):
    """Two layers on one GPU, written out, with dropout of the probabilities."""
    config = load_config("gpt_1b")
    model = replace(config.model, layers=2, hidden_dropout=0.0, attention_dropout=0.1, attention=attention)
    train = replace(config.train, global_batch=8, micro_batch=8, recompute="none", unroll="on")
    return replace(config, model=model, train=train, mesh=MeshConfig(), data=replace(config.data, mock=True))


def test_plan_counts_no_scores_of_flash():
    flash, xla = (gpt_1b(attention) for attention in ("flash", "xla"))
    assert predict_memory(flash).total < 0.8 * predict_memory(xla).total
    step = predict_time(flash, gpu_named("h100"))
    assert step.error is None
    assert step.caveats[-1] == "not measured: attention kernel flash (timed as cuDNN's)"


@pytest.mark.compiler
def test_flash_compiles_to_three_kernels_for_h100():
    config = gpt_1b("flash")
    found = compile_step(config, "h100", options={"xla_gpu_enable_triton_gemm": False})
    assert "1024,1024]" not in found.text
    table = roofline(found.text, gpu_named("h100"), 1)
    assert table.rows[ATTENTION].kernels == 2 * 3
    assert table.rows[ATTENTION].flops == 2 * 9 * 8 * 16 * 1024**2 * 96  # half of the nine products of each layer
    assert found.memory.total == pytest.approx(predict_memory(config).total, rel=0.05)
