"""Indices on disk: found again, never the wrong ones, and a run continues whatever happens to them.

test_killed.py kills a process while it stores them.
"""

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mjax.data import cache
from mjax.data.cache import IndexCache
from mjax.data.conversations import ConversationDataset
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.samples import BlendedDataset, GPTDataset

SOURCE = {"kind": "test", "samples": 7}
ARRAYS = {"one": np.arange(1000, dtype=np.int32), "two": np.arange(6.0).reshape(3, 2)}


@pytest.fixture(autouse=True)
def everything_is_kept(monkeypatch):
    monkeypatch.setattr(cache, "MIN_CACHED_BYTES", 0)


class CountingCache:
    """A cache, its messages, and the number of builds."""

    def __init__(self, *folders):
        self.messages, self.built = [], 0
        self.cache = IndexCache(folders, self.messages.append)

    def arrays(self, source=SOURCE, wait=lambda: None):
        def build():
            self.built += 1
            wait()
            return ARRAYS

        found = self.cache.load_or_build(source, tuple(ARRAYS), build)
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype
            assert (found[name] == array).all()
        return found


def test_built_arrays_are_mapped_read_only(tmp_path):
    first, second = CountingCache(tmp_path / "c"), CountingCache(tmp_path / "c")
    first.arrays()
    found = second.arrays()
    assert (first.built, second.built, first.messages + second.messages) == (1, 0, [])
    with pytest.raises(ValueError, match="read-only"):
        found["one"][0] = 5
    second.arrays({**SOURCE, "samples": 8})
    assert second.built == 1


@pytest.mark.parametrize("which", ["*-one.npy", "*.json"])
def test_damaged_file_is_announced_and_rebuilt(tmp_path, which):
    CountingCache(tmp_path).arrays()
    (file,) = tmp_path.glob(which)
    content = file.read_bytes()
    place = len(content) // 2
    file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    again, after = CountingCache(tmp_path), CountingCache(tmp_path)
    again.arrays()
    after.arrays()
    assert (again.built, after.built, after.messages) == (1, 0, [])
    assert "building the indices again" in again.messages[0]


def test_pickles_are_never_opened(tmp_path):
    CountingCache(tmp_path).arrays()
    (file,), (manifest,) = tmp_path.glob("*-one.npy"), tmp_path.glob("*.json")
    np.save(file, np.array([print], dtype=object), allow_pickle=True)
    values = json.loads(manifest.read_text())
    values["files"]["one"] = cache._checksum(file)  # even if a user takes the trouble
    manifest.write_text(json.dumps(values))
    again = CountingCache(tmp_path)
    again.arrays()
    assert again.built == 1


def test_next_folder_is_used_when_unwritable(tmp_path):
    (tmp_path / "file").write_text("in the way")
    counting = CountingCache(tmp_path / "file" / "c", tmp_path / "home")
    counting.arrays()
    assert counting.messages == [
        f"{tmp_path}/file/c cannot be used (Not a directory): the indices are stored in {tmp_path}/home"
    ]
    assert list((tmp_path / "home").glob("*.json"))


def test_failing_disk_does_not_stop_a_run(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.np, "save", fail)
    counting = CountingCache(tmp_path)
    counting.arrays()
    (sentence,) = counting.messages
    assert f"{tmp_path} cannot be used (No space left on device): each start builds the indices in memory" in sentence
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_abandoned_temporary_files(tmp_path):
    """The folder may be the user's: an old file of theirs stays, as does a file that a process still writes."""
    key = "0" * 32
    abandoned, written, *foreign = (
        tmp_path / name
        for name in (
            f"{key}.json.{'a' * 8}.tmp",
            f"{key}-one.npy.{'b' * 8}.tmp",
            "thesis.tmp",
            f"{key}.tmp",
        )
    )
    for file in (abandoned, written, *foreign):
        file.write_text("precious")
        if file != written:
            os.utime(file, (0, 0))
    CountingCache(tmp_path).arrays()
    assert {file for file in tmp_path.iterdir() if file.suffix == ".tmp"} == {written, *foreign}


def test_simultaneous_builds_all_get_their_arrays(tmp_path):
    barrier = threading.Barrier(3, timeout=60)
    caches = [CountingCache(tmp_path) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda cache: cache.arrays(wait=barrier.wait), caches))
    assert [(cache.built, cache.messages) for cache in caches] == [(1, [])] * 3
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".json", ".npy", ".npy"]


# --- Of datasets ------------------------------------------------------------------------------------------------------


def write(prefix, lengths):
    with IndexedDatasetWriter(prefix, 100) as writer:
        for length in lengths:
            writer.add_documents(np.arange(length) % 100, np.array([length]), np.array([1]), np.ones(length, bool))
    return IndexedDataset(prefix)


def leaves_entries(build, names, folder, changes):
    """Number of entries left by datasets with these changes, whose arrays `names` are right, built or read."""
    for _ in range(2):
        for change in changes:
            fresh, stored = build(**change), build(**change, cache=IndexCache([folder], pytest.fail))
            for name in names:
                np.testing.assert_array_equal(getattr(stored, name), getattr(fresh, name), str(change))
    return len(list(folder.glob("*.json")))


def test_each_input_of_indices_has_an_entry(tmp_path):
    """Megatron's key leaves out the documents."""
    indexed, other = write(tmp_path / "d", [3, 9, 4, 0, 12, 7]), write(tmp_path / "o", [9, 3, 4, 0, 12, 7])
    plain = {"indexed": indexed, "documents": range(6), "samples": 9, "sequence": 5, "seed": 1}
    changes = [{}, {"indexed": other}, {"documents": range(1, 6)}, {"documents": range(1, 5)}, {"samples": 20}]
    changes += [{"samples": None}, {"sequence": 6}, {"seed": 2}]
    names = ("document_index", "sample_index", "shuffle_index")
    assert leaves_entries(lambda **change: GPTDataset(**plain | change), names, tmp_path / "c", changes) == len(changes)


def test_each_input_of_packing_has_an_entry(tmp_path):
    """The order of an epoch is drawn at every start: its seed and the samples need no entry."""
    indexed, other = write(tmp_path / "d", [3, 9, 4, 2, 12, 7]), write(tmp_path / "o", [9, 3, 4, 2, 12, 7])
    plain = {"indexed": indexed, "documents": range(6), "samples": 9, "sequence": 16, "seed": 1}
    changes = [{}, {"indexed": other}, {"documents": range(1, 6)}, {"documents": range(5)}, {"sequence": 20}]
    changes += [{"pack": False}, {"pack": False, "documents": range(5)}]
    drawn = [{"seed": 2}, {"samples": 20}]
    names, build = ("_order", "_members", "_begins"), lambda **change: ConversationDataset(**plain | change)
    assert leaves_entries(build, names, tmp_path / "c", [*changes, *drawn]) == len(changes)


def test_each_input_of_a_blend_has_an_entry(tmp_path):
    plain = {"datasets": [range(4), range(8)], "shares": None, "samples": 6}
    changes = [{}, {"samples": 7}, {"samples": None}]
    changes += [{"datasets": [range(size), range(4)]} for size in (2, 8)]
    changes += [{"shares": shares} for shares in ([1 / 3, 2 / 3], [0.5, 0.5])]
    names = ("dataset_index", "dataset_sample_index")
    assert leaves_entries(lambda **change: BlendedDataset(**plain | change), names, tmp_path / "c", changes) == 7
