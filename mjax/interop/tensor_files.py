"""Tensors by name in a Hugging Face model folder: read one at a time, from any number of files.

    model.safetensors                      all tensors, or
    model-00001-of-00003.safetensors …     shards, and
    model.safetensors.index.json           {"weight_map": {tensor: file}}

A safetensors file is a JSON header and bytes, with nothing to execute. It is mapped into memory, so that reading a
tensor, or some rows of it, needs no more memory than the result. The older pytorch_model.bin is a pickle, which is a
program; it is opened on request only, by torch's reader for weights, which rejects everything except tensors.

A tensor NAME in float8 with scales NAME_scale_inv, one for each block of 128 × 128, is read as their product in
bfloat16: the published weights of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jax.numpy import bfloat16, float8_e4m3fn  # registers bfloat16 with NumPy, on which safetensors relies
from safetensors import SafetensorError, safe_open

from mjax.errors import UsageError, first_line
from mjax.interop.model_folder import read_object, write_object
from mjax.interop.torch_files import import_torch, load_tensors, to_numpy
from mjax.utils.files import path_below

Shapes = Mapping[str, tuple[int, ...]]
SAFETENSORS, PYTORCH_BIN = "model.safetensors", "pytorch_model.bin"
FLOAT_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(bfloat16)}
"""Dtypes that float32 represents exactly."""
FLOAT8, FLOAT8_SCALES, FLOAT8_BLOCK = "F8_E4M3", "_scale_inv", 128
FLOAT32_NAMES = ("_correction_bias", ".expert_bias")
"""Tensors that files always have in float32, as transformers and Megatron compute with them: in another dtype a router
would choose other experts."""
DTYPE_NAMES = {dtype.name: word for word, dtype in FLOAT_DTYPES.items()}
"""safetensors' names of these dtypes, by their names in NumPy and torch."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in files, which is read when it is sliced: `tensor[:]`, or some rows of it (along its first dim).

    Attributes:
      dtype: safetensors' name (F32, BF16, I64, …).
      shape: of the whole tensor.
      read: returns rows in the stored dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[slice], np.ndarray]

    @classmethod
    def from_array(cls, array: np.ndarray) -> LazyTensor:
        """An array in memory, or mapped into it."""
        return cls(DTYPE_NAMES.get(array.dtype.name, array.dtype.name), array.shape, array.__getitem__)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return self.read(rows)


Tensors = Mapping[str, LazyTensor]  # the tensors of a model folder by name


def open_tensors(folder: Path, allow_pickle: bool = False) -> Tensors:
    """Open the tensors of a model folder; safetensors if it has both formats.

    Args:
      folder: contains one of the files above, or several and their index.
      allow_pickle: True to open pytorch_model.bin.

    Raises:
      UsageError: there are none, a file is missing or damaged, or there is only a pickle without `allow_pickle`.
    """
    if files := _find_files(folder, SAFETENSORS):
        return open_safetensors(files)
    files = _find_files(folder, PYTORCH_BIN)
    if not files:
        raise UsageError(f"{folder} has no {SAFETENSORS}; give a folder written by save_pretrained")
    if not allow_pickle:
        remedy = f"get {SAFETENSORS}, or add --allow-pickle to have torch read only the tensors in it"
        raise UsageError(f"{folder} has its weights in {PYTORCH_BIN} only, a pickle; {remedy}")
    return _open_pickles(files)


def _find_files(folder: Path, whole: str) -> dict[Path, list[str]]:
    """Files of tensors, each with the tensors that the index expects in it; empty if there are none."""
    if (folder / whole).is_file():
        return {folder / whole: []}
    index = folder / f"{whole}.index.json"
    if not index.is_file():
        return {}
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index} has no weight_map from tensors to files; download it again")
    files: dict[Path, list[str]] = {}
    for tensor, name in weight_map.items():
        files.setdefault(path_below(folder, name, f"{index}: file"), []).append(tensor)
    for file in files:
        if not os.path.isfile(file):  # also False for a path that is too long
            raise UsageError(f"{file} does not exist, though {index.name} names it; download it too")
    return files


