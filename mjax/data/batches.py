"""Batches as a function of the step, and a thread that works a few steps ahead.

Samples are taken in order: a batch begins where the one before it ended, whatever their sizes. A process that feeds
only some devices asks for its rows alone; which rows it asks for never changes what is in them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from mjax.batch_size import BatchSizes

Step = TypeVar("Step")
Fetched = TypeVar("Fetched")


class Samples(Protocol):
    """What batches are made of."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [s + 1]."""


class Batches:
    """Global batches of the given `sizes`, by step number; keeps no state.

    For validation ask for steps 0, 1, … anew each time: they are the same samples at every evaluation.
    """

    def __init__(self, dataset: Samples, sizes: BatchSizes):
        self.dataset, self.sizes = dataset, sizes

    def at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The batch of `step` (from 0): tokens and labels, int32 [b, s] each, b being the rows asked for.

        Raises:
          IndexError: the dataset ends before this step.
          ValueError: `rows` holds none of the batch's rows.
        """
        first, size = self.sizes.samples_before(step), self.sizes.size(step)
        chosen = range(first, first + size)[rows]
        if not chosen:
            raise ValueError(f"{rows} holds no rows of a batch of {size}")
        samples = np.stack([self.dataset[index] for index in chosen])  # [b, s + 1]
        return {"tokens": samples[:, :-1], "labels": samples[:, 1:]}


def prefetch(fetch: Callable[[Step], Fetched], steps: Iterable[Step], depth: int = 2) -> Iterator[Fetched]:
    """`fetch(step)` for each of `steps`, in order, worked out by one thread up to `depth` steps ahead.

    An exception in `fetch` is raised where its result is asked for. Close the generator to stop early
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
