import io
import json

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.tokenizers import (
    EOD_PIECE,
    ByteTokenizer,
    SentencePieceTokenizer,
    load_tokenizer,
    tokenizer_from_folder,
    train_sentencepiece,
)
from mjax.errors import UsageError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n\nIt was the best of times, it was the worst of times.\n",
    "def train(step):\n    for batch in batches:\n        loss = model(batch)\n    return loss\n",
    "Ça, c'est déjà vu: naïve café, 1968 — 2001.\tΑ and Ω.\n",
] * 3

# Everything but half surrogate pairs, which are not text, and the character that sentencepiece writes for a space.
ANY_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="▁"))


@pytest.fixture(scope="module")
def trained():
    return train_sentencepiece(TEXTS, 380)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request, trained):
    return ByteTokenizer() if request.param == "bytes" else trained


def foreign_model(**options):
    """A model of someone else, with sentencepiece's own defaults but for `options`."""
    model = io.BytesIO()
    arguments = {"vocab_size": 60, "hard_vocab_limit": False, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=model, **arguments)
    return model.getvalue()


@given(text=ANY_TEXT)
def test_any_text_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocabulary and token != tokenizer.eod for token in ids)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces ",
        "\n\n\n",
        "a\tb\r\n\x00c",
        " \n \n",
        "👩‍👩‍👧 漢字 é e\u0301",
        "<|endoftext|>",
        "<0x0A><unk>",
        "\ufeff\ufffd",
    ],
)
def test_text_that_is_easily_broken_survives_the_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == text


def test_the_end_of_a_document_is_shown_where_it_stands(tokenizer):
    ids = [*tokenizer.encode("one"), tokenizer.eod, tokenizer.eod, *tokenizer.encode(" two")]
    assert tokenizer.decode(ids) == "one<|endoftext|><|endoftext|> two"
    assert tokenizer.decode(np.array(ids, np.int32)) == "one<|endoftext|><|endoftext|> two"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_half_a_character_decodes_to_a_replacement(trained, kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else trained
    assert tokenizer.decode(tokenizer.encode("漢")[:1]) == "\ufffd"


def test_a_saved_tokenizer_is_rebuilt(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    rebuilt = tokenizer_from_folder(tmp_path / "new" / "folder")
    assert (rebuilt.kind, rebuilt.vocabulary, rebuilt.eod) == (tokenizer.kind, tokenizer.vocabulary, tokenizer.eod)
    for text in TEXTS:
        assert rebuilt.encode(text) == tokenizer.encode(text)


# --- Training ---------------------------------------------------------------------------------------------------------


def test_training_gives_the_vocabulary_asked_for_and_shortens_the_text(trained):
    assert trained.vocabulary == 380
    assert len(trained.encode(TEXTS[0])) < 0.5 * len(TEXTS[0])


def test_training_is_deterministic(trained, tmp_path):
    trained.save(tmp_path / "a")
    train_sentencepiece(iter(TEXTS), 380).save(tmp_path / "b")
    for file in ("tokenizer.model", "mjax_tokenizer.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_document_longer_than_sentencepiece_takes_is_learned_from():
    trained = train_sentencepiece(["a " * 20_000 + "wonderful " * 20_000], 280)
    assert len(trained.encode("a wonderful a")) == 3


def test_a_vocabulary_too_large_says_which_works():
    with pytest.raises(UsageError, match=r"--vocabulary 9000 is too large .*; use --vocabulary (\d+) or less") as error:
        train_sentencepiece(TEXTS, 9000)
    largest = int(str(error.value).split("use --vocabulary ")[1].split()[0])
    assert train_sentencepiece(TEXTS, largest).vocabulary == largest


def test_a_vocabulary_too_small_says_which_works():
    with pytest.raises(UsageError, match=r"--vocabulary 200 is too small.*; use --vocabulary (\d+) or more") as error:
        train_sentencepiece(TEXTS, 200)
    smallest = int(str(error.value).split("use --vocabulary ")[1].split()[0])
    assert train_sentencepiece(TEXTS, smallest).vocabulary == smallest


@pytest.mark.parametrize("texts", [[], [""], ["\n"]])
def test_no_text_is_refused(texts):
    with pytest.raises(UsageError, match="no text"):
        train_sentencepiece(texts, 300)


@pytest.mark.parametrize("error", [UsageError("line 7 is malformed"), KeyboardInterrupt()])
def test_what_goes_wrong_while_text_is_read_is_raised_as_it_is(error):
    def texts():
        yield TEXTS[0]
        raise error

    with pytest.raises(type(error)) as raised:
        train_sentencepiece(texts(), 300)
    assert raised.value is error


# --- Opening ----------------------------------------------------------------------------------------------------------


def test_a_foreign_model_ends_documents_with_its_end_of_sentence(tmp_path):
    (tmp_path / "x.model").write_bytes(foreign_model())
    tokenizer = load_tokenizer(f"sentencepiece:{tmp_path}/x.model")
    assert tokenizer.eod == 2
    assert tokenizer.decode([*tokenizer.encode("the best of times"), 2]) == "the best of times<|endoftext|>"


def test_a_foreign_model_without_one_may_have_an_endoftext_piece():
    model = foreign_model(eos_id=-1, control_symbols=[EOD_PIECE])
    assert SentencePieceTokenizer(model, "x.model").eod == 2
    with pytest.raises(UsageError, match="neither an end-of-sentence piece nor"):
        SentencePieceTokenizer(foreign_model(eos_id=-1), "x.model")


def test_bytes_are_loaded_by_name():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("é") == [0xC3, 0xA9]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("wordpiece:vocab.txt", "no known kind; use sentencepiece:FILE.model or bytes"),
        ("x.model", "no known kind; use sentencepiece:FILE.model or bytes"),
        ("sentencepiece", "names no file; use --tokenizer sentencepiece:FILE.model"),
        ("sentencepiece:nowhere.model", "there is no file nowhere.model"),
        ("bytes:x", "bytes need none"),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_says_what_can(spec, message):
    with pytest.raises(UsageError, match=message):
        load_tokenizer(spec)


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.model is not a sentencepiece model"):
        load_tokenizer(f"sentencepiece:{tmp_path}/x.model")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"mjax_tokenizer\.json does not exist"):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("not json", "does not describe a tokenizer"),
        ("[]", "does not describe a tokenizer"),
        ({"kind": "bytes"}, "does not describe a tokenizer"),
        ({"kind": "pickle", "vocabulary": 257, "eod": 256}, "kind 'pickle'; this mjax knows sentencepiece, bytes"),
        ({"kind": "bytes", "vocabulary": 300, "eod": 256}, "the files beside it give"),
        ({"kind": "sentencepiece", "vocabulary": 300, "eod": 1}, r"tokenizer\.model does not exist"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path, description, message):
    text = description if isinstance(description, str) else json.dumps(description)
    (tmp_path / "mjax_tokenizer.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        tokenizer_from_folder(tmp_path)
