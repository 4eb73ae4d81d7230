"""Batches as a function of the step: of a dataset or of the caller; and a thread that prefetches a few steps.

Samples are used in order: a batch begins where the previous one ended, whatever their sizes. A process that feeds only
some devices reads its rows alone; they are the same however they are divided.
"""

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
Transform = Callable[[np.ndarray], dict[str, np.ndarray]]


class SampleSource(Protocol):
    """Samples for batches."""

    def __getitem__(self, index: int) -> np.ndarray | dict[str, np.ndarray]:
        """Sample `index`: int32 [s + 1], or for a BERT its arrays by name."""


class Batches:
    """Global batches of the given `sizes`, by step; stateless.

    For validation use steps 0, 1, … each time: they are the same samples at every evaluation.

    Args:
      dataset: source of the samples.
      sizes: samples of each step.
      transform: converts a sample to the arrays to stack; by default its tokens [s + 1] to tokens and labels [s].
    """

    def __init__(self, dataset: SampleSource, sizes: BatchSizes, transform: Transform = add_labels):
        self.dataset, self.sizes, self.transform = dataset, sizes, transform

    def batch_at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The batch of `step` (from 0): the arrays of `transform`, with a first dim b for the requested rows.

        Raises:
          IndexError: the dataset ends before this step.
          ValueError: `rows` has none of the batch's rows.
        """
        first, size = self.sizes.samples_before(step), self.sizes.size(step)
        indices = range(first, first + size)[rows]
        if not indices:
            raise ValueError(f"{rows} has no rows in a batch with {size}")
        samples = [self.transform(self.dataset[index]) for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def label_entropy(batches: Iterable[dict[str, np.ndarray]]) -> float:
    """Entropy in nats of the unmasked labels: the lowest loss of guessing by frequency.

    The frequencies are counted on the same labels, so a guess that ignores the text cannot do better on them.
    """
    counts = np.bincount(np.concatenate([batch["labels"][batch["loss_mask"]] for batch in batches]))
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


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
            result = pending.popleft().result()
            pending.extend(pool.submit(fetch, step) for step in islice(steps, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


# --- Batches from the caller ------------------------------------------------------------------------------------------

BatchArrays = Mapping[str, np.ndarray]
BatchSource = Callable[[int], BatchArrays] | Iterator[BatchArrays]


class UserBatches:
    """Global batches from a function of the step (from 0) or an iterator, in the form of `Batches`.

    Batches of an iterator are read in order. A run that continues skips the batches of its finished steps, so the
    iterator must yield the same ones again.
    """

    def __init__(self, source: BatchSource, sizes: BatchSizes, config: Config):
        """Nothing is read before the first step.

        Args:
          source: returns {name: array [B, …]}, the arrays of `Config.batch_arrays`. A causal model's "loss_mask" is
            optional: by default every label counts.
          sizes: samples of each step.
          config: of the run.
        """
        self.source, self.sizes, self.model = source, sizes, config.model
        self.arrays = config.batch_arrays()
        self._next, self._last = 0, (-1, {})

    def batch_at(self, step: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        """The rows of the batch of `step`.

        Raises:
          UsageError: the source ends before this step, or its arrays are not the model's inputs.
        """
        if self._last[0] != step:
            self._last = step, self._check(step, self._read(step))
        return {name: array[rows] for name, array in self._last[1].items()}

    def _read(self, step: int) -> BatchArrays:
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

    def _check(self, step: int, batch: BatchArrays) -> dict[str, np.ndarray]:
        size = self.sizes.size(step)
        expected = {name: ((size, *shape), np.dtype(dtype)) for name, (shape, dtype) in self.arrays.items()}
        optional = {"loss_mask"} & expected.keys() if self.model.causal else set()
        if not isinstance(batch, Mapping) or batch.keys() | optional != expected.keys():
            received = ", ".join(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(f"the batch of step {step} has {received}; the model takes {', '.join(expected)}")
        defaults = {name: np.ones(*expected[name]) for name in optional}
        arrays = {name: np.asarray(array) for name, array in {**defaults, **batch}.items()}
        for name, (shape, dtype) in expected.items():
            array = arrays[name]
            if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                received = f"{name} of step {step} is {array.dtype.name} {list(array.shape)}"
                raise UsageError(f"{received}; give {dtype.name} {list(shape)}")
        if {"loss_mask", "labels"} <= expected.keys():  # ignored labels may have any value, such as PyTorch's -100
            arrays["labels"] = np.where(arrays["loss_mask"], arrays["labels"], 0)
        self.model.check_values(arrays, f"step {step}")
        return {name: arrays[name].astype(dtype, copy=False) for name, (_, dtype) in expected.items()}
