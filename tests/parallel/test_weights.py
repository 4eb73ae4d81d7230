"""The card of a weight; exports, Muon and LoRA, which use it, have their tests elsewhere."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mjax
from mjax.config.model import ModelConfig
from mjax.models.stack import stack
from mjax.parallel.weights import has_weight_decay, make_param, matrix_dims, muon_matrices, read_dims


def weight(shape, *dims, **marks):
    return make_param(jax.random.key(0), jax.nn.initializers.ones, shape, dims, jnp.float32, **marks)


@pytest.mark.parametrize("dims", [("in",), ("in", "outs"), ("in", "out", "out")], ids=str)
def test_card_that_does_not_fit_is_refused(dims):
    with pytest.raises(ValueError, match=r"a weight \(2, 3\) needs dims with a name each"):
        weight((2, 3), *dims)


@pytest.mark.parametrize(
    ("dims", "matrix", "decayed", "spec"),
    [
        (("in", "part", "columns", "out"), ((-4,), (-2, -1)), True, P(None, None, "model", None)),
        (("expert", "rows", "out"), ((-2,), (-1,)), True, P("expert", "model", None)),
        (("token", "out"), None, True, P("model", None)),
        (("part", "columns", "out"), None, False, P(None, "model", None)),
        (("token",), None, False, P("model")),
    ],
    ids=str,
)
def test_dims_say_matrix_decay_and_spec(dims, matrix, decayed, spec):
    made = weight((2, 3, 4, 5)[: len(dims)], *dims)
    [found] = read_dims(made)
    assert (matrix_dims(found), has_weight_decay(found)) == (matrix, decayed)
    assert nnx.get_partition_spec(made).get_value() == spec


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
    assert dict(zip(names, map(has_weight_decay, read_dims(stacked)), strict=True)) == {
        "kernel": True, "router": True, "scale": False, "up": True,
    }  # fmt: skip
    assert muon_matrices(stacked) == [None, None, None, ((-2,), (-1,))]
    assert [has_weight_decay(dims) for dims in read_dims([nnx.Param(jnp.ones(2)), nnx.Param(jnp.ones((2, 2)))])] == [
        False,
        True,
    ]


FAMILIES = r"models/(gpt|bert|llama|mixture|gemma3|deepseek)/|models/huggingface/|interop/|config/pattern\.py"
"""Where weights may be named: folders of architectures, tables of other software's names, and where stacks are."""
NAMES = re.compile(
    r"^blocks$|\bblocks\.|(^|\.)(mlp|attention|embedding|head|final_norm)\.|\.(kernel|table|qkv|scale|bias)\b"
)


def strings(tree):
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_weight_is_named_outside_its_architecture():
    root = Path(mjax.__file__).parent
    named = [
        f"{name}:{line}: {text}"
        for file in root.rglob("*.py")
        if not re.match(FAMILIES, name := file.relative_to(root).as_posix())
        for line, text in strings(ast.parse(file.read_text()))
        if NAMES.search(text)
    ]
    assert not named, "\n".join(named)
