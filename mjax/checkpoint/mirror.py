"""A run in an object store: written to a folder here, copied to the store, and fetched from there where it is read.

    s3://bucket/runs/one/
      config.json, metrics.jsonl, …  whole objects, written again when the local file has changed
      checkpoints/200/…              files of a checkpoint, then its manifest.json, and commit_success.txt last
      .lock                          who trains here

**While a run trains here, the folder here is the truth.** The store is a copy that is only ever behind. No command
removes a file that this machine wrote because the store lacks it. A cache keeps fetched files apart
(`utils/stores.py`); a run that is continued on another machine moves from its cache to the folder that is written.

**A checkpoint counts when it is marked.** A store has no rename, so its files have their final names from the start and
`commit_success.txt`, which Orbax writes too, goes last: after all other files, whose sizes the store has listed, after
the metrics up to there, and after the manifest. Without the mark it is not a checkpoint: the next upload removes it.

**Training does not wait.** A thread copies what is due, the newest checkpoint first. A checkpoint is due until the
store lists all of it, whatever the store answers meanwhile; only one that rotation has removed here is left out.

**One process trains** (`checkpoint/store_lock.py`). It reads its lock back at each beat, before a checkpoint is marked
and before one is removed; when the lock is another's, it stops.
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
from mjax.checkpoint.store_lock import LOCK, StoreLock, parse, watch
from mjax.errors import RunError, UsageError
from mjax.utils import stores
from mjax.utils.files import open_no_link, path_below, rename, set_aside, take_lock, write_whole
from mjax.utils.stores import (
    FETCHED,
    Store,
    alone,
    find_address,
    is_address,
    mirror_address,
    modification_time,
    to_stderr,
    version,
)

COMMIT = "commit_success.txt"
"""The mark of a checkpoint that is complete, of Orbax's name."""
INDEX = ".store.json"
EVERY = 10.0  # seconds between two beats, and between two looks for changed files
LAG = 60.0  # seconds for which a listing may lag
LARGE = 1 << 22  # bytes of a file that is copied with checkpoints and at the end only, such as TensorBoard's
STAYS_THERE = ("tensorboard/", "profile/", "wandb/")  # not fetched
STEP = re.compile(r"checkpoints/(0|[1-9][0-9]*)/(.+)")
IN_CHECKPOINT = re.compile(r"checkpoints/[^/]+/.+")  # also in one that was set aside
NEEDED = re.compile(r"[^/]+\.jsonl?|tokenizer/.+")  # with each checkpoint: to continue the run elsewhere
RUN_FLAGS = ("--run", "--init", "--base")
"""Flags with a run as their value."""
NONE = {"size": -1}
_readable: dict[str, Path] = {}  # local folders of addresses, as they were last fetched


def localize_arguments(argv: Iterable[str], also: bool = False, trains: bool = False) -> list[str]:
    """A command line with local folders for the addresses of runs, which are fetched; those of --runs are not.

    Args:
      argv: of a command.
      also: whether all other addresses are runs too, as after --yes.
      trains: whether the command trains the run of --run.

    Raises:
      UsageError: a bucket is not there or cannot be read, or a package is missing.
      RunError: a store does not answer.
    """
    words, flag = [], ""
    for word in argv:
        name, equals, value = word.partition("=") if word.startswith("--") else (flag, "", word)
        flag = name if word.startswith("--") and not equals else ""
        local = _local_value(name, value, also, trains)
        words.append(f"{name}={local}" if equals else flag or local)
    return words


def _local_value(flag: str, value: str, also: bool, trains: bool) -> str:
    prefix = "run:" if flag == "--tokenizer" and value.startswith("run:") else ""
    if not is_address(address := value.removeprefix(prefix)):
        return value
    if flag == "--runs":
        return str(mirror_address(address))
    if trains and flag == "--run":
        return str(run_to_train(address))
    return f"{prefix}{local_run(address)}" if prefix or also or flag in RUN_FLAGS else value


# --- From the store ---------------------------------------------------------------------------------------------------


def local_run(run: str | Path, print_line: Callable[[str], None] = to_stderr) -> Path:
    """The local folder in which a run can be read: of an address, what is fetched from there; another path as it is."""
    return fetch(mirror_address(run), print_line)


def read_folder(run: str | Path) -> Path:
    """`local_run`, without asking the store again for a run that this process has fetched."""
    return _readable.get(str(run)) or local_run(run)


