"""BERT's samples: how they are laid out, that they depend on seed and index alone, and what is refused."""

import hashlib
from itertools import chain

import numpy as np
import pytest

from mjax.batch_size import BatchSizes
from mjax.data.batches import Batches
from mjax.data.bert import BertDataset
from mjax.data.blend import BlendedDataset
from mjax.data.cache import IndexCache
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.masking import WordPieces
from mjax.data.samples import split_sequences
from mjax.errors import UsageError

PAD, CLS, SEP, MASK, VOCABULARY = 0, 1, 2, 3, 1200
PIECES = WordPieces(CLS, SEP, MASK, PAD, np.arange(VOCABULARY) >= 1000)
SHARED = ("token_types", "labels", "loss_mask", "documents")


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
    return BertDataset(indexed, range(indexed.documents), samples, sequence, seed, pieces, **options)


def original(sample):
    """The tokens before any was hidden, without padding."""
    return np.where(sample["loss_mask"], sample["labels"], sample["tokens"])[sample["documents"] == 0]


def segments(sample):
    """Tokens of both segments, without special ones."""
    types = sample["token_types"][sample["documents"] == 0]
    tokens = original(sample)
    return tokens[types == 0][1:-1].tolist(), tokens[types == 1][:-1].tolist()


# --- Layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [5, 16, 64, 200])
def test_a_sample_is_two_segments_between_special_tokens_and_padding(indexed, sequence):
    for sample in map(dataset(indexed, sequence=sequence).__getitem__, range(100)):
        assert {name: (array.dtype.name, array.shape) for name, array in sample.items()} == {
            "tokens": ("int32", (sequence,)),
            "token_types": ("int32", (sequence,)),
            "labels": ("int32", (sequence,)),
            "loss_mask": ("bool", (sequence,)),
            "documents": ("int32", (sequence,)),
            "sentence_order": ("int32", ()),
        }
        n = int((sample["documents"] == 0).sum())
        one, two = segments(sample)
        assert original(sample).tolist() == [CLS, *one, SEP, *([*two, SEP] if two else [])]
        assert sample["documents"].tolist() == [0] * n + [1] * (sequence - n)
        assert sample["token_types"].tolist() == [0] * (len(one) + 2) + [1] * (n - len(one) - 2) + [0] * (sequence - n)
        assert not sample["loss_mask"][n:].any()
        assert (sample["tokens"][n:] == PAD).all()
        assert (sample["labels"][~sample["loss_mask"]] == 0).all()


def test_segments_are_whole_sentences_in_the_order_that_the_label_says(indexed):
    data, places = dataset(indexed, samples=400, sequence=300, short_probability=0), {}
    for i in range(len(data)):
        first, last, wanted = data.pair_index[i].tolist()
        sentences = [indexed.get(j).tolist() for j in range(first, last)]
        sample = data[i]
        one, two = segments(sample)
        if sample["sentence_order"]:
            one, two = two, one
        joined, lengths = [*chain(*sentences)], np.cumsum([len(sentence) for sentence in sentences])
        cuts = [(joined[:length], joined[length:]) for length in lengths[:-1]]
        assert wanted == 297
        assert (one, two) in cuts
        places.setdefault(last - first, set()).add(cuts.index((one, two)) + 1)
    assert places[2] == {1}
    assert places[6] == {1, 2, 3, 4, 5}


def test_half_of_the_samples_are_exchanged(indexed):
    data = dataset(indexed, samples=2000, sequence=32)
    assert np.mean([data[i]["sentence_order"] for i in range(2000)]) == pytest.approx(0.5, abs=0.04)


def test_a_pair_too_long_loses_tokens_at_both_ends_of_the_longer_segment(tmp_path):
    indexed = write(tmp_path / "d", [[np.arange(100, 400), np.arange(500, 540)]] * 40)
    data = dataset(indexed, samples=40, sequence=103, short_probability=0)
    lost = []
    for i in range(40):
        long, short = sorted(segments(data[i]), key=len, reverse=True)
        assert (len(long), short) == (60, list(range(500, 540)))
        assert long == list(range(long[0], long[0] + 60))
        lost.append(long[0] - 100)
    assert np.mean(lost) == pytest.approx(120, abs=6)
    assert len(set(lost)) > 10


