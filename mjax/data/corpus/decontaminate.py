"""Cut evaluation text out of training text, by the rules of Megatron's tools/openwebtext/filter_ngrams.py.

A test set that was trained on measures memory. Its texts become runs of 13 words (GRAM), in lower case and without
punctuation; a text of 8 to 12 words is one run, a shorter one none. Where a document contains such a run, the run is
removed with 200 characters on either side, up to the end of the sentence there:

    … the sentence before. │ Some words. (200 characters) RUN (200 characters) words. │ The sentence after …
    ───────── piece ─────── cut ─────────────────────────────────────────────────── ── searched on ──────────

Pieces of 200 characters or fewer are removed too, and a document that falls into more than ten pieces is removed
altogether. Runs that occur in the training text ten times or more are common phrases, such as a license, and stay;
so remove duplicates first, or ten copies of a test set look like a common phrase.

Two rules follow the original exactly: a text of fewer than 13 words is not searched, and runs of 8 to 12 words are
searched wherever 13 words are left, and last among the last 13. One does not: the original counts a run only if it does
not overlap the one before, so that most runs of a long common phrase look rare; here all count.

Runs are compared by 64-bit hashes (shingles.py): of 2,000 corpora of 10¹⁰ words, searched for a million runs, one would
lose a sentence by chance.
"""

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

import numpy as np

from mjax.data.corpus.shingles import window_hashes, word_hashes

GRAM, SHORTEST_GRAM = 13, 8  # words
MARGIN = 200  # characters removed on either side
SHORTEST_PIECE = 200  # characters; a piece must have more
MOST_PIECES = 10
SENTENCE_ENDS = ".!?"

Grams = dict[int, np.ndarray]
"""Evaluation text: sorted hashes of its runs, uint64, by their number of words."""

Matches = dict[int, list[tuple[int, int]]]
"""Runs of it in a document: first word and hash of each, in order, by their number of words."""


class Words:
    """A text as hashed words with their positions."""

    def __init__(self, text: str):
        self.text = text
        self.hashes, self.starts, self.ends = word_hashes(_folded(text))

    def __len__(self) -> int:
        return len(self.hashes)

    def runs(self, words: int) -> np.ndarray:
        """Hash of each run of `words` words, uint64 [runs]; empty if the text is shorter."""
        if len(self) < words:
            return np.empty(0, np.uint64)
        return window_hashes(self.hashes, np.array([len(self)]), words)[0]

    def find(self, grams: Grams) -> Matches:
        """All runs of this text that are evaluation text."""
        matches = {}
        for length, wanted in grams.items():
            runs = self.runs(length)
            nearest = np.minimum(np.searchsorted(wanted, runs), len(wanted) - 1)
            hits = np.flatnonzero(wanted[nearest] == runs) if len(wanted) else np.empty(0, np.int64)
            matches[length] = list(zip(hits.tolist(), runs[hits].tolist(), strict=True))
        return matches


def evaluation_grams(texts: Iterable[str]) -> Grams:
    """The runs of words of evaluation texts."""
    grams: dict[int, list[np.ndarray]] = {}
    for text in texts:
        words = Words(text)
        length = min(len(words), GRAM)
        if length >= SHORTEST_GRAM:
            grams.setdefault(length, []).append(words.runs(length))
    return {length: np.unique(np.concatenate(parts)) for length, parts in grams.items()}


def count_matches(text: str, grams: Grams) -> Counter[int]:
    """Count how often each run occurs in `text`, by hash."""
    return Counter(gram for matches in Words(text).find(grams).values() for _, gram in matches)


def without_common(grams: Grams, counts: Counter[int], common: int) -> Grams:
    """The runs that occur fewer than `common` times."""
    often = np.array([gram for gram, count in counts.items() if count >= common], np.uint64)
    return {length: hashes[~np.isin(hashes, often)] for length, hashes in grams.items()}


def cut(text: str, grams: Grams) -> tuple[list[str], list[str]]:
    """Cut `text`: returns the remaining pieces and the runs it was cut at; without runs, the text is the only piece."""
    words = Words(text)
    matches = words.find(grams)
    pieces, runs, begin = [], [], 0
    while match := _first_match(matches, bisect_left(words.starts, begin), len(words)):
        starts, ends = words.starts[match], words.ends[match]
        runs.append(text[starts[0] : ends[-1]])
        start = int(starts[0])
        # For the original, a run is as long as its words with single spaces between them.
        end = start + int((ends - starts).sum()) + len(starts) - 1
        before = max(text.rfind(mark, begin, max(start - MARGIN + 1, 0)) for mark in SENTENCE_ENDS)
        if before + 1 - begin > SHORTEST_PIECE:
            pieces.append(text[begin : before + 1])
        after = [end_mark for mark in SENTENCE_ENDS if (end_mark := text.find(mark, end + MARGIN)) >= 0]
        begin = min(after) + 1 if after else len(text)
    if not runs or len(text) - begin > SHORTEST_PIECE:
        pieces.append(text[begin:])
    return pieces, runs


def _first_match(matches: Matches, begin: int, count: int) -> slice | None:
    """The words of the match that the original finds first in a text of `count` words, from word `begin` on.

    At each word it tries 13 words, then 8 to 12. Only at the end, where no 13 are left, the lengths come first.
    """

    def first_from(length: int, begin: int) -> int:
        """The word at which the first match of `length` words begins; beyond all words if there is none."""
        index = bisect_left(matches[length], (begin,))
        return matches[length][index][0] if index < len(matches[length]) else sys.maxsize

    last = count - GRAM  # the last word that 13 words begin with
    word, _, length = min(
        ((first_from(words, begin), words != GRAM, words) for words in matches), default=(count, True, 0)
    )
    if word <= last:
        return slice(word, word + length)
    for length in sorted(matches) if begin < last else ():
        word = first_from(length, last)
        if word < count:
            return slice(word, word + length)
    return None


def _folded(text: str) -> str:
    """`text` in lower case without moving characters: the few whose lower case is longer stay."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
