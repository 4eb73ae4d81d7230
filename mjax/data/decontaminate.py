"""Evaluation text is cut out of training text, by the rule of Megatron's tools/openwebtext/filter_ngrams.py.

A test set that was trained on measures memory. Its texts are turned into runs of 13 words (GRAM), in lower case and
without punctuation; a text of 8 to 12 words is one run, and a shorter one none. Where a document holds such a run, the
run goes, and 200 characters on either side of it, up to the end of the sentence there:

    … the sentence before. │ Some words. (200 characters) RUN (200 characters) words. │ The sentence after …
    ───────── piece ─────── cut ─────────────────────────────────────────────────── ── searched on ──────────

A piece of 200 characters or fewer goes too, and a document that falls into more than ten pieces goes altogether. Runs
that the training text holds ten times or more are common phrases, such as a license, and are left alone; so remove
duplicates first, or ten copies of a test set pass for one.

Two rules follow the original to the letter: a text of fewer than 13 words is not searched, and runs of 8 to 12 words
are looked for wherever 13 words are left, and last among the last 13. One does not: the original counts a run only
where it does not overlap the one before, so that of a long common phrase most runs pass for rare; here all count.

Runs are compared by their 64-bit hashes (shingles.py): of 2,000 corpora of 10¹⁰ words, searched for a million runs, one
would lose a sentence by chance.
"""

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mjax.data.shingles import window_hashes, word_hashes

GRAM, SHORTEST_GRAM = 13, 8  # words
MARGIN = 200  # characters that go on either side
SHORTEST_PIECE = 200  # characters, of which a piece has to have more
MOST_PIECES = 10
SENTENCE_ENDS = ".!?"

Grams = dict[int, np.ndarray]
"""Evaluation text: sorted hashes of its runs, uint64, by their number of words."""

Found = dict[int, list[tuple[int, int]]]
"""What of it a document holds: first word and hash of each run, in order, by their number of words."""


@dataclass(frozen=True)
class Match:
    """A run of evaluation text in a document."""

    word: int
    """Number of its first word."""
    words: int
    """Its length."""
    hash: int
    """Its hash."""


class Words:
    """A text as hashed words that know their place."""

    def __init__(self, text: str):
        self.text = text
        self.hashes, self.starts, self.ends = word_hashes(_folded(text))

    def __len__(self) -> int:
        return len(self.hashes)

    def runs(self, words: int) -> np.ndarray:
        """Hash of each run of `words` words, uint64 [runs]; none where the text is shorter."""
        if len(self) < words:
            return np.empty(0, np.uint64)
        return window_hashes(self.hashes, np.array([len(self)]), words)[0]

    def find(self, grams: Grams) -> Found:
        """All runs of this text that are evaluation text."""
        found = {}
        for length, wanted in grams.items():
            runs = self.runs(length)
            places = np.minimum(np.searchsorted(wanted, runs), len(wanted) - 1)
            hits = np.flatnonzero(wanted[places] == runs) if len(wanted) else np.empty(0, np.int64)
            found[length] = list(zip(hits.tolist(), runs[hits].tolist(), strict=True))
        return found


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
    """How often each run, named by its hash, occurs in `text`."""
    return Counter(gram for places in Words(text).find(grams).values() for _, gram in places)


def without_common(grams: Grams, counts: Counter[int], common: int) -> Grams:
    """The runs that occur fewer than `common` times."""
    often = np.array([gram for gram, count in counts.items() if count >= common], np.uint64)
    return {length: hashes[~np.isin(hashes, often)] for length, hashes in grams.items()}


def cut(text: str, grams: Grams) -> tuple[list[str], list[str]]:
    """What remains of `text`, in pieces, and the runs it was cut at; the text itself and nothing where it has none."""
    words = Words(text)
    found = words.find(grams)
    pieces, runs, begin = [], [], 0
    while match := _first_match(found, bisect_left(words.starts, begin), len(words)):
        spelled = slice(match.word, match.word + match.words)
        starts, ends = words.starts[spelled], words.ends[spelled]
        runs.append(text[starts[0] : ends[-1]])
        start = int(starts[0])
        # The original takes the run for as long as its words with single spaces between them.
        end = start + int((ends - starts).sum()) + match.words - 1
        before = max(text.rfind(mark, begin, max(start - MARGIN + 1, 0)) for mark in SENTENCE_ENDS)
        if before + 1 - begin > SHORTEST_PIECE:
            pieces.append(text[begin : before + 1])
        after = [place for mark in SENTENCE_ENDS if (place := text.find(mark, end + MARGIN)) >= 0]
        begin = min(after) + 1 if after else len(text)
    if not runs or len(text) - begin > SHORTEST_PIECE:
        pieces.append(text[begin:])
    return pieces, runs


def _first_match(found: Found, begin: int, count: int) -> Match | None:
    """The match that the original finds first in a text of `count` words, from word `begin` on.

    At each word it tries 13 words, then 8 to 12. Only at the end, where no 13 are left, the lengths come first.
    """
    last = count - GRAM  # the last word that 13 words begin with
    best = None
    for words in sorted(found, key=lambda words: (words != GRAM, words)):
        word, gram = _first_from(found[words], begin)
        if word <= last and (best is None or word < best.word):
            best = Match(word, words, gram)
    if best is not None or last <= begin:
        return best
    for words in sorted(found):
        word, gram = _first_from(found[words], last)
        if word < count:
            return Match(word, words, gram)
    return None


def _first_from(places: list[tuple[int, int]], begin: int) -> tuple[int, int]:
    """The first of `places` at or after word `begin`; one beyond all words where there is none."""
    index = bisect_left(places, (begin,))
    return places[index] if index < len(places) else (sys.maxsize, 0)


def _folded(text: str) -> str:
    """`text` in lower case, every character in its place: the few whose lower case is longer stay as they are."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
