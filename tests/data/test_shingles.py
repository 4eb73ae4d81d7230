import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.data import shingles
from mjax.data.shingles import jaccard, shingle_hashes, shingle_set, word_hashes

TEXTS = [
    "a b c d e f",
    "",
    "one two",
    "…!",
    "Naïve CAFÉ_1 naïve  café_1\n漢字 かな, 한국어 ١٢٣ e\u0301",
    "x" * 70_000,
    "a b c d e f",
]


def literal(text, size, unit):
    """The shingles of a text, spelled out."""
    units = re.findall(r"\w+", text.lower()) if unit == "words" else list(text)
    return [tuple(units[i : i + size]) for i in range(max(len(units) - size + 1, 1))] if units else []


def check(texts, size, unit):
    hashes, offsets = shingle_hashes(texts, size, unit)
    expected = [literal(text, size, unit) for text in texts]
    assert np.diff(offsets.astype(int)).tolist() == [len(each) for each in expected]
    number, meaning = {}, {}
    for run, value in zip([run for each in expected for run in each], hashes.tolist(), strict=True):
        assert number.setdefault(run, value) == value, f"{run} has two numbers"
        assert meaning.setdefault(value, run) == run, f"{run} and {meaning[value]} have the same number"


@pytest.mark.parametrize("unit", ["words", "characters"])
@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_equal_shingles_have_equal_numbers_and_different_ones_different(size, unit):
    check(TEXTS, size, unit)


@settings(deadline=None)
@given(st.lists(st.text("ab _.İΣß漢\U0001f600\n", max_size=30), min_size=1, max_size=6), st.integers(1, 6))
def test_any_texts_have_the_shingles_of_their_words(texts, size):
    check(texts, size, "words")
    check(texts, size, "characters")


def test_a_word_is_what_the_regular_expression_calls_one():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    _, starts, ends = word_hashes(everything)
    assert list(zip(starts, ends, strict=True)) == [match.span() for match in re.finditer(r"\w+", everything)]


def test_the_blocks_in_which_text_is_hashed_do_not_show(monkeypatch):
    text = " ".join(TEXTS)
    whole = shingle_hashes([text], 3, "words")[0]
    monkeypatch.setattr(shingles, "BLOCK", 3)
    np.testing.assert_array_equal(shingle_hashes([text], 3, "words")[0], whole)


def test_order_repetition_and_case_do_not_change_a_set_of_words():
    one, other = (shingle_set(shingle_hashes([text], 1, "words")[0]) for text in ("b a, a!", "A b b"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("common", "alone"), [(7, 3), (70, 30), (700, 300), (7, 0), (0, 3), (21, 9), (147, 63)])
def test_a_similarity_at_the_threshold_is_the_threshold_itself(common, alone):
    one = np.arange(common, dtype=np.uint64)
    other = np.arange(common + alone, dtype=np.uint64)
    assert jaccard(one, other) == jaccard(other, one)
    if common and alone:
        assert jaccard(one, other) == 0.7


def test_empty_sets_are_not_similar():
    assert jaccard(np.empty(0, np.uint64), np.empty(0, np.uint64)) == 0
