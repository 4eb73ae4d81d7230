"""BERT's samples against megatron-core's own: its compiled C++ chooses the sentences, its Python masks them."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.data.bert import BertDataset
from mjax.data.masking import WordPieces, create_masked_lm_predictions
from mjax.data.sentence_pairs import build_pair_index
from mjax.data.tokenizers import load_tokenizer
from tests.data.test_bert import PIECES, SEP, VOCABULARY, text, write
from tests.data.vocabularies import TEXTS, bert_file

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import bert_dataset, helpers, indexed_dataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

SEED = 1234


def tokenizer_of(pieces):
    """What Megatron asks of a tokenizer."""
    words = ["##x" if continues else "x" for continues in pieces.continues.tolist()]
    ids = {"cls": pieces.cls, "sep": pieces.sep, "mask": pieces.mask, "pad": pieces.pad}
    return SimpleNamespace(**ids, inv_vocab=dict(enumerate(words)), unique_identifiers={"class": "none"})


@pytest.fixture
def megatrons(monkeypatch, tmp_path):
    """Builds Megatron's dataset, which asks for its rank even where nothing is distributed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    def build(indexed, samples, sequence, short, order, documents=None, seed=SEED, mask=0.15):
        config = bert_dataset.BERTMaskedWordPieceDatasetConfig(
            random_seed=seed,
            sequence_length=sequence,
            path_to_cache=str(tmp_path / "cache"),
            split="1",
            tokenizer=tokenizer_of(PIECES),
            masking_probability=mask,
            short_sequence_probability=short,
            masking_max_ngram=3,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
            classification_head=order,
        )
        theirs = indexed_dataset.IndexedDataset(indexed.prefix)
        chosen = np.array(documents or range(indexed.documents), np.int32)
        return bert_dataset.BERTMaskedWordPieceDataset(theirs, indexed.prefix, chosen, samples, Split.train, config)

    return build


def as_ours(sample, order=True):
    """A sample of Megatron's in our terms, where the padding id is 0."""
    tokens, labels, hidden = (sample[name].astype(np.int32) for name in ("text", "labels", "loss_mask"))
    length = int(np.flatnonzero((tokens == SEP) & (hidden == 0))[-1]) + 1  # its own mask drops tokens of id 0
    padding = np.arange(len(tokens)) >= length
    assert (sample["padding_mask"] == (~padding & (tokens != 0))).all()
    assert (labels[hidden == 0] == -1).all()
    return {
        "tokens": tokens,
        "token_types": sample["types"].astype(np.int32),
        "labels": np.maximum(labels, 0),
        "loss_mask": hidden.astype(bool),
        "documents": padding.astype(np.int32),
        **({"sentence_order": np.array(sample["is_random"], np.int32)} if order else {}),
    }


def assert_same(ours, theirs, order=True):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tolist() == theirs[name].tolist(), name


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Documents of every kind, by name."""
    folder = tmp_path_factory.mktemp("data")
    long = np.random.RandomState(1).randint(4, VOCABULARY, 513)
    odd = [
        [], [[]], [[], []], [[], [], [5, 6]], [long], [long[:512]], [long, [5]], [[5], long[:512]], [[7], [8]],
        [long[:300], [], long[:200]], [[1001, 1002], [1003]], [[9]], [[], [5, 1005, 6]],
    ]  # fmt: skip
    documents = {
        "mixed": text(0, 80),
        "many short": text(1, 120, sentences=30, longest=12),
        "long sentences": text(2, 40, sentences=6, longest=700),
        "odd": [*odd, *text(3, 10), *odd],
    }
    return {name: write(folder / name.replace(" ", "-"), found) for name, found in documents.items()}


NAMES = ["mixed", "many short", "long sentences", "odd"]
SETTINGS = [(16, 1.0, True), (64, 0.1, False), (128, 0, True), (512, 0.5, True), (64, 0.4, True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("sequence", "short", "order"), SETTINGS)
def test_samples_match_megatron(datasets, megatrons, name, sequence, short, order):
    indexed = datasets[name]
    theirs = megatrons(indexed, 150, sequence, short, order)
    ours = BertDataset(
        indexed, range(indexed.documents), 150, sequence, SEED, PIECES, short_probability=short, sentence_order=order
    )
    assert ours.pair_index.dtype == theirs.sample_index.dtype
    assert ours.pair_index.tolist() == theirs.sample_index.tolist()
    for i in range(len(ours)):
        assert_same(ours[i], as_ours(theirs[i], order))


@pytest.mark.parametrize(("documents", "seed"), [(range(30), 1), (range(30, 80), 2**31 - 2)])
def test_parts_and_seeds_match_megatron(datasets, megatrons, documents, seed):
    theirs = megatrons(datasets["mixed"], 60, 64, 0.1, True, documents, seed)
    ours = BertDataset(datasets["mixed"], documents, 60, 64, seed, PIECES)
    assert ours.pair_index.tolist() == theirs.sample_index.tolist()
    for i in range(len(ours)):
        assert_same(ours[i], as_ours(theirs[i]))


@pytest.mark.parametrize("mask", [0.01, 0.8])
def test_other_mask_shares_match_megatron(datasets, megatrons, mask):
    indexed = datasets["mixed"]
    theirs = megatrons(indexed, 100, 64, 0.1, True, mask=mask)
    ours = BertDataset(indexed, range(indexed.documents), 100, 64, SEED, PIECES, mask_probability=mask)
    for i in range(100):
        assert_same(ours[i], as_ours(theirs[i]))


@pytest.mark.parametrize("documents", [1, 1000, 20_000])
@pytest.mark.parametrize("epochs", [1, 3])
def test_index_of_many_documents_matches_megatron(documents, epochs):
    random = np.random.RandomState(documents)
    counts = random.randint(0, 25, documents) + (documents == 1)
    lengths = random.lognormal(3, 0.8, counts.sum()).astype(np.int32)
    boundaries = np.cumsum([0, *counts])
    for seed, most, short, fewest in product([7], [125, 509], [0, 0.1], [1, 2]):
        arguments = (epochs, 2**40, most, short, seed, False, fewest)
        theirs = helpers.build_mapping(boundaries, lengths, *arguments)
        ours = build_pair_index(lengths, boundaries, len(theirs), most, short, seed, fewest)
        assert (ours == theirs).all()


def test_masks_of_real_tokenizer_match_megatron(tmp_path, megatrons, datasets):
    tokenizer = load_tokenizer(f"bert-uncased:{bert_file(tmp_path / 'v', lowercase=True)}")
    pieces = WordPieces.of(tokenizer)
    words = {number: piece for piece, number in tokenizer.library.get_vocab().items()}
    theirs = megatrons(datasets["mixed"], 1, 64, 0.1, True)
    ids = {"cls": tokenizer.cls, "sep": tokenizer.sep, "mask": tokenizer.mask}
    theirs.config.tokenizer = SimpleNamespace(**ids, inv_vocab=words)
    theirs.token_lookup = list(range(tokenizer.vocabulary))
    for seed, sentence in enumerate(TEXTS * 20):
        tokens = [tokenizer.cls, *tokenizer.encode(sentence), tokenizer.sep]
        draws = [np.random.RandomState(seed) for _ in range(2)]
        masked, places, labels, _, _ = theirs._create_masked_lm_predictions(tokens, len(tokens), draws[0])
        seen, hidden = create_masked_lm_predictions(np.array(tokens, np.int32), len(tokens), pieces, draws[1])
        assert seen.tolist() == masked
        assert np.flatnonzero(hidden).tolist() == places
        assert np.array(tokens)[hidden].tolist() == labels
