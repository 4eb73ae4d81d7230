"""Files of torch, which are pickles: read as data, and nothing in them is executed.

A pickle is a program that names functions and classes to call. torch's reader with `weights_only` calls only those for
tensors and plain values, and rejects all others. This module adds two checks: the checksums of torch.save, and that no
tensor is larger than its stored bytes. torch is needed for these files only.

Besides tensors, a Megatron checkpoint contains the arguments of the run and the state needed to resume it: an
`argparse.Namespace`, random states, objects of Megatron's classes. Each of these names is replaced by a `PickleStub`, a
class that stores its arguments and does nothing; Megatron is never imported. Any other name is rejected, and the
message gives the name.
"""

from __future__ import annotations

import io
import pickletools
import re
import reprlib
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jax.numpy import bfloat16

from mjax.errors import UsageError, first_line

MIN_TORCH_VERSION = (2, 10)  # in older versions a file could bypass weights_only


def import_torch(purpose: str) -> Any:
    """Import torch.

    Args:
      purpose: the beginning of the error message: "… are read by torch".

    Raises:
      UsageError: it is not installed, or too old to be trusted with foreign files.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise UsageError(f"{purpose}, which is not installed; type `pip install torch`") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < MIN_TORCH_VERSION:
        oldest = ".".join(map(str, MIN_TORCH_VERSION))
        raise UsageError(f"torch {torch.__version__} reads files unsafely; type `pip install 'torch>={oldest}'`")
    return torch


def load_tensors(file: Path | BinaryIO, allow_megatron: bool = False) -> Any:
    """Load a torch.save file: tensors and plain values, memory-mapped if its format allows.

    Args:
      file: a file in a folder, or its bytes.
      allow_megatron: True to replace the objects in Megatron's checkpoints by stubs; else torch rejects them.

    Raises:
      Exception: of many types, for a truncated or damaged file, another format, or a call of a function.
    """
    import torch

    archive, on_disk = zipfile.is_zipfile(file), isinstance(file, Path)
    if archive:
        _check_archive(file)
    names = _read_global_names(file) if allow_megatron else ()
    if not on_disk:
        file.seek(0)
    known = [name for name in names if name in MEGATRON_GLOBALS or name.startswith(MEGATRON_PREFIXES)]
    previous = torch.serialization.get_safe_globals()  # of other libraries
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([(type(name, (PickleStub,), {}), name) for name in known])
        return torch.load(file, map_location="cpu", weights_only=True, mmap=archive and on_disk)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(previous)


def _read_global_names(file: Path | BinaryIO) -> set[str]:
    """Read the names of functions and classes in a file of torch.save, without running it."""
    with ExitStack() as stack, suppress(ValueError):  # not a pickle, which torch reports
        if isinstance(file, Path) and not zipfile.is_zipfile(file):
            pickles = 4 * [stack.enter_context(file.open("rb"))]  # torch before 1.6: the fourth is the object
        else:
            archive = stack.enter_context(zipfile.ZipFile(file))
            pickles = [archive.open(name) for name in archive.namelist() if name.endswith("/data.pkl")]
        opcodes = chain.from_iterable(map(pickletools.genops, pickles))
        return {value.replace(" ", ".", 1) for code, value, _ in opcodes if code.name == "GLOBAL"}
    return set()


def _check_archive(file: Path | BinaryIO) -> None:
    """Compare a torch.save file with its checksums, which torch does not.

    Files of torch before 1.6 are not archives and have none, and torch has an option to omit them.

    Raises:
      BadZipFile: a checksum differs.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if packed := [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]:
            raise zipfile.BadZipFile(f"{packed[0]} in it is compressed")
        if any(member.CRC for member in members) and (damaged := archive.testzip()):
            raise zipfile.BadZipFile(f"{damaged} in it is not what was written (checksum)")


