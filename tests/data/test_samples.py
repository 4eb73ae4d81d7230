import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.data.samples import (
    PAD,
    GPTDataset,
    MockDataset,
    build_sample_index,
    build_shuffle_index,
    labelled,
    split_sequences,
)
from mjax.errors import UsageError


def dataset_of(folder, lengths):
    """Documents of these lengths; token n of the file is n."""
    tokens = iter(range(sum(lengths)))
    with IndexedDatasetWriter(folder / "d", 100_000) as writer:
        for length in lengths:
            writer.add_document([next(tokens) for _ in range(length)])
    return IndexedDataset(folder / "d")


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    lengths = np.random.RandomState(0).randint(0, 40, 50).tolist()
    return dataset_of(tmp_path_factory.mktemp("data"), lengths)


# --- Splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "sequences", "expected"),
    [
        ("949,50,1", 1000, (range(949), range(949, 999), range(999, 1000))),
        ("969, 30, 1", 10, (range(10), range(10, 10), range(10, 10))),
        ("0.5,0.5", 5, (range(2), range(2, 5), range(5, 5))),  # 2.5 rounds to even
        ("1", 7, (range(7), range(7, 7), range(7, 7))),
        ("0,1,0", 3, (range(0), range(3), range(3, 3))),
    ],
)
def test_a_split_cuts_the_sequences_in_order(split, sequences, expected):
    assert split_sequences(split, sequences) == expected


@given(
    parts=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    sequences=st.integers(0, 10_000),
)
def test_every_sequence_is_in_exactly_one_part(parts, sequences):
    ranges = split_sequences(",".join(map(str, parts)), sequences)
    assert [i for part in ranges for i in part] == list(range(sequences))


@pytest.mark.parametrize(
    "split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf,1", "949/50/1", "1e3", "1_0,5", "١,2", "1,,2"]
)
def test_a_split_that_is_none_is_answered_with_one(split):
    with pytest.raises(UsageError, match="949,50,1"):
        split_sequences(split, 10)


# --- The sample index -------------------------------------------------------------------------------------------------


def walked_sample_index(lengths, document_index, sequence, samples):
    """Megatron's walk over the documents (helpers.cpp, build_sample_idx), step by step."""
    rows = [(0, 0)]
    position = offset = 0
    while len(rows) <= samples:
        remaining = sequence + 1
        while remaining != 0:
            length = lengths[document_index[position]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                remaining = 0
            else:
                position += 1
                offset = 0
        rows.append((position, offset))
    return rows


@given(data=st.data())
def test_the_vectorised_sample_index_is_megatrons_walk(data):
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda all_: sum(all_) > 1))
    epochs = data.draw(st.integers(1, 3))
    document_index = np.array(data.draw(st.permutations(list(range(len(lengths))) * epochs)), np.int32)
    sequence = data.draw(st.integers(1, 20))
    samples = (epochs * sum(lengths) - 1) // sequence
    found = build_sample_index(np.array(lengths, np.int32), document_index, sequence, samples)
    assert found.dtype == np.int32
    assert [tuple(row) for row in found.tolist()] == walked_sample_index(lengths, document_index, sequence, samples)


def test_a_stream_of_more_than_2_to_the_31_tokens_does_not_overflow():
    lengths = np.full(3, 2**30, np.int32)
    index = build_sample_index(lengths, np.arange(3), 2**20, 3 * 2**10 - 1)
    assert index[-1].tolist() == [2, 2**30 - 2**20]


def test_the_part_before_the_last_epoch_is_shuffled_by_itself():
    index = build_shuffle_index(70, 100, np.random.RandomState(1))
    assert sorted(index[:70]) == list(range(70))
    assert sorted(index[70:]) == list(range(70, 100))
    assert index[:70].tolist() != list(range(70))
    assert index.dtype == np.uint32


# --- GPTDataset -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [1, 7, 64])
@pytest.mark.parametrize("samples", [1, 100, 300])
def test_samples_tile_the_shuffled_documents_and_share_one_token(indexed, sequence, samples):
    data = GPTDataset(indexed, range(len(indexed)), samples, sequence, seed=3)
    stream = np.concatenate([indexed.get(int(i)) for i in data.document_index])
    assert len(stream) == data.epochs * indexed.tokens
    assert len(data) >= samples
    rows = {int(row): data[i] for i, row in enumerate(data.shuffle_index)}
    assert sorted(rows) == list(range(len(data)))
    for row, sample in rows.items():
        assert sample.dtype == np.int32
        assert sample.tolist() == stream[row * sequence : (row + 1) * sequence + 1].tolist()


