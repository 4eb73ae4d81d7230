"""Linear layers in float8 against an emulation in NumPy, with float8 from ml_dtypes."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.config.axes import MODEL
from mjax.parallel import float8
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mjax.parallel.mesh import make_mesh
from mjax.parallel.token_layout import TokenLayout
from tests.parallel.on_ranks import on_ranks

NARROW = {float8.FORWARD: ml_dtypes.float8_e4m3fn, float8.BACKWARD: ml_dtypes.float8_e5m2}
E4M3, E5M2 = float8.FORWARD, float8.BACKWARD


def scale(x, dtype):
    """The smallest power of two for which nothing overflows; 1 for zeros."""
    ratio = float(np.abs(x).max()) / float(ml_dtypes.finfo(NARROW[dtype]).max)
    return 2.0 ** np.ceil(np.log2(ratio)) if ratio else 1.0


def on_grid(x, dtype):
    x = np.asarray(x, np.float64)
    return (x / scale(x, dtype)).astype(NARROW[dtype]).astype(np.float64) * scale(x, dtype)


# --- Arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float32])
def test_values_and_scale_are_those_of_numpy(dtype, kind):
    """Bit for bit; and what is on the grid already stays."""
    random, rounded = np.random.default_rng(0), jax.jit(partial(float8.quantize, dtype=dtype))
    spread = random.standard_normal(2048) * 2.0 ** random.integers(-20, 1, 2048)  # some of them underflow
    for largest in (448.0, 450.0, 224.0, 57344.0, 1.0, 3e-5, 7e4, 0.0):
        x = jnp.asarray(spread / np.abs(spread).max() * largest, kind)
        found = rounded(x)
        exact = np.asarray(x).astype(np.float64)
        expected = (exact / scale(exact, dtype)).astype(np.float32).astype(NARROW[dtype])
        assert float(found.scale) == scale(exact, dtype)
        np.testing.assert_array_equal(np.asarray(found.bits), expected.view(np.uint8))
        np.testing.assert_array_equal(np.asarray(found.values), expected)
        restored = float8.dequantize(found, kind)
        np.testing.assert_array_equal(np.asarray(restored).astype(np.float64), on_grid(exact, dtype))
        for again in (restored, restored * 2.0**-9):  # its largest may be the limit of the dtype, or just half of it
            np.testing.assert_array_equal(float8.dequantize(rounded(again), kind), again)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_non_finite_values_stay_visible(dtype):
    for broken in (np.nan, np.inf, -np.inf):
        x = jnp.ones((8, 8), jnp.bfloat16).at[3, 4].set(broken)
        assert not np.isfinite(np.float32(float8.fake_quantize(x, dtype)[3, 4]))


def test_checkpoint_keeps_values_above_ieee_limit():
    """`jax.checkpoint` rounds what it keeps, as bits, to an IEEE type of the same dtype."""
    x = jnp.linspace(-448.0, 448.0, 64)

    def total(x):
        found = float8.quantize(x, E4M3)
        return jnp.sin(float8.dequantize(found, jnp.float32) * x).sum()

    everything = jax.checkpoint(total, policy=jax.checkpoint_policies.everything_saveable)
    assert np.isfinite(jax.jit(jax.grad(everything))(x)).all()


def test_ranks_with_parts_agree_on_scale():
    x = jnp.asarray(np.random.default_rng(5).standard_normal((8, 16)) * 4.0 ** np.arange(8)[:, None], jnp.float32)
    mesh, part = make_mesh(MeshConfig(data=2, model=4)), P(("data", "model"))
    run = jax.shard_map(lambda x: float8.quantize(x, E4M3).values, mesh=mesh, in_specs=part, out_specs=part)
    found = jax.jit(run)(x)
    np.testing.assert_array_equal(found, float8.quantize(x, E4M3).values)


# --- Layers -----------------------------------------------------------------------------------------------------------


LAYERS = {
    "column": ColumnParallelLinear(jax.random.key(0), 48, (64,), 0, 1.0, jnp.bfloat16),
    "row": RowParallelLinear(jax.random.key(0), (48,), 64, 1.0, jnp.bfloat16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_bf16_layer_is_bit_equal_to_emulation(name):
    """Integers of 7 bits have exact sums in float32, in whatever order they are added, and are rounded once."""
    layer, random, tokens = LAYERS[name], np.random.default_rng(4), TokenLayout(4, 8, float8=True)
    shapes = (32, 48), (48, 64), (32, 64)
    x, kernel, to_y = (random.integers(-127, 128, shape).astype(np.float64) for shape in shapes)
    layer.kernel[...], layer.bias[...] = jnp.asarray(kernel, jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)

    def forward(layer, x, to_y):
        y, back = jax.vjp(lambda layer, x: layer(x, tokens), layer, x)
        return y, *back(to_y)

    specs, split = nnx.get_partition_spec(layer), P(None, MODEL)
    of_x, of_y = (P(), split) if name == "column" else (split, P())
    program = on_ranks(1, forward, (specs, of_x, of_y), (of_y, specs, of_x))
    y, to_layer, to_x = program(layer, jnp.asarray(x, jnp.bfloat16), jnp.asarray(to_y, jnp.bfloat16))
    narrow = on_grid(to_y, E5M2)
    for found, expected in (
        (y, on_grid(x, E4M3) @ on_grid(kernel, E4M3)),
        (to_x, narrow @ on_grid(kernel, E4M3).T),
        (to_layer.kernel[...], on_grid(x, E4M3).T @ narrow),
        (to_layer.bias[...], to_y.sum(0)),
    ):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(found), expected.astype(ml_dtypes.bfloat16))
