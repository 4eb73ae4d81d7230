"""Near-duplicates: MinHash finds the documents worth comparing; similar ones are joined into clusters.

A hash function puts the shingles of a document in a random order; the first one is its MinHash. Two documents have the
same MinHash with probability J, their Jaccard similarity, so a share J of HASHES functions agrees (Broder 1997). The
HASHES values of a document are its signature. It is divided into bands of `rows` values, and documents that agree in
all rows of a band are candidates (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4):

    P(candidate) = 1 - (1 - J^rows)^bands        the S-curve: flat, a steep rise, flat

The rise should be just below the threshold: further down, candidates are compared in vain; further up, duplicates are
missed. `choose_bands` requires a recall of 99% for pairs exactly at the threshold, where it is lowest.

Signatures come from the Rust library `rensa`. Its R-MinHash fills the HASHES values from a few hashes per shingle
(Dahlgaard et al. 2017, "Fast Similarity Sketching") and follows the S-curve, as the tests measure.

Candidates of a band are compared bucket by bucket: first adjacent documents, then those two apart, and so on. A pair is
compared by its shingles unless

- both are in one cluster already, so that the result could not change it,
- their signatures differ by more than chance allows.

A bucket whose documents are all joined is done, so ten thousand copies of one page cost ten thousand comparisons, not
fifty million. The pairs compared in a bucket depend on its documents and their clusters alone, so buckets can be
examined anywhere and in any order. `ROUNDS` divides the bands: copies of a page are joined by the first few bands, and
not compared again in the others.

**Shingles.** A text is the set of its short runs of words, and each run one 64-bit number.

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
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import rensa

from mjax.data.corpus.documents import Unit
from mjax.errors import UsageError

# --- Shingles ---------------------------------------------------------------------------------------------------------

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
    np.cumsum(_mix_bits(values) * powers[: len(values)], out=prefix[1:])
    return _mix_bits((prefix[ends] - prefix[starts]) * inverses[starts] + (ends - starts).astype(np.uint64))


@functools.lru_cache(maxsize=4)
def _powers(length: int) -> tuple[np.ndarray, np.ndarray]:
    """β^i and β^-i for i < length, modulo 2⁶⁴."""

    def powers(base: int) -> np.ndarray:
        factors = np.full(length, base, np.uint64)
        factors[0] = 1
        return np.cumprod(factors)

    return powers(BASE), powers(pow(BASE, -1, 2**64))


def _mix_bits(values: np.ndarray) -> np.ndarray:
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


# --- Signatures and bands ---------------------------------------------------------------------------------------------

HASHES = 256
RECALL = 0.99  # at the threshold
MIN_THRESHOLD = 0.3  # below, a band is a single value and everything is a candidate of everything
SEED = 1908_09053 % 2**31


@dataclass(frozen=True)
class Bands:
    """Division of a signature into `count` bands of `rows` values; a remainder is in no band."""

    rows: int
    count: int

    def recall(self, similarity: float) -> float:
        """Probability that a pair of this Jaccard similarity shares a band: the S-curve."""
        return 1 - (1 - similarity**self.rows) ** self.count


def choose_bands(threshold: float) -> Bands:
    """The most selective bands whose recall at `threshold` is at least RECALL.

    Raises:
      UsageError: the threshold is below LOWEST_THRESHOLD or above 1.
    """
    if not MIN_THRESHOLD <= threshold <= 1:
        fix = f"use {MIN_THRESHOLD:g} to 1, such as 0.7, or --exact for equal texts only"
        raise UsageError(f"--threshold {threshold:g} is not a Jaccard similarity that can be searched for; {fix}")
    return next(
        bands
        for bands in (Bands(rows, HASHES // rows) for rows in range(HASHES, 0, -1))
        if bands.recall(threshold) >= RECALL
    )


def sketch(texts: Sequence[str], size: int, unit: Unit, bands: Bands) -> tuple[np.ndarray, np.ndarray]:
    """Signatures and bands of `texts`, by shingles of `size` units.

    Returns:
      signatures uint8 [documents, HASHES]: the lowest byte of each MinHash, enough to estimate a similarity (Li, König
        2010, "b-Bit Minwise Hashing").
      keys uint64 [bands, documents]: documents with the same key share the band. A document without shingles shares no
        band: its keys are 0.
    """
    hashes, offsets = shingle_hashes(texts, size, unit)
    rows = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, HASHES, SEED).to_rows()
    values = np.array(rows, np.uint32)  # [documents, HASHES]
    keys = np.zeros((bands.count, len(texts)), np.uint64)
    for band, key in enumerate(keys):
        for row in range(bands.rows):
            # FNV's multiplication, then a shift that brings the high bits down again.
            key ^= values[:, band * bands.rows + row]
            key *= np.uint64(0x100000001B3)
            key ^= key >> np.uint64(29)
    keys |= np.uint64(1)  # so that 0 means no shingles
    keys[:, np.diff(offsets) == 0] = 0
    return values.astype(np.uint8), keys


def estimate(signatures: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Estimated similarity of each pair of signatures: two uint8 [pairs, HASHES] → float [pairs].

    The standard deviation is √(J (1 - J) / HASHES), at most 0.031; values that agree by chance in their lowest byte
    raise the estimate by less than 0.004.
    """
    return (signatures == others).mean(axis=1)


