"""Files behind an address that fsspec reads, such as s3://bucket/a.jsonl or https://host/a.txt, as paths."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

from mjax.errors import UsageError
from mjax.utils import stores

ADDRESS = re.compile(r"([a-z][a-z0-9]+):/+(.+)")  # a Path has one slash of the two
BLOCK, BUFFER = 2**23, 2**20  # bytes of a request, and of a read


class RemoteFile(PosixPath):
    """A file that is only read; `str` is its address. Every answer comes from the store.

    Raises:
      UsageError: the package for this kind of address is missing, or the store does not let us read.
      RunError: the store does not answer.
    """

    def __str__(self) -> str:
        scheme, _, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest.lstrip('/')}"

    @cached_property
    def _fs(self) -> Any:
        scheme = str(self).partition(":")[0]
        if scheme in stores.PACKAGES:
            return stores.Store(scheme).fs
        import fsspec

        try:
            return fsspec.filesystem(scheme)
        except (ImportError, ValueError) as error:  # a package is missing, or no such scheme
            raise UsageError(f"{self} cannot be read: {error}") from None

    @cached_property
    def _about(self) -> dict[str, Any] | None:
        try:
            return self._ask(lambda: self._fs.info(str(self)))
        except FileNotFoundError:
            return None

    def _ask(self, call: Callable[[], Any]) -> Any:
        scheme = str(self).partition(":")[0]
        return stores.Store(scheme).again(f"reading {self}", call) if scheme in stores.PACKAGES else call()

    def _found(self, names: dict[str, dict[str, Any]]) -> Iterator[RemoteFile]:
        for name, about in sorted(names.items()):
            file = RemoteFile(self._fs.unstrip_protocol(name))
            file.__dict__["_about"] = about
            if file.is_file():
                yield file

    def is_file(self, **_: Any) -> bool:
        """True if there is a file of this address."""
        return self._about is not None and self._about["type"] == "file"

    def is_dir(self, **_: Any) -> bool:
        """True if there are files below this address."""
        return self._about is not None and self._about["type"] == "directory"

    def exists(self, **_: Any) -> bool:
        """True for a file or folder."""
        return self._about is not None

    def stat(self, **_: Any) -> Any:
        """Its st_size, and st_mtime_ns where the store knows it."""
        if self._about is None:
            raise FileNotFoundError(str(self))
        changed = int(stores.modified(self._about) * 1e9)
        return SimpleNamespace(st_size=self._about["size"], st_mtime_ns=changed)

    def resolve(self, strict: bool = False) -> RemoteFile:
        """The address itself."""
        return self

    def open(self, mode: str = "rb", *_: Any, **__: Any) -> Any:
        """A stream of its bytes, read in requests of `BLOCK` bytes."""
        return io.BufferedReader(self._ask(lambda: self._fs.open(str(self), mode, block_size=BLOCK)), BUFFER)

    def rglob(self, pattern: str, **_: Any) -> Iterator[RemoteFile]:
        """All files below this address; the pattern is "*"."""
        return self._found(self._ask(lambda: self._fs.find(str(self), detail=True)))

    def matching(self) -> list[RemoteFile]:
        """The files that this pattern matches."""
        return list(self._found(self._ask(lambda: self._fs.glob(str(self), detail=True))))


def located(path: Path) -> Path:
    """A RemoteFile for an address; any other path as it is."""
    match = ADDRESS.fullmatch(str(path))
    return path if match is None else RemoteFile(f"{match[1]}://{match[2]}")


def check_local(output: str | Path) -> None:
    """Refuse an address as an output.

    Raises:
      UsageError: it is one.
    """
    if isinstance(remote := located(Path(output)), RemoteFile):
        raise UsageError(
            f"--output {remote} is an address, and this command writes local files; type --output {remote.name}, then "
            f"copy its files to {remote.parent}, .idx or .jsonl last"
        )
