"""Overlapping windows: every label counts once, with the context it should have, as Megatron's v1.0 counts them."""

import math

import numpy as np
import pytest

from mjax.errors import UsageError
from mjax.tasks.windows import check_overlap, overlapping_windows

SIZES = [(n, s, o) for n in (2, 3, 7, 17, 18, 19, 33, 64) for s in (1, 4, 16) for o in (1, 2, 3, 4, 16) if o <= s]


def counted_of(windows):
    return [int(label) for window in windows for label in window.tokens[len(window.tokens) - window.counted :]]


def published(tokens, positions, overlap):
    """The windows and masks of v1.0's description, padding and all: what each counts of `tokens`."""
    for index in range(max(math.ceil(max(len(tokens) - 1 - overlap, 0) / overlap) + 1, 1)):
        start = index * overlap
        part = list(tokens[start : start + positions + 1])
        mask = [True] * len(part) + [False] * (positions + 1 - len(part))
        mask = mask[1:]
        if overlap != positions and index:
            mask[: positions - overlap] = [False] * (positions - overlap)
        yield [token for token, counts in zip(part[1:], mask, strict=False) if counts]


@pytest.mark.parametrize(("count", "positions", "overlap"), SIZES)
def test_every_token_but_the_first_is_a_label_that_counts_once(count, positions, overlap):
    windows = overlapping_windows(np.arange(count), positions, overlap)
    assert counted_of(windows) == list(range(1, count))
    assert all(2 <= len(window.tokens) <= positions + 1 for window in windows)


@pytest.mark.parametrize(("count", "positions", "overlap"), SIZES)
def test_a_label_after_the_first_window_has_at_least_positions_less_overlap_tokens_before_it(count, positions, overlap):
    for window in overlapping_windows(np.arange(count), positions, overlap)[1:]:
        assert len(window.tokens) - window.counted > positions - overlap


@pytest.mark.parametrize(("count", "positions", "overlap"), SIZES)
def test_windows_are_those_of_v1_without_the_last_ones_which_count_nothing(count, positions, overlap):
    tokens = np.arange(count)
    ours = [counted_of([window]) for window in overlapping_windows(tokens, positions, overlap)]
    theirs = list(published(tokens, positions, overlap))
    assert theirs[: len(ours)] == ours
    assert not any(theirs[len(ours) :])
    if count - 1 > positions:
        assert len(theirs) == math.ceil((count - 1 - overlap) / overlap) + 1
        if positions % overlap == 0:
            assert len(theirs) - len(ours) == positions // overlap - 1


@pytest.mark.parametrize("overlap", [0, -1, 17])
def test_an_overlap_that_does_not_fit_the_model_is_refused(overlap):
    with pytest.raises(UsageError, match=f"--overlap {overlap} does not fit a model of 16 positions; give a number"):
        check_overlap(overlap, 16)
