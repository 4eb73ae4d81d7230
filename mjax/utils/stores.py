"""Object stores: the files behind an address such as s3://bucket/runs, and their local copies.

    s3://bucket/runs/one  →  ~/.cache/mjax/stores/s3/bucket/runs/one     written here: copied to the store
                          ←  ~/.cache/mjax/fetched/s3/bucket/runs/one    a cache of the store

An object can be replaced but not appended to, and has no atomic rename. So programs read and write local folders, whose
paths follow from the address; `checkpoint/mirror.py` and `utils/ranges.py` copy them. Other modules use local paths.

fsspec connects to the stores, with s3fs or gcsfs, which read credentials and endpoints from variables such as
AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL. No message contains credentials.
"""

import contextlib
import errno
import fcntl
import functools
import importlib.util
import os
import random
import re
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from mjax.errors import RunError, UsageError, join_shortened, one_sentence, without_secrets
from mjax.utils.files import cache_home, name_problem, open_nofollow, put

T = TypeVar("T")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
ADDRESS = re.compile(r"(s3|gs):/+([^/].*?)/*")  # a Path has one slash of the two
WRITTEN, FETCHED = "stores", "fetched"
"""Folders in the cache home: for files that this machine writes, and for fetched ones."""
PATIENCE = 120.0  # seconds for which a command repeats a failed request
MAX_PAUSE = 60.0  # seconds between two attempts
QUIET = 60.0  # seconds before the same line is printed again
TOGETHER = 8  # files on their way at a time
SETTINGS = {
    # A connection without a byte for half a minute is dead. mjax repeats and reports longer failures.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"max_attempts": 0}}},
    "gs": {"timeout": 30},
}
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
REFUSALS = {
    "RequestTimeTooSkewed": "set the clock of this machine, which is off",
    "ExpiredToken|InvalidToken|TokenRefresh|RefreshError|SSO": "the login has expired: log in again",
    "KeyTooLong|File name too long": "choose a shorter name",
    "Credential|Anonymous caller|InvalidAccessKeyId|SignatureDoesNotMatch|PermissionError|AccessDenied|Forbidden": (
        "check the credentials and the bucket"
    ),
}
"""Failures that persist, and the fix of each."""


def is_address(path: str | Path) -> bool:
    """True for s3://… and gs://…, also as a `Path`."""
    return ADDRESS.fullmatch(str(path)) is not None


def mirror_address(address: str | Path, kind: str = WRITTEN) -> Path:
    """The local path of an address, for `WRITTEN` or `FETCHED` files; any other path unchanged."""
    if (match := ADDRESS.fullmatch(str(address))) is None:
        return Path(address)
    if problem := name_problem(match[2]):
        raise UsageError(f"{match[1]}://{match[2]} {problem}; write the address as {match[1]}://bucket/a/b")
    if (home := cache_home()) is None:
        raise UsageError("an object store needs a local folder for copies; set XDG_CACHE_HOME to one")
    return home.absolute() / kind / match[1] / match[2]


def find_address(path: Path) -> str | None:
    """The address of a local copy; None for another path."""
    home, path = cache_home(), path.absolute()
    for folder in () if home is None else (home.absolute() / WRITTEN, home.absolute() / FETCHED):
        if path.is_relative_to(folder):
            scheme, _, rest = path.relative_to(folder).as_posix().partition("/")
            return f"{scheme}://{rest}" if scheme in PACKAGES and rest else None
    return None