@given(data=st.data())
def test_a_part_of_a_sample_is_that_part_of_it_and_nothing_else_is_read(indexed, data):
    samples = GPTDataset(indexed, range(len(indexed)), 100, 64, seed=3, keep_tail=True)
    index, first = data.draw(st.integers(0, len(samples) - 1)), data.draw(st.integers(0, 65))
    last, read = data.draw(st.integers(first, 65)), []
    whole = samples[index]
    with pytest.MonkeyPatch.context() as patch:
        ranges = type(indexed)._read
        patch.setattr(type(indexed), "_read", lambda self, found: read.extend(found) or ranges(self, found))
        part = samples.part(index, slice(first, last))
    assert part.tolist() == whole[first:last].tolist()
    assert sum(end - begin for begin, end in read) == (whole[first:last] >= 0).sum()


def test_epochs_are_the_fewest_that_hold_the_samples(tmp_path):
    data = dataset_of(tmp_path, [10, 11])  # 21 tokens: 4 samples of 5, and one token is shared
    assert [GPTDataset(data, range(2), samples, 5, 0).epochs for samples in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_a_last_epoch_that_is_little_needed_comes_last(tmp_path):
    data = dataset_of(tmp_path, [10] * 20)  # 200 tokens, 19 samples of 10 in an epoch
    apart, mixed = GPTDataset(data, range(20), 25, 10, 0), GPTDataset(data, range(20), 37, 10, 0)
    assert apart.epochs == mixed.epochs == 2
    assert sorted(apart.document_index[:20]) == list(range(20))
    assert max(apart.shuffle_index[:19]) == 18
    assert sorted(mixed.document_index[:20]) != list(range(20))
    assert max(mixed.shuffle_index[:19]) > 18


def test_the_order_is_megatrons(indexed):
    # megatron-core 0.16.1 gives the same figure: tests/parity/test_megatron_data.py.
    data = GPTDataset(indexed, range(5, 45), samples=60, sequence=32, seed=1234)
    digest = hashlib.sha256(np.concatenate([data[i] for i in range(60)]).tobytes()).hexdigest()
    assert digest[:16] == "c931cd01e82ffc11"


def test_the_same_seed_gives_the_same_order_and_another_one_another(indexed):
    one, two, other = (GPTDataset(indexed, range(50), 80, 16, seed) for seed in (7, 7, 8))
    assert all((one[i] == two[i]).all() for i in range(80))
    assert any((one[i] != other[i]).any() for i in range(80))


def test_only_the_documents_given_are_drawn(tmp_path):
    data = dataset_of(tmp_path, [10] * 6)
    part = GPTDataset(data, [1, 4], 5, 8, 0)
    drawn = {int(token) for i in range(len(part)) for token in part[i]}
    assert drawn <= {*range(10, 20), *range(40, 50)}


@pytest.mark.parametrize("index", [-1, 10_000])
def test_a_sample_that_is_not_there_is_refused(indexed, index):
    with pytest.raises(IndexError):
        GPTDataset(indexed, range(50), 10, 16, 0)[index]


def test_a_part_without_documents_says_what_to_change(indexed):
    with pytest.raises(UsageError, match=r"the validation part of .* has none of its 50 documents; .*--data\.split"):
        GPTDataset(indexed, range(0), 10, 16, 0, "validation part")


def test_a_part_too_small_for_one_sample_says_the_counts_and_what_to_change(tmp_path):
    data = dataset_of(tmp_path, [10, 11])
    assert len(GPTDataset(data, range(2), 1, 20, 0)) == 1
    with pytest.raises(UsageError, match=r"21 tokens in 2 documents and one sample needs 22; use --model\.sequence"):
        GPTDataset(data, range(2), 1, 21, 0)


# --- MockDataset ------------------------------------------------------------------------------------------------------


def test_mock_samples_depend_on_seed_and_index_alone():
    forwards = [MockDataset(100, 16, 5)[i] for i in range(4)]
    data = MockDataset(100, 16, 5)
    backwards = [data[i] for i in (3, 2, 1, 0)][::-1]
    assert all((a == b).all() for a, b in zip(forwards, backwards, strict=True))
    assert (MockDataset(100, 16, 6)[0] != forwards[0]).any()
    assert (forwards[0] != forwards[1]).any()


def test_mock_samples_count_by_a_stride_within_the_vocabulary():
    for i in range(20):
        sample = MockDataset(11, 30, 0)[i]
        assert sample.shape == (31,)
        assert sample.dtype == np.int32
        assert 0 <= sample.min() <= sample.max() < 11
        assert len(set(np.diff(sample) % 11)) == 1


# --- What a sample says beside its tokens -----------------------------------------------------------------------------

EOD = 0
EVERYTHING = ("tokens", "labels", "loss_mask", "positions", "documents")


def test_documents_begin_behind_the_end_of_the_one_before():
    tokens = np.array([5, 6, EOD, 7, EOD, EOD, 8, 9, 4])
    sample = labelled(tokens, EVERYTHING, EOD, mask_eod=True)
    assert {name: array.dtype.name for name, array in sample.items()} == {
        "tokens": "int32", "labels": "int32", "loss_mask": "bool", "positions": "int32", "documents": "int32",
    }  # fmt: skip
    assert sample["tokens"].tolist() == [5, 6, EOD, 7, EOD, EOD, 8, 9]
    assert sample["labels"].tolist() == [6, EOD, 7, EOD, EOD, 8, 9, 4]
    assert sample["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert sample["documents"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert sample["loss_mask"].tolist() == [True, True, False, True, False, False, True, True]


def test_padding_is_a_token_without_a_label_that_counts():
    sample = labelled(np.array([5, EOD, 6, PAD, PAD]), EVERYTHING, EOD)
    assert sample["tokens"].tolist() == [5, EOD, 6, 0]
    assert sample["labels"].tolist() == [EOD, 6, 0, 0]
    assert sample["loss_mask"].tolist() == [True, True, False, False]
    assert sample["documents"].tolist() == [0, 0, 1, 1]


def test_only_what_is_asked_for_is_given():
    assert list(labelled(np.arange(5))) == ["tokens", "labels"]
    assert list(labelled(np.arange(5), ["tokens", "labels", "positions"], EOD)) == ["tokens", "labels", "positions"]


# --- The end of the stream --------------------------------------------------------------------------------------------


def test_a_tail_is_kept_padded_where_asked(tmp_path):
    data = dataset_of(tmp_path, [10, 13])  # 23 tokens: 4 samples of 5 and 2 labels
    dropping, keeping = (GPTDataset(data, range(2), 4, 5, 0, keep_tail=keep) for keep in (False, True))
    assert (len(dropping), len(keeping)) == (4, 5)
    tail = keeping[keeping.shuffle_index.tolist().index(4)]
    order = np.concatenate([data.get(int(i)) for i in keeping.document_index])
    assert tail.tolist() == [*order[20:].tolist(), PAD, PAD, PAD]


def test_a_stream_that_ends_with_a_sample_has_no_tail(tmp_path):
    data = dataset_of(tmp_path, [10, 11])
    assert len(GPTDataset(data, range(2), 4, 5, 0, keep_tail=True)) == 4


def test_a_tail_is_kept_where_the_last_documents_are_empty(tmp_path):
    data = dataset_of(tmp_path, [7, 0, 0])
    samples = GPTDataset(data, range(3), 1, 4, 2, keep_tail=True)
    drawn = sorted(token for i in range(len(samples)) for token in samples[i].tolist() if token != PAD)
    assert drawn == [0, 1, 2, 3, 4, 4, 5, 6]


def test_without_the_extra_token_samples_share_none_and_the_last_label_is_padding(tmp_path):
    data = dataset_of(tmp_path, [4, 0, 6])
    samples = GPTDataset(data, range(3), 2, 5, 0, extra_token=False)
    found = [samples[i] for i in range(len(samples))]
    assert sorted(token for sample in found for token in sample[:5]) == list(range(10))
    assert [sample[5] for sample in found] == [PAD, PAD]


def test_one_epoch_is_drawn_where_no_number_of_samples_is_given(indexed):
    data = GPTDataset(indexed, range(50), None, 16, 0)
    assert (data.epochs, len(data)) == (1, (indexed.tokens - 1) // 16)


@pytest.mark.parametrize("token", [60, 2**16 - 1])
def test_an_id_beyond_the_vocabulary_is_refused(tmp_path, token):
    with IndexedDatasetWriter(tmp_path / "d", 2**16) as writer:
        writer.add_document([1, 2, token, 3])
    data = GPTDataset(IndexedDataset(tmp_path / "d"), range(1), 1, 3, 0, vocabulary=60)
    with pytest.raises(UsageError, match=f"holds the id {token} and the model's vocabulary is 60"):
        data[0]


def test_ids_that_do_not_fit_into_32_bits_are_refused_rather_than_wrapped(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", 2**16) as writer:
        writer.add_document([0] * 8)
    index = bytearray(index_file(tmp_path / "d").read_bytes())
    index[17], index[34:38] = 5, (2).to_bytes(4, "little")  # two int64
    index_file(tmp_path / "d").write_bytes(index)
    for token in (2**32 + 5, -1):
        token_file(tmp_path / "d").write_bytes(np.array([1, token]).tobytes())
        data = GPTDataset(IndexedDataset(tmp_path / "d"), range(1), 1, 1, 0)
        with pytest.raises(UsageError, match=f"holds the id {token} "):
            data[0]
