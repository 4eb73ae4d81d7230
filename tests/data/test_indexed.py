"""Megatron's .bin and .idx: bytes, reading, writing, and thousands of damaged files."""

import os
import struct
from itertools import chain

import numpy as np
import pytest

from mjax.data.indexed import HEADER, IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.errors import UsageError

DOCUMENTS = [[[1, 2, 3]], [[4]], [[5, 6]]]


def write(prefix, documents=DOCUMENTS, vocabulary=100):
    with IndexedDatasetWriter(prefix, vocabulary) as writer:
        for document in documents:
            writer.add_document(*document)
    return prefix


def names(folder):
    return sorted(file.name for file in folder.iterdir())


# --- Reading and writing ----------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_format(tmp_path):
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
def test_large_vocabulary_is_written_in_four_bytes(tmp_path, vocabulary, dtype, code):
    data = IndexedDataset(write(tmp_path / "d", [[[vocabulary - 1]]], vocabulary))
    assert data.dtype == dtype
    assert index_file(tmp_path / "d").read_bytes()[17] == code
    assert data.get(0).tolist() == [vocabulary - 1]


@pytest.mark.parametrize("seed", range(8))
def test_written_documents_are_read_back(tmp_path, seed):
    """One by one and many at a time they have the same bytes."""
    random = np.random.default_rng(seed)
    shapes = [random.integers(0, 5, random.integers(0, 4)) for _ in range(12)]
    documents = [[random.integers(0, 70_000, length) for length in shape] for shape in shapes]
    sequences = list(chain(*documents))
    data = IndexedDataset(write(tmp_path / "d", documents, 70_000))
    assert [data.get(i).tolist() for i in range(len(data))] == [sequence.tolist() for sequence in sequences]
    assert np.diff(data.document_indices).tolist() == [len(document) for document in documents]
    assert (data.documents, data.tokens) == (12, sum(map(len, sequences)))
    with IndexedDatasetWriter(tmp_path / "many", 70_000) as writer:
        for part in (slice(0, seed), slice(seed, 12)):
            lengths = np.concatenate([np.empty(0, np.int32), *shapes[part]]).astype(np.int32)
            tokens = np.concatenate([np.empty(0, np.int64), *chain(*documents[part])])
            writer.add_documents(tokens, lengths, np.array([len(shape) for shape in shapes[part]], np.int64))
    for file in (token_file, index_file):
        assert file(tmp_path / "d").read_bytes() == file(tmp_path / "many").read_bytes()


def test_sequences_are_joined_by_short_reads_too(tmp_path, monkeypatch):
    data = IndexedDataset(write(tmp_path / "d", [[[number] * 5] for number in range(60)]))
    read, random = os.preadv, np.random.default_rng(0)
    for most in (None, 3):
        monkeypatch.setattr(os, "preadv", lambda file, room, place, most=most: read(file, [room[0][:most]], place))
        for _ in range(20):
            chosen = np.sort(random.integers(0, 60, random.integers(1, 9)))
            begin, end = random.integers(0, 3), random.integers(3, 6)
            expected = np.repeat(chosen, 5)[begin : 5 * len(chosen) - 5 + end]
            assert data.read_span(chosen, begin, end).tolist() == expected.tolist()


@pytest.mark.parametrize("token", [-1, 100, 65536 + 1])
def test_writer_rejects_token_outside_vocabulary(tmp_path, token):
    with pytest.raises(ValueError, match="do not fit a vocabulary of 100"):
        write(tmp_path / "d", [[[1, token]]])
    assert names(tmp_path) == []


def test_new_tokens_never_meet_an_old_index(tmp_path, monkeypatch):
    prefix, replace = write(tmp_path / "d"), os.replace

    def stopped_before_the_index(file, target):
        if target == index_file(prefix):
            raise KeyboardInterrupt
        return replace(file, target)

    monkeypatch.setattr(os, "replace", stopped_before_the_index)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[[6, 5, 4]], [[3]], [[2, 1]]])
    assert not index_file(prefix).exists()


