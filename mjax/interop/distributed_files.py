"""Folders of torch.distributed.checkpoint, read as data.

    .metadata        the parts of each tensor and their locations
    __0_0.distcp     parts, each a torch.save file; also __0_1.distcp, __1_0.distcp, …

Every part records its offsets in the whole tensor, so a reader needs no ranks.
"""

import math
import os
import pickle
import pickletools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mjax.errors import UsageError, first_line
from mjax.interop.tensor_files import DTYPE_NAMES, FLOAT_DTYPES, LazyTensor
from mjax.interop.torch_files import PickleStub, TensorChunk, load_tensors, read_chunk, to_numpy
from mjax.utils.files import path_below

MAX_ELEMENTS = 2**62  # larger than any number of bytes or elements


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a folder of torch.distributed.checkpoint: torch's name of its dtype, full shape, parts."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


COMMON_STATE = "common_state/shard_0_1"
"""Name of the entry with arguments and version in megatron-core 0.19 and later, which has no common.pt."""
COMMON_ENTRIES = ("args", "checkpoint_version")
"""Names of these entries in the format fsdp_dtensor, in which each is saved by itself."""
_STUB_PREFIXES = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Modules of the classes in .metadata: storage locations and the plan by which they were written."""
_METADATA_GLOBALS = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PickleStub,
    ("pathlib._local", "PosixPath"): PickleStub,  # of Python 3.13
}


class _MetadataReader(pickle.Unpickler):
    """Replaces the names in .metadata by stubs and plain values, rejects all others, and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_STUB_PREFIXES):
            return type(name, (PickleStub,), {})
        if (module, name) in _METADATA_GLOBALS:
            return _METADATA_GLOBALS[module, name]
        if module == "torch" and re.fullmatch(r"b?float\d+\w*|u?int\d+|bool|complex\d+", name):
            return name
        raise UsageError(f"it wants to call {module}.{name}, which is not part of it, and nothing was executed")


