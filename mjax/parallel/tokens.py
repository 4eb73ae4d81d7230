"""The residual stream as rows, one per token, and their distribution over the ranks of `model`.

Between the regions of tensor parallelism the stream is a matrix [b · s, h], the positions of sequence 0 first. Either
every rank of `model` holds all rows, or, with sequence parallelism, each holds a contiguous range: rank i the rows from
i · t to (i + 1) · t with t = b · s / p. Splitting the flat rows rather than the positions of every sequence means that
collectives move only whole, contiguous rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.axes import MODEL


@dataclass(frozen=True)
class Tokens:
    """The tokens in the rows of a residual stream.

    Attributes:
      sequences: b, of this replica's micro-batch.
      positions: s, tokens per sequence.
      split: whether the rows are split over `model` (sequence parallelism).
      float8: whether column- and row-parallel layers multiply these rows in float8 (`float8.py`).
    """

    sequences: int
    positions: int
    split: bool = False
    float8: bool = False

    @property
    def count(self) -> int:
        """Tokens of all ranks together, b · s."""
        return self.sequences * self.positions

    def enter(self, x: Array) -> Array:
        """f: open a tensor-parallel region, in which every rank sees all rows: [t, h] → [b · s, h]."""
        return mappings.gather_tokens(x) if self.split else mappings.enter(x)

    def leave(self, partial: Array) -> Array:
        """g: close a region: sum the partial results of all ranks [b · s, h] → [t, h]."""
        return mappings.scatter_tokens(partial) if self.split else mappings.leave(partial)

    def mine(self, rows: Array) -> Array:
        """This rank's rows of an array that has one row per token and is replicated over `model`: [b · s, …] → [t,
        …]."""
        if not self.split:
            return rows
        count = self.count // mappings.size(MODEL)
        rank = mappings.rank(MODEL)
        return jax.lax.dynamic_slice_in_dim(rows, rank * count, count)

    def by_sequence(self, rows: Array) -> Array:
        """All rows [b · s, …] as [b, s, …]."""
        return rows.reshape(self.sequences, self.positions, *rows.shape[1:])
