"""BERT's samples against megatron-core's own: its compiled C++ chooses the sentences, its Python masks them."""

from types import SimpleNamespace

import numpy as np
import pytest

from mjax.data.bert import BertDataset
from tests.data.test_bert import PIECES, SEP, VOCABULARY, text, write

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import bert_dataset, indexed_dataset  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402


def tokenizer_of(pieces):
    """A tokenizer with the interface that Megatron requires."""
    words = ["##x" if continues else "x" for continues in pieces.is_continuation.tolist()]
    ids = {"cls": pieces.cls, "sep": pieces.sep, "mask": pieces.mask, "pad": pieces.pad}
    return SimpleNamespace(**ids, inv_vocab=dict(enumerate(words)), unique_identifiers={"class": "none"})


@pytest.fixture
def megatrons(monkeypatch, tmp_path):
    """Builds Megatron's dataset, which asks for its rank even where nothing is distributed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    def build(indexed, documents, samples, sequence, seed):
        config = bert_dataset.BERTMaskedWordPieceDatasetConfig(
            random_seed=seed,
            sequence_length=sequence,
            path_to_cache=str(tmp_path / "cache"),
            split="1",
            tokenizer=tokenizer_of(PIECES),
            masking_probability=0.15,
            short_sequence_probability=0.1,
            masking_max_ngram=3,
            masking_do_full_word=True,
            masking_do_permutation=False,
            masking_use_longer_ngrams=False,
            masking_use_geometric_distribution=False,
            classification_head=True,
        )
        theirs = indexed_dataset.IndexedDataset(indexed.prefix)
        documents = np.array(documents, np.int32)
        return bert_dataset.BERTMaskedWordPieceDataset(theirs, indexed.prefix, documents, samples, Split.train, config)

    return build


def as_ours(sample):
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
        "sentence_order": np.array(sample["is_random"], np.int32),
    }


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
        "long sentences": text(2, 40, sentences=6, longest=700),
        "odd": [*odd, *text(3, 10), *odd],
    }
    return {name: write(folder / name.replace(" ", "-"), found) for name, found in documents.items()}


@pytest.mark.parametrize(
    ("name", "sequence", "documents", "seed"),
    [
        ("mixed", 64, None, 1234),
        ("mixed", 512, None, 1234),
        ("mixed", 64, range(30, 80), 2**31 - 2),
        ("long sentences", 512, None, 1),
        ("odd", 16, None, 1234),
        ("odd", 128, None, 1234),
    ],
)
def test_samples_match_megatron(datasets, megatrons, name, sequence, documents, seed):
    indexed = datasets[name]
    chosen = documents or range(indexed.documents)
    theirs = megatrons(indexed, chosen, 150, sequence, seed)
    ours = BertDataset(indexed, chosen, 150, sequence, seed, pieces=PIECES)
    assert ours.pair_index.dtype == theirs.sample_index.dtype
    assert ours.pair_index.tolist() == theirs.sample_index.tolist()
    for i in range(len(ours)):
        found, expected = ours[i], as_ours(theirs[i])
        assert found.keys() == expected.keys()
        for field in found:
            assert found[field].tolist() == expected[field].tolist(), field