def read_metadata(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors in the .metadata of a torch_dist checkpoint, by name, and `COMMON_STATE` or `COMMON_ENTRIES`, of
    dtype bytes.

    Other entries are ignored.

    Raises:
      UsageError: the file is missing or damaged, or calls a function.
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; copy the whole checkpoint, hidden files too")
    try:
        with file.open("rb") as stream:
            _check_memo(stream, file.stat().st_size)
            content = _MetadataReader(stream).load()
        stored = content.storage_data.items()
        locations = {(index.fqn, tuple(vars(index).get("offset") or ())): info for index, info in stored}
        entries = {
            name: _to_stored_tensor(name, kind, locations, file.parent)
            for name, kind in content.state_dict_metadata.items()
            if type(kind).__name__ == "TensorStorageMetadata"
        }
        for name in {COMMON_STATE, *COMMON_ENTRIES} & content.state_dict_metadata.keys():
            chunk = _to_chunk(name, locations[name, ()], file.parent)
            entries[name] = StoredTensor("bytes", (), (chunk,))
        return entries
    except UsageError as error:
        raise UsageError(f"{file}: {error}; get the checkpoint from where it was trained") from None
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise UsageError(f"{file} is truncated or not a .metadata ({type(error).__name__}); copy it again") from None


def _check_memo(stream: BinaryIO, size: int) -> None:
    """Reject a memo index larger than the file: the unpickler would allocate that many slots."""
    for code, value, _ in pickletools.genops(stream):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and value > size:
            raise ValueError(f"object {value:,} of {size:,} bytes")
    stream.seek(0)


def _to_sizes(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(value) is int and 0 <= value < MAX_ELEMENTS for value in numbers):
        raise ValueError("not whole numbers")
    return numbers


def _to_chunk(name: str, location: PickleStub, folder: Path, offsets: Any = (), sizes: Any = ()) -> TensorChunk:
    file = location.relative_path
    path_below(folder, file, f"the file of {name},")
    if vars(location).get("transform_descriptors"):
        raise UsageError(f"{name} is stored as {location.transform_descriptors}, and mjax reads plain tensors only")
    start, length = _to_sizes([location.offset, location.length])
    return TensorChunk(_to_sizes(offsets), _to_sizes(sizes), file, start, length)


def _to_stored_tensor(name: str, kind: PickleStub, locations: dict, folder: Path) -> StoredTensor:
    described = ((chunk.offsets, chunk.sizes) for chunk in kind.chunks)
    chunks = tuple(_to_chunk(name, locations[name, tuple(at)], folder, at, sizes) for at, sizes in described)
    dtype, shape = kind.properties.state[0], _to_sizes(kind.size)
    if type(dtype) is not str or any(len(c.offsets) != len(shape) or len(c.sizes) != len(shape) for c in chunks):
        raise ValueError("parts of other dims than the whole")
    return StoredTensor(dtype, shape, chunks)


# --- Tensors ----------------------------------------------------------------------------------------------------------


class StoredTensors:
    """The tensors of a folder."""

    def __init__(self, folder: Path, stored: Mapping[str, StoredTensor]):
        """Check that all parts exist.

        Args:
          folder: of the files.
          stored: tensors listed in .metadata, by any names.

        Raises:
          UsageError: a file is missing or too short, or the parts of a tensor do not cover it.
        """
        self._folder, self._stored = folder, stored
        self._last: tuple[TensorChunk, np.ndarray] | None = None
        for name, tensor in stored.items():
            for chunk in tensor.chunks:
                if not os.path.isfile(folder / chunk.file):  # also False for a path that is too long
                    raise UsageError(f"{folder / chunk.file} does not exist, though .metadata names it; copy it too")
                _check_size(folder / chunk.file, name, tensor, chunk)
            if 0 in tensor.shape or sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
                raise UsageError(f"{folder / '.metadata'} lists other parts of {name} than the whole; copy it again")

    def select(self, name: str, index: tuple[int, ...] = ()) -> LazyTensor:
        """The part of a tensor at an index of its first dims."""
        tensor = self._stored[name]
        dtype, shape = DTYPE_NAMES.get(tensor.dtype, tensor.dtype), tensor.shape[len(index) :]

        def read(rows: slice) -> np.ndarray:
            box = [*(range(number, number + 1) for number in index), range(shape[0])[rows], *map(range, shape[1:])]
            return self._read(tensor, box).reshape(-1, *shape[1:])

        return LazyTensor(dtype, shape, read)

    def _read(self, tensor: StoredTensor, box: Sequence[range]) -> np.ndarray:
        """Read a range of each dim; elements that no part covers are NaN."""
        dtype = FLOAT_DTYPES[DTYPE_NAMES.get(tensor.dtype, tensor.dtype)]
        region = np.full([*map(len, box)], np.nan, dtype)
        for chunk in tensor.chunks:
            edges = [
                (max(extent.start, offset), min(extent.stop, offset + size), offset, extent.start)
                for extent, offset, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(begin < end for begin, end, *_ in edges):
                source = tuple(slice(begin - offset, end - offset) for begin, end, offset, _ in edges)
                target = tuple(slice(begin - start, end - start) for begin, end, _, start in edges)
                region[target] = self._load_chunk(chunk)[source]
        return region

    def _load_chunk(self, chunk: TensorChunk) -> np.ndarray:
        """Load a part; the last one is cached, because an embedding is read a few rows at a time."""
        if self._last is None or self._last[0] is not chunk:
            self._last = None
            file = self._folder / chunk.file
            try:
                tensor = load_tensors(read_chunk(file, chunk))
            except Exception as error:  # of many types, for bytes that are not a tensor
                raise UsageError(f"{file} is truncated or damaged ({first_line(error)}); copy it again") from None
            array = to_numpy(file, {"a part": tensor})["a part"]
            if array.shape != chunk.sizes:
                raise UsageError(f"{file} holds another part than .metadata says; copy the whole checkpoint again")
            self._last = (chunk, array)
        return self._last[1]


def _check_size(file: Path, name: str, tensor: StoredTensor, chunk: TensorChunk) -> None:
    """Reject a part that is larger than its bytes in the file, before its memory is allocated."""
    itemsize = FLOAT_DTYPES[DTYPE_NAMES[tensor.dtype]].itemsize if tensor.dtype in DTYPE_NAMES else 1
    size = file.stat().st_size
    if chunk.start + chunk.length > size or math.prod(chunk.sizes) * itemsize > chunk.length:
        listed = f"{chunk.sizes} numbers of {name} in {chunk.length:,} bytes of the {size:,} of {file.name}"
        problem = "which are too few: one of the two is truncated or damaged; copy the whole checkpoint again"
        raise UsageError(f"{file.parent / '.metadata'} lists {listed}, {problem}")
