"""Indices on disk: found again, never the wrong ones, and a run goes on whatever happens to them."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from mjax.data import cache
from mjax.data.cache import IndexCache, cache_folders
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.samples import GPTDataset
from tests.conftest import ROOT

SOURCE = {"kind": "test", "samples": 7}
ARRAYS = {"one": np.arange(1000, dtype=np.int32), "two": np.arange(6.0).reshape(3, 2)}


@pytest.fixture(autouse=True)
def everything_is_kept(monkeypatch):
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)


class Kept:
    """A cache, what it said, and how often it built."""

    def __init__(self, *folders):
        self.said, self.built = [], 0
        self.cache = IndexCache(folders, self.said.append)

    def arrays(self, source=SOURCE):
        def build():
            self.built += 1
            return ARRAYS

        found = self.cache.arrays(source, tuple(ARRAYS), build)
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype
            assert (found[name] == array).all()
        return found


def test_what_was_built_once_is_mapped_read_only_from_then_on(tmp_path):
    first, second = Kept(tmp_path / "c"), Kept(tmp_path / "c")
    first.arrays()
    found = second.arrays()
    assert (first.built, second.built, first.said + second.said) == (1, 0, [])
    with pytest.raises(ValueError, match="read-only"):
        found["one"][0] = 5


def test_another_source_is_another_entry(tmp_path):
    kept = Kept(tmp_path)
    for source in (SOURCE, {**SOURCE, "samples": 8}, {"kind": "test"}):
        kept.arrays(source)
        kept.arrays(source)
    assert kept.built == 3


def test_little_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "WORTH_KEEPING", 10**6)
    kept = Kept(tmp_path)
    kept.arrays()
    assert (kept.built, list(tmp_path.iterdir())) == (1, [])


DAMAGE = {
    "a flipped bit": lambda data: _flipped(data, len(data) // 2),
    "a flipped bit in the header": lambda data: _flipped(data, 30),
    "a cut": lambda data: data[: len(data) // 2],
    "nothing left": lambda data: b"",
    "more than there was": lambda data: data + b"\0",
    "another file": lambda data: b"PK\x03\x04 something else",
}


def _flipped(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("which", ["*-one.npy", "*.json"])
def test_a_damaged_file_is_said_and_built_anew(tmp_path, which, change):
    Kept(tmp_path).arrays()
    (file,) = tmp_path.glob(which)
    file.write_bytes(change(file.read_bytes()))
    again, after = Kept(tmp_path), Kept(tmp_path)
    again.arrays()
    after.arrays()
    assert (again.built, after.built, after.said) == (1, 0, [])
    (sentence,) = again.said
    assert "building the indices again" in sentence
    assert str(tmp_path) in sentence


@pytest.mark.parametrize("manifest", ["[]", "{}", '{"source": 1, "files": {}}', "null", "\xff"])
def test_a_manifest_that_is_none_is_built_anew(tmp_path, manifest):
    Kept(tmp_path).arrays()
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(manifest.encode("latin-1"))
    again = Kept(tmp_path)
    again.arrays()
    assert (again.built, len(again.said)) == (1, 1)


def test_pickles_are_never_opened(tmp_path):
    Kept(tmp_path).arrays()
    (file,), (manifest,) = tmp_path.glob("*-one.npy"), tmp_path.glob("*.json")
    np.save(file, np.array([print], dtype=object), allow_pickle=True)
    values = json.loads(manifest.read_text())
    values["files"]["one"] = cache._checksum(file)  # even if somebody takes the trouble
    manifest.write_text(json.dumps(values))
    again = Kept(tmp_path)
    again.arrays()
    assert again.built == 1


def test_where_nothing_can_be_written_the_next_folder_is_used_and_said(tmp_path):
    (tmp_path / "file").write_text("in the way")
    kept = Kept(tmp_path / "file" / "c", tmp_path / "home")
    kept.arrays()
    assert kept.said == [f"{tmp_path}/file/c cannot be used (Not a directory): the indices are kept in {tmp_path}/home"]
    assert list((tmp_path / "home").glob("*.json"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk_does_not_stop_a_run(tmp_path, monkeypatch, code):
    def fail(*arguments, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache.np, "save", fail)
    kept = Kept(tmp_path)
    kept.arrays()
    assert kept.said == [
        f"{tmp_path} cannot be used ({os.strerror(code)}): the indices are built in memory at every start; "
        "name another folder with --data.cache"
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_swept_away_after_a_day(tmp_path):
    old, new = tmp_path / "a.npy.1-x.tmp", tmp_path / "b.npy.2-y.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    Kept(tmp_path).arrays()
    assert not old.exists()
    assert new.exists()


def test_the_folders_are_the_chosen_one_or_beside_the_data_and_at_home(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/me/.cache")
    assert cache_folders("data/a.b") == [Path("data/a.b.cache"), Path("/home/me/.cache/mjax/indices")]
    assert cache_folders("data/a", "elsewhere") == [Path("elsewhere")]


# --- Of datasets ------------------------------------------------------------------------------------------------------


def write(prefix, lengths):
    with IndexedDatasetWriter(prefix, 100) as writer:
        for length in lengths:
            writer.add_document([length % 100] * length)
    return IndexedDataset(prefix)


INDICES = ("document_index", "sample_index", "shuffle_index")
LENGTHS = [3, 9, 4, 0, 12, 7]
PLAIN = {"documents": range(6), "samples": 9, "sequence": 5, "seed": 1}
OTHERS = {
    "documents": {"documents": range(1, 6)},
    "documents far apart": {"documents": [0, 2, 4]},
    "other documents far apart": {"documents": [0, 2, 5]},
    "samples": {"samples": 20},
    "one epoch": {"samples": None},
    "sequence": {"sequence": 6},
    "seed": {"seed": 2},
    "extra token": {"extra_token": False},
    "tail": {"keep_tail": True},
    "no extra token and tail": {"extra_token": False, "keep_tail": True},
}


def test_every_input_that_changes_the_indices_has_an_entry_of_its_own(tmp_path):
    """Megatron's key leaves out the documents, the extra token and the tail."""
    indexed, said = write(tmp_path / "d", LENGTHS), []
    for _ in range(2):
        for change in [{}, *OTHERS.values()]:
            fresh = GPTDataset(indexed, **{**PLAIN, **change})
            kept = GPTDataset(indexed, **{**PLAIN, **change}, cache=IndexCache([tmp_path / "c"], said.append))
            for name in INDICES:
                assert (getattr(fresh, name) == getattr(kept, name)).all()
    assert len(list((tmp_path / "c").glob("*.json"))) == 1 + len(OTHERS)
    assert said == []


