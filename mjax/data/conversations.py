"""Conversations packed into sequences. Each conversation is trained as if it were alone.

A conversation of n tokens takes n - 1 positions, because its last token predicts nothing. Best-fit decreasing places
the longest first, each into the sequence with the smallest sufficient free space (arXiv 2107.02027 compares packing
algorithms): the number of sequences is nearly minimal. Attention stays within a conversation and positions restart, so
a packed sequence has the loss and the gradients of its separate conversations.

    positions   0 1 2 3 4 0 1 2 0 1 2 3 0 0       the last two are padding
    documents   0 0 0 0 0 1 1 1 2 2 2 2 3 3

Every epoch has each conversation once. Conversations of the same length and the sequences are shuffled every epoch;
both orders depend on the seed and the epoch alone.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from mjax.data.cache import Arrays
from mjax.data.samples import SplitDataset, check_sample_ids
from mjax.errors import UsageError


def pack_best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign each size to a sequence of `capacity` positions; int64 [sizes].

    Args:
      sizes: in decreasing order, [sizes], none above `capacity`.
      capacity: positions of a sequence.
    """
    assignment = np.empty(len(sizes), np.int64)
    free_sizes: list[int] = []  # distinct sizes of free space, in increasing order
    open_sequences: dict[int, list[int]] = {}  # sequences by their free space
    count = 0
    for index, size in enumerate(sizes.tolist()):
        position = bisect_left(free_sizes, size)
        free = free_sizes[position] if position < len(free_sizes) else capacity
        if position == len(free_sizes):
            sequence, count = count, count + 1
        else:
            sequence = open_sequences[free].pop()
            if not open_sequences[free]:
                del open_sequences[free], free_sizes[position]
        assignment[index] = sequence
        if free > size:
            if free - size not in open_sequences:
                insort(free_sizes, free - size)
            open_sequences.setdefault(free - size, []).append(sequence)
    return assignment


@dataclass(eq=False)
class ConversationDataset(SplitDataset):
    """Sequences of whole conversations, as the arrays of a batch by name.

    Attributes:
      sequences: number in an epoch.
      padding: share of positions of an epoch without a conversation.
      epochs: number for all samples, rounded up.

    Args:
      pack: True if several conversations share a sequence.

    Raises:
      UsageError: there are no conversations or no masks, or one is too long.
    """

    pack: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        indexed, documents, sequence = self.indexed, self.documents, self.sequence
        if not indexed.has_mask:
            fix = "prepare it with --chat, or to train on all of its text add --data.no-conversations"
            raise UsageError(f"{indexed.prefix}.mask, the loss mask of conversations, does not exist; {fix}")
        lengths = indexed.lengths[documents.start : documents.stop]
        if not len(lengths):
            fix = "change --data.split, or train without validation: --train.eval-interval 0"
            raise UsageError(f"the {self.name} of {indexed.prefix} gets 0 of {len(indexed):,} conversations; {fix}")
        if lengths.max() > sequence + 1:
            longest, count = int(lengths.max()), int((lengths > sequence + 1).sum())
            fix = f"raise it to {longest - 1}, or prepare them with --max-length {sequence + 1}"
            problem = f"{count:,} conversations of {indexed.prefix}"
            raise UsageError(f"{problem} are longer than --model.sequence {sequence:,}; {fix}")

        def build() -> Arrays:
            order = np.argsort(-lengths, kind="stable")
            packed = pack_best_fit(lengths[order] - 1, sequence) if self.pack else np.arange(len(order))
            return {"order": order, "sequence": packed}

        source = {"kind": "conversations", "lengths": indexed.fingerprint, "pack": self.pack, "sequence": sequence}
        source |= {"documents": [documents.start, documents.stop]}
        arrays = self.cache.load_or_build(source, ("order", "sequence"), build)
        self._order, assignment = arrays["order"] + documents.start, arrays["sequence"]
        self.sequences = int(assignment.max()) + 1
        self._members = np.argsort(assignment, kind="stable")  # positions in `order`, sequence by sequence
        self._begins = np.searchsorted(assignment[self._members], np.arange(self.sequences + 1))
        length_changes = 1 + np.flatnonzero(np.diff(lengths[arrays["order"]]))
        self._equal_length_groups = np.split(np.arange(len(lengths)), length_changes)
        self.padding = 1 - float((lengths - 1).sum(dtype=np.int64)) / (self.sequences * sequence)
        self.set_samples(self.sequences if self.samples is None else self.samples)
        self._epoch_order = lru_cache(maxsize=2)(self._epoch_order)

    def set_samples(self, samples: int) -> None:
        """Change the number of samples; the order of the earlier ones stays."""
        self.epochs, self._samples = max(1, -(-samples // self.sequences)), samples

    def conversation_ids(self, index: int) -> np.ndarray:
        """Numbers of the conversations in sample `index`, int64 [n]."""
        epoch, row = divmod(index, self.sequences)
        order, rows = self._epoch_order(epoch)
        sequence = rows[row]
        return order[self._members[self._begins[sequence] : self._begins[sequence + 1]]]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: "tokens", "labels", "positions" and "documents", int32 [s], and "loss_mask", bool [s].

        Raises:
          IndexError: there is no such sample.
          UsageError: it has an id outside the vocabulary.
        """
        self.check_index(index)
        names = ("tokens", "labels", "positions", "documents")
        sample = {name: np.zeros(self.sequence, np.int32) for name in names}
        sample["loss_mask"] = np.zeros(self.sequence, bool)
        end, number = 0, -1
        for number, conversation in enumerate(self.conversation_ids(index).tolist()):
            tokens = self.indexed.get(conversation).astype(np.int32)
            check_sample_ids(tokens, self.vocabulary, f"conversation {conversation} of {self.indexed.prefix}")
            begin, end = end, end + len(tokens) - 1
            sample["tokens"][begin:end], sample["labels"][begin:end] = tokens[:-1], tokens[1:]
            sample["positions"][begin:end] = np.arange(len(tokens) - 1)
            sample["documents"][begin:end] = number
            sample["loss_mask"][begin:end] = self.indexed.loss_mask(conversation)[1:]
        sample["documents"][end:] = number + 1
        return sample

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The conversations of an epoch from the longest to the shortest, and the order of its sequences."""
        random = np.random.RandomState([self.seed, epoch])
        order = self._order.copy()
        for positions in self._equal_length_groups:
            order[positions] = order[positions][random.permutation(len(positions))]
        return order, random.permutation(self.sequences)


class PaddedDataset:
    """The samples of a dataset, followed by padding samples up to `samples`, without unmasked labels."""

    def __init__(self, dataset: Sequence[dict[str, np.ndarray]], samples: int):
        self.dataset, self._samples = dataset, samples
        self._padding = {name: np.zeros_like(array) for name, array in dataset[0].items()}

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`; errors as in the dataset."""
        return self._padding if len(self.dataset) <= index < self._samples else self.dataset[index]
