"""Synthetic pairs of segments for a BERT, which can be learned; for measuring speed, and for tests."""

from __future__ import annotations

import numpy as np

FIRST, MASK = 0, 1  # ids for [CLS] and padding, and for [MASK]; text counts through the others


class MockPairs:
    """A sample counts upwards from its own start, in two segments, which are swapped in half of the samples.

    Sample i depends on the seed and i alone; there is no last one. Samples are s/2 to s tokens long, the rest is
    padding.

    Args:
      vocabulary: ids, at least 3.
      sequence: s, at least 3.
      seed: determines everything.
      masked: share of masked tokens; at least one per sample.
    """

    def __init__(self, vocabulary: int, sequence: int, seed: int, masked: float = 0.15):
        self.vocabulary, self.sequence, self.seed, self.masked = vocabulary, sequence, seed, masked

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Sample `index`: the arrays of `Config.batch_arrays`."""
        random = np.random.default_rng([self.seed, index])
        text = random.integers(max(self.sequence // 2, 3), self.sequence + 1) - 1  # tokens after the first
        start, cut = random.integers(self.vocabulary), random.integers(1, text)
        counted = MASK + 1 + (start + np.arange(text)) % (self.vocabulary - MASK - 1)
        swapped = random.integers(2)
        if swapped:
            counted, cut = np.concatenate([counted[cut:], counted[:cut]]), text - cut
        place = np.arange(self.sequence)
        labels = np.full(self.sequence, FIRST)
        labels[1 : text + 1] = counted
        masked = (random.random(self.sequence) < self.masked) & (place > 0) & (place <= text)
        masked[random.integers(1, text + 1)] = True
        sample = {
            "tokens": np.where(masked, MASK, labels),
            "labels": labels,
            "token_types": (place > cut) & (place <= text),
            "documents": place > text,
            "sentence_order": swapped,
        }
        return {name: np.asarray(array, np.int32) for name, array in sample.items()} | {"loss_mask": masked}
