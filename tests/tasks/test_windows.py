"""Overlapping windows: every label counts once, with the context it should have, as Megatron's v1.0 counts them."""

import math

import numpy as np
import pytest

from mjax.tasks.interface import ContextWindow, split_into_windows


def counted_of(windows):
    return [int(label) for window in windows for label in window.tokens[len(window.tokens) - window.counted :]]


def published(tokens, positions, overlap):
    """The windows and masks of v1.0's description, padding and all: the tokens that each counts."""
    for index in range(max(math.ceil(max(len(tokens) - 1 - overlap, 0) / overlap) + 1, 1)):
        start = index * overlap
        part = list(tokens[start : start + positions + 1])
        mask = [True] * (len(part) - 1) + [False] * (positions + 1 - len(part))
        if overlap != positions and index:
            mask[: positions - overlap] = [False] * (positions - overlap)
        yield [token for token, counts in zip(part[1:], mask, strict=False) if counts]


@pytest.mark.parametrize("positions", [1, 4, 16])
@pytest.mark.parametrize("count", [2, 3, 7, 17, 18, 19, 33, 64])
def test_windows_count_labels_as_megatron(count, positions):
    """Without v1.0's last windows, which count nothing; later labels have at least s - o tokens before them."""
    tokens = np.arange(count)
    for overlap in range(1, positions + 1):
        windows = split_into_windows(tokens, positions, overlap)
        assert counted_of(windows) == list(range(1, count))
        assert all(2 <= len(window.tokens) <= positions + 1 for window in windows)
        assert all(len(window.tokens) - window.counted > positions - overlap for window in windows[1:])
        ours, theirs = [counted_of([window]) for window in windows], list(published(tokens, positions, overlap))
        assert theirs[: len(ours)] == ours
        assert not any(theirs[len(ours) :])


@pytest.mark.parametrize(("context", "begin"), [(2, 0), (6, 0), (7, 1), (20, 14)])
def test_window_has_all_the_context_that_fits(context, begin):
    """Windows of 8 positions, after which the last label comes: 9 tokens."""
    window = ContextWindow.from_context(list(range(context)), [97, 98, 99], 8)
    assert window.tokens.tolist() == [*range(begin, context), 97, 98, 99]
    assert window.counted == 3
