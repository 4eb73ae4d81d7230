"""The sentences of each BERT sample: runs of whole sentences of one document, in Megatron's order.

Sentences of a document are added to a sample until it reaches its target length; the next sample begins with the next
sentence. Two rules keep the ends useful: a sample that will be cut into two segments has at least two sentences, and a
single sentence is never left over, so the last sample of a document may be much longer than its target, and is cut when
it is read.

    sentences  | 30 tokens | 25 | 40 | 18 | 31 | 22 |         wanted: 60
    samples    |── 0 ─────────────────|── 1 ────────|         after 55 tokens one more; after 1 only one would be left

The target is usually the longest that fits, s − 3 beside [CLS], [SEP] and [SEP]. With a probability of about 10% it is
shorter, from 2 tokens up, because fine-tuning often sees short inputs (google-research/bert,
create_pretraining_data.py). One random word decides both whether a sample is short and its length, so with s of 512 and
one in ten short only even lengths occur. Each epoch draws new ones. All samples of all epochs are shuffled together.
Documents with fewer sentences than a sample needs are skipped, and so are documents of several sentences with one
longer than 512 tokens.

Every target depends on the number of draws before it, so the walk is a loop, but over samples rather than sentences:
the end of a sample is looked up among the running totals of tokens.

Given the same files, documents, seed and number of samples the result is that of Megatron's C++, row for row.

Source: Megatron-LM, core/datasets/helpers.cpp (build_mapping).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import repeat

import numpy as np

LONG_SENTENCE = 512  # tokens; a document of several sentences with a longer one is skipped
PIECE = 2**16  # documents, or draws, held as Python numbers at a time


def build_pair_index(
    lengths: np.ndarray,
    boundaries: np.ndarray,
    samples: int | None,
    most: int,
    short_probability: float,
    seed: int,
    fewest: int = 2,
) -> np.ndarray:
    """Sentences of each sample and its target, (first sentence, one after the last, tokens), [rows, 3].

    Epochs are whole, so there may be more rows than samples asked for; none if no document is usable.

    Args:
      lengths: tokens in each sentence of the dataset, int32 [S].
      boundaries: sentence with which each document to draw from begins, and the end of the last, int64 [documents + 1].
      samples: minimum number of rows; None: one epoch.
      most: target of a sample that is not short, in tokens, 2 or more.
      short_probability: share of samples that are short: 1 in round(1 / probability); 0: none.
      seed: determines lengths and order.
      fewest: sentences that a sample needs: 2 if it is cut into two segments, else 1.

    Returns:
      uint32, or uint64 in a dataset of 2^32 sentences and more.
    """
    wanted = _wanted_lengths(seed, most, short_probability)
    dtype = np.uint64 if len(lengths) > np.iinfo(np.uint32).max else np.uint32
    found, rows = [np.empty((0, 3), dtype)], 0
    while True:
        before = rows
        for first in range(0, len(boundaries) - 1, PIECE):
            piece = _walk(lengths, boundaries[first : first + PIECE + 1], wanted, most, fewest)
            found.append(piece.astype(dtype))
            rows += len(piece)
        if samples is None or rows >= samples or rows == before:
            break
    return np.concatenate(found)[_shuffled(rows, seed + 1)]


def _wanted_lengths(seed: int, most: int, short_probability: float) -> Iterator[int]:
    """Targets of successive samples, in tokens, from the words of `std::mt19937(seed)`."""
    if short_probability == 0:
        yield from repeat(most)
    one_in = math.floor(1 / short_probability + 0.5)  # C's round: halves go up
    random = np.random.RandomState(seed % 2**32)
    while True:
        words = random.randint(2**32, size=PIECE, dtype=np.uint32)  # the generator's words as they are
        yield from np.where(words % one_in == 0, 2 + words % (most - 1), most).tolist()


def _walk(lengths: np.ndarray, boundaries: np.ndarray, wanted: Iterator[int], most: int, fewest: int) -> np.ndarray:
    """The samples of some documents in the order of the file, [rows, 3]."""
    origin = int(boundaries[0])
    begins, ends = boundaries[:-1] - origin, boundaries[1:] - origin  # [documents]
    sizes = lengths[origin : int(boundaries[-1])]
    before = [0, *np.cumsum(sizes, dtype=np.int64).tolist()]  # [sentences + 1], tokens before each
    sentences = ends - begins

    long_before = np.concatenate([[0], np.cumsum(sizes > LONG_SENTENCE)])
    long = (long_before[ends] > long_before[begins]) & (sentences > 1)
    useful = (sentences >= fewest) & ~long

    starts, stops, targets = [], [], []
    for sentence, last in zip(begins[useful].tolist(), ends[useful].tolist(), strict=True):
        while sentence < last:
            tokens = next(wanted)
            stop = bisect_left(before, before[sentence] + tokens, sentence + fewest, last - 1)
            if stop > last - 2:  # one sentence would be left, or none
                stop = last
            starts.append(sentence)
            stops.append(stop)
            targets.append(tokens)
            sentence = stop
        next(wanted)  # Megatron draws one more at the end of a document
    rows = np.array([starts, stops, targets], np.int64).T
    rows[:, :2] += origin
    return rows


def _shuffled(rows: int, seed: int) -> np.ndarray:
    """Row numbers as Fisher and Yates leave them, row i exchanged with row `word % (i + 1)`, i falling; int64 [rows].

    Many exchanges are one operation on arrays. That is correct if no row is in two of them, which is nearly always so
    for an eighth of the square root of the remaining rows; otherwise they are made one by one.
    """
    order = np.arange(rows)
    words = mersenne_twister_64(seed, rows)[: rows - 1]  # for the last row, the one before it, … and row 1
    partner = np.zeros(rows, np.int64)
    partner[1:] = words[::-1] % (order[1:] + 1).astype(np.uint64)
    stop = rows
    while stop > 1:
        first = stop - max(1, math.isqrt(stop) // 8)
        others = partner[first:stop]
        if others.max() < first and len(np.unique(others)) == len(others):
            order[first:stop], order[others] = order[others], order[first:stop].copy()
        else:
            for i in range(stop - 1, first - 1, -1):
                order[i], order[partner[i]] = order[partner[i]], order[i]
        stop = first
    return order


# --- The 64-bit Mersenne Twister of the C++ standard library ----------------------------------------------------------

STATE, LAG = 312, 156  # words the recurrence looks back, and words it computes at once
LOWER = 2**31 - 1
UPPER = 2**64 - 1 - LOWER
TWIST = 0xB5026F5AA96619E9


def mersenne_twister_64(seed: int, count: int) -> np.ndarray:
    """The first `count` words of `std::mt19937_64(seed)`, uint64 [count]; NumPy has the generator only in 32 bits.

    Words follow the recurrence

        x[k + 312] = x[k + 156] ⊕ A(upper 33 bits of x[k], lower 31 bits of x[k + 1])

    and are given out tempered. A word depends on none of the 155 before it, so 156 at a time are one operation on
    arrays.

    Source: Matsumoto and Nishimura, mt19937-64.c (2004); C++11, 26.5.3.2, whose 26.5.5 names the 10,000th word.
    """
    words = np.empty(STATE + count, np.uint64)
    word = seed % 2**64
    for i in range(STATE):
        words[i] = word
        word = (6364136223846793005 * (word ^ (word >> 62)) + i + 1) % 2**64
    for first in range(STATE, len(words), LAG):
        new = words[first : first + LAG]
        before, after = words[first - STATE :][: len(new)], words[first - STATE + 1 :][: len(new)]
        np.bitwise_xor(((before & UPPER) | (after & LOWER)) >> 1, (after & 1) * TWIST, out=new)
        new ^= words[first - LAG :][: len(new)]
    tempered = words[STATE:]
    tempered ^= (tempered >> 29) & 0x5555555555555555
    tempered ^= (tempered << 17) & 0x71D67FFFEDA60000
    tempered ^= (tempered << 37) & 0xFFF7EEE000000000
    tempered ^= tempered >> 43
    return tempered
