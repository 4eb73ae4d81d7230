"""Near-duplicates: MinHash and LSH find candidate pairs; similar documents are joined into clusters.

A hash function puts the shingles of a document in a random order; the first one is its MinHash. Two documents have the
same MinHash with probability J, their Jaccard similarity, so a share J of NUM_HASHES functions agrees (Broder 1997).
The NUM_HASHES values of a document are its signature. It is divided into bands of `rows` values, and documents that
agree in all rows of a band are candidates (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4):

    P(candidate) = 1 - (1 - J^rows)^bands        the S-curve: flat, a steep rise, flat

The rise should be just below the threshold: if it is lower, candidates are compared in vain; if higher, duplicates are
missed. `choose_bands` requires a recall of 99% for pairs exactly at the threshold, where it is lowest.

Signatures come from the Rust library `rensa`. Its R-MinHash computes the NUM_HASHES values from a few hashes per
shingle (Dahlgaard et al. 2017, "Fast Similarity Sketching") and follows the S-curve, as the tests measure.

Candidates of a band are compared bucket by bucket: first adjacent documents, then documents at distance two, and so on.
The shingles of a pair are not compared if

- both are in one cluster already, so that the result could not change it,
- their signatures differ by more than chance allows.

A bucket whose documents are all joined is done, so ten thousand copies of one page need ten thousand comparisons, not
fifty million. The pairs compared in a bucket depend on its documents and their clusters alone, so tasks can process
buckets in any order. `ROUNDS` divides the bands: copies of a page are joined by the first few bands, and not compared
again in the others.

**Shingles.** A text is the set of its n-grams of words, each hashed to a 64-bit number.

Two texts are near-duplicates if their sets A and B of shingles overlap (Broder 1997, "On the resemblance and
containment of documents"). The Jaccard similarity |A ∩ B| / |A ∪ B| is 1 for equal sets and near 0 for unrelated texts,
which share words but hardly any five in a row.

    "The cat sat on the mat, twice."  ── words ──▶  the cat sat on the mat twice
                                      ── 5 ──────▶  {the cat sat on the, cat sat on the mat, sat on the mat twice}

A word is a run of letters, digits and underscores, in lower case: the regular expression \\w+. A text with fewer words
than a shingle has one shingle, all its words; a text without words has none and is similar to no other.

Hashing text word by word is slow in Python, so a batch of texts is hashed together. The hash of the run v_i … v_j
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

from mjax.data.corpus.documents import ShingleUnit
from mjax.errors import UsageError

# --- Shingles ---------------------------------------------------------------------------------------------------------

BASE = 0x9E3779B97F4A7C15  # β: odd, so that it has an inverse modulo 2⁶⁴
BLOCK_CHARACTERS = 2**14  # characters hashed at once: the arrays stay in the cache
NON_WORD = re.compile(r"\W")
UTF32 = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"


def shingle_hashes(texts: Sequence[str], size: int, unit: ShingleUnit) -> tuple[np.ndarray, np.ndarray]:
    """The shingles of each text in order, repeated ones included.

    Args:
      texts: one or more.
      size: words or characters in a shingle, at least 1.
      unit: words or characters. Characters are used unchanged, as in Megatron's openwebtext tools: capitals,
        punctuation and line ends count.

    Returns:
      hashes uint64 [shingles], offsets uint64 [texts + 1]: text i has hashes[offsets[i] : offsets[i + 1]].
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
        values = _code_points(joined)
        values, counts = np.delete(values, ends - 1), lengths
    return window_hashes(values.astype(np.uint64), counts, size)


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """|A ∩ B| / |A ∪ B| of two sorted arrays of distinct shingles; 0 if both are empty.

    A similarity of 7/10 is the float 0.7 itself, because a division is rounded like a literal: thresholds are exact.
    """
    merged = np.sort(np.concatenate((first, second)))
    common = int(np.count_nonzero(merged[1:] == merged[:-1]))
    return common / (len(merged) - common) if len(merged) else 0.0


