import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.tokenizers import SentencePieceTokenizer, load_tokenizer, train_sentencepiece
from mjax.errors import UsageError
from tests.data.vocabularies import LLAMA, NASTY, T5, TEXTS, foreign_model


@pytest.fixture(scope="module")
def trained():
    return train_sentencepiece(TEXTS, 380)


# Everything but half surrogate pairs, which are not text, and the character that sentencepiece writes for a space.
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="▁")))
def test_any_text_survives_the_round_trip(trained, text):
    ids = trained.encode(text)
    assert all(0 <= token < trained.vocabulary and token != trained.eod for token in ids)
    assert trained.decode(ids) == text


@pytest.mark.parametrize("text", [text for text in NASTY.values() if "▁" not in text])
def test_text_that_is_easily_broken_survives_the_round_trip(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_the_end_of_a_document_is_shown_where_it_stands(trained):
    ids = [*trained.encode("one"), trained.eod, trained.eod, *trained.encode(" two")]
    assert trained.decode(ids) == "one<|endoftext|><|endoftext|> two"
    assert trained.decode(np.array(ids, np.int32)) == "one<|endoftext|><|endoftext|> two"


def test_half_a_character_decodes_to_a_replacement(trained):
    assert trained.decode(trained.encode("漢")[:1]) == "\ufffd"


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


# --- Models of others -------------------------------------------------------------------------------------------------


def foreign(**options):
    return SentencePieceTokenizer(foreign_model(**options), "x.model")


def test_a_foreign_model_ends_documents_with_its_end_of_sentence(tmp_path):
    (tmp_path / "x.model").write_bytes(foreign_model())
    tokenizer = load_tokenizer(f"sentencepiece:{tmp_path}/x.model")
    assert tokenizer.eod == 2
    assert tokenizer.decode([*tokenizer.encode("the best of times"), 2]) == "the best of times<|endoftext|>"


def test_a_foreign_model_without_one_may_have_an_endoftext_piece():
    assert foreign(eos_id=-1, control_symbols=["<|endoftext|>"]).eod == 2
    with pytest.raises(UsageError, match="neither an end-of-sentence piece nor"):
        foreign(eos_id=-1)


def test_an_endoftext_piece_that_text_encodes_to_ends_no_documents():
    with pytest.raises(UsageError, match=r"ends documents with <\|endoftext\|>, which is not a control piece"):
        foreign(eos_id=-1, user_defined_symbols=["<|endoftext|>"])


def test_a_model_as_llamas_puts_a_space_in_front_and_takes_it_away_again():
    tokenizer = foreign(**LLAMA)
    assert tokenizer.encode("best") == tokenizer.encode("the best")[-len(tokenizer.encode("best")) :]
    for text in NASTY.values():
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_symbols_of_a_model_as_t5s_are_found_in_text_and_its_end_is_not():
    tokenizer = foreign(**T5)
    assert tokenizer.eod == 1
    assert tokenizer.encode("times<extra_id_1>times").count(4) == 1
    assert 1 not in tokenizer.encode("times</s>times")


@pytest.mark.parametrize("content", [b"", b"hello"])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.model is not a sentencepiece model"):
        load_tokenizer(f"sentencepiece:{tmp_path}/x.model")
