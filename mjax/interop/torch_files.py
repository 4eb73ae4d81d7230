"""Files of torch.save, which are pickles: torch reads them as data, and nothing in them is executed.

torch is needed for these files only. Its reader with `weights_only` constructs tensors and plain values, and refuses
everything else. What it does not check is checked here: the checksums written by torch.save, and whether a tensor is
larger than its stored bytes.
"""

from __future__ import annotations

import pickletools
import reprlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jax.numpy import bfloat16

from mjax.errors import UsageError

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


def load_tensors(file: Path | BinaryIO, stand_in: Callable[[str], type | None] | None = None) -> Any:
    """The contents of a torch.save file: tensors and plain values, memory-mapped if its format allows.

    Args:
      file: a file in a folder, or its bytes.
      stand_in: gives the class to use in place of a class or function of that name; if None torch refuses the name,
        unless tensors are made with it.

    Raises:
      Exception: of many kinds, where it is cut off, damaged, no file of torch.save, or wants to call something.
    """
    import torch

    archive, in_memory = zipfile.is_zipfile(file), not isinstance(file, Path)
    if archive:
        _check_archive(file)
    if in_memory:
        file.seek(0)
    load = partial(torch.load, file, map_location="cpu", weights_only=True, mmap=archive and not in_memory)
    if stand_in is None:
        return load()
    with _nothing_allowed_but([(made, name) for name in _names_in(file) if (made := stand_in(name))], torch):
        return load()


@contextmanager
def _nothing_allowed_but(inert: list[tuple[type, str]], torch: Any) -> Iterator[None]:
    """Have torch take these for the names beside them, and none of the classes that other libraries have allowed it."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(inert)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _names_in(file: Path) -> set[str]:
    """The names of functions and classes in a file of torch.save, found without running it."""
    if not zipfile.is_zipfile(file):
        with file.open("rb") as stream:  # torch before 1.6: four pickles, the fourth is the object
            return {name for _ in range(4) for name in _names_in_pickle(stream)}
    with zipfile.ZipFile(file) as archive:
        records = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return {name for record in records for name in _names_in_pickle(archive.open(record))}


def _names_in_pickle(stream: BinaryIO) -> set[str]:
    try:
        return {value.replace(" ", ".", 1) for code, value, _ in pickletools.genops(stream) if code.name == "GLOBAL"}
    except ValueError:  # no pickle: torch says so when it opens the file
        return set()


def _check_archive(file: Path | BinaryIO) -> None:
    """Compare what torch.save wrote with the checksums it wrote beside it: torch itself does not.

    Files of torch before 1.6 are no archives and have none, nor have those of a torch that was told to leave them out.

    Raises:
      BadZipFile: a part of it is not what was written.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if packed := [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]:
            raise zipfile.BadZipFile(f"{packed[0]} in it is compressed")
        if any(member.CRC for member in members) and (damaged := archive.testzip()):
            raise zipfile.BadZipFile(f"{damaged} in it is not what was written (checksum)")


def as_arrays(file: Path, values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors of torch by name as arrays of NumPy over the same memory, bfloat16 included.

    Raises:
      UsageError: one is no tensor, no plain one, of a dtype that NumPy does not have, or larger than what is stored of
        it: strides of 0 make any size of one number.
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
            raise UsageError(
                f"{file}: {name} has shape {tuple(tensor.shape)} and {stored:,} bytes stored of it, which do not "
                "suffice; get the file again, or save it with contiguous tensors"
            )
        tensor = tensor.detach()
        try:
            bits = tensor.view(torch.int16).numpy().view(bfloat16) if tensor.dtype == torch.bfloat16 else None
            arrays[name] = tensor.numpy() if bits is None else bits
        except TypeError:  # eight bits and less
            raise UsageError(
                f"{file}: {name} is of type {tensor.dtype}, which mjax does not read; save it as float32"
            ) from None
    return arrays


def first_line(error: Exception) -> str:
    """Of what a library says went wrong, or the kind of error where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