def word_hashes(text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash of each word of `text`, uint64 [w], and where it begins and ends, int64 [w]; case is not folded."""
    parts = [(np.empty(0, np.uint64), *np.empty((2, 0), np.int64))]
    for start, block in _split_into_blocks(text):
        codes = _code_points(block)
        inside = np.zeros(len(codes) + 2, bool)
        inside[1:-1] = _word_characters()[codes]
        edges = np.flatnonzero(inside[1:] != inside[:-1])  # a word begins, a word ends, a word begins, …
        starts, ends = edges[0::2], edges[1::2]
        parts.append((_hash_runs(codes.astype(np.uint64), starts, ends), starts + start, ends + start))
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def window_hashes(values: np.ndarray, counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Hash the windows of `size` values inside each text, or all values of a text that has fewer.

    Args:
      values: uint64 [values], of all texts one after the other.
      counts: values of each text, int64 [texts].
      size: values of a window.

    Returns:
      As in `shingle_hashes`. A hash depends on the values and their number, not on their position.
    """
    windows = np.where(counts > 0, np.maximum(counts - size + 1, 1), 0)  # of each text
    offsets = np.concatenate(([0], np.cumsum(windows)))
    first = np.cumsum(counts) - counts  # value where each text begins
    starts = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], windows)
    ends = starts + np.repeat(np.minimum(counts, size), windows)
    return _hash_runs(values, starts, ends), offsets.astype(np.uint64)


def _split_into_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Split `text` into parts of about BLOCK_CHARACTERS that end between words, each with its first position."""
    start = 0
    while start < len(text):
        gap = NON_WORD.search(text, start + BLOCK_CHARACTERS)
        end = gap.start() if gap else len(text)
        yield start, text[start:end]
        start = end


def _hash_runs(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Hash of each run values[start:end], uint64 [runs]; arithmetic is modulo 2⁶⁴ throughout."""
    length = 1 << max(len(values) - 1, 1).bit_length()
    powers, inverses = _powers(length)
    prefix = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(_mix_bits(values) * powers[: len(values)], out=prefix[1:])
    return _mix_bits((prefix[ends] - prefix[starts]) * inverses[starts] + (ends - starts).astype(np.uint64))


@functools.lru_cache(maxsize=4)
def _powers(length: int) -> tuple[np.ndarray, np.ndarray]:
    """β^i and β^-i for i < length, modulo 2⁶⁴."""
    factors = np.repeat(np.array([[BASE], [pow(BASE, -1, 2**64)]], np.uint64), length, axis=1)
    factors[:, 0] = 1
    return tuple(np.cumprod(factors, axis=1))