def fetch_all(runs: Path) -> list[Path] | None:
    """The local folders of all runs in the folder of an address; None for another folder.

    Of each run, all at the same time, only what a list shows is fetched.
    """
    if (address := find_address(runs)) is None:
        return None
    names = {*Store(address, to_stderr).folders(address), *(file.parent.name for file in runs.glob("*/config.json"))}
    with ThreadPoolExecutor(16) as pool:
        folders = pool.map(lambda name: fetch(runs / name, to_stderr, to_list=True), sorted(names))
        return [folder for folder in folders if (folder / "config.json").is_file()]


def fetch(folder: Path, print_line: Callable[[str], None], to_list: bool = False, tries: int = 5) -> Path:
    """Return the local folder in which a run is to be read.

    It is the folder that this machine writes, while a process trains there, or if the store has nothing newer; else the
    cache, which is made what the store has, without the files of checkpoints, which `bring` fetches.

    Args:
      folder: of a run; another path is returned as it is.
      print_line: takes one line about each problem.
      to_list: fetch only what a list of runs shows.
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
        _readable[address] = readable
    return readable


def run_to_train(run: str | Path, print_line: Callable[[str], None] = to_stderr) -> Path:
    """The local folder in which to train a run: of an address, with what the store has, unless this machine is ahead.

    If the store is ahead, what it lacks of this machine's folder is set aside.
    """
    if (address := find_address(mirror_address(run))) is None:
        return Path(run)
    folder = mirror_address(address)
    if (cache := fetch(folder, print_line)) == folder:
        return folder
    with alone(folder), alone(cache):
        # Another process of this run may have been faster; what others have listed since then is not a whole run.
        if cache.is_dir() and not is_locked(folder) and not Index(cache).items() <= Index(folder).items():
            _clear(folder, cache, print_line)
            folder.parent.mkdir(parents=True, exist_ok=True)
            rename(cache, folder)
    _readable[address] = folder
    return folder


def bring(
    checkpoint: Path, files: Iterable[str], sizes: Mapping[str, list], print_line: Callable[[str], None], again=False
) -> bool:
    """Fetch files of a checkpoint that are not here; True if there were some.

    Args:
      checkpoint: its folder.
      files: names in it.
      sizes: bytes first, by name.
      print_line: takes one line about it.
      again: fetch all of them, also those that are here.
    """
    if (address := find_address(checkpoint)) is None:
        return False
    with alone(checkpoint.parent.parent):
        missing = [name for name in files if again or _size(checkpoint / name) != sizes[name][0]]
        if missing:
            total = sum(sizes[name][0] for name in missing)
            print_line(f"reading checkpoint {checkpoint.name} from {address}: {total / 1e6:,.1f} MB")
            with contextlib.suppress(FileNotFoundError):  # the check that follows says which
                pairs = [(f"{address}/{name}", path_below(checkpoint, name)) for name in missing]
                Store(address, print_line).get(pairs)
    return bool(missing)


def is_locked(folder: Path) -> bool:
    """True if a process of this machine trains in `folder`; nothing is written to find out."""
    try:
        with open_no_link(folder / LOCK, "rb") as file:
            return not take_lock(file, lambda line: None)
    except (OSError, UsageError):
        return False


def local_folders(folder: Path) -> list[Path]:
    """The local folders of the run in `folder`: that alone, or of an address what was written and what was fetched."""
    address = find_address(folder)
    both = [] if address is None else [mirror_address(address), mirror_address(address, FETCHED)]
    return [folder, *(other for other in both if other != folder and other.is_dir())]


def is_running_on_another_machine(folder: Path) -> bool:
    """True if the run in a store had given a sign of life shortly before it was fetched, if the clocks agree."""
    return find_address(folder) is not None and time.time() - Index(folder).beat < LAG


def remove_there(folder: Path, dry: bool = False) -> int:
    """Remove what the store has of a run, so that it is never half a run; returns the bytes of it.

    Args:
      folder: local, of the run; nothing happens for another path.
      dry: remove nothing.

    Raises:
      UsageError: a process trains there.
    """
    if (address := find_address(folder)) is None:
        return 0
    store = Store(address, to_stderr)
    objects = store.files(address)
    if not dry:
        if LOCK in objects:
            watch(store, address, store.read(f"{address}/{LOCK}"))
        # First it has no checkpoints; it is a run to the end, so that the same command continues.
        order = sorted(objects, key=lambda name: (name == "config.json", not name.endswith(f"/{COMMIT}")))
        store.remove([f"{address}/{name}" for name in order])
    return sum(about["size"] for about in objects.values())


def _is_ahead(written: Path, address: str, objects: Mapping[str, Any], print_line: Callable[[str], None]) -> bool:
    """True if the folder that this machine writes has what the store has, and perhaps more."""
    here, marked, index = (
        steps_in(written / "checkpoints"),
        _complete_steps(objects, address, print_line),
        Index(written),
    )
    if marked:
        newest = _manifest(marked[-1])
        if index.get(newest, [None])[0] != version(objects[newest]):
            return False  # this machine has never had it
        if here[-1:] < marked[-1:] and not _names_here(index, marked[-1]):
            return False  # it was removed here, and nothing newer was saved
    if here and here[-1] > max(marked, default=-1):
        print_line(
            f"checkpoint {here[-1]} of {address} is on this machine only; it is used, and copied by the next training"
        )
    return bool(here) or (written / "config.json").is_file()


def _names_here(index: Index, step: int) -> list[str]:
    """The name of a checkpoint that the store has, or had, in a run here: another one if it was set aside."""
    checkpoints, copied = index.folder / "checkpoints", index.get(_manifest(step), [])[1:]
    # Not N.deleting or N.writing.
    files = [entry / MANIFEST for entry in (checkpoints / str(step), *checkpoints.glob(f"{step}.*[!g]"))]
    return [file.parent.name for file in files if file.is_file() and _stat(file) == copied]


def _is_fetched(name: str) -> bool:
    """True if a file of a run in a store is fetched with it, rather than with a checkpoint or not at all."""
    return not name.startswith((".", *STAYS_THERE)) and not IN_CHECKPOINT.match(name)


def _refresh(cache: Path, address: str, store: Store, objects: Mapping[str, Any], to_list: bool) -> None:
    """Make the cache of a run what the store has."""
    with alone(cache):
        index, marked = Index(cache), _complete_steps(objects, address, store.print_once)
        used = {*filter(_is_fetched, objects), *map(_manifest, marked)}
        listed = {name for name in used if "/" not in name and not name.endswith(".png")}
        wanted = listed.union(map(_manifest, marked[-1:])) if to_list else used
        new = [name for name in sorted(wanted) if not index.has(name, version(objects[name]))]
        for step in {*steps_in(cache / "checkpoints"), *marked}:
            if not index.has(name := _manifest(step), version(objects.get(name, NONE))):
                shutil.rmtree(cache / "checkpoints" / str(step), ignore_errors=True)
        for name in sorted({*_checkpoint_files(cache)} - used):
            (cache / name).unlink()
        store.get([(f"{address}/{name}", path_below(cache, name)) for name in new])
        for name in new:
            os.utime(cache / name, (modification_time(objects[name]),) * 2)
            index.note(name, version(objects[name]))
        if wanted:
            index.drop(index.keys() - used)
            index.save(beat=modification_time(objects[LOCK]) if LOCK in objects else 0.0)
        else:
            shutil.rmtree(cache, ignore_errors=True)


def _clear(folder: Path, cache: Path, print_line: Callable[[str], None]) -> None:
    """Remove a folder that this machine wrote if all of it is, or was, in the store, whose run is a later state of the
    same; else set it aside."""
    checkpoints, index = folder / "checkpoints", Index(folder)
    entries = [entry.name for entry in checkpoints.iterdir() if entry.is_dir()] if checkpoints.is_dir() else []
    names = [*_checkpoint_files(folder), *(f"checkpoints/{name}/{MANIFEST}" for name in entries)]
    if _first_record(folder) in (b"", _first_record(cache)) and all(map(index.has, names)):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        aside = set_aside(folder, "not-copied")
        print_line(f"{find_address(folder)} has gone on elsewhere: this machine's files of it are kept as {aside}")


def _first_record(folder: Path) -> bytes:
    """The first line of the metrics, which has the time that a step took: no other run has the same."""
    file = folder / "metrics.jsonl"
    return file.open("rb").readline() if file.is_file() else b""


def _manifest(step: int) -> str:
    return f"checkpoints/{step}/{MANIFEST}"


def _steps(objects: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The files of each checkpoint among those of a run."""
    steps: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, about in objects.items():
        if match := STEP.fullmatch(name):
            steps[int(match[1])][match[2]] = about
    return dict(sorted(steps.items()))


