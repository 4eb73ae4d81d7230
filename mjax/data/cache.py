"""Indices on disk, so that the next start maps them into memory instead of building them again.

    FOLDER/KEY-document_index.npy, …       plain arrays, mapped read-only
    FOLDER/KEY.json                        written last: what they were built from, and their sizes and checksums

KEY is a hash of everything that the arrays depend on: of the lengths in the dataset's index rather than of its path, of
the documents drawn from, the samples, the seed and every option. Megatron hashes the path and leaves out the documents,
the extra token and the partial tail, so its cache silently gives wrong samples after one of these has changed. Here
that is another key.

No process waits for another. Each one that finds no arrays builds them, writes them to temporary files and renames
these. Two processes that build at once write the same bytes, so either copy will do; a process without a shared file
system builds its own; one that is killed leaves at most a temporary file, which is removed when nobody has written to
it for a day; other files in the folder are the user's. Checksums reveal damaged files, which are built again. Where
nothing can be written, a run continues with the indices in memory, as it does where they are too small to be worth a
file.
"""

import contextlib
import hashlib
import json
import re
import secrets
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mjax.utils.files import cache_home, make_folder, put

VERSION = 1  # of the way indices are built; a new one makes every old cache unused
MIN_CACHED_BYTES = 2**20  # bytes; fewer are built as fast as they are read
STALE = 24 * 3600  # seconds
TEMPORARY = re.compile(r"[0-9a-f]{32}(-\w+\.npy|\.json)\.mjax-[0-9a-f]{16}\.tmp")
"""Names of temporary files."""
DAMAGED = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""Raised by files that are unreadable, of another size, not JSON, without a field or nested too deeply."""

Arrays = dict[str, np.ndarray]


def cache_folders(prefix: str | Path, chosen: str | None = None) -> list[Path]:
    """Folders for the indices of a dataset, best first: `chosen`, or next to the data and at home."""
    if chosen is not None:
        return [Path(chosen)]
    home = cache_home()
    return [Path(f"{prefix}.cache"), *([] if home is None else [home / "indices"])]


class IndexCache:
    """Arrays by what they were built from.

    Args:
      folders: where to look and where to write, best first; a later one is used where an earlier one cannot be. With
        none, every call builds.
      print_line: takes one sentence about each problem.
    """

    def __init__(self, folders: Sequence[Path] = (), print_line: Callable[[str], None] = print):
        self.folders, self.print_line = folders, print_line

    def arrays(self, source: Mapping[str, object], names: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
        """The arrays `names` that `build` makes of `source`: mapped from disk, or newly built.

        Args:
          source: all that the arrays depend on, as plain JSON values.
          names: of the arrays.
          build: makes them; the same source must always give the same arrays.
        """
        if not self.folders:
            return build()
        source = {"version": VERSION, **source}
        key = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:32]
        for folder in self.folders:
            try:
                return _load(folder, key, source, names)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except DAMAGED:
                self.print_line(
                    f"{folder}/{key}.json or its arrays are damaged or unreadable: building the indices again"
                )
        built = build()
        if sum(array.nbytes for array in built.values()) < MIN_CACHED_BYTES:
            return built
        problem = None
        for folder in self.folders:
            try:
                _store(folder, key, source, built)
                arrays = _load(folder, key, source, names)
            except DAMAGED as error:
                problem = problem or f"{folder} cannot be used ({getattr(error, 'strerror', None) or error})"
                continue
            if problem:
                self.print_line(f"{problem}: the indices are kept in {folder}")
            return arrays
        self.print_line(
            f"{problem}: the indices are built in memory at every start; name another folder with --data.cache"
        )
        return built


NO_CACHE = IndexCache()


def _load(folder: Path, key: str, source: Mapping[str, object], names: Sequence[str]) -> Arrays:
    """Load what `_store` wrote, mapped read-only once size and checksum of every file are right."""
    manifest = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    if manifest["source"] != source:
        raise ValueError("of another source")
    arrays = {}
    for name in names:
        file = folder / f"{key}-{name}.npy"
        if _checksum(file) != manifest["files"][name]:
            raise ValueError(f"{file} is not what was written")
        arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return arrays


def _store(folder: Path, key: str, source: Mapping[str, object], arrays: Arrays) -> None:
    make_folder(folder)
    _sweep(folder)
    files = {}
    for name, array in arrays.items():
        file = folder / f"{key}-{name}.npy"
        _write(file, lambda stream, array=array: np.save(stream, array, allow_pickle=False))
        files[name] = _checksum(file)
    manifest = json.dumps({"source": source, "files": files}, indent=2)
    _write(folder / f"{key}.json", lambda stream: stream.write(manifest.encode()))


def _write(file: Path, write: Callable) -> None:
    """Write a file under a temporary name of its own, and rename it when its bytes are on disk."""
    temporary = file.with_name(f"{file.name}.mjax-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as stream:
            write(stream)
        put(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(folder: Path) -> None:
    """Remove temporary files that nobody has written to for a day: of processes that were killed, on any host."""
    for file in folder.glob("*.tmp"):
        with contextlib.suppress(OSError):  # it is gone, or not ours
            if TEMPORARY.fullmatch(file.name) and time.time() - file.lstat().st_mtime > STALE:
                file.unlink()


def _checksum(file: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size = file.stat().st_size
    return [size, zlib.crc32(np.memmap(file, dtype=np.uint8, mode="r")) if size else 0]
