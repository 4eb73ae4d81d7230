"""BERT's samples and masks are Megatron's; they depend on seed and index alone; and what is rejected."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from mjax.data import bert, sources
from mjax.data.bert import BertDataset, WordPieceVocabulary, build_pair_index, find_word_bounds, mersenne_twister_64
from mjax.data.cache import IndexCache
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.sources import MockBertDataset
from mjax.errors import UsageError
from tests.small import small_config

PAD, CLS, SEP, MASK, VOCABULARY = 0, 1, 2, 3, 1200
PIECES = WordPieceVocabulary(CLS, SEP, MASK, PAD, np.arange(VOCABULARY) >= 1000)


def write(prefix, documents):
    with IndexedDatasetWriter(prefix, VOCABULARY) as writer:
        for document in documents:
            writer.add_document(*document)
    return IndexedDataset(prefix)


def text(seed, documents, sentences=8, longest=30):
    """Documents of 0 to `sentences` - 1 sentences of 0 to `longest` - 1 tokens."""
    random = np.random.RandomState(seed)
    return [
        [random.randint(4, VOCABULARY, random.randint(longest)) for _ in range(random.randint(sentences))]
        for _ in range(documents)
    ]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "d", text(0, 80))


def dataset(indexed, samples=100, sequence=64, seed=1234, pieces=PIECES, **options):
    return BertDataset(indexed, range(indexed.documents), samples, sequence, seed, pieces=pieces, **options)


def digest(samples):
    names = ("tokens", "token_types", "labels", "loss_mask", "documents", "sentence_order")
    arrays = [np.atleast_1d(sample[name]).astype(np.int32) for sample in samples for name in names if name in sample]
    return hashlib.sha256(np.concatenate(arrays).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("sequence", "golden"), [(128, "32c3ef61e9d80ca3"), (16, "88363962e8a93872"), (64, "65afc10871319a95")]
)
def test_samples_are_megatrons(indexed, sequence, golden):
    """megatron-core gives the same samples: tests/parity/test_megatron_bert.py."""
    data = dataset(indexed, 150, sequence)
    assert digest([data[i] for i in range(150)]) == golden


def test_sample_depends_on_seed_and_index_alone(indexed):
    data, again, other = dataset(indexed), dataset(indexed), dataset(indexed, seed=4321)
    forwards = [data[i] for i in range(50)]
    backwards = [again[i] for i in reversed(range(50))][::-1]
    assert digest(forwards) == digest(backwards) != digest([other[i] for i in range(50)])


def test_index_is_kept_by_all_it_depends_on(indexed, tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.data.cache.MIN_CACHED_BYTES", 0)
    cache = IndexCache([tmp_path / "cache"], pytest.fail)
    longer = write(tmp_path / "longer", [[np.append(each, 4) for each in sentences] for sentences in text(0, 80)])
    changes = ({}, {"seed": 5}, {"samples": 500}, {"sequence": 32}, {"indexed": longer})
    for change in changes:
        options = {"indexed": indexed} | change
        fresh, stored = dataset(**options), dataset(**options, cache=cache)
        assert (fresh.pair_index == stored.pair_index).all()
    for name, size in (("a", 3), ("b", 4)):  # the same sentences in other documents
        documents = [[np.arange(10, 20)] * size] * (12 // size)
        data = dataset(write(tmp_path / name, documents), samples=1, sequence=100, cache=cache)
        assert len(data) == 12 // size
    assert len(list((tmp_path / "cache").glob("*.json"))) == len(changes) + 2
    monkeypatch.setattr("mjax.data.bert.build_pair_index", lambda *_: pytest.fail("built again"))
    dataset(indexed, cache=cache)


@pytest.mark.parametrize(
    ("documents", "options", "words"),
    [
        ([[np.arange(10, 400)]] * 5, {}, r"no document of 2 or more sentences.*prepare the text with --split-sentence"),
        ([[[9], [8]]], {"sequence": 4}, r"--model\.sequence 4 is too short .* use 5 or more"),
    ],
)
def test_unusable_dataset_is_rejected(tmp_path, documents, options, words):
    indexed = write(tmp_path / "d", documents)
    with pytest.raises(UsageError, match=words):
        BertDataset(indexed, **{"documents": range(5), "samples": 10, "sequence": 64, **options}, seed=1, pieces=PIECES)


def test_id_outside_vocabulary_is_rejected(tmp_path):
    large = write(tmp_path / "d", [[[10, 11], [12, 1199]]])
    small = WordPieceVocabulary(CLS, SEP, MASK, PAD, PIECES.is_continuation[:1100])
    with pytest.raises(UsageError, match=r"sample 0 of .* holds the id 1199 and .* is 1,100"):
        dataset(large, samples=1, pieces=small)[0]


# --- The sentences of each sample -------------------------------------------------------------------------------------


def test_generators_give_the_standards_words():
    """C++11, 26.5.5."""
    assert int(mersenne_twister_64(5489, 10_000)[-1]) == 9981545732273789042
    assert mersenne_twister_64(5489, 1).tolist() == [14514284786278117030]


def test_rows_are_those_of_megatrons_loop(monkeypatch):
    """The expected rows come from helpers.cpp, build_mapping, sentence by sentence."""
    found = []
    for case in range(60):
        random = np.random.default_rng(case)
        counts = random.integers(0, 10, random.integers(1, 15))
        lengths = random.choice([0, 1, 3, 9, 20, 512, 513], counts.sum(), p=[0.1, 0.1, 0.2, 0.3, 0.2, 0.05, 0.05])
        boundaries = np.cumsum([0, *counts])[case % 2 :]  # all documents, or those from the second on
        options = int(random.integers(1, 40)), [2, 13, 40][case % 3], int(random.integers(2**31 - 1))
        monkeypatch.setattr(bert, "CHUNK_SIZE", int(random.integers(1, 5)))
        found.append(build_pair_index(lengths.astype(np.int32), boundaries, *options).tolist())
    assert hashlib.sha256(str(found).encode()).hexdigest()[:16] == "90e29ff702fa0245"


def test_epochs_are_whole_and_end():
    lengths, boundaries = np.full(30, 10, np.int32), np.arange(0, 31, 3)  # ten documents, a sample each
    sizes = [len(build_pair_index(lengths, boundaries, samples, 100, 1)) for samples in (None, 1, 10, 11, 25)]
    assert sizes == [10, 10, 10, 20, 30]
    lengths, boundaries = np.array([5, 600, 5], np.int32), np.array([0, 1, 1, 3])  # no useful document
    assert build_pair_index(lengths, boundaries, 10, 100, 1).shape == (0, 3)


# --- Masks ------------------------------------------------------------------------------------------------------------


def test_words_skip_special_tokens():
    tokens = np.array([CLS, 1100, 1101, 10, 1100, SEP, 1199, 20, 30, 1000, SEP])
    places, bounds = find_word_bounds(tokens, PIECES)
    words = [places[a:b].tolist() for a, b in pairwise(bounds)]
    # A first piece without its word is one; a segment that begins within a word continues the last one.
    assert words == [[1, 2], [3, 4, 6], [7], [8, 9]]


# --- Mock pairs -------------------------------------------------------------------------------------------------------


def test_mock_pairs_count_on_in_both_segments():
    pairs, swapped = MockBertDataset(vocabulary=60, sequence=16, seed=3), 0
    arrays = {name: (array.shape, array.dtype.name) for name, array in pairs[7].items()}
    assert arrays == small_config(kind="bert").batch_arrays()
    assert (pairs[7]["labels"] != MockBertDataset(60, 16, 4)[7]["labels"]).any()
    for index in range(300):
        sample = pairs[index]
        masked, text, types = sample["loss_mask"], sample["documents"] == 0, sample["token_types"]
        assert ((sample["tokens"] == sources.MASK_ID) == masked).all()
        assert (sample["tokens"] == sample["labels"])[~masked].all()
        assert masked.any()
        assert not (masked | types)[~text].any()
        one, two = sample["labels"][text & (types == 0)][1:], sample["labels"][text & (types == 1)]
        assert min(len(one), len(two)) > 0
        counted = [two, one] if sample["sentence_order"] else [one, two]
        assert (np.diff(np.concatenate(counted)) % (60 - sources.MASK_ID - 1) == 1).all()
        swapped += int(sample["sentence_order"])
    assert 110 < swapped < 190