def to_absolute(path: Path) -> str:
    """A name for `path` that another process can use: its address, or the absolute path."""
    return find_address(path) or str(path.resolve())


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lock a local copy against other processes of this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_nofollow(path.parent / f".{zlib.crc32(path.name.encode()):08x}.fetching", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def with_addresses(text: str) -> str:
    """Replace paths of local copies in `text` by addresses, and restore both slashes of an address."""
    if (home := cache_home()) is not None:
        text = re.sub(re.escape(f"{home.absolute()}/") + rf"({WRITTEN}|{FETCHED})/(s3|gs)/", r"\2://", text)
    return re.sub(r"\b(s3|gs):/(?=[^/])", r"\1://", text)


def to_stderr(line: str) -> None:
    """Print a notice of a command."""
    print(without_secrets(with_addresses(line)), file=sys.stderr, flush=True)


class Store:
    """The files of one kind of store; every call is repeated for a while if the store fails, which is reported.

    Args:
      address: of a file or folder in it, or its scheme alone: s3 or gs.
      print_line: called with one sentence about each failure.

    Attributes:
      patience: seconds for which a call is repeated.
    """

    def __init__(self, address: str, print_line: Callable[[str], None] = print):
        self.scheme, self.patience = address.partition(":")[0], PATIENCE
        self.fs = _file_system(self.scheme)
        self._print_line, self._last_printed = print_line, dict[Hashable, float]()

    def reconnect(self) -> None:
        """Read the credentials again: a login that has expired may have been renewed meanwhile."""
        _file_system.cache_clear()
        self.fs = _file_system(self.scheme)

    def print_once(self, line: str, about: Hashable = None) -> None:
        """Print a line, unless the same one, or another `about` the same, was printed in the last `QUIET` seconds."""
        now, about = time.monotonic(), about or line
        if now - self._last_printed.get(about, -QUIET) >= QUIET:
            self._last_printed[about] = now
            self._print_line(line)

    def files(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the objects under an address by name, with size, LastModified and on S3 ETag; {} without objects.

        A key that cannot be the name of a file below a folder is left out, with a line. Such keys have .. or an empty
        part (as folder markers do), or are below the name of another object.

        Raises:
          UsageError: the bucket does not exist, or may not be read.
          RunError: the store does not respond.
        """
        base, objects = folder.partition("://")[2].rstrip("/"), self.check_bucket(folder)
        names = {key[len(base) + 1 :]: about for key, about in objects.items() if key.startswith(f"{base}/")}
        usable, skipped = {}, []
        for name, about in names.items():
            above = next((str(above) for above in Path(name).parents if str(above) in names), None)
            if problem := f"is below the object {above}" if above else name_problem(name):
                skipped.append(f"{name!r} {problem}")
            else:
                usable[name] = about
        if skipped:
            count = f"{len(skipped)} keys that cannot be files" if len(skipped) > 1 else "a key that cannot be a file"
            self.print_once(f"{folder}: skipped {count}: {one_sentence(skipped[0][:300])}", (folder, *skipped))
        return usable

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly below an address, sorted."""
        base = folder.partition("://")[2].rstrip("/")
        try:
            entries = self.again(f"listing {folder}", lambda: self.fs.ls(base, detail=True, refresh=True))
        except FileNotFoundError:
            self.check_bucket(folder)
            return []
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"}
        return sorted(name for name in names if name_problem(name) is None)

    def get_info(self, address: str) -> dict[str, Any] | None:
        """Return size, LastModified and on S3 ETag of an object; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return self.again(f"reading {address}", lambda: self.fs.info(address))

    def check_bucket(self, address: str) -> dict[str, dict[str, Any]]:
        """Return the objects at an address by key; reject an address in a bucket that does not exist."""
        base = address.partition("://")[2].rstrip("/")
        try:
            return self.again(f"listing {address}", lambda: self.fs.find(base, detail=True))
        except FileNotFoundError:
            bucket = base.partition("/")[0]
            raise UsageError(f"{address}: there is no bucket {bucket}; create it, or give another") from None

    def read(self, address: str) -> bytes | None:
        """Return the bytes of an object; None if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return self.again(f"reading {address}", lambda: self.fs.cat_file(address))

    def read_range(self, address: str, wanted: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end` of one version of an object.

        Raises:
          UsageError: the object no longer has the `wanted` version (`version`).
        """

        def read_part() -> bytes:
            with self.fs.open(address, "rb", cache_type="none") as file:
                if version(file.details) != wanted:
                    raise FileNotFoundError(address)
                if "generation" in file.details:  # of gs://
                    part = self.fs.cat_file(address, start=start, end=end, generation=file.details["generation"])
                else:
                    file.seek(start)
                    part = file.read(end - start)  # of s3://: sends the ETag as If-Match
            if len(part) != end - start:
                raise OSError(f"{len(part):,} bytes instead of {end - start:,}")
            return part

        try:
            return self.again(f"reading {address}", read_part)
        except (FileNotFoundError, FileExistsError):
            raise UsageError(f"{address} was replaced while it was read; start again, with the new data") from None

    def write(self, address: str, content: bytes) -> None:
        """Write a whole object atomically."""
        self.again(f"writing {address}", lambda: self.fs.pipe_file(address, content))

    def create(self, address: str, content: bytes) -> bool:
        """Write an object unless it exists, by a conditional write; return False if it exists.

        A store without conditional writes overwrites it, and the result is True.
        """
        try:
            self.again(f"writing {address}", lambda: self.fs.pipe_file(address, content, mode="create"))
        except FileExistsError:
            return False
        except NotImplementedError:
            self.write(address, content)
        return True

    def get(self, pairs: Sequence[tuple[str, Path]]) -> None:
        """Copy objects to local files, each atomically."""
        for _, file in pairs:
            file.parent.mkdir(parents=True, exist_ok=True)
        for part in (pairs[start : start + TOGETHER] for start in range(0, len(pairs), TOGETHER)):
            temporary = [file.with_name(f".{secrets.token_hex(8)}.part") for _, file in part]
            addresses = [address for address, _ in part]
            copy = functools.partial(self.fs.get, addresses, list(map(str, temporary)))
            try:
                self.again(f"reading {join_shortened(addresses)}", copy)
                for (_, file), whole in zip(part, temporary, strict=True):
                    put(whole, file)
            finally:
                for file in temporary:
                    file.unlink(missing_ok=True)

    def put(self, pairs: Sequence[tuple[Path, str]]) -> None:
        """Copy local files to objects, each atomically."""
        for part in (pairs[start : start + TOGETHER] for start in range(0, len(pairs), TOGETHER)):
            files, addresses = [str(file) for file, _ in part], [address for _, address in part]
            self.again(f"writing {join_shortened(addresses)}", functools.partial(self.fs.put, files, addresses))

    def move(self, old: str, new: str) -> None:
        """Rename an object by a copy; the old object is removed last."""
        self.again(f"copying {old}", lambda: self.fs.cp_file(old, new))
        self.remove([old])

    def remove(self, addresses: Sequence[str]) -> None:
        """Remove objects, in this order; they need not exist."""
        for address in addresses:
            with contextlib.suppress(FileNotFoundError):
                self.again(f"removing {address}", functools.partial(self.fs.rm_file, address))

    def again(self, what: str, call: Callable[[], T]) -> T:
        """Return `call()`, repeated while the store fails; `what` is for the sentence about a failure.

        Raises:
          FileNotFoundError: the object does not exist.
          FileExistsError: the object exists.
          NotImplementedError: the store does not support the call.
          UsageError: another attempt does not help, as without permission.
          RunError: the store has failed for `patience` seconds.
        """
        begun, pause = time.monotonic(), 1.0
        while True:
            try:
                return call()
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:
                if getattr(error, "errno", None) == errno.ENOSYS:
                    raise NotImplementedError(what) from error
                reason, advice = explain_failure(error)
                if advice:
                    raise UsageError(f"{what} failed ({reason}); {advice}") from error
                left = begun + self.patience - time.monotonic()
                if left <= 0:
                    lasting = f" for {self.patience:.0f} s" if self.patience else ""
                    raise RunError(f"{what} failed{lasting}: {reason}") from error
                wait = min(pause * random.uniform(1, 1.25), left)
                self.print_once(f"{what} failed ({reason}): trying again in {wait:.0f} s", (what, reason))
                time.sleep(wait)
                pause = min(2 * pause, MAX_PAUSE)


def explain_failure(error: Exception) -> tuple[str, str | None]:
    """Return the reason of a store's failure, without credentials, and the fix; None: try again."""
    code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code", "")
    reason = str(error).strip() or type(error).__name__
    text = re.sub(r"[^ ]*/[^ ]*", "", reason[:200])  # without names, which may contain such words
    words = f"{type(error).__name__} {code} {text}"
    advice = next((advice for known, advice in REFUSALS.items() if re.search(known, words)), None)
    for name in SECRETS:
        if len(value := os.environ.get(name, "")) > 3:
            reason = reason.replace(value, "…")
    return one_sentence(reason), advice


def modification_time(about: Mapping[str, Any]) -> float:
    """Return the time at which an object was written, in seconds since 1970 by the clock of the store."""
    when = about.get("LastModified") or about.get("updated") or about.get("mtime") or 0.0
    when = datetime.fromisoformat(when) if isinstance(when, str) else when
    return when.timestamp() if isinstance(when, datetime) else float(when)


def version(about: Mapping[str, Any]) -> str:
    """Return a text that changes with the content of an object."""
    tags = map(about.get, ("generation", "ETag", "etag", "md5Hash"))
    tag = next(filter(None, tags), None) or modification_time(about)
    return f"{about['size']} {tag}"


@functools.cache
def _file_system(scheme: str) -> Any:
    package = PACKAGES.get(scheme, "fsspec")
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{scheme}:// needs the package {package}: pip install {package}")
    import fsspec

    options = {"use_listings_cache": False, "skip_instance_cache": True}
    try:
        fs = fsspec.filesystem(scheme, **options, **SETTINGS.get(scheme, {}))
    except (ImportError, ValueError) as error:  # a package is missing, or no such scheme
        raise UsageError(f"{scheme}:// cannot be read: {error}") from None
    if scheme == "s3":
        fs.retries = 3  # of one request, within a fraction of a second
    return fs
