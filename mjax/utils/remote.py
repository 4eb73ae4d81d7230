"""Files behind an address that fsspec reads, such as s3://bucket/a.jsonl or https://host/a.txt, as paths.

In an object store they can be written too, each in one piece: `put`, `remove` and `write_whole` accept local paths and
addresses.
"""

import io
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

from mjax.errors import RunError, UsageError
from mjax.utils import files, stores

ADDRESS = re.compile(r"([a-z][a-z0-9]+):/+(.+)")  # a Path has one slash of the two
BLOCK, BUFFER = 2**23, 2**20  # bytes of a request, and of a read


class RemoteFile(PosixPath):
    """A file or folder in a store; `str` is its address.

    Raises:
      UsageError: the package for this kind of address is missing, or the store denies access.
      RunError: the store does not respond.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}"

    @cached_property
    def _info(self) -> dict[str, Any] | None:
        return self.store.get_info(str(self))

    def _ask(self, call: Callable[[], Any]) -> Any:
        return self.store.again(f"reading {self}", call)

    @property
    def store(self) -> stores.Store:
        """The store of this file."""
        return stores.Store(str(self), stores.to_stderr)

    def _make_files(self, names: dict[str, dict[str, Any]]) -> Iterator["RemoteFile"]:
        for name, info in sorted(names.items()):
            file = RemoteFile(self.store.fs.unstrip_protocol(name))
            file.__dict__["_info"] = info  # as listed: no separate request
            if file.is_file():
                yield file

    def is_file(self, **_: Any) -> bool:
        """True if a file has this address."""
        return self._info is not None and self._info["type"] == "file"

    def is_dir(self, **_: Any) -> bool:
        """True if files exist below this address."""
        return self._info is not None and self._info["type"] == "directory"

    def exists(self, **_: Any) -> bool:
        """True for a file or folder."""
        return self._info is not None

    def stat(self, **_: Any) -> Any:
        """Return st_size, and st_mtime_ns if the store has it."""
        if self._info is None:
            raise FileNotFoundError(str(self))
        changed = int(stores.modification_time(self._info) * 1e9)
        return SimpleNamespace(st_size=self._info["size"], st_mtime_ns=changed)

    def resolve(self, strict: bool = False) -> "RemoteFile":
        """The address itself."""
        return self

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:
        """A stream of its bytes, read in requests of `BLOCK` bytes."""
        return io.BufferedReader(self._ask(lambda: self.store.fs.open(str(self), mode, block_size=BLOCK)), BUFFER)

    def rglob(self, pattern: str, **_: Any) -> Iterator["RemoteFile"]:
        """All files below this address; the pattern is "*"."""
        return self._make_files(self._ask(lambda: self.store.fs.find(str(self), detail=True)))

    def list_matching(self) -> list["RemoteFile"]:
        """The files that this pattern matches."""
        return list(self._make_files(self._ask(lambda: self.store.fs.glob(str(self), detail=True))))

    def check_writable(self) -> None:
        """Reject an output that cannot be written at this address, before the work for it is done.

        Raises:
          UsageError: the address is not in a store, or the store denies access.
          RunError: the store does not respond.
        """
        if str(self).partition(":")[0] not in stores.PACKAGES:
            local = f"a local name such as {self.name}, then copy its files to {self.parent}, .idx or .jsonl last"
            raise UsageError(f"{self} cannot be written (s3:// and gs:// can); give {local}")
        if len(self.parts) < 3:
            raise UsageError(f"{self} is a bucket; give a name in it, such as {self / 'corpus'}")
        try:
            self.store.write(f"{self}.tmp", b"")
        except FileNotFoundError:
            self.store.check_bucket(str(self))
            raise
        self.store.remove([f"{self}.tmp"])


def locate(path: Path) -> Path:
    """A RemoteFile for an address; any other path unchanged."""
    match = ADDRESS.fullmatch(str(path))
    return path if match is None else RemoteFile(f"{match[1]}://{match[2]}")


def local_neighbor(output: str | Path) -> Path:
    """Return the local path next to which an output is made: `output`; of an address, its last name in this folder."""
    path = locate(Path(output))
    return Path(path.name) if isinstance(path, RemoteFile) else path


def put(finished: Path, path: Path) -> None:
    """Give a finished file or folder its name, as `files.put`; to an address it is copied, then removed locally.

    Raises:
      RunError: the copy failed; the local file still exists.
    """
    if not isinstance(path, RemoteFile):
        return files.put(finished, path)
    whole = [file for file in (finished, *sorted(finished.rglob("*"))) if file.is_file()]
    stores.to_stderr(f"copying to {path}: {sum(file.stat().st_size for file in whole) / 1e6:,.1f} MB")
    try:
        path.store.put([(file, str(path / file.relative_to(finished))) for file in whole])
    except (RunError, UsageError) as error:
        raise RunError(f"{path} was not copied: {error}; the same command in this folder continues") from error
    return remove(finished)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all its files, if it exists."""
    if isinstance(path, RemoteFile):
        path.store.remove([str(path), *map(str, path.rglob("*"))])
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        files.remove(path)


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically, as `files.write_whole`, also at an address."""
    if isinstance(file, RemoteFile):
        file.store.write(str(file), text.encode())
    else:
        files.write_whole(file, text)
