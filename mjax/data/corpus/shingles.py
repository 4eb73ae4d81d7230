"""Shingles: a text as the set of its short runs of words, and each run as one 64-bit number.

Two texts are near-duplicates if their sets A and B of shingles overlap: the Jaccard similarity |A ∩ B| / |A ∪ B| is 1
for equal sets and near 0 for unrelated texts, which share words but hardly any five in a row (Broder 1997, "On the
resemblance and containment of documents").

    "The cat sat on the mat, twice."  ── words ──▶  the cat sat on the mat twice
                                      ── 5 ──────▶  {the cat sat on the, cat sat on the mat, sat on the mat twice}

A word is a run of letters, digits and underscores, in lower case: the regular expression \\w+. A text with fewer words
than a shingle has one shingle, all its words; a text without words has none and is similar to no other.

Hashing text word by word is slow in Python, so whole batches of texts are hashed at once. The hash of the run v_i … v_j
of numbers is the polynomial Σ m(v_k) β^(k-i) modulo 2⁶⁴, a difference of two prefix sums times a power of 1/β, without
a loop over runs. It is used twice: a word is a run of characters, and a shingle a run of words. Two different shingles
get the same number with a probability of about 2⁻⁶⁰.
"""

import functools
import re
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from mjax.data.corpus import Unit

BASE = 0x9E3779B97F4A7C15  # β: odd, so that it has an inverse modulo 2⁶⁴
BLOCK = 2**14  # characters hashed at once: the arrays stay in the cache
NON_WORD = re.compile(r"\W")
CODES = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


def shingle_hashes(texts: Sequence[str], size: int, unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """The shingles of each text in order, repeated ones included.

    Args:
      texts: one or more.
      size: words or characters in a shingle, at least 1.
      unit: words or characters. Characters are used as they are, as in Megatron's openwebtext tools: capitals,
        punctuation and line ends count.

    Returns:
      hashes uint64 [shingles], offsets uint64 [texts + 1]: those of text i are hashes[offsets[i] : offsets[i + 1]].
    """
    if unit == "words":
        texts = [text.lower() for text in texts]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = np.cumsum(lengths + 1)  # a line end closes each text
    joined = "\n".join([*texts, ""])
    if unit == "words":
        values, starts, _ = word_hashes(joined)
        counts = np.diff(np.searchsorted(starts, ends), prepend=0)  # words of each text
    else:
        values = _codes(joined)
        values, counts = np.delete(values, ends - 1), lengths
    return window_hashes(values.astype(np.uint64), counts, size)


def shingle_set(hashes: np.ndarray) -> np.ndarray:
    """The distinct shingles of one text, sorted: uint64 [n] → uint64 [distinct]."""
    return np.unique(hashes)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """|A ∩ B| / |A ∪ B| of two sorted arrays of distinct shingles; 0 if both are empty.

    A similarity of 7/10 is the float 0.7 itself, because a division is rounded like a literal: thresholds are exact.
    """
    both = np.sort(np.concatenate((one, other)))
    common = int(np.count_nonzero(both[1:] == both[:-1]))
    return common / (len(both) - common) if len(both) else 0.0


def word_hashes(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each word of `text`, whose case is not folded: its hash, uint64 [w], and where it begins and ends, int64 [w]."""
    parts = [(np.empty(0, np.uint64), *np.empty((2, 0), np.int64))]
    for start, block in _blocks(text):
        codes = _codes(block)
        inside = np.zeros(len(codes) + 2, bool)
        inside[1:-1] = _word_characters()[codes]
        edges = np.flatnonzero(inside[1:] != inside[:-1])  # a word begins, a word ends, a word begins, …
        starts, ends = edges[0::2], edges[1::2]
        parts.append((_runs(codes.astype(np.uint64), starts, ends), starts + start, ends + start))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def window_hashes(values: np.ndarray, counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The runs of `size` values inside each text, or all the values of a text that has fewer.

    Args:
      values: uint64 [values], those of one text after those of another.
      counts: how many of them each text has, int64 [texts].
      size: values a run.

    Returns:
      As `shingle_hashes`. The hash of a run depends on its values and their number, not on its position.
    """
    windows = np.where(counts > 0, np.maximum(counts - size + 1, 1), 0)  # of each text
    offsets = np.concatenate(([0], np.cumsum(windows)))
    first = np.cumsum(counts) - counts  # value where each text begins
    starts = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], windows)
    ends = starts + np.repeat(np.minimum(counts, size), windows)
    return _runs(values, starts, ends), offsets.astype(np.uint64)


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """`text` in parts of about BLOCK characters that end between words, each with the character where it begins."""
    start = 0
    while start < len(text):
        gap = NON_WORD.search(text, start + BLOCK)
        end = gap.start() if gap else len(text)
        yield start, text[start:end]
        start = end


def _runs(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Hash of each run values[start:end], uint64 [runs]; arithmetic is modulo 2⁶⁴ throughout."""
    length = 1 << max(len(values) - 1, 1).bit_length()
    powers, inverses = _powers(length)
    prefix = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(_mixed(values) * powers[: len(values)], out=prefix[1:])
    return _mixed((prefix[ends] - prefix[starts]) * inverses[starts] + (ends - starts).astype(np.uint64))


@functools.lru_cache(maxsize=4)
def _powers(length: int) -> tuple[np.ndarray, np.ndarray]:
    """β^i and β^-i for i < length, modulo 2⁶⁴."""

    def powers(base: int) -> np.ndarray:
        factors = np.full(length, base, np.uint64)
        factors[0] = 1
        return np.cumprod(factors)

    return powers(BASE), powers(pow(BASE, -1, 2**64))


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that lets every bit reach every other (splitmix64)."""
    mixed = values + np.uint64(BASE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@functools.cache
def _word_characters() -> np.ndarray:
    """Table of the code points that are part of a word, bool [1114112]: the \\w of regular expressions."""
    table = np.fromiter((chr(code).isalnum() for code in range(sys.maxunicode + 1)), bool, sys.maxunicode + 1)
    table[ord("_")] = True
    return table


def _codes(text: str) -> np.ndarray:
    """Code points of `text`, uint32 [characters]."""
    return np.frombuffer(text.encode(CODES, errors="surrogatepass"), np.uint32)
