"""Megatron's files are pickles, and a pickle is a program: here they are read as data, and nothing is executed.

A pickle names the functions and classes it wants to call. torch's reader with `weights_only` calls those that make
tensors and refuses all others. Besides tensors, a Megatron checkpoint contains the arguments of the run and the state
needed to resume it: an `argparse.Namespace`, random states, objects of Megatron's own classes. Each of these names is
replaced by a `StandIn`, a class that stores its arguments and does nothing; Megatron is never imported. Any other name
is refused, and the message gives the name.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mjax.errors import UsageError
from mjax.interop.torch_files import first_line, import_torch, load_tensors

OF_MEGATRON = ("megatron.", "fp16.")
"""Prefixes of Megatron's own classes: modes, schedulers, loss scalers."""
BESIDE_TENSORS = {
    "argparse.Namespace", "types.SimpleNamespace", "io.BytesIO", "_io.BytesIO", "signal.Signals",
    "pathlib.PosixPath", "pathlib._local.PosixPath",  # the second of Python 3.13
    "numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType",
    "numpy.core.multiarray._reconstruct", "numpy.core.multiarray.scalar",  # of NumPy 1, and of NumPy 2:
    "numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar",
}  # fmt: skip
"""Objects of other libraries in Megatron's checkpoints: arguments, paths, random states, kernel states."""


MOST = 2**62  # above any number of bytes or elements


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


# --- Files of torch.save ----------------------------------------------------------------------------------------------


def load(file: Path) -> dict[str, Any]:
    """The contents of a torch.save file: tensors (memory-mapped if possible), plain values and stand-ins.

    Raises:
      UsageError: torch is not installed, or the file is missing, damaged, not a dict, or tries to execute something.
    """
    import_torch("checkpoints of Megatron are read by torch")
    if not file.is_file():
        raise UsageError(f"{file} does not exist; copy the whole checkpoint")
    try:
        found = load_tensors(file, _stand_in)
    except Exception as error:  # of many kinds, for what is cut off, no file of torch's, or more than data
        if called := re.search(r"GLOBAL (\S+)", str(error)):
            raise UsageError(
                f"{file} wants to call {called[1]}, which is not part of a checkpoint of Megatron, and nothing was "
                "executed; save its weights and arguments again without it"
            ) from None
        raise UsageError(
            f"{file} is truncated or not a file of torch.save ({first_line(error)}); copy it again"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds a {type(found).__name__}, and a checkpoint is a dict; give one of Megatron")
    return found


def _stand_in(name: str) -> type | None:
    return type(name, (StandIn,), {}) if name in BESIDE_TENSORS or name.startswith(OF_MEGATRON) else None


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
    """The tensors listed in the .metadata of a torch_dist checkpoint, by name, without entries of other kinds.

    Raises:
      UsageError: the file is missing or damaged, or tries to execute something.
    """
    if not file.is_file():
        raise UsageError(f"{file} does not exist; copy the whole checkpoint, hidden files too")
    try:
        with file.open("rb") as stream:
            _check_memo(stream, file.stat().st_size)
            found = _MetadataReader(stream).load()
        places = {
            (index.fqn, tuple(index.offset)): info
            for index, info in found.storage_data.items()
            if vars(index).get("offset") is not None
        }
        return {
            name: _stored(name, kind, places)
            for name, kind in found.state_dict_metadata.items()
            if type(kind).__name__ == "TensorStorageMetadata"
        }
    except UsageError as error:
        raise UsageError(f"{file}: {error}; get the checkpoint from where it was trained") from None
    except Exception as error:  # a damaged pickle fails in as many ways as there are opcodes
        raise UsageError(
            f"{file} is truncated or not a .metadata of torch.distributed.checkpoint ({type(error).__name__}); "
            "copy it again"
        ) from None


def _check_memo(stream: BinaryIO, size: int) -> None:
    """Refuse a memo index larger than the file: the unpickler would allocate that many slots."""
    for code, value, _ in pickletools.genops(stream):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and value > size:
            raise ValueError(f"object {value:,} of {size:,} bytes")
    stream.seek(0)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and 0 <= value < MOST for value in found):
        raise ValueError("not whole numbers")
    return found


def _stored(name: str, kind: StandIn, places: dict) -> Stored:
    chunks = []
    for chunk in kind.chunks:
        place = places[name, tuple(chunk.offsets)]
        # Elsewhere would be outside the checkpoint.
        if "\0" in place.relative_path or Path(place.relative_path).name != place.relative_path:
            raise UsageError(f"it names {place.relative_path!r}, which is not a file beside it")
        if vars(place).get("transform_descriptors"):
            raise UsageError(f"{name} is stored as {place.transform_descriptors}, and mjax reads plain tensors only")
        start, length = _whole_numbers([place.offset, place.length])
        offsets, sizes = _whole_numbers(chunk.offsets), _whole_numbers(chunk.sizes)
        chunks.append(Chunk(offsets, sizes, place.relative_path, start, length))
    dtype, shape = kind.properties.state[0], _whole_numbers(kind.size)
    if type(dtype) is not str or any(len(c.offsets) != len(shape) or len(c.sizes) != len(shape) for c in chunks):
        raise ValueError("parts of other dims than the whole")
    return Stored(dtype, shape, tuple(chunks))