def test_second_writer_of_a_name_is_rejected(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", 100) as first:
        first.add_document([1, 2, 3])
        with (
            pytest.raises(UsageError, match=r"another process is writing .*d; wait"),
            IndexedDatasetWriter(tmp_path / "d", 100),
        ):
            pass
        first.add_document([4])
    assert (tmp_path / "d.bin").stat().st_size == 8
    assert names(tmp_path) == ["d.bin", "d.idx"]


# --- Damaged files ----------------------------------------------------------------------------------------------------


def fields(index):
    """Byte and format of every number in an index."""
    _, _, _, sequences, boundaries = HEADER.unpack_from(index)
    places = {"version": [(9, "<Q")], "type": [(17, "<B")], "sequences": [(18, "<Q")], "boundaries": [(26, "<Q")]}
    places["length"] = [(34 + 4 * i, "<i") for i in range(sequences)]
    places["pointer"] = [(34 + 4 * sequences + 8 * i, "<q") for i in range(sequences)]
    places["document"] = [(34 + 12 * sequences + 8 * i, "<q") for i in range(boundaries)]
    return places


def test_missing_or_foreign_file_is_named(tmp_path):
    prefix = write(tmp_path / "corpus.v1")
    with pytest.raises(UsageError, match=rf"without the ending: {prefix}$"):
        IndexedDataset(f"{prefix}.bin")
    with pytest.raises(UsageError, match="has no tokens"):
        IndexedDataset(write(tmp_path / "none", [[[]]]))
    whole = index_file(prefix).read_bytes()
    for content, words in ((b"PK\x03\x04", "is not an indexed dataset's .idx file"), (whole + bytes(3), "multimodal")):
        index_file(prefix).write_bytes(content)
        with pytest.raises(UsageError, match=words):
            IndexedDataset(prefix)


@pytest.mark.parametrize("file", [token_file, index_file])
def test_file_cut_short_while_read_is_named(tmp_path, file):
    prefix = write(tmp_path / "d", [[[1] * 5]] * 4000)
    data = IndexedDataset(prefix)
    assert data.get(3999).tolist() == [1] * 5
    os.truncate(file(prefix), 4096)
    for read in (lambda: data.get(3999), lambda: data.read_span(np.array([3998, 3999]), 0, 5)):
        with pytest.raises(UsageError, match=rf"{file('d').name} was cut short while it was read"):
            read()


VALUES = (0, 1, 2, 5, -1, -3, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def test_any_damage_is_rejected_or_harmless(tmp_path, monkeypatch):
    """Every number of an index replaced by many others, and files cut short anywhere: one sentence each.

    Accepted damage divides the same sequences into other documents. The index is checked in pieces of two sequences.
    """
    monkeypatch.setattr("mjax.data.indexed.CHECK_CHUNK_SEQUENCES", 2)
    prefix = write(tmp_path / "d", [[[1, 2], []], [[3, 4, 5], [6], [7] * 4]])
    whole, tokens = index_file(prefix).read_bytes(), token_file(prefix).read_bytes()
    sequences = [[1, 2], [], [3, 4, 5], [6], [7] * 4]
    damaged = [(whole[:length], tokens) for length in range(len(whole))]
    damaged += [(whole, tokens[:length]) for length in range(len(tokens))]
    for places in fields(whole).values():
        for place, form in places:
            size = struct.calcsize(form)
            numbers = [(value % 2 ** (8 * size)).to_bytes(size, "little") for value in VALUES]
            damaged += [(whole[:place] + number + whole[place + size :], tokens) for number in numbers]
    accepted, sentences = 0, []
    for case, contents in enumerate(damaged):
        prefix = tmp_path / f"case{case}"
        index_file(prefix).write_bytes(contents[0])
        token_file(prefix).write_bytes(contents[1])
        try:
            data = IndexedDataset(prefix)
        except UsageError as error:
            sentences.append(str(error))
        else:
            accepted += 1
            assert [data.get(i).tolist() for i in range(len(data))] == sequences
            assert np.diff(data.document_indices).min() >= 0
    assert all("/case" in sentence and "\n" not in sentence for sentence in sentences)
    assert 10 < accepted < len(damaged) / 5
