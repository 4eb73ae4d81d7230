"""Tensors by name in a Hugging Face model folder: read one at a time, from any number of files.

    model.safetensors                      all of them, or
    model-00001-of-00003.safetensors …     some of them each, and
    model.safetensors.index.json           {"weight_map": {tensor: file}}

A safetensors file is a JSON header and bytes, with nothing to execute. It is mapped into memory, so that reading a
tensor, or some rows of it, needs no more memory than that. The older pytorch_model.bin is a pickle, which is a program;
it is opened on request only, by torch's reader for weights, which refuses everything except tensors.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from jax.numpy import bfloat16  # registers the dtype with NumPy, on which safetensors relies
from safetensors import SafetensorError, safe_open

from mjax.errors import UsageError, first_line
from mjax.interop.model_folder import read_object, write_object
from mjax.interop.torch_files import import_torch, load_tensors, to_arrays
from mjax.utils.files import path_below

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(bfloat16)}
"""Dtypes that float32 represents exactly."""
WORDS = {dtype.name: word for word, dtype in FLOATS.items()}
"""safetensors' name for each of them, by its name in NumPy and torch."""


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a tensor, from its file; `dtype` as in safetensors (F32, BF16, I64, …)."""

    dtype: str
    shape: tuple[int, ...]


class Tensors(Protocol):
    """The tensors of a model folder.

    Attributes:
      kinds: by name. Nothing has been read yet.
    """

    kinds: dict[str, TensorInfo]

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor in its own dtype, or some rows of it (along its first dim)."""


def open_tensors(folder: Path, allow_pickle: bool = False) -> Tensors:
    """The tensors of a model folder; safetensors if there are both.

    Args:
      folder: contains one of the files above, or several and their index.
      allow_pickle: whether to open pytorch_model.bin.

    Raises:
      UsageError: there are none, a file is missing or damaged, or there is only a pickle without `allow_pickle`.
    """
    if files := _files(folder, SAFETENSORS):
        return SafetensorsFiles(files)
    files = _files(folder, PICKLE)
    if not files:
        raise UsageError(f"{folder} has no {SAFETENSORS}; give a folder written by save_pretrained")
    if not allow_pickle:
        remedy = f"get {SAFETENSORS}, or add --allow-pickle to have torch read only the tensors in it"
        raise UsageError(f"{folder} has its weights in {PICKLE} only, a pickle; {remedy}")
    return PickledFiles(files)


def _files(folder: Path, whole: str) -> dict[Path, list[str]]:
    """The files of the tensors, and the tensors that the index expects in each; empty if there are none."""
    if (folder / whole).is_file():
        return {folder / whole: []}
    index = folder / f"{whole}.index.json"
    if not index.is_file():
        return {}
    file_of = read_object(index).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise UsageError(f"{index} has no weight_map that says which tensor is in which file; download it again")
    files: dict[Path, list[str]] = {}
    for tensor, name in file_of.items():
        files.setdefault(path_below(folder, name, f"{index}: file"), []).append(tensor)
    for file in files:
        if not os.path.isfile(file):  # also False for a path that is too long
            raise UsageError(f"{file} does not exist, though {index.name} names it; download it too")
    return files


