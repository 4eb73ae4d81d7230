"""Files of tokens against those that megatron-core writes and reads."""

import numpy as np
import pytest

from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, index_file, token_file

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import indexed_dataset  # noqa: E402

# Documents as lists of their sequences' lengths.
SHAPES = {
    "empty documents": [[0], [4], [0], [0], [7], [0]],
    "several sequences": [[2, 3], [4], [1, 0, 6], [5]],
}


def tokens_of(shape, vocabulary):
    random = np.random.RandomState(0)
    return [[random.randint(0, vocabulary, length) for length in document] for document in shape]


def write_ours(prefix, documents, vocabulary):
    with IndexedDatasetWriter(prefix, vocabulary) as writer:
        for document in documents:
            writer.add_document(*document)
    return prefix


def write_theirs(prefix, documents, vocabulary):
    dtype = indexed_dataset.DType.optimal_dtype(vocabulary)
    builder = indexed_dataset.IndexedDatasetBuilder(str(token_file(prefix)), dtype=dtype)
    for document in documents:
        builder.add_document(np.concatenate(document), [len(sequence) for sequence in document])
    builder.finalize(str(index_file(prefix)))
    return prefix


@pytest.mark.parametrize("vocabulary", [65499, 65500])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_dataset_bytes_are_megatrons(tmp_path, shape, vocabulary):
    """Each reads what the other one wrote."""
    documents = tokens_of(shape, vocabulary)
    ours = write_ours(tmp_path / "ours", documents, vocabulary)
    theirs = write_theirs(tmp_path / "theirs", documents, vocabulary)
    for file in (token_file, index_file):
        assert file(ours).read_bytes() == file(theirs).read_bytes()

    we_read, they_read = IndexedDataset(theirs), indexed_dataset.IndexedDataset(str(ours))
    assert we_read.lengths.tolist() == they_read.sequence_lengths.tolist()
    assert we_read.pointers.tolist() == they_read.index.sequence_pointers.tolist()
    assert we_read.document_indices.tolist() == they_read.document_indices.tolist()
    for i in range(len(we_read)):
        assert we_read.get(i).dtype == they_read.get(i).dtype
        assert we_read.get(i).tolist() == they_read.get(i).tolist()
