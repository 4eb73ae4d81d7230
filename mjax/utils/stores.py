"""Object stores: the files behind an address such as s3://bucket/runs, and where they are on this machine.

    s3://bucket/runs/one  ⇄  ~/.cache/mjax/stores/s3/bucket/runs/one

An object can be replaced but not appended to, and has no atomic rename. So programs read and write a local folder, the
mirror, whose path follows from the address and names it; `checkpoint/mirror.py` and `utils/ranges.py` say what is
copied when. Nothing else of mjax knows addresses.

fsspec speaks to the stores, with s3fs or gcsfs; credentials and endpoints come from where these look for them, such as
AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from mjax.errors import RunError, UsageError, one_sentence
from mjax.utils.files import cache_home, put

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
ADDRESS = re.compile(r"(s3|gs):/+([^/].*?)/*")  # a Path has one slash of the two
PATIENCE = 60.0  # seconds for which a command repeats what the store did not do
LONGEST_PAUSE = 30.0  # seconds between two attempts
TOGETHER = 8  # files on their way at a time
SETTINGS = {
    # Slow is not dead: no byte for half a minute is. Attempts that take longer are ours, and reported.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 0}}},
    "gs": {"timeout": 30},
}


def is_address(path: str | Path) -> bool:
    """True for s3://… and gs://…, also as a `Path`."""
    return ADDRESS.fullmatch(str(path)) is not None


def mirrors() -> Path:
    """The folder of all mirrors.

    Raises:
      UsageError: there is no home to have it in.
    """
    if (home := cache_home()) is None:
        raise UsageError("an object store needs a local folder for copies; set XDG_CACHE_HOME to one")
    return home.absolute() / "stores"


def mirror_of(address: str | Path) -> Path:
    """The local path of an address; any other path as it is."""
    if (match := ADDRESS.fullmatch(str(address))) is None:
        return Path(address)
    if ".." in match[2].split("/"):
        raise UsageError(f"{address} has .. in it, which a store takes as a name; write the address without")
    return mirrors() / match[1] / match[2]


def address_of(path: Path) -> str | None:
    """The address of a path in a mirror; None for another path."""
    home = cache_home()
    if home is None or not path.absolute().is_relative_to(home.absolute() / "stores"):
        return None
    scheme, _, rest = path.absolute().relative_to(home.absolute() / "stores").as_posix().partition("/")
    return f"{scheme}://{rest}" if scheme in PACKAGES and rest else None


def resolved(path: Path) -> str:
    """A name for `path` that another process can use: its address, or the absolute path."""
    return address_of(path) or str(path.resolve())


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from fetching the same thing into a mirror."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.fetching").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def with_addresses(text: str) -> str:
    """`text` with addresses for the paths of mirrors, and with both slashes of an address that was a `Path`."""
    home = cache_home()
    text = text if home is None else re.sub(re.escape(f"{home.absolute()}/stores/") + r"(s3|gs)/", r"\1://", text)
    return re.sub(r"\b(s3|gs):/(?=[^/])", r"\1://", text)


def to_stderr(line: str) -> None:
    """Print a notice of a command."""
    print(with_addresses(line), file=sys.stderr, flush=True)


