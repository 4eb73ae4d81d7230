"""Megatron's order of samples: from documents of every length to samples of exactly s + 1 tokens, shuffled twice.

A sample is s tokens and, shifted by one, their labels: s + 1 tokens in all. Three indices lead to it:

    document index   the documents of all epochs, shuffled: laid end to end they are one long stream of tokens
    sample index     where in that stream sample k begins and ends: at tokens k s and (k + 1) s
    shuffle index    the order in which samples are given out

    stream     | document 7 | document 2      | document 9 | document 4 …
    samples    |── sample 0 ──|── sample 1 ──|── sample 2 ──|── …           neighbours share one token

So samples run across documents, with only the end-of-document token between them, and each token but the first and the
last few of the stream is predicted once. The number of epochs is the least that yields the samples asked for. Where
only part of the last epoch is needed (less than 80% of its samples), it is shuffled apart and comes last, so that every
document has been seen equally often before it begins. All shuffles draw on one generator, NumPy's legacy Mersenne
Twister, whose stream is frozen for good.

Given the same files, split, seed and number of samples, sample i here is sample i in Megatron, token for token.

Source: Megatron-LM, core/datasets/gpt_dataset.py and helpers.cpp.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mjax.data.indexed import IndexedDataset
from mjax.errors import UsageError

SEPARATE_BELOW = 0.80  # share of its samples below which the last epoch is shuffled apart

# --- Splits -----------------------------------------------------------------------------------------------------------


def split_sequences(split: str, sequences: int) -> tuple[range, range, range]:
    """Sequences of the training, validation and test parts: '949,50,1' of 1000 is 0–949, 949–999 and 999–1000.

    Parts that are left out are empty: '98,2' has no test part. Parts are cut in the order of the file.

    Raises:
      UsageError: `split` is not one to three numbers of which one is above 0.
    """
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if not (1 <= len(parts) <= 3 and all(0 <= part < float("inf") for part in parts) and sum(parts) > 0):
        raise UsageError(
            f"--data.split {split!r} is not proportions of training, validation and test; "
            "give up to three numbers, one of them above 0, such as 949,50,1"
        )
    total = sum(parts)
    bounds = accumulate((part / total for part in parts + [0.0] * (3 - len(parts))), initial=0.0)
    training, validation, test = (range(*pair) for pair in pairwise(round(bound * sequences) for bound in bounds))
    return training, validation, test


# --- The three indices ------------------------------------------------------------------------------------------------


def build_document_index(
    documents: np.ndarray, epochs: int, random: np.random.RandomState, separate_last: bool
) -> np.ndarray:
    """`documents` repeated `epochs` times, shuffled, the last epoch apart where asked; int32 [epochs × documents]."""
    if separate_last:
        first = build_document_index(documents, epochs - 1, random, False)
        return np.concatenate([first, build_document_index(documents, 1, random, False)])
    index = np.tile(documents.astype(np.int32), epochs)
    random.shuffle(index)
    return index


def build_sample_index(lengths: np.ndarray, document_index: np.ndarray, sequence: int, samples: int) -> np.ndarray:
    """Where each sample begins: (position in `document_index`, offset in tokens), int32 or int64 [samples + 1, 2].

    Sample k runs from row k to row k + 1, both included: the last token of a sample is the first of the next. Megatron
    walks the documents to find these rows; here token k × `sequence` of the stream is looked up among the ends of all
    documents, for all k at once.

    Args:
      lengths: tokens in each sequence of the dataset, [S].
      document_index: the stream, as positions in `lengths`; it must hold samples × sequence + 1 tokens or more.
      sequence: s.
      samples: rows to build, less one.
    """
    stream_lengths = lengths[document_index]
    ends = np.cumsum(stream_lengths, dtype=np.int64)
    begins = np.arange(samples + 1, dtype=np.int64) * sequence  # [samples + 1], as tokens of the stream
    position = np.searchsorted(
        ends, begins, side="right"
    )  # the first document that ends after it: empty ones are passed over
    offset = begins - (ends[position] - stream_lengths[position])
    position[0] = offset[0] = 0  # the walk begins at the very first document, empty or not
    large = max(len(document_index), int(lengths.max())) > np.iinfo(np.int32).max
    return np.stack([position, offset], axis=1).astype(np.int64 if large else np.int32)


def build_shuffle_index(first: int, samples: int, random: np.random.RandomState) -> np.ndarray:
    """A permutation of `samples` that shuffles the `first` and those after them apart, uint32 or int64 [samples]."""
    dtype = np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32
    index = np.arange(samples, dtype=dtype)
    random.shuffle(index[:first])
    if first < samples:
        random.shuffle(index[first:])
    return index


# --- Datasets ---------------------------------------------------------------------------------------------------------


class GPTDataset:
    """Samples of `sequence` + 1 tokens in Megatron's order.

    Epochs are whole, so `len()` may exceed the `samples` asked for.

    Args:
      indexed: the tokens.
      documents: which of its sequences to draw from, as `split_sequences` gives them.
      samples: how many samples must be there. The order depends on it through the number of epochs.
      sequence: s.
      seed: fixes the order.
      name: what to call this part in errors.

    Raises:
      UsageError: there are no documents, or they hold too few tokens for a single sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: Sequence[int] | np.ndarray,
        samples: int,
        sequence: int,
        seed: int,
        name: str = "training part",
    ):
        self.indexed, self.sequence = indexed, sequence
        documents = np.asarray(documents, dtype=np.int32)
        tokens = int(indexed.lengths[documents].sum(dtype=np.int64))  # of one epoch
        _check_size(indexed, len(documents), tokens, sequence, name)

        self.epochs = max(1, -(-(samples * sequence + 1) // tokens))
        before_last = ((self.epochs - 1) * tokens - 1) // sequence  # samples that end before the last epoch does
        per_epoch = (tokens - 1) // sequence
        separate_last = self.epochs > 1 and samples - before_last < int(SEPARATE_BELOW * per_epoch)
        total = (self.epochs * tokens - 1) // sequence

        random = np.random.RandomState(seed)  # the order of the two draws on it is part of the format
        self.document_index = build_document_index(documents, self.epochs, random, separate_last)
        self.sample_index = build_sample_index(indexed.lengths, self.document_index, sequence, total)
        self.shuffle_index = build_shuffle_index(before_last if separate_last else total, total, random)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1].

        Raises:
          IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.indexed.prefix}, whose order was drawn for {len(self)}")
        row = int(self.shuffle_index[index])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        parts = []
        for position in range(first, last + 1):
            document = int(self.document_index[position])
            start = begin if position == first else 0
            stop = end + 1 if position == last else int(self.indexed.lengths[document])
            parts.append(self.indexed.get(document, start, stop - start))
        return np.concatenate(parts, dtype=np.int32)  # [s + 1]


def _check_size(indexed: IndexedDataset, documents: int, tokens: int, sequence: int, name: str) -> None:
    if documents == 0:
        raise UsageError(
            f"the {name} of {indexed.prefix} has none of its {len(indexed):,} documents; "
            "give it a larger share with --data.split, or prepare more text"
        )
    if tokens < sequence + 1:
        raise UsageError(
            f"the {name} of {indexed.prefix} has {tokens:,} tokens in {documents:,} documents and one sample needs "
            f"{sequence + 1:,}; lower --model.sequence, give it a larger share with --data.split, or prepare more text"
        )


class MockDataset:
    """Tokens that need no data and can be learned: a sample counts from a start of its own by a stride of its own.

    Sample i depends on the seed and i alone; there is no last one. Ids wrap around at `vocabulary`.
    """

    def __init__(self, vocabulary: int, sequence: int, seed: int):
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1]."""
        random = np.random.default_rng([self.seed, index])
        start, stride = random.integers(self.vocabulary), random.integers(1, 8)
        return ((start + stride * np.arange(self.sequence + 1)) % self.vocabulary).astype(np.int32)
