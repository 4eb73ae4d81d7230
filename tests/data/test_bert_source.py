"""A BERT's run on prepared sentences: what `open_data` gives, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from mjax.config import BERTConfig, Config, DataConfig, TrainConfig
from mjax.data.bert import BertDataset
from mjax.data.indexed import IndexedDatasetWriter
from mjax.data.metadata import DatasetMetadata, tokenizer_folder, write_metadata
from mjax.data.sources import open_data
from mjax.data.tokenizers import load_tokenizer
from mjax.errors import UsageError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{letter}" for letter in "abcdefghij")]


def write(prefix, spec="bert-uncased:{}", append_eod=False):
    vocabulary = prefix.parent / "vocab.txt"
    vocabulary.write_text("\n".join(PIECES) + "\n")
    tokenizer = load_tokenizer(spec.format(vocabulary))
    tokenizer.save(tokenizer_folder(prefix))
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, tokenizer.vocabulary) as writer:
        for _ in range(60):
            writer.add_document(*(random.integers(5, len(PIECES), random.integers(3, 9)) for _ in range(6)))
    write_metadata(
        prefix,
        DatasetMetadata(
            tokenizer=tokenizer.scheme, vocabulary=tokenizer.vocabulary, eod=tokenizer.eod, append_eod=append_eod,
            documents=60, tokens=writer.tokens, text_bytes=1000, inputs=["x"], mjax_version="0",
        ),
    )  # fmt: skip
    return str(prefix)


def config_of(*path):
    return Config(
        model=BERTConfig(layers=1, hidden=8, heads=1, sequence=32, vocabulary=32),
        data=DataConfig(path=path, split="80,20"),
        train=TrainConfig(steps=10, global_batch=8, micro_batch=4, eval_interval=5, eval_batches=1),
    )


def test_a_run_on_sentences_reads_the_samples_of_its_part_in_their_order(tmp_path):
    config = config_of(write(tmp_path / "d"))
    data = open_data(config)
    batch = data.training.at(3)
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        name: ((8, *shape), kind) for name, (shape, kind) in config.batch_arrays().items()
    }
    training, validation = data.training.dataset, data.validation.dataset
    assert isinstance(training, BertDataset)
    for row in range(8):
        for name, array in training[24 + row].items():
            np.testing.assert_array_equal(batch[name][row], array)
    # 48 of 60 documents of 6 sentences are for training, the others for validation.
    assert training.pair_index[:, 1].max() <= 48 * 6 <= validation.pair_index[:, 0].min()
    assert "60 documents" in data.summary
    assert data.tokenizer == tokenizer_folder(tmp_path / "d")


def test_masks_and_short_samples_are_as_many_as_asked_for(tmp_path):
    config = config_of(write(tmp_path / "d"))

    def share(**probabilities):
        training = open_data(replace(config, data=replace(config.data, **probabilities))).training.dataset
        samples = [training[i] for i in range(len(training))]
        masked = sum(sample["loss_mask"].sum() for sample in samples)
        return masked / sum((sample["documents"] == 0).sum() for sample in samples), training.pair_index[:, 2]

    masked, wanted = share()
    assert 0.10 < masked < 0.17
    assert 0 < (wanted < 29).mean() < 0.3
    masked, wanted = share(mask_probability=0.4, short_probability=0.0)
    assert 0.3 < masked < 0.42  # a span of whole words that is too long is dropped
    assert (wanted == 29).all()
    assert (share(short_probability=1.0)[1] < 29).mean() > 0.9


def test_a_blend_of_sentences_gives_from_each_its_share(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    paths = [write(tmp_path / name / "d") for name in ("a", "b")]
    blend = open_data(config_of("0.75", paths[0], "0.25", paths[1])).training.dataset
    assert np.bincount(blend.dataset_index[:80]).tolist() == [60, 20]
    assert blend[0].keys() == config_of().batch_arrays().keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec": "bytes"}, "tokenizer of kind bytes, not a BERT's; type python -m mjax prepare FILES --tokenizer"),
        ({"append_eod": True}, "ends each text with an end-of-document token"),
    ],
)
def test_data_that_were_prepared_for_another_model_are_refused(tmp_path, options, words):
    config = config_of(write(tmp_path / "d", **options))
    with pytest.raises(UsageError, match=words):
        open_data(replace(config, model=replace(config.model, vocabulary=300)))


def test_a_dataset_with_ends_of_documents_is_found_anywhere_in_a_blend(tmp_path):
    paths = [write(tmp_path / "d"), write(tmp_path / "e", append_eod=True)]
    with pytest.raises(UsageError, match="e ends each text with an end-of-document token"):
        open_data(config_of("0.5", paths[0], "0.5", paths[1]))


def test_sentences_without_their_tokenizer_are_refused(tmp_path):
    path = write(tmp_path / "d")
    tokenizer_folder(path).rename(tmp_path / "gone")
    with pytest.raises(UsageError, match="which a BERT needs to mask words; type python -m mjax prepare"):
        open_data(config_of(path))
