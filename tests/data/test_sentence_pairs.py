"""Samples as runs of sentences: the walk with look-ups is Megatron's loop, and both generators are C++'s."""

from itertools import pairwise

import numpy as np
import pytest

from mjax.data import bert
from mjax.data.bert import build_pair_index, mersenne_twister_64


def test_generators_give_the_standards_words():
    """C++11, 26.5.5."""
    assert int(mersenne_twister_64(5489, 10_000)[-1]) == 9981545732273789042
    assert mersenne_twister_64(5489, 1).tolist() == [14514284786278117030]


def exchanged(rows, seed):
    """The rows as Megatron exchanges them, one by one."""
    words = mersenne_twister_64(seed, len(rows)).tolist()
    for i, word in zip(range(len(rows) - 1, 0, -1), words, strict=False):
        j = word % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return rows


def walked(lengths, boundaries, samples, most, short_probability, seed):
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
            if end - begin < 2 or long:
                continue
            first, tokens, sentences, wanted = begin, 0, 0, draw()
            for i in range(begin, end):
                tokens, sentences, left = tokens + lengths[i], sentences + 1, end - i - 1
                if (tokens >= wanted and left > 1 and sentences >= 2) or left == 0:
                    rows.append([first, i + 1, wanted])
                    first, tokens, sentences, wanted = i + 1, 0, 0, draw()
    return exchanged(rows, seed + 1)


@pytest.mark.parametrize("case", range(60))
def test_rows_are_those_of_megatrons_loop(monkeypatch, case):
    random = np.random.default_rng(case)
    counts = random.integers(0, 10, random.integers(1, 15))
    lengths = random.choice([0, 1, 3, 9, 20, 512, 513], counts.sum(), p=[0.1, 0.1, 0.2, 0.3, 0.2, 0.05, 0.05])
    boundaries = np.cumsum([0, *counts])[case % 2 :]  # all documents, or those from the second on
    most, short = [2, 13, 40][case % 3], [0, 0.1, 0.4, 0.5, 1][case % 5]
    options = int(random.integers(1, 40)), most, short, int(random.integers(2**31 - 1))
    monkeypatch.setattr(bert, "PIECE", int(random.integers(1, 5)))
    found = build_pair_index(lengths.astype(np.int32), boundaries, *options)
    assert found.dtype == np.uint32
    assert found.tolist() == walked(lengths.tolist(), boundaries.tolist(), *options)


def test_epochs_are_whole_and_end():
    lengths, boundaries = np.full(30, 10, np.int32), np.arange(0, 31, 3)  # ten documents, a sample each
    sizes = [len(build_pair_index(lengths, boundaries, samples, 100, 0.1, 1)) for samples in (None, 1, 10, 11, 25)]
    assert sizes == [10, 10, 10, 20, 30]
    lengths, boundaries = np.array([5, 600, 5], np.int32), np.array([0, 1, 1, 3])  # no useful document
    assert build_pair_index(lengths, boundaries, 10, 100, 0.1, 1).shape == (0, 3)
