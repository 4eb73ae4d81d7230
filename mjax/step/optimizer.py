"""AdamW, Muon for the matrices of a model, and the exact global norm of gradients that are split over devices."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mjax.config import Config, MeshConfig, OptimizerConfig
from mjax.config.axes import PIPE
from mjax.config.model import ModelConfig
from mjax.config.pattern import find_stack
from mjax.models.block import Block
from mjax.parallel import named_scopes
from mjax.parallel.mappings import psum, rank, varying_axes
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.weights import has_weight_decay, leaf_name, read_dims
from mjax.parallel.zero import layer_rows, num_layer_dims
from mjax.step.layout import Layout
from mjax.step.muon import ITERATE_IN, collect_matrices, scale_by_muon
from mjax.step.precision import COMPUTE_TYPES

MAX_MAGNITUDE = 1e20  # far above any weight or first moment of a sound run


def make_optimizer(config: Config, layout: Layout) -> optax.GradientTransformation:
    """The optimizer of a run without the learning rate, which the step multiplies in from the schedule."""
    if config.optimizer.name == "adamw":
        return adamw(config.optimizer)
    return muon(config.optimizer, COMPUTE_TYPES[ITERATE_IN[config.precision.compute]], layout, config.mesh)


def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) without the learning rate."""
    return optax.chain(scale_by_adam(config.beta1, config.beta2, config.epsilon), _weight_decay(config))


def scale_by_adam(beta1: float, beta2: float, epsilon: float) -> optax.GradientTransformation:
    """optax's `scale_by_adam`, except for the bias correction 1 − βᵗ: in float32 that difference is 5e-6 off at
    β₂ = 0.999 and t = 1, and here it is exact up to rounding."""

    def update(gradients, state, _=None):
        first = optax.tree.update_moment(gradients, state.mu, beta1, 1)
        second = optax.tree.update_moment_per_elem_norm(gradients, state.nu, beta2, 2)
        count = optax.safe_increment(state.count)

        def bias_correction(beta, dtype):  # 1 − βᵗ
            return -jnp.expm1(count.astype(dtype) * math.log(beta)) if beta else jnp.ones((), dtype)

        def direction(m, v):
            scale = bias_correction(beta1, m.dtype)
            return m / scale / (jnp.sqrt(v / bias_correction(beta2, v.dtype)) + epsilon)

        return jax.tree.map(direction, first, second), optax.ScaleByAdamState(count, first, second)

    return optax.GradientTransformation(optax.scale_by_adam(beta1, beta2, epsilon).init, update)


def muon(config: OptimizerConfig, dtype, layout: Layout, mesh: MeshConfig) -> optax.GradientTransformation:
    """Muon for the matrices of a model and AdamW for all other weights (`muon.py`), without the learning rate.

    Args:
      dtype: of Muon's iteration.
      layout: of the weights on the mesh.
      mesh: its sizes.
    """
    matrices = collect_matrices(layout, mesh)
    adam = scale_by_adam(config.beta1, config.beta2, config.epsilon)
    return optax.chain(
        optax.masked(scale_by_muon(dtype, matrices), _mask_names(lambda name: name in matrices)),
        optax.masked(adam, _mask_names(lambda name: name not in matrices)),
        _weight_decay(config),
    )


def _weight_decay(config: OptimizerConfig) -> optax.GradientTransformation:
    def mask(model):
        return jax.tree.unflatten(jax.tree.structure(model), map(has_weight_decay, read_dims(model)))

    return optax.add_decayed_weights(config.weight_decay, mask=mask)


def _mask_names(predicate: Callable[[str], bool]) -> Callable:
    """A mask for optax: the weights whose names satisfy a predicate."""
    return lambda model: jax.tree_util.tree_map_with_path(lambda path, _: predicate(leaf_name(path)), model)


def is_masked(node) -> bool:
    """True if a part of an optimizer has no state for a weight, because another part trains it."""
    return isinstance(node, optax.MaskedNode)


@jax.named_scope(named_scopes.OPTIMIZER)
def square_norms(gradients, mesh: MeshConfig) -> Array:
    """The squared L2 norm of each parameter's gradient, layer by layer; float32 [parameters of `gradient_names`],
    replicated.

    The square root of their sum is the global norm; `optax.global_norm` would return a different number on every rank.
    A norm that is finite in float32 has no element above 2e19, so Adam's first moment has none either, and the second
    is finite.
    """

    def squares(gradient):
        return jnp.square(gradient.astype(accumulation_dtype(gradient.dtype)))

    return reduce_per_parameter([jax.tree.map(squares, gradients)], mesh)


