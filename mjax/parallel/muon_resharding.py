"""Resharding of weights into whole matrices, one rank each, for Muon.

Muon is a function of a whole matrix, and a device has shards. The dims of a weight (`weights.make_param`) say which are
rows and which are columns of a matrix; all other dims number matrices:

    kernel of                    shape             rows       columns    matrices
    q, k and v in one weight     [l, h, 3, n, d]   h          n · d      3 l
    attention's output           [l, n, d, h]      n · d      h          l
    a gated MLP                  [l, h, 2, f]      h          f          2 l

Each mesh axis is one of three cases:

    it splits their number (layers over `pipe`)     its ranks have different matrices: no communication
    it splits rows or columns (`model`, ZeRO)       an all-to-all: shards of all matrices → some matrices, whole
    it does neither (`data`)                        its ranks have the same: each computes some, and they all-gather

So every matrix is whole on one rank, with its bytes sent once in each direction, and no rank repeats another's work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from mjax.config import MeshConfig, axes
from mjax.parallel import mappings

Exchanges = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class MatrixLayout:
    """The matrices of one weight on a mesh.

    Attributes:
      shape: of the whole weight.
      spec: of the weight as it is stored (`zero.Storage`).
      rows, columns: dims of a matrix, counted from the end.
      mesh: sizes of its axes.
    """

    shape: tuple[int, ...]
    spec: P
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    mesh: MeshConfig

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of a whole matrix."""
        rows, columns = (math.prod(self.shape[dim] for dim in dims) for dims in (self.rows, self.columns))
        return rows, columns

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dims that number matrices, counted from the end."""
        return tuple(dim for dim in range(-len(self.shape), 0) if dim not in self.rows + self.columns)

    @property
    def num_matrices(self) -> int:
        """Count the matrices that a device holds, complete or as a shard."""
        ranks = math.prod(axes.sizes(self.mesh)[axis] for dim in self.batch_dims for axis in self._dim_axes(dim))
        return math.prod(self.shape[dim] for dim in self.batch_dims) // ranks

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split the stored weight."""
        return tuple(axis for dim in range(-len(self.shape), 0) for axis in self._dim_axes(dim))

    @cached_property
    def exchanges(self) -> Exchanges:
        """The axes that divide the work, in order: with the dim of [count, *rows, *columns] that the axis splits, or
        None if its ranks have the same matrices."""
        sizes = axes.sizes(self.mesh)
        # A single matrix that all ranks have cannot be divided.
        copies = [axis for axis in axes.NAMES if axis not in self.split_axes and sizes[axis] > 1]
        same = copies if self.num_matrices > 1 else []
        split = [
            (axis, i)
            for i, dim in enumerate(self.rows + self.columns, start=1)
            for axis in reversed(self._dim_axes(dim))  # the innermost part first
            if sizes[axis] > 1
        ]
        return (*((axis, None) for axis in same), *split)

    @property
    def count_per_rank(self) -> int:
        """Whole matrices for a rank; the last ranks may get fewer."""
        count = self.num_matrices
        for axis, _ in self.exchanges:
            count = -(-count // axes.sizes(self.mesh)[axis])
        return count

    def _dim_axes(self, dim: int) -> tuple[str, ...]:
        entry = self.spec[dim]
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

    def map(self, function: Callable[[Array], Array], shard: Array) -> Array:
        """Apply `function` to every matrix of the weight, inside `shard_map`.

        Args:
          function: stacked whole matrices [k, rows, columns] → the same shape, each independently.
          shard: this device's part of the weight, or of an array like it.

        Returns:
          This device's part of the result, typed as varying over the same axes as `shard`.
        """
        order = [dim + shard.ndim for dim in self.batch_dims + self.rows + self.columns]
        local = shard.transpose(order)

        def apply_whole(x: Array) -> Array:
            return function(x.reshape(len(x), *self.matrix_shape)).reshape(x.shape)

        stacked = local.reshape(self.num_matrices, *local.shape[len(self.batch_dims) :])
        done = _apply_divided(apply_whole, stacked, self.exchanges).reshape(local.shape)
        return done.transpose([order.index(dim) for dim in range(shard.ndim)])


def _apply_divided(function: Callable[[Array], Array], x: Array, exchanges: Exchanges) -> Array:
    """Apply `function` to `x` [count, …]; the ranks of the axes of `exchanges` compute some whole matrices each."""
    if not exchanges:
        return function(x)
    (axis, dim), inner = exchanges[0], exchanges[1:]
    count, ranks = len(x), mappings.size(axis)
    per_rank = -(-count // ranks)
    padded = jnp.pad(x, [(0, per_rank * ranks - count)] + [(0, 0)] * (x.ndim - 1))
    if dim is not None:
        done = _apply_divided(function, mappings.all_to_all(padded, axis, split=0, join=dim), inner)
        return mappings.all_to_all(done, axis, split=dim, join=0)[:count]
    first = mappings.rank(axis) * per_rank
    done = _apply_divided(function, jax.lax.dynamic_slice_in_dim(padded, first, per_rank), inner)
    if ranks <= count:
        return mappings.all_gather_invariant(done, axis, 0)[:count]
    # Most ranks have none: a sum of zeros and one result sends less than an all-gather of all that padding.
    placed = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(padded), done, first, 0)
    return mappings.psum(placed[:count], frozenset({axis}))
