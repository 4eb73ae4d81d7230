import contextlib
import math
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.batch_size import BatchSizes
from mjax.data.batches import Batches, label_entropy, of_positions, prefetch
from mjax.data.samples import MockDataset

BATCHES = Batches(MockDataset(vocabulary=1000, sequence=8, seed=0), BatchSizes.constant(6))


def test_labels_are_the_tokens_that_follow():
    batch = BATCHES.at(0)
    assert batch["tokens"].shape == batch["labels"].shape == (6, 8)
    assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
    assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all()


def test_steps_take_consecutive_samples():
    tokens = np.concatenate([BATCHES.at(step)["tokens"] for step in range(3)])
    assert (tokens == np.stack([BATCHES.dataset[i][:-1] for i in range(18)])).all()


@given(step=st.integers(0, 50), begin=st.integers(0, 5), count=st.integers(1, 6))
def test_a_row_is_the_same_whoever_asks_for_which_rows(step, begin, count):
    rows = slice(begin, begin + count)
    whole, part = BATCHES.at(step), BATCHES.at(step, rows)
    for name in ("tokens", "labels"):
        assert (part[name] == whole[name][rows]).all()


@given(begin=st.integers(0, 7), count=st.integers(1, 8))
def test_so_is_a_position(begin, count):
    positions = slice(begin, min(begin + count, 8))
    for apart in (False, True):
        batches = Batches(BATCHES.dataset, BATCHES.sizes, apart=apart)
        whole, part = BATCHES.at(3), batches.at(3, slice(1, 4), positions)
        for name in ("tokens", "labels"):
            assert (part[name] == whole[name][1:4, positions]).all()


def test_of_arrays_without_positions_all_is_kept():
    batch = {"tokens": np.zeros((2, 8)), "label": np.ones(2), "choices": np.zeros((2, 3, 8)), "other": np.ones((2, 3))}
    found = of_positions(batch, slice(2, 5))
    assert {name: array.shape for name, array in found.items()} == {
        "tokens": (2, 3), "label": (2,), "choices": (2, 3, 3), "other": (2, 3)}  # fmt: skip


def test_a_batch_is_the_same_whatever_was_asked_before():
    alone = Batches(MockDataset(1000, 8, 0), BatchSizes.constant(6)).at(7)
    for step in (9, 2, 7):
        again = BATCHES.at(step)
    assert (again["tokens"] == alone["tokens"]).all()


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="no rows of a batch of 6"):
        BATCHES.at(0, slice(6, 9))


# --- prefetch ---------------------------------------------------------------------------------------------------------


def test_prefetched_batches_are_the_batches_in_order():
    assert list(prefetch(lambda step: step * step, range(10, 17))) == [step * step for step in range(10, 17)]


def test_the_thread_runs_ahead_but_not_further_than_depth():
    done = []
    results = prefetch(lambda step: done.append(step) or step, range(100), depth=3)
    assert next(results) == 0
    deadline = time.monotonic() + 60
    while len(done) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert done == [0, 1, 2, 3]  # one given out and three waiting
    results.close()


def test_an_exception_is_raised_where_its_batch_is_due():
    def fetch(step):
        if step == 2:
            raise OSError("disk is gone")
        return step

    results = prefetch(fetch, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="disk is gone"):
        next(results)


def test_closing_early_ends_the_thread():
    with contextlib.closing(prefetch(lambda step: step, range(10**9))) as results:
        assert next(results) == 0
        assert any(thread.name.startswith("mjax-prefetch") for thread in threading.enumerate())
    assert not any(thread.name.startswith("mjax-prefetch") for thread in threading.enumerate())


def test_the_entropy_of_labels_is_that_of_those_that_count():
    random = np.random.default_rng(0)
    batches = [
        {"labels": random.integers(0, 5, (4, 8)) ** 2, "loss_mask": random.integers(0, 2, (4, 8)) == 1}
        for _ in range(3)
    ]
    counted = [label for batch in batches for label in batch["labels"][batch["loss_mask"]].tolist()]
    by_hand = -sum(math.log(counted.count(label) / len(counted)) for label in counted) / len(counted)
    assert label_entropy(iter(batches)) == pytest.approx(by_hand)
    assert label_entropy([{"labels": np.full((2, 3), 7), "loss_mask": np.ones((2, 3), bool)}]) == 0.0