def to_numpy(file: Path, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Convert torch's tensors by name to NumPy arrays over the same memory, bfloat16 included.

    Raises:
      UsageError: one is not a plain tensor, has a dtype that NumPy lacks, or is larger than its stored data: with
        strides of 0 one number has any shape.
    """
    import torch

    arrays = {}
    for name, tensor in values.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{file}: {name} is {reprlib.repr(tensor)}, which is not a tensor; convert another model")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise UsageError(f"{file}: {name} is not a plain tensor; save it as one, dense and on the CPU")
        stored_bytes = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored_bytes:
            sizes = f"shape {tuple(tensor.shape)} and {stored_bytes:,} bytes stored of it, which do not suffice"
            raise UsageError(f"{file}: {name} has {sizes}; get the file again, or save it with contiguous tensors")
        tensor = tensor.detach()
        try:
            is_bf16 = tensor.dtype == torch.bfloat16
            arrays[name] = tensor.view(torch.int16).numpy().view(bfloat16) if is_bf16 else tensor.numpy()
        except TypeError:  # eight bits and less
            raise UsageError(f"{file}: {name} is of type {tensor.dtype}, not read here; save it as float32") from None
    return arrays


# --- Files of Megatron ------------------------------------------------------------------------------------------------

MEGATRON_PREFIXES = ("megatron.", "fp16.")  # prefixes of Megatron's classes: modes, schedulers, loss scalers
MEGATRON_GLOBALS = {
    "argparse.Namespace", "types.SimpleNamespace", "io.BytesIO", "_io.BytesIO", "signal.Signals",
    "pathlib.PosixPath", "pathlib._local.PosixPath",  # the second of Python 3.13
    "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",  # of NumPy 1, and of NumPy 2:
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
}  # fmt: skip
"""Objects of other libraries in Megatron's checkpoints: arguments, paths, random states, kernel states."""
MAX_ELEMENTS = 2**62  # larger than any number of bytes or elements


class PickleStub:
    """An object of a class that is not imported; it stores the state from the pickle.

    Attributes:
      arguments: of the call of its class.
    """

    __slots__ = ("__dict__", "arguments")

    def __new__(cls, *arguments: Any) -> PickleStub:
        stub = super().__new__(cls)
        stub.arguments = arguments
        return stub

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(reprlib.repr, self.arguments))})"


@dataclass(frozen=True)
class TensorChunk:
    """A part of a tensor, and its location.

    Attributes:
      offsets, sizes: its position in the whole tensor, by dimension.
      file: name in the folder.
      start, length: its bytes in the file, which are a torch.save file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def load_megatron_file(file: Path, chunk: TensorChunk | None = None, entry: str | None = None) -> dict[str, Any]:
    """Load a torch.save file of Megatron: tensors (memory-mapped if possible), plain values and stubs.

    Args:
      file: in a folder.
      chunk: bytes among the shards, where megatron-core 0.19 and later saves a list of one dict.
      entry: of `COMMON_ENTRIES` if the bytes are its value.

    Raises:
      UsageError: torch is not installed, or the file is missing, damaged, not a dict, or calls a function.
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; copy the whole checkpoint")
    import_torch("checkpoints of Megatron are read by torch")
    try:
        content = load_tensors(file if chunk is None else read_chunk(file, chunk), allow_megatron=True)
        if entry is not None:
            content = {entry: content}
        elif chunk is not None:
            (content,) = content
    except Exception as error:  # of many types: truncated, another format, or more than data
        if called := re.search(r"GLOBAL (\S+)", str(error)):
            problem = f"{called[1]}, which is not part of a checkpoint of Megatron, and nothing was executed"
            raise UsageError(f"{file} wants to call {problem}; save its weights and arguments without it") from None
        reason = first_line(error)
        raise UsageError(f"{file} is truncated or not a file of torch.save ({reason}); get it again") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds a {type(content).__name__}, and a checkpoint is a dict; give one of Megatron")
    return content


def read_chunk(file: Path, chunk: TensorChunk) -> BinaryIO:
    """Read the bytes of a chunk in `file` into a stream."""
    with file.open("rb") as stream:
        stream.seek(chunk.start)
        return io.BytesIO(stream.read(min(chunk.length, file.stat().st_size)))
