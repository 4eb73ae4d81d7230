"""Sentences as sequences, by rules written here: NLTK's are a download, with which tests/parity compares."""

import json

import numpy as np
import pytest

from mjax.data.bert import BertDataset
from mjax.data.indexed import IndexedDataset
from mjax.data.masking import WordPieces
from mjax.data.metadata import read_metadata, tokenizer_folder
from mjax.data.sentences import load_splitter, split
from mjax.data.tokenizers import tokenizer_from_folder
from tests.data.test_prepare import run
from tests.data.vocabularies import bert_file


@pytest.fixture
def sentence_rules(tmp_path, monkeypatch):
    """A language whose only abbreviation is "dr."."""
    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "tiny"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk")])


def test_each_sentence_is_a_sequence_and_the_last_ends_the_document(sentence_rules, tmp_path):
    texts = ["Dr. Smith sat. He rose.  And left!", "", "Alone."]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(tmp_path / "a.jsonl", output=tmp_path / "d", tokenizer="bytes", split_sentences=True, language="tiny")
    data = IndexedDataset(tmp_path / "d")
    decode = tokenizer_from_folder(tokenizer_folder(tmp_path / "d")).decode
    assert [decode(data.get(i)) for i in range(len(data))] == [
        "Dr. Smith sat.", "He rose.", "And left!<|endoftext|>", "Alone.<|endoftext|>",
    ]  # fmt: skip
    assert data.document_indices.tolist() == [0, 3, 3, 4]
    metadata = read_metadata(tmp_path / "d")
    assert (metadata.sentences, metadata.sequences, metadata.documents) == ("tiny", 4, 3)


def test_sentences_end_at_every_millionth_character(sentence_rules):
    sentences = split("a" * 1_500_000 + ". And b.", load_splitter("tiny"))
    assert [len(sentence) for sentence in sentences] == [1_000_000, 500_001, 6]


def test_what_prepare_writes_becomes_samples_of_bert(sentence_rules, tmp_path):
    text = "The quick brown fox jumps. It was the best of times. The lazy dog."
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    vocabulary = bert_file(tmp_path / "vocabulary", lowercase=True)
    sentences = {"split_sentences": True, "language": "tiny", "append_eod": False}
    run(tmp_path / "a.jsonl", output=tmp_path / "d", tokenizer=f"bert-uncased:{vocabulary}", **sentences)
    tokenizer = tokenizer_from_folder(tokenizer_folder(tmp_path / "d"))
    indexed = IndexedDataset(tmp_path / "d")
    sample = BertDataset(indexed, range(1), 1, 128, 1, WordPieces.of(tokenizer))[0]
    tokens = np.where(sample["loss_mask"], sample["labels"], sample["tokens"])[sample["documents"] == 0]
    types = sample["token_types"][: len(tokens)]
    halves = [tokens[types == 0][1:-1], tokens[types == 1][:-1]]  # without [CLS] and [SEP]
    halves = [tokenizer.decode(half) for half in halves]
    in_order = halves[::-1] if sample["sentence_order"] else halves
    assert " ".join(in_order) == "the quick brown fox jumps . it was the best of times . the lazy dog ."
