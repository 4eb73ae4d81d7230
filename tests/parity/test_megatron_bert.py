"""BERT's samples against megatron-core's own: its compiled C++ chooses the sentences, its Python masks them."""

import subprocess
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.data.bert import BertDataset
from mjax.data.masking import WordPieces, create_masked_lm_predictions
from mjax.data.sentence_pairs import build_pair_index
from mjax.data.tokenizers import load_tokenizer
from tests.conftest import ROOT
from tests.data import test_bert
from tests.data.test_bert import CLS, MASK, SEP, VOCABULARY, digest, text, write
from tests.data.vocabularies import TEXTS, bert_file
from tests.products import seldom

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import bert_dataset, helpers, indexed_dataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

PIECES = test_bert.PIECES
SEED = 1234


def tokenizer_of(pieces, pad=None):
    """What Megatron asks of a tokenizer."""
    words = ["##x" if continues else "x" for continues in pieces.continues.tolist()]
    ids = {"cls": pieces.cls, "sep": pieces.sep, "mask": pieces.mask, "pad": pieces.pad if pad is None else pad}
    return SimpleNamespace(**ids, inv_vocab=dict(enumerate(words)), unique_identifiers={"class": "none"})


@pytest.fixture
def megatrons(monkeypatch, tmp_path):
    """Builds Megatron's dataset, which asks for its rank even where nothing is distributed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    def build(indexed, samples, sequence, short, order, documents=None, seed=SEED, pieces=PIECES, mask=0.15):
        config = bert_dataset.BERTMaskedWordPieceDatasetConfig(
            random_seed=seed,
            sequence_length=sequence,
            path_to_cache=str(tmp_path / "cache"),
            split="1",
            tokenizer=tokenizer_of(pieces),
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


@pytest.mark.parametrize(
    ("name", "sequence", "short", "order"),
    seldom(product(NAMES, (16, 64, 128, 512), (0, 0.1, 0.4, 0.5, 1.0), (True, False))),
)
def test_samples_are_megatrons_token_for_token(datasets, megatrons, name, sequence, short, order):
    indexed = datasets[name]
    theirs = megatrons(indexed, 150, sequence, short, order)
    ours = BertDataset(
        indexed, range(indexed.documents), 150, sequence, SEED, PIECES, short_probability=short, sentence_order=order
    )
    assert ours.pair_index.dtype == theirs.sample_index.dtype
    assert ours.pair_index.tolist() == theirs.sample_index.tolist()
    for i in range(len(ours)):
        assert_same(ours[i], as_ours(theirs[i], order))


@pytest.mark.parametrize(
    ("sequence", "short", "order"), [(64, 0.1, True), (128, 0.5, True), (16, 0, True), (64, 0.1, False)]
)
def test_the_golden_figures_of_the_default_tests_are_megatrons(datasets, megatrons, sequence, short, order):
    theirs = megatrons(datasets["mixed"], 150, sequence, short, order)
    found = digest([as_ours(theirs[i], order) for i in range(150)])
    (goldens,) = [mark.args[1] for mark in test_bert.test_samples_are_megatrons.pytestmark]
    assert (sequence, short, order, found) in goldens


@pytest.mark.parametrize("seed", [1, 2**31 - 2])
@pytest.mark.parametrize("documents", [range(30), range(30, 80), range(60, 80)])
def test_parts_and_seeds_are_megatrons(datasets, megatrons, documents, seed):
    theirs = megatrons(datasets["mixed"], 60, 64, 0.1, True, documents, seed)
    ours = BertDataset(datasets["mixed"], documents, 60, 64, seed, PIECES)
    assert ours.pair_index.tolist() == theirs.sample_index.tolist()
    for i in range(len(ours)):
        assert_same(ours[i], as_ours(theirs[i]))


@pytest.mark.parametrize("mask", [0.01, 0.4, 0.8])
def test_other_shares_of_masks_are_megatrons(datasets, megatrons, mask):
    indexed = datasets["mixed"]
    theirs = megatrons(indexed, 100, 64, 0.1, True, mask=mask)
    ours = BertDataset(indexed, range(indexed.documents), 100, 64, SEED, PIECES, mask_probability=mask)
    for i in range(100):
        assert_same(ours[i], as_ours(theirs[i]))


def test_ours_is_right_with_any_padding_id_and_megatrons_is_not(datasets, megatrons):
    indexed, pad = datasets["mixed"], 1100
    pieces = WordPieces(CLS, SEP, MASK, pad, PIECES.continues)
    theirs = megatrons(indexed, 100, 64, 0.1, True, pieces=pieces)
    right = megatrons(indexed, 100, 64, 0.1, True)
    ours = BertDataset(indexed, range(indexed.documents), 100, 64, SEED, pieces)
    wrong = 0
    for i in range(100):
        expected = as_ours(right[i])
        expected["tokens"] = np.where(expected["documents"], pad, expected["tokens"])
        assert_same(ours[i], expected)
        wrong += bool((theirs[i]["types"] == pad).any())
    assert wrong


@pytest.mark.parametrize("documents", [1, 1000, 20_000])
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_index_of_many_documents_is_megatrons(documents, epochs):
    random = np.random.RandomState(documents)
    counts = random.randint(0, 25, documents) + (documents == 1)
    lengths = random.lognormal(3, 0.8, counts.sum()).astype(np.int32)
    boundaries = np.cumsum([0, *counts])
    for seed, most, short, fewest in product([7], [125, 509], [0, 0.1], [1, 2]):
        arguments = (epochs, 2**40, most, short, seed, False, fewest)
        theirs = helpers.build_mapping(boundaries, lengths, *arguments)
        ours = build_pair_index(lengths, boundaries, len(theirs), most, short, seed, fewest)
        assert (ours == theirs).all()


def test_the_benchmark_compares_indices_and_samples_that_are_equal():
    command = [sys.executable, str(ROOT / "benchmarks" / "bert_samples.py")]
    sizes = ["--rounds", "1", "--documents", "200", "--samples", "20"]
    result = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split("|")[1].split()[0] for line in result.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["what", "---", "index", "index", "20", "20"]


def test_masks_with_a_real_tokenizer_are_megatrons(tmp_path, megatrons, datasets):
    tokenizer = load_tokenizer(f"bert-uncased:{bert_file(tmp_path / 'v', lowercase=True)}")
    pieces = WordPieces.of(tokenizer)
    words = {number: piece for piece, number in tokenizer.library.get_vocab().items()}
    theirs = megatrons(datasets["mixed"], 1, 64, 0.1, True)
    theirs.config.tokenizer = SimpleNamespace(
        cls=tokenizer.cls, sep=tokenizer.sep, mask=tokenizer.mask, inv_vocab=words
    )
    theirs.token_lookup = list(range(tokenizer.vocabulary))
    for seed, sentence in enumerate(TEXTS * 20):
        tokens = [tokenizer.cls, *tokenizer.encode(sentence), tokenizer.sep]
        masked, places, labels, _, _ = theirs._create_masked_lm_predictions(
            tokens, len(tokens), np.random.RandomState(seed)
        )
        seen, hidden = create_masked_lm_predictions(
            np.array(tokens, np.int32), len(tokens), pieces, np.random.RandomState(seed)
        )
        assert seen.tolist() == masked
        assert np.flatnonzero(hidden).tolist() == places
        assert np.array(tokens)[hidden].tolist() == labels
