"""A run in an object store: its folder here, copied there in the background, and fetched from there at a start.

    s3://bucket/runs/one/
      config.json, tokenizer/, …     whole objects, written again when the local file has changed
      metrics/00000000.jsonl, …      parts of metrics.jsonl: only the last is written again
      checkpoints/200/…              files of a checkpoint, then its manifest.json, and commit_success.txt last
      .lock                          who trains here, written again every few seconds

**A checkpoint counts when it is marked.** A store has no rename, so its files have their final names from the start and
`commit_success.txt`, which Orbax writes too, goes last: after all other files, whose sizes the store has listed, after
the metrics up to there, and after the manifest. Without the mark it is not a checkpoint: the next upload removes it.

**Training does not wait.** A checkpoint is saved to the local disk as without a store, and a thread copies it. While
the store is slow, the newest checkpoint is copied next, and those that were rotated away meanwhile are not. A store
that fails is tried again for as long as the run lasts, and for a minute after its end.

**The store decides.** A start fetches what the store has and drops the rest, unless this machine wrote that and the
store has nothing newer. Checkpoints are removed there when an upload is complete and they are no longer here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mjax.checkpoint.folders import MADE_BY_ORBAX, MANIFEST, steps_in
from mjax.errors import RunError, UsageError
from mjax.utils.files import take_lock, write_whole
from mjax.utils.stores import ADDRESS, Store, address_of, alone, mirror_of, modified, to_stderr, version

COMMIT = "commit_success.txt"
"""The mark of a checkpoint that is complete, of Orbax's name."""
LOCK, INDEX, METRICS = ".lock", ".store.json", "metrics.jsonl"
EVERY = 10.0  # seconds between two looks for changed files
ALIVE = 60.0  # seconds for which a run counts as running after its last sign of life
PART_BYTES = 1 << 20  # of a part of metrics.jsonl
LARGE = 1 << 22  # bytes of a file that is copied with checkpoints and at the end only, such as TensorBoard's
STAYS_THERE = ("tensorboard/", "profile/", "wandb/", "metrics/")  # not fetched
STEP = re.compile(r"checkpoints/(0|[1-9][0-9]*)/(.+)")
RUN_FLAGS = ("--run", "--resume", "--checkpoint", "--init", "--base")


def localized(argv: Iterable[str], also: bool = False) -> list[str]:
    """A command line with local folders for the addresses of runs, which are fetched; those of --runs are not.

    Args:
      argv: of a command.
      also: whether words without a flag are runs too.

    Raises:
      UsageError: a bucket is not there or cannot be read, or a package is missing.
      RunError: a store does not answer.
    """
    words, before = [], ""
    for word in argv:
        flag, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        if word.startswith("--") and not equals:
            words.append(word)
            before = word
            continue
        kind, _, rest = value.partition("run:")
        if flag == "--tokenizer" and not kind and ADDRESS.fullmatch(rest):
            value = f"run:{local_run(rest)}"
        elif ADDRESS.fullmatch(value) and flag == "--runs":
            value = str(mirror_of(value))
        elif ADDRESS.fullmatch(value) and (flag in RUN_FLAGS or (also and not flag)):
            value = str(local_run(value))
        words.append(f"{flag}={value}" if equals else value)
        before = ""
    return words


def local_run(run: str | Path, say: Callable[[str], None] = to_stderr) -> Path:
    """The local folder of a run: of an address, what is fetched from there; any other path as it is."""
    folder = mirror_of(run)
    fetch(folder, say)
    return folder


def fetch_all(runs: Path) -> None:
    """Fetch every run in a folder of a mirror."""
    if (address := address_of(runs)) is None:
        return
    store = Store.of(address, to_stderr)
    found = store.files(address)
    names = {name.partition("/")[0] for name in found if re.fullmatch(r"[^/]+/config\.json", name)}
    runs.mkdir(parents=True, exist_ok=True)
    for folder in runs.iterdir():
        if folder.name not in names and not folder.name.startswith(".") and not is_locked(folder):
            shutil.rmtree(folder)
    for name in sorted(names):
        of_run = {file[len(name) + 1 :]: about for file, about in found.items() if file.startswith(f"{name}/")}
        fetch(runs / name, to_stderr, of_run)


