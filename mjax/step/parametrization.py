"""Parametrizations, in which a learning rate that was tuned on a small model fits a wide and deep one.

    mup         m = hidden / base_width: wider models       arXiv 2203.03466, table 8
    completep   also l = layers / base_depth: deeper ones   arXiv 2505.01618, table 1 with α = 1

With l = 1 in mup, the factors of a weight, relative to the standard ones:

                                   multiplier   initial std   rate              decay   ε of Adam
    embedding, learned positions   1            1             1                 1       1 / m
    hidden matrix                  1            1 / √m        1 / m  (a)        m       1 / (m l)
    ─ into the residual stream     1 / l        √l / √m  (b)  1 / m             m       1 / (m l)
    ─ of queries                   √(d₀ / d)    1 / √m        1 / m             m       1 / (m l)
    bias and norm of a layer       1            1             1                         1 / (m l)
    ─ bias into the stream         1 / l        1             1                         1 / (m l)
    router                         1 / m        1             1                 1       1 / (m l)
    output layer                   1 / m        1             1                 1       1 / m
    ─ tied: final norm             1 / m        1             1                         1 / m

    (a) of Muon 1 / √m: its update has singular values of one size, Adam's one large one (arXiv 2310.17813)
    (b) in the standard parametrization the std is init_std / √(2 layers), here always / √(2 base_depth). A layer that
        is not in the stack, such as for multi-token prediction, has l = 1 but for this factor

d₀ is `base_head_size`: scores are q k √d₀ / d instead of q k / √d. The decay is rate × decay, the same for all weights.

No forward pass multiplies. Adam does not distinguish a weight W used as θ W from a weight θ W with θ times the initial
std and the rate (arXiv 2203.03466, appendix J.2.1). So the multiplier θ is a factor of the other two: a model in any
parametrization is an ordinary one, in generation, in an export, on every mesh. Gradients are multiplied by θ before
they are clipped, so that their norm is the paper's.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mjax.config import Config
from mjax.errors import UsageError
from mjax.models.protocol import Model
from mjax.parallel.weights import (
    COLUMNS,
    INPUTS,
    LAYER,
    OUT,
    PART,
    TOKEN,
    Dims,
    leaf_name,
    muon_matrices,
    read_dims,
    weight_metadata,
)

Factor = float | np.ndarray
Tree = TypeVar("Tree")


class WeightScale(NamedTuple):
    """The factors of a weight; arrays if its parts have different ones.

    Attributes:
      multiplier: of the weight in the forward pass of the paper, θ.
      initial: of the standard initial weight, including θ.
      rate: of the update, including θ.
      epsilon: of Adam's ε, of gradients that are multiplied by θ.
    """

    multiplier: Factor
    initial: Factor
    rate: Factor
    epsilon: float


def weight_scales(config: Config, model: Model) -> dict[str, WeightScale]:
    """The factors of every weight by name, from its dims and marks.

    Raises:
      UsageError: a weight has no dims, or no weight can scale the output.
    """
    optimizer = config.optimizer
    flag = f"--optimizer.parametrization {optimizer.parametrization}"
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    dims, parts = dict(zip(names, read_dims(model), strict=True)), weight_metadata(model, "parts")
    if unknown := next((name for name in names if None in dims[name]), None):
        raise UsageError(f"{flag} needs the dims of {unknown}; make the weight with mjax.parallel.weights.make_param")
    if has_other_head_size(config) and not any("q" in (part or ()) for part in parts):
        size = f"optimizer.base_head_size {optimizer.base_head_size}"
        raise UsageError(f"{size} is not supported for {config.model.title}: no weight has a part q; remove it")
    after_layers = [name for name in names if name.partition(".")[0] in model.after_layers]
    outputs = [name for name in after_layers if TOKEN in dims[name]]
    outputs = outputs or [name for name in after_layers if dims[name] == (OUT,)]  # tied
    if not outputs:
        last = ", ".join(model.after_layers)
        raise UsageError(f"{flag} needs a final norm or an output layer; name it in after_layers, which has {last}")
    by_muon = [optimizer.name == "muon" and matrix is not None for matrix in muon_matrices(model)]
    cards = zip(dims.items(), by_muon, weight_metadata(model, "residual"), parts, strict=True)
    return {name: _weight_scale(config, dims, name in outputs, *marks) for (name, dims), *marks in cards}


def has_other_head_size(config: Config) -> bool:
    """True if the scores are divided by the head size instead of its root."""
    return config.optimizer.base_head_size not in (None, config.model.head_size)


def _weight_scale(
    config: Config, dims: Dims, is_output: bool, by_muon: bool, residual: bool, parts: tuple[str, ...]
) -> WeightScale:
    optimizer, is_completep = config.optimizer, config.optimizer.parametrization == "completep"
    width = config.model.hidden / optimizer.base_width
    model_depth = config.model.layers / optimizer.base_depth if is_completep else 1.0
    depth = model_depth if LAYER in dims else 1.0
    is_wide_in, is_wide_out = not {*INPUTS}.isdisjoint(dims), not {OUT, COLUMNS}.isdisjoint(dims)
    multiplier = 1 / depth if residual else 1.0
    if is_output or (is_wide_in and not is_wide_out):
        multiplier /= width
    if has_other_head_size(config) and "q" in (parts or ()):
        of_queries = (optimizer.base_head_size / config.model.head_size) ** 0.5
        factors = [of_queries if part == "q" else 1.0 for part in parts]
        multiplier = multiplier * np.reshape(factors, [len(parts) if dim == PART else 1 for dim in dims])
    initial = rate = multiplier
    if is_wide_in and is_wide_out:
        initial = multiplier * ((model_depth if residual else 1.0) / width) ** 0.5
        rate = multiplier / (width**0.5 if by_muon else width)
    return WeightScale(multiplier, initial, rate, 1 / (width * depth))


def scale_initial_weights(config: Config, model: Model) -> Model:
    """The initial weights in the parametrization of `config`, from the standard ones."""
    return _multiply(config, model, model, lambda scale: scale.initial)


def scale_gradients(config: Config, model: Model, gradients: Tree) -> Tree:
    """The gradients of weights that are used times their multipliers."""
    return _multiply(config, model, gradients, lambda scale: scale.multiplier)


def scale_updates(config: Config, transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """An optimizer, of the results of `scale_gradients`, with a factor of the rate and of Adam's ε for each weight.

    Its weight decay is not multiplied by the factor of the rate: in every parametrization their product is the same.
    """
    if config.optimizer.parametrization == "standard":
        return transform

    def update(gradients, state, model):
        gradients = _multiply(config, model, gradients, lambda scale: 1 / scale.epsilon)
        before = _multiply(config, model, model, lambda scale: 1 / scale.rate)
        updates, state = transform.update(gradients, state, before)
        return _multiply(config, model, updates, lambda scale: scale.rate), state

    return optax.GradientTransformation(transform.init, update)


def _multiply(config: Config, model: Model, tree: Tree, factor) -> Tree:
    """`tree`, with an array for each weight of `model`, times `factor` of the weight's scale."""
    if config.optimizer.parametrization == "standard":
        return tree
    leaves, structure = jax.tree.flatten(tree)
    factors = map(factor, weight_scales(config, model).values())
    return structure.unflatten(x * jnp.asarray(y, x.dtype) for x, y in zip(leaves, factors, strict=True))