def test_indices_follow_the_lengths_of_the_documents_and_not_their_path(tmp_path):
    folder = tmp_path / "c"
    for _ in range(2):
        for prefix, lengths in (("a", LENGTHS), ("b", LENGTHS), ("a", LENGTHS[::-1])):
            indexed = write(tmp_path / prefix, lengths)
            kept = GPTDataset(indexed, **PLAIN, cache=IndexCache([folder], pytest.fail))
            assert (kept.sample_index == GPTDataset(indexed, **PLAIN).sample_index).all()
    assert len(list(folder.glob("*.json"))) == 2


BUILDING = """
import sys, time
from mjax.data import cache
cache.WORTH_KEEPING = 0
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import GPTDataset
indexed = IndexedDataset(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
kept = cache.IndexCache([cache.Path(sys.argv[2])], print)
data = GPTDataset(indexed, range(len(indexed)), 100_000, 16, 3, cache=kept)
print(*map(cache.zlib.crc32, (data.document_index, data.sample_index, data.shuffle_index)))
"""


def test_processes_that_build_the_same_indices_at_once_all_get_them_right(tmp_path):
    indexed = write(tmp_path / "d", np.random.RandomState(0).randint(0, 60, 5000))
    command = [sys.executable, "-c", BUILDING, str(tmp_path / "d"), str(tmp_path / "c")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    expected = GPTDataset(indexed, range(len(indexed)), 100_000, 16, 3)
    right = " ".join(str(zlib.crc32(getattr(expected, name))) for name in INDICES)
    assert [process.communicate(timeout=300)[0] for process in processes] == [f"{right}\n"] * 3
    assert sorted(file.suffix for file in (tmp_path / "c").iterdir()) == [".json", ".npy", ".npy", ".npy"]


KILLED = """
import os, signal, sys
from mjax.data import cache
cache.WORTH_KEEPING = 0
writes, last = 0, int(sys.argv[3])
def killed(step):
    def wrapped(*arguments, **options):
        global writes
        writes += 1
        if writes == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(*arguments, **options)
    return wrapped
cache.np.save, os.fsync, os.replace = map(killed, (cache.np.save, os.fsync, os.replace))
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import GPTDataset
GPTDataset(IndexedDataset(sys.argv[1]), range(6), 9, 5, 1, cache=cache.IndexCache([cache.Path(sys.argv[2])], print))
"""


@pytest.mark.parametrize("step", [1, 2, 4, 9, 13, 14, 15])
def test_a_build_killed_at_any_point_leaves_what_the_next_one_completes(tmp_path, step):
    """15 steps: sync of the folder; save, sync, rename and its sync of 3 arrays; sync and rename of the manifest."""
    indexed = write(tmp_path / "d", LENGTHS)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "d"), str(tmp_path / "c"), str(step)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert list((tmp_path / "c").glob("*.json")) == []
    said = []
    for _ in range(2):
        data = GPTDataset(indexed, **PLAIN, cache=IndexCache([tmp_path / "c"], said.append))
        for name in INDICES:
            assert (getattr(data, name) == getattr(GPTDataset(indexed, **PLAIN), name)).all()
    assert said == []
    assert len(list((tmp_path / "c").glob("*.json"))) == 1
