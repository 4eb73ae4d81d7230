"""A run in an object store: written to a local folder, uploaded to the store, and fetched where it is read.

    s3://bucket/runs/one/
      config.json, metrics.jsonl, …  whole objects, uploaded again when the local file has changed
      checkpoints/200/…              files of a checkpoint, then its manifest.json, and commit_success.txt last
      .lock                          the process that trains the run

**While a run trains here, the local folder is the source.** The store is a copy that may be behind. No command
removes a file that this machine wrote because the store lacks it. Fetched files are in a separate cache
(`utils/stores.py`); a run that is continued on another machine moves from its cache to the folder that is written.

**A checkpoint counts when it is marked.** A store has no rename, so its files have their final names from the start.
The mark `commit_success.txt`, which Orbax writes too, is uploaded last: after all other files, whose sizes the store
has listed, after the metrics up to there, and after the manifest. Without the mark it is not a checkpoint: the next
upload removes it.

**Training does not wait.** A thread uploads pending files, the newest checkpoint first. A checkpoint is pending until
the store lists all of it, whatever the store answers meanwhile; only one that retention has removed here is left out.

**One process trains** (`checkpoint/store_lock.py`). It reads its lock back at each heartbeat, before a checkpoint is
marked and before one is removed; when another process has the lock, it stops.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mjax.checkpoint.folders import MADE_BY_ORBAX, MANIFEST, steps_in
from mjax.checkpoint.store_lock import LOCK, StoreLock, parse_json, wait_for_release
from mjax.errors import PrintLine, RunError, UsageError
from mjax.utils import stores
from mjax.utils.files import open_nofollow, path_below, rename, set_aside, take_lock, write_whole
from mjax.utils.stores import FETCHED, Store, alone, find_address, mirror_address, to_stderr, version

COMMIT = "commit_success.txt"  # the mark of a complete checkpoint, as Orbax names it
INDEX = ".store.json"
INTERVAL = 10.0  # seconds between two heartbeats, and between two scans for changed files
LISTING_LAG = 60.0  # seconds for which a listing may be behind
LARGE_FILE_BYTES = 1 << 22  # a larger file, such as TensorBoard's, is uploaded only with checkpoints and at the end
NOT_FETCHED = ("tensorboard/", "profile/", "wandb/")
CHECKPOINT_FILE = re.compile(r"checkpoints/(0|[1-9][0-9]*)/(.+)")
IN_CHECKPOINT = re.compile(r"checkpoints/[^/]+/.+")  # also in one that was set aside
RESUME_FILE = re.compile(r"[^/]+\.jsonl?|tokenizer/.+")  # uploaded with each checkpoint: to continue the run elsewhere
RUN_FLAGS = ("--run", "--init", "--base")  # flags with a run as their value
NO_OBJECT = {"size": -1}
_local_folders: dict[str, Path] = {}  # local folders of addresses, as they were last fetched


def localize_arguments(argv: Iterable[str], also: bool = False, trains: bool = False) -> list[str]:
    """Replace the addresses of runs in a command line by local folders; they are fetched, except for --runs."""
    words, flag = [], ""
    for word in argv:
        name, equals, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        flag = name if word.startswith("--") and not equals else ""
        local = _local_value(name, value, also, trains)
        words.append(f"{name}={local}" if equals else flag or local)
    return words


def _local_value(flag: str, value: str, also: bool, trains: bool) -> str:
    prefix = "run:" if flag == "--tokenizer" and value.startswith("run:") else ""
    if not stores.is_address(address := value.removeprefix(prefix)):
        return value
    if flag == "--runs":
        return str(mirror_address(address))
    if trains and flag == "--run":
        return str(run_to_train(address))
    return f"{prefix}{local_run(address)}" if prefix or also or flag in RUN_FLAGS else value


# --- From the store ---------------------------------------------------------------------------------------------------


def local_run(run: str | Path, print_line: PrintLine = to_stderr) -> Path:
    """Return the local folder in which a run can be read: an address is fetched, another path is returned unchanged."""
    return fetch(mirror_address(run), print_line)


def read_folder(run: str | Path) -> Path:
    """`local_run`, without another listing of the store for a run that this process has fetched."""
    return _local_folders.get(str(run)) or local_run(run)


def fetch_runs(runs: Path) -> list[Path] | None:
    """The local folders of all runs in the folder of an address; None for another folder.

    All runs are fetched at the same time, each with only the files that a list shows.
    """
    if (address := find_address(runs)) is None:
        return None
    names = {*Store(address, to_stderr).folders(address), *(file.parent.name for file in runs.glob("*/config.json"))}
    with ThreadPoolExecutor(16) as pool:
        folders = pool.map(lambda name: fetch(runs / name, to_stderr, to_list=True), sorted(names))
        return [folder for folder in folders if (folder / "config.json").is_file()]


def fetch(folder: Path, print_line: PrintLine, to_list: bool = False, tries: int = 5) -> Path:
    """Return the local folder in which a run is to be read.

    It is the folder that this machine writes, while a process trains there, or if the store has nothing newer.
    Otherwise it is the cache, which is updated from the store without the files of checkpoints (`fetch_files` fetches
    these).

    Args:
      folder: of a run; another path is returned unchanged.
      print_line: called with one line about each problem.
      to_list: fetch only the files that a list of runs shows.
      tries: listings at most, while objects that they have are removed.
    """
    if (address := find_address(folder)) is None:
        return folder
    readable = written = mirror_address(address)
    if not is_locked(written):
        store = Store(address, print_line)
        objects = store.files(address)
        if not _is_ahead(written, address, objects, store.print_once):
            readable = mirror_address(address, FETCHED)
            try:
                _refresh(readable, address, store, objects, to_list)
            except FileNotFoundError:  # as by the rotation of a process that trains elsewhere
                if tries > 1:
                    return fetch(folder, print_line, to_list, tries - 1)
                raise
    if not to_list:
        _local_folders[address] = readable
    return readable


def run_to_train(run: str | Path, print_line: PrintLine = to_stderr) -> Path:
    """Return the local folder in which to train a run: an address is fetched first, unless this machine is ahead.

    If the store is ahead, files of this machine's folder that the store lacks are set aside.
    """
    if (address := find_address(mirror_address(run))) is None:
        return Path(run)
    folder = mirror_address(address)
    if (cache := fetch(folder, print_line)) == folder:
        return folder
    with alone(folder), alone(cache):
        # Another process of this run may have been faster; a list of runs since then has fetched only a part of it.
        if cache.is_dir() and not is_locked(folder) and not Index(cache).items() <= Index(folder).items():
            _clear(folder, cache, print_line)
            folder.parent.mkdir(parents=True, exist_ok=True)
            rename(cache, folder)
    _local_folders[address] = folder
    return folder


def fetch_files(
    checkpoint: Path, files: Iterable[str], sizes: Mapping[str, list], print_line: PrintLine, again=False
) -> bool:
    """Fetch missing files of a checkpoint; True if there were some.

    Args:
      checkpoint: its folder.
      files: names in it.
      sizes: bytes first, by name.
      print_line: called with one line about it.
      again: fetch all of them, existing ones too.
    """
    if (address := find_address(checkpoint)) is None:
        return False
    with alone(checkpoint.parent.parent):
        missing = [name for name in files if again or _size(checkpoint / name) != sizes[name][0]]
        if missing:
            total = sum(sizes[name][0] for name in missing)
            print_line(f"reading checkpoint {checkpoint.name} from {address}: {total / 1e6:,.1f} MB")
            with contextlib.suppress(FileNotFoundError):  # the check that follows names it
                pairs = [(f"{address}/{name}", path_below(checkpoint, name)) for name in missing]
                Store(address, print_line).get(pairs)
    return bool(missing)


def is_locked(folder: Path) -> bool:
    """True if a process of this machine trains in `folder`; nothing is written."""
    try:
        with open_nofollow(folder / LOCK, "rb") as file:
            return not take_lock(file, lambda line: None)
    except (OSError, UsageError):
        return False


def run_copies(folder: Path) -> list[Path]:
    """`folder`, and of a run in a store the other local folder that has files of it: written here, or fetched."""
    address = find_address(folder)
    folders = [] if address is None else [mirror_address(address), mirror_address(address, FETCHED)]
    return [folder, *(copy for copy in folders if copy != folder and copy.is_dir())]


def is_running_on_another_machine(folder: Path) -> bool:
    """True if the run in a store had sent a heartbeat shortly before it was fetched, if the clocks agree."""
    return find_address(folder) is not None and time.time() - Index(folder).last_heartbeat < LISTING_LAG


def remove_remote(folder: Path, dry: bool = False) -> int:
    """Remove a run from its store, so that it is never half a run; returns its bytes there.

    Args:
      folder: local, of the run; nothing happens for another path.
      dry: remove nothing.

    Raises:
      UsageError: a process trains the run.
    """
    if (address := find_address(folder)) is None:
        return 0
    store = Store(address, to_stderr)
    objects = store.files(address)
    if not dry:
        if LOCK in objects:
            wait_for_release(store, address, store.read(f"{address}/{LOCK}"))
        # First its checkpoints lose their marks; it is a run until the end, so that the same command continues.
        order = sorted(objects, key=lambda name: (name == "config.json", not name.endswith(f"/{COMMIT}")))
        store.remove([f"{address}/{name}" for name in order])
    return sum(info["size"] for info in objects.values())


def _is_ahead(written: Path, address: str, objects: Mapping[str, Any], print_line: PrintLine) -> bool:
    """True if the folder that this machine writes has all that the store has, and perhaps more."""
    local, index = steps_in(written / "checkpoints"), Index(written)
    marked = _complete_steps(objects, address, print_line)
    if marked:
        newest = _manifest_name(marked[-1])
        if index.get(newest, [None])[0] != version(objects[newest]):
            return False  # this machine has never had it
        if local[-1:] < marked[-1:] and not _local_names(index, marked[-1]):
            return False  # it was removed here, and nothing newer was saved
    if local and local[-1] > max(marked, default=-1):
        advice = "it is used, and copied by the next training"
        print_line(f"checkpoint {local[-1]} of {address} is on this machine only; {advice}")
    return bool(local) or (written / "config.json").is_file()


def _local_names(index: Index, step: int) -> list[str]:
    """The local names of a checkpoint that the store has, or had: another one if it was set aside."""
    checkpoints, uploaded = index.folder / "checkpoints", index.get(_manifest_name(step), [])[1:]
    # Not N.deleting or N.writing.
    files = [entry / MANIFEST for entry in (checkpoints / str(step), *checkpoints.glob(f"{step}.*[!g]"))]
    return [file.parent.name for file in files if file.is_file() and _stat(file) == uploaded]


def _is_fetched(name: str) -> bool:
    """True if a file of a run in a store is fetched with it, rather than with a checkpoint or not at all."""
    return not name.startswith((".", *NOT_FETCHED)) and not IN_CHECKPOINT.match(name)


def _refresh(cache: Path, address: str, store: Store, objects: Mapping[str, Any], to_list: bool) -> None:
    """Update the cache of a run from the store."""
    with alone(cache):
        index, marked = Index(cache), _complete_steps(objects, address, store.print_once)
        used = {*filter(_is_fetched, objects), *map(_manifest_name, marked)}
        listed = {name for name in used if "/" not in name and not name.endswith(".png")}
        wanted = listed.union(map(_manifest_name, marked[-1:])) if to_list else used
        new = [name for name in sorted(wanted) if not index.has(name, version(objects[name]))]
        for step in {*steps_in(cache / "checkpoints"), *marked}:
            if not index.has(name := _manifest_name(step), version(objects.get(name, NO_OBJECT))):
                shutil.rmtree(cache / "checkpoints" / str(step), ignore_errors=True)
        for name in sorted({*_checkpoint_files(cache)} - used):
            (cache / name).unlink()
        store.get([(f"{address}/{name}", path_below(cache, name)) for name in new])
        for name in new:
            os.utime(cache / name, (stores.modification_time(objects[name]),) * 2)
            index.record(name, version(objects[name]))
        if wanted:
            index.drop(index.keys() - used)
            index.save(beat=stores.modification_time(objects[LOCK]) if LOCK in objects else 0.0)
        else:
            shutil.rmtree(cache, ignore_errors=True)


def _clear(folder: Path, cache: Path, print_line: PrintLine) -> None:
    """Remove a folder that this machine wrote, or set it aside if the store never had a part of it.

    It is removed only if the run in the store is a later state of the same run.
    """
    checkpoints, index = folder / "checkpoints", Index(folder)
    entries = [entry.name for entry in checkpoints.iterdir() if entry.is_dir()] if checkpoints.is_dir() else []
    names = [*_checkpoint_files(folder), *(f"checkpoints/{name}/{MANIFEST}" for name in entries)]
    if _first_record(folder) in (b"", _first_record(cache)) and all(map(index.has, names)):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        aside = set_aside(folder, "not-copied")
        print_line(f"{find_address(folder)} has continued elsewhere: this machine's files of it are now {aside}")


def _first_record(folder: Path) -> bytes:
    """The first line of the metrics, which contains the time of a step: no other run has the same."""
    file = folder / "metrics.jsonl"
    return file.open("rb").readline() if file.is_file() else b""


def _manifest_name(step: int) -> str:
    return f"checkpoints/{step}/{MANIFEST}"


def _group_by_step(objects: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Group a run's files by checkpoint."""
    steps: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, info in objects.items():
        if match := CHECKPOINT_FILE.fullmatch(name):
            steps[int(match[1])][match[2]] = info
    return dict(sorted(steps.items()))


