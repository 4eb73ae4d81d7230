"""Megatron's order of samples: from documents of any length to samples of exactly s + 1 tokens, shuffled twice.

A sample is s tokens and, shifted by one, their labels: s + 1 tokens in all. Three indices define it:

    document index   the documents of all epochs, shuffled; concatenated they are one long stream of tokens
    sample index     where in that stream sample k begins and ends: at tokens k s and (k + 1) s
    shuffle index    the order of the samples

    stream     | document 7 | document 2      | document 9 | document 4 …
    samples    |── sample 0 ──|── sample 1 ──|── sample 2 ──|── …           neighbours share one token

So samples cross document boundaries, with only the end-of-document token in between, and each token of the stream but
the first and the last few is predicted once. The number of epochs is the smallest that yields the requested samples.
If only part of the last epoch is needed (less than 80% of its samples), it is shuffled separately and comes last, so
that every document has been seen equally often before. All shuffles use one generator, NumPy's legacy Mersenne Twister,
whose stream never changes.

The rest of the stream after the last whole sample is dropped. A document begins after each end-of-document token;
`add_labels` derives positions, document numbers and a loss mask from that, for training without attention across
documents.

Given the same files, split, seed and number of samples, sample i is Megatron's sample i, token for token.

Source: Megatron-LM, core/datasets/gpt_dataset.py, helpers.cpp and blended_megatron_dataset_config.py.

**Blends** are samples of several datasets in fixed proportions, in Megatron's order.

A blend is greedy. With weights w that sum to one and c_d samples of dataset d so far, sample i comes from the dataset
furthest behind its share, the one with the largest

    w_d · max(i, 1) − c_d        in float64; of equals, the first

So every prefix of the blend has the weights' proportions, to a sample or so each. Each dataset keeps its order.

Each choice depends on all before it. Megatron has a loop in C++; this is many short loops in parallel. The samples are
divided into lanes of `LANE_SAMPLES`. A lane begins with a guess of the counts at its start (the shares, rounded by
largest remainder). All lanes do their first step together, then their second, and so on, each step one operation on
arrays. Then the counts at the end of each lane are compared with the guess of the next one, and lanes with wrong
guesses are repeated from the right counts. When all guesses are right, the lanes are exactly the sequential loop.

It takes few rounds, because two loops that start differently converge. Let Δ_d be how many more samples of d the first
one has chosen. If they choose differently, the first a and the second b, then Δ_a < Δ_b: a dataset is furthest behind
because the loop chose fewer samples of it. So every such step moves two Δ towards each other, and never away.

Source: Megatron-LM, core/datasets/blended_dataset.py, utils.py and helpers.cpp (build_blending_indices and
build_exhaustive_blending_indices).
"""

import math
from collections.abc import Container, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import numpy as np

from mjax.config.datasets import normalize
from mjax.data.cache import NO_CACHE, Arrays, IndexCache
from mjax.data.indexed import IndexedDataset
from mjax.errors import UsageError

SEPARATE_LAST_EPOCH_BELOW = 0.80  # share of its samples below which the last epoch is shuffled separately
MAX_EPOCHS = 10_000

# --- The three indices ------------------------------------------------------------------------------------------------


def build_document_index(
    documents: np.ndarray, epochs: int, random: np.random.RandomState, separate_last: bool
) -> np.ndarray:
    """`documents` repeated `epochs` times, shuffled, the last epoch separately if asked; int32 [epochs × documents]."""
    parts = [np.tile(documents, count) for count in ([epochs - 1, 1] if separate_last else [epochs])]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def build_sample_index(lengths: np.ndarray, document_index: np.ndarray, sequence: int, samples: int) -> np.ndarray:
    """Beginning of each sample: (position in `document_index`, offset in tokens), int32 or int64 [samples + 1, 2].

    Sample k extends from row k to row k + 1, both included: the last token of a sample is the first of the next.
    Megatron iterates over the documents; here token k × `sequence` of the stream is looked up among the ends of all
    documents, for all k together. After the end of the stream, the row is the end of the stream.

    Args:
      lengths: tokens in each sequence of the dataset, [S].
      document_index: the stream, as positions in `lengths`.
      sequence: s.
      samples: rows to build, minus one.
    """
    stream_lengths = lengths[document_index]
    ends = np.cumsum(stream_lengths, dtype=np.int64)
    begins = np.arange(samples + 1, dtype=np.int64) * sequence  # [samples + 1], as tokens of the stream
    begins[-1] = min(begins[-1], ends[-1] - 1)
    # The document with the last token read before the row, so that empty documents are skipped.
    position = np.searchsorted(ends, begins + 1, side="left")
    offset = begins - (ends[position] - stream_lengths[position])
    position[0] = offset[0] = 0  # the stream begins at the very first document, empty or not
    large = max(len(document_index), int(lengths.max())) > np.iinfo(np.int32).max
    return np.stack([position, offset], axis=1).astype(np.int64 if large else np.int32)


