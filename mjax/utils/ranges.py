"""Large files of an object store, read in parts: a local file that fills up with ranges of 8 MiB.

    corpus.bin           as large as the object, with holes where nothing has been read
    corpus.bin.ranges    a byte for each range: 1 when it is local
    corpus.store.json    the version of each object

A request of a few kilobytes takes a store as long as one of megabytes, so a range is fetched whole, and neighbors are
fetched together. Processes of one machine share the files: two that fetch the same range write the same bytes, and a
range is marked when it is on the disk.
"""

import functools
import json
import mmap
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mjax.errors import RunError, UsageError
from mjax.utils.files import cache_home, put, to_disk, write_whole
from mjax.utils.stores import FETCHED, Store, alone, find_address, is_address, mirror_address, to_stderr, version

RANGE = 1 << 23  # bytes
TOGETHER = 8  # ranges of one request, and requests at a time
WHOLE, IN_RANGES = (".idx", ".json"), (".bin", ".mask")
"""Endings of the files of a dataset that are fetched when it is opened, and of those that are read in ranges."""


@functools.cache
def local_prefix(prefix: str) -> str:
    """The local prefix of a dataset: small files of an address are fetched, any other prefix is returned unchanged."""
    if not is_address(prefix):
        return prefix
    local, store = mirror_address(prefix, FETCHED), Store(prefix, to_stderr)
    with alone(local):
        objects = {name: about for name in WHOLE + IN_RANGES if (about := store.get_info(f"{prefix}{name}"))}
        if missing := [name for name in (".bin", ".idx") if name not in objects]:
            store.check_bucket(prefix)
            raise UsageError(f"{prefix}{missing[0]} does not exist; copy all files that `mjax prepare` wrote")
        objects |= {f".tokenizer/{name}": about for name, about in store.files(f"{prefix}.tokenizer").items()}
        versions, index = {name: version(about) for name, about in objects.items()}, Path(f"{local}.store.json")
        before = json.loads(index.read_bytes()) if index.is_file() else {}
        for name in (before.keys() | set(WHOLE + IN_RANGES)) - objects.keys():
            Path(f"{local}{name}").unlink(missing_ok=True)
        new = [name for name in objects if versions[name] != before.get(name) or not Path(f"{local}{name}").is_file()]
        if new:
            size, free = objects[".bin"]["size"] / 1e6, shutil.disk_usage(local.parent).free / 1e6
            line = f"reading {prefix}: {size:,.1f} MB of tokens, in ranges of {RANGE >> 20} MiB"
            to_stderr(f"{line}; the local disk has {free:,.1f} MB free")
        store.get([(f"{prefix}{name}", Path(f"{local}{name}")) for name in new if name not in IN_RANGES])
        for name in new:
            if name in IN_RANGES:
                size, temporary = objects[name]["size"], Path(f"{local}{name}.tmp")
                write_whole(Path(f"{local}{name}.ranges"), bytes(-(-size // RANGE)))
                with temporary.open("wb") as stream:
                    stream.truncate(size)
                put(temporary, Path(f"{local}{name}"))  # a process that has the old one open keeps it
        write_whole(index, json.dumps(versions))
    return str(local)


class Ranges:
    """The ranges of a file that `local_prefix` has made.

    Args:
      file: local.
    """

    def __init__(self, file: Path):
        self.address = find_address(file)
        self._path, self._file = file, os.open(file, os.O_RDWR)
        self._version = json.loads(file.with_suffix(".store.json").read_bytes())[file.suffix]
        self._size, self._store = os.fstat(self._file).st_size, Store(self.address, to_stderr)
        with Path(f"{file}.ranges").open("r+b") as stream:
            self._fetched = mmap.mmap(stream.fileno(), 0)

    @classmethod
    def from_file(cls, file: Path) -> "Ranges | None":
        """Return the ranges of `file`; None if the whole file is local."""
        return cls(file) if Path(f"{file}.ranges").is_file() and file.stat().st_size else None

    def need(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch the missing parts of these spans, each a first byte and an end.

        Raises:
          RunError: the store does not respond, or the disk is full.
          UsageError: the object was replaced; a run reads one version of its data.
        """
        touched = {number for begin, end in spans for number in range(begin // RANGE, -(-end // RANGE))}
        missing = sorted(number for number in touched if not self._fetched[number])
        runs: list[list[int]] = []
        for number in missing:
            if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < TOGETHER:
                runs[-1].append(number)
            else:
                runs.append([number])
        if runs:
            with ThreadPoolExecutor(TOGETHER) as pool:
                list(pool.map(self._fetch, runs))

    def _fetch(self, run: list[int]) -> None:
        begin, end = run[0] * RANGE, min((run[-1] + 1) * RANGE, self._size)
        content = memoryview(self._store.read_range(self.address, self._version, begin, end))
        try:
            while content:
                written = os.pwrite(self._file, content, begin)
                content, begin = content[written:], begin + written
            to_disk(self._path)  # before the mark, also after a power failure
        except OSError as error:
            remedy = f"remove what no run reads from {cache_home() / FETCHED}, or set XDG_CACHE_HOME to a larger disk"
            raise RunError(f"the copy of {self.address} cannot be written ({error.strerror}); {remedy}") from error
        for number in run:
            self._fetched[number] = 1
