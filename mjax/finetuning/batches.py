"""Batches of training examples: epoch after epoch, each in an order of its own.

    epoch 0   3 0 4 | 1 5 2 | 6        seven examples in batches of three: two steps an epoch,
    epoch 1   5 6 1 | 0 3 4 | 2        and what is left over sits this epoch out

The order is a function of (seed, epoch) and nothing else, so a run that is continued sees what it would have seen, on
any mesh. What an epoch leaves over is dropped, as in Megatron-LM v1.0 without --keep-last: a smaller last batch would
weigh its examples more. The next epoch leaves out others.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mjax.batch_size import BatchSizes
from mjax.tasks.rows import Batch, Examples


class EpochBatches:
    """Training batches by step number, as `data.batches.Batches` gives them; keeps no state.

    Attributes:
      sizes: the same size at every step.
      steps: of an epoch.
    """

    def __init__(self, examples: Examples, batch: int, seed: int):
        self.examples, self.seed = examples, seed
        self.sizes = BatchSizes.constant(batch)
        self.steps = len(examples) // batch
        self._order = lru_cache(maxsize=2)(self._draw)

    def at(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of `step` (from 0), or some of its rows: the arrays of `Config.batch_arrays`."""
        epoch, position = divmod(step, self.steps)
        size = self.sizes.size(step)
        chosen = self._order(epoch)[position * size : (position + 1) * size][rows]
        return self.examples.batch(chosen) | {name: label[chosen] for name, label in self.examples.labels.items()}

    def _draw(self, epoch: int) -> np.ndarray:
        # The old generator, whose numbers NumPy has promised never to change.
        return np.random.RandomState((self.seed, epoch)).permutation(len(self.examples))
