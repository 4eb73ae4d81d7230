"""The residual stream as rows, one per token, and their layout over the ranks of `model` and `context`.

Between the regions of tensor parallelism the residual stream is a matrix [b · s, h], the positions of sequence 0 first.
Every rank of `model` holds all rows. With sequence parallelism each holds a contiguous range instead: rank i of t the
rows from i · b · s / t to (i + 1) · b · s / t. Splitting the flat rows rather than the positions of every sequence
means that collectives move only contiguous rows.

With `--mesh.context` a rank has a part of the positions of every sequence, and s is the number of these.
`TokenLayout.position_ids` lists them. Arrays of a batch arrive in equal, contiguous parts. Where attention gathers keys
and values, a later query costs more, so ranks first exchange half of their tokens (`TokenLayout.exchange_positions`),
numbers of four bytes:

    4 ranks, 8 chunks      contiguous    0 1 │ 2 3 │ 4 5 │ 6 7
                           zigzag        0 7 │ 1 6 │ 2 5 │ 3 4
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mjax.config.axes import CONTEXT, MODEL
from mjax.parallel import mappings, named_scopes

ContextAttention = Literal["ulysses", "allgather"]
"""How attention reaches the positions of other ranks of `context` (`models/parts/attention_kernels.py`)."""


@dataclass(frozen=True)
class TokenLayout:
    """The tokens in the rows of a residual stream.

    Attributes:
      sequences: b, of this replica's micro-batch.
      positions: s, tokens per sequence; with context parallelism this rank's share of them.
      sequence_parallel: whether the rows are split over `model` (sequence parallelism).
      float8: whether column- and row-parallel layers multiply these rows in float8 (`float8.py`).
      context_attention: how attention reaches the positions of other ranks of `context`; None: a rank has whole
        sequences.
      loss_chunks: parts of the vocabulary, one after the other, in which a loss is computed (`Output.cross_entropy`);
        above 1 the logits of the whole vocabulary are not available.
    """

    sequences: int
    positions: int
    sequence_parallel: bool = False
    float8: bool = False
    context_attention: ContextAttention | None = None
    loss_chunks: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks together, b · s."""
        return self.sequences * self.positions

    @property
    def global_positions(self) -> int:
        """Positions of a whole sequence."""
        return self.positions * (mappings.size(CONTEXT) if self.context_attention else 1)

    def position_ids(self) -> Int[Array, " s"]:
        """The positions that this rank has, in every sequence."""
        local = jnp.arange(self.positions, dtype=jnp.int32)
        if not self.context_attention:
            return local
        rank, half = mappings.rank(CONTEXT), self.positions // 2
        if self.context_attention == "ulysses":
            return rank * self.positions + local
        last = 2 * mappings.size(CONTEXT) - 1
        return jnp.where(local < half, rank * half + local, (last - rank) * half + local - half)

    def exchange_positions(self, x: Shaped[Array, "... s"]) -> Shaped[Array, "... s"]:
        """Reorder a batch array from this rank's contiguous positions to `position_ids`."""
        with jax.named_scope(named_scopes.EMBEDDING):
            return mappings.zigzag_permute(x) if self.context_attention == "allgather" else x

    def gather_positions(self, x: Shaped[Array, "b s ..."], gather=mappings.all_gather) -> Shaped[Array, "b S ..."]:
        """Concatenate the positions of all ranks of `context`, in order; the transpose is a reduce-scatter."""
        if not self.context_attention:
            return x
        x = gather(x, CONTEXT, 1)
        if self.context_attention == "ulysses":
            return x
        halves = x.reshape(len(x), -1, 2, self.positions // 2, *x.shape[2:])
        first, second = (jax.lax.index_in_dim(halves, i, 2, keepdims=False) for i in (0, 1))
        return jnp.concatenate([first, jnp.flip(second, 1)], 1).reshape(x.shape)

    def gather_rows(self, x: Shaped[Array, " t *dims"]) -> Shaped[Array, " bs *dims"]:
        """f: open a tensor-parallel region, in which every rank has all rows."""
        return mappings.all_gather_tokens(x) if self.sequence_parallel else mappings.copy_to_region(x)

    def reduce_rows(self, partial: Shaped[Array, " bs *dims"]) -> Shaped[Array, " t *dims"]:
        """g: close a region by summing the partial results of all ranks."""
        reduce = mappings.reduce_scatter_tokens if self.sequence_parallel else mappings.reduce_from_region
        return reduce(partial)

    def local_rows(self, rows: Shaped[Array, " bs *dims"]) -> Shaped[Array, " t *dims"]:
        """This rank's rows of an array that has one row per token and is replicated over `model`."""
        if not self.sequence_parallel:
            return rows
        count = self.num_tokens // mappings.size(MODEL)
        return jax.lax.dynamic_slice_in_dim(rows, mappings.rank(MODEL) * count, count)

    def split_sequences(self, rows: Shaped[Array, " bs *dims"]) -> Shaped[Array, "b s *dims"]:
        """All rows by sequence and position."""
        return rows.reshape(self.sequences, self.positions, *rows.shape[1:])
