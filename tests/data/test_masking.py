"""What is hidden of a sample: laws that hold for every one, and shares over many."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mjax.data.masking import WordPieces, create_masked_lm_predictions, find_words
from mjax.data.tokenizers import load_tokenizer
from tests.data.vocabularies import bert_file

CLS, SEP, MASK, PAD = 2, 3, 4, 1
CONTINUES = np.arange(1000) >= 700  # 5 to 699 begin words
PIECES = WordPieces(CLS, SEP, MASK, PAD, CONTINUES)


def sample(random, first=100, second=80):
    body = random.randint(5, 1000, first + second).astype(np.int32)
    return np.concatenate([[CLS], body[:first], [SEP], body[first:], [SEP]]).astype(np.int32)


def hide(tokens, seed, wanted=None, probability=0.15):
    wanted = len(tokens) if wanted is None else wanted
    return create_masked_lm_predictions(tokens, wanted, PIECES, np.random.RandomState(seed), probability)


def test_pieces_of_a_tokenizer_are_those_it_spells_with_two_hashes(tmp_path):
    tokenizer = load_tokenizer(f"bert-uncased:{bert_file(tmp_path, lowercase=True)}")
    pieces = WordPieces.of(tokenizer)
    lines = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert pieces.continues.tolist() == [line.startswith("##") for line in lines]
    specials = [lines[i] for i in (pieces.cls, pieces.sep, pieces.mask, pieces.pad)]
    assert specials == ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    tokens = np.array(tokenizer.encode("lazy modeled dogs"))
    places, bounds = find_words(tokens, pieces)
    assert len(tokens) > 3
    assert [tokenizer.decode(tokens[places[a:b]]) for a, b in pairwise(bounds)] == [
        "lazy", "modeled", "dogs",
    ]  # fmt: skip


def test_words_are_pieces_with_what_continues_them_and_skip_special_tokens():
    tokens = np.array([CLS, 800, 801, 10, 800, SEP, 900, 20, 30, 700, SEP])
    places, bounds = find_words(tokens, PIECES)
    words = [places[a:b].tolist() for a, b in pairwise(bounds)]
    # A first piece without its word is one; a segment that begins within a word goes on with the last one.
    assert words == [[1, 2], [3, 4, 6], [7], [8, 9]]


@given(seed=st.integers(0, 2**32 - 1), first=st.integers(0, 60), second=st.integers(0, 60))
def test_no_more_is_hidden_than_wanted_and_never_a_special_token(seed, first, second):
    tokens = sample(np.random.RandomState(seed), first, second)
    seen, hidden = hide(tokens, seed)
    assert hidden.sum() <= max(1, round(0.15 * len(tokens)))
    assert not hidden[(tokens == CLS) | (tokens == SEP)].any()
    assert (seen == tokens)[~hidden].all()
    assert seen.dtype == np.int32
    assert seen.max() < len(CONTINUES)


def test_a_short_wanted_length_bounds_what_is_hidden():
    tokens = sample(np.random.RandomState(0), 100, 0)
    assert all(hide(tokens, seed, wanted=40)[1].sum() <= 6 for seed in range(50))
    assert any(hide(tokens, seed, wanted=40)[1].sum() == 6 for seed in range(50))


def test_of_a_sample_of_three_tokens_one_is_hidden():
    assert [hide(np.array([CLS, 10, SEP], np.int32), seed, wanted=20)[1].tolist() for seed in range(9)] == [
        [False, True, False]
    ] * 9


def test_words_are_hidden_whole():
    for seed in range(100):
        tokens = sample(np.random.RandomState(seed))
        _, hidden = hide(tokens, seed)
        places, bounds = find_words(tokens, PIECES)
        for begin, end in pairwise(bounds):
            assert hidden[places[begin:end]].all() or not hidden[places[begin:end]].any()


def test_over_many_samples_fifteen_percent_are_hidden_and_eighty_ten_ten_of_them():
    tokens_of_all, hidden_of_all, seen_of_all = [], [], []
    for seed in range(1000):
        tokens = sample(np.random.RandomState(seed + 10**6))
        seen, hidden = hide(tokens, seed)
        assert hidden.sum() >= 0.15 * len(tokens) - 4  # a word of several pieces may not fit any more
        tokens_of_all.append(tokens), seen_of_all.append(seen), hidden_of_all.append(hidden)
    tokens, seen, hidden = map(np.concatenate, (tokens_of_all, seen_of_all, hidden_of_all))
    assert hidden.mean() == pytest.approx(0.15, abs=0.003)
    became = seen[hidden]
    assert (became == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (became == tokens[hidden]).mean() == pytest.approx(0.1, abs=0.01)
    random = became[(became != MASK) & (became != tokens[hidden])]
    assert len(np.unique(random)) > 900  # of any id


def test_spans_of_one_two_and_three_words_come_in_the_ratio_of_their_inverses():
    # Words of one piece each, of which three are to be hidden: the first span has the length that is drawn.
    tokens = np.concatenate([[CLS], np.arange(10, 410), [SEP]]).astype(np.int32)
    counts = np.zeros(4, int)
    for seed in range(3000):
        first = np.random.RandomState(seed).permutation(400)[0]  # the word that is visited first
        _, hidden = hide(tokens, seed, wanted=1000, probability=3 / 402)
        assert hidden.sum() == 3
        if first < 396:
            run = hidden[1 + first :].tolist()
            counts[run.index(False)] += 1
    shares = counts[1:] / counts.sum()
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)


def test_a_word_of_more_pieces_than_may_be_hidden_is_left_alone():
    tokens = np.array([CLS, 10, *range(700, 730), SEP], np.int32)  # one word of 31 pieces; five may be hidden
    assert not any(hide(tokens, seed)[1].any() for seed in range(20))


@pytest.mark.parametrize("tokens", [[CLS, SEP], [CLS, SEP, SEP]])
def test_where_there_is_nothing_to_hide_nothing_is(tokens):
    tokens = np.array(tokens, np.int32)
    seen, hidden = hide(tokens, 0)
    assert seen.tolist() == tokens.tolist()
    assert not hidden.any()


def test_the_same_generator_hides_the_same_and_another_one_something_else():
    tokens = sample(np.random.RandomState(1))
    one, two, other = hide(tokens, 7), hide(tokens, 7), hide(tokens, 8)
    assert (one[0] == two[0]).all()
    assert (one[1] == two[1]).all()
    assert (one[1] != other[1]).any()
