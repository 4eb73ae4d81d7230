"""Large files of an object store, of which parts are read: a local file that fills up with ranges of 8 MiB.

    corpus.bin           as large as the object, with holes where nothing has been read
    corpus.bin.ranges    a byte for each range: 1 when it is here
    corpus.open          locked by every process that reads the dataset

A request of a few kilobytes takes a store as long as one of megabytes, so a range is fetched whole, and neighbors are
fetched together. Processes of one machine share the files: two that fetch the same range write the same bytes, and a
range is marked when it is on the disk.

A disk that is nearly full is relieved of files that no process reads, the least recently used one first.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mjax.errors import RunError, UsageError
from mjax.utils.files import put, to_disk, write_whole
from mjax.utils.stores import FETCHED, Store, address_of, alone, is_address, local_copies, mirror_of, to_stderr, version

RANGE = 1 << 23  # bytes
TOGETHER = 8  # ranges of one request, and requests at a time
WHOLE, IN_RANGES = (".idx", ".json"), (".bin", ".mask")
"""Endings of the files of a dataset that are fetched when it is opened, and of those that are read in ranges."""
SHARE_FREE, MOST_FREE = 20, 32 << 30
"""A twentieth of the disk stays free, at most 32 GiB, as long as there is something to remove."""
_open = contextlib.ExitStack()  # locks, held while this process lives
_making_room = threading.Lock()


@functools.cache
def local_prefix(prefix: str) -> str:
    """The local prefix of a dataset at an address, whose small files are fetched; any other prefix as it is.

    Raises:
      UsageError: there is no such dataset or bucket, or it may not be read.
      RunError: the store does not answer.
    """
    if not is_address(prefix):
        return prefix
    local, store = mirror_of(prefix, FETCHED), Store.of(prefix, to_stderr)
    with alone(local):
        lock = os.open(f"{local}.open", os.O_RDWR | os.O_CREAT, 0o666)
        _open.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        objects = {ending: store.about(f"{prefix}{ending}") for ending in WHOLE + IN_RANGES}
        found = {ending: about for ending, about in objects.items() if about is not None}
        if missing := [ending for ending in (".bin", ".idx") if ending not in found]:
            store.check_bucket(prefix)
            raise UsageError(f"{prefix}{missing[0]} does not exist; copy all files of a dataset of `mjax prepare`")
        tokenizer = store.files(f"{prefix}.tokenizer")
        found |= {f".tokenizer/{name}": about for name, about in tokenizer.items()}
        versions, index = {name: version(about) for name, about in found.items()}, Path(f"{local}.store.json")
        before = json.loads(index.read_bytes()) if index.is_file() else {}
        new = [name for name in found if versions[name] != before.get(name) or not Path(f"{local}{name}").is_file()]
        for name in (before.keys() | set(WHOLE + IN_RANGES)) - found.keys():
            Path(f"{local}{name}").unlink(missing_ok=True)
        if new:
            size = found[".bin"]["size"] / 1e6
            to_stderr(f"reading {prefix}: {size:,.1f} MB of tokens, in ranges of {RANGE >> 20} MiB")
        store.get([(f"{prefix}{name}", Path(f"{local}{name}")) for name in new if name not in IN_RANGES])
        for name in new:
            if name in IN_RANGES:
                _make_empty(Path(f"{local}{name}"), found[name]["size"])
        write_whole(index, json.dumps(versions))
    return str(local)


def make_room(size: int) -> None:
    """Remove data that no process reads until the disk of the copies has room for `size` bytes more.

    Raises:
      RunError: there is nothing left to remove.
    """
    home = local_copies(FETCHED)
    total, _, free = shutil.disk_usage(home)
    wanted = size + min(total // SHARE_FREE, MOST_FREE)
    unused = sorted(home.rglob("*.ranges"), key=lambda ranges: ranges.stat().st_mtime) if free < wanted else []
    for file in (ranges.with_suffix("") for ranges in unused):
        with file.with_suffix(".open").open("ab") as lock, contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if held := file.stat().st_blocks * 512:
                _make_empty(file, file.stat().st_size)
                to_stderr(f"{home} has {free / 1e6:,.1f} MB free: removed {held / 1e6:,.1f} MB of {file}, not in use")
        if (free := shutil.disk_usage(home).free) >= wanted:
            return
    if free < size:
        raise RunError(f"the disk of {home} is full of data in use; set XDG_CACHE_HOME to a folder of a larger disk")


def _make_empty(file: Path, size: int) -> None:
    """Replace `file` by one without any range."""
    for new, length in ((Path(f"{file}.ranges"), -(-size // RANGE)), (file, size)):
        temporary = Path(f"{new}.tmp")
        with temporary.open("wb") as stream:
            stream.truncate(length)
        put(temporary, new)  # a process that has the old one open keeps it


class Ranges:
    """The ranges of a file that `local_prefix` has made.

    Args:
      file: local.
    """

    def __init__(self, file: Path):
        self.address = address_of(file)
        self._path, self._file = file, os.open(file, os.O_RDWR)
        self._version = json.loads(file.with_suffix(".store.json").read_bytes())[file.suffix]
        self._size, self._store = os.fstat(self._file).st_size, Store.of(self.address, to_stderr)
        with Path(f"{file}.ranges").open("r+b") as stream:
            self._here = mmap.mmap(stream.fileno(), 0)
        os.utime(f"{file}.ranges")  # now it is used

    @classmethod
    def of(cls, file: Path) -> Ranges | None:
        """The ranges of `file`; None if it is all here."""
        return cls(file) if Path(f"{file}.ranges").is_file() and file.stat().st_size else None

    def need(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch what of these spans, as first byte and end, is not here.

        Raises:
          RunError: the store does not answer.
          UsageError: the object is another one now; a run reads one version of its data.
        """
        touched = {number for begin, end in spans for number in range(begin // RANGE, -(-end // RANGE))}
        missing = sorted(number for number in touched if not self._here[number])
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
        with _making_room:
            make_room(end - begin)
        content = self._store.read_range(self.address, self._version, begin, end)
        done = 0
        while done < len(content):
            done += os.pwrite(self._file, memoryview(content)[done:], begin + done)
        to_disk(self._path)  # before the mark, also after a power failure
        for number in run:
            self._here[number] = 1
