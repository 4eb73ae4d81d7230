"""What `--data.*` opens: one dataset, blends, a blend for every part, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import tyro

from mjax.commands.train import TrainArguments
from mjax.config import Config, DataConfig, GPTConfig, TrainConfig, from_dict, to_dict
from mjax.data import cache
from mjax.data.indexed import IndexedDatasetWriter
from mjax.data.metadata import DatasetMetadata, tokenizer_folder, write_metadata
from mjax.data.sources import open_data
from mjax.data.tokenizers import ByteTokenizer
from mjax.errors import UsageError
from mjax.validation import validate

EOD = 256


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Datasets a, b and c of bytes: the tokens of a are all 1, those of b 2, and of c 3; 40 documents of 20 each."""
    monkeypatch.chdir(tmp_path)
    for token, name in enumerate("abc", start=1):
        with IndexedDatasetWriter(name, 257) as writer:
            for _ in range(40):
                writer.add_document([token] * 19 + [EOD])
    return tmp_path


def described(name, tokenizer="bytes", vocabulary=257, eod=EOD):
    """Note a tokenizer beside a dataset, as `mjax prepare` does."""
    fields = {"append_eod": True, "documents": 40, "tokens": 800, "text_bytes": 760, "inputs": [], "mjax_version": "0"}
    write_metadata(name, DatasetMetadata(tokenizer=tokenizer, vocabulary=vocabulary, eod=eod, **fields))
    ByteTokenizer().save(tokenizer_folder(name))


def config_of(steps=10, batch=4, eval_interval=5, **data):
    return Config(
        model=GPTConfig(sequence=16, vocabulary=257),
        data=DataConfig(**data),
        train=TrainConfig(steps=steps, global_batch=batch, micro_batch=1, eval_interval=eval_interval, eval_batches=1),
    )


def rows(batches, steps):
    """Of every sample its tokens, in order."""
    return [row for step in range(steps) for row in batches.at(step)["tokens"].tolist()]


def origins(samples):
    """The dataset that each sample comes from."""
    return "".join(" abc"[min(sample)] for sample in samples)


# --- What is opened ---------------------------------------------------------------------------------------------------


def test_one_dataset_is_split_into_its_parts(data):
    opened = open_data(config_of(path="a", split="75,25,0"))
    assert opened.summary == "a: 800 tokens in 40 documents, 2 epochs"
    assert origins(rows(opened.training, 10)) == 40 * "a"
    assert opened.notes == ()


def test_a_blend_with_weights_mixes_its_datasets_and_says_their_shares(data):
    opened = open_data(config_of(path=("1", "a", "2", "b", "1", "c"), split="75,25,0"))
    found = origins(rows(opened.training, 10))
    assert found[:4] == "bacb"
    assert [found.count(name) for name in "abc"] == [10, 20, 10]
    assert opened.summary == " + ".join(
        f"{share}% {name} (800 tokens in 40 documents, 1 epoch)"
        for share, name in (("25.0", "a"), ("50.0", "b"), ("25.0", "c"))
    )
    assert [origins(rows(opened.validation, 1)).count(name) for name in "abc"] == [1, 2, 1]


def test_a_blend_without_weights_gives_everything_once(data):
    opened = open_data(config_of(steps=18, path=("a", "b"), split="75,25,0"))
    found = origins(rows(opened.training, 18))
    assert found.count("a") == found.count("b") == 36  # 599 // 16 is 37 of each
    assert opened.summary.startswith("50.0% a (")
    with pytest.raises(UsageError, match="74 in all, and 76 are needed"):
        open_data(config_of(steps=19, path=("a", "b"), split="75,25,0"))


