"""Megatron's conjugate operators: the only file in which a value crosses between devices.

Inside `shard_map` every value is typed by the mesh axes it varies over. A pair of linear layers split over `model`
opens a region in which activations differ from rank to rank, and closes it again (arXiv 1909.08053, section 3, figure
3):

    x ── f ──▶ X A_i ──▶ gelu ──▶ (…) B_i ── g ──▶ y
         forward: nothing                    forward: sum over ranks
         backward: sum over ranks            backward: nothing

f is a cast of the type and g a sum. Each is the transpose of the other, so autodiff writes the backward pass, and the
types refuse a region that is opened twice or never closed. One mistake they do not see is closing a region twice,
which would multiply by the number of ranks: `leave` checks for it.

Over `data` there is one rule: parameters are cast to varying before differentiation (`enter_data`), so that every
replica accumulates its own gradient, and summed once afterwards (`sum_gradients`).
"""

from __future__ import annotations

import jax
from jax import Array, lax

PIPE, DATA, MODEL = "pipe", "data", "model"


def varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes along which `x` may differ from rank to rank; empty outside `shard_map`."""
    return jax.typeof(x).mat.varying


def rank(axis: str) -> Array:
    """Index of this device on `axis`: int32 [], varying over it."""
    return lax.axis_index(axis)


def size(axis: str) -> int:
    """Number of devices on `axis`."""
    return lax.axis_size(axis)


def vary(x: Array, axes: frozenset[str]) -> Array:
    """Cast `x` to vary over `axes` as well. Its transpose sums the gradient over the axes that were added."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


# --- Over the model axis ----------------------------------------------------------------------------------------------


def enter(x: Array) -> Array:
    """f: open a tensor-parallel region; the same on all ranks of `model` → varying. Its transpose is the all-reduce.

    Raises:
      ValueError: `x` varies over `model` already, so a region was left open.
    """
    if MODEL in varying_axes(x):
        raise ValueError(
            "enter() takes a value that is the same on every rank of `model`; this one varies: a leave() is missing"
        )
    return lax.pcast(x, MODEL, to="varying")


def leave(partial: Array) -> Array:
    """g: close a tensor-parallel region by summing the partial results of all ranks. Its transpose is the identity.

    Raises:
      ValueError: `partial` is the same on every rank already, so the sum would multiply it by the number of ranks.
    """
    if MODEL not in varying_axes(partial):
        raise ValueError(
            "leave() takes partial sums that vary over `model`; this value is already the same on every rank"
        )
    return lax.psum(partial, MODEL)


def maximum_over_model(x: Array) -> Array:
    """Largest value over the ranks of `model`; carries no gradient."""
    return lax.pmax(lax.stop_gradient(x), MODEL)


def gather_over_model(x: Array) -> Array:
    """Concatenate the last dim over the ranks of `model`: [..., v/p] varying → [..., v] the same on every rank.

    For sampling the next token; training never needs a whole row of logits.
    """
    return jax.lax.all_gather(x, MODEL, axis=x.ndim - 1, tiled=True, to="invarying")


# --- Over the data axis -----------------------------------------------------------------------------------------------


def enter_data(tree):
    """Cast every leaf to vary over `data`, so that its gradient stays on its replica until `sum_gradients`."""
    return jax.tree.map(lambda x: vary(x, frozenset({DATA})), tree)


def sum_gradients(gradients, parameters):
    """Sum each gradient over the axes on which it varies and its parameter does not.

    Outside every loop and in the type of the gradients (float32), so this is the one data-parallel reduction of a step.
    """
    return jax.tree.map(lambda g, p: sum_over(g, varying_axes(g) - varying_axes(p)), gradients, parameters)


def sum_over(x: Array, axes: frozenset[str]) -> Array:
    """Sum over the ranks of all `axes`; nothing happens when there are none."""
    return lax.psum(x, tuple(sorted(axes))) if axes else x
