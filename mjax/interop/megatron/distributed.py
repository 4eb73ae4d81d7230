"""Format `torch_dist`, Megatron's default today: tensors in parts, independent of the ranks that wrote them.

    .metadata        the parts of each tensor and where they are stored
    __0_0.distcp     parts, each a torch.save file; also __0_1.distcp, __1_0.distcp, …
    common.pt        everything but tensors: the arguments of the run, its step
    metadata.json    the format

Every part records its offsets in the whole tensor, so no merging by rank is needed. All layers may be one tensor
`decoder.layers.mlp.linear_fc1.weight` [l, out, in], or one tensor each, with the layer's number in the name. So may the
experts of a layer, `decoder.layers.3.mlp.experts.linear_fc1.weight` [E, out, in].
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path

import numpy as np

from mjax.errors import UsageError
from mjax.interop.megatron.pickles import Chunk, Stored
from mjax.interop.tensor_files import FLOATS, WORDS, Kind
from mjax.interop.torch_files import as_arrays, first_line, load_tensors

STACKED = (".layers.", ".mlp.experts.")
"""What several tensors with a number each are behind, in a name; or one tensor without a number."""


class DistributedTensors:
    """`Tensors` in a folder of torch.distributed.checkpoint, by layer and expert even if all are stored as one."""

    def __init__(self, folder: Path, stored: Mapping[str, Stored]):
        """Check that all parts are there.

        Args:
          folder: of the files.
          stored: the tensors listed in .metadata, by current names.

        Raises:
          UsageError: a file is missing, or the parts of a tensor do not cover it.
        """
        self._folder = folder
        self._places: dict[str, tuple[tuple[int, ...], list[Chunk]]] = {}
        self.kinds: dict[str, Kind] = {}
        for name, tensor in stored.items():
            for chunk in tensor.chunks:
                if not os.path.isfile(folder / chunk.file):  # False for a name that no file system takes, too
                    raise UsageError(f"{folder / chunk.file} does not exist, though .metadata names it; copy it too")
                _check_size(folder / chunk.file, name, tensor, chunk)
            if 0 in tensor.shape or sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
                raise UsageError(f"{folder / '.metadata'} lists other parts of {name} than the whole; copy it again")
            dtype = WORDS.get(tensor.dtype, tensor.dtype)
            chunks = None
            for part, index in _numbered(name, tensor.shape):
                chunks = _by_index(tensor.chunks, len(index)) if chunks is None else chunks
                self.kinds[part] = Kind(dtype, tensor.shape[len(index) :])
                self._places[part] = (index, chunks.get(index, []))
        self._last: tuple[Chunk, np.ndarray] | None = None

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        kind, (index, chunks) = self.kinds[name], self._places[name]
        first, end, _ = rows.indices(kind.shape[0])
        low = (*index, first, *(0 for _ in kind.shape[1:]))
        high = (*(number + 1 for number in index), max(first, end), *kind.shape[1:])
        # What no part covers stays not-a-number, and is refused as such.
        whole = np.full([end - start for start, end in zip(low, high, strict=True)], np.nan, FLOATS[kind.dtype])
        for chunk in chunks:
            begins = [max(a, b) for a, b in zip(low, chunk.offsets, strict=True)]
            ends = [min(a, b + size) for a, b, size in zip(high, chunk.offsets, chunk.sizes, strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                there = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, chunk.offsets, strict=True))
                here = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, low, strict=True))
                whole[here] = self._chunk(chunk)[there]
        return whole.reshape(whole.shape[len(index) :])

    def _chunk(self, chunk: Chunk) -> np.ndarray:
        """A part; the last one is cached, because an embedding is read a few rows at a time."""
        if self._last is None or self._last[0] is not chunk:
            self._last = None
            file = self._folder / chunk.file
            try:
                with file.open("rb") as stream:
                    stream.seek(chunk.start)
                    content = io.BytesIO(stream.read(chunk.length))
                array = as_arrays(file, {"a part": load_tensors(content)})["a part"]
            except UsageError:
                raise
            except Exception as error:  # of many kinds, for bytes that are no tensor
                raise UsageError(f"{file} is truncated or damaged ({first_line(error)}); copy it again") from None
            if array.shape != chunk.sizes:
                raise UsageError(f"{file} holds another part than .metadata says; copy the whole checkpoint again")
            self._last = (chunk, array)
        return self._last[1]


def _numbered(name: str, shape: tuple[int, ...], index: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names of the tensors that are stored as one, with a number for each layer and expert, and their indices."""
    for many in STACKED:
        before, _, behind = name.partition(many)
        if behind and not behind.split(".")[0].isdigit() and len(index) < len(shape):
            for number in range(shape[len(index)]):
                yield from _numbered(f"{before}{many}{number}.{behind}", shape, (*index, number))
            return
    yield name, index


def _by_index(chunks: Iterable[Chunk], dims: int) -> dict[tuple[int, ...], list[Chunk]]:
    """The parts that hold something of each index along so many first dims."""
    found: dict[tuple[int, ...], list[Chunk]] = {}
    for chunk in chunks:
        extents = zip(chunk.offsets[:dims], chunk.sizes[:dims], strict=True)
        for index in product(*(range(offset, offset + size) for offset, size in extents)):
            found.setdefault(index, []).append(chunk)
    return found


def _check_size(file: Path, name: str, tensor: Stored, chunk: Chunk) -> None:
    """Refuse a part that is larger than its bytes in the file, before memory for it is allocated."""
    itemsize = FLOATS[WORDS[tensor.dtype]].itemsize if tensor.dtype in WORDS else 1
    size = file.stat().st_size
    if chunk.start + chunk.length > size or math.prod(chunk.sizes) * itemsize > chunk.length:
        raise UsageError(
            f"{file.parent / '.metadata'} lists {chunk.sizes} numbers of {name} in {chunk.length:,} bytes of the "
            f"{size:,} of {file.name}, where they have no room: one of the two is truncated or damaged; "
            "copy the whole checkpoint again"
        )
