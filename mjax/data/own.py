"""Batches that come from the caller: a function of the step, or an iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.data.batches import of_positions
from mjax.errors import UsageError

Arrays = Mapping[str, np.ndarray]
Source = Callable[[int], Arrays] | Iterator[Arrays]


class OwnBatches:
    """Global batches from a function of the step (from 0) or an iterator, in the form of `Batches`.

    An iterator is asked for its batches in their order; a run that continues passes over those of the steps it has
    taken, so it must give the same ones again.
    """

    def __init__(self, source: Source, sizes: BatchSizes, config: Config, evaluation: bool = False):
        """Nothing is read before the first step.

        Args:
          source: gives {name: array [B, …]}, those of `Config.batch_arrays`. The labels that count where a causal
            model gets no "loss_mask" are all.
          sizes: samples of each step.
          config: of the run.
          evaluation: whether these are batches of validation.
        """
        self.source, self.sizes, self.model = source, sizes, config.model
        self.arrays = config.batch_arrays(evaluation)
        self._next, self._last = 0, (-1, {})

    def at(self, step: int, rows: slice = slice(None), positions: slice = slice(None)) -> dict[str, np.ndarray]:
        """The rows of the batch of `step`, and of their positions those requested.

        Raises:
          UsageError: the source ends before this step, or gives something else than the model takes.
        """
        if self._last[0] != step:
            self._last = step, self._checked(step, self._read(step))
        return of_positions({name: array[rows] for name, array in self._last[1].items()}, positions)

    def _read(self, step: int) -> Arrays:
        if callable(self.source):
            return self.source(step)
        if step < self._next:
            raise UsageError(
                f"the iterator of batches is past step {step}; pass a function of the step to go back to earlier ones"
            )
        try:
            while self._next <= step:
                batch = next(self.source)
                self._next += 1
        except StopIteration:
            raise UsageError(
                f"the iterator of batches ended after {self._next} batches; lower train.steps, or give it more"
            ) from None
        return batch

    def _checked(self, step: int, batch: Arrays) -> dict[str, np.ndarray]:
        size = self.sizes.size(step)
        wanted = {name: ((size, *shape), np.dtype(dtype)) for name, (shape, dtype) in self.arrays.items()}
        optional = {"loss_mask"} & wanted.keys() if self.model.causal else set()
        if not isinstance(batch, Mapping) or batch.keys() | optional != wanted.keys():
            given = ", ".join(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise UsageError(f"the batch of step {step} has {given}; the model takes {', '.join(wanted)}")
        every = {name: np.ones(*wanted[name]) for name in optional}
        found = {name: np.asarray(array) for name, array in {**every, **batch}.items()}
        for name, (shape, dtype) in wanted.items():
            array = found[name]
            if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise UsageError(
                    f"{name} of step {step} is {array.dtype.name} {list(array.shape)}; give {dtype.name} {list(shape)}"
                )
        if "loss_mask" in wanted and "labels" in wanted:  # what does not count may be marked, as PyTorch does with -100
            found["labels"] = np.where(found["loss_mask"], found["labels"], 0)
        self.model.check_values(found, f"step {step}")
        return {name: found[name].astype(dtype, copy=False) for name, (_, dtype) in wanted.items()}
