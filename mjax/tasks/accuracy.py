"""Tasks in which one of several answers is chosen, the one of the highest logit: how often it is the right one."""

from __future__ import annotations

import numpy as np

from mjax.tasks.interface import Figure
from mjax.tasks.rows import Examples
from mjax.tasks.task_files import finite


def choose(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The highest logit of each example, int [N] by the name of the set; of equal ones the first.

    Raises:
      RunError: a logit is not finite.
    """
    return {name: logits.argmax(-1) for name, logits in finite(outputs).items()}


def labelled(
    chosen: dict[str, np.ndarray], validation: dict[str, Examples]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What was chosen and what is right, of the sets that have labels."""
    return {name: (chosen[name], examples.labels["label"]) for name, examples in validation.items() if examples.labels}


def accuracies(answers: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[Figure]:
    """Accuracy over all sets of `labelled`, and of each where there are several; nothing where there is none."""
    right = {name: (int((chosen == label).sum()), len(label)) for name, (chosen, label) in answers.items()}
    if not right:
        return []
    correct, examples = (sum(counts) for counts in zip(*right.values(), strict=True))
    of_each = [Figure.share(f"{name}_accuracy", *counts) for name, counts in right.items()] if len(right) > 1 else []
    return [
        Figure.share("accuracy", correct, examples, "of all sets together" if of_each else ""),
        *of_each,
        Figure.count("correct", correct, f"of {examples:,} examples"),
    ]


def f1(answers: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[Figure]:
    """F1 of label 1 over all sets: 2 true positives / (2 true positives + both kinds of error); 0 where none is 1."""
    if not answers:
        return []
    chosen, label = (np.concatenate(arrays) for arrays in zip(*answers.values(), strict=True))
    both, either = int(((chosen == 1) & (label == 1)).sum()), int((chosen == 1).sum() + (label == 1).sum())
    return [Figure.share("f1", 2 * both, max(either, 1), "of the pairs that are duplicates")]
