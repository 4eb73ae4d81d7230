"""Conversations packed into sequences, each of which is trained as if it were alone.

A conversation of n tokens takes n - 1 positions, because its last token predicts nothing. Best fit decreasing puts the
longest first, each into the sequence with the least room that is enough (arXiv 2107.02027 compares the ways): the sum
of sequences is nearly the least there can be. Attention stays within a conversation and positions restart, so a packed
sequence has the loss and the gradients of its conversations one by one.

    positions   0 1 2 3 4 0 1 2 0 1 2 3 0 0       the last two are padding
    documents   0 0 0 0 0 1 1 1 2 2 2 2 3 3

Every epoch has each conversation once. Conversations of one length change places from epoch to epoch, so their
neighbours do too, and the sequences are shuffled; both depend on the seed and the epoch alone.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mjax.data.cache import NO_CACHE, Arrays, IndexCache
from mjax.data.indexed import IndexedDataset
from mjax.data.samples import check_ids
from mjax.errors import UsageError


def best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """The sequence of `room` positions that each size goes into; int64 [sizes].

    Args:
      sizes: in decreasing order, [sizes], none above `room`.
      room: positions of a sequence.
    """
    chosen = np.empty(len(sizes), np.int64)
    rooms: list[int] = []  # that are left in some sequence, in order
    having: dict[int, list[int]] = {}  # the sequences with that much room
    count = 0
    for index, size in enumerate(sizes.tolist()):
        place = bisect_left(rooms, size)
        left = rooms[place] if place < len(rooms) else room
        if place == len(rooms):
            sequence, count = count, count + 1
        else:
            sequence = having[left].pop()
            if not having[left]:
                del having[left], rooms[place]
        chosen[index] = sequence
        if left > size:
            if left - size not in having:
                insort(rooms, left - size)
            having.setdefault(left - size, []).append(sequence)
    return chosen


class ConversationDataset:
    """Sequences of whole conversations, as the arrays of a batch by name.

    Attributes:
      sequences: in an epoch.
      padding: share of positions of an epoch without a conversation.
      epochs: that `samples` samples take.

    Args:
      indexed: tokens and masks.
      documents: its conversations to draw from.
      samples: number of samples that will be asked for; None: one epoch.
      sequence: s.
      seed: determines the order.
      name: name of this part in errors.
      vocabulary: ids must be below it.
      pack: whether several conversations share a sequence.
      cache: keeps the packing on disk.

    Raises:
      UsageError: there are no conversations or no masks, or one is too long.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        samples: int | None,
        sequence: int,
        seed: int,
        name: str = "training part",
        *,
        vocabulary: int = 2**31,
        pack: bool = True,
        cache: IndexCache = NO_CACHE,
    ):
        if not indexed.masked:
            fix = "prepare it with --chat, or to train on all of its text add --data.no-conversations"
            raise UsageError(f"{indexed.prefix}.mask does not exist, so what to train is unknown; {fix}")
        self.indexed, self.sequence, self.seed, self.vocabulary = indexed, sequence, seed, vocabulary
        lengths = indexed.lengths[documents.start : documents.stop]
        if not len(lengths):
            fix = "change --data.split, or train without validation: --train.eval-interval 0"
            raise UsageError(f"the {name} of {indexed.prefix} has none of its {len(indexed):,} conversations; {fix}")
        if lengths.max() > sequence + 1:
            longest, count = int(lengths.max()), int((lengths > sequence + 1).sum())
            fix = f"raise it to {longest - 1}, or prepare them with --max-length {sequence + 1}"
            what = f"{count:,} conversations of {indexed.prefix}"
            raise UsageError(f"{what} are longer than --model.sequence {sequence:,}; {fix}")

        def build() -> Arrays:
            order = np.argsort(-lengths, kind="stable")
            sizes = lengths[order] - 1
            return {"order": order, "sequence": best_fit(sizes, sequence) if pack else np.arange(len(order))}

        source = {"kind": "conversations", "lengths": indexed.fingerprint, "pack": pack, "sequence": sequence}
        source |= {"documents": [documents.start, documents.stop]}
        arrays = cache.arrays(source, ("order", "sequence"), build)
        self._order, chosen = arrays["order"] + documents.start, arrays["sequence"]
        self.sequences = int(chosen.max()) + 1
        self._members = np.argsort(chosen, kind="stable")  # places in `order`, sequence by sequence
        self._begins = np.searchsorted(chosen[self._members], np.arange(self.sequences + 1))
        self._of_length = np.split(np.arange(len(lengths)), 1 + np.flatnonzero(np.diff(lengths[arrays["order"]])))
        self.padding = 1 - float((lengths - 1).sum(dtype=np.int64)) / (self.sequences * sequence)
        self.draw(self.sequences if samples is None else samples)
        self._epoch = lru_cache(maxsize=2)(self._epoch)

    def __len__(self) -> int:
        return self._samples

    def draw(self, samples: int) -> None:
        """Give another number of samples; the order of those before stays."""
        self.epochs, self._samples = max(1, -(-samples // self.sequences)), samples

    def conversations(self, index: int) -> np.ndarray:
        """Numbers of the conversations in sample `index`, int64 [n]."""
        epoch, row = divmod(index, self.sequences)
        order, rows = self._epoch(epoch)
        sequence = rows[row]
        return order[self._members[self._begins[sequence] : self._begins[sequence + 1]]]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: "tokens", "labels", "positions" and "documents", int32 [s], and "loss_mask", bool [s].

        Raises:
          IndexError: there is no such sample.
          UsageError: it holds an id outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.indexed.prefix}, whose order was drawn for {len(self)}")
        names = ("tokens", "labels", "positions", "documents")
        sample = {name: np.zeros(self.sequence, np.int32) for name in names}
        sample["loss_mask"] = np.zeros(self.sequence, bool)
        end, number = 0, -1
        for number, conversation in enumerate(self.conversations(index).tolist()):
            tokens = self.indexed.get(conversation).astype(np.int32)
            check_ids(tokens, self.vocabulary, f"conversation {conversation} of {self.indexed.prefix}")
            begin, end = end, end + len(tokens) - 1
            sample["tokens"][begin:end], sample["labels"][begin:end] = tokens[:-1], tokens[1:]
            sample["positions"][begin:end] = np.arange(len(tokens) - 1)
            sample["documents"][begin:end] = number
            sample["loss_mask"][begin:end] = self.indexed.mask(conversation)[1:]
        sample["documents"][end:] = number + 1
        return sample

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The conversations of an epoch from the longest to the shortest, and the order of its sequences."""
        random = np.random.RandomState([self.seed, epoch])
        order = self._order.copy()
        for places in self._of_length:
            order[places] = order[places][random.permutation(len(places))]
        return order, random.permutation(self.sequences)


class PaddedDataset:
    """The samples of a dataset, and up to `samples` others that are padding: no label of them counts."""

    def __init__(self, dataset: Sequence[dict[str, np.ndarray]], samples: int):
        self.dataset, self._samples = dataset, samples
        self._padding = {name: np.zeros_like(array) for name, array in dataset[0].items()}

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`; raises as the dataset's own, and IndexError if there is none."""
        return self._padding if len(self.dataset) <= index < self._samples else self.dataset[index]