class Store:
    """The files of one kind of store; every call is repeated for a while if the store fails, which is reported.

    Args:
      scheme: s3 or gs.
      say: takes one sentence about each failure.

    Attributes:
      ended: until it is set there is no end of attempts; None: each call is repeated for `PATIENCE` seconds.
    """

    def __init__(self, scheme: str, say: Callable[[str], None] = print):
        self.fs, self.say = _file_system(scheme), say
        self.ended: threading.Event | None = None

    @classmethod
    def of(cls, address: str, say: Callable[[str], None] = print) -> Store:
        """The store of an address."""
        return cls(address.partition(":")[0], say)

    def files(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the objects under an address, by name: size and LastModified and, of S3, ETag; {} if there are none.

        Raises:
          UsageError: there is no such bucket, or it may not be read.
          RunError: the store does not answer.
        """
        base = self.fs._strip_protocol(folder)

        def listed():
            self.fs.invalidate_cache()
            return self.fs.find(base, detail=True)

        try:
            found = self.again(f"listing {folder}", listed)
        except FileNotFoundError:
            found = {}
        if not found:
            self.check_bucket(folder)
        return {name[len(base) + 1 :]: about for name, about in found.items() if name.startswith(f"{base}/")}

    def about(self, address: str) -> dict[str, Any] | None:
        """Size and LastModified and, of S3, ETag of an object; None if there is none."""
        try:
            return self.again(f"reading {address}", lambda: self.fs.info(address, refresh=True))
        except FileNotFoundError:
            return None

    def check_bucket(self, address: str) -> None:
        """Refuse an address in a bucket that is not there or cannot be listed."""
        bucket = address.partition("://")[2].partition("/")[0]
        try:
            self.again(f"listing {address}", lambda: self.fs.ls(bucket, refresh=True))
        except FileNotFoundError:
            scheme = address.partition(":")[0]
            raise UsageError(
                f"{address}: there is no bucket {bucket}; create it, or give another {scheme}://"
            ) from None

    def check_writable(self, address: str) -> None:
        """Write and remove an empty object.

        Raises:
          UsageError: there is no such bucket, or it may not be written.
          RunError: the store does not answer.
        """
        try:
            self.write(address, b"")
        except FileNotFoundError:
            self.check_bucket(address)
            raise
        self.remove([address])

    def read(self, address: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of an object from `start` up to `end`."""
        return self.again(f"reading {address}", lambda: self.fs.cat_file(address, start=start, end=end))

    def write(self, address: str, content: bytes) -> None:
        """Write a whole object: it is there or not."""
        self.again(f"writing {address}", lambda: self.fs.pipe_file(address, content))

    def get(self, pairs: Sequence[tuple[str, Path]]) -> None:
        """Copy objects to local files, each of which appears when it is whole."""
        for _, file in pairs:
            file.parent.mkdir(parents=True, exist_ok=True)
        for part in (pairs[start : start + TOGETHER] for start in range(0, len(pairs), TOGETHER)):
            temporary = [file.with_name(f".{file.name}.part") for _, file in part]
            addresses = [address for address, _ in part]
            copy = functools.partial(self.fs.get, addresses, list(map(str, temporary)))
            self.again(f"reading {_named(addresses)}", copy)
            for (_, file), whole in zip(part, temporary, strict=True):
                put(whole, file)

    def put(self, pairs: Sequence[tuple[Path, str]]) -> None:
        """Copy local files to objects; each is there or not."""
        for part in (pairs[start : start + TOGETHER] for start in range(0, len(pairs), TOGETHER)):
            files, addresses = [str(file) for file, _ in part], [address for _, address in part]
            self.again(f"writing {_named(addresses)}", functools.partial(self.fs.put, files, addresses))

    def move(self, old: str, new: str) -> None:
        """Give an object another name; the old one goes last."""
        self.again(f"copying {old}", lambda: self.fs.cp_file(old, new))
        self.remove([old])

    def remove(self, addresses: Sequence[str]) -> None:
        """Remove objects, in this order; they need not exist."""
        for address in addresses:
            with contextlib.suppress(FileNotFoundError):
                self.again(f"removing {address}", functools.partial(self.fs.rm_file, address))

    def again(self, what: str, call: Callable[[], T]) -> T:
        """`call()`, repeated while the store fails; `what` is for the sentence about a failure.

        Raises:
          FileNotFoundError: there is no such object.
          UsageError: credentials are missing or do not suffice.
          RunError: the store has failed for too long.
        """
        begun, pause = time.monotonic(), 1.0
        while True:
            try:
                return call()
            except FileNotFoundError:
                raise
            except Exception as error:
                reason = one_sentence(str(error).strip() or type(error).__name__)
                if _is_refused(error):
                    raise UsageError(
                        f"{what} is not allowed ({reason}); check the credentials and the bucket"
                    ) from error
                if self.ended is not None and not self.ended.is_set():
                    begun = time.monotonic()
                elif time.monotonic() - begun + pause > PATIENCE:
                    raise RunError(f"{what} failed for {PATIENCE:.0f} s: {reason}") from error
                self.say(f"{what} failed ({reason}): trying again in {pause:.0f} s")
                (self.ended or threading.Event()).wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)


def modified(about: Mapping[str, Any]) -> float:
    """When an object was written, in seconds since 1970 by the clock of the store."""
    when = about.get("LastModified") or about.get("updated") or about.get("mtime") or 0.0
    when = datetime.fromisoformat(when) if isinstance(when, str) else when
    return when.timestamp() if isinstance(when, datetime) else float(when)


def version(about: Mapping[str, Any]) -> str:
    """A word that is another one when the object is."""
    tag = about.get("ETag") or about.get("etag") or about.get("md5Hash") or modified(about)
    return f"{about['size']} {tag}"


def _named(addresses: Sequence[str]) -> str:
    return addresses[0] + (f" and {len(addresses) - 1} more" if len(addresses) > 1 else "")


def _is_refused(error: Exception) -> bool:
    """True if another attempt would not help: no credentials, or none that suffice."""
    return isinstance(error, PermissionError) or "Credential" in type(error).__name__ + str(error)[:80]


@functools.cache
def _file_system(scheme: str) -> Any:
    package = PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{scheme}:// needs the package {package}: pip install {package}")
    import fsspec

    fs = fsspec.filesystem(scheme, use_listings_cache=False, **SETTINGS[scheme])
    if scheme == "s3":
        fs.retries = 3  # of one request, within a fraction of a second
    return fs
