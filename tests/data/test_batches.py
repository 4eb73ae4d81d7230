"""Global batches by step, in parts, and fetched ahead."""

import math
import time

import numpy as np
import pytest

from mjax.config.batch_size import BatchSizes
from mjax.data.batches import Batches, label_entropy, prefetch
from mjax.data.samples import MockDataset

BATCHES = Batches(MockDataset(vocabulary=1000, sequence=8, seed=0), BatchSizes.constant(6))


def test_steps_take_consecutive_samples():
    for step in (2, 0, 1):  # in any order
        batch = BATCHES.batch_at(step)
        samples = np.stack([BATCHES.dataset[i] for i in range(6 * step, 6 * step + 6)])
        assert (batch["tokens"] == samples[:, :-1]).all()
        assert (batch["labels"] == samples[:, 1:]).all()
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32


def test_parts_of_a_batch_are_those_asked_for():
    whole = BATCHES.batch_at(3)
    for rows in (slice(0, 1), slice(1, 4), slice(3, 9)):
        part = BATCHES.batch_at(3, rows)
        assert all((part[name] == whole[name][rows]).all() for name in ("tokens", "labels"))
    with pytest.raises(ValueError, match="no rows in a batch with 6"):
        BATCHES.batch_at(0, slice(6, 9))


def test_prefetch_runs_ahead_up_to_depth():
    done = []
    results = prefetch(lambda step: done.append(step) or step * step, range(100), depth=3)
    assert next(results) == 0
    deadline = time.monotonic() + 60
    while len(done) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert done == [0, 1, 2, 3]  # one given out and three waiting
    results.close()
    assert list(prefetch(lambda step: step * step, range(10, 17))) == [step * step for step in range(10, 17)]


def test_prefetch_raises_where_a_batch_is_due():
    def fetch(step):
        if step == 2:
            raise OSError("disk is gone")
        return step

    results = prefetch(fetch, range(5))
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="disk is gone"):
        next(results)


def test_entropy_is_of_unmasked_labels():
    random = np.random.default_rng(0)
    batches = [{"labels": random.integers(0, 5, (4, 8)), "loss_mask": random.random((4, 8)) < 0.5} for _ in range(3)]
    counted = [label for batch in batches for label in batch["labels"][batch["loss_mask"]].tolist()]
    by_hand = -sum(math.log(counted.count(label) / len(counted)) for label in counted) / len(counted)
    assert label_entropy(iter(batches)) == pytest.approx(by_hand)
