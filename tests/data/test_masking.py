"""What is hidden of a BERT's sample. test_bert.py has Megatron's own masks, token for token."""

from itertools import pairwise

import numpy as np
import pytest

from mjax.data.masking import WordPieces, create_masked_lm_predictions, find_words
from mjax.data.mock_pairs import MASK as MOCK_MASK
from mjax.data.mock_pairs import MockPairs
from mjax.data.tokenizers import load_tokenizer
from tests.data.vocabularies import bert_file
from tests.small import small_config

CLS, SEP, MASK, PAD = 2, 3, 4, 1
CONTINUES = np.arange(1000) >= 700  # 5 to 699 begin words
PIECES = WordPieces(CLS, SEP, MASK, PAD, CONTINUES)


def hide(tokens, seed, wanted=None, probability=0.15):
    tokens, wanted = np.array(tokens, np.int32), len(tokens) if wanted is None else wanted
    return create_masked_lm_predictions(tokens, wanted, PIECES, np.random.RandomState(seed), probability)


def test_word_pieces_are_those_with_two_hashes(tmp_path):
    tokenizer = load_tokenizer(f"bert-uncased:{bert_file(tmp_path, lowercase=True)}")
    pieces = WordPieces.of(tokenizer)
    lines = (tmp_path / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert pieces.continues.tolist() == [line.startswith("##") for line in lines]
    specials = [lines[i] for i in (pieces.cls, pieces.sep, pieces.mask, pieces.pad)]
    assert specials == ["[CLS]", "[SEP]", "[MASK]", "[PAD]"]


def test_words_skip_special_tokens():
    tokens = np.array([CLS, 800, 801, 10, 800, SEP, 900, 20, 30, 700, SEP])
    places, bounds = find_words(tokens, PIECES)
    words = [places[a:b].tolist() for a, b in pairwise(bounds)]
    # A first piece without its word is one; a segment that begins within a word goes on with the last one.
    assert words == [[1, 2], [3, 4, 6], [7], [8, 9]]


def test_masks_are_bounded_by_wanted_length():
    """At most 15% of it; whole words, and no special token."""
    body = np.random.RandomState(0).randint(5, 1000, 100)
    tokens = np.array([CLS, *body[:60], SEP, *body[60:], SEP])
    hidden = np.array([hide(tokens, seed, wanted=40)[1] for seed in range(50)])
    assert hidden.sum(axis=1).max() == 6
    assert not hidden[:, [0, 61, 102]].any()
    places, bounds = find_words(tokens, PIECES)
    for begin, end in pairwise(bounds):
        assert (hidden[:, places[begin]] == hidden[:, places[end - 1]]).all()


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [
        ([CLS, 10, SEP], [False, True, False]),
        ([CLS, SEP], [False, False]),
        ([CLS, SEP, SEP], [False, False, False]),
        ([CLS, 10, *range(700, 730), SEP], [False] * 33),  # one word of 31 pieces, of which three may be hidden
    ],
)
def test_short_samples_hide_what_they_can(tokens, hidden):
    assert all(hide(tokens, seed, wanted=20)[1].tolist() == hidden for seed in range(9))


# --- Mock pairs -------------------------------------------------------------------------------------------------------


def test_mock_pairs_count_on_in_both_segments():
    pairs, swapped = MockPairs(vocabulary=60, sequence=16, seed=3), 0
    arrays = {name: (array.shape, array.dtype.name) for name, array in pairs[7].items()}
    assert arrays == small_config(kind="bert").batch_arrays()
    assert (pairs[7]["labels"] != MockPairs(60, 16, 4)[7]["labels"]).any()
    for index in range(300):
        sample = pairs[index]
        masked, text, types = sample["loss_mask"], sample["documents"] == 0, sample["token_types"]
        assert ((sample["tokens"] == MOCK_MASK) == masked).all()
        assert (sample["tokens"] == sample["labels"])[~masked].all()
        assert masked.any()
        assert not (masked | types)[~text].any()
        assert not masked[0]
        one, two = sample["labels"][text & (types == 0)][1:], sample["labels"][text & (types == 1)]
        assert min(len(one), len(two)) > 0
        counted = [two, one] if sample["sentence_order"] else [one, two]
        assert (np.diff(np.concatenate(counted)) % (60 - MOCK_MASK - 1) == 1).all()
        swapped += int(sample["sentence_order"])
    assert 110 < swapped < 190
