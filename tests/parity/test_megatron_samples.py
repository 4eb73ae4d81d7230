"""Samples with all their options, and blends, against megatron-core's own datasets and its compiled C++."""

from types import SimpleNamespace

import numpy as np
import pytest

from mjax.config.datasets import normalize, split_sequences
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.samples import (
    BlendedDataset,
    GPTDataset,
    add_labels,
    build_blend_index,
    build_dataset_sample_index,
    count_samples_per_dataset,
)
from tests.products import diagonal

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split  # noqa: E402
from megatron.core.datasets.utils import Split  # noqa: E402

EOD, VOCABULARY = 7, 30


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    """Three datasets of 30 to 90 short documents; some are empty, most end with EOD, some have it inside."""
    folder = tmp_path_factory.mktemp("data")
    names = []
    for number, documents in enumerate((60, 30, 90)):
        random = np.random.RandomState(number)
        shapes = random.randint(0, 25, documents)
        texts = [[np.append(random.randint(0, VOCABULARY, n), EOD)[: n + bool(n % 5)]] for n in shapes]
        names.append(str(folder / f"d{number}"))
        with IndexedDatasetWriter(names[-1], VOCABULARY) as writer:
            for text in texts:
                writer.add_document(*text)
    return names


def settings(cache, sequence, seed=1234, **options):
    """Megatron's config. Its cache key leaves out documents and options, so every case brings a separate folder."""
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, eod=EOD, unique_identifiers={"class": "none"})
    switches = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    return gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence,
        path_to_cache=str(cache),
        tokenizer=tokenizer,
        **{**dict.fromkeys(switches, False), **options},
    )


def theirs_as_ours(sample):
    """A sample of Megatron's in our terms; its mask says where attention is forbidden."""
    return {
        "tokens": sample["tokens"].tolist(),
        "labels": sample["labels"].tolist(),
        "loss_mask": sample["loss_mask"].bool().tolist(),
        "positions": sample["position_ids"].tolist(),
        "forbidden": sample["attention_mask"][0].tolist(),
    }


def ours_as_theirs(tokens, positions, attention, mask_eod):
    names = ["loss_mask", *(["positions"] if positions else []), *(["documents"] if attention else [])]
    sample = add_labels(tokens, names, EOD, mask_eod)
    place = np.arange(len(tokens) - 1)
    documents = sample.pop("documents", np.zeros_like(place))
    sample.setdefault("positions", place)
    sample["forbidden"] = (documents[:, None] != documents) | (place[:, None] < place)
    return {name: array.tolist() for name, array in sample.items()}


# --- One dataset, every option ----------------------------------------------------------------------------------------

OPTIONS = [
    # reset positions, reset attention, mask the loss after ends of documents
    (False, False, False),
    (True, False, False),
    (False, True, False),
    (False, False, True),
    (True, True, True),
]
SIZES = [
    # documents, samples, sequence
    (range(60), None, 16),
    (range(60), 47 + 36, 16),  # just below 80% of the 47 samples of an epoch
    (range(60), 47 + 37, 16),  # 80%
    (range(60), 11, 150),  # longer than documents
    (range(60), 1000, 1),
    (range(20, 25), 40, 10),
]


@pytest.mark.parametrize(("options", "size"), diagonal(2, OPTIONS, SIZES))
def test_samples_with_options_are_megatrons(prefixes, tmp_path, options, size):
    positions, attention, mask_eod = options
    documents, samples, sequence = size
    config = settings(
        tmp_path,
        sequence,
        split="1,1,0",
        reset_position_ids=positions,
        reset_attention_mask=attention,
        eod_mask_loss=mask_eod,
        add_extra_token_to_sequence=True,
    )
    indexed = indexed_dataset.IndexedDataset(prefixes[0])
    chosen = np.asarray(documents, np.int32)
    theirs = gpt_dataset.GPTDataset(indexed, prefixes[0], chosen, samples, Split.valid, config)
    ours = GPTDataset(IndexedDataset(prefixes[0]), documents, samples, sequence, 1234)
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    found = [ours_as_theirs(ours[i], positions, attention, mask_eod) for i in range(len(ours))]
    assert found == [theirs_as_ours(theirs[i]) for i in range(len(theirs))]


# --- Splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["949,50,1", " 1 ,2, 3 ", "1.5,.5", "33,33,33", "0,1,0", "5."])
@pytest.mark.parametrize("sequences", [1, 10, 99, 12345])
def test_splits_are_megatrons(split, sequences):
    shares, begin = parse_and_normalize_split(split), 0.0
    for part, share in zip(split_sequences(split, sequences), shares, strict=True):
        bounds = begin, begin + share
        begin = bounds[1]
        assert list(part) == list(range(*(int(round(bound * float(sequences))) for bound in bounds)))  # noqa: RUF046


# --- Blends -----------------------------------------------------------------------------------------------------------


WEIGHTS = {
    "equal": [1.0] * 7,
    "rare": [1e-5, 1.0, 0.5],
    "random": list(np.random.RandomState(0).rand(40)),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_blend_walk_is_the_compiled_one(weights):
    size = 200_000
    shares = (np.array(weights) / np.sum(weights)).tolist()
    index, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(index, number, shares, len(shares), size, False)
    ours = build_blend_index(shares, size)
    assert (ours == index).all()
    assert (build_dataset_sample_index(ours) == number).all()


@pytest.mark.parametrize(
    ("weights", "sizes", "split"),
    [
        ([30.0, 1.0, 2.0], (20, 500, 7), "1,1,1"),
        ([0.1, 0.1, 0.1], (20, 500, 7), "1,1,1"),
        (None, (None,), "80,20,0"),
    ],
)
def test_blend_is_megatrons(prefixes, tmp_path, monkeypatch, weights, sizes, split):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)  # asked for even where nothing is distributed
    config = settings(tmp_path, 12, blend=(prefixes, weights), split=split)
    wanted = [*sizes, None, None][:3]
    built = BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, wanted, lambda: True, config).build()
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    shares = normalize(weights) if weights else None
    for part, samples in enumerate(sizes):
        of_parts = count_samples_per_dataset(samples, shares) if weights else [None] * len(prefixes)
        parts = [
            GPTDataset(indexed, split_sequences(split, len(indexed))[part], number, 12, 1234)
            for indexed, number in zip(datasets, of_parts, strict=True)
        ]
        ours, theirs = BlendedDataset(parts, shares, samples), built[part]
        assert len(ours) == samples <= len(theirs) if weights else len(ours) == len(theirs)
        for i in range(len(ours)):
            assert ours[i].tolist() == [*theirs[i]["tokens"].tolist(), theirs[i]["labels"].tolist()[-1]]
