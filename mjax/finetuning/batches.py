"""Batches of training examples, in a new order every epoch.

    epoch 0   3 0 4 | 1 5 2 | 6        seven examples in batches of three: two steps an epoch,
    epoch 1   5 6 1 | 0 3 4 | 2        and what is left over is dropped

The order is a function of (seed, epoch) only, so a run that continues sees the same batches, on any mesh. The
incomplete last batch of an epoch is dropped, as in Megatron-LM v1.0 without --keep-last: a smaller batch would give its
examples more weight. The next epoch drops others.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mjax.batch_size import BatchSizes
from mjax.data.batches import of_positions
from mjax.tasks.rows import Batch, Examples


class EpochBatches:
    """Training batches by step, like `data.batches.Batches`; stateless.

    Attributes:
      sizes: the same size at every step.
      steps: per epoch.
    """

    def __init__(self, examples: Examples, batch: int, seed: int):
        self.examples, self.seed = examples, seed
        self.sizes = BatchSizes.constant(batch)
        self.steps = len(examples) // batch
        self._order = lru_cache(maxsize=2)(self._draw)

    def at(self, step: int, rows: slice = slice(None), positions: slice = slice(None)) -> Batch:
        """The batch of `step` (from 0), or some of its rows and positions: the arrays of `Config.batch_arrays`."""
        epoch, position = divmod(step, self.steps)
        size = self.sizes.size(step)
        chosen = self._order(epoch)[position * size : (position + 1) * size][rows]
        batch = self.examples.batch(chosen) | {name: label[chosen] for name, label in self.examples.labels.items()}
        return of_positions(batch, positions)

    def _draw(self, epoch: int) -> np.ndarray:
        # The legacy generator, whose numbers NumPy guarantees never to change.
        return np.random.RandomState((self.seed, epoch)).permutation(len(self.examples))
