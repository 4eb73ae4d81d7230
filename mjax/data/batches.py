"""Batches as a function of the step, and a thread that prefetches a few steps.

Samples are taken in order: a batch begins where the previous one ended, whatever their sizes. A process that feeds only
some devices asks for its rows alone; the rows are the same however they are divided.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from mjax.batch_size import BatchSizes
from mjax.data.samples import labelled

Step = TypeVar("Step")
Fetched = TypeVar("Fetched")


class Samples(Protocol):
    """Samples for batches."""

    def __getitem__(self, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Sample `index`: int32 [s + 1], or for a BERT its arrays by name."""


class Batches:
    """Global batches of the given `sizes`, by step; stateless.

    For validation ask for steps 0, 1, … each time: they are the same samples at every evaluation.

    Args:
      dataset: source of the samples.
      sizes: samples of each step.
      label: turns a sample into the arrays to stack; by default its tokens [s + 1] into tokens and labels [s].
    """

    def __init__(
        self,
        dataset: Samples,
        sizes: BatchSizes,
        label: Callable[[np.ndarray], dict[str, np.ndarray]] = labelled,
    ):
        self.dataset, self.sizes, self.label = dataset, sizes, label

    def at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The batch of `step` (from 0): the arrays of `label`, with a first dim b for the requested rows.

        Raises:
          IndexError: the dataset ends before this step.
          ValueError: `rows` has none of the batch's rows.
        """
        first, size = self.sizes.samples_before(step), self.sizes.size(step)
        chosen = range(first, first + size)[rows]
        if not chosen:
            raise ValueError(f"{rows} has no rows of a batch of {size}")
        samples = [self.label(self.dataset[index]) for index in chosen]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


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
