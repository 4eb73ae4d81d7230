"""Windows over a text that is longer than the model's sequence.

    text      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9          s = 6 positions, overlap o = 2
    window 0  [t0 t1 t2 t3 t4 t5]→t1…t6              counts all six labels
    window 1        [t2 t3 t4 t5 t6 t7]→t3…t8        counts the last two, t7 and t8
    window 2              [t4 t5 t6 t7 t8]→t5…t9     counts t9

Every label counts once. The smaller o, the more context each has, at least s − o tokens, and the more windows there
are; o = s splits the text into adjacent windows. What is commonly called the overlap is how far a window advances.

Source: arXiv 1909.08053, appendix E.1 ("overlapping evaluation", o = 32), and Megatron-LM v1.0,
tasks/zeroshot_gpt2/datasets.py. That makes ⌈(N − 1 − o) / o⌉ + 1 windows of N tokens. The last of them, s / o − 1 if o
divides s, have no label that counts and are left out here.
"""

from __future__ import annotations

import numpy as np

from mjax.errors import UsageError
from mjax.tasks.interface import Window


def overlapping_windows(tokens: np.ndarray, positions: int, overlap: int) -> list[Window]:
    """Windows in which every token of `tokens` [N] except the first is a label that counts once; views, not copies.

    Args:
      positions: s, maximum tokens of a window.
      overlap: o, labels counted in each window after the first.
    """
    labels = len(tokens) - 1
    first = Window(tokens[: positions + 1], min(labels, positions))
    rest = range(overlap, labels - positions + overlap, overlap)  # first tokens of the others
    return [first] + [
        Window(tokens[start : start + positions + 1], min(overlap, labels - start - positions + overlap))
        for start in rest
    ]


def check_overlap(overlap: int, positions: int) -> int:
    """`overlap`, if it fits a model with so many positions.

    Raises:
      UsageError: it does not.
    """
    if not 1 <= overlap <= positions:
        raise UsageError(
            f"--overlap {overlap} does not fit a model of {positions:,} positions; give a number from 1 to {positions}"
        )
    return overlap