def _complete_steps(objects: Mapping[str, Any], address: str, print_line: PrintLine) -> list[int]:
    """The steps of the complete checkpoints of a run, ascending."""
    marked = {step: files for step, files in _group_by_step(objects).items() if COMMIT in files}
    for step in [step for step, files in marked.items() if MANIFEST not in files]:
        print_line(f"{address}/checkpoints/{step} is not used: it has a {COMMIT} and no {MANIFEST}")
        del marked[step]
    return list(marked)


def _checkpoint_files(folder: Path) -> Iterator[str]:
    """Names of the files of a run, without those in folders of checkpoints, hidden ones and temporary ones."""
    for parent, folders, files in os.walk(folder):  # ignores files that are removed meanwhile
        inside = Path(parent).relative_to(folder)
        if inside == Path("checkpoints"):
            folders.clear()
        for name in (str(inside / file) for file in sorted(files) if not file.endswith((".tmp", ".part"))):
            if not name.startswith(".") and (folder / name).is_file():
                yield name


class Index(dict[str, list]):
    """The files of a folder that the store has, or had: version there, size and time here, by name.

    Attributes:
      folder: local, of a run.
      last_heartbeat: of the process that trains it, in seconds since 1970.
    """

    def __init__(self, folder: Path):
        self.folder, values = folder, {}
        with contextlib.suppress(OSError):
            values = parse_json((folder / INDEX).read_bytes())
        super().__init__(files if isinstance(files := values.get("files"), dict) else {})
        self.last_heartbeat = values.get("beat", 0.0)

    def has(self, name: str, remote_version: str | None = None) -> bool:
        """True if the store has, or had, a local file as it is now; in the version `remote_version`, if given."""
        file, (remote, *local) = self.folder / name, self.get(name, [None])
        return file.is_file() and local == _stat(file) and remote_version in (None, remote)

    def record(self, name: str, remote_version: str) -> None:
        """Record that the store has a local file, in a version."""
        self[name] = [remote_version, *_stat(self.folder / name)]

    def drop(self, names: Iterable[str]) -> None:
        """Remove files from the index."""
        for name in [*names]:
            self.pop(name, None)

    def save(self, **more: Any) -> None:
        """Write the index, with `more` values."""
        write_whole(self.folder / INDEX, json.dumps({"files": self, **more}))


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _stat(file: Path) -> list[int]:
    info = file.stat()
    return [info.st_size, info.st_mtime_ns]


