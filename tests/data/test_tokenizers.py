"""Laws of tokenizers of every kind: `encode`, the folder they live in, and rejections."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mjax.data.tokenizers import (
    EOD_TOKENS,
    SCHEMES,
    bos_token_id,
    is_same_tokenizer,
    load_tokenizer,
    tokenizer_from_folder,
)
from mjax.errors import UsageError
from tests.data.vocabularies import NAMES, NASTY, TEXTS, bert_file, gpt2_files, specs

LOSSLESS = {"gpt2", "hf, byte pairs", "bytes"}


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory):
    found = specs(tmp_path_factory.mktemp("vocabularies"))
    assert {spec.partition(":")[0] for spec in found.values()} == set(SCHEMES)
    return found


@pytest.fixture(scope="module", params=NAMES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind, spec_of):
    return load_tokenizer(spec_of[kind])


# --- Encoding ---------------------------------------------------------------------------------------------------------

FRAGMENTS = [*EOD_TOKENS, "<|", "endoftext", "|>", "<", "/s>", "[", "SEP", "]", "sep", " ", "▁", "a", "\n", "é", "漢"]


def random_texts(count=150):
    """Fragments of special tokens, and characters from all of Unicode but half surrogate pairs."""
    draw = random.Random(0)
    for _ in range(count):
        codes = [draw.choice([draw.randrange(0x2FF), draw.randrange(0xE000, 0x110000)]) for _ in range(6)]
        parts = [*draw.choices(FRAGMENTS, k=draw.randrange(8)), *map(chr, codes[: draw.randrange(7)])]
        draw.shuffle(parts)
        yield "".join(parts)


def test_encoding_obeys_the_laws(kind, tokenizer):
    """No end of document in the text, no id out of range, only tokens of the text; a batch equals its texts."""
    texts = [*NASTY.values(), *random_texts(), "ab漢c" * 25_000]
    batch = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, batch, strict=True):
        assert tokenizer.encode(text) == ids
        assert all(type(token) is int and 0 <= token < tokenizer.vocabulary for token in ids), repr(text)
        assert tokenizer.eod not in ids, repr(text)
        assert len(ids) <= 4 * len(text) + bool(text)  # sentencepiece may put a space in front, and nothing else
        if kind in LOSSLESS:
            assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([]) == []


def test_half_of_a_surrogate_pair_is_rejected(tokenizer):
    with pytest.raises(UsageError, match=r"character 1 of the text is U\+DC00, an unpaired surrogate"):
        tokenizer.encode("a\udc00b")
    with pytest.raises(UsageError, match="surrogate"):
        tokenizer.encode_batch(["fine", "\ud83d"])


def test_decoding_shows_ends_and_unknown_ids(kind, tokenizer):
    first, last = tokenizer.encode("times"), tokenizer.encode("the best")
    ids = [*first, tokenizer.eod, tokenizer.eod, *last]
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids)) == "times<|endoftext|><|endoftext|>the best"
    assert tokenizer.decode([*first, tokenizer.vocabulary, 2**31 - 1, *last]) == "times\ufffd\ufffdthe best"


# --- The folder -------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_saved_tokenizer_is_rebuilt(kind, tokenizer, spec_of, tmp_path):
    """The folder has the files that were given, byte for byte."""
    folder = tmp_path / "run" / "tokenizer"
    scheme, _, given = spec_of[kind].partition(":")
    tokenizer.save(folder)
    for rebuilt in (tokenizer_from_folder(folder), load_tokenizer(f"run:{tmp_path / 'run'}")):
        assert (rebuilt.scheme, rebuilt.vocabulary, rebuilt.eod) == (scheme, tokenizer.vocabulary, tokenizer.eod)
        texts = [*TEXTS, *NASTY.values()]
        assert rebuilt.encode_batch(texts) == tokenizer.encode_batch(texts)
        rebuilt.save(tmp_path / "again")
        assert files_of(tmp_path / "again") == files_of(folder)
    if given:
        saved = [content for name, content in files_of(folder).items() if name != "mjax_tokenizer.json"]
        assert sorted(saved) == sorted(Path(file).read_bytes() for file in given.split(","))


BYTES = {"kind": "bytes", "vocabulary": 257, "eod": 256, "sha256": {}}


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("[" * 100_000, r"is not JSON \(too many objects and lists are nested\); prepare the data again"),
        (BYTES | {"sha256": []}, "does not describe a tokenizer"),
        (BYTES | {"kind": "pickle"}, "kind 'pickle'; this mjax knows gpt2, bert"),
        (BYTES | {"vocabulary": 300}, "the files have"),
    ],
)
def test_damaged_description_is_rejected(tmp_path, description, message):
    text = description if isinstance(description, str) else json.dumps(description)
    (tmp_path / "mjax_tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize("description", [[], {"kind": "bytes"}, BYTES | {"bos": "x"}])
def test_damaged_description_of_a_run_is_named(tmp_path, description):
    (tmp_path / "mjax_tokenizer.json").write_text(json.dumps(description))
    for read in (bos_token_id, lambda folder: is_same_tokenizer(folder, folder)):
        with pytest.raises(UsageError, match=r"does not describe a tokenizer: .*; prepare the data again"):
            read(tmp_path)


# --- Wrong uses -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Good files and bad ones."""
    folder = tmp_path_factory.mktemp("shelf")
    vocab, _ = gpt2_files(folder)
    ids = json.loads(vocab.read_text())
    bert_file(folder / "uncased", lowercase=True)
    bert_file(folder / "cased", lowercase=False)
    pieces = (folder / "uncased" / "vocab.txt").read_text().splitlines()
    contents = {
        "no_eod.json": json.dumps({token: i for token, i in ids.items() if token[:2] != "<|"}),
        "other_merges.txt": "Ġ t\nq q\n",
        "no_sep.txt": "\n".join(piece for piece in pieces if piece != "[SEP]"),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("x.model", "is not a known kind; use gpt2:vocab.json,merges.txt, bert-uncased:vocab.t"),
        ("run:empty", "run:empty: empty has no folder tokenizer; give a run that has one"),
        ("gpt2:merges.txt,vocab.json", "the files are swapped; use --tokenizer gpt2:vocab.json,merges.txt"),
        ("gpt2:vocab.json,other_merges.txt", "other_merges.txt does not belong to vocab.json .*`qq` out of vocabulary"),
        ("gpt2:no_eod.json,merges.txt", r"no_eod.json has no token <\|endoftext\|>"),
        ("gpt2:gpt2.tiktoken", "does not name 2 files; write --tokenizer gpt2:vocab.json,merges.txt"),
        ("bert-uncased:no_sep.txt", r"no_sep.txt lacks \[SEP\]; give BERT's vocab.txt"),
        ("bert-uncased:cased/vocab.txt", "has pieces in capitals; use --tokenizer bert-cased:cased/vocab.txt"),
        ("sentencepiece:vocab.json", "vocab.json is not a sentencepiece model"),
    ],
)
def test_unusable_tokenizer_names_a_usable_one(shelf, monkeypatch, spec, message):
    monkeypatch.chdir(shelf)
    with pytest.raises(UsageError, match=message) as error:
        load_tokenizer(spec)
    assert "\n" not in str(error.value)
