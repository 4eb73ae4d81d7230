"""Samples as runs of sentences: the walk with look-ups is Megatron's loop, and both generators are C++'s."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mjax.data import sentence_pairs
from mjax.data.sentence_pairs import build_pair_index, mersenne_twister_64


def test_the_64_bit_generator_gives_the_words_that_the_standard_names():
    assert int(mersenne_twister_64(5489, 10_000)[-1]) == 9981545732273789042  # C++11, 26.5.5
    assert mersenne_twister_64(5489, 1).tolist() == [14514284786278117030]
    assert mersenne_twister_64(7, 1000)[:300].tolist() == mersenne_twister_64(7, 300).tolist()


def test_the_32_bit_generator_gives_the_words_that_the_standard_names():
    assert int(np.random.RandomState(5489).randint(2**32, size=10_000, dtype=np.uint32)[-1]) == 4123659995


def walked(lengths, boundaries, samples, most, short_probability, seed, fewest):
    """Megatron's loops (helpers.cpp, build_mapping), sentence by sentence."""
    words = iter(np.random.RandomState(seed).randint(2**32, size=10_000, dtype=np.uint32).tolist())
    one_in = int(1 / short_probability + 0.5) if short_probability else 0

    def draw():
        if one_in == 0:
            return most
        word = next(words)
        return 2 + word % (most - 1) if word % one_in == 0 else most

    rows = []
    for _ in range(50):
        if len(rows) >= samples:
            break
        for begin, end in pairwise(boundaries):
            long = end - begin > 1 and any(length > 512 for length in lengths[begin:end])
            if end - begin < fewest or long:
                continue
            first, tokens, sentences, wanted = begin, 0, 0, draw()
            for i in range(begin, end):
                tokens, sentences, left = tokens + lengths[i], sentences + 1, end - i - 1
                if (tokens >= wanted and left > 1 and sentences >= fewest) or left == 0:
                    rows.append((first, i + 1, wanted))
                    first, tokens, sentences, wanted = i + 1, 0, 0, draw()
    for i, word in zip(range(len(rows) - 1, 0, -1), mersenne_twister_64(seed + 1, len(rows)).tolist(), strict=False):
        j = word % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


@settings(deadline=None, max_examples=150)
@given(
    documents=st.lists(st.lists(st.sampled_from([0, 1, 3, 9, 20, 512, 513]), max_size=9), min_size=1, max_size=15),
    samples=st.integers(1, 40),
    most=st.sampled_from([2, 13, 40]),
    short_probability=st.sampled_from([0, 0.1, 0.4, 0.5, 1]),
    seed=st.integers(0, 2**31 - 2),
    fewest=st.sampled_from([1, 2]),
    piece=st.integers(1, 5),
    skipped=st.integers(0, 3),
)
def test_rows_are_those_of_megatrons_loop(documents, samples, most, short_probability, seed, fewest, piece, skipped):
    lengths = np.array([length for document in documents for length in document], np.int32)
    boundaries = np.cumsum([0, *map(len, documents)])[min(skipped, len(documents) - 1) :]
    expected = walked(lengths.tolist(), boundaries.tolist(), samples, most, short_probability, seed, fewest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentence_pairs, "PIECE", piece)
        found = build_pair_index(lengths, boundaries, samples, most, short_probability, seed, fewest)
    assert found.dtype == np.uint32
    assert [tuple(row) for row in found.tolist()] == expected


@pytest.mark.parametrize("rows", [1, 2, 500, 20_000])
def test_exchanges_made_at_once_are_those_made_one_by_one(rows):
    lengths, boundaries = np.full(2 * rows, 10, np.int32), np.arange(0, 2 * rows + 1, 2)  # a sample a document
    order = list(range(rows))
    for i, word in zip(range(rows - 1, 0, -1), mersenne_twister_64(6, rows).tolist(), strict=False):
        j = word % (i + 1)
        order[i], order[j] = order[j], order[i]
    assert (build_pair_index(lengths, boundaries, None, 100, 0, 5)[:, 0] // 2).tolist() == order


def test_one_epoch_takes_every_useful_sentence_once():
    random = np.random.RandomState(0)
    counts = random.randint(0, 12, 300)
    lengths = random.randint(0, 60, counts.sum()).astype(np.int32)
    boundaries = np.cumsum([0, *counts])
    rows = build_pair_index(lengths, boundaries, None, 125, 0.1, 3)
    taken = sorted(i for first, last, _ in rows.tolist() for i in range(first, last))
    several = [i for i, count in enumerate(counts) if count >= 2]
    assert taken == [i for document in several for i in range(boundaries[document], boundaries[document + 1])]
    assert (rows[:, 1] - rows[:, 0]).min() >= 2


def test_a_tenth_of_the_samples_is_wanted_shorter_and_of_every_length():
    lengths, boundaries = np.full(60_000, 20, np.int32), np.arange(0, 60_001, 6)
    wanted = build_pair_index(lengths, boundaries, None, 62, 0.1, 5)[:, 2]
    assert (wanted < 62).mean() == pytest.approx(0.1 * 60 / 61, abs=0.01)  # of the short ones some are as long
    assert set(wanted.tolist()) == set(range(2, 63))


def test_one_word_decides_both_so_that_where_sequences_are_512_long_only_even_lengths_are_short():
    lengths, boundaries = np.full(60_000, 20, np.int32), np.arange(0, 60_001, 6)
    wanted = build_pair_index(lengths, boundaries, None, 509, 0.1, 5)[:, 2]
    assert set((wanted[wanted < 509] % 2).tolist()) == {0}


def test_epochs_are_whole_and_end_when_there_are_enough():
    lengths, boundaries = np.full(30, 10, np.int32), np.arange(0, 31, 3)  # ten documents, a sample each
    sizes = [len(build_pair_index(lengths, boundaries, samples, 100, 0.1, 1)) for samples in (None, 1, 10, 11, 25)]
    assert sizes == [10, 10, 10, 20, 30]


def test_no_useful_document_makes_no_rows_instead_of_endless_epochs():
    lengths, boundaries = np.array([5, 600, 5], np.int32), np.array([0, 1, 1, 3])
    assert build_pair_index(lengths, boundaries, 10, 100, 0.1, 1).shape == (0, 3)