def count_nonfinite(model, state: optax.OptState, mesh: MeshConfig) -> Array:
    """The number of each parameter's weights and moments, layer by layer, that are not finite or far too large; float32
    [parameters of `gradient_names`], replicated.

    Not part of the step, which would have to read all of them again: 3% of the time of a small batch on a GPU.
    """

    def flags(tree, sound):
        return jax.tree.map(lambda x: (~sound(x)).astype(accumulation_dtype(x.dtype)), tree)

    def is_bounded(x) -> Array:
        return jnp.abs(x) <= MAX_MAGNITUDE

    def has_root(x):
        return jnp.isfinite(jnp.sqrt(x))

    broken = [flags(model, is_bounded)]
    for moments, has_squares in find_moments(state, model):
        broken.append(flags(moments, has_root if has_squares else is_bounded))
    return reduce_per_parameter(broken, mesh)


def find_moments(state: optax.OptState, model) -> list[tuple]:
    """The parts of an optimizer's state with an array for each weight, or for some (`is_masked`), such as Adam's two
    moments; and whether a part is the second one, a mean of squares."""
    structure = jax.tree.structure(model)

    def fits(part) -> bool:
        return jax.tree.structure(part, is_leaf=is_masked) == structure

    def is_adam(part) -> bool:
        return isinstance(part, optax.ScaleByAdamState)

    adams = [part for part in jax.tree.leaves(state, is_leaf=is_adam) if is_adam(part)]
    squares = {id(adam.nu) for adam in adams}
    return [(part, id(part) in squares) for part in jax.tree.leaves(state, is_leaf=fits) if fits(part)]


@jax.named_scope(named_scopes.OPTIMIZER)
def reduce_per_parameter(trees: list, mesh: MeshConfig) -> Array:
    """Sum the elements of each parameter in all `trees`, layer by layer: [parameters of `gradient_names`].

    Inside `shard_map` each device has shards: a parameter is summed over exactly the axes it varies over, with one
    collective for all parameters that vary over the same axes.

    Args:
      trees: with the model's structure and equal sharding; all but the first may lack some weights (`is_masked`).
    """

    def sum_local(rows, *leaves):
        sums = sum(leaf.sum(range(num_layer_dims(rows), leaf.ndim)) for leaf in leaves if not is_masked(leaf))
        return _place_local_layers(sums, mesh) if rows and rows.even and mesh.pipe > 1 else sums.reshape(-1)

    leaves = (jax.tree.leaves(tree, is_leaf=is_masked) for tree in trees)
    parts = list(map(sum_local, layer_rows(trees[0], mesh), *leaves))
    totals = {}
    for axes in dict.fromkeys(map(varying_axes, parts)):
        indices = [i for i, sums in enumerate(parts) if varying_axes(sums) == axes]
        total = psum(jnp.concatenate([parts[i] for i in indices]), axes)
        ends = np.cumsum([len(parts[i]) for i in indices])[:-1]
        totals |= dict(zip(indices, jnp.split(total, ends), strict=True))
    return jnp.concatenate([totals[i] for i in range(len(parts))])


def _place_local_layers(squares: Array, mesh: MeshConfig) -> Array:
    """This stage's squares [l / P] or [V, l / (P V)] at their positions among all layers' [l]; zeros elsewhere."""
    squares = squares.reshape(mesh.virtual_stages, 1, -1)
    is_local = jnp.arange(mesh.pipe)[:, None] == rank(PIPE)
    return jnp.where(is_local, squares, 0).reshape(-1)


def gradient_names(model, config: ModelConfig) -> list[str]:
    """The names of the entries of `square_norms`: 'embedding.table', …, 'blocks.mlp.up.kernel of layer 3', …"""
    names = []
    for name in (leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)):
        stack = find_stack(config, name)
        names += [name] if stack is None else [f"{name} of layer {number}" for number in stack.numbers]
    return names


def backward_order(names: list[str], after_layers: Sequence[str]) -> list[int]:
    """Indices of `gradient_names` in the order in which the backward pass reaches them.

    The parts `after_layers` come first, such as BERT heads, then the layers from last to first, then the embeddings. A
    problem began at the first gradient in this order that is not finite.
    """

    def sort_key(index: int) -> tuple:
        name, _, layer = names[index].partition(" of layer ")
        parts = name.split(".")
        if not layer:
            return (0,) if parts[0] in after_layers else (2,)
        position = next((i for i, part in enumerate(Block.backward_order) if part in parts), len(Block.backward_order))
        return 1, -int(layer), position

    return sorted(range(len(names)), key=sort_key)
