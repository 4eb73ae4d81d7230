"""Data that `--data.*` opens: one dataset, blends, a blend for every part, sentences for a BERT; and rejections."""

from dataclasses import replace

import numpy as np
import pytest

from mjax.config import BERTConfig, Config, DataConfig, GPTConfig, TrainConfig
from mjax.config.checks import validate
from mjax.config.datasets import DatasetMetadata
from mjax.data import cache
from mjax.data.indexed import IndexedDatasetWriter, tokenizer_folder, write_metadata
from mjax.data.sources import open_data
from mjax.data.tokenizers import ByteTokenizer, load_tokenizer
from mjax.errors import UsageError

EOD = 256


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Datasets a, b and c of bytes: all tokens of a are 1, of b 2, and of c 3; 40 documents of 20 each."""
    monkeypatch.chdir(tmp_path)
    for token, name in enumerate("abc", start=1):
        with IndexedDatasetWriter(name, 257) as writer:
            for _ in range(40):
                writer.add_document([token] * 19 + [EOD])
    return tmp_path


def described(name, tokenizer=None, append_eod=True, **changes):
    """Write the metadata of a tokenizer next to a dataset, as `mjax prepare` does."""
    tokenizer = tokenizer or ByteTokenizer()
    fields = {"tokenizer": tokenizer.scheme, "vocabulary": tokenizer.vocabulary, "eod": tokenizer.eod, **changes}
    fields |= {"documents": 40, "tokens": 800, "text_bytes": 760, "inputs": [], "mjax_version": "0"}
    write_metadata(name, DatasetMetadata(append_eod=append_eod, **fields))
    tokenizer.save(tokenizer_folder(name))


def config_of(steps=10, batch=4, **data):
    return Config(
        model=GPTConfig(sequence=16, vocabulary=257),
        data=DataConfig(**data),
        train=TrainConfig(steps=steps, global_batch=batch, micro_batch=1, eval_interval=5, eval_batches=1),
    )


def rows(batches, steps):
    """Return the tokens of every sample, in order."""
    return [row for step in range(steps) for row in batches.batch_at(step)["tokens"].tolist()]


def origins(batches, steps):
    """The dataset that each sample comes from."""
    return "".join(" abc"[min(sample)] for sample in rows(batches, steps))


# --- What is opened ---------------------------------------------------------------------------------------------------


def test_one_dataset_is_split_into_parts(data):
    opened = open_data(config_of(path="a", split="75,25,0"))
    assert origins(opened.training, 10) == 40 * "a"
    drawn = [set(part.dataset.document_index.tolist()) for part in (opened.training, opened.validation)]
    assert drawn == [set(range(30)), set(range(30, 40))]


def test_weighted_blend_mixes_by_its_shares(data):
    opened = open_data(config_of(path=("1", "a", "2", "b", "1", "c"), split="75,25,0"))
    found = origins(opened.training, 10)
    assert found[:4] == "bacb"
    assert [found.count(name) for name in "abc"] == [10, 20, 10]
    assert [origins(opened.validation, 1).count(name) for name in "abc"] == [1, 2, 1]


def test_each_part_can_have_a_blend(data):
    opened = open_data(config_of(train_path=("1", "a", "1", "b"), valid_path=("c",)))
    assert set(origins(opened.training, 10)) == {"a", "b"}
    assert set(origins(opened.validation, 1)) == {"c"}
    assert set(opened.validation.dataset.document_index.tolist()) == set(range(40))  # all of c, whatever the split


def test_samples_have_the_arrays_asked_for(data):
    described("a")
    plain = open_data(config_of(path="a")).training.batch_at(0)
    asked = config_of(path="a", reset_positions=True, reset_attention=True, mask_eod_loss=True)
    batch = open_data(asked).training.batch_at(0)
    assert {name: array.dtype.name for name, array in batch.items()} == asked.data.batch_types()
    assert (batch["tokens"] == plain["tokens"]).all()
    assert (batch["loss_mask"] == (plain["tokens"] != EOD)).all()


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """Conversations of 1 to 12 tokens, each of one id: 30 in d, 11 in e, and in f one."""
    monkeypatch.chdir(tmp_path)
    for name, numbers in {"d": range(1, 31), "e": range(31, 42), "f": [42]}.items():
        with IndexedDatasetWriter(name, 257) as writer:
            for token in numbers:
                tokens = np.full(2 + token % 11, token)
                writer.add_documents(tokens, np.array([len(tokens)]), np.array([1]), np.arange(len(tokens)) == 1)
    return tmp_path


def times_seen(batches, steps):
    """Count of steps that train the only trained label of each conversation is trained."""
    batches = [batches.batch_at(step) for step in range(steps)]
    labels = np.concatenate([batch["labels"][batch["loss_mask"]] for batch in batches])
    return dict(zip(*np.unique(labels, return_counts=True), strict=True))


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("files", [("d",), ("d", "e"), ("e", "f", "d")])
@pytest.mark.parametrize(("epochs", "batch"), [(1, 4), (2, 7), (3, 64)])
def test_whole_epochs_have_each_conversation_as_often(pack, files, epochs, batch, chats):
    """Whatever the batch, of one file or more; a validation has one epoch, also where a file has no part of it."""
    config = config_of(batch=batch, path=files, split="75,25,0", conversations=True, pack=pack)
    one = sum(part.sequences for part in parts_of(open_data(config).training.dataset.dataset))
    steps = -(-epochs * one // batch)
    config = replace(config, data=replace(config.data, train_samples=epochs * one))
    config = replace(config, train=replace(config.train, steps=steps, eval_batches=12))
    validate(config)
    opened = open_data(config)
    training, validation = times_seen(opened.training, steps), times_seen(opened.validation, 12)
    assert set(training.values()) == {epochs}
    assert set(validation.values()) == {1}
    assert len(training) + len(validation) == sum({"d": 30, "e": 11, "f": 1}[name] for name in files)
    assert f"{epochs}.0 epochs" in opened.summary
    more = open_data(replace(config, data=replace(config.data, train_samples=None)))  # goes on into the next epoch
    assert (more.training.batch_at(steps - 1)["loss_mask"].sum(axis=1) > 0).all()
    if steps > 1:
        with pytest.raises(UsageError, match="is below the"):  # steps without any label
            validate(replace(config, data=replace(config.data, train_samples=(steps - 1) * batch)))


def parts_of(dataset):
    return getattr(dataset, "datasets", [dataset])


def test_mock_validation_is_not_the_training_data():
    opened = open_data(config_of(mock=True))
    assert (opened.training.batch_at(0)["tokens"] != opened.validation.batch_at(0)["tokens"]).any()


def test_nothing_is_drawn_for_a_run_that_cannot_be(data, monkeypatch):
    """A mesh that does not exist, and an implausible number of epochs."""
    monkeypatch.setattr(cache, "MIN_CACHED_BYTES", 0)

    def refuse(samples):
        raise UsageError(f"not with {samples} samples")

    with pytest.raises(UsageError, match="not with 40 samples"):
        open_data(config_of(path="a"), refuse)
    with pytest.raises(
        UsageError, match=r"4,000,000,000 samples are .* epochs of the 760 tokens in the training split"
    ):
        open_data(config_of(path="a", steps=10**9))
    assert not list(data.glob("*.cache"))
    (note,) = open_data(config_of(path="a", steps=1000)).notes
    assert note == "note: 85 epochs of the same text teach little after the first few; 10 of them are --train.steps 117"


def test_indices_are_kept_where_config_says(data, monkeypatch):
    monkeypatch.setattr(cache, "MIN_CACHED_BYTES", 0)
    path = ("0.3", "a", "0.7", "b")
    first = open_data(config_of(path=path))
    assert sorted(file.name for file in data.glob("*.cache")) == ["a.cache", "b.cache"]
    chosen = open_data(config_of(path=path, cache="chosen"))
    assert len(list((data / "chosen").glob("*.json"))) == 6  # two datasets and a blend, for training and validation
    assert rows(first.training, 10) == rows(chosen.training, 10)


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def test_datasets_of_different_tokenizers_are_not_blended(data):
    for name in "bc":
        described(name)
    opened = open_data(config_of(path=("1", "a", "1", "b", "1", "c")))  # that of a is unknown
    assert opened.tokenizer == tokenizer_folder("b")
    described("a")
    described("b", vocabulary=250, eod=0)
    with pytest.raises(UsageError, match=r"a and b were made with different tokenizers \(bytes of 257 ids, 256 at"):
        open_data(config_of(path=("1", "a", "1", "b")))
    (tokenizer_folder("c") / "vocab.txt").write_text("another vocabulary of the same size")
    with pytest.raises(UsageError, match="a and c were made with different tokenizers"):
        open_data(config_of(train_path=("a",), valid_path=("c",)))


def test_ids_without_their_meaning_are_rejected(data):
    with pytest.raises(UsageError, match=r"a\.json does not exist, so give the end-of-document id with --data\.eod"):
        open_data(config_of(path="a", reset_positions=True))


# --- Sentences for a BERT ---------------------------------------------------------------------------------------------

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{letter}" for letter in "abcdefghij")]


def sentences(prefix, spec="bert-uncased:vocab.txt", append_eod=False):
    """60 documents of 6 sentences, and the vocabulary PIECES."""
    with open("vocab.txt", "w") as file:
        file.write("\n".join(PIECES) + "\n")
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, 257) as writer:
        for _ in range(60):
            writer.add_document(*(random.integers(5, len(PIECES), random.integers(3, 9)) for _ in range(6)))
    described(prefix, load_tokenizer(spec), append_eod)


def bert_config(*path, **data):
    model = BERTConfig(layers=1, hidden=8, heads=1, sequence=32, vocabulary=300)
    return replace(config_of(batch=8, path=path, split="80,20", **data), model=model)


def test_bert_reads_the_samples_of_its_part(data):
    sentences("d")
    config = bert_config("d")
    opened = open_data(config)
    shapes = {name: (array.shape, str(array.dtype)) for name, array in opened.training.batch_at(3).items()}
    assert shapes == {name: ((8, *shape), kind) for name, (shape, kind) in config.batch_arrays().items()}
    training, validation = opened.training.dataset, opened.validation.dataset
    # 48 of 60 documents of 6 sentences are for training, the others for validation.
    assert training.pair_index[:, 1].max() <= 48 * 6 <= validation.pair_index[:, 0].min()
    sentences("e")
    blend = open_data(bert_config("0.75", "d", "0.25", "e")).training.dataset
    assert np.bincount(blend.dataset_index[:80]).tolist() == [60, 20]
    assert (training.pair_index[:, 2] < 29).any()


def test_bert_rejects_data_for_other_models(data):
    sentences("d")
    for options, words in (
        ({"spec": "bytes"}, "tokenizer of kind bytes, not a BERT's; type mjax prepare FILES --tokenizer"),
        ({"append_eod": True}, "e ends each text with an end-of-document token"),
    ):
        sentences("e", **options)
        with pytest.raises(UsageError, match=words):
            open_data(bert_config("e"))
    with pytest.raises(UsageError, match="which a BERT needs to mask words; type mjax prepare"):
        open_data(bert_config("a"))


# --- The config -------------------------------------------------------------------------------------------------------
