"""Datasets in an object store, read in ranges."""

import errno
import os
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from mjax.config.datasets import parse_blend
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.errors import RunError, UsageError
from mjax.utils import ranges
from mjax.utils.stores import Store
from tests.object_store import bucket

pytestmark = pytest.mark.ci
pytest.importorskip("s3fs")
PREFIX = "s3://bucket/data/corpus [1] é"


@pytest.fixture
def server(monkeypatch, tmp_path):
    with bucket(monkeypatch, tmp_path / "cache") as server:
        yield server


def stored(folder, seed, tokens, prefix=PREFIX):
    """A dataset of two sequences of these many tokens, here and in the bucket."""
    drawn, lengths = (
        np.random.default_rng(seed).integers(0, 60_000, tokens),
        np.array([tokens // 3, tokens - tokens // 3]),
    )
    with IndexedDatasetWriter(folder / "corpus", vocabulary=60_000) as writer:
        writer.add_documents(drawn, lengths, np.array([1, 1]))
    Store("s3").put([(folder / f"corpus{ending}", f"{prefix}{ending}") for ending in (".bin", ".idx")])
    return IndexedDataset(folder / "corpus")


def opened(prefix=PREFIX):
    """The dataset of the bucket, as a new process opens it."""
    ranges.local_prefix.cache_clear()
    (local,) = parse_blend([prefix]).prefixes
    return IndexedDataset(local)


def test_dataset_in_a_store_is_read_in_ranges_of_8_mib(server, tmp_path):
    """44 MB: each range is requested once, also by a second process, and no request is for less."""
    here = stored(tmp_path, 1, 22_000_000)
    there = opened()
    for index, begin in ((0, 5_000_000), (1, 11_000_000), (0, 4_000_000), (0, 5_000_000)):
        spans = np.array([index]), begin, begin + 2000
        np.testing.assert_array_equal(there.read_span(*spans), here.read_span(*spans))
    assert there.digest == here.digest
    np.testing.assert_array_equal(opened().get(1), here.get(1))
    asked = [re.fullmatch(r"bytes=(\d+)-(\d+)", span) for _, path, span in server.requests if span and ".bin" in path]
    spans = sorted((int(span[1]), int(span[2]) + 1) for span in asked)
    size = Path(tmp_path / "corpus.bin").stat().st_size
    assert [begin for begin, _ in spans[1:]] + [size] == [end for _, end in spans]  # all of it, once
    assert all(end - begin >= 8 << 20 for begin, end in spans[:-1])


def test_replaced_dataset_is_read_again(server, tmp_path):
    stored(tmp_path, 1, 50_000)
    before = opened().get(0)
    here = stored(tmp_path, 2, 50_000)
    np.testing.assert_array_equal(opened().get(0), here.get(0))
    assert (before != here.get(0)).any()


def test_dataset_replaced_during_a_run_ends_it(server, tmp_path):
    """Ranges of two versions of the same size are not mixed."""
    stored(tmp_path, 1, 22_000_000)
    there = opened()
    there.get(0)
    stored(tmp_path, 2, 22_000_000)
    with pytest.raises(UsageError, match=r"corpus \[1\] é.bin was replaced while it was read; start again"):
        there.get(1)


@pytest.mark.parametrize("address", ["s3://bucket/data/none", "s3://none/data/corpus"])
def test_missing_dataset_or_bucket_is_one_sentence(server, address):
    with pytest.raises(UsageError, match=r"does not exist|no bucket none"):
        parse_blend([address])


def test_full_disk_is_one_sentence(server, tmp_path, monkeypatch):
    stored(tmp_path, 1, 50_000)
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    words = r"the copy of s3://.* cannot be written \(No space left .*\); remove what no run reads from /.*/fetched, or"
    with pytest.raises(RunError, match=words):
        opened().get(0)
