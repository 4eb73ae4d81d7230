"""Mock pairs of text: the arrays of a BERT's batch, drawn from seed and index alone."""

import numpy as np

from mjax.batch_size import BatchSizes
from mjax.data.batches import Batches
from mjax.data.mock_pairs import MASK, MockPairs
from tests.small import small_config

PAIRS = MockPairs(vocabulary=60, sequence=16, seed=3)
SAMPLES = [PAIRS[i] for i in range(400)]


def test_a_batch_has_the_arrays_that_the_config_lists():
    batch = Batches(PAIRS, BatchSizes.constant(8), dict).at(1)
    found = {name: (array.shape[1:], array.dtype.name) for name, array in batch.items()}
    assert found == small_config(kind="bert").batch_arrays()
    assert all(len(array) == 8 for array in batch.values())
    np.testing.assert_array_equal(batch["tokens"][3], SAMPLES[11]["tokens"])


def test_masks_hide_what_counts_and_nothing_else():
    for sample in SAMPLES:
        masked, text = sample["loss_mask"], sample["documents"] == 0
        np.testing.assert_array_equal(sample["tokens"] == MASK, masked)
        np.testing.assert_array_equal(sample["tokens"][~masked], sample["labels"][~masked])
        assert masked.any()
        assert not masked[~text].any()
        assert not masked[0]
        assert sample["labels"].min() >= 0
        assert sample["labels"].max() < 60


def test_the_second_stretch_continues_the_first_but_where_they_are_swapped():
    for sample in SAMPLES:
        text, types = sample["documents"] == 0, sample["token_types"]
        one, two = (sample["labels"][text & (types == i)] for i in (0, 1))
        one, two = one[1:], two  # without the first token
        assert len(one)
        assert len(two)
        assert not types[~text].any()
        if sample["sentence_order"]:
            one, two = two, one
        assert (np.diff(np.concatenate([one, two])) % (60 - MASK - 1) == 1).all()
    swapped = sum(int(sample["sentence_order"]) for sample in SAMPLES)
    assert 150 < swapped < 250


def test_samples_depend_on_seed_and_index_alone_and_differ():
    again = MockPairs(60, 16, 3)[7]
    assert all((again[name] == SAMPLES[7][name]).all() for name in again)
    assert (MockPairs(60, 16, 4)[7]["labels"] != again["labels"]).any()
    assert len({sample["labels"].tobytes() for sample in SAMPLES}) > 300


def test_the_share_of_tokens_asked_for_is_masked():
    for share in (0.15, 0.5):
        pairs = MockPairs(60, 64, 3, masked=share)
        samples = [pairs[i] for i in range(100)]
        tokens = sum((sample["documents"] == 0).sum() for sample in samples)
        assert abs(sum(sample["loss_mask"].sum() for sample in samples) / tokens - share) < 0.04


def test_the_smallest_shape_that_is_allowed_makes_samples():
    for index in range(50):
        assert MockPairs(3, 3, 0)[index]["loss_mask"].any()
