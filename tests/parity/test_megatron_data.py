"""Files and order of samples against megatron-core's own code, whose compiled C++ builds indices on any CPU."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.data.samples import GPTDataset

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import gpt_dataset, indexed_dataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

# Documents as lists of their sequences' lengths.
SHAPES = {
    "plain": [[5], [3], [9]],
    "empty documents": [[0], [4], [0], [0], [7], [0]],
    "several sequences": [[2, 3], [4], [1, 0, 6], [5]],
    "one token": [[1]],
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


# --- The order of samples ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """50 documents of 0 to 39 tokens, 952 in all; the same as in tests/data/test_samples.py."""
    lengths = np.random.RandomState(0).randint(0, 40, 50).tolist()
    tokens = iter(range(sum(lengths)))
    documents = [[np.array([next(tokens) for _ in range(length)], np.int64)] for length in lengths]
    return write_ours(tmp_path_factory.mktemp("data") / "d", documents, 100_000)


def megatrons(prefix, documents, samples, sequence, seed, cache):
    """Megatron's dataset. Its cache key leaves out the documents, so every case brings a cache folder of its own."""
    tokenizer = SimpleNamespace(vocab_size=100_000, eod=0, pad=None, unique_identifiers={"class": "none"})
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence,
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    indexed = indexed_dataset.IndexedDataset(str(prefix))
    documents = np.asarray(documents, np.int32)
    return gpt_dataset.GPTDataset(indexed, str(prefix), documents, samples, Split.train, config)


def drawn(dataset, samples):
    return [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in (dataset[i] for i in range(samples))]


EVERYTHING = range(50)
CASES = {
    # name: documents, samples, sequence, epochs, last epoch shuffled apart
    "one epoch, whole": (EVERYTHING, 59, 16, 1, False),
    "two epochs, last apart": (EVERYTHING, 70, 16, 2, True),
    "two epochs, just below 80% of 59": (EVERYTHING, 59 + 46, 16, 2, True),
    "two epochs, 80% of 59": (EVERYTHING, 59 + 47, 16, 2, False),
    "three epochs, just below 80%": (EVERYTHING, 118 + 46, 16, 3, True),
    "three epochs, 80%": (EVERYTHING, 118 + 47, 16, 3, False),
    "four epochs, last apart": (EVERYTHING, 190, 16, 4, True),
    "sequence longer than documents": (EVERYTHING, 10, 200, 3, True),
    "sequence of most of an epoch": (EVERYTHING, 3, 900, 3, False),
    "sequence of one token": (EVERYTHING, 1500, 1, 2, True),
    "some documents": (range(5, 45), 60, 32, 3, True),
    "documents far apart": ([0, 7, 8, 30, 49], 40, 10, 5, True),
    "one document": ([10], 8, 4, 2, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_indices_and_samples_are_megatrons(files, tmp_path, case):
    documents, samples, sequence, epochs, apart = case
    seed = 2**32 - samples
    theirs = megatrons(files, documents, samples, sequence, seed, tmp_path)
    ours = GPTDataset(IndexedDataset(files), documents, samples, sequence, seed)
    assert ours.epochs == epochs
    before_last = ((epochs - 1) * ours.indexed.lengths[np.asarray(documents)].sum() - 1) // sequence
    assert (epochs > 1 and max(ours.shuffle_index[:before_last]) == before_last - 1) == apart

    for name in ("document_index", "sample_index", "shuffle_index"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    assert len(ours) == len(theirs) >= samples
    assert [(ours[i][:-1].tolist(), ours[i][1:].tolist()) for i in range(len(ours))] == drawn(theirs, len(theirs))


def test_digest_of_unit_tests_is_megatrons(files, tmp_path):
    tokens = [
        tokens + labels[-1:] for tokens, labels in drawn(megatrons(files, range(5, 45), 60, 32, 1234, tmp_path), 60)
    ]
    assert hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:16] == "c931cd01e82ffc11"