def test_segments_of_equal_length_are_cut_alike(tmp_path):
    indexed = write(tmp_path / "d", [[np.arange(100, 200), np.arange(300, 400)]])
    sample = dataset(indexed, samples=1, sequence=53, short_probability=0)[0]
    assert [len(segment) for segment in segments(sample)] == [25, 25]


def test_without_the_order_a_sample_is_one_segment_and_a_single_sentence_will_do(tmp_path):
    indexed = write(tmp_path / "d", [[np.arange(10, 20)], [], [np.arange(30, 34), np.arange(40, 44)]])
    data = dataset(indexed, samples=2, sequence=32, sentence_order=False, short_probability=0)
    assert len(data) == 2
    assert sorted(original(data[i]).tolist() for i in range(2)) == [
        [CLS, *range(10, 20), SEP],
        [CLS, *range(30, 34), *range(40, 44), SEP],
    ]
    assert all("sentence_order" not in data[i] and not data[i]["token_types"].any() for i in range(2))


@pytest.mark.parametrize("pad", [0, 5, 1100, CLS])
def test_samples_are_the_same_whatever_the_padding_id(indexed, pad):
    plain = dataset(indexed)
    other = dataset(indexed, pieces=WordPieces(CLS, SEP, MASK, pad, PIECES.continues))
    for i in range(100):
        one, two = plain[i], other[i]
        assert all((one[name] == two[name]).all() for name in SHARED)
        assert (two["tokens"] == np.where(one["documents"], pad, one["tokens"])).all()


# --- Order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "short", "order", "golden"),
    [
        (64, 0.1, True, "65afc10871319a95"),
        (128, 0.5, True, "bccffe1f33a89d32"),
        (16, 0, True, "327b6895a305fc09"),
        (64, 0.1, False, "1a2401e5db0494eb"),
    ],
)
def test_samples_are_megatrons(indexed, sequence, short, order, golden):
    # megatron-core 0.16.1 gives the same figures: tests/parity/test_megatron_bert.py.
    data = dataset(indexed, 150, sequence, short_probability=short, sentence_order=order)
    assert digest([data[i] for i in range(150)]) == golden


def digest(samples):
    names = ("tokens", "token_types", "labels", "loss_mask", "documents", "sentence_order")
    arrays = [np.atleast_1d(sample[name]).astype(np.int32) for sample in samples for name in names if name in sample]
    return hashlib.sha256(np.concatenate(arrays).tobytes()).hexdigest()[:16]


def test_a_sample_depends_on_seed_and_index_alone(indexed):
    data, again, other = dataset(indexed), dataset(indexed), dataset(indexed, seed=4321)
    forwards = [data[i] for i in range(50)]
    backwards = [again[i] for i in reversed(range(50))][::-1]
    assert digest(forwards) == digest(backwards) != digest([other[i] for i in range(50)])


def test_each_epoch_hides_other_tokens_of_the_same_sentences(tmp_path):
    indexed = write(tmp_path / "d", [[np.arange(10, 40), np.arange(50, 80)]])
    data = dataset(indexed, samples=20, short_probability=0)
    assert len({tuple(map(int, data.pair_index[i])) for i in range(20)}) == 1
    assert len({tuple(data[i]["tokens"].tolist()) for i in range(20)}) > 15


def test_only_the_documents_of_a_part_are_drawn(indexed):
    parts = split_sequences("70,20,10", indexed.documents)
    seen = []
    for part in parts:
        data = BertDataset(indexed, part, 200, 64, 1, PIECES)
        bounds = indexed.document_indices[part.start], indexed.document_indices[part.stop]
        assert data.pair_index[:, 0].min() >= bounds[0]
        assert data.pair_index[:, 1].max() <= bounds[1]
        seen.append({int(i) for i in data.pair_index[:, 0]})
    assert all(seen)


