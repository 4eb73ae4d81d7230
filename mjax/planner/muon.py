"""Muon in a plan: the products of its iteration, what a device sends so that each matrix is whole, and its memory.

Shapes are those of the weights (`parallel/matrices.py`), products those of the traced iteration (`step/muon.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mjax.config import Config, MeshConfig
from mjax.parallel import axes
from mjax.parallel.matrices import Matrices
from mjax.planner.rates import WIDTHS, Rates
from mjax.planner.weights import matrices_of
from mjax.step.muon import ITERATE_IN, newton_schulz
from mjax.trace.program import Product, Program


class Sent(NamedTuple):
    """A collective of the update of one weight.

    Attributes:
      operation: all-to-all, all-gather or all-reduce.
      axis: of the mesh.
      elements: in the whole tensor of an all-gather or all-reduce, in a device's operand of an all-to-all.
      times: in a step.
    """

    operation: str
    axis: str
    elements: int
    times: int


def iteration_seconds(config: Config, rates: Rates) -> float:
    """Seconds in which the busiest device orthogonalises its matrices."""
    rates = Rates(rates.gpu, rates.calibration, ITERATE_IN[config.precision.compute])
    return sum(
        rates.product(each.m, each.n, each.k, each.batch)
        for matrices in matrices_of(config.model, config.mesh)
        for each in products(matrices.each, *matrices.size)
    )


def exchange_seconds(config: Config, rates: Rates) -> dict[str, float]:
    """Seconds in which matrices become whole and results go back, by mesh axis."""
    mesh, seconds = config.mesh, dict.fromkeys(axes.NAMES, 0.0)
    strides = {axis: _stride(mesh, axis) for axis in axes.NAMES}
    for each in sent(config):
        ranks, whole = axes.sizes(mesh)[each.axis], each.elements * width(config)
        one = rates.sum if each.operation == "all-reduce" else rates.gather  # an all-to-all sends as much as a gather
        seconds[each.axis] += each.times * one(ranks, strides[each.axis], whole)
    return seconds


def workspace(config: Config) -> float:
    """Bytes of the temporaries of the largest weight."""
    return width(config) * max(map(_temporaries, matrices_of(config.model, config.mesh)), default=0)


def _temporaries(matrices: Matrices) -> int:
    """Elements: of an iteration x, its product, the next x and a copy, and three squares; and if matrices move, of what
    is sent and received."""
    whole, squares = math.prod(matrices.size), min(matrices.size) ** 2
    moved = math.prod(matrices.shape) // math.prod(axes.sizes(matrices.mesh)[axis] for axis in matrices.splits)
    return matrices.each * (4 * whole + 3 * squares) + (2 * moved if matrices.moves else 0)


def width(config: Config) -> int:
    """Bytes of an element in the iteration."""
    return WIDTHS[ITERATE_IN[config.precision.compute]]


def sent(config: Config) -> Iterator[Sent]:
    """The collectives of a device's update, weight by weight."""
    for matrices in matrices_of(config.model, config.mesh):
        yield from _sent(matrices)


def _sent(matrices: Matrices) -> Iterator[Sent]:
    sizes, count = axes.sizes(matrices.mesh), matrices.count
    part = math.prod(matrices.size)  # of a matrix, elements that a device has
    for axis, dim in matrices.moves:
        part //= 1 if dim is None else sizes[axis]
    for axis, dim in matrices.moves:
        ranks = sizes[axis]
        each = -(-count // ranks)
        if dim is not None:
            yield Sent("all-to-all", axis, each * ranks * part, times=2)
            part *= ranks
        elif ranks <= count:
            yield Sent("all-gather", axis, each * ranks * part, times=1)
        else:
            yield Sent("all-reduce", axis, count * part, times=1)
        count = each


@lru_cache(maxsize=4096)
def products(count: int, rows: int, columns: int) -> tuple[Product, ...]:
    """The products of the iteration on `count` matrices."""
    stack = jax.ShapeDtypeStruct((count, rows, columns), jnp.float32)
    return Program(jax.make_jaxpr(newton_schulz)(stack)).products


def _stride(mesh: MeshConfig, axis: str) -> int:
    """Distance of neighbours on an axis: devices along those further in."""
    inner = axes.NAMES[axes.NAMES.index(axis) + 1 :]
    return math.prod(axes.sizes(mesh)[name] for name in inner)
