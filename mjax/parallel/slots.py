"""Building blocks of a pipeline's loop: buffers with slots, conditionals, and values that vary over stages."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mjax.parallel import mappings
from mjax.parallel.axes import PIPE


def branch(name: str, condition: Array, then: Callable, otherwise: Callable, *operands):
    """Run one of two branches. Values that only pass through belong in `otherwise`: XLA copies them in the other.

    `name` labels the conditional in the traced program.
    """
    with jax.named_scope(name):
        return lax.switch(condition, [otherwise, then], *operands)


def at(tree, index):
    """Entry `index` of the first dim of every leaf."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def put(buffer: Array, slot: Array, value: Array) -> Array:
    """`buffer` [slots, …] with `value` in a slot."""
    return lax.dynamic_update_index_in_dim(buffer, mappings.vary(value, mappings.varying_axes(buffer)), slot, 0)


def add(sums, new):
    """The sum of two trees, leaf by leaf, in the dtypes of the first."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new)


def zeros_like(kind, dtype=None) -> Array:
    """Zeros with the shape, dtype and varying axes of `kind`."""
    return mappings.vary(jnp.zeros(kind.shape, dtype or kind.dtype), mappings.varying_axes(kind))


def buffer(slots: int, kind) -> Array:
    """Zeros for `slots` arrays like `kind`, varying over stages."""
    return mappings.vary(jnp.zeros((slots, *kind.shape), kind.dtype), mappings.varying_axes(kind) | {PIPE})


def vary_over_pipe(tree):
    """Cast the operands of a conditional whose predicate varies over `pipe`, or they would be typed as replicated."""
    return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset({PIPE})), tree)