def remove_there(folder: Path, dry: bool = False) -> int:
    """Remove what the store has of the run in a mirror, so that it is never half a run; returns the bytes of it.

    Args:
      folder: of the run; nothing happens for one that mirrors no store.
      dry: remove nothing.
    """
    if (address := address_of(folder)) is None:
        return 0
    store = Store.of(address, to_stderr)
    found = store.files(address)
    if not dry:
        # First it is not a run any more, then it has no checkpoints.
        order = sorted(found, key=lambda name: (name != "config.json", not name.endswith(f"/{COMMIT}")))
        store.remove([f"{address}/{name}" for name in order])
    return sum(about["size"] for about in found.values())


# --- From the store ---------------------------------------------------------------------------------------------------


def fetch(folder: Path, say: Callable[[str], None], found: Mapping[str, Any] | None = None) -> None:
    """Make the local folder of a run what the store has, without the files of checkpoints, which `bring` fetches.

    Nothing happens for a folder that mirrors no store, or while a process of this machine trains there.

    Args:
      folder: of a run.
      say: takes one line about each problem.
      found: the files of the run in the store, if they are known.
    """
    if (address := address_of(folder)) is None:
        return
    with alone(folder):
        if is_locked(folder):
            return
        store, index = Store.of(address, say), _index(folder)
        found = store.files(address) if found is None else found
        marked = [step for step in _steps(found) if {COMMIT, MANIFEST} <= _steps(found)[step].keys()]
        if _is_ahead(folder, address, store, index, marked, found):
            newest = steps_in(folder / "checkpoints")[-1]
            say(
                f"checkpoint {newest} of {address} is on this machine only; it is used, and copied by the next training"
            )
            return
        wanted = {name for name in found if _is_fetched(name) and not STEP.fullmatch(name)}
        wanted |= {f"checkpoints/{step}/{MANIFEST}" for step in marked}
        known = index.get("files", {})
        new = [name for name in sorted(wanted) if known.get(name, [""])[0] != version(found[name])]
        new += [name for name in sorted(wanted) if name not in new and _size(folder / name) != found[name]["size"]]
        for name in list(new):
            if match := STEP.fullmatch(name):
                if (folder / name).is_file() and (folder / name).read_bytes() == store.read(f"{address}/{name}"):
                    new.remove(name)  # saved by this machine, with all its files
                else:
                    shutil.rmtree(folder / "checkpoints" / match[1], ignore_errors=True)
        store.get([(f"{address}/{name}", folder / name) for name in new])
        for name in new:
            os.utime(folder / name, (modified(found[name]),) * 2)
        _drop_others(folder, wanted, marked)
        parts = sorted(name for name in found if name.startswith("metrics/"))
        versions = [version(found[name]) for name in parts]
        if found:
            folder.mkdir(parents=True, exist_ok=True)
        if versions != index.get("parts") or bool(parts) != (folder / METRICS).exists():
            content = [store.read(f"{address}/{name}") for name in parts]
            if parts:
                write_whole(folder / METRICS, b"".join(content).decode("utf-8", "replace"))
                os.utime(folder / METRICS, (modified(found[parts[-1]]),) * 2)
            index["crcs"] = [zlib.crc32(part) for part in content]
        index["parts"], index["beat"] = versions, modified(found[LOCK]) if LOCK in found else 0.0
        index["files"] = {name: [version(found[name]), *_stat(folder / name)] for name in sorted(wanted)}
        if folder.is_dir():
            write_whole(folder / INDEX, json.dumps(index))


