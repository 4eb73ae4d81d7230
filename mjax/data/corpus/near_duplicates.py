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

Documents are numbered 0 … n-1. Their data are in files, because a large corpus has more signatures than memory:

    BAND.keys     uint64 per document: documents with the same key are candidates of each other
    signatures    HASHES bytes per document: a first estimate
    shingles      the sorted shingles of every candidate: the exact similarity

`find_clusters` handles one band after the other. It sorts the documents by key, which puts candidates side by side, and
examines adjacent pairs, then pairs two apart, and so on. A pair is compared by its shingles unless

- both are in one cluster already, so that the result could not change it,
- their signatures differ by more than chance allows,
- they share an earlier band, where they were compared.

A bucket whose documents are all joined is done, so ten thousand copies of one page cost ten thousand comparisons, not
fifty million. The pairs compared depend on the documents alone, never on the number of workers.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import rensa

from mjax.data.corpus.shingles import Unit, jaccard, shingle_hashes
from mjax.data.corpus.workers import Workers
from mjax.errors import UsageError

# --- Signatures and bands ---------------------------------------------------------------------------------------------

HASHES = 256
RECALL = 0.99  # at the threshold
LOWEST_THRESHOLD = 0.3  # below, a band is a single value and everything is a candidate of everything
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
    if not LOWEST_THRESHOLD <= threshold <= 1:
        raise UsageError(
            f"--threshold {threshold:g} is not a Jaccard similarity that can be searched for; "
            f"use {LOWEST_THRESHOLD:g} to 1, such as 0.7, or --exact for equal texts only"
        )
    return next(
        bands
        for bands in (Bands(rows, HASHES // rows) for rows in range(HASHES, 0, -1))
        if bands.recall(threshold) >= RECALL
    )


@dataclass(frozen=True)
class Sketches:
    """Data of a batch of documents until their near-duplicates are found.

    Attributes:
      signatures: uint8 [documents, HASHES]: the lowest byte of each MinHash, enough to estimate a similarity (Li, König
        2010, "b-Bit Minwise Hashing").
      keys: uint64 [bands, documents]: documents with the same key share the band. A document without shingles shares
        no band: its keys are 0.
    """

    signatures: np.ndarray
    keys: np.ndarray


def sketch(texts: Sequence[str], size: int, unit: Unit, bands: Bands) -> Sketches:
    """Signatures and bands of `texts`, by shingles of `size` units."""
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
    return Sketches(values.astype(np.uint8), keys)


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
COMPARISONS = 256  # pairs a worker compares at a time


class SketchFiles:
    """The sketches of a corpus in files in `folder`, which tasks fill at known places."""

    def __init__(self, folder: Path, bands: int):
        self.bands = bands
        self._files = [*(folder / f"{band:02}.keys" for band in range(bands)), folder / "all-signatures"]

    def put(self, first: int, keys: Path, signatures: Path) -> None:
        """Write the sketches of the documents from number `first` on: their keys band after band, their signatures."""
        parts = _mapped(keys, np.uint64).reshape(self.bands, -1)
        for file, part in zip(self._files, (*parts, _mapped(signatures, np.uint8)), strict=True):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o666)
            with os.fdopen(descriptor, "wb") as stream:
                stream.seek(first * (HASHES if file is self._files[-1] else 8))
                part.tofile(stream)

    def keys(self, band: int) -> np.ndarray:
        """One band of all documents, uint64 [documents], mapped from disk."""
        return _mapped(self._files[band], np.uint64)

    def signatures(self) -> np.ndarray:
        """uint8 [documents, HASHES], mapped from disk."""
        return _mapped(self._files[-1], np.uint8).reshape(-1, HASHES)


class ShingleFile:
    """The distinct shingles of some documents in a file, `sizes` of each of the sorted `documents`."""

    def __init__(self, file: Path, documents: np.ndarray, sizes: np.ndarray):
        self.file, self._documents = file, documents
        self._ends = np.concatenate(([0], np.cumsum(sizes)))

    def parts(self, documents: np.ndarray) -> np.ndarray:
        """Begin and end of each document's shingles in the file, int64 [documents, 2]."""
        rows = np.searchsorted(self._documents, documents)
        return np.stack((self._ends[rows], self._ends[rows + 1]), axis=1)


@dataclass
class Clusters:
    """Groups of documents that are linked by pairs at or above the threshold.

    Attributes:
      first: int64 [documents]: the first document of each one's cluster, itself if it is alone.
      similar: int64 [documents]: the most similar document at or above the threshold; -1: none.
      similarity: float64 [documents]: their Jaccard similarity.
      compared: pairs whose shingles were compared.
      confirmed: pairs at or above the threshold.
    """

    first: np.ndarray
    similar: np.ndarray
    similarity: np.ndarray
    compared: int = 0
    confirmed: int = 0


def candidates(files: SketchFiles, distinct: np.ndarray) -> np.ndarray:
    """Sorted numbers of the documents in `distinct` that share a band with another one of them."""
    sharing = np.zeros(len(distinct), bool)
    for band in range(files.bands):
        sharing[_buckets(files.keys(band), distinct)[0]] = True
    return np.flatnonzero(sharing)


def find_clusters(
    files: SketchFiles,
    distinct: np.ndarray,
    shingles: ShingleFile,
    threshold: float,
    workers: Workers,
    advance: Callable[[], None],
) -> Clusters:
    """Compare the candidates and join those at or above `threshold`; `advance` is called after each band."""
    documents = len(distinct)
    clusters = Clusters(np.arange(documents), np.full(documents, -1), np.zeros(documents))
    signatures = files.signatures()
    for band in range(files.bands):
        earlier = [files.keys(other) for other in range(band)]
        members, buckets = _buckets(files.keys(band), distinct)
        for pairs in _neighbours(members, buckets, clusters.first):
            pairs = np.concatenate([np.empty((0, 2), np.int64), *_promising(pairs, signatures, earlier, threshold)])
            _compare(pairs, shingles, threshold, clusters, workers)
        advance()
    clusters.first = _roots(clusters.first, np.arange(documents))
    return clusters


# --- Candidates -------------------------------------------------------------------------------------------------------


def _buckets(keys: np.ndarray, distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents that share their key with another one, and their buckets; sorted by bucket and number."""
    documents = np.flatnonzero(distinct & (keys != 0))
    keys = keys[documents]
    order = np.argsort(keys, kind="stable")
    documents, keys = documents[order], keys[order]
    begins = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    buckets = np.cumsum(begins) - 1
    shared = np.bincount(buckets, minlength=1)[buckets] > 1
    return documents[shared], buckets[shared]


def _neighbours(members: np.ndarray, buckets: np.ndarray, parents: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs of one bucket that are not joined yet, int64 [pairs, 2], by increasing distance in the bucket."""
    distance = 1
    while len(members) > distance:
        roots = _roots(parents, members)
        # Buckets that are joined or have no pair at this distance are done.
        begins = np.flatnonzero(np.concatenate(([True], buckets[1:] != buckets[:-1])))
        sizes = np.diff(np.append(begins, len(buckets)))
        open_ones = np.minimum.reduceat(roots, begins) != np.maximum.reduceat(roots, begins)
        keep = np.repeat(open_ones & (sizes > distance), sizes)
        members, buckets, roots = members[keep], buckets[keep], roots[keep]
        apart = (buckets[distance:] == buckets[:-distance]) & (roots[distance:] != roots[:-distance])
        yield np.stack((members[:-distance][apart], members[distance:][apart]), axis=1)
        distance += 1


def _promising(
    pairs: np.ndarray, signatures: np.ndarray, earlier: list[np.ndarray], threshold: float
) -> Iterator[np.ndarray]:
    """The pairs with similar signatures that share no earlier band."""
    for start in range(0, len(pairs), AT_ONCE):
        one, other = pairs[start : start + AT_ONCE].T
        similar = estimate(signatures[one], signatures[other]) >= worth_comparing(threshold)
        one, other = one[similar], other[similar]
        for keys in earlier:
            new = keys[one] != keys[other]
            one, other = one[new], other[new]
        yield np.stack((one, other), axis=1)


# --- Comparison -------------------------------------------------------------------------------------------------------


def _compare(pairs: np.ndarray, shingles: ShingleFile, threshold: float, clusters: Clusters, workers: Workers) -> None:
    """Compare each pair by its shingles and join similar documents."""
    parts = np.concatenate((shingles.parts(pairs[:, 0]), shingles.parts(pairs[:, 1])), axis=1)  # [pairs, 4]
    sizes = np.sort(parts[:, [1, 3]] - parts[:, [0, 2]], axis=1)
    possible = sizes[:, 0] >= threshold * sizes[:, 1] - 1  # |A ∩ B| ≤ |A|, |A ∪ B| ≥ |B|; 1 for the rounding
    pairs, parts = pairs[possible], parts[possible]
    tasks = [(shingles.file, parts[start : start + COMPARISONS]) for start in range(0, len(parts), COMPARISONS)]
    results = workers.map(_similarities, tasks) if len(tasks) > 1 else map(_similarities, tasks)
    similarities = np.concatenate([np.empty(0), *results])
    clusters.compared += len(pairs)
    for (one, other), similarity in zip(pairs.tolist(), similarities.tolist(), strict=True):
        if similarity >= threshold:
            clusters.confirmed += 1
            roots = _roots(clusters.first, np.array((one, other)))
            clusters.first[roots.max()] = roots.min()  # the first document of a cluster is its root
            for this, that in ((one, other), (other, one)):
                if similarity > clusters.similarity[this]:
                    clusters.similar[this], clusters.similarity[this] = that, similarity


def _similarities(task: tuple[Path, np.ndarray]) -> np.ndarray:
    """Jaccard similarity of pairs, float64 [pairs], from the file and their positions in it, int64 [pairs, 4]."""
    file, parts = task
    shingles = _mapped(file, np.uint64)
    return np.array([jaccard(shingles[a:b], shingles[c:d]) for a, b, c, d in parts.tolist()])


def _roots(parents: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """The first document in the cluster of each of `documents`; shortens the paths to it."""
    roots = parents[documents]
    while not np.array_equal(above := parents[roots], roots):
        roots = above
    parents[documents] = roots
    return roots


def _mapped(file: Path, dtype: type) -> np.ndarray:
    """The numbers in a file, mapped from disk."""
    return np.memmap(file, dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)
