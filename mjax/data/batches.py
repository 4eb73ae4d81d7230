"""Batches as a function of the step, and a thread that prefetches a few steps.

Samples are taken in order: a batch begins where the previous one ended, whatever their sizes. A process that feeds only
some devices asks for its rows alone, and where sequences are split over devices for its positions; they are the same
however they are divided.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from mjax.config.batch_size import BatchSizes
from mjax.data.samples import labelled

Step = TypeVar("Step")
Fetched = TypeVar("Fetched")


class Samples(Protocol):
    """Samples for batches."""

    def __getitem__(self, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Sample `index`: int32 [s + 1], or for a BERT its arrays by name."""

    def part(self, index: int, tokens: slice) -> np.ndarray:
        """Some of the tokens of sample `index`, int32 [t]; not needed for arrays by name."""


class Batches:
    """Global batches of the given `sizes`, by step; stateless.

    For validation ask for steps 0, 1, … each time: they are the same samples at every evaluation.

    Args:
      dataset: source of the samples.
      sizes: samples of each step.
      label: turns a sample into the arrays to stack; by default its tokens [s + 1] into tokens and labels [s].
      apart: whether `label` says the same of a part of a sample, so that the rest need not be read.
    """

    def __init__(
        self,
        dataset: Samples,
        sizes: BatchSizes,
        label: Callable[[np.ndarray], dict[str, np.ndarray]] = labelled,
        apart: bool = False,
    ):
        self.dataset, self.sizes, self.label, self.apart = dataset, sizes, label, apart

    def at(self, step: int, rows: slice = slice(None), positions: slice = slice(None)) -> dict[str, np.ndarray]:
        """The batch of `step` (from 0): the arrays of `label`, with a first dim b for the requested rows, and of their
        positions those requested, from one up to another.

        Raises:
          IndexError: the dataset ends before this step.
          ValueError: `rows` has none of the batch's rows.
        """
        first, size = self.sizes.samples_before(step), self.sizes.size(step)
        chosen = range(first, first + size)[rows]
        if not chosen:
            raise ValueError(f"{rows} has no rows of a batch of {size}")
        if self.apart and positions != slice(None):
            tokens = slice(positions.start, positions.stop + 1)
            samples = [self.label(self.dataset.part(index, tokens)) for index in chosen]
        else:
            samples = [self.label(self.dataset[index]) for index in chosen]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
        return batch if self.apart else of_positions(batch, positions)


def of_positions(batch: dict[str, np.ndarray], positions: slice) -> dict[str, np.ndarray]:
    """Of a batch whose arrays have as many positions as its tokens, `positions`; arrays without any stay as they
    are."""
    if positions == slice(None):
        return batch
    count = batch["tokens"].shape[-1]
    return {
        name: array[..., positions] if array.ndim > 1 and array.shape[-1] == count else array
        for name, array in batch.items()
    }


def label_entropy(batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Entropy in nats of the labels that count: the lowest loss of guessing by frequency.

    The frequencies are those of these same labels, so a guess that ignores the text cannot do better on them.
    """
    counts = np.bincount(np.concatenate([batch["labels"][batch["loss_mask"]] for batch in batches]))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def prefetch(fetch: Callable[[Step], Fetched], steps: Iterable[Step], depth: int = 2) -> Iterator[Fetched]:
    """`fetch(step)` for each of `steps`, in order, computed by one thread up to `depth` steps ahead.

    An exception in `fetch` is raised where its result is requested. Close the generator to stop early
    (`with contextlib.closing(prefetch(…)) as batches:`): the thread has ended when that returns.
    """
    steps = iter(steps)
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mjax-prefetch")
    try:
        pending = deque(pool.submit(fetch, step) for step in islice(steps, depth))
        while pending:
            fetched = pending.popleft().result()
            pending.extend(pool.submit(fetch, step) for step in islice(steps, 1))
            yield fetched
    finally:
        pool.shutdown(cancel_futures=True)
