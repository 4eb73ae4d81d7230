"""Grouped products against `lax.ragged_dot`, which computes with all rows and all matrices; the kernel `pallas`,
interpreted, against the kernel `xla`. Compiled for an H100 where the CUDA wheels are installed."""

import math
import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.parallel.grouped import INTERPRETED, assign_rows, grouped_matmul, max_tiles
from mjax.parallel.mesh import make_mesh
from mjax.planner.command import TARGETS, leave_out_compilation_cache

E, H, F, ROWS, ASSIGNMENTS = 5, 6, 10, 4, 29
loads = st.lists(st.integers(-1, E), min_size=ASSIGNMENTS, max_size=ASSIGNMENTS)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def drawn(*shape, seed=0, dtype=jnp.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def of_load(counts, assignments=ASSIGNMENTS):
    """Assignments in any order, with some that have no group."""
    which = np.repeat(np.arange(len(counts)), counts)
    none = np.resize([-1, len(counts)], assignments - len(which))
    return jnp.asarray(np.random.default_rng(1).permutation(np.concatenate([which, none])), jnp.int32)


def through_groups(which, rows, kernels, kernel="xla", tile=ROWS):
    """The product of each assignment's row with its group's matrix, in the order of the assignments; zeros without."""
    groups, place = assign_rows(which, kernels.shape[0], tile)
    shape = len(groups.of_tile) * tile, rows.shape[1]
    x = jnp.zeros_like(rows, shape=shape).at[place].set(rows, mode="drop")
    return grouped_matmul(x, kernels, groups, kernel).at[place].get(mode="fill", fill_value=0)


def by_ragged_dot(which, rows, kernels):
    groups = kernels.shape[0]
    key = jnp.where((which >= 0) & (which < groups), which, groups)
    order = jnp.argsort(key, stable=True)
    counts = jnp.zeros(groups + 1, jnp.int32).at[key].add(1)[:groups]
    y = lax.ragged_dot(rows[order], kernels, counts)
    y = jnp.where((key[order] < groups)[:, None], y, 0.0)
    return jnp.zeros_like(y).at[order].set(y)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(product, which, rows, kernels, upstream):
    y, pullback = jax.vjp(partial(product, which), rows, kernels)
    return y, *pullback(upstream)


IN_TILES = {tile: partial(through_groups, tile=tile) for tile in (1, ROWS, 64)}
IN_PALLAS = {tile: partial(through_groups, kernel=INTERPRETED, tile=tile) for tile in (16, 64)}


# --- Groups -----------------------------------------------------------------------------------------------------------


def distributions(assignments, groups, most):
    """Draw distributions of at most so many assignments over groups; each group gets at most `most`."""
    if not groups:
        yield ()
        return
    for here in range(min(assignments, most) + 1):
        yield from ((here, *rest) for rest in distributions(assignments - here, groups - 1, most))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_number_of_tiles_is_what_distributions_need(rows):
    """Without a limit for a group exactly, with one at least."""
    for assignments, max_group_rows in product((1, 2, 7, 12), (None, 1, 3, 6)):
        counts = distributions(assignments, 3, max_group_rows or assignments)
        needed = max(sum(-(-n // rows) for n in each) for each in counts)
        allowed = max_tiles(assignments, 3, rows, max_group_rows)
        assert needed == allowed if max_group_rows is None else needed <= allowed


# --- The product and its gradients ------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(loads, st.sampled_from(list(IN_TILES)))
@example(of_load([7, 3, 12, 1, 6]).tolist(), ROWS)
@example(of_load([0, 14, 0, 8, 7]).tolist(), 64)
@example(of_load([0, 0, 29, 0, 0]).tolist(), ROWS)
@example(of_load([4, 8, 4, 0, 12]).tolist(), ROWS)
@example(of_load([0, 0, 0, 0, 0]).tolist(), 1)
def test_product_and_gradients_equal_ragged_dot(which, tile):
    arrays = drawn(ASSIGNMENTS, H), drawn(E, H, F, seed=1), drawn(ASSIGNMENTS, F, seed=2)
    which = jnp.asarray(which, jnp.int32)
    expected = value_and_gradients(by_ragged_dot, which, *arrays)
    for ours, theirs in zip(value_and_gradients(IN_TILES[tile], which, *arrays), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("kernel", "tile"), [("xla", ROWS), (INTERPRETED, 16)])
def test_sums_are_in_float32(kernel, tile):
    """And rounded once: in bf16 a sum of steps of 16 rows ends at 4096."""
    rows, product = 4800, partial(through_groups, kernel=kernel, tile=tile)
    with jax.enable_x64(False):
        arrays = [jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 16), (1, 16, 32), (rows, 32))]
        _, _, to_kernels = value_and_gradients(product, jnp.zeros(rows, jnp.int32), *arrays)
    assert to_kernels.dtype == jnp.bfloat16
    np.testing.assert_array_equal(to_kernels, jnp.asarray(rows, jnp.bfloat16))


@pytest.mark.parametrize(("kernel", "tile", "h", "f"), [("xla", ROWS, H, F), (INTERPRETED, 16, 48, 32)])
def test_unused_tiles_are_zero(kernel, tile, h, f):
    """Without being computed: their rows are NaN."""
    which = of_load([0, 0, 29, 0, 0])
    groups, _ = assign_rows(which, E, tile)
    unused = (np.arange(len(groups.of_tile) * tile) >= int(groups.used) * tile)[:, None]
    assert unused.any()
    with jax.enable_x64(False):
        x, upstream = (jnp.where(unused, jnp.nan, drawn(len(unused), width, dtype=jnp.float32)) for width in (h, f))
        kernels = drawn(E, h, f, dtype=jnp.float32)
        y, to_x, to_kernels = value_and_gradients(
            lambda groups, x, kernels: grouped_matmul(x, kernels, groups, kernel), groups, x, kernels, upstream
        )
    for array in (y, to_x):
        assert (array[unused[:, 0]] == 0).all()
        assert jnp.isfinite(array).all()
    assert jnp.isfinite(to_kernels).all()


# --- The kernel `pallas` ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "h", "f", "tile"), [([7, 3, 12, 1, 6], 96, 256, 64), ([0, 14, 0, 8, 7], 256, 48, 16)])
def test_interpreted_pallas_equals_ragged_dot(load, h, f, tile):
    which = of_load([5 * count for count in load], 5 * ASSIGNMENTS)
    with jax.enable_x64(False):  # as on every GPU; with it a position is an int64
        shapes = (len(which), h), (E, h, f), (len(which), f)
        arrays = [drawn(*shape, seed=seed, dtype=jnp.float32) for seed, shape in enumerate(shapes)]
        found, expected = (value_and_gradients(way, which, *arrays) for way in (IN_PALLAS[tile], by_ragged_dot))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.compiler
def test_pallas_compiles_to_three_kernels_for_h100():
    """And to no array of all rows for all groups."""
    from jax.experimental.topologies import get_topology_desc

    assignments, groups, h, f, dtype = 4096, 16, 512, 96, jnp.bfloat16

    def outputs(which, rows, kernels, upstream):
        y, pullback = jax.vjp(lambda *x: through_groups(which, *x, "pallas", 128), rows, kernels)
        return y, *pullback(upstream)

    sheet = (TARGETS / "h100.txtpb").read_text()
    devices = get_topology_desc(platform="cuda", topology="1x1x2", target_config=sheet).devices
    mesh, everywhere, split = make_mesh(MeshConfig(data=2), devices), P(), P("data")
    specs = split, split, everywhere, split
    run = jax.jit(jax.shard_map(outputs, mesh=mesh, in_specs=specs, out_specs=(split, split, everywhere)))
    shapes = (2 * assignments,), (2 * assignments, h), (groups, h, f), (2 * assignments, f)
    leave_out_compilation_cache()
    with jax.enable_x64(False):
        arrays = [
            jax.ShapeDtypeStruct(shape, kind, sharding=jax.sharding.NamedSharding(mesh, spec))
            for shape, kind, spec in zip(shapes, (jnp.int32, dtype, dtype, dtype), specs, strict=True)
        ]
        text = run.lower(*arrays).compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert "ragged" not in text
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", text)]
    largest = max(max_tiles(assignments, groups, 128) * 128 * max(h, f), groups * h * f)
    assert max(sizes) == largest < assignments * groups * min(h, f)
