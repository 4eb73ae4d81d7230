"""MinHash and bands: find the documents worth comparing without comparing every pair.

A hash function puts the shingles of a document in a random order; the first one is its MinHash. Two documents have the
same MinHash with probability J, their Jaccard similarity, so a share J of HASHES functions agrees (Broder 1997). The
HASHES values of a document are its signature. It is divided into bands of `rows` values, and documents that agree in
all rows of a band are candidates (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4):

    P(candidate) = 1 - (1 - J^rows)^bands        the S-curve: flat, a steep rise, flat

The rise should be just below the threshold: further down, candidates are compared in vain; further up, duplicates are
missed. `choose_bands` requires a recall of 99% for pairs exactly at the threshold, where it is lowest.

Signatures come from the Rust library `rensa`. Its R-MinHash fills the HASHES places from a few hashes per shingle
(Dahlgaard et al. 2017, "Fast Similarity Sketching") and follows the S-curve, as the tests measure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import rensa

from mjax.data.shingles import Unit, shingle_hashes
from mjax.errors import UsageError

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
    """Data of a batch of documents, kept until their near-duplicates are found.

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
