"""Files of torch, which are pickles: read as data, and nothing in them is executed.

A pickle is a program: it names the functions and classes it wants to call. torch's reader with `weights_only` calls
those that make tensors and plain values, and rejects all others. The checks it lacks are here: the checksums written by
torch.save, and whether a tensor is larger than its stored bytes. torch is needed for these files only.

Besides tensors, a Megatron checkpoint contains the arguments of the run and the state needed to resume it: an
`argparse.Namespace`, random states, objects of Megatron's own classes. Each of these names is replaced by a `StandIn`,
a class that stores its arguments and does nothing; Megatron is never imported. Any other name is rejected, and the
message gives the name.
"""

from __future__ import annotations

import io
import pickle
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
from mjax.utils.files import path_below

OLDEST_TORCH = (2, 10)  # in older versions a file could get around weights_only


def import_torch(why: str) -> Any:
    """The torch library.

    Args:
      why: the beginning of the error message: "… are read by torch".

    Raises:
      UsageError: it is not installed, or too old to be trusted with foreign files.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise UsageError(f"{why}, which is not installed; type `pip install torch`") from None
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise UsageError(f"torch {torch.__version__} reads files unsafely; type `pip install 'torch>={oldest}'`")
    return torch


def load_tensors(file: Path | BinaryIO, of_megatron: bool = False) -> Any:
    """The contents of a torch.save file: tensors and plain values, memory-mapped if its format allows.

    Args:
      file: a file in a folder, or its bytes.
      of_megatron: put stand-ins for the objects in Megatron's checkpoints; else torch rejects them.

    Raises:
      Exception: of many kinds, where it is cut off, damaged, no file of torch.save, or wants to call something.
    """
    import torch

    archive, on_disk = zipfile.is_zipfile(file), isinstance(file, Path)
    if archive:
        _check_archive(file)
    names = _names_in(file) if of_megatron else ()
    if not on_disk:
        file.seek(0)
    known = [name for name in names if name in NEXT_TO_TENSORS or name.startswith(OF_MEGATRON)]
    allowed = torch.serialization.get_safe_globals()  # by other libraries
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([(type(name, (StandIn,), {}), name) for name in known])
        return torch.load(file, map_location="cpu", weights_only=True, mmap=archive and on_disk)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed)


def _names_in(file: Path | BinaryIO) -> set[str]:
    """The names of functions and classes in a file of torch.save, found without running it."""
    with ExitStack() as stack, suppress(ValueError):  # not a pickle: torch reports it when it opens the file
        if isinstance(file, Path) and not zipfile.is_zipfile(file):
            pickles = 4 * [stack.enter_context(file.open("rb"))]  # torch before 1.6: the fourth is the object
        else:
            archive = stack.enter_context(zipfile.ZipFile(file))
            pickles = [archive.open(name) for name in archive.namelist() if name.endswith("/data.pkl")]
        opcodes = chain.from_iterable(map(pickletools.genops, pickles))
        return {value.replace(" ", ".", 1) for code, value, _ in opcodes if code.name == "GLOBAL"}
    return set()


def _check_archive(file: Path | BinaryIO) -> None:
    """Compare a torch.save file with its checksums, which torch itself does not.

    Files of torch before 1.6 are not archives and have none. torch can also be told to leave them out.

    Raises:
      BadZipFile: a part of it is not what was written.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if packed := [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]:
            raise zipfile.BadZipFile(f"{packed[0]} in it is compressed")
        if any(member.CRC for member in members) and (damaged := archive.testzip()):
            raise zipfile.BadZipFile(f"{damaged} in it is not what was written (checksum)")


def to_arrays(file: Path, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors of torch by name as arrays of NumPy over the same memory, bfloat16 included.

    Raises:
      UsageError: one is not a plain tensor, has a dtype that NumPy lacks, or is larger than its stored data: strides of
        0 make any size of one number.
    """
    import torch

    arrays = {}
    for name, tensor in values.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{file}: {name} is {reprlib.repr(tensor)}, which is not a tensor; convert another model")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise UsageError(f"{file}: {name} is not a plain tensor; save it as one, dense and on the CPU")
        stored = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored:
            sizes = f"shape {tuple(tensor.shape)} and {stored:,} bytes stored of it, which do not suffice"
            raise UsageError(f"{file}: {name} has {sizes}; get the file again, or save it with contiguous tensors")
        tensor = tensor.detach()
        try:
            is_bf16 = tensor.dtype == torch.bfloat16
            arrays[name] = tensor.view(torch.int16).numpy().view(bfloat16) if is_bf16 else tensor.numpy()
        except TypeError:  # eight bits and less
            raise UsageError(f"{file}: {name} is of type {tensor.dtype}, not read here; save it as float32") from None
    return arrays


# --- Files of Megatron ------------------------------------------------------------------------------------------------

OF_MEGATRON = ("megatron.", "fp16.")
"""Prefixes of Megatron's own classes: modes, schedulers, loss scalers."""
NEXT_TO_TENSORS = {
    "argparse.Namespace", "types.SimpleNamespace", "io.BytesIO", "_io.BytesIO", "signal.Signals",
    "pathlib.PosixPath", "pathlib._local.PosixPath",  # the second of Python 3.13
    "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",  # of NumPy 1, and of NumPy 2:
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
}  # fmt: skip
"""Objects of other libraries in Megatron's checkpoints: arguments, paths, random states, kernel states."""
MAX_ELEMENTS = 2**62  # above any number of bytes or elements


class StandIn:
    """An object of a class that is not imported: it stores what the pickle gives it.

    Attributes:
      arguments: of the call of its class.
    """

    __slots__ = ("__dict__", "arguments")

    def __new__(cls, *arguments: Any) -> StandIn:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(reprlib.repr, self.arguments))})"


