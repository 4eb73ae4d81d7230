"""Blends: samples of several datasets in fixed proportions, in Megatron's order.

A blend is greedy. With weights w that sum to one and c_d samples of dataset d so far, sample i comes from the dataset
furthest behind its share, the one with the largest

    w_d · max(i, 1) − c_d        in float64; of equals, the first

So every prefix of the blend has the weights' proportions, to a sample or so each. Each dataset keeps its order.

Each choice depends on all before it, which in C++ is a loop; here it is many short loops in parallel. The samples are
divided into lanes of `LANE`. A lane begins with a guess of the counts at its start (the shares, rounded by largest
remainder), and all lanes take their first step together, then their second, and so on, each step one operation on
arrays. Then the counts at the end of each lane are compared with the guess of the next one, and lanes with wrong
guesses are walked again from the right counts. When all guesses are right, the lanes are exactly the sequential walk.

It takes few rounds, because two walks that start differently converge. Let Δ_d be how much more of d the first walk has
taken. If they choose differently, the first a and the second b, then Δ_a < Δ_b: a dataset is furthest behind in a walk
because that walk took less of it. So every such step moves two Δ towards each other, and none apart.

Source: Megatron-LM, core/datasets/blended_dataset.py, utils.py and helpers.cpp (build_blending_indices and
build_exhaustive_blending_indices).
"""

import math
from collections.abc import Sequence

import numpy as np

from mjax.config.datasets import normalize
from mjax.data.cache import NO_CACHE, Arrays, IndexCache
from mjax.errors import UsageError

LANE = 2048  # samples a lane walks
SURPLUS = 0.005  # of every share, because the walk may be a sample ahead of it


def samples_of_parts(samples: int, shares: Sequence[float]) -> list[int]:
    """Samples needed of every dataset in a blend of `samples`: its share, rounded up, plus half a percent."""
    return [math.ceil(math.ceil(samples * share) * (1 + SURPLUS)) for share in shares]


# --- The walk ---------------------------------------------------------------------------------------------------------


def build_blend_index(shares: Sequence[float], samples: int, sizes: Sequence[int] | None = None) -> np.ndarray:
    """The dataset of every sample of a blend, int16 [samples].

    Args:
      shares: weight of every dataset, [datasets]; they sum to one.
      samples: length of the blend.
      sizes: samples of every dataset; exhausted ones are skipped. None: all have enough.
    """
    shares = np.asarray(shares, np.float64)
    limits = None if sizes is None else np.asarray(sizes, np.float64)
    begins = np.arange(0, samples, LANE)  # [lanes]
    counts = _guess(shares, begins)  # [lanes, datasets], before the first sample of each lane
    ends = np.empty_like(counts)
    index = np.empty((len(begins), LANE), np.int16)
    lanes = np.arange(len(begins))  # those to walk
    while len(lanes):
        index[lanes], ends[lanes] = _walk(shares, limits, begins[lanes], counts[lanes])
        lanes = 1 + np.flatnonzero((ends[:-1] != counts[1:]).any(axis=1))
        counts[lanes] = ends[lanes - 1]
    return index.reshape(-1)[:samples]


def _guess(shares: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Integers near share × samples that sum to the samples, [lanes, datasets]; the largest remainders round up."""
    exact = shares * begins[:, None]
    counts = np.floor(exact + 1e-9)
    remainders = np.round(exact - counts, 9)  # equals stay equals, and the first of them comes first
    rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
    return counts + (rank < (begins - counts.sum(axis=1))[:, None])


def _walk(
    shares: np.ndarray, limits: np.ndarray | None, begins: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`LANE` choices from each of `begins` on, [lanes, LANE], and the counts after them, [lanes, datasets]."""
    counts = counts.copy()
    rows = np.arange(len(begins))
    choices = np.empty((LANE, len(begins)), np.int16)
    behind = np.empty_like(counts)
    for step in range(LANE):
        np.multiply(np.maximum(begins + step, 1.0)[:, None], shares, out=behind)
        np.subtract(behind, counts, out=behind)
        if limits is not None:
            behind[counts >= limits] = -np.inf
        chosen = behind.argmax(axis=1)  # the first of equals
        choices[step] = chosen
        counts[rows, chosen] += 1
    return choices.T, counts


def number_within(index: np.ndarray) -> np.ndarray:
    """Number of earlier samples of the same dataset, for each sample of a blend, int64 [samples]."""
    order = np.argsort(index, kind="stable")  # all samples of dataset 0, then of dataset 1, …
    sizes = np.bincount(index)
    first = np.cumsum(sizes) - sizes
    number = np.empty(len(index), np.int64)
    number[order] = np.arange(len(index)) - np.repeat(first, sizes)
    return number


# --- The dataset ------------------------------------------------------------------------------------------------------


class BlendedDataset:
    """Samples of several datasets, blended.

    Args:
      parts: the datasets. With weights each must hold what `samples_of_parts` says.
      shares: weight of each part, summing to one; None: in proportion to their lengths, each sample at most once.
      samples: length of the blend; None: all samples of all parts, which needs `shares` None.
      cache: keeps the order on disk.

    Raises:
      UsageError: without weights, the parts together hold fewer than `samples`.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[np.ndarray]],
        shares: Sequence[float] | None,
        samples: int | None,
        cache: IndexCache = NO_CACHE,
    ):
        self.parts = parts
        sizes = None
        if shares is None:
            sizes = [len(part) for part in parts]
            samples = sum(sizes) if samples is None else samples
            if samples > sum(sizes):
                weights = " ".join(f"{share:.3g} PREFIX" for share in normalize(sizes))
                problem = (
                    f"the blend has no weights, so it gives its {sum(sizes):,} samples once, and {samples:,} are needed"
                )
                raise UsageError(f"{problem}; take fewer steps, or give weights, such as {weights}")
        self.shares = normalize(sizes if shares is None else shares)

        def build() -> Arrays:
            index = build_blend_index(self.shares, samples, sizes)
            return {"dataset_index": index, "dataset_sample_index": number_within(index)}

        names = ("dataset_index", "dataset_sample_index")
        source = {"kind": "blend", "shares": self.shares, "samples": samples, "sizes": sizes}
        arrays = cache.arrays(source, names, build)
        self.dataset_index, self.dataset_sample_index = (arrays[name] for name in names)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1].

        Raises:
          IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        return self.parts[self.dataset_index[index]][int(self.dataset_sample_index[index])]
