"""Batches as a function of the step: of a dataset or of the caller; and a thread that prefetches a few steps.

Samples are taken in order: a batch begins where the previous one ended, whatever their sizes. A process that feeds only
some devices asks for its rows alone; they are the same however they are divided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np

from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.data.samples import add_labels
from mjax.errors import UsageError

Step = TypeVar("Step")
Fetched = TypeVar("Fetched")


class SampleSource(Protocol):
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
        dataset: SampleSource,
        sizes: BatchSizes,
        label: Callable[[np.ndarray], dict[str, np.ndarray]] = add_labels,
    ):
        self.dataset, self.sizes, self.label = dataset, sizes, label

    def batch_at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
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
    """Entropy in nats of the unmasked labels: the lowest loss of guessing by frequency.

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


# --- Batches from the caller ------------------------------------------------------------------------------------------

Arrays = Mapping[str, np.ndarray]
Source = Callable[[int], Arrays] | Iterator[Arrays]


class UserBatches:
    """Global batches from a function of the step (from 0) or an iterator, in the form of `Batches`.

    An iterator is asked for its batches in their order; a run that continues passes over those of the steps it has
    taken, so it must give the same ones again.
    """

    def __init__(self, source: Source, sizes: BatchSizes, config: Config):
        """Nothing is read before the first step.

        Args:
          source: gives {name: array [B, …]}, those of `Config.batch_arrays`. The unmasked labels where a causal
            model gets no "loss_mask" are all.
          sizes: samples of each step.
          config: of the run.
        """
        self.source, self.sizes, self.model = source, sizes, config.model
        self.arrays = config.batch_arrays()
        self._next, self._last = 0, (-1, {})

    def batch_at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The rows of the batch of `step`.

        Raises:
          UsageError: the source ends before this step, or gives something else than the model takes.
        """
        if self._last[0] != step:
            self._last = step, self._check(step, self._read(step))
        return {name: array[rows] for name, array in self._last[1].items()}

    def _read(self, step: int) -> Arrays:
        if callable(self.source):
            return self.source(step)
        if step < self._next:
            raise UsageError(f"the iterator of batches is past step {step}; to go back pass a function of the step")
        try:
            while self._next <= step:
                batch = next(self.source)
                self._next += 1
        except StopIteration:
            problem = f"the iterator of batches ended after {self._next} batches"
            raise UsageError(f"{problem}; lower train.steps, or give it more") from None
        return batch

    def _check(self, step: int, batch: Arrays) -> dict[str, np.ndarray]:
        size = self.sizes.size(step)
        wanted = {name: ((size, *shape), np.dtype(dtype)) for name, (shape, dtype) in self.arrays.items()}
        optional = {"loss_mask"} & wanted.keys() if self.model.causal else set()
        if not isinstance(batch, Mapping) or batch.keys() | optional != wanted.keys():
            given = ", ".join(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(f"the batch of step {step} has {given}; the model takes {', '.join(wanted)}")
        full = {name: np.ones(*wanted[name]) for name in optional}
        arrays = {name: np.asarray(array) for name, array in {**full, **batch}.items()}
        for name, (shape, dtype) in wanted.items():
            array = arrays[name]
            if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                given = f"{name} of step {step} is {array.dtype.name} {list(array.shape)}"
                raise UsageError(f"{given}; give {dtype.name} {list(shape)}")
        if "loss_mask" in wanted and "labels" in wanted:  # what does not count may be marked, as PyTorch does with -100
            arrays["labels"] = np.where(arrays["loss_mask"], arrays["labels"], 0)
        self.model.check_values(arrays, f"step {step}")
        return {name: arrays[name].astype(dtype, copy=False) for name, (_, dtype) in wanted.items()}
