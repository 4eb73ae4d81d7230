"""Format `torch_dist`, Megatron's default today: tensors in parts, independent of the ranks that wrote them.

    .metadata        the parts of each tensor and where they are stored
    __0_0.distcp     parts, each a torch.save file; also __0_1.distcp, __1_0.distcp, …
    common.pt        everything but tensors: the arguments of the run, its step
    metadata.json    the format

Every part records its offsets in the whole tensor, so no merging by rank is needed. All layers may be one tensor
`decoder.layers.mlp.linear_fc1.weight` [l, out, in], or one tensor each, with the layer's number in the name.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mjax.errors import UsageError
from mjax.interop.megatron.pickles import Chunk, Stored
from mjax.interop.tensor_files import FLOATS, WORDS, Kind
from mjax.interop.torch_files import as_arrays, first_line, load_tensors

STACKED = ".layers."


class DistributedTensors:
    """`Tensors` in a folder of torch.distributed.checkpoint, by layer even if all layers are stored as one."""

    def __init__(self, folder: Path, stored: Mapping[str, Stored]):
        """Check that all parts are there.

        Args:
          folder: of the files.
          stored: the tensors listed in .metadata, by current names.

        Raises:
          UsageError: a file is missing, or the parts of a tensor do not cover it.
        """
        self._folder = folder
        self._places: dict[str, tuple[Stored, tuple[int, ...]]] = {}
        self.kinds: dict[str, Kind] = {}
        for name, tensor in stored.items():
            for chunk in tensor.chunks:
                if not os.path.isfile(folder / chunk.file):  # False for a name that no file system takes, too
                    raise UsageError(f"{folder / chunk.file} does not exist, though .metadata names it; copy it too")
                _check_size(folder / chunk.file, name, tensor, chunk)
            if 0 in tensor.shape or sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
                raise UsageError(f"{folder / '.metadata'} lists other parts of {name} than the whole; copy it again")
            dtype = WORDS.get(tensor.dtype, tensor.dtype)
            before, _, behind = name.partition(STACKED)
            if not behind or behind.split(".")[0].isdigit():
                self._add(name, Kind(dtype, tensor.shape), tensor, ())
                continue
            for layer in range(tensor.shape[0]):
                self._add(f"{before}{STACKED}{layer}.{behind}", Kind(dtype, tensor.shape[1:]), tensor, (layer,))
        self._last: tuple[Chunk, np.ndarray] | None = None

    def _add(self, name: str, kind: Kind, tensor: Stored, layer: tuple[int, ...]) -> None:
        self.kinds[name] = kind
        self._places[name] = (tensor, layer)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        kind, (tensor, layer) = self.kinds[name], self._places[name]
        first, end, _ = rows.indices(kind.shape[0])
        low = (*layer, first, *(0 for _ in kind.shape[1:]))
        high = (*(number + 1 for number in layer), max(first, end), *kind.shape[1:])
        # What no part covers stays not-a-number, and is refused as such.
        whole = np.full([end - start for start, end in zip(low, high, strict=True)], np.nan, FLOATS[kind.dtype])
        for chunk in tensor.chunks:
            begins = [max(a, b) for a, b in zip(low, chunk.offsets, strict=True)]
            ends = [min(a, b + size) for a, b, size in zip(high, chunk.offsets, chunk.sizes, strict=True)]
            if all(begin < end for begin, end in zip(begins, ends, strict=True)):
                there = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, chunk.offsets, strict=True))
                here = tuple(slice(b - o, e - o) for b, e, o in zip(begins, ends, low, strict=True))
                whole[here] = self._chunk(chunk)[there]
        return whole.reshape(whole.shape[len(layer) :])

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
