"""The card of a weight. What follows from it is compared with files of other software, with Muon's and LoRA's tests."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mjax.config.model import ModelConfig
from mjax.models.stack import stack
from mjax.parallel.weights import decays, dims_of, matrix_of, muon_matrices, parameter


def weight(shape, *dims, **marks):
    return parameter(
        jax.random.key(0), jax.nn.initializers.ones, shape, (None,) * len(shape), jnp.float32, dims, **marks
    )


@pytest.mark.parametrize("dims", [("in",), ("in", "outs"), ("in", "out", "out")], ids=str)
def test_card_that_does_not_fit_is_refused(dims):
    with pytest.raises(ValueError, match=r"a weight \(2, 3\) needs a spec and dims with a name each"):
        weight((2, 3), *dims)


@pytest.mark.parametrize(
    ("dims", "matrix", "decayed"),
    [
        (("in", "part", "out", "out"), ((-4,), (-2, -1)), True),
        (("expert", "in", "out"), ((-2,), (-1,)), True),
        (("token", "out"), None, True),
        (("part", "out", "out"), None, False),
        (("token",), None, False),
    ],
    ids=str,
)
def test_dims_say_matrix_and_decay(dims, matrix, decayed):
    [found] = dims_of(weight((2, 3, 4, 5)[: len(dims)], *dims))
    assert (matrix_of(found), decays(found)) == (matrix, decayed)


def test_weight_without_card_is_known_by_its_rank():
    """A vector of a layer stays one where layers are stacked."""

    class Layer(nnx.Module):
        def __init__(self, key):
            self.scale = nnx.Param(jnp.ones(3))
            self.kernel = nnx.Param(jnp.ones((3, 3)))
            self.up = weight((3, 4), "in", "out")
            self.router = weight((3, 4), "in", "out", muon=False)

    stacked = stack(jax.random.key(0), ModelConfig(layers=2), Layer)
    names = ["kernel", "router", "scale", "up"]
    assert dict(zip(names, map(decays, dims_of(stacked)), strict=True)) == {
        "kernel": True, "router": True, "scale": False, "up": True,
    }  # fmt: skip
    assert muon_matrices(stacked) == [None, None, None, ((-2,), (-1,))]
    assert [decays(dims) for dims in dims_of([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones((2, 2)))])] == [False, True]