def worth_comparing(threshold: float) -> float:
    """The estimate below which a pair is skipped: five standard deviations under the threshold."""
    return threshold - 5 * math.sqrt(threshold * (1 - threshold) / HASHES)


# --- Clusters ---------------------------------------------------------------------------------------------------------

AT_ONCE = 2**14  # pairs whose signatures are in memory together
ROUNDS = (slice(0, 4), slice(4, None))  # bands
EDGE = np.dtype([("one", np.int64), ("other", np.int64), ("jaccard", np.float64)])
"""Two documents at or above the threshold."""


class Buckets(NamedTuple):
    """Documents that share a key with another one, sorted by bucket and number.

    Attributes:
      documents: their numbers, int64 [members].
      buckets: the bucket of each, int64 [members], ascending.
    """

    documents: np.ndarray
    buckets: np.ndarray


@dataclass(frozen=True)
class Shingles:
    """The distinct shingles of all candidates, sorted, one document after the other.

    Attributes:
      hashes: uint64 [shingles].
      ends: int64 [documents + 1]: those of document i are hashes[ends[i] : ends[i + 1]].
    """

    hashes: np.ndarray
    ends: np.ndarray


def begins(*keys: np.ndarray) -> np.ndarray:
    """Return where equal keys begin, bool [n], in arrays [n] that are sorted by them."""
    found = np.ones(len(keys[0]), bool)
    found[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return found


def make_buckets(keys: np.ndarray, documents: np.ndarray) -> Buckets:
    """The buckets of one band, from keys, uint64 [documents], and the numbers of documents; key 0 is in none."""
    documents, keys = documents[keys != 0], keys[keys != 0]
    order = np.lexsort((documents, keys))
    documents, keys = documents[order], keys[order]
    buckets = np.cumsum(begins(keys)) - 1
    shared = np.bincount(buckets, minlength=1)[buckets] > 1
    return Buckets(documents[shared], buckets[shared])


def similar_pairs(
    members: Buckets, clusters: np.ndarray, signatures: np.ndarray, shingles: Shingles, threshold: float
) -> tuple[np.ndarray, int]:
    """Compare documents that share a bucket, until all similar ones in it are joined.

    Args:
      members: the buckets; the result is the same if each is given alone.
      clusters: the first document of the cluster of each member so far, int64 [members].
      signatures: uint8 [documents, HASHES].
      shingles: of all members.
      threshold: Jaccard similarity that joins.

    Returns:
      The pairs at or above the threshold, EDGE [pairs], and how many were compared.
    """
    nodes = _number_clusters(members.buckets, clusters)
    parents, edges, compared = np.arange(nodes.max(initial=0) + 1), [np.empty(0, EDGE)], 0
    for pairs in _neighbours(members.buckets, nodes, parents):
        for part in (pairs[start : start + AT_ONCE] for start in range(0, len(pairs), AT_ONCE)):
            one, other = members.documents[part.T]
            promising = estimate(signatures[one], signatures[other]) >= worth_comparing(threshold)
            promising &= _possible(shingles, one, other, threshold)
            part, one, other = part[promising], one[promising], other[promising]
            found = np.fromiter(zip(one, other, _similarities(shingles, one, other), strict=True), EDGE, len(one))
            similar = found["jaccard"] >= threshold
            edges.append(found[similar])
            compared += len(found)
            join(parents, *nodes[part[similar].T])
    return np.concatenate(edges), compared


def join(parents: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Join the clusters of each pair, in place; the first of a cluster is its root."""
    while len(one):
        one, other = roots(parents, one), roots(parents, other)
        apart = one != other
        one, other = one[apart], other[apart]
        np.minimum.at(parents, np.maximum(one, other), np.minimum(one, other))


def roots(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """The first of the cluster of each of `nodes`; shortens the paths to it."""
    found = parents[nodes]
    while not np.array_equal(above := parents[found], found):
        found = above
    parents[nodes] = found
    return found


def most_similar(edges: np.ndarray) -> np.ndarray:
    """For each document of `edges`, its most similar partner, the first of equal ones: EDGE, `one` ascending."""
    turned = edges.copy()
    turned["one"], turned["other"] = edges["other"], edges["one"]
    both = np.concatenate((edges, turned))
    both = both[np.lexsort((both["other"], -both["jaccard"], both["one"]))]
    return both[begins(both["one"])]


def _number_clusters(buckets: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """A number for each cluster within a bucket, int64 [members]."""
    order = np.lexsort((clusters, buckets))
    numbers = np.empty(len(buckets), np.int64)
    numbers[order] = np.cumsum(begins(buckets[order], clusters[order])) - 1
    return numbers


def _neighbours(buckets: np.ndarray, nodes: np.ndarray, parents: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of pairs in one bucket that are not joined yet, int64 [pairs, 2], by increasing distance."""
    members, distance = np.arange(len(buckets)), 1
    while len(members) > distance:
        joined = roots(parents, nodes[members])
        # Buckets that are joined or have no pair at this distance are done.
        firsts = np.flatnonzero(begins(buckets))
        sizes = np.diff(np.append(firsts, len(buckets)))
        open_ones = np.minimum.reduceat(joined, firsts) != np.maximum.reduceat(joined, firsts)
        keep = np.repeat(open_ones & (sizes > distance), sizes)
        members, buckets, joined = members[keep], buckets[keep], joined[keep]
        apart = (buckets[distance:] == buckets[:-distance]) & (joined[distance:] != joined[:-distance])
        yield np.stack((members[:-distance][apart], members[distance:][apart]), axis=1)
        distance += 1


def _possible(shingles: Shingles, one: np.ndarray, other: np.ndarray, threshold: float) -> np.ndarray:
    """Pairs whose numbers of shingles allow the threshold: |A ∩ B| ≤ |A|, |A ∪ B| ≥ |B|; 1 for the rounding."""
    sizes = np.sort([shingles.ends[each + 1] - shingles.ends[each] for each in (one, other)], axis=0)
    return sizes[0] >= threshold * sizes[1] - 1


def _similarities(shingles: Shingles, one: np.ndarray, other: np.ndarray) -> list[float]:
    def similarity_to(document: int) -> np.ndarray:
        return shingles.hashes[shingles.ends[document] : shingles.ends[document + 1]]

    return [
        jaccard(similarity_to(this), similarity_to(that))
        for this, that in zip(one.tolist(), other.tolist(), strict=True)
    ]
