"""Whole matrices from shards: who has which, and that a function of them sees each in order."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig
from mjax.parallel.mesh import make_mesh
from mjax.parallel.muon_resharding import MatrixLayout
from tests.small import QUICKLY

SHAPE = (6, 8, 3, 8, 4)  # layers, h, (q, k, v), heads, head size
ROWS, COLUMNS = (-4,), (-2, -1)


@pytest.mark.parametrize(
    ("spec", "mesh", "each"),
    [
        ((None, "pipe", None, ("model", "data"), None), {"pipe": 2, "data": 2, "model": 2}, 3),
        (("pipe", None, None, None, None), {"pipe": 3, "data": 5}, 2),  # 6 matrices: the last rank has none
    ],
)
def test_function_sees_every_matrix_in_order(spec, mesh, each):
    """A rank has `each` of the 18 matrices of three stacks, and no other rank has the same."""
    mesh = MeshConfig(**mesh)
    matrices = MatrixLayout(SHAPE, P(*spec), ROWS, COLUMNS, mesh)
    given = np.random.default_rng(0).integers(-8, 8, SHAPE).astype(np.float32)  # sums are exact in any order
    places = np.arange(8 * 32, dtype=np.float32).reshape(8, 32)

    def function(stack):
        assert stack.shape == (each, 8, 32)
        return stack.sum((1, 2), keepdims=True) * places

    sharded = jax.shard_map(
        lambda x: matrices.map(function, x), mesh=make_mesh(mesh), in_specs=P(*spec), out_specs=P(*spec)
    )
    found = jax.jit(sharded, compiler_options=QUICKLY)(given)
    expected = given.sum((1, 3, 4))[:, None, :, None, None] * places.reshape(8, 1, 8, 4)
    np.testing.assert_array_equal(found, expected)
