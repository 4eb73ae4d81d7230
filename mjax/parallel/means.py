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


def weights_in_loss(loss_weights: dict[str, float], means: Means) -> Means:
    """The gradient of the loss with respect to each mean: its weight."""
    return {
        name: mappings.vary(jnp.full(mean.shape, loss_weights.get(name, 0.0), mean.dtype), mappings.varying_axes(mean))
        for name, mean in means.items()
    }
