"""Sample indices on disk: the next start maps them into memory instead of building them again.

    FOLDER/KEY-document_index.npy, …       plain arrays, mapped read-only
    FOLDER/KEY.json                        written last: their source, sizes and checksums

KEY is a hash of everything that the arrays depend on: of the lengths in the dataset's index rather than of its path, of
the documents drawn from, the samples, the seed and every option. Megatron hashes the path and leaves out the documents,
the extra token and the partial tail, so its cache silently gives wrong samples after one of these has changed. Here
that is another key.

No process waits for another. A process that has no arrays builds them, writes them to temporary files and renames
these. Two processes that build at the same time write the same bytes. A killed process leaves at most a temporary file,
which is removed a day after its last write. Checksums reveal damaged files, which are built again. If nothing can be
written, or the arrays are small, a run uses the indices in memory.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mjax.utils.files import cache_home, make_folder, open_new, remove_temporary, write_whole

VERSION = 1  # of the algorithms that build indices; files of another version are not used
MIN_CACHED_BYTES = 2**20  # smaller arrays are built as fast as they are read
MAX_TEMPORARY_AGE_SECONDS = 24 * 3600
READ_ERRORS = (OSError, ValueError, KeyError, TypeError, RecursionError)
"""Raised by files that are unreadable, of another size, not JSON, without a field or nested too deeply."""

Arrays = dict[str, np.ndarray]


def cache_folders(prefix: str | Path, folder: str | None = None) -> list[Path]:
    """Folders for the indices of a dataset, best first: `folder`, or next to the data and in the home folder."""
    if folder is not None:
        return [Path(folder)]
    home = cache_home()
    return [Path(f"{prefix}.cache"), *([] if home is None else [home / "indices"])]


class IndexCache:
    """Arrays by their source.

    Args:
      folders: to read and write, best first; a later one is used if an earlier one is not writable. Without any, every
        call builds.
      print_line: called with one sentence about each problem.
    """

    def __init__(self, folders: Sequence[Path] = (), print_line: Callable[[str], None] = print):
        self.folders, self.print_line = folders, print_line

    def load_or_build(self, source: Mapping[str, object], names: Sequence[str], build: Callable[[], Arrays]) -> Arrays:
        """Load the arrays of `source` from disk, or build and store them.

        Args:
          source: everything that the arrays depend on, as plain JSON values.
          names: of the arrays.
          build: returns them; the same source must always give the same arrays.
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
            except READ_ERRORS:
                problem = "its arrays are damaged or unreadable: building the indices again"
                self.print_line(f"{folder}/{key}.json or {problem}")
        arrays, problem = build(), ""
        if sum(array.nbytes for array in arrays.values()) < MIN_CACHED_BYTES:
            return arrays
        for folder in self.folders:
            try:
                _store(folder, key, source, arrays)
                stored = _load(folder, key, source, names)
            except READ_ERRORS as error:
                problem = problem or f"{folder} cannot be used ({getattr(error, 'strerror', None) or error})"
                continue
            if problem:
                self.print_line(f"{problem}: the indices are stored in {folder}")
            return stored
        self.print_line(f"{problem}: each start builds the indices in memory; name another folder with --data.cache")
        return arrays


NO_CACHE = IndexCache()


def _load(folder: Path, key: str, source: Mapping[str, object], names: Sequence[str]) -> Arrays:
    """Load what `_store` wrote, mapped read-only once size and checksum of every file are right."""
    manifest = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
    if manifest["source"] != source:
        raise ValueError("another source")
    arrays = {}
    for name in names:
        file = folder / f"{key}-{name}.npy"
        if _checksum(file) != manifest["files"][name]:
            raise ValueError(f"the checksum of {file} differs")
        arrays[name] = np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    return arrays


def _store(folder: Path, key: str, source: Mapping[str, object], arrays: Arrays) -> None:
    make_folder(folder)
    remove_temporary(folder, age=MAX_TEMPORARY_AGE_SECONDS)
    files = {}
    for name, array in arrays.items():
        file = folder / f"{key}-{name}.npy"
        with open_new(file) as stream:
            np.save(stream, array, allow_pickle=False)
        files[name] = _checksum(file)
    write_whole(folder / f"{key}.json", json.dumps({"source": source, "files": files}, indent=2))


def _checksum(file: Path) -> list[int]:
    """Size and CRC-32 of a file."""
    size = file.stat().st_size
    return [size, zlib.crc32(np.memmap(file, dtype=np.uint8, mode="r")) if size else 0]
