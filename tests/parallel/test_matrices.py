"""Whole matrices from shards: who has which, and that a function of them sees each in order."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.parallel.matrices import Matrices
from mjax.parallel.mesh import make_mesh
from tests.small import QUICKLY

SHAPE = (6, 8, 3, 8, 4)  # layers, h, (q, k, v), heads, head size
ROWS, COLUMNS = (-4,), (-2, -1)


def test_ranks_divide_the_matrices_among_them():
    def of(spec, **mesh):
        return Matrices((24, 64, 3, 8, 8), P(*spec), ROWS, COLUMNS, MeshConfig(**mesh))

    whole = of((None,) * 5)
    assert (whole.size, whole.count, whole.each, whole.moves) == ((64, 64), 72, 72, ())
    split = of((None, None, None, ("model", "data"), None), data=2, model=4)
    assert (split.count, split.each, split.moves) == (72, 9, (("data", 2), ("model", 2)))
    stages = of(("pipe", None, None, "model", None), pipe=8, data=4, model=4)
    assert (stages.count, stages.each, stages.moves) == (9, 1, (("data", None), ("model", 2)))
    assert Matrices((64, 64), P(None, None), (-2,), (-1,), MeshConfig(data=4)).moves == ()  # one matrix for all


@pytest.mark.parametrize(
    ("spec", "mesh"),
    [
        ((None, None, None, ("model", "data"), None), {"data": 2, "model": 4}),
        ((None, "data", None, "model", None), {"data": 4, "model": 2}),
        (("pipe", None, None, "model", None), {"pipe": 3, "data": 2, "model": 2}),
        ((None, "pipe", None, ("model", "data"), None), {"pipe": 2, "data": 2, "model": 2}),
        (("pipe", None, None, None, None), {"pipe": 2, "data": 8}),
        (("pipe", None, None, None, None), {"pipe": 1, "data": 16}),
        (("pipe", None, None, None, None), {"pipe": 3, "data": 5}),  # as many ranks as matrices, and one without any
    ],
)
def test_a_function_of_whole_matrices_sees_each_of_them_in_order(spec, mesh):
    mesh = MeshConfig(**mesh)
    matrices = Matrices(SHAPE, P(*spec), ROWS, COLUMNS, mesh)
    given = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    places = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)

    def function(stack):
        assert stack.shape == (matrices.each, 8, 32)
        return stack.sum((1, 2), keepdims=True) * places

    sharded = jax.shard_map(
        lambda x: matrices.map(function, x), mesh=make_mesh(mesh), in_specs=P(*spec), out_specs=P(*spec)
    )
    found = jax.jit(sharded, compiler_options=QUICKLY)(given)
    expected = given.sum((1, 3, 4))[:, None, :, None, None] * places.reshape(8, 1, 8, 4)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
