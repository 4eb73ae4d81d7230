"""gigatoken in place of `tokenizers`: the same ids for every text, and the same bytes on disk."""

import dataclasses
import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers, trainers

from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.gigatoken import ENVIRONMENT_VARIABLE, EncoderMismatchError, FastEncoder, make_fast_encoder
from mjax.data.tokenizers import MIN_GIGATOKEN_CHARACTERS, load_tokenizer
from mjax.errors import UsageError
from tests.data.vocabularies import NASTY, TEXTS, hf_byte_pairs

pytestmark = pytest.mark.ci
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "llama 3": CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,
    "qwen 3": CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST,
}


def library(kind, folder):
    """A small tokenizer with the words of GPT-2, Llama 3 or Qwen 3; Qwen's normalizes, and finds <think> in text."""
    made = hf_byte_pairs()
    if kind != "gpt2":
        split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[kind]), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([*TEXTS, *["it's we'll don't"] * 99], trainer)  # "'s" is one token
    if kind == "gpt2":
        vocab, merges = made.model.save(str(folder))
        return load_tokenizer(f"gpt2:{vocab},{merges}")
    if kind == "qwen 3":
        made.normalizer = normalizers.NFC()
        made.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    return load_tokenizer(f"hf:{folder}/tokenizer.json")


@pytest.fixture(params=["gpt2", "llama 3", "qwen 3"])
def tokenizer(request, tmp_path):
    return library(request.param, tmp_path)


def assert_same(tokenizer, texts):
    ids, lengths = FastEncoder(tokenizer.backend, tokenizer._encode_with_backend).encode(texts)
    expected = tokenizer._encode_with_backend(texts)
    for text, ours, theirs in zip(texts, np.split(ids, np.cumsum(lengths)[:-1]), expected, strict=True):
        assert ours.tolist() == theirs, repr(text[:300])


def test_ids_are_those_of_tokenizers(tokenizer):
    """Texts that break tokenizers, and letters newer than gigatoken, before a contraction."""
    newer = [f"{chr(code)}'s x{chr(code)}'ll" for code in (0x88F, 0xC5C, 0x11DE5, 0x16EB8, 0x18DCB, 0x1E6CF, 0x323B0)]
    added = ["<think>so</think>", "a<think>", unicodedata.normalize("NFD", "Ångström's déjà's 한국어")]
    assert_same(tokenizer, [*NASTY.values(), *TEXTS, *newer, *added])


def test_ids_are_those_of_tokenizers_after_any_character(tokenizer):
    """Before and after a contraction, a word, a number; of Chinese and the like every eighth character."""
    of_code = {code: unicodedata.category(chr(code)) for code in range(0x110000)}
    known = [code for code, category in of_code.items() if category not in ("Cn", "Cs", "Co")]
    characters = [chr(code) for code in known if of_code[code] != "Lo" or code % 8 == 0]
    texts = [
        "".join(f"{c}'s a{c}'ll '{c} {c}{c} 1{c}\n" for c in characters[i : i + 50])
        for i in range(0, len(characters), 50)
    ]
    assert_same(tokenizer, texts)


@pytest.mark.parametrize("kind", ["gpt2", "qwen 3"])
def test_dataset_is_that_of_tokenizers(tmp_path, monkeypatch, kind):
    """Compare bytes, with a token before (GPT-2) and behind each document, and documents without text."""
    tokenizer = library(kind, tmp_path)
    file = tmp_path / "corpus.jsonl"
    texts = ["", "\u0c5c's " * 2000, *[" ".join(TEXTS) * 3 + f" {i}. Another sentence." for i in range(300)], ""]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer.bos = tokenizer.find_bos()
    tokenizer.save(tmp_path / "run" / "tokenizer")
    run = f"run:{tmp_path}/run"
    how = PrepareArguments(output=str(tmp_path / "fast"), inputs=(file,), tokenizer=run, workers=1)
    assert prepare(how).encoder == "gigatoken"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "0")
    assert prepare(dataclasses.replace(how, output=str(tmp_path / "slow"))).encoder == "tokenizers"
    for ending in ("bin", "idx"):
        assert (tmp_path / f"fast.{ending}").read_bytes() == (tmp_path / f"slow.{ending}").read_bytes()