def bring(
    checkpoint: Path, files: Iterable[str], sizes: Mapping[str, list], say: Callable[[str], None], again=False
) -> bool:
    """Fetch files of a checkpoint that are not here; True if there were some.

    Args:
      checkpoint: its folder.
      files: names in it.
      sizes: bytes first, by name.
      say: takes one line about it.
      again: fetch all of them, also those that are here.
    """
    if (address := address_of(checkpoint)) is None:
        return False
    with alone(checkpoint.parent.parent):
        missing = [name for name in files if again or _size(checkpoint / name) != sizes[name][0]]
        if missing:
            total = sum(sizes[name][0] for name in missing)
            say(f"reading checkpoint {checkpoint.name} from {address}: {total / 1e6:,.1f} MB")
            with contextlib.suppress(FileNotFoundError):  # the check that follows says which
                Store.of(address, say).get([(f"{address}/{name}", checkpoint / name) for name in missing])
    return bool(missing)


def is_locked(folder: Path) -> bool:
    """True if a process of this machine trains in `folder`; nothing is written to find out."""
    try:
        with (folder / LOCK).open("rb") as file:
            return not take_lock(file, lambda line: None)
    except OSError:
        return False


def is_running_elsewhere(folder: Path) -> bool:
    """True if the run in a mirror had given a sign of life shortly before it was fetched."""
    return address_of(folder) is not None and time.time() - _index(folder).get("beat", 0.0) < ALIVE


def _is_ahead(folder: Path, address: str, store: Store, index: dict, marked: list[int], found: Mapping) -> bool:
    """True if this machine has a newer checkpoint of the run than its store, and wrote what is there."""
    here = steps_in(folder / "checkpoints")
    if (
        not here
        or not (folder / "checkpoints" / str(here[-1]) / MANIFEST).is_file()
        or here[-1] <= max(marked, default=-1)
    ):
        return False
    if marked:
        name = f"checkpoints/{max(marked)}/{MANIFEST}"
        return (folder / name).is_file() and (folder / name).read_bytes() == store.read(f"{address}/{name}")
    return LOCK in found and json.loads(store.read(f"{address}/{LOCK}")).get("token") == index.get("token")


def _drop_others(folder: Path, wanted: set[str], marked: list[int]) -> None:
    """Remove what another run or an upload that was killed has left in a mirror."""
    for name in _files_of(folder):
        if name not in wanted and name != METRICS and not name.startswith(STAYS_THERE):
            (folder / name).unlink()
    checkpoints = folder / "checkpoints"
    for entry in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if entry.is_dir() and entry.name not in map(str, marked):
            shutil.rmtree(entry)


def _is_fetched(name: str) -> bool:
    return not name.startswith((".", *STAYS_THERE)) and not name.endswith("/")


