import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.errors import UsageError

DOCUMENTS = [[1, 2, 3], [4], [5, 6]]


def write(prefix, documents=DOCUMENTS, vocabulary=100):
    with IndexedDatasetWriter(prefix, vocabulary) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def change_index(prefix, offset, data):
    content = bytearray(index_file(prefix).read_bytes())
    content[offset : offset + len(data)] = data
    index_file(prefix).write_bytes(content)


def test_the_bytes_are_those_of_the_format(tmp_path):
    write(tmp_path / "d")
    assert token_file(tmp_path / "d").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    assert index_file(tmp_path / "d").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)  # version
        + b"\x08"  # uint16
        + struct.pack("<2Q", 3, 4)  # sequences, document boundaries
        + struct.pack("<3i", 3, 1, 2)  # lengths
        + struct.pack("<3q", 0, 6, 8)  # pointers in bytes
        + struct.pack("<4q", 0, 1, 2, 3)  # document boundaries
    )


@pytest.mark.parametrize(("vocabulary", "dtype", "code"), [(65499, np.uint16, 8), (65500, np.int32, 4)])
def test_a_vocabulary_of_65500_and_more_is_written_in_four_bytes(tmp_path, vocabulary, dtype, code):
    data = IndexedDataset(write(tmp_path / "d", [[vocabulary - 1]], vocabulary))
    assert data.dtype == dtype
    assert index_file(tmp_path / "d").read_bytes()[17] == code
    assert data.get(0).tolist() == [vocabulary - 1]


@given(documents=st.lists(st.lists(st.lists(st.integers(0, 70000), max_size=5), max_size=4), max_size=6))
def test_what_was_written_is_read_back(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("data") / "d"
    sequences = [sequence for document in documents for sequence in document]
    with IndexedDatasetWriter(prefix, 70001) as writer:
        for document in documents:
            writer.add_document(*document)
    if not any(sequences):
        with pytest.raises(UsageError, match="has no tokens"):
            IndexedDataset(prefix)
        return
    data = IndexedDataset(prefix)
    assert [data.get(i).tolist() for i in range(len(data))] == sequences
    assert data.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert np.diff(data.document_indices).tolist() == [len(document) for document in documents]
    assert (data.documents, data.tokens) == (len(documents), sum(map(len, sequences)))


def test_a_part_of_a_sequence_can_be_read(tmp_path):
    data = IndexedDataset(write(tmp_path / "d"))
    assert data.get(0, 1).tolist() == [2, 3]
    assert data.get(0, 1, 1).tolist() == [2]
    assert data.get(0, 3).tolist() == []


@pytest.mark.parametrize("request_", [(3,), (-1,), (0, 0, 4), (0, 4), (0, -1, 1), (1, 0, 2)])
def test_tokens_beyond_a_sequence_are_refused(tmp_path, request_):
    data = IndexedDataset(write(tmp_path / "d"))
    with pytest.raises(IndexError):
        data.get(*request_)


def test_a_reader_cannot_change_the_data(tmp_path):
    data = IndexedDataset(write(tmp_path / "d"))
    with pytest.raises(ValueError, match="read-only"):
        data.get(0)[0] = 7


# --- Files that are not right -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [token_file, index_file])
def test_a_missing_file_is_named_with_the_command_that_makes_it(tmp_path, file):
    prefix = write(tmp_path / "corpus.v1")
    file(prefix).unlink()
    with pytest.raises(UsageError) as error:
        IndexedDataset(prefix)
    command = f"prepare it with `python -m mjax prepare FILES --output {prefix}`"
    assert str(error.value) == f"{file(prefix)} does not exist; {command}"


def test_a_file_given_for_a_prefix_is_answered_with_the_prefix(tmp_path):
    prefix = write(tmp_path / "d")
    with pytest.raises(UsageError, match=rf"without the ending: {prefix}$"):
        IndexedDataset(f"{prefix}.bin")


def test_a_foreign_index_is_refused(tmp_path):
    prefix = write(tmp_path / "d")
    index_file(prefix).write_bytes(b"PK\x03\x04 something else altogether, of some length")
    with pytest.raises(UsageError, match="is not the index of an indexed dataset"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (9, struct.pack("<Q", 2), "has version 2; mjax reads version 1"),
        (17, b"\x07", "dtype code 7; mjax reads 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16"),
        (34 + 36 + 24, struct.pack("<q", 9), "its documents cover sequences 0 to 9 of 3"),
    ],
)
def test_an_index_that_says_what_cannot_be_is_refused(tmp_path, offset, data, message):
    prefix = write(tmp_path / "d")
    change_index(prefix, offset, data)
    with pytest.raises(UsageError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize("length", [10, 34, 60, 101])
def test_a_truncated_index_is_named(tmp_path, length):
    prefix = write(tmp_path / "d")
    whole = index_file(prefix).read_bytes()
    assert len(whole) == 102
    index_file(prefix).write_bytes(whole[:length])
    with pytest.raises(UsageError, match=r"d\.idx is cut short"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("extra", "message"), [(b"\0", "103 bytes where 102"), (b"\0\0\0", "multimodal")])
def test_an_index_that_is_too_long_is_refused(tmp_path, extra, message):
    prefix = write(tmp_path / "d")
    index_file(prefix).write_bytes(index_file(prefix).read_bytes() + extra)
    with pytest.raises(UsageError, match=message):
        IndexedDataset(prefix)


@pytest.mark.parametrize(("content", "size"), [(b"\0" * 10, 10), (b"\0" * 14, 14), (b"", 0)])
def test_a_bin_that_is_shorter_or_longer_than_its_index_says_is_named(tmp_path, content, size):
    prefix = write(tmp_path / "d")
    token_file(prefix).write_bytes(content)
    with pytest.raises(UsageError, match=rf"d\.bin is {size} bytes but .*d\.idx describes 12"):
        IndexedDataset(prefix)


# --- Writing ----------------------------------------------------------------------------------------------------------


def test_nothing_stands_under_the_final_name_before_the_end(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", 100) as writer:
        writer.add_document([1, 2])
        assert not token_file(tmp_path / "d").exists()
        assert not index_file(tmp_path / "d").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_an_exception_leaves_nothing_new_and_keeps_what_was_there(tmp_path):
    def interrupted():
        yield [9, 9, 9, 9]
        raise KeyboardInterrupt

    prefix = write(tmp_path / "d")
    with pytest.raises(KeyboardInterrupt):
        write(prefix, interrupted())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    assert IndexedDataset(prefix).get(0).tolist() == [1, 2, 3]


def test_new_tokens_never_stand_beside_an_old_index(tmp_path, monkeypatch):
    prefix = write(tmp_path / "d")
    replace = os.replace

    def stopped_before_the_index(file, target):
        if target == index_file(prefix):
            raise KeyboardInterrupt
        return replace(file, target)

    monkeypatch.setattr(os, "replace", stopped_before_the_index)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[6, 5, 4], [3], [2, 1]])
    assert not index_file(prefix).exists()