@pytest.fixture
def differing(tmp_path, monkeypatch):
    """Arguments of a `prepare` whose encoders differ, the texts that gigatoken got, and the ids on disk."""
    tokenizer, asked = library("gpt2", tmp_path), []

    def wrong(self, texts):
        asked.append(len(texts))
        raise EncoderMismatchError(
            "gigatoken and tokenizers encode 'x' differently; to use tokenizers alone set MJAX_GIGATOKEN=0"
        )

    monkeypatch.setattr(FastEncoder, "_compare", wrong)
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text * 200}) + "\n" for text in TEXTS))
    tokenizer.save(tmp_path / "run" / "tokenizer")
    ids = [token for text in TEXTS for token in [*tokenizer._encode_with_backend([text * 200])[0], tokenizer.eod]]
    how = {"output": str(tmp_path / "d"), "inputs": (file,), "tokenizer": f"run:{tmp_path}/run", "workers": 1}
    return PrepareArguments(**how, json=True), asked, ids


def test_prepare_stops_when_encoders_differ(differing, monkeypatch, capsys):
    """The same command starts over with gigatoken switched off."""
    how, asked, ids = differing
    with pytest.raises(UsageError, match="encode 'x' differently; to use tokenizers alone set MJAX_GIGATOKEN=0"):
        prepare(how)
    assert asked, "gigatoken was not asked"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "0")
    prepare(how)
    assert json.loads(capsys.readouterr().out)["encoder"] == "tokenizers"
    assert np.fromfile(f"{how.output}.bin", "<u2").tolist() == ids


def test_many_texts_go_to_gigatoken_and_are_compared(tmp_path):
    tokenizer = library("gpt2", tmp_path)
    texts = ["word " * MIN_GIGATOKEN_CHARACTERS]
    expected = tokenizer._encode_with_backend(texts)
    assert tokenizer.encode_batch(texts) == expected
    assert tokenizer.encode_flat(texts)[0].tolist() == expected[0]
    assert tokenizer.encoder == "gigatoken"
    tokenizer._gigatoken._slow = lambda texts: [[0] for _ in texts]
    with pytest.raises(EncoderMismatchError, match="to use tokenizers alone"):
        tokenizer.encode_batch(texts)


def change(tokenizer, model=None, **parts):
    """The tokenizer with other fields in its tokenizer.json."""
    values = json.loads(tokenizer.backend.to_str())
    values["model"].update(model or {})
    values |= {name: json.loads(part.__getstate__()) for name, part in parts.items()}
    library = tokenizers.Tokenizer.from_str(json.dumps(values))
    library.encode_special_tokens = True  # which the file does not say
    return library


def words_of_llama(behavior="isolated", invert=False, **of_bytes):
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS["llama 3"]), behavior, invert)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | of_bytes)])


@pytest.mark.parametrize(
    "changed",
    [
        {"pre_tokenizer": pre_tokenizers.ByteLevel(False, use_regex=False)},
        {"pre_tokenizer": words_of_llama()},  # words of GPT-2 within those of Llama 3
        {"pre_tokenizer": words_of_llama(use_regex=False, add_prefix_space=True)},
        {"pre_tokenizer": words_of_llama("removed", use_regex=False)},
        {"pre_tokenizer": words_of_llama("contiguous", use_regex=False)},
        {"pre_tokenizer": pre_tokenizers.Sequence([*reversed(list(words_of_llama(use_regex=False)))])},
        {"pre_tokenizer": pre_tokenizers.Split(tokenizers.Regex("ox|[^o]+"), "isolated")},
        {"normalizer": normalizers.Lowercase()},
        {"model": {"dropout": 0.5}},
        {"model": {"end_of_word_suffix": "s"}},
        {"model": {"continuing_subword_prefix": "##", "merges": []}},
    ],
)
def test_fields_that_gigatoken_misreads_stay_with_tokenizers(tmp_path, changed):
    assert make_fast_encoder(change(library("gpt2", tmp_path), **changed), None) is None


def test_inverted_removal_is_encoded_by_gigatoken(tmp_path):
    """Phi-4 and conversions of tiktoken keep the matches of the pattern, which are the whole text."""
    tokenizer = library("gpt2", tmp_path)
    tokenizer.backend = change(tokenizer, pre_tokenizer=words_of_llama("removed", True, use_regex=False))
    assert_same(tokenizer, [*NASTY.values(), *TEXTS])
