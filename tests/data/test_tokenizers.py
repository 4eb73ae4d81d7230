"""What holds for tokenizers of every kind: the laws of `encode`, the folder they live in, and what is refused."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mjax.data.tokenizers import SCHEMES, load_tokenizer, tokenizer_from_folder
from mjax.data.tokenizers.huggingface import ENDS
from mjax.errors import UsageError
from tests.data.vocabularies import (
    NAMES,
    NASTY,
    TEXTS,
    bert_file,
    gpt2_files,
    hf_byte_pairs,
    hf_unigram,
    rank_file,
    specs,
)

LOSSLESS = {"gpt2", "gpt2 from tiktoken", "hf, byte pairs", "bytes"}


@pytest.fixture(scope="module")
def spec_of(tmp_path_factory):
    return specs(tmp_path_factory.mktemp("vocabularies"))


@pytest.fixture(scope="module", params=NAMES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def tokenizer(kind, spec_of):
    return load_tokenizer(spec_of[kind])


def test_every_kind_is_tested(spec_of):
    assert list(spec_of) == NAMES
    assert {spec.partition(":")[0] for spec in spec_of.values()} == set(SCHEMES)


# --- Encoding ---------------------------------------------------------------------------------------------------------


def obeys_the_laws(tokenizer, text):
    """No end of document in the text, no id out of range, no token but those of the text."""
    ids = tokenizer.encode(text)
    assert all(type(token) is int and 0 <= token < tokenizer.vocabulary for token in ids)
    assert tokenizer.eod not in ids
    assert len(ids) <= 4 * len(text) + (1 if text else 0)  # sentencepiece may put a space in front, and nothing else
    return ids


@pytest.mark.parametrize("text", NASTY.values(), ids=NASTY.keys())
def test_a_nasty_text_obeys_the_laws(kind, tokenizer, text):
    ids = obeys_the_laws(tokenizer, text)
    if kind in LOSSLESS:
        assert tokenizer.decode(ids) == text


FRAGMENTS = [*ENDS, "<|", "endoftext", "|>", "<", "/s>", "[", "SEP", "]", "sep", " ", "▁", "a", "\n", "é", "漢"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.one_of(st.text(st.characters(codec="utf-8")), st.lists(st.sampled_from(FRAGMENTS)).map("".join)))
def test_any_text_obeys_the_laws(kind, tokenizer, text):
    ids = obeys_the_laws(tokenizer, text)
    if kind in LOSSLESS:
        assert tokenizer.decode(ids) == text


def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    texts = [*NASTY.values(), *TEXTS]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(tuple(texts[:1])) == [[]]
    assert tokenizer.encode_batch([]) == []


def test_a_million_characters_without_a_space_are_encoded(kind, tokenizer):
    text = "ab漢c" * 250_000
    ids = obeys_the_laws(tokenizer, text)
    if kind in LOSSLESS:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_half_of_a_surrogate_pair_is_refused(tokenizer, text):
    place = text.index(text.strip("ab"))
    with pytest.raises(UsageError, match=rf"character {place} of the text is U\+D[8C].., half of a surrogate pair"):
        tokenizer.encode(text)
    with pytest.raises(UsageError, match="surrogate"):
        tokenizer.encode_batch(["fine", text])


def test_the_end_of_a_document_is_shown_where_it_stands(tokenizer):
    ids = [*tokenizer.encode("times"), tokenizer.eod, tokenizer.eod, *tokenizer.encode("the best")]
    assert tokenizer.decode(ids) == "times<|endoftext|><|endoftext|>the best"
    assert tokenizer.decode(np.array(ids, np.int32)) == "times<|endoftext|><|endoftext|>the best"
    assert tokenizer.decode([]) == ""


def test_an_id_that_no_token_has_decodes_to_a_replacement(tokenizer):
    ids = [*tokenizer.encode("times"), tokenizer.vocabulary, 2**31 - 1, *tokenizer.encode("the best")]
    assert tokenizer.decode(ids) == "times\ufffd\ufffdthe best"


@pytest.mark.parametrize("kind", ["gpt2", "hf, byte pairs", "bytes"])
def test_half_a_character_decodes_to_a_replacement(spec_of, kind):
    tokenizer = load_tokenizer(spec_of[kind])
    assert tokenizer.decode(tokenizer.encode("漢")[:1]) == "\ufffd"


# --- The folder -------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_saved_tokenizer_is_rebuilt_from_the_same_bytes(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    tokenizer.save(tmp_path / "run" / "tokenizer")
    assert load_tokenizer(f"run:{tmp_path / 'run'}").eod == tokenizer.eod
    rebuilt = tokenizer_from_folder(tmp_path / "new" / "folder")
    assert (rebuilt.scheme, rebuilt.vocabulary, rebuilt.eod) == (tokenizer.scheme, tokenizer.vocabulary, tokenizer.eod)
    texts = [*TEXTS, *NASTY.values()]
    assert rebuilt.encode_batch(texts) == tokenizer.encode_batch(texts)
    rebuilt.save(tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "new" / "folder")


def test_the_files_that_were_given_are_in_the_folder(kind, spec_of, tmp_path):
    files = spec_of[kind].partition(":")[2]
    if files and "tiktoken" not in kind:
        load_tokenizer(spec_of[kind]).save(tmp_path)
        saved = files_of(tmp_path)
        del saved["mjax_tokenizer.json"]
        assert sorted(saved.values()) == sorted(Path(file).read_bytes() for file in files.split(","))


def test_one_changed_byte_in_a_folder_is_noticed(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "whole")
    draw = random.Random(0)
    for name, content in files_of(tmp_path / "whole").items():
        for _ in range(10):
            shutil.copytree(tmp_path / "whole", tmp_path / "damaged", dirs_exist_ok=True)
            place = draw.randrange(len(content))
            changed = content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
            (tmp_path / "damaged" / name).write_bytes(changed)
            try:
                found = tokenizer_from_folder(tmp_path / "damaged")
            except UsageError:
                continue
            assert name == "mjax_tokenizer.json"  # white space in it, say
            assert found.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)


def test_a_file_that_is_gone_from_a_folder_is_named(tokenizer, tmp_path):
    for name in type(tokenizer).stored:
        tokenizer.save(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(UsageError, match=rf"{name} does not exist, but .* lists it; prepare the data again"):
            tokenizer_from_folder(tmp_path)


def test_a_folder_without_a_description_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "mjax_tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"has no mjax_tokenizer\.json"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("not json", r"mjax_tokenizer\.json is not JSON .*; prepare the data again"),
        ("[" * 100_000, r"is not JSON \(too many objects and lists are nested\); prepare the data again"),
        ("[]", "does not describe a tokenizer"),
        ({"kind": "bytes"}, "does not describe a tokenizer"),
        ({"kind": "bytes", "vocabulary": "257", "eod": 256, "sha256": {}}, "does not describe a tokenizer"),
        ({"kind": ["bytes"], "vocabulary": 257, "eod": 256, "sha256": {}}, "does not describe a tokenizer"),
        ({"kind": "bytes", "vocabulary": 257, "eod": 256, "sha256": []}, "does not describe a tokenizer"),
        ({"kind": "pickle", "vocabulary": 257, "eod": 256, "sha256": {}}, "kind 'pickle'; this mjax knows gpt2, bert"),
        ({"kind": "bytes", "vocabulary": 300, "eod": 256, "sha256": {}}, "the files beside it give"),
        ({"kind": "sentencepiece", "vocabulary": 300, "eod": 1, "sha256": {}}, r"tokenizer\.model does not exist"),
    ],
)
def test_a_damaged_description_is_refused(tmp_path, description, message):
    text = description if isinstance(description, str) else json.dumps(description)
    (tmp_path / "mjax_tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        tokenizer_from_folder(tmp_path)


# --- Wrong uses -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Good files and bad ones."""
    folder = tmp_path_factory.mktemp("shelf")
    vocab, _ = gpt2_files(folder)
    ids = json.loads(vocab.read_text())
    rank_file(vocab)
    bert_file(folder / "uncased", lowercase=True)
    bert_file(folder / "cased", lowercase=False)
    without = {token: number for number, token in enumerate(ids)} | {"Ġ": 0}
    (folder / "no_eod.json").write_text(json.dumps({token: i for token, i in ids.items() if token[:2] != "<|"}))
    (folder / "holes.json").write_text(json.dumps(ids | {"<|endoftext|>": 5000}))
    (folder / "few_bytes.json").write_text(json.dumps({"a": 0, "<|endoftext|>": 1}))
    (folder / "twice.json").write_text(json.dumps(without))
    (folder / "other_merges.txt").write_text("Ġ t\nq q\n")
    (folder / "odd_merges.txt").write_text("Ġ t\nthree of them\n")
    (folder / "end_merges.txt").write_text("Ġ t\n<|endof text|>\n")
    ranks = (folder / "ranks.tiktoken").read_bytes().splitlines(keepends=True)
    (folder / "gap.tiktoken").write_bytes(b"".join(ranks[:300] + ranks[301:]))
    (folder / "bytes_gone.tiktoken").write_bytes(b"".join(ranks[:100]))
    (folder / "other_words.tiktoken").write_bytes(b"".join(ranks) + b"Owo= %d\n" % len(ranks))  # ";\n"
    (folder / "no_pairs.tiktoken").write_bytes(b"".join(ranks) + b"cXpxeg== %d\n" % len(ranks))  # "qzqz"
    (folder / "empty").write_bytes(b"")
    (folder / "latin.txt").write_bytes("[CLS]\ncafé".encode("latin-1"))
    pieces = (folder / "uncased" / "vocab.txt").read_text().splitlines()
    (folder / "no_sep.txt").write_text("\n".join(piece for piece in pieces if piece != "[SEP]"))
    hf_byte_pairs(special=["<start>"]).save(str(folder / "no_end.json"))
    hf_byte_pairs().save(str(folder / "hf.json"))
    hf_byte_pairs(special=[]).save(str(folder / "plain.json"))
    one = hf_unigram()
    one.add_tokens(["a"])
    one.save(str(folder / "one.json"))
    return folder


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wordpiece:vocab.txt", "is not a known kind; use gpt2:vocab.json,merges.txt or gpt2:FILE.tiktoken, bert"),
        ("x.model", "is not a known kind; use"),
        ("bert:uncased/vocab.txt", "is not a known kind; use .* bert-uncased:vocab.txt, bert-cased:vocab.txt"),
        ("run:empty", "run:empty: empty has no folder tokenizer, so it is not a run that has one"),
        ("bytes:x", "bytes needs none; use --tokenizer bytes"),
        ("gpt2", "names no file; use --tokenizer gpt2:vocab.json,merges.txt or gpt2:FILE.tiktoken"),
        ("gpt2:", "names no file"),
        ("gpt2:vocab.json,", "names no file"),
        ("gpt2:nowhere.json,merges.txt", "there is no file nowhere.json; use --tokenizer gpt2:vocab.json,merges.txt"),
        ("gpt2:uncased", "there is no file uncased"),
        ("gpt2:vocab.json", "is JSON, not a tiktoken file; use --tokenizer gpt2:vocab.json,merges.txt if"),
        ("gpt2:merges.txt,vocab.json", "the files are swapped; use --tokenizer gpt2:vocab.json,merges.txt"),
        ("gpt2:vocab.json,merges.txt,x", "names 3 files"),
        ("gpt2:merges.txt,merges.txt", "merges.txt is not JSON .*; a JSON object"),
        ("gpt2:hf.json,merges.txt", "hf.json is not a vocabulary; a JSON object"),
        ("gpt2:vocab.json,vocab.json", "vocab.json:1: .* is not a pair"),
        ("gpt2:vocab.json,uncased/vocab.txt", "vocab.txt:1: .* is not a pair such as 'Ġ t'"),
        ("gpt2:vocab.json,odd_merges.txt", "odd_merges.txt:2: 'three of them' is not a pair"),
        ("gpt2:vocab.json,end_merges.txt", r"end_merges.txt:2 merges text to <\|endoftext\|>"),
        ("gpt2:vocab.json,other_merges.txt", "other_merges.txt does not belong to vocab.json .*`qq` out of vocabulary"),
        ("gpt2:vocab.json,latin.txt", r"latin.txt is not a text file in UTF-8 \(byte 9\)"),
        ("gpt2:no_eod.json,merges.txt", r"no_eod.json has no token <\|endoftext\|>"),
        ("gpt2:holes.json,merges.txt", "the ids in holes.json are not 0 to 376, each once"),
        ("gpt2:twice.json,merges.txt", "the ids in twice.json are not 0 to 376, each once"),
        ("gpt2:few_bytes.json,merges.txt", "few_bytes.json has no token for 255 of the 256 bytes"),
        ("gpt2:merges.txt", r"merges.txt:1: '#version: 0.2' is not a token in base64 and its rank"),
        ("gpt2:empty", "the ranks in empty are not 0 to"),
        ("gpt2:gap.tiktoken", "the ranks in gap.tiktoken are not 0 to 374, each once"),
        ("gpt2:bytes_gone.tiktoken", "bytes_gone.tiktoken has no token for some of the 256 bytes"),
        ("gpt2:other_words.tiktoken", "other_words.tiktoken is not split into words as GPT-2 does .*hf:tokenizer.json"),
        ("gpt2:no_pairs.tiktoken", "no_pairs.tiktoken: no two tokens of lower rank make token 376"),
        ("bert-uncased", "names no file; use --tokenizer bert-uncased:vocab.txt"),
        ("bert-uncased:nowhere.txt", "there is no file nowhere.txt"),
        ("bert-uncased:no_sep.txt", r"no_sep.txt lacks \[SEP\]; give BERT's vocab.txt"),
        ("bert-uncased:vocab.json", r"vocab.json lacks \[CLS\], \[SEP\], \[MASK\], \[PAD\], \[UNK\]"),
        ("bert-uncased:latin.txt", "latin.txt is not a text file in UTF-8"),
        ("bert-uncased:cased/vocab.txt", "has pieces in capitals; use --tokenizer bert-cased:cased/vocab.txt"),
        ("bert-cased:uncased/vocab.txt", "has no capital letters; use --tokenizer bert-uncased:uncased/vocab.txt"),
        ("sentencepiece", "names no file; use --tokenizer sentencepiece:FILE.model"),
        ("sentencepiece:nowhere.model", "there is no file nowhere.model"),
        ("sentencepiece:vocab.json", "vocab.json is not a sentencepiece model"),
        ("hf", "names no file; use --tokenizer hf:tokenizer.json or hf:tokenizer.json,eod=TOKEN"),
        ("hf:uncased", "there is no file uncased"),
        ("hf:vocab.json", "vocab.json is not a tokenizer.json of Hugging Face"),
        ("hf:latin.txt", "latin.txt is not JSON .*; give a tokenizer.json that"),
        ("hf:empty", "empty is not JSON .*; give a tokenizer.json that"),
        ("hf:no_end.json", r"none of .* is among the special tokens of no_end.json \(<start>\); name the one"),
        ("hf:plain.json", r"none of .* is among the special tokens of plain.json \(it has none\); name the one"),
        ("hf:hf.json,eod=Ġt", r"Ġt is not among the special tokens of hf.json \(<\|endoftext\|> <\|im_end\|>\)"),
        ("hf:one.json,eod=a", "one.json reads a in any text, so it cannot end documents"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_says_what_can(shelf, monkeypatch, spec, message):
    monkeypatch.chdir(shelf)
    with pytest.raises(UsageError, match=message) as error:
        load_tokenizer(spec)
    assert "\n" not in str(error.value)