def open_safetensors(files: Mapping[Path, Sequence[str]]) -> Tensors:
    """The tensors in one or several safetensors files, each with those that it must have."""
    tensors: dict[str, LazyTensor] = {}
    labels: dict[str, str] = {}
    for file, expected in files.items():
        try:
            opened = safe_open(str(file), framework="np").__enter__()  # closed with the last reference to it
            contents = {name: _slice_safetensors(file, opened, name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        except SafetensorError as error:
            raise UsageError(f"{file} is truncated or not a safetensors file ({error}); get it again") from None
        _add_tensors(tensors, file, contents, expected)
        labels |= {name: f"{file}: {name}" for name in contents}
    for name, tensor in list(tensors.items()):
        scales = tensors.get(name + FLOAT8_SCALES)
        if tensor.dtype == FLOAT8 and scales is not None and scales.dtype == "F32":
            tensors[name] = LazyTensor("BF16", tensor.shape, partial(_dequantize, labels[name], tensor, scales))
            del tensors[name + FLOAT8_SCALES]
    return tensors


def _slice_safetensors(file: Path, opened: Any, name: str) -> LazyTensor:
    part = opened.get_slice(name)
    dtype, shape = part.get_dtype(), tuple(part.get_shape())

    def read(rows: slice) -> np.ndarray:
        if dtype == FLOAT8:
            return _read_float8(file, name).reshape(shape)[rows]
        if rows == slice(None):
            return opened.get_tensor(name)
        first, end, _ = rows.indices(shape[0])  # safetensors rejects an end after the last row
        return part[first:end]

    return LazyTensor(dtype, shape, read)


def _read_float8(file: Path, name: str) -> np.ndarray:
    """The numbers of a tensor in float8, which safetensors cannot read without torch."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        start, end = json.loads(stream.read(size))[name]["data_offsets"]
        stream.seek(8 + size + start)
        return np.frombuffer(stream.read(end - start), float8_e4m3fn)


def _dequantize(label: str, values: LazyTensor, scales: LazyTensor, rows: slice) -> np.ndarray:
    """Multiply a matrix by the scales of its blocks, as `Fp8Dequantize` of transformers 5 does; the last blocks of a
    row and a column may be smaller."""
    blocks = tuple(-(-size // FLOAT8_BLOCK) for size in values.shape)
    if len(blocks) != 2 or scales.shape != blocks:
        of_blocks = f"its scales {scales.shape}, which are not of {FLOAT8_BLOCK} × {FLOAT8_BLOCK} numbers each"
        raise UsageError(f"{label} has shape {values.shape} and {of_blocks}; convert another model")
    factors = scales[:]
    for dim, size in enumerate(values.shape):
        factors = np.repeat(factors, FLOAT8_BLOCK, axis=dim).take(range(size), axis=dim)
    return (values[:].astype(np.float32) * factors).astype(bfloat16)[rows]


def _open_pickles(files: Mapping[Path, Sequence[str]]) -> Tensors:
    """The tensors in one or several pickles, read by torch."""
    import_torch("--allow-pickle is for files that are read by torch")
    tensors: dict[str, LazyTensor] = {}
    for file, expected in files.items():
        try:
            content = load_tensors(file)
        except Exception as error:  # many types: not a pickle, truncated, or not only tensors
            raise UsageError(f"{file} is not a file of tensors only ({first_line(error)}); get another") from None
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            raise UsageError(f"{file} has something other than tensors by name; give the model's state_dict")
        contents = {name: LazyTensor.from_array(array) for name, array in to_numpy(file, content).items()}
        _add_tensors(tensors, file, contents, expected)
    return tensors


def _add_tensors(known: dict[str, LazyTensor], file: Path, contents: Tensors, expected: Sequence[str]) -> None:
    """Add the tensors of a file; reject a file that lacks tensors of the index, or repeats tensors of another file."""
    if missing := [name for name in expected if name not in contents]:
        raise UsageError(f"{file} lacks the tensor {missing[0]}, which the index expects in it; download it again")
    if repeated := [name for name in contents if name in known]:
        raise UsageError(f"{file} has the tensor {repeated[0]}, which is in another file too; download the model again")
    known |= contents


# --- Writing ----------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path,
    shapes: Shapes,
    parts: Iterable[tuple[str, int, np.ndarray]],
    dtype: np.dtype,
    max_shard_size: int,
    on_written: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """Write tensors as safetensors files, with an index if there are several; returns their names.

    Arrays of another dtype or memory order are converted one by one; the others are written directly.

    Args:
      folder: exists.
      shapes: of the tensors, by name, in the order in the files.
      parts: name, first row, and rows of a tensor; each row of each tensor once, in any order.
      dtype: of the tensors but `FLOAT32_NAMES`.
      max_shard_size: maximum bytes of tensors in a file; a larger tensor has a separate file.
      on_written: called with the bytes of tensors written since the last call.
    """
    files: list[list[str]] = [[]]
    free = max_shard_size
    dtypes = {name: np.dtype(np.float32) if name.endswith(FLOAT32_NAMES) else dtype for name in shapes}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
    for name, size in sizes.items():
        if size > free and files[-1]:
            files.append([])
            free = max_shard_size
        files[-1].append(name)
        free -= size
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    if len(files) == 1:
        names = [SAFETENSORS]
    with ExitStack() as stack:
        starts: dict[str, tuple[BinaryIO, int]] = {}
        for file, part in zip(names, files, strict=True):
            stream = stack.enter_context((folder / file).open("wb"))
            starts |= _write_header(stream, {name: shapes[name] for name in part}, dtypes)
        remaining = dict(sizes)
        for name, first, rows in parts:
            data = np.ascontiguousarray(rows.astype(dtypes[name], copy=False)).view(np.uint8)
            stream, start = starts[name]
            stream.seek(start + first * (sizes[name] // shapes[name][0]))
            on_written(stream.write(data.data))
            remaining[name] -= data.nbytes
            del rows, data  # before the next rows are computed
        assert not any(remaining.values()), remaining
    if len(files) > 1:
        weight_map = {name: file for file, part in zip(names, files, strict=True) for name in part}
        names.append(f"{SAFETENSORS}.index.json")
        write_object(folder / names[-1], {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return names


def _write_header(stream: BinaryIO, shapes: Shapes, dtypes: Mapping[str, np.dtype]) -> dict[str, tuple[BinaryIO, int]]:
    """Write the beginning of a safetensors file: the length of the header in 8 bytes, and the header.

    The function of `safetensors` needs all tensors in memory.

    Returns:
      The stream and the first byte of each tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name].name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    stream.write(struct.pack("<Q", len(text)) + text)
    return {name: (stream, 8 + len(text) + header[name]["data_offsets"][0]) for name in shapes}


def parse_shard_size(text: str) -> int:
    """Parse a size such as 5GB, 500MB or 64KB into bytes, in powers of ten as in Hugging Face.

    Raises:
      UsageError: it is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])B", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper())) if match else 0
    if size < 1:
        raise UsageError(f"--shard-size {text!r} is not a size; give one such as 5GB or 500MB")
    return size
