"""Samples with all their options, and blends, against megatron-core's own datasets and its compiled C++."""

from types import SimpleNamespace

import numpy as np
import pytest

from mjax.data.blend import BlendedDataset, build_blend_index, number_within, parse_blend, samples_of_parts
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import GPTDataset, build_sample_index, labelled, split_sequences
from tests.parity.test_megatron_data import write_ours
from tests.products import diagonal

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs torch (pip install -r requirements-parity.txt)")
pytest.importorskip("megatron.core", reason="needs megatron-core (pip install -r requirements-parity.txt)")

from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split  # noqa: E402
from megatron.core.datasets.utils import Split, get_blend_from_list  # noqa: E402

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

OPTIONS = {
    # name: reset positions, reset attention, mask the loss after ends of documents, extra token, keep the tail
    "plain": (False, False, False, True, False),
    "positions": (True, False, False, True, False),
    "attention": (False, True, False, True, False),
    "loss": (False, False, True, True, False),
    "all three": (True, True, True, True, False),
    "no extra token": (True, True, True, False, False),
    "tail, all three": (True, True, True, True, True),
    "tail without extra token": (False, False, False, False, True),
}
SIZES = {
    # name: documents, samples, sequence
    "one epoch": (range(60), None, 16),
    "three epochs, last apart": (range(60), 90, 16),
    "two epochs of some documents": (range(10, 41), 35, 16),
    "longer than documents": (range(60), 11, 150),
}


@pytest.mark.parametrize(("options", "size"), diagonal(2, OPTIONS.values(), SIZES.values()))
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