def test_every_part_can_have_a_blend_of_its_own(data):
    opened = open_data(config_of(train_path=("1", "a", "1", "b"), valid_path=("c",)))
    assert set(origins(rows(opened.training, 10))) == {"a", "b"}
    assert set(origins(rows(opened.validation, 1))) == {"c"}
    assert opened.summary.startswith("50.0% a (800 tokens in 40 documents, 1 epoch) + 50.0% b (")
    assert set(opened.validation.dataset.document_index.tolist()) == set(range(40))  # all of c, whatever the split
    with pytest.raises(UsageError, match=r"missing\.bin does not exist"):
        open_data(config_of(train_path=("a",), valid_path=("c",), test_path=("missing",)))


def test_the_order_of_a_blend_does_not_depend_on_the_batch_size_or_on_who_reads_which_rows(data):
    path = ("0.3", "a", "0.7", "b")
    small, large = (open_data(config_of(40 // batch, batch, path=path, samples=40)).training for batch in (2, 8))
    assert rows(small, 20) == rows(large, 5)
    split = [large.at(3, slice(begin, begin + 2))["tokens"].tolist() for begin in (0, 2, 4, 6)]
    assert sum(split, []) == large.at(3)["tokens"].tolist()  # noqa: RUF017
    assert large.at(3)["tokens"].tolist() == rows(large, 4)[-8:]  # at once, or after what comes before


def test_samples_say_what_is_asked_for_and_nothing_else(data):
    described("a")
    plain = open_data(config_of(path="a")).training.at(0)
    assert list(plain) == ["tokens", "labels"]
    asked = config_of(path="a", reset_positions=True, reset_attention=True, mask_eod_loss=True)
    batch = open_data(asked).training.at(0)
    assert {name: array.dtype.name for name, array in batch.items()} == asked.data.batch_types()
    assert (batch["tokens"] == plain["tokens"]).all()
    assert (batch["loss_mask"] == (plain["tokens"] != EOD)).all()
    for tokens, positions, documents in zip(batch["tokens"], batch["positions"], batch["documents"], strict=True):
        end = tokens.tolist().index(EOD) + 1 if EOD in tokens[:-1] else 16
        assert positions.tolist() == [*range(end), *range(16 - end)]
        assert documents.tolist() == [0] * end + [1] * (16 - end)


def test_a_partial_validation_sample_is_kept_where_asked_and_its_padding_does_not_count(data):
    # Two epochs of 10 documents are 400 tokens: 24 samples and a tail of 15 labels, which this seed draws among the 13.
    config = config_of(path="a", split="75,25,0", validation_tail=True)
    opened = open_data(replace(config, train=replace(config.train, global_batch=13, micro_batch=13, steps=3)))
    batch = opened.validation.at(0)
    assert batch["tokens"].shape == (13, 16)
    assert sorted(batch["loss_mask"].sum(axis=1).tolist()) == [15] + [16] * 12
    assert (len(opened.training.dataset), len(opened.validation.dataset)) == (1199 // 16, 399 // 16 + 1)
    assert list(opened.training.at(0)) == ["tokens", "labels"]


def test_mock_data_take_the_same_options(data):
    eod = int(open_data(config_of(mock=True)).training.at(0)["tokens"][0, 3])
    batch = open_data(config_of(mock=True, reset_attention=True, eod=eod)).training.at(0)
    assert list(batch) == ["tokens", "labels", "documents"]
    assert batch["documents"][0].tolist() == [0] * 4 + [1] * 12


def test_indices_are_kept_where_the_config_says_and_notes_tell_of_trouble(data, monkeypatch):
    monkeypatch.setattr(cache, "WORTH_KEEPING", 0)
    path = ("0.3", "a", "0.7", "b")
    first = open_data(config_of(path=path))
    assert sorted(file.name for file in data.glob("*.cache")) == ["a.cache", "b.cache"]
    assert first.notes == ()
    (data / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(data / "home"))
    blocked = open_data(config_of(path=path, cache="file/c"))
    assert blocked.notes == (
        "file/c cannot be used (Not a directory): the indices are built in memory at every start; "
        "name another folder with --data.cache",
    )
    chosen = open_data(config_of(path=path, cache="chosen"))
    assert len(list((data / "chosen").glob("*.json"))) == 6  # two datasets and a blend, for training and validation
    assert rows(first.training, 10) == rows(blocked.training, 10) == rows(chosen.training, 10)


# --- Tokenizers -------------------------------------------------------------------------------------------------------


def test_datasets_of_one_tokenizer_and_of_none_known_blend_and_the_tokenizer_travels_along(data):
    described("b")
    described("c")
    opened = open_data(config_of(path=("1", "a", "1", "b", "1", "c")))
    assert opened.tokenizer == tokenizer_folder("b")


def test_datasets_of_different_tokenizers_are_not_blended(data):
    described("a")
    described("b", vocabulary=250, eod=0)
    with pytest.raises(UsageError, match=r"a and b were made with different tokenizers \(bytes of 257 ids, 256 at"):
        open_data(config_of(path=("1", "a", "1", "b")))


def test_tokenizers_of_one_name_and_size_with_other_files_are_not_blended(data):
    described("a")
    described("b")
    (tokenizer_folder("b") / "vocab.txt").write_text("another vocabulary")
    with pytest.raises(UsageError, match="different tokenizers"):
        open_data(config_of(train_path=("a",), valid_path=("b",)))


def test_resets_need_to_know_which_id_ends_a_document(data):
    with pytest.raises(UsageError, match=r"the end-of-document id of a is unknown, .* give it with --data\.eod"):
        open_data(config_of(path="a", reset_positions=True))
    batch = open_data(config_of(path="a", reset_positions=True, eod=EOD)).training.at(0)
    assert (batch["positions"] != np.arange(16)).any()


def test_ids_beyond_the_vocabulary_are_refused_when_they_are_read(data):
    config = config_of(path="a")
    opened = open_data(replace(config, model=replace(config.model, vocabulary=200)))
    with pytest.raises(
        UsageError, match=r"of a holds the id 256 and the model's vocabulary is 200; set --model\.vocab"
    ):
        rows(opened.training, 10)


# --- The config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "path"), [("data/a", ("data/a",)), (None, ()), (["1", "x"], ("1", "x"))])
def test_a_config_json_from_before_blends_still_opens(saved, path):
    config = from_dict({"data": {"path": saved}})
    assert config.data.path == path
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("saved", [3, [1, "x"], {"a": 1}])
def test_a_path_that_is_none_is_refused(saved):
    with pytest.raises(UsageError, match=r"data\.path is .*, which is not a list of text"):
        from_dict({"data": {"path": saved}})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": ("a",), "train_path": ("b",)}, "leave out these three, or --data.path"),
        ({"path": ("a",), "test_path": ("b",)}, "leave out these three, or --data.path"),
        ({"train_path": ("a",)}, "add --data.valid-path, or --train.eval-interval 0"),
        ({"path": ("1", "a", "b")}, "write a weight before every prefix"),
        ({"train_path": ("a",), "valid_path": ("0", "a")}, "--data.valid-path 0 a has a weight that is not above 0"),
        ({"path": ("a",), "split": "1,x"}, "--data.split '1,x' is not proportions"),
        ({"path": ("a",), "eod": -1}, "--data.eod is -1; it must be 0 or more"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_starts(settings, words):
    config = config_of(**settings)
    with pytest.raises(UsageError) as error:
        validate(replace(config, optimizer=replace(config.optimizer, min_learning_rate=0.0)))
    assert words in str(error.value)


def test_a_blend_is_written_on_the_command_line_as_in_megatron():
    arguments = tyro.cli(TrainArguments, args=["--data.path", "0.3", "data/a", "0.7", "data/b", "--name", "x"])
    assert arguments.settings.data.path == ("0.3", "data/a", "0.7", "data/b")
    assert tyro.cli(TrainArguments, args=["--data.path"]).settings.data.path == ()
