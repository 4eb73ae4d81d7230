"""Weights and their metadata.

`make_param` makes a weight of the whole model, and `dims` names each of its dims. From the names follow how the mesh
splits the weight, whether it belongs to stacked layers, its layout in other software's files, the matrices of Muon and
LoRA, and whether weight decay applies. So no code outside an architecture depends on a weight's name.

    weight of                       shape           dims
    q, k and v in one matmul        [h, 3, n, d]    in    part  columns  out
    attention's output              [n, d, h]       rows  in    out
    a gated MLP's gate and up       [h, 2, f]       in    part  columns
    those of experts                [E, h, 2, f]    expert  in  part  columns
    an embedding                    [v, h]          token  out
    learned positions               [s, h]          position  out
    a router                        [h, E]          in    class
    a bias, or the scale of a norm  [h]             out

`rows` are inputs and `columns` outputs that `model` splits, as it does tokens. The number of `class` outputs does not
depend on the width of the model. A stack of layers puts `layer` in front (`models/stack.py`).
"""

import jax
from flax import nnx
from jax import Array

from mjax.config import axes

LAYER, PART, EXPERT, TOKEN, POSITION = "layer", "part", "expert", "token", "position"
IN, ROWS, OUT, COLUMNS, CLASS = "in", "rows", "out", "columns", "class"
DIMS = frozenset({LAYER, PART, EXPERT, TOKEN, POSITION, IN, ROWS, OUT, COLUMNS, CLASS})
INPUTS, OUTPUTS = (IN, ROWS), (OUT, COLUMNS, CLASS)
SPLIT = {EXPERT: axes.EXPERT, TOKEN: axes.MODEL, ROWS: axes.MODEL, COLUMNS: axes.MODEL}
"""The mesh axis that splits a dim during the computation."""

Dims = tuple[str | None, ...]


def make_param(
    key: Array | None,
    initializer,
    shape: tuple[int, ...],
    dims: Dims,
    dtype,
    *,
    muon: bool = True,
    residual: bool = False,
    parts: tuple[str, ...] = (),
    float8: bool = False,
    keep_fp32: bool = False,
    grad_partial_over_model: bool = False,
) -> nnx.Param:
    """Make a weight of the whole model.

    Args:
      dims: the name of each dim, of `DIMS`.
      muon: whether Muon may train it, if it has inputs and outputs (`matrix_dims`).
      residual: whether the layer adds its result to the residual stream.
      parts: names of the parts, such as q, k and v; of one part without a dim, its name.
      float8, keep_fp32, grad_partial_over_model: as in `zero.Storage`.

    Raises:
      ValueError: the dims do not fit the shape.
    """
    if len(dims) != len(shape) or not DIMS.issuperset(dims):
        raise ValueError(f"a weight {shape} needs dims with a name each, of {', '.join(sorted(DIMS))}: {dims}")
    marks = {"muon": muon, "residual": residual, "parts": parts}
    marks |= {"float8": float8, "keep_fp32": keep_fp32, "grad_partial_over_model": grad_partial_over_model}
    spec = tuple(map(SPLIT.get, dims))
    return nnx.Param(initializer(key, shape, dtype), out_sharding=spec, eager_sharding=False, dims=dims, **marks)


def _weight_dims(weight: nnx.Param, ndim: int) -> Dims:
    """The dims of a weight with `ndim` dims; by default OUT for a vector, and None for each dim of another weight."""
    return weight.get_metadata().get("dims") or ((OUT,) if ndim == 1 else (None,) * ndim)


def add_layer_dim(stacked: nnx.Module) -> nnx.Module:
    """Put `layer` in front of the dims of all weights of a module that was made by `nnx.vmap`."""
    for _, weight in nnx.iter_graph(stacked):
        if isinstance(weight, nnx.Param):
            weight.set_metadata(dims=(LAYER, *_weight_dims(weight, weight.ndim - 1)))
    return stacked


def read_dims(weights) -> list[Dims]:
    """The names of the dims of each leaf of `weights`; None: unknown."""
    return [_weight_dims(weight, jax.tree.leaves(weight)[0].ndim) for weight in _parameters(weights)]


def are_stacked(weights) -> list[bool]:
    """True for each leaf of `weights` with a leading layer dim."""
    return [LAYER in dims for dims in read_dims(weights)]


def weight_metadata(weights, name: str) -> list:
    """This metadata entry of the `nnx.Param` of each leaf of `weights`, in the order of `jax.tree.leaves`; None without
    one."""
    return [weight.get_metadata().get(name) for weight in _parameters(weights)]


def leaf_name(path: tuple) -> str:
    """The dotted name of a tree path: 'blocks.mlp.up.kernel', without the `.value` of an NNX variable."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def _parameters(weights) -> list[nnx.Param]:
    leaves = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, nnx.Param))
    return [weight for weight in leaves if jax.tree.leaves(weight)]


# --- Matrices and weight decay, from dims -----------------------------------------------------------------------------


def matrix_dims(dims: Dims) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows and columns of the matrices of a weight, as dims counted from its end; None if it has none."""
    rows, columns = (tuple(i - len(dims) for i, dim in enumerate(dims) if dim in kind) for kind in (INPUTS, OUTPUTS))
    return (rows, columns) if rows and columns else None


def muon_matrices(weights) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
    """The `matrix_dims` of each leaf of `weights`, or None if Muon does not train it."""
    marks = zip(read_dims(weights), weight_metadata(weights, "muon"), strict=True)
    return [None if muon is False else matrix_dims(dims) for dims, muon in marks]


def has_weight_decay(dims: Dims) -> bool:
    """True if weight decay applies: to matrices and embeddings, not to biases and the scales of norms."""
    return None in dims or not ({*OUTPUTS}.isdisjoint(dims) or {*INPUTS, TOKEN, POSITION}.isdisjoint(dims))


# --- Trained and frozen weights ---------------------------------------------------------------------------------------


def is_frozen(weight: nnx.Param) -> bool:
    """True if a weight is not trained; then it is stored in the compute dtype."""
    return bool(weight.get_metadata().get("frozen"))


def partition_trainable(weights) -> tuple:
    """Split a tree of weights, or of one value for each weight, into the trained and the frozen part; each has None in
    place of the other's leaves. `combine` is the reverse."""
    leaves, structure = jax.tree.flatten(weights)
    marks = list(zip(leaves, map(bool, weight_metadata(weights, "frozen")), strict=True))
    return tuple(structure.unflatten(leaf if mark == part else None for leaf, mark in marks) for part in (False, True))


def trainable_only(weights):
    """The trained weights, with None in place of the frozen ones."""
    return partition_trainable(weights)[0]


def combine(trainable, frozen):
    """Merge the two trees of `partition_trainable`."""
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda leaf: leaf is None)