def build_shuffle_index(num_first: int, samples: int, random: np.random.RandomState) -> np.ndarray:
    """Shuffle the first `num_first` of `samples` and the later ones separately, uint32 or int64 [samples]."""
    dtype = np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(samples, dtype=dtype)
    random.shuffle(index[:num_first])
    random.shuffle(index[num_first:])
    return index


# --- Labels, positions and masks --------------------------------------------------------------------------------------


def add_labels(
    tokens: np.ndarray, names: Container[str] = ("tokens", "labels"), eod: int | None = None, mask_eod: bool = False
) -> dict[str, np.ndarray]:
    """A sample as model input: every token with its label, and the other arrays in `names`.

    It is equivalent to Megatron's `_get_ltor_masks_and_position_ids`: token q attends to token k if k ≤ q and
    documents[k] == documents[q].

    Args:
      tokens: int [s + 1].
      names: of the arrays to return (`DataConfig.batch_types`).
      eod: the id that ends a document; None: there are no boundaries.
      mask_eod: True to exclude the label after an `eod` token: the beginning of a document is unpredictable.

    Returns:
      "tokens" and "labels", int32 [s]; if in `names`, "loss_mask" bool [s] (False: this label does not count),
      "positions" int32 [s] (0 again where a document begins) and "documents" int32 [s] (0, 1, …).
    """
    inputs, labels = tokens[:-1], tokens[1:]
    sample = {"tokens": inputs.astype(np.int32), "labels": labels.astype(np.int32)}
    begins = np.zeros(len(inputs), bool)  # where a document begins within the sample
    if eod is not None:
        begins[1:] = inputs[:-1] == eod
    if "loss_mask" in names:
        sample["loss_mask"] = inputs != eod if mask_eod else np.ones(len(inputs), bool)
    if "positions" in names:
        position = np.arange(len(inputs), dtype=np.int32)
        sample["positions"] = position - np.maximum.accumulate(np.where(begins, position, 0), dtype=np.int32)
    if "documents" in names:
        sample["documents"] = np.cumsum(begins, dtype=np.int32)
    return sample