def test_the_index_is_kept_and_found_again_by_what_it_depends_on(indexed, tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.data.cache.WORTH_KEEPING", 0)
    cache = IndexCache([tmp_path], pytest.fail)
    variants = [
        {}, {"seed": 5}, {"samples": 500}, {"sequence": 32}, {"short_probability": 0.5}, {"sentence_order": False},
    ]  # fmt: skip
    for number, options in enumerate(variants, start=1):
        fresh, stored = dataset(indexed, **options), dataset(indexed, **options, cache=cache)
        assert (fresh.pair_index == stored.pair_index).all()
        assert len(list(tmp_path.glob("*.json"))) == number
    part = BertDataset(indexed, range(40), 100, 64, 1234, PIECES, cache=cache)
    assert part.pair_index.max() <= indexed.document_indices[40]
    monkeypatch.setattr("mjax.data.bert.build_pair_index", lambda *_: pytest.fail("built again"))
    assert (dataset(indexed, cache=cache).pair_index == dataset(indexed, seed=1234, cache=cache).pair_index).all()


def test_the_same_sentences_in_other_documents_are_another_index(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.data.cache.WORTH_KEEPING", 0)
    cache = IndexCache([tmp_path / "cache"], pytest.fail)
    sentences = [np.arange(10, 20)] * 12
    for name, size in (("a", 3), ("b", 4)):
        indexed = write(tmp_path / name, [sentences[i : i + size] for i in range(0, 12, size)])
        data = dataset(indexed, samples=1, sequence=100, short_probability=0, cache=cache)
        assert len(data) == 12 // size


def test_batches_stack_samples_and_blends_mix_them(indexed, tmp_path):
    parts = [dataset(indexed), dataset(write(tmp_path / "e", text(1, 60)))]
    blend = BlendedDataset(parts, [0.5, 0.5], 100)
    batch = Batches(blend, BatchSizes.constant(4), label=dict).at(3, slice(1, 4))
    assert {name: array.shape for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", *SHARED), (3, 64)), "sentence_order": (3,),
    }  # fmt: skip
    for row, index in enumerate((13, 14, 15)):
        assert all((batch[name][row] == array).all() for name, array in blend[index].items())


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 10_000])
def test_a_sample_that_is_not_there_is_refused(indexed, index):
    with pytest.raises(IndexError):
        dataset(indexed)[index]


def test_a_part_without_documents_says_what_to_change(indexed):
    with pytest.raises(UsageError, match=r"the test part of .* has none of its 80 documents; .*--data\.split"):
        BertDataset(indexed, range(80, 80), 10, 64, 1, PIECES, "test part")


def test_text_that_was_not_split_into_sentences_says_how_to(tmp_path):
    indexed = write(tmp_path / "d", [[np.arange(10, 400)]] * 5)
    with pytest.raises(
        UsageError, match=r"no document of 2 or more sentences.*prepare the text with --split-sentences"
    ):
        dataset(indexed)


def test_a_sequence_without_room_is_refused(indexed):
    with pytest.raises(UsageError, match=r"--model\.sequence 4 leaves no room .* use 5 or more"):
        dataset(indexed, sequence=4)


@pytest.mark.parametrize("options", [{"short_probability": -0.1}, {"short_probability": 1.1}, {"mask_probability": 1}])
def test_a_probability_that_is_none_is_refused(indexed, options):
    with pytest.raises(ValueError, match="probabilities"):
        dataset(indexed, **options)


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    indexed = write(tmp_path / "d", [[[10, 11], [12, 1199]]])
    small = WordPieces(CLS, SEP, MASK, PAD, PIECES.continues[:1100])
    with pytest.raises(UsageError, match=r"sample 0 of .* holds the id 1199 and .* is 1,100"):
        dataset(indexed, samples=1, pieces=small)[0]
