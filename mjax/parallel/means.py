"""The means by name that a model's sums come to, and the gradient of the loss that they make up."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mjax.parallel import mappings

Means = dict[str, Array]


def means_and_gradients(loss_weights: dict[str, float], function: Callable[..., Means], *arguments):
    """`function(*arguments)`, and the gradient in each of the arguments of the loss that these means make up."""
    means, pullback = jax.vjp(function, *arguments)
    return means, pullback(weights_in_loss(loss_weights, means))


def weights_in_loss(loss_weights: dict[str, float], means: Means) -> Means:
    """The gradient of the loss in each mean: its weight."""
    return {
        name: mappings.vary(jnp.full(mean.shape, loss_weights.get(name, 0.0), mean.dtype), mappings.varying_axes(mean))
        for name, mean in means.items()
    }