# --- Datasets ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SplitDataset:
    """Samples of one split of an indexed dataset.

    Args:
      indexed: the tokens.
      documents: range of its sequences, for a BERT of its documents, one of `split_sequences`.
      samples: minimum number of samples; None: one epoch.
      sequence: s.
      seed: determines the order.
      name: name of this split in errors.
      vocabulary: ids must be below it: a lookup on the device would silently clip a larger one.
      cache: stores the indices on disk.
    """

    indexed: IndexedDataset
    documents: range
    samples: int | None
    sequence: int
    seed: int
    name: str = "training split"
    _: KW_ONLY
    vocabulary: int = 2**31
    cache: IndexCache = NO_CACHE
    _samples: int = field(default=0, init=False)  # there are

    def __len__(self) -> int:
        return self._samples

    def check_index(self, index: int) -> None:
        """Check that there is a sample `index`, for which an IndexError is raised otherwise."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.indexed.prefix}: its order was drawn for {len(self)}")


@dataclass(eq=False)
class GPTDataset(SplitDataset):
    """Samples of `sequence` + 1 tokens in Megatron's order.

    Epochs are whole, so `len()` may exceed `samples`, which determines the number of epochs and so the order.

    Raises:
      UsageError: there are no documents, or they have too few tokens for a single sample, or for `samples`.
    """

    def __post_init__(self):
        indexed, documents, samples, sequence = self.indexed, self.documents, self.samples, self.sequence
        tokens = int(indexed.lengths[documents.start : documents.stop].sum(dtype=np.int64))  # of one epoch
        _check_tokens(indexed, len(documents), tokens, sequence, self.name)
        self.epochs = 1 if samples is None else max(1, -(-(samples * sequence + 1) // tokens))
        if self.epochs > MAX_EPOCHS:
            problem = f"{samples:,} samples are {self.epochs:,} epochs of the {tokens:,} tokens in the {self.name}"
            raise UsageError(f"{problem} of {indexed.prefix}, above {MAX_EPOCHS:,}; lower --train.steps")

        names = ("document_index", "sample_index", "shuffle_index")
        source = {"kind": "samples", "lengths": indexed.fingerprint, "documents": [documents.start, documents.stop]}
        source |= {"samples": samples, "sequence": sequence, "seed": self.seed}
        arrays = self.cache.load_or_build(source, names, partial(self._build_indices, tokens))
        self.document_index, self.sample_index, self.shuffle_index = (arrays[name] for name in names)
        self._samples = len(self.shuffle_index)

    def _build_indices(self, tokens: int) -> Arrays:
        """The three indices; an epoch has `tokens` tokens."""
        sequence, epochs, samples = self.sequence, self.epochs, self.samples
        before_last = ((epochs - 1) * tokens - 1) // sequence  # samples that end before the last epoch does
        per_epoch = (tokens - 1) // sequence
        separate_last = epochs > 1 and samples - before_last < int(SEPARATE_LAST_EPOCH_BELOW * per_epoch)
        total = (epochs * tokens - 1) // sequence

        random = np.random.RandomState(self.seed)  # the order of its two uses is part of the format
        numbers = np.arange(self.documents.start, self.documents.stop, dtype=np.int32)
        document_index = build_document_index(numbers, epochs, random, separate_last)
        lengths = self.indexed.lengths.copy()  # aligned, unlike those in the file: lookups take half the time
        return {
            "document_index": document_index,
            "sample_index": build_sample_index(lengths, document_index, sequence, total),
            "shuffle_index": build_shuffle_index(before_last if separate_last else total, total, random),
        }

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1].

        Raises:
          IndexError: there is no such sample.
          UsageError: it has an id outside the vocabulary.
        """
        self.check_index(index)
        row = int(self.shuffle_index[index])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        tokens = self.indexed.read_span(self.document_index[first : last + 1], begin, end + 1)
        check_sample_ids(tokens, self.vocabulary, f"sample {index} of {self.indexed.prefix}")
        return tokens.astype(np.int32)


def check_sample_ids(tokens: np.ndarray, vocabulary: int, sample: str, owner: str = "the model's") -> None:
    """Check the token ids of a sample.

    Raises:
      UsageError: one is outside the vocabulary.
    """
    invalid = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(invalid):
        fix = "prepare the data and set --model.vocabulary with one tokenizer"
        raise UsageError(f"{sample} holds the id {invalid[0]} and {owner} vocabulary is {vocabulary:,}; {fix}")