def _complete_steps(objects: Mapping[str, Any], address: str, print_line: Callable[[str], None]) -> list[int]:
    """The steps of the complete checkpoints of a run, ascending."""
    marked = {step: files for step, files in _steps(objects).items() if COMMIT in files}
    for step in [step for step, files in marked.items() if MANIFEST not in files]:
        print_line(f"{address}/checkpoints/{step} is not used: it has a {COMMIT} and no {MANIFEST}")
        del marked[step]
    return list(marked)


def _checkpoint_files(folder: Path) -> Iterator[str]:
    """Names of the files of a run, without those in folders of checkpoints, hidden ones and temporary ones."""
    for parent, folders, files in os.walk(folder):  # ignores what vanishes meanwhile
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
      beat: when the process that trains it gave a sign of life, in seconds since 1970.
    """

    def __init__(self, folder: Path):
        self.folder, values = folder, {}
        with contextlib.suppress(OSError):
            values = parse((folder / INDEX).read_bytes())
        super().__init__(files if isinstance(files := values.get("files"), dict) else {})
        self.beat = values.get("beat", 0.0)

    def has(self, name: str, there: str | None = None) -> bool:
        """True if the store has, or had, a local file as it is now; perhaps in the version `there`."""
        file, (of_store, *of_file) = self.folder / name, self.get(name, [None])
        return file.is_file() and of_file == _stat(file) and there in (None, of_store)

    def note(self, name: str, there: str) -> None:
        """Note that the store has a file as it is here, in a version."""
        self[name] = [there, *_stat(self.folder / name)]

    def drop(self, names: Iterable[str]) -> None:
        """Forget files."""
        for name in [*names]:
            self.pop(name, None)

    def save(self, **more: Any) -> None:
        """Write the record, with `more` values."""
        write_whole(self.folder / INDEX, json.dumps({"files": self, **more}))


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _stat(file: Path) -> list[int]:
    about = file.stat()
    return [about.st_size, about.st_mtime_ns]


def _lacking(listed: Mapping[str, Any], sizes: Mapping[str, int]) -> list[str]:
    """The names that a store does not list with these sizes."""
    return [name for name, size in sizes.items() if listed.get(name, NONE)["size"] != size]


def _why_incomplete(folder: Path, sizes: Mapping[str, int]) -> str:
    """The reason not to copy a local checkpoint, given the sizes of its files; empty if it is complete.

    Rotation was faster, or it was fetched in part and is not in the store any more.
    """
    if not sizes:
        return "it was replaced here before its turn"
    described = {} if MANIFEST not in sizes else json.loads((folder / MANIFEST).read_bytes()).get("files", {})
    missing = [name for name in (MANIFEST, COMMIT) if name not in sizes]
    missing += [name for name, (size, _) in described.items() if sizes.get(name) != size]
    return f"it has no {missing[0]} here" if missing else ""


# --- To the store -----------------------------------------------------------------------------------------------------


class Mirror:
    """Copies the folder of a run to its address while it trains; a context.

    Args:
      folder: local, as `run_to_train` has left it, and locked by this process.
      address: of the run in the store.
      print_line: takes one line about each upload and each failure; from several threads.

    Attributes:
      lock: of the run in the store.
      uploading: the checkpoint that is being copied.

    Raises:
      UsageError: another process trains there, or nothing can be written.
    """

    def __init__(self, folder: Path, address: str, print_line: Callable[[str], None]):
        self.folder, self.address, self.store = folder, address, Store(address, print_line)
        self.lock, self.uploading = StoreLock(self.store, address), None
        self._index, self._looked, self._sent = Index(folder), 0.0, 0
        self._due: set[int] = set()
        self._failed: dict[str, str] = {}  # what the last attempt did not copy, and why
        self._ended, self._wake = threading.Event(), threading.Event()
        self._copies = threading.Thread(target=self._copy_until_ended, name="copies", daemon=True)
        self.lock.claim()

    @property
    def lost(self) -> str | None:
        """The process that trains there now, if it is another one; this one is to stop."""
        return self.lock.lost

    def __enter__(self) -> Mirror:
        objects, here = self.store.files(self.address), steps_in(self.folder / "checkpoints")
        there = _steps(objects)
        self._index.drop(self._index.keys() - objects.keys())
        self.store.patience = 0.0  # from here on a failure is for the next attempt
        newest = max(_complete_steps(objects, self.address, lambda line: None), default=-1)  # `fetch` has said it
        if newest > max(here, default=-1) and _manifest(newest) not in self._index:
            self.lock.release()
            raise UsageError(f"{self.address} has got checkpoint {newest} meanwhile; type the same command again")
        self._due = {step for step in here if not self._index.has(_manifest(step)) or COMMIT not in there.get(step, ())}
        threading.Thread(target=self._beat_until_released, name="beats", daemon=True).start()
        self._copies.start()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.finish()
        except RunError as error:
            if kind is None:
                raise
            self.store.print_once(str(error))

    def enqueue(self, step: int) -> None:
        """Copy checkpoint `step`, which is complete here, as soon as possible."""
        self._due.add(step)
        self._wake.set()

    def finish(self) -> None:
        """Return when everything is copied.

        Raises:
          RunError: the store has failed for too long, or the run was taken over.
        """
        if self.lock.released.is_set():
            return
        self._ended.set()
        self._wake.set()
        try:
            self._copies.join(1.0)
            if self._copies.is_alive():
                self.store.print_once(f"waiting until the run is copied to {self.address}")
            while self._copies.is_alive():  # not one long wait, from which no signal may wake this thread
                self._copies.join(1.0)
            lacking = self._failed or dict.fromkeys(map("checkpoint {}".format, self._due), "it was not tried")
            self._attempt("the end of its lock", self.lock.release)
        finally:
            self.lock.released.set()
        if self.lost:
            aside = set_aside(self.folder, "not-copied")
            saved = f"what it saved is kept on this machine as {aside}, which --run and --init take"
            raise RunError(f"{self.address} is trained by {self.lost} now, so this process has stopped; {saved}")
        if lacking:
            what = f"{', '.join(lacking)} ({[*lacking.values()][-1]})"
            raise RunError(f"{self.address} lacks {what}; this machine copies it with: mjax train --run {self.address}")

    # --- What is due --------------------------------------------------------------------------------------------------

    def _copy_until_ended(self) -> None:
        """In a thread: copy what is due, again and again, with growing pauses while the store fails."""
        pause, end = 1.0, math.inf  # after the next failure, and of patience
        while not self.lost:
            begun, sent, ending, self._failed = time.monotonic(), self._sent, self._ended.is_set(), {}
            for step in sorted(self._due, reverse=True):
                self._attempt(f"checkpoint {step}", partial(self._upload, step))
            self._attempt("its metrics and settings", partial(self._copy_files, everything=ending))
            self._attempt("its rotation", self._rotate)
            if sent < self._sent:
                end += time.monotonic() - begun  # the time of uploads that go on does not count
            if (ending and not (self._failed or self._due)) or time.monotonic() >= end:
                return
            if ending and end == math.inf:
                pause, end = 1.0, time.monotonic() + stores.PATIENCE
            wait = EVERY
            if self._failed:
                wait = pause * random.uniform(1, 1.25)
                self._attempt("a new connection", self.store.reconnect)
            pause = min(2 * pause, stores.MAX_PAUSE) if self._failed else 1.0
            self._wake.wait(min(wait, end - time.monotonic()))
            self._wake.clear()

    def _attempt(self, what: str, call: Callable[[], None]) -> None:
        if self.lost:
            return
        try:
            call()
        except Exception as error:  # whatever it is: a run does not end because its store fails
            self._failed[what] = reason = str(error) or type(error).__name__
            self.lost or self.store.print_once(
                f"{self.address} lacks {what}: {reason}; it is copied later", (what, reason)
            )

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def _upload(self, step: int) -> None:
        """Copy a checkpoint; it is due until the store lists all of it."""
        prefix, begun = f"checkpoints/{step}/", time.monotonic()
        there, folder = f"{self.address}/{prefix}", self.folder / prefix
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        sizes = {file.relative_to(folder).as_posix(): _size(file) for file in files}
        if why := _why_incomplete(folder, sizes):
            self._due.discard(step)
            self.store.print_once(f"checkpoint {step} was not copied to {self.address}: {why}")
            return
        self.uploading = step
        try:
            before, manifest = self.store.files(there), (folder / MANIFEST).read_bytes()
            is_there = not _lacking(before, sizes) and self.store.read(there + MANIFEST) == manifest
            if not is_there:
                self._put_checkpoint(prefix, sizes, before)
            listed = self._check_listed(there, sizes)
        finally:
            self.uploading = None
        self._index.drop(name for name in self._index if name.startswith(prefix))
        self._index.note(prefix + MANIFEST, version(listed[MANIFEST]))
        self._index.save()
        self._due.discard(step)
        if not is_there:
            size, seconds = sum(sizes.values()) / 1e6, time.monotonic() - begun
            self.store.print_once(f"checkpoint {step} copied to {self.address}: {size:,.1f} MB in {seconds:.1f} s")

    def _put_checkpoint(self, prefix: str, sizes: Mapping[str, int], before: Mapping[str, Any]) -> None:
        """Copy a checkpoint whose files have these sizes, of which the store listed `before`; it is marked last."""
        there = f"{self.address}/{prefix}"
        self.lock.beat()  # the run is still this process's
        # Of an upload that was killed, or a step that is trained again: first it is not a checkpoint any more.
        old = [COMMIT, MANIFEST, *sorted(before.keys() - sizes)]
        self.store.remove([there + name for name in old if name in before])
        data = [name for name in sizes if name not in (MANIFEST, COMMIT)]
        data.sort(key=lambda name: name != MADE_BY_ORBAX)  # alone: it tells a checkpoint from a folder of the user's
        self._index.drop(prefix + name for name in _lacking(before, sizes))
        for start in (0, *range(1, len(data), stores.TOGETHER)):
            self._send([prefix + name for name in data[start : start + stores.TOGETHER if start else 1]])
            if time.monotonic() - self._looked > EVERY:
                self._attempt("its metrics and settings", self._copy_files)
        self._check_listed(there, {name: sizes[name] for name in data})
        self._send([name for name in _checkpoint_files(self.folder) if NEEDED.match(name)])
        self._attempt("its metrics and settings", partial(self._copy_files, everything=True))
        self.lock.beat()  # the run is still this process's
        for name in (MANIFEST, COMMIT):
            self.store.put([(self.folder / prefix / name, there + name)])

    def _check_listed(self, there: str, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the listing of the store, once it has files of these sizes."""
        end = time.monotonic() + LAG
        while missing := _lacking(listed := self.store.files(there), sizes):
            if time.monotonic() > end:
                raise RunError(f"the store does not list {there}{missing[0]} with its {sizes[missing[0]]:,} bytes")
            time.sleep(min(LAG / 30, 2.0))
        return listed

    def _rotate(self) -> None:
        """Remove or rename the checkpoints in the store that were removed or renamed here, once the newest is there."""
        here = steps_in(self.folder / "checkpoints")
        if not here or here[-1] in self._due:  # a run that trains has one, unless somebody else removes files here
            return
        old = {step: files for step, files in _steps(self.store.files(self.address)).items() if step not in here}
        for step, files in old.items():
            if MADE_BY_ORBAX not in files or (COMMIT in files and _manifest(step) not in self._index):
                continue
            self.lock.beat()  # the run is still this process's
            there, renamed = f"{self.address}/checkpoints/{step}", _names_here(self._index, step)
            self.store.remove([f"{there}/{COMMIT}"])  # first it is not a checkpoint any more
            order = {MANIFEST: 1, MADE_BY_ORBAX: 3}  # the last one tells what remains of a killed rotation
            for name in sorted(files.keys() - {COMMIT}, key=lambda name: order.get(name, 2)):
                if renamed:
                    self.store.move(f"{there}/{name}", f"{self.address}/checkpoints/{renamed[-1]}/{name}")
                else:
                    self.store.remove([f"{there}/{name}"])

    # --- Other files --------------------------------------------------------------------------------------------------

    def _send(self, names: Sequence[str]) -> None:
        """Copy files of the run that have changed since they were copied."""
        if self.lost or time.monotonic() - self.lock.beaten > LAG / 2:
            self.lock.beat()  # the run is still this process's
        changed = [name for name in names if not self._index.has(name)]
        now = {name: ["", *_stat(self.folder / name)] for name in changed}
        self.store.put([(self.folder / name, f"{self.address}/{name}") for name in changed])
        self._index |= now
        self._sent += len(changed)

    def _copy_files(self, everything: bool = False) -> None:
        """Copy the files that have changed, and remove those that are gone; large ones if `everything` is due."""
        self._looked, names = time.monotonic(), list(_checkpoint_files(self.folder))
        self._send([name for name in names if everything or _size(self.folder / name) <= LARGE])
        for name in [name for name in self._index if name not in names and not IN_CHECKPOINT.match(name)]:
            self.store.remove([f"{self.address}/{name}"])
            del self._index[name]
        if everything:
            self._index.save()

    # --- One process trains in a run ----------------------------------------------------------------------------------

    def _beat_until_released(self) -> None:
        """In a thread: show that this process trains, until it has ended or another one trains."""
        while not self.lock.released.wait(EVERY) and not self.lost:
            try:
                self.lock.beat()
            except Exception as error:
                self.store.print_once(f"{self.address} does not show that the run continues: {error}")
        self._wake.set()