@pytest.mark.all
def test_large_tail_is_exact_where_megatron_rounds():
    # (2^25 + 3 - 1) / 2: exactly 2^24 + 1 samples, without a tail. In float32 2^25 + 2 is 2^25, one sample less.
    lengths, sequence = np.array([2**25 + 3], np.int32), 2
    documents = np.zeros(1, np.int32)
    dropping = helpers.build_sample_idx(lengths, documents, sequence, 1, 2**25 + 3, True, True)
    keeping = helpers.build_sample_idx(lengths, documents, sequence, 1, 2**25 + 3, False, True)
    ours = build_sample_index(lengths, documents, sequence, (2**25 + 2) // sequence)
    assert (ours == dropping).all()
    assert len(keeping) < len(dropping)  # more samples where the tail is dropped than where it is kept


# --- Splits -----------------------------------------------------------------------------------------------------------


SPLITS = ["949,50,1", "969, 30, 1", "98,2", " 1 ,2, 3 ", "1.5,.5", "0.8,0.1,0.1", "33,33,33", "0,1,0", "5."]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("sequences", [1, 3, 10, 50, 99, 12345])
def test_splits_are_megatrons(split, sequences):
    shares, begin = parse_and_normalize_split(split), 0.0
    for part, share in zip(split_sequences(split, sequences), shares, strict=True):
        bounds = begin, begin + share
        begin = bounds[1]
        assert list(part) == list(range(*(int(round(bound * float(sequences))) for bound in bounds)))  # noqa: RUF046


# --- Blends -----------------------------------------------------------------------------------------------------------


def test_blends_are_parsed_as_megatrons():
    for values in ("a b c", "0.3 a 0.7 b", "1e-3 a 2 b 1 c", "1 2"):
        prefixes, weights = get_blend_from_list(values.split())
        blend = parse_blend(values.split())
        assert (list(blend.prefixes), blend.weights) == (prefixes, tuple(weights) if weights else None)


WEIGHTS = {
    "two": [0.3, 0.7],
    "equal": [1.0] * 7,
    "rare": [1e-5, 1.0, 0.5],
    "halves": list(0.5 ** np.arange(12)),
    "random": list(np.random.RandomState(0).rand(40)),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_blend_walk_is_the_compiled_one(weights):
    size = 200_000
    shares = (np.array(weights) / np.sum(weights)).tolist()
    index, number = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(index, number, shares, len(shares), size, False)
    ours = build_blend_index(shares, size)
    assert ours.dtype == index.dtype
    assert (ours == index).all()
    assert (number_within(ours) == number).all()


@pytest.mark.parametrize("sizes", [[1, 1, 1], [3, 50_000], [700, 1, 20_000, 333], [64] * 40])
def test_exhaustive_walk_is_the_compiled_one(sizes):
    index, number = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(index, number, sizes, len(sizes))
    parts = [range(size) for size in sizes]
    ours = BlendedDataset(parts, None, None)
    assert (ours.dataset_index == index).all()
    assert (ours.dataset_sample_index == number).all()


@pytest.fixture
def alone(monkeypatch):
    """Megatron's blend asks for its rank even where nothing is distributed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)


def built_by_megatron(cache, sizes, sequence, **options):
    config = settings(cache, sequence, **options)
    return BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, sizes, lambda: True, config).build()


def as_lists(samples):
    return [(sample["tokens"].tolist(), sample["labels"].tolist()) for sample in samples]


def same(ours, theirs, samples):
    found = [labelled(ours[i]) for i in range(samples)]
    return as_lists(found) == as_lists(theirs[i] for i in range(samples))


def drawn(prefixes, weights, samples, sequence, split, part):
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    shares = (
        parse_blend([str(v) for pair in zip(weights, prefixes, strict=True) for v in pair]).shares if weights else None
    )
    wanted = samples_of_parts(samples, shares) if weights else [None] * len(prefixes)
    parts = [
        GPTDataset(indexed, split_sequences(split, len(indexed))[part], number, sequence, 1234)
        for indexed, number in zip(datasets, wanted, strict=True)
    ]
    return BlendedDataset(parts, shares, samples)


@pytest.mark.parametrize("weights", [[30.0, 1.0, 2.0], [0.1, 0.1, 0.1]])
@pytest.mark.parametrize(("split", "sizes"), [("80,20,0", (150, 40, 0)), ("1,1,1", (20, 500, 7))])
def test_weighted_blend_is_megatrons(prefixes, tmp_path, alone, weights, split, sizes):
    blend = (prefixes, [float(weight) for weight in weights])
    theirs = built_by_megatron(tmp_path, list(sizes), 12, blend=blend, split=split)
    for part, samples in enumerate(sizes):
        if samples:
            ours = drawn(prefixes, weights, samples, 12, split, part)
            assert len(ours) == samples <= len(theirs[part])
            assert (ours.dataset_index == theirs[part].dataset_index[:samples]).all()
            assert (ours.dataset_sample_index == theirs[part].dataset_sample_index[:samples]).all()
            assert same(ours, theirs[part], samples)


def test_blend_without_weights_is_megatrons(prefixes, tmp_path, alone):
    theirs = built_by_megatron(tmp_path, [100, 20, 0], 12, blend=(prefixes, None), split="80,20,0")
    for part, samples in enumerate((100, 20)):
        assert same(drawn(prefixes, None, samples, 12, "80,20,0", part), theirs[part], samples)
    everything = built_by_megatron(tmp_path / "all", [None, None, None], 12, blend=(prefixes, None), split="80,20,0")
    ours = drawn(prefixes, None, None, 12, "80,20,0", 0)
    assert len(ours) == len(everything[0])
    assert same(ours, everything[0], len(ours))


def test_blend_of_each_part_is_megatrons(prefixes, tmp_path, alone):
    blends = [(prefixes[:2], [0.25, 0.75]), ([prefixes[2]], None), None]
    theirs = built_by_megatron(tmp_path, [80, 30, 0], 12, blend_per_split=blends)
    assert same(drawn(prefixes[:2], [0.25, 0.75], 80, 12, "1", 0), theirs[0], 80)
    indexed = IndexedDataset(prefixes[2])
    assert same(GPTDataset(indexed, range(len(indexed)), 30, 12, 1234), theirs[1], 30)
    assert theirs[2] is None