def load(file: Path, chunk: Chunk | None = None) -> dict[str, Any]:
    """The contents of a torch.save file: tensors (memory-mapped if possible), plain values and stand-ins.

    Args:
      file: in a folder.
      chunk: of the bytes that megatron-core 0.19 and later saves among the shards: a list of one dict.

    Raises:
      UsageError: torch is not installed, or the file is missing, damaged, not a dict, or tries to execute something.
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; copy the whole checkpoint")
    import_torch("checkpoints of Megatron are read by torch")
    try:
        content = load_tensors(file if chunk is None else read_chunk(file, chunk), of_megatron=True)
        if chunk is not None:
            (content,) = content
    except Exception as error:  # of many kinds, for what is cut off, no file of torch's, or more than data
        if called := re.search(r"GLOBAL (\S+)", str(error)):
            what = f"{called[1]}, which is not part of a checkpoint of Megatron, and nothing was executed"
            raise UsageError(f"{file} wants to call {what}; save its weights and arguments without it") from None
        reason = first_line(error)
        raise UsageError(f"{file} is truncated or not a file of torch.save ({reason}); get it again") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} holds a {type(content).__name__}, and a checkpoint is a dict; give one of Megatron")
    return content


def read_chunk(file: Path, chunk: Chunk) -> BinaryIO:
    """The bytes of a part in `file`, as a stream of its own."""
    with file.open("rb") as stream:
        stream.seek(chunk.start)
        return io.BytesIO(stream.read(min(chunk.length, file.stat().st_size)))


# --- .metadata of torch.distributed.checkpoint ------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and where it is stored.

    Attributes:
      offsets, sizes: its position in the whole tensor, by dimension.
      file: name in the folder.
      start, length: its bytes in the file, themselves a torch.save file.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder of torch.distributed.checkpoint: `dtype` as torch names it, full shape, parts."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


COMMON_STATE = "common_state/shard_0_1"
"""Name of the arguments and the version among the entries of megatron-core 0.19 and later, which has no common.pt."""
_STAND_INS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
"""Modules of the classes in .metadata: storage locations and the plan by which they were written."""
_VALUES = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): StandIn,
}


class _MetadataReader(pickle.Unpickler):
    """Makes stand-ins and plain values for the names that occur in .metadata, refuses all others, imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_STAND_INS):
            return type(name, (StandIn,), {})
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and re.fullmatch(r"b?float\d+\w*|u?int\d+|bool|complex\d+", name):
            return name
        raise UsageError(f"it wants to call {module}.{name}, which is not part of it, and nothing was executed")


def read_metadata(file: Path) -> dict[str, Stored]:
    """The tensors listed in the .metadata of a torch_dist checkpoint, by name, and `COMMON_STATE`, of dtype bytes.

    Entries of other kinds are left out.

    Raises:
      UsageError: the file is missing or damaged, or tries to execute something.
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; copy the whole checkpoint, hidden files too")
    try:
        with file.open("rb") as stream:
            _check_memo(stream, file.stat().st_size)
            content = _MetadataReader(stream).load()
        locations = {
            (index.fqn, tuple(vars(index).get("offset") or ())): info for index, info in content.storage_data.items()
        }
        entries = {
            name: _resolve_stored(name, kind, locations, file.parent)
            for name, kind in content.state_dict_metadata.items()
            if type(kind).__name__ == "TensorStorageMetadata"
        }
        if COMMON_STATE in content.state_dict_metadata:
            chunk = _chunk(COMMON_STATE, locations[COMMON_STATE, ()], file.parent)
            entries[COMMON_STATE] = Stored("bytes", (), (chunk,))
        return entries
    except UsageError as error:
        raise UsageError(f"{file}: {error}; get the checkpoint from where it was trained") from None
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise UsageError(f"{file} is truncated or not a .metadata ({type(error).__name__}); copy it again") from None


def _check_memo(stream: BinaryIO, size: int) -> None:
    """Refuse a memo index larger than the file: the unpickler would allocate that many slots."""
    for code, value, _ in pickletools.genops(stream):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and value > size:
            raise ValueError(f"object {value:,} of {size:,} bytes")
    stream.seek(0)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(value) is int and 0 <= value < MAX_ELEMENTS for value in numbers):
        raise ValueError("not whole numbers")
    return numbers


def _chunk(name: str, location: StandIn, folder: Path, offsets: Any = (), sizes: Any = ()) -> Chunk:
    file = location.relative_path
    path_below(folder, file, f"the file of {name},")
    if vars(location).get("transform_descriptors"):
        raise UsageError(f"{name} is stored as {location.transform_descriptors}, and mjax reads plain tensors only")
    start, length = _whole_numbers([location.offset, location.length])
    return Chunk(_whole_numbers(offsets), _whole_numbers(sizes), file, start, length)


def _resolve_stored(name: str, kind: StandIn, locations: dict, folder: Path) -> Stored:
    chunks = tuple(
        _chunk(name, locations[name, tuple(chunk.offsets)], folder, chunk.offsets, chunk.sizes) for chunk in kind.chunks
    )
    dtype, shape = kind.properties.state[0], _whole_numbers(kind.size)
    if type(dtype) is not str or any(len(c.offsets) != len(shape) or len(c.sizes) != len(shape) for c in chunks):
        raise ValueError("parts of other dims than the whole")
    return Stored(dtype, shape, chunks)
