"""A vocabulary for a BERT, learned from text."""

import pytest

from mjax.data.metadata import read_metadata, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder, train_wordpiece
from mjax.data.tokenizers.wordpiece import SPECIAL
from mjax.errors import UsageError
from tests.data.test_prepare import lines, run  # noqa: F401 (a fixture)

TEXTS = [
    f"The {colour} fox {verb} over Émile's lazy dogs, {number} times!"
    for number, (colour, verb) in enumerate(
        (colour, verb)
        for colour in ("quick", "brown", "unbelievable")
        for verb in ("jumps", "jumped", "was jumping", "will believe")
    )
]


@pytest.fixture(scope="module", params=[("bert-uncased", 120), ("bert-cased", 190)], ids=lambda value: value[0])
def trained(request):
    kind, vocabulary = request.param
    return train_wordpiece(TEXTS, vocabulary, kind)


def pieces_of(tokenizer):
    return tokenizer.contents[0].decode().splitlines()


def test_the_vocabulary_has_the_pieces_asked_for_each_once(trained):
    pieces = pieces_of(trained)
    assert len(pieces) == len(set(pieces)) == trained.vocabulary in (120, 190)
    assert tuple(pieces[:5]) == SPECIAL
    assert (trained.pad, trained.unk, trained.cls, trained.sep, trained.mask) == (0, 1, 2, 3, 4)


def test_every_letter_of_the_text_can_begin_a_word_and_go_on_with_it(trained):
    pieces = set(pieces_of(trained))
    letters = {letter for text in TEXTS for letter in text if letter.isascii() and not letter.isspace()}
    letters = {letter.lower() if trained.lowercase else letter for letter in letters}
    assert letters <= pieces
    assert {f"##{letter}" for letter in letters} <= pieces
    assert trained.unk not in trained.encode("xylem9!")


def test_what_is_frequent_is_one_piece_and_a_new_word_is_made_of_known_ones(trained):
    assert len(trained.encode("over")) == len(trained.encode("lazy")) == 1
    new = [trained.library.id_to_token(number) for number in trained.encode("jumpable")]
    assert new[0] in ("jump", "jum")
    assert all(piece.startswith("##") for piece in new[1:])
    assert 1 < len(new) < len("jumpable")


def test_a_cased_vocabulary_keeps_capitals_and_accents_and_an_uncased_one_does_not():
    cased, uncased = (
        train_wordpiece(TEXTS, 190 if kind == "bert-cased" else 120, kind) for kind in ("bert-cased", "bert-uncased")
    )
    assert cased.decode(cased.encode("The fox, Émile!")) == "The fox , Émile !"
    assert uncased.decode(uncased.encode("The fox, Émile!")) == "the fox , emile !"
    assert not any(letter.isupper() for piece in pieces_of(uncased)[5:] for letter in piece)


def test_no_piece_crosses_the_edge_of_a_word(trained):
    assert "##</s>" not in pieces_of(trained)
    assert not any(" " in piece or "▁" in piece for piece in pieces_of(trained))
    assert "," in pieces_of(trained)
    assert not any(
        "," in piece.removeprefix("##") and len(piece.removeprefix("##")) > 1 for piece in pieces_of(trained)
    )


def test_the_same_text_gives_the_same_vocabulary(trained):
    assert train_wordpiece(iter(TEXTS), trained.vocabulary, trained.scheme).contents == trained.contents


def test_a_text_of_one_endless_word_is_learned_from():
    assert train_wordpiece(["ab" * 30_000 + " cab"], 11, "bert-uncased").vocabulary == 11


@pytest.mark.parametrize(("size", "limit"), [(40, "or more"), (90_000, "or less")])
def test_a_vocabulary_that_does_not_fit_the_text_says_which_does(size, limit):
    with pytest.raises(UsageError, match=rf"--vocabulary {size} is too .*; use --vocabulary (\d+) {limit}") as error:
        train_wordpiece(TEXTS, size, "bert-uncased")
    fits = int(str(error.value).split("use --vocabulary ")[1].split()[0].rstrip(","))
    assert train_wordpiece(TEXTS, fits, "bert-uncased").vocabulary == fits


@pytest.mark.parametrize("size", [10, 20, 8192])
@pytest.mark.parametrize("kind", ["bert-uncased", "bert-cased"])
def test_a_tiny_text_is_refused_in_the_words_of_a_bert(kind, size):
    with pytest.raises(UsageError, match=r"letters|little text") as error:
        train_wordpiece(["hello world, hello there"], size, kind)
    assert "byte" not in str(error.value), "a BERT has no vocabulary of bytes"


def test_a_text_that_no_vocabulary_fits_asks_for_more_text_and_for_no_size():
    with pytest.raises(UsageError, match=r"words yield 42 pieces, its letters alone 75; give more text") as error:
        train_wordpiece(["hello world, hello there"], 8192, "bert-cased")
    assert "--vocabulary" not in str(error.value)


def test_no_text_is_refused():
    with pytest.raises(UsageError, match="no text"):
        train_wordpiece(["", " \n"], 100, "bert-uncased")


def test_prepare_trains_one_where_the_kind_is_named_without_a_file(lines, tmp_path, capsys):  # noqa: F811
    run(lines, output=tmp_path / "d", tokenizer="bert-uncased", vocabulary=80, append_eod=False)
    metadata, tokenizer = read_metadata(tmp_path / "d"), tokenizer_from_folder(tokenizer_folder(tmp_path / "d"))
    assert (metadata.tokenizer, metadata.vocabulary, tokenizer.vocabulary) == ("bert-uncased", 80, 80)
    assert "bert-uncased, trained on this text" in capsys.readouterr().out
