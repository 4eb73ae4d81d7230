"""The means by name computed from a model's sums, and the gradient of the loss that they add up to."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mjax.parallel import mappings

Means = dict[str, Array]


def means_and_gradients(loss_weights: dict[str, float], function: Callable[..., Means], *arguments):
    """`function(*arguments)`, and for each argument the gradient of the loss that these means add up to."""
    means, pullback = jax.vjp(function, *arguments)
    return means, pullback(weights_in_loss(loss_weights, means))


def weights_in_loss(loss_weights: dict[str, float], means: Means | dict[str, jax.ShapeDtypeStruct]) -> Means:
    """The gradient of the loss with respect to each mean: its weight."""
    return {
        name: mappings.vary(jnp.full(mean.shape, loss_weights.get(name, 0.0), mean.dtype), mappings.varying_axes(mean))
        for name, mean in means.items()
    }


def at(tree, index):
    """Entry `index` of the first dim of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def add(sums, new):
    """The sum of two trees, leaf by leaf, in the dtypes of the first."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new)