class SafetensorsFiles:
    """`Tensors` in one or several safetensors files."""

    def __init__(self, files: dict[Path, list[str]]):
        self.kinds: dict[str, TensorInfo] = {}
        self._opened: dict[str, Any] = {}
        for file, expected in files.items():
            try:
                opened = safe_open(str(file), framework="np").__enter__()  # closed with the last reference to it
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
            except SafetensorError as error:
                raise UsageError(f"{file} is truncated or not a safetensors file ({error}); get it again") from None
            kinds = {name: TensorInfo(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            _add_kinds(self.kinds, file, kinds, expected)
            self._opened |= dict.fromkeys(kinds, opened)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        if rows == slice(None):
            return self._opened[name].get_tensor(name)
        first, end, _ = rows.indices(self.kinds[name].shape[0])  # safetensors rejects an end after the last row
        return self._opened[name].get_slice(name)[first:end]


class PickledFiles:
    """`Tensors` in one or several pickles, read by torch."""

    def __init__(self, files: dict[Path, list[str]]):
        import_torch("--allow-pickle is for files that are read by torch")
        self.kinds: dict[str, TensorInfo] = {}
        self._arrays: dict[str, np.ndarray] = {}
        for file, expected in files.items():
            try:
                content = load_tensors(file)
            except Exception as error:  # many types: not a pickle, truncated, or not only tensors
                raise UsageError(f"{file} is not a file of tensors only ({first_line(error)}); get another") from None
            if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
                raise UsageError(f"{file} has something other than tensors by name; give the model's state_dict")
            arrays = to_arrays(file, content)
            kinds = {name: TensorInfo(WORDS.get(a.dtype.name, a.dtype.name), a.shape) for name, a in arrays.items()}
            _add_kinds(self.kinds, file, kinds, expected)
            self._arrays |= arrays

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        return self._arrays[name][rows]


def _add_kinds(known: dict[str, TensorInfo], file: Path, kinds: dict[str, TensorInfo], expected: list[str]) -> None:
    """Add the tensors of a file; reject one that lacks tensors of the index, or repeats those of another file."""
    if missing := [name for name in expected if name not in kinds]:
        raise UsageError(f"{file} lacks the tensor {missing[0]}, which the index expects in it; download it again")
    if twice := [name for name in kinds if name in known]:
        raise UsageError(f"{file} has the tensor {twice[0]}, which is in another file too; download the model again")
    known |= kinds


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Iterable[tuple[str, int, np.ndarray]],
    dtype: np.dtype,
    largest_file: int,
    wrote: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """Write tensors as safetensors files, with an index if there are several; returns their names.

    Arrays of another dtype or memory order are converted one by one; the others are written directly.

    Args:
      folder: exists.
      shapes: of the tensors, by name, in the order in the files.
      parts: name, first row, and rows of a tensor; each row of each tensor once, in any order.
      dtype: of the files.
      largest_file: maximum bytes of tensors in a file; a larger tensor has its own file.
      wrote: called with the bytes of tensors written since the last call.
    """
    files: list[list[str]] = [[]]
    room = largest_file
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = largest_file
        files[-1].append(name)
        room -= size
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SAFETENSORS]
    with ExitStack() as stack:
        starts: dict[str, tuple[BinaryIO, int]] = {}
        for file, part in zip(names, files, strict=True):
            stream = stack.enter_context((folder / file).open("wb"))
            starts |= _write_header(stream, {name: shapes[name] for name in part}, dtype)
        left = dict(sizes)
        for name, first, rows in parts:
            data = np.ascontiguousarray(rows.astype(dtype, copy=False)).view(np.uint8)
            stream, start = starts[name]
            stream.seek(start + first * (sizes[name] // shapes[name][0]))
            wrote(stream.write(data.data))
            left[name] -= data.nbytes
            del rows, data  # before the next ones are made
        assert not any(left.values()), left
    if len(files) > 1:
        file_of = {name: file for file, part in zip(names, files, strict=True) for name in part}
        names.append(f"{SAFETENSORS}.index.json")
        write_object(folder / names[-1], {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_of})
    return names


def _write_header(
    stream: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype
) -> dict[str, tuple[BinaryIO, int]]:
    """Begin a safetensors file: the length of the header in 8 bytes, the header, and then the tensors, whose first
    bytes in the file are returned.

    The library's own function needs all tensors at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": WORDS[dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    stream.write(struct.pack("<Q", len(text)) + text)
    return {name: (stream, 8 + len(text) + header[name]["data_offsets"][0]) for name in shapes}


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB, 500MB or 64KB, in powers of ten as in Hugging Face.

    Raises:
      UsageError: it is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper())) if match else 0
    if size < 1:
        raise UsageError(f"--shard-size {text!r} is not a size; give one such as 5GB or 500MB")
    return size
