"""Samples with all their options, and blends, against megatron-core's own datasets and its compiled C++."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from mjax.data.blend import BlendedDataset, build_blend_index, normalize, number_within, samples_of_parts
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import GPTDataset, labelled, split_sequences
from tests.data.test_samples import dataset_of
from tests.parity.test_megatron_data import write_ours
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
        shapes[-1] = 5  # Megatron's own check fails on a tail after empty documents
        texts = [[np.append(random.randint(0, VOCABULARY, n), EOD)[: n + bool(n % 5)]] for n in shapes]
        names.append(str(write_ours(folder / f"d{number}", texts, VOCABULARY)))
    return names


def settings(cache, sequence, seed=1234, **options):
    """Megatron's config. Its cache key leaves out documents and options, so every case brings a folder of its own."""
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
    sample = labelled(tokens, names, EOD, mask_eod)
    place = np.arange(len(tokens) - 1)
    documents = sample.pop("documents", np.zeros_like(place))
    sample.setdefault("positions", place)
    sample["forbidden"] = (documents[:, None] != documents) | (place[:, None] < place)
    return {name: array.tolist() for name, array in sample.items()}


# --- One dataset, every option ----------------------------------------------------------------------------------------

OPTIONS = [
    # reset positions, reset attention, mask the loss after ends of documents, extra token, keep the tail
    (False, False, False, True, False),
    (True, False, False, True, False),
    (False, True, False, True, False),
    (False, False, True, True, True),
    (True, True, True, True, True),
    (True, True, True, False, False),
    (False, False, False, False, True),
]
SIZES = [
    # documents, samples, sequence
    (range(60), None, 16),
    (range(60), 47 + 36, 16),  # just below 80% of the 47 samples of an epoch
    (range(60), 47 + 37, 16),  # 80%
    (range(60), 11, 150),  # longer than documents
    (range(60), 1000, 1),
    ([0, 7, 8, 30, 49], 40, 10),
]


@pytest.mark.parametrize(("options", "size"), diagonal(2, OPTIONS, SIZES))
def test_samples_with_options_are_megatrons(prefixes, tmp_path, options, size):
    positions, attention, mask_eod, extra, tail = options
    documents, samples, sequence = size
    config = settings(
        tmp_path,
        sequence,
        split="1,1,0",
        reset_position_ids=positions,
        reset_attention_mask=attention,
        eod_mask_loss=mask_eod,
        add_extra_token_to_sequence=extra,
        drop_last_partial_validation_sequence=not tail,
    )
    indexed = indexed_dataset.IndexedDataset(prefixes[0])
    chosen = np.asarray(documents, np.int32)
    theirs = gpt_dataset.GPTDataset(indexed, prefixes[0], chosen, samples, Split.valid, config)
    ours = GPTDataset(
        IndexedDataset(prefixes[0]), documents, samples, sequence, 1234, extra_token=extra, keep_tail=tail
    )
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    found = [ours_as_theirs(ours[i], positions, attention, mask_eod) for i in range(len(ours))]
    assert found == [theirs_as_ours(theirs[i]) for i in range(len(theirs))]


def test_digest_of_unit_tests_is_megatrons(tmp_path):
    ours = dataset_of(tmp_path, np.random.RandomState(0).randint(0, 40, 50).tolist())
    indexed, documents = indexed_dataset.IndexedDataset(str(ours.prefix)), np.arange(5, 45, dtype=np.int32)
    config = settings(tmp_path, 32, split="1,0,0")
    theirs = gpt_dataset.GPTDataset(indexed, str(ours.prefix), documents, 60, Split.train, config)
    tokens = [[*theirs[i]["tokens"].tolist(), theirs[i]["labels"].tolist()[-1]] for i in range(60)]
    assert hashlib.sha256(np.array(tokens, np.int32).tobytes()).hexdigest()[:16] == "c931cd01e82ffc11"


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
    assert (number_within(ours) == number).all()


@pytest.fixture
def alone(monkeypatch):
    """Megatron's blend asks for its rank even where nothing is distributed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def built_by_megatron(cache, sizes, sequence, **options):
    config = settings(cache, sequence, **options)
    return BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, sizes, lambda: True, config).build()


def same(ours, theirs, samples):
    return all(
        ours[i].tolist() == [*theirs[i]["tokens"].tolist(), theirs[i]["labels"].tolist()[-1]] for i in range(samples)
    )


def drawn(prefixes, weights, samples, sequence, split, part):
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    shares = normalize(weights) if weights else None
    wanted = samples_of_parts(samples, shares) if weights else [None] * len(prefixes)
    parts = [
        GPTDataset(indexed, split_sequences(split, len(indexed))[part], number, sequence, 1234)
        for indexed, number in zip(datasets, wanted, strict=True)
    ]
    return BlendedDataset(parts, shares, samples)


@pytest.mark.parametrize("weights", [[30.0, 1.0, 2.0], [0.1, 0.1, 0.1]])
def test_weighted_blend_is_megatrons(prefixes, tmp_path, alone, weights):
    theirs = built_by_megatron(tmp_path, [20, 500, 7], 12, blend=(prefixes, weights), split="1,1,1")
    for part, samples in enumerate((20, 500, 7)):
        ours = drawn(prefixes, weights, samples, 12, "1,1,1", part)
        assert len(ours) == samples <= len(theirs[part])
        assert same(ours, theirs[part], samples)


def test_blend_without_weights_is_megatrons(prefixes, tmp_path, alone):
    theirs = built_by_megatron(tmp_path, [None, None, None], 12, blend=(prefixes, None), split="80,20,0")
    ours = drawn(prefixes, None, None, 12, "80,20,0", 0)
    assert len(ours) == len(theirs[0])
    assert same(ours, theirs[0], len(ours))