def _missing_files(listed: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """The names that a store does not list with these sizes."""
    return [name for name, size in sizes.items() if listed.get(name, NO_OBJECT)["size"] != size]


def _why_incomplete(folder: Path, sizes: Mapping[str, int]) -> str:
    """The reason not to upload a local checkpoint, given the sizes of its files; empty if it is complete.

    Retention was faster, or it was fetched in part and is not in the store any more.
    """
    if not sizes:
        return "it was replaced here before its turn"
    described = {} if MANIFEST not in sizes else json.loads((folder / MANIFEST).read_bytes()).get("files", {})
    missing = [name for name in (MANIFEST, COMMIT) if name not in sizes]
    missing += [name for name, (size, _) in described.items() if sizes.get(name) != size]
    return f"it has no {missing[0]} here" if missing else ""


# --- To the store -----------------------------------------------------------------------------------------------------


class Mirror:
    """Uploads the folder of a run to its address while it trains; a context.

    Args:
      folder: local, as `run_to_train` has left it, and locked by this process.
      address: of the run in the store.
      print_line: called with one line about each upload and each failure; from several threads.

    Attributes:
      lock: of the run in the store.
      uploading: the checkpoint in progress.

    Raises:
      UsageError: another process trains there, or nothing can be written.
    """

    def __init__(self, folder: Path, address: str, print_line: PrintLine):
        self.folder, self.address, self.store = folder, address, Store(address, print_line)
        self.lock, self.uploading = StoreLock(self.store, address), None
        self._index, self._last_scan, self._uploads = Index(folder), 0.0, 0
        self._pending: set[int] = set()
        self._failed: dict[str, str] = {}  # files that the last attempt did not upload, and why
        self._closing, self._wake = threading.Event(), threading.Event()
        self._uploader = threading.Thread(target=self._upload_until_closed, name="upload", daemon=True)
        self.lock.acquire()

    @property
    def taken_by(self) -> str | None:
        """The process that has taken the run over, if there is one; this one has to stop."""
        return self.lock.taken_by

    def __enter__(self) -> Mirror:
        objects, local = self.store.files(self.address), steps_in(self.folder / "checkpoints")
        remote = _group_by_step(objects)
        self._index.drop(self._index.keys() - objects.keys())
        self.store.patience = 0.0  # from now on a failure is left to the next attempt
        newest = max(_complete_steps(objects, self.address, lambda line: None), default=-1)  # `fetch` has reported it
        if newest > max(local, default=-1) and _manifest_name(newest) not in self._index:
            self.lock.release()
            raise UsageError(f"{self.address} has got checkpoint {newest} meanwhile; type the same command again")
        uploaded = {step for step in local if self._index.has(_manifest_name(step)) and COMMIT in remote.get(step, ())}
        self._pending = {*local} - uploaded
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()
        self._uploader.start()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.finish()
        except RunError as error:
            if kind is None:
                raise
            self.store.print_once(str(error))

    def enqueue(self, step: int) -> None:
        """Upload checkpoint `step`, which is complete here, as soon as possible."""
        self._pending.add(step)
        self._wake.set()

    def finish(self) -> None:
        """Return when everything is uploaded.

        Raises:
          RunError: the store has failed for too long, or the run was taken over.
        """
        if self.lock.released.is_set():
            return
        self._closing.set()
        self._wake.set()
        try:
            self._uploader.join(1.0)
            if self._uploader.is_alive():
                self.store.print_once(f"waiting until the run is copied to {self.address}")
            while self._uploader.is_alive():  # not one long wait, from which no signal may wake this thread
                self._uploader.join(1.0)
            missing = self._failed or dict.fromkeys(map("checkpoint {}".format, self._pending), "it was not tried")
            self._attempt("the end of its lock", self.lock.release)
        finally:
            self.lock.released.set()
        if self.taken_by:
            aside = set_aside(self.folder, "not-copied")
            saved = f"what it saved is on this machine as {aside}, which --run and --init take"
            raise RunError(f"{self.address} is trained by {self.taken_by} now, so this process has stopped; {saved}")
        if missing:
            names = f"{', '.join(missing)} ({[*missing.values()][-1]})"
            command = f"python train.py --run {self.address}"
            raise RunError(f"{self.address} lacks {names}; this machine copies it with: {command}")

    # --- What is pending ----------------------------------------------------------------------------------------------

    def _upload_until_closed(self) -> None:
        """Upload pending files, with growing pauses while the store fails; runs in a thread."""
        pause, deadline = 1.0, math.inf  # the pause after the next failure
        while not self.taken_by:
            start, uploads, closing, self._failed = time.monotonic(), self._uploads, self._closing.is_set(), {}
            for step in sorted(self._pending, reverse=True):
                self._attempt(f"checkpoint {step}", partial(self._upload_checkpoint, step))
            self._attempt("its metrics and settings", partial(self._upload_changed, everything=closing))
            self._attempt("its rotation", self._apply_retention)
            if uploads < self._uploads:
                deadline += time.monotonic() - start  # the time of successful uploads does not count
            if (closing and not (self._failed or self._pending)) or time.monotonic() >= deadline:
                return
            if closing and deadline == math.inf:
                pause, deadline = 1.0, time.monotonic() + stores.PATIENCE
            wait = INTERVAL
            if self._failed:
                wait = pause * random.uniform(1, 1.25)
                self._attempt("a new connection", self.store.reconnect)
            pause = min(2 * pause, stores.MAX_PAUSE) if self._failed else 1.0
            self._wake.wait(min(wait, deadline - time.monotonic()))
            self._wake.clear()

    def _attempt(self, name: str, call: Callable[[], None]) -> None:
        if self.taken_by:
            return
        try:
            call()
        except Exception as error:  # whatever it is: a run does not end because its store fails
            self._failed[name] = reason = str(error) or type(error).__name__
            if not self.taken_by:
                self.store.print_once(f"{self.address} lacks {name}: {reason}; it is copied later", (name, reason))

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def _upload_checkpoint(self, step: int) -> None:
        """Upload a checkpoint; it is pending until the store lists all of it."""
        prefix, start = f"checkpoints/{step}/", time.monotonic()
        address, folder = f"{self.address}/{prefix}", self.folder / prefix
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sizes = {file.relative_to(folder).as_posix(): _size(file) for file in files}
        if why := _why_incomplete(folder, sizes):
            self._pending.discard(step)
            self.store.print_once(f"checkpoint {step} was not copied to {self.address}: {why}")
            return
        self.uploading = step
        try:
            before, manifest = self.store.files(address), (folder / MANIFEST).read_bytes()
            exists = not _missing_files(before, sizes) and self.store.read(address + MANIFEST) == manifest
            if not exists:
                self._put_checkpoint(prefix, sizes, before)
            listed = self._wait_until_listed(address, sizes)
        finally:
            self.uploading = None
        self._index.drop(name for name in self._index if name.startswith(prefix))
        self._index.record(prefix + MANIFEST, version(listed[MANIFEST]))
        self._index.save()
        self._pending.discard(step)
        if not exists:
            size, seconds = sum(sizes.values()) / 1e6, time.monotonic() - start
            self.store.print_once(f"checkpoint {step} copied to {self.address}: {size:,.1f} MB in {seconds:.1f} s")

    def _put_checkpoint(self, prefix: str, sizes: Mapping[str, int], before: Mapping[str, Any]) -> None:
        """Upload a checkpoint with these file sizes; the store listed `before` of them. The mark is uploaded last."""
        address = f"{self.address}/{prefix}"
        self.lock.renew()  # fails if another process has taken the run over
        # Of an upload that was killed, or a step that is trained again: first it is not a checkpoint any more.
        old = [COMMIT, MANIFEST, *sorted(before.keys() - sizes)]
        self.store.remove([address + name for name in old if name in before])
        data = [name for name in sizes if name not in (MANIFEST, COMMIT)]
        data.sort(key=lambda name: name != MADE_BY_ORBAX)  # alone: it marks the folder as a checkpoint's
        self._index.drop(prefix + name for name in _missing_files(before, sizes))
        for start in (0, *range(1, len(data), stores.TOGETHER)):
            self._upload_files([prefix + name for name in data[start : start + stores.TOGETHER if start else 1]])
            if time.monotonic() - self._last_scan > INTERVAL:
                self._attempt("its metrics and settings", self._upload_changed)
        self._wait_until_listed(address, {name: sizes[name] for name in data})
        self._upload_files([name for name in _checkpoint_files(self.folder) if RESUME_FILE.match(name)])
        self._attempt("its metrics and settings", partial(self._upload_changed, everything=True))
        self.lock.renew()
        for name in (MANIFEST, COMMIT):
            self.store.put([(self.folder / prefix / name, address + name)])

    def _wait_until_listed(self, address: str, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the listing of the store when it contains files of these sizes."""
        deadline = time.monotonic() + LISTING_LAG
        while missing := _missing_files(listed := self.store.files(address), sizes):
            if time.monotonic() > deadline:
                raise RunError(f"the store does not list {address}{missing[0]} with its {sizes[missing[0]]:,} bytes")
            time.sleep(min(LISTING_LAG / 30, 2.0))
        return listed

    def _apply_retention(self) -> None:
        """Remove or rename checkpoints in the store like those here, when the newest is uploaded."""
        local = steps_in(self.folder / "checkpoints")
        if not local or local[-1] in self._pending:  # a run that trains has one, unless a user removes files here
            return
        for step, files in _group_by_step(self.store.files(self.address)).items():
            is_foreign = COMMIT in files and _manifest_name(step) not in self._index
            if step in local or MADE_BY_ORBAX not in files or is_foreign:
                continue
            self.lock.renew()
            address, renamed = f"{self.address}/checkpoints/{step}", _local_names(self._index, step)
            self.store.remove([f"{address}/{COMMIT}"])  # first it is not a checkpoint any more
            order = {MANIFEST: 1, MADE_BY_ORBAX: 3}  # the last one marks the rest after a kill as a checkpoint's
            for name in sorted(files.keys() - {COMMIT}, key=lambda name: order.get(name, 2)):
                if renamed:
                    self.store.move(f"{address}/{name}", f"{self.address}/checkpoints/{renamed[-1]}/{name}")
                else:
                    self.store.remove([f"{address}/{name}"])

    # --- Other files --------------------------------------------------------------------------------------------------

    def _upload_files(self, names: Sequence[str]) -> None:
        """Upload files of the run that have changed since they were uploaded."""
        if self.taken_by or time.monotonic() - self.lock.renewed > LISTING_LAG / 2:
            self.lock.renew()
        changed = [name for name in names if not self._index.has(name)]
        entries = {name: ["", *_stat(self.folder / name)] for name in changed}
        self.store.put([(self.folder / name, f"{self.address}/{name}") for name in changed])
        self._index |= entries
        self._uploads += len(changed)

    def _upload_changed(self, everything: bool = False) -> None:
        """Upload the files that have changed, large ones only with `everything`, and remove those that are gone."""
        self._last_scan, names = time.monotonic(), list(_checkpoint_files(self.folder))
        self._upload_files([name for name in names if everything or _size(self.folder / name) <= LARGE_FILE_BYTES])
        for name in [name for name in self._index if name not in names and not IN_CHECKPOINT.match(name)]:
            self.store.remove([f"{self.address}/{name}"])
            del self._index[name]
        if everything:
            self._index.save()

    # --- One process trains in a run ----------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        """Renew the lock until this process has ended or another one has taken the run over; runs in a thread."""
        while not self.lock.released.wait(INTERVAL) and not self.taken_by:
            try:
                self.lock.renew()
            except Exception as error:
                self.store.print_once(f"{self.address} does not show that the run continues: {error}")
        self._wake.set()