def _steps(found: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The files of each checkpoint among those of a run."""
    steps: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, about in found.items():
        if match := STEP.fullmatch(name):
            steps[int(match[1])][match[2]] = about
    return dict(sorted(steps.items()))


def _files_of(folder: Path) -> Iterator[str]:
    """Names of the files of a run, without those in folders of checkpoints and temporary ones."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        of_checkpoint = name.startswith("checkpoints/") and name.count("/") > 1
        if not of_checkpoint and not name.startswith(".") and not name.endswith((".tmp", ".part")) and file.is_file():
            yield name


def _index(folder: Path) -> dict[str, Any]:
    """Return what was fetched last: the version of each file there, and its size and time here."""
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _stat(file: Path) -> list[int]:
    about = file.stat()
    return [about.st_size, about.st_mtime_ns]


# --- To the store -----------------------------------------------------------------------------------------------------


class Mirror:
    """Copies the folder of a run to its address while it trains; a context.

    Args:
      folder: local, as `fetch` has left it, and locked by this process.
      address: of the run in the store.
      say: takes one line about each upload and each failure; from several threads.

    Raises:
      UsageError: another process trains there, or nothing can be written.
    """

    def __init__(self, folder: Path, address: str, say: Callable[[str], None]):
        self.folder, self.address, self.say = folder, address, say
        self.store, self.uploading = Store.of(address, say), None
        self._due: set[int] = set()
        self._ended, self._copying = threading.Event(), threading.Lock()
        index = _index(folder)
        self._sent = {name: (size, time) for name, (_, size, time) in index.get("files", {}).items()}
        self._parts: list[int] = index.get("crcs", [])
        self._beats, self._token = 0, secrets.token_hex(8)
        self._claim()
        self.store.ended = self._ended  # from here on training does not end because the store fails
        write_whole(folder / INDEX, json.dumps(index | {"token": self._token}))
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._pending: list[Future] = []
        self._files = threading.Thread(target=self._copy_now_and_then, name="copies", daemon=True)

    def __enter__(self) -> Mirror:
        there = {step for step, files in _steps(self.store.files(self.address)).items() if COMMIT in files}
        here = steps_in(self.folder / "checkpoints")
        if max(there, default=-1) > max(here, default=-1):
            raise UsageError(f"{self.address} has got checkpoint {max(there)} meanwhile; type the same command again")
        for step in here:
            if step not in there:  # of a start that ended before it was copied
                self.saved(step)
        self._files.start()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.finish()
        except (RunError, UsageError, OSError) as error:
            if kind is None:
                raise
            self.say(str(error))
        finally:
            self._ended.set()
            self._uploads.shutdown(wait=False, cancel_futures=True)

    def saved(self, step: int) -> None:
        """Copy checkpoint `step`, which is complete here, as soon as the one before it is."""
        self._due.add(step)
        self._pending = [pending for pending in self._pending if not pending.done()]
        self._pending.append(self._uploads.submit(self._upload_next))

    def finish(self) -> None:
        """Return when everything is copied.

        Raises:
          RunError: the store has failed for too long.
        """
        if self._ended.is_set():
            return
        self._ended.set()  # from here on the patience with the store is limited
        if any(not pending.done() for pending in self._pending):
            self.say(f"waiting until the run is copied to {self.address}")
        try:
            for pending in self._pending:
                pending.result()
            self._files.join()
            self._copy_files(everything=True)
            self._rotate()
            self.store.remove([f"{self.address}/{LOCK}"])
        except (RunError, UsageError) as error:
            raise RunError(
                f"{self.address} does not have all of this run: {error}; {self.folder} has, and the same command on "
                "this machine continues from there"
            ) from error

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def _upload_next(self) -> None:
        """In the uploading thread: copy the newest checkpoint that is due."""
        if not self._due:
            return
        step = max(self._due)
        self._due.discard(step)
        self.uploading = step
        try:
            self._upload(step, self.folder / "checkpoints" / str(step))
            self._rotate()
        except FileNotFoundError:
            self.say(f"checkpoint {step} was not copied to {self.address}: it was replaced here before its turn")
        finally:
            self.uploading = None

    def _upload(self, step: int, folder: Path) -> None:
        begun, there = time.monotonic(), f"{self.address}/checkpoints/{step}"
        before = self.store.files(there)
        if COMMIT in before and self.store.read(f"{there}/{MANIFEST}") == (folder / MANIFEST).read_bytes():
            return
        self._remove(there, before)  # of an upload that was killed, or a step that is trained again
        names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        sizes = {name: (folder / name).stat().st_size for name in names}
        data = [name for name in names if name not in (MANIFEST, COMMIT)]
        data.sort(key=lambda name: name != MADE_BY_ORBAX)  # tells it from a folder of the user's
        for part in (data[:1], data[1:]):
            self.store.put([(folder / name, f"{there}/{name}") for name in part])
        listed = {name: about["size"] for name, about in self.store.files(there).items()}
        if wrong := [name for name in data if listed.get(name) != sizes[name]]:
            raise RunError(f"{there}/{wrong[0]} has {listed.get(wrong[0], 0)} bytes of {sizes[wrong[0]]}")
        self._copy_files(everything=True)
        self.store.put([(folder / MANIFEST, f"{there}/{MANIFEST}")])
        self.store.write(f"{there}/{COMMIT}", (folder / COMMIT).read_bytes())
        size, seconds = sum(sizes.values()) / 1e6, time.monotonic() - begun
        self.say(f"checkpoint {step} copied to {self.address}: {size:,.1f} MB in {seconds:.1f} s")

    def _rotate(self) -> None:
        """Remove or rename the checkpoints in the store that were removed or renamed here."""
        checkpoints = self.folder / "checkpoints"
        here = steps_in(checkpoints)
        for step, files in _steps(self.store.files(self.address)).items():
            there = f"{self.address}/checkpoints/{step}"
            if step in here or MADE_BY_ORBAX not in files:
                continue
            renamed = [entry.name for entry in checkpoints.glob(f"{step}.*") if "writing" not in entry.name]
            if renamed and COMMIT in files:
                self.store.remove([f"{there}/{COMMIT}"])
                for name in files.keys() - {COMMIT}:
                    self.store.move(f"{there}/{name}", f"{self.address}/checkpoints/{renamed[-1]}/{name}")
            else:
                self._remove(there, files)

    def _remove(self, there: str, files: Iterable[str]) -> None:
        """Remove a checkpoint, its mark first."""
        first = [name for name in (COMMIT, MANIFEST) if name in files]
        self.store.remove([f"{there}/{name}" for name in [*first, *(name for name in files if name not in first)]])

    # --- Other files --------------------------------------------------------------------------------------------------

    def _copy_now_and_then(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self._beat()
                self._copy_files()
            except Exception as error:  # recorded and displayed things do not end a run
                self.say(f"{self.address} is behind: {error}")

    def _copy_files(self, everything: bool = False) -> None:
        """Copy the files that have changed, and remove those that are gone; large ones if `everything` is due."""
        with self._copying:
            now = {name: tuple(_stat(self.folder / name)) for name in _files_of(self.folder)}
            changed = [name for name in now if name != METRICS and now[name] != self._sent.get(name)]
            changed = [name for name in changed if everything or now[name][0] <= LARGE]
            self.store.put([(self.folder / name, f"{self.address}/{name}") for name in changed])
            self._sent |= {name: now[name] for name in changed}
            gone = [name for name in self._sent if name not in now and not STEP.fullmatch(name)]
            self.store.remove([f"{self.address}/{name}" for name in gone])
            for name in gone:
                del self._sent[name]
            if METRICS in now and now[METRICS] != self._sent.get(METRICS):
                self._copy_metrics()
                self._sent[METRICS] = now[METRICS]

    def _copy_metrics(self) -> None:
        content = (self.folder / METRICS).read_bytes()
        parts = [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
        name = partial("{}/metrics/{:08d}.jsonl".format, self.address)
        # A shorter file first loses its end, so that what is there is always a beginning of what was written.
        self.store.remove([name(number) for number in reversed(range(len(parts), len(self._parts)))])
        del self._parts[len(parts) :]
        for number, part in enumerate(parts):
            if self._parts[number : number + 1] != [zlib.crc32(part)]:
                self.store.write(name(number), part)
                self._parts[number : number + 1] = [zlib.crc32(part)]

    # --- One process trains in a run ----------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Write who trains here, once nobody else does.

        Raises:
          UsageError: another process does.
        """
        first: dict[str, Any] | None = None
        while (holder := self._holder()) is not None:
            first = first or holder
            who = f"process {holder.get('process')} on {holder.get('host')}"
            if holder.get("beat") != first.get("beat") or holder.get("token") != first.get("token"):
                raise UsageError(f"{self.address} is in use by {who}; wait for it, or choose another --name")
            self.say(
                f"{self.address} was in use by {who} {holder['age']:.0f} s ago: waiting for {ALIVE:.0f} s without it"
            )
            time.sleep(5)
        self._beat()

    def _holder(self) -> dict[str, Any] | None:
        """Return who trains there, with the 'age' of the last sign of life; None: nobody, or a process that is gone."""
        about = self.store.files(self.address).get(LOCK)
        if about is None or (age := time.time() - modified(about)) > ALIVE:
            return None
        try:
            holder = json.loads(self.store.read(f"{self.address}/{LOCK}"))
        except (FileNotFoundError, ValueError):
            return None
        process = holder["process"]  # the lock of the folder shows that it is not this one
        gone = process == os.getpid() or not Path(f"/proc/{process}").exists()
        gone = gone and holder["host"] == socket.gethostname()
        return None if gone else holder | {"age": age}

    def _beat(self) -> None:
        self._beats += 1
        about = {"host": socket.gethostname(), "process": os.getpid(), "beat": self._beats, "token": self._token}
        self.store.write(f"{self.address}/{LOCK}", json.dumps(about).encode())