def _mix_bits(values: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit numbers, a bijection (splitmix64)."""
    mixed = values + np.uint64(BASE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@functools.cache
def _word_characters() -> np.ndarray:
    """True for the code points of words, bool [1114112]: the \\w of regular expressions."""
    table = np.fromiter((chr(code).isalnum() for code in range(sys.maxunicode + 1)), bool, sys.maxunicode + 1)
    table[ord("_")] = True
    return table


def _code_points(text: str) -> np.ndarray:
    """Code points of `text`, uint32 [characters]."""
    return np.frombuffer(text.encode(UTF32, errors="surrogatepass"), np.uint32)


# --- Signatures and bands ---------------------------------------------------------------------------------------------

NUM_HASHES = 256
MIN_RECALL = 0.99  # at the threshold
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
    """The most selective bands whose recall at `threshold` is at least MIN_RECALL.

    Raises:
      UsageError: the threshold is below MIN_THRESHOLD or above 1.
    """
    if not MIN_THRESHOLD <= threshold <= 1:
        fix = f"use {MIN_THRESHOLD:g} to 1, such as 0.7, or --exact for equal texts only"
        raise UsageError(f"--threshold {threshold:g} is not a Jaccard similarity that can be searched for; {fix}")
    candidates = (Bands(rows, NUM_HASHES // rows) for rows in range(NUM_HASHES, 0, -1))
    return next(bands for bands in candidates if bands.recall(threshold) >= MIN_RECALL)


def minhash(texts: Sequence[str], size: int, unit: ShingleUnit, bands: Bands) -> tuple[np.ndarray, np.ndarray]:
    """Signatures and bands of `texts`, by shingles of `size` units.

    Returns:
      signatures uint8 [documents, NUM_HASHES]: the lowest byte of each MinHash, enough to estimate a similarity (Li,
        König 2010, "b-Bit Minwise Hashing").
      keys uint64 [bands, documents]: documents with the same key share the band. A document without shingles shares no
        band: its keys are 0.
    """
    hashes, offsets = shingle_hashes(texts, size, unit)
    rows = rensa.RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, NUM_HASHES, SEED).to_rows()
    values = np.array(rows, np.uint32)  # [documents, HASHES]
    keys = np.zeros((bands.count, len(texts)), np.uint64)
    for band, key in enumerate(keys):
        for row in range(bands.rows):
            # The multiplication of FNV, then a shift that mixes the high bits into the low ones.
            key ^= values[:, band * bands.rows + row]
            key *= np.uint64(0x100000001B3)
            key ^= key >> np.uint64(29)
    keys |= np.uint64(1)  # so that 0 means no shingles
    keys[:, np.diff(offsets) == 0] = 0
    return values.astype(np.uint8), keys


def estimate_similarity(signatures: np.ndarray, other_signatures: np.ndarray) -> np.ndarray:
    """Estimated similarity of each pair of signatures: two uint8 [pairs, NUM_HASHES] → float [pairs].

    The standard deviation is √(J (1 - J) / NUM_HASHES), at most 0.031; values that agree by chance in their lowest byte
    raise the estimate by less than 0.004.
    """
    return (signatures == other_signatures).mean(axis=1)


def min_estimate(threshold: float) -> float:
    """The estimate below which a pair is skipped: five standard deviations under the threshold."""
    return threshold - 5 * math.sqrt(threshold * (1 - threshold) / NUM_HASHES)


# --- Clusters ---------------------------------------------------------------------------------------------------------

BATCH_PAIRS = 2**14  # pairs whose signatures are in memory together
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
      ends: int64 [documents + 1]: the hashes of document i are hashes[ends[i] : ends[i + 1]].
    """

    hashes: np.ndarray
    ends: np.ndarray

    def get(self, document: int) -> np.ndarray:
        """Hashes of one document."""
        return self.hashes[self.ends[document] : self.ends[document + 1]]


def group_starts(*keys: np.ndarray) -> np.ndarray:
    """True for the first of equal keys, bool [n], in arrays [n] that are sorted by them."""
    starts = np.ones(len(keys[0]), bool)
    starts[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return starts


def make_buckets(keys: np.ndarray, documents: np.ndarray) -> Buckets:
    """The buckets of one band, from keys, uint64 [documents], and the numbers of documents; key 0 is in none."""
    documents, keys = documents[keys != 0], keys[keys != 0]
    order = np.lexsort((documents, keys))
    documents, keys = documents[order], keys[order]
    buckets = np.cumsum(group_starts(keys)) - 1
    shared = np.bincount(buckets, minlength=1)[buckets] > 1
    return Buckets(documents[shared], buckets[shared])


def find_similar_pairs(
    members: Buckets, clusters: np.ndarray, signatures: np.ndarray, shingles: Shingles, threshold: float
) -> tuple[np.ndarray, int]:
    """Compare documents that share a bucket, until all similar ones in it are joined.

    Args:
      members: the buckets; the result for each does not depend on the others.
      clusters: the first document of the cluster of each member so far, int64 [members].
      signatures: uint8 [documents, NUM_HASHES].
      shingles: of all members.
      threshold: minimum Jaccard similarity of two documents that are joined.

    Returns:
      The pairs at or above the threshold, EDGE [pairs], and the number of compared pairs.
    """
    nodes = _number_clusters(members.buckets, clusters)
    parents, edges, compared = np.arange(nodes.max(initial=0) + 1), [np.empty(0, EDGE)], 0
    for pairs in _iterate_pairs(members.buckets, nodes, parents):
        for part in (pairs[start : start + BATCH_PAIRS] for start in range(0, len(pairs), BATCH_PAIRS)):
            one, other = members.documents[part.T]
            promising = estimate_similarity(signatures[one], signatures[other]) >= min_estimate(threshold)
            promising &= _can_be_similar(shingles, one, other, threshold)
            part, one, other = part[promising], one[promising], other[promising]
            documents = zip(one.tolist(), other.tolist(), strict=True)
            similarities = ((i, j, jaccard(shingles.get(i), shingles.get(j))) for i, j in documents)
            candidates = np.fromiter(similarities, EDGE, len(one))
            similar = candidates["jaccard"] >= threshold
            edges.append(candidates[similar])
            compared += len(candidates)
            unite(parents, *nodes[part[similar].T])
    return np.concatenate(edges), compared


def unite(parents: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Join the clusters of each pair, in place (union-find); the first document of a cluster is its root."""
    while len(one):
        one, other = find_roots(parents, one), find_roots(parents, other)
        separate = one != other
        one, other = one[separate], other[separate]
        np.minimum.at(parents, np.maximum(one, other), np.minimum(one, other))


def find_roots(parents: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Find the root of the cluster of each of `nodes`; shortens the paths to it."""
    result = parents[nodes]
    while not np.array_equal(parent := parents[result], result):
        result = parent
    parents[nodes] = result
    return result


def nearest_documents(edges: np.ndarray) -> np.ndarray:
    """The most similar document to each one in `edges`, the first in a tie: EDGE, `one` ascending."""
    reverse = edges.copy()
    reverse["one"], reverse["other"] = edges["other"], edges["one"]
    both = np.concatenate((edges, reverse))
    both = both[np.lexsort((both["other"], -both["jaccard"], both["one"]))]
    return both[group_starts(both["one"])]


def _number_clusters(buckets: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Number the clusters within each bucket, int64 [members]."""
    order = np.lexsort((clusters, buckets))
    numbers = np.empty(len(buckets), np.int64)
    numbers[order] = np.cumsum(group_starts(buckets[order], clusters[order])) - 1
    return numbers


def _iterate_pairs(buckets: np.ndarray, nodes: np.ndarray, parents: np.ndarray) -> Iterator[np.ndarray]:
    """Positions of pairs in one bucket that are not joined yet, int64 [pairs, 2], by increasing distance."""
    members, distance = np.arange(len(buckets)), 1
    while len(members) > distance:
        joined = find_roots(parents, nodes[members])
        # Buckets that are joined or have no pair at this distance are done.
        firsts = np.flatnonzero(group_starts(buckets))
        sizes = np.diff(np.append(firsts, len(buckets)))
        is_open = np.minimum.reduceat(joined, firsts) != np.maximum.reduceat(joined, firsts)
        keep = np.repeat(is_open & (sizes > distance), sizes)
        members, buckets, joined = members[keep], buckets[keep], joined[keep]
        unjoined = (buckets[distance:] == buckets[:-distance]) & (joined[distance:] != joined[:-distance])
        yield np.stack((members[:-distance][unjoined], members[distance:][unjoined]), axis=1)
        distance += 1


def _can_be_similar(shingles: Shingles, one: np.ndarray, other: np.ndarray, threshold: float) -> np.ndarray:
    """True for pairs whose numbers of shingles allow the threshold: |A ∩ B| ≤ |A|, |A ∪ B| ≥ |B|; 1 for rounding."""
    sizes = np.sort([shingles.ends[documents + 1] - shingles.ends[documents] for documents in (one, other)], axis=0)
    return sizes[0] >= threshold * sizes[1] - 1
