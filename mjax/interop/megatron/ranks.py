"""Format `torch`: one file per rank with its shard of the model, merged here.

    mp_rank_00/model_optim_rng.pt           tensor rank 0; mp_rank_01 … where there are more
    mp_rank_00_001/model_optim_rng.pt       tensor rank 0 of pipeline stage 1, where there is a pipeline

Each stage numbers its layers from 0. With several chunks per stage, as in the interleaved schedule, they are `model0`,
`model1`, … in its file, and layers are ordered by chunk: chunk 0 of every stage comes before chunk 1 of the first.

Arrays are memory-mapped like the files; shards are merged when they are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mjax.errors import UsageError
from mjax.interop.megatron.names import is_qkv, split_dim
from mjax.interop.tensor_files import WORDS, Kind

Share = dict[str, np.ndarray]
"""The tensors of one rank for one piece of the model, by current names."""

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


class RankTensors:
    """`Tensors` of a model that is split over ranks.

    Layers are numbered over the whole model, from the first stage to the last.
    """

    def __init__(self, pieces: Sequence[Sequence[Share]], version: float, source: str, gated: bool = False):
        """Check that the ranks fit together.

        Args:
          pieces: of the pipeline, in layer order: for each, the shards of the tensor ranks in rank order.
          version: `checkpoint_version`.
          source: the checkpoint, for messages.
          gated: whether linear_fc1 is a gate and what it lets through, of which each rank has its part.

        Raises:
          UsageError: ranks have tensors of different names or shapes, or two pieces have the same tensor.
        """
        self._version, self._gated = version, gated
        self._shares: dict[str, list[np.ndarray]] = {}
        self.kinds: dict[str, Kind] = {}
        layers = 0
        for number, piece in enumerate(pieces):
            for rank, share in enumerate(piece):
                if odd := share.keys() ^ piece[0].keys():
                    raise UsageError(
                        f"{source}: of tensor ranks 0 and {rank} only one holds {min(odd)}; copy the whole checkpoint"
                    )
            numbers = [int(found[0]) for name in piece[0] if (found := _LAYER.search(name))]
            for name in piece[0]:
                whole = _LAYER.sub(lambda found: str(int(found[0]) + layers), name)  # noqa: B023 - called at once
                if whole in self.kinds:
                    raise UsageError(
                        f"{source}: two stages of the pipeline hold {name}, piece {number} the second time; "
                        "copy the whole checkpoint again"
                    )
                self._shares[whole] = [share[name] for share in piece]
                self.kinds[whole] = self._kind(whole, source)
            layers += 1 + max(numbers, default=-1)

    def _kind(self, name: str, source: str) -> Kind:
        shares, dim = self._shares[name], split_dim(name)
        first = shares[0]
        for rank, share in enumerate(shares):
            same = [extent for i, extent in enumerate(share.shape) if i != dim]
            if same != [extent for i, extent in enumerate(first.shape) if i != dim] or share.dtype != first.dtype:
                raise UsageError(
                    f"{source}: {name} is {first.dtype} {first.shape} on tensor rank 0 and {share.dtype} {share.shape} "
                    f"on {rank}; copy the whole checkpoint again"
                )
        shape = list(first.shape)
        if dim is not None and shape:
            shape[dim] = sum(share.shape[dim] for share in shares)
        return Kind(WORDS.get(first.dtype.name, str(first.dtype)), tuple(shape))

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        shares, dim = self._shares[name], split_dim(name)
        if len(shares) == 1 or dim is None:
            return shares[0][rows]
        # [c, n / p, d, …]: each rank begins with the queries of its heads, and n is put together behind c.
        fused = 3 if is_qkv(name) and self._version < 1 else 2 if self._gated and ".linear_fc1." in name else 1
        if fused > 1:
            parts = [share.reshape(fused, -1, *share.shape[1:]) for share in shares]
            return np.concatenate(parts, axis=1).reshape(self.kinds[name].shape)[rows]
        if dim == 1:
            return np.concatenate([share[rows] for share in shares], axis=1)
        first, end, _ = rows.indices(self.kinds[name].shape[0])
        parts, start = [], 0
        for share in shares:
            parts.append(share[max(0, first - start) : max(0, end - start)])
            start += len(share)
        return np.concatenate(parts)