def _check_tokens(indexed: IndexedDataset, documents: int, tokens: int, sequence: int, name: str) -> None:
    """Check that a split is long enough for one sample; the error suggests settings that work."""
    if documents and tokens >= sequence + 1:
        return
    content, total = f"none of its {len(indexed):,} documents", int(indexed.lengths.sum(dtype=np.int64))
    if documents:
        content = f"{tokens:,} tokens in {documents:,} documents and one sample needs {sequence + 1:,}"
    lines = min(max(total // (20 * (sequence + 1)), 1), 100)  # some twenty documents, if a line were a sample
    fix = f"use --model.sequence {max(total // 4 - 1, 1)} or less, change --data.split, prepare it again with "
    fix += f"--split-documents {lines} --overwrite (a document every {lines} lines; blank-line: one per paragraph)"
    without = "or train without validation: --train.eval-interval 0"
    raise UsageError(f"the {name} of {indexed.prefix} has {content}; {fix}, {without}")


class MockDataset:
    """Learnable tokens without data: each sample counts from a random start with a random stride.

    Sample i depends on the seed and i alone; the dataset is endless. Ids wrap around at `vocabulary`.
    """

    def __init__(self, vocabulary: int, sequence: int, seed: int):
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1]."""
        random = np.random.default_rng([self.seed, index])
        start, stride = random.integers(self.vocabulary), random.integers(1, 8)
        return ((start + stride * np.arange(self.sequence + 1)) % self.vocabulary).astype(np.int32)


# --- Blends of datasets -----------------------------------------------------------------------------------------------

LANE_SAMPLES = 2048  # samples of a lane
SURPLUS_FRACTION = 0.005  # of every share, because a prefix of the blend may be a sample ahead of it


def count_samples_per_dataset(samples: int, shares: Sequence[float]) -> list[int]:
    """Samples that a blend of `samples` needs of every dataset: its share, rounded up, plus half a percent."""
    return [math.ceil(math.ceil(samples * share) * (1 + SURPLUS_FRACTION)) for share in shares]


def build_blend_index(shares: Sequence[float], samples: int, sizes: Sequence[int] | None = None) -> np.ndarray:
    """The dataset of every sample of a blend, int16 [samples].

    Args:
      shares: weight of every dataset, [datasets]; they sum to one.
      samples: length of the blend.
      sizes: samples of every dataset; exhausted datasets are skipped. None: all are large enough.
    """
    shares = np.asarray(shares, np.float64)
    capacities = None if sizes is None else np.asarray(sizes, np.float64)
    begins = np.arange(0, samples, LANE_SAMPLES)  # [lanes]
    counts = _guess_counts(shares, begins)  # [lanes, datasets], before the first sample of each lane
    ends = np.empty_like(counts)
    index = np.empty((len(begins), LANE_SAMPLES), np.int16)
    lanes = np.arange(len(begins))  # lanes whose counts at the start have changed
    while len(lanes):
        index[lanes], ends[lanes] = _walk_lanes(shares, capacities, begins[lanes], counts[lanes])
        lanes = 1 + np.flatnonzero((ends[:-1] != counts[1:]).any(axis=1))
        counts[lanes] = ends[lanes - 1]
    return index.reshape(-1)[:samples]


def _guess_counts(shares: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Integers near share × samples that sum to the samples, [lanes, datasets]; the largest remainders round up."""
    exact = shares * begins[:, None]
    counts = np.floor(exact + 1e-9)
    remainders = np.round(exact - counts, 9)  # so that equal ones stay equal, and the first of them wins
    rank = np.argsort(np.argsort(-remainders, axis=1, kind="stable"), axis=1)
    return counts + (rank < (begins - counts.sum(axis=1))[:, None])


def _walk_lanes(
    shares: np.ndarray, capacities: np.ndarray | None, begins: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The datasets of `LANE_SAMPLES` samples from each of `begins` on, [lanes, samples], and the counts after them."""
    counts = counts.copy()
    rows = np.arange(len(begins))
    choices = np.empty((LANE_SAMPLES, len(begins)), np.int16)
    deficit = np.empty_like(counts)
    for step in range(LANE_SAMPLES):
        np.multiply(np.maximum(begins + step, 1.0)[:, None], shares, out=deficit)
        np.subtract(deficit, counts, out=deficit)
        if capacities is not None:
            deficit[counts >= capacities] = -np.inf
        choice = deficit.argmax(axis=1)  # the first of equals
        choices[step] = choice
        counts[rows, choice] += 1
    return choices.T, counts


def build_dataset_sample_index(index: np.ndarray) -> np.ndarray:
    """Index within its dataset of each sample of a blend, int64 [samples]."""
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
      datasets: to blend. With weights each needs the samples of `count_samples_per_dataset`.
      shares: weight of each dataset, summing to one; None: in proportion to their lengths, each sample at most once.
      samples: length of the blend; None: all samples of all datasets, which needs `shares` None.
      cache: stores the order on disk.

    Raises:
      UsageError: without weights, the datasets together have fewer than `samples`.
    """

    def __init__(
        self,
        datasets: Sequence[Sequence[np.ndarray]],
        shares: Sequence[float] | None,
        samples: int | None,
        cache: IndexCache = NO_CACHE,
    ):
        self.datasets = datasets
        sizes = None
        if shares is None:
            sizes = [len(dataset) for dataset in datasets]
            total = sum(sizes)
            samples = total if samples is None else samples
            if samples > total:
                weights = " ".join(f"{share:.3g} PREFIX" for share in normalize(sizes))
                problem = f"a blend without weights repeats no sample: {total:,} samples, and {samples:,} are needed"
                raise UsageError(f"{problem}; take fewer steps, or give weights, such as {weights}")
        self.shares = normalize(sizes if shares is None else shares)

        def build() -> Arrays:
            index = build_blend_index(self.shares, samples, sizes)
            return {"dataset_index": index, "dataset_sample_index": build_dataset_sample_index(index)}

        names = ("dataset_index", "dataset_sample_index")
        source = {"kind": "blend", "shares": self.shares, "samples": samples, "sizes": sizes}
        arrays = cache.load_or_build(source, names, build)
        self.dataset_index, self.dataset_sample_index = (arrays[name] for name in names)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1].

        Raises:
          IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} in a blend with {len(self)}")
        return self.datasets[self.dataset_index[index]][int(self.dataset_sample_index[index])]