@pytest.mark.parametrize("token", [-1, 100, 65536 + 1])
def test_a_token_outside_the_vocabulary_is_refused_rather_than_wrapped(tmp_path, token):
    with pytest.raises(ValueError, match="do not fit a vocabulary of 100"):
        write(tmp_path / "d", [[1, token]])
    assert list(tmp_path.iterdir()) == []


@settings(deadline=None, max_examples=30)  # each example waits for the disk
@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), max_size=8),
    cut=st.integers(0, 8),
)
def test_documents_added_many_at_a_time_are_those_added_one_by_one(tmp_path_factory, documents, cut):
    folder = tmp_path_factory.mktemp("data")
    with IndexedDatasetWriter(folder / "one", 100) as writer:
        for document in documents:
            writer.add_document(*document)
    with IndexedDatasetWriter(folder / "many", 100) as writer:
        for part in (documents[:cut], documents[cut:]):
            sequences = [sequence for document in part for sequence in document]
            writer.add_documents(
                np.array([token for sequence in sequences for token in sequence], dtype=np.uint16),
                np.array([len(sequence) for sequence in sequences], dtype=np.int32),
                np.array([len(document) for document in part], dtype=np.int64),
            )
        assert (writer.documents, writer.sequences) == (len(documents), sum(map(len, documents)))
    for file in (token_file, index_file):
        assert file(folder / "one").read_bytes() == file(folder / "many").read_bytes()


@pytest.mark.parametrize(("lengths", "sequences"), [([3], [1]), ([2, 2], [1]), ([4], [2]), ([], [])])
def test_counts_that_do_not_add_up_are_refused(tmp_path, lengths, sequences):
    with pytest.raises(ValueError, match="do not describe 4 tokens"), IndexedDatasetWriter(tmp_path / "d", 9) as writer:
        writer.add_documents(np.arange(4), np.array(lengths, dtype=int), np.array(sequences, dtype=int))
    assert list(tmp_path.iterdir()) == []
