"""Samples in Megatron's order, token for token, and the labels and masks that are made of them."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from mjax.config.datasets import split_sequences
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.data.samples import GPTDataset, MockDataset, add_labels, build_sample_index
from mjax.errors import UsageError


def dataset_of(folder, lengths):
    """Documents of these lengths; token n of the file is n."""
    with IndexedDatasetWriter(folder / "d", 100_000) as writer:
        for first, last in pairwise(np.cumsum([0, *lengths])):
            writer.add_document(np.arange(first, last))
    return IndexedDataset(folder / "d")


# --- Splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "sequences", "bounds"),
    [
        ("949,50,1", 1000, (949, 999)),
        ("0.5,0.5", 5, (2, 5)),  # 2.5 rounds to even
        ("0,1,0", 3, (0, 3)),
    ],
)
def test_split_cuts_sequences_in_order(split, sequences, bounds):
    validation, test = bounds
    expected = range(validation), range(validation, test), range(test, sequences)
    assert split_sequences(split, sequences) == expected


# --- The three indices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "golden"),
    [(3, "a60202b271e47e21"), (4, "40b0621229fdd0a4"), (10, "9c49a376d4886dac"), (60, "d13add8277a37e69")],
)
def test_indices_are_megatrons_for_any_samples(tmp_path, sequence, golden):
    """Documents of 100 tokens, three of them empty, and every number of samples up to four epochs.

    The expected indices come from Megatron's walk over the documents (helpers.cpp), step by step.
    """
    lengths = [0, 7, 13, 1, 20, 0, 9, 25, 5, 20, 0]
    indexed, found = dataset_of(tmp_path, lengths), []
    for samples in range(1, 400 // sequence):
        data = GPTDataset(indexed, range(len(lengths)), samples, sequence, seed=samples)
        found.append([index.tolist() for index in (data.document_index, data.sample_index, data.shuffle_index)])
        assert [data.sample_index.dtype, data.shuffle_index.dtype] == [np.int32, np.uint32]
    assert hashlib.sha256(str(found).encode()).hexdigest()[:16] == golden


def test_sample_index_does_not_overflow_32_bits():
    index = build_sample_index(np.full(3, 2**30, np.int32), np.arange(3), 2**20, 3 * 2**10 - 1)
    assert index[-1].tolist() == [2, 2**30 - 2**20]


# --- GPTDataset -------------------------------------------------------------------------------------------------------


def test_part_without_sample_names_a_remedy(tmp_path):
    data = dataset_of(tmp_path, [10, 11])
    assert len(GPTDataset(data, range(2), 1, 20, 0)) == 1
    with pytest.raises(UsageError, match=r"21 tokens in 2 documents and one sample needs 22; use --model\.sequence"):
        GPTDataset(data, range(2), 1, 21, 0)


def test_id_outside_vocabulary_is_rejected(tmp_path):
    data = GPTDataset(dataset_of(tmp_path, [61]), range(1), 1, 60, 0, vocabulary=60)
    with pytest.raises(UsageError, match="holds the id 60 and the model's vocabulary is 60"):
        data[0]


@pytest.mark.parametrize("token", [2**32 + 5, -1])
def test_id_beyond_32_bits_is_rejected_not_wrapped(tmp_path, token):
    with IndexedDatasetWriter(tmp_path / "d", 2**16) as writer:
        writer.add_document([0] * 8)
    index = bytearray(index_file(tmp_path / "d").read_bytes())
    index[17], index[34:38] = 5, (2).to_bytes(4, "little")  # two int64
    index_file(tmp_path / "d").write_bytes(index)
    token_file(tmp_path / "d").write_bytes(np.array([1, token]).tobytes())
    data = GPTDataset(IndexedDataset(tmp_path / "d"), range(1), 1, 1, 0)
    with pytest.raises(UsageError, match=f"holds the id {token} "):
        data[0]


# --- MockDataset and labels -------------------------------------------------------------------------------------------


def test_mock_samples_count_by_seed_and_index():
    data, again = MockDataset(11, 30, 5), MockDataset(11, 30, 5)
    samples = [data[i] for i in range(20)]
    assert all((again[i] == samples[i]).all() for i in reversed(range(20)))
    assert (MockDataset(11, 30, 6)[0] != samples[0]).any()
    assert len({sample.tobytes() for sample in samples}) > 15
    for sample in samples:
        assert 0 <= sample.min() <= sample.max() < 11
        assert len(set(np.diff(sample) % 11)) == 1


EOD = 0
EVERYTHING = {"tokens": "int32", "labels": "int32", "loss_mask": "bool", "positions": "int32", "documents": "int32"}


def test_labels_restart_after_each_document():
    tokens = np.array([5, 6, EOD, 7, EOD, EOD, 8, 9, 4])
    sample = add_labels(tokens, EVERYTHING, EOD, mask_eod=True)
    assert {name: array.dtype.name for name, array in sample.items()} == EVERYTHING
    assert sample["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert sample["documents"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert sample["loss_mask"].tolist() == [True, True, False, True, False, False, True, True]
    assert list(add_labels(tokens)) == ["tokens", "labels"]
