"""SQuAD's rows: [CLS] question [SEP] window of the context [SEP].

A context that is longer than a row is read in overlapping windows, each beginning 128 tokens after the previous one. A
token may then be in several windows, in the middle of one and at the end of another; an answer counts only from the
window with the most context on both sides of its first token (`deciding`), so each answer comes once (Google's
run_squad.py).

The tokenizer gives the character range of each token. So an answer is mapped to tokens by its characters, and a
predicted one is cut out of the original text. Google's code has no character ranges and reconstructs the text from word
pieces; where that fails, it returns whole words, including attached punctuation.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

STRIDE = 128  # tokens by which a window advances
LONGEST_QUESTION = 64  # tokens


class Span(NamedTuple):
    """Tokens of a context from `first` to `last`, both of them included."""

    first: int
    last: int


class Context:
    """A text, its tokens, and the characters of each.

    Attributes:
      ids: token ids.
      begin, end: int [tokens]; token i is text[begin[i] : end[i]].
    """

    def __init__(self, text: str, ids: Sequence[int], characters: Sequence[tuple[int, int]]):
        self.text, self.ids = text, ids
        self.begin, self.end = np.array(characters, np.int64).reshape(-1, 2).T

    def locate(self, begin: int, length: int) -> Span | None:
        """First and last token with any of `length` characters from `begin` on; None if there is none."""
        first = int(np.searchsorted(self.end, begin, side="right"))
        last = int(np.searchsorted(self.begin, begin + length, side="left")) - 1
        return Span(first, last) if first <= last else None

    def cut(self, span: Span) -> str:
        """The original text of these tokens."""
        begin, end = int(self.begin[span.first]), int(self.end[span.last])
        while end < len(self.text) and unicodedata.combining(self.text[end]):
            end += 1  # a combining accent belongs to its letter, and tokens without accents omit it
        return self.text[begin:end]


class Window(NamedTuple):
    """Tokens of a context that are in one row.

    Attributes:
      offset: position in the row of the window's first token.
      first: that token's index in the context.
      deciding: bool [tokens of the window], whether an answer that begins there counts.
    """

    offset: int
    first: int
    deciding: np.ndarray


def cut_into_windows(tokens: int, room: int, stride: int) -> list[range]:
    """Ranges of at most `room` of a context's `tokens`, each `stride` after the previous one, up to the end."""
    step = min(room, stride)
    windows = [range(min(room, tokens))]
    while windows[-1].stop < tokens:
        start = windows[-1].start + step
        windows.append(range(start, min(start + room, tokens)))
    return windows


def deciding_windows(windows: Sequence[range], tokens: int) -> np.ndarray:
    """int [tokens]: for each token the window with the largest minimum of tokens before and after it.

    As in Google's run_squad.py a hundredth of the window's length is added to that. In a tie the first one is taken.
    """
    deciding, best = np.zeros(tokens, np.int64), np.full(tokens, -1.0)
    for number, window in enumerate(windows):
        inside, place = slice(window.start, window.stop), np.arange(len(window))
        shown = np.minimum(place, place[::-1]) + 0.01 * len(window)
        better = shown > best[inside]
        deciding[inside][better], best[inside][better] = number, shown[better]
    return deciding


def answer_position(span: Span | None, window: range, offset: int) -> tuple[int, int]:
    """Positions in the row of an answer's first and last token; both 0, [CLS], if it is not entirely in the window."""
    if span is None or span.first < window.start or span.last >= window.stop:
        return 0, 0
    return span.first - window.start + offset, span.last - window.start + offset
