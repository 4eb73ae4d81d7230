"""What a pipeline's loop is made of: buffers with slots, conditionals, and values that vary over stages."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from mjax.parallel import mappings
from mjax.parallel.axes import PIPE


def branch(name: str, condition: Array, then: Callable, otherwise: Callable, *operands):
    """Run one of two branches. What is only handed through belongs into `otherwise`: XLA copies it in the other.

    `name` says which conditional it is to those who read the traced program.
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
    """The leaves of two trees added up, in the dtypes of the first."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, new)


def zeros_like(kind, dtype=None) -> Array:
    """Zeros of the shape, type and varying axes of `kind`."""
    return mappings.vary(jnp.zeros(kind.shape, dtype or kind.dtype), mappings.varying_axes(kind))


def buffer(slots: int, kind) -> Array:
    """Zeros with room for `slots` arrays like `kind`, varying over stages."""
    return mappings.vary(jnp.zeros((slots, *kind.shape), kind.dtype), mappings.varying_axes(kind) | {PIPE})


def vary_over_pipe(tree):
    """A conditional whose predicate varies and whose operands do not would be typed as the same on every rank."""
    return jax.tree.map(lambda leaf: mappings.vary(leaf, frozenset({PIPE})), tree)
