"""Tasks with labels, on which a pre-trained model is trained further: MNLI, QQP, RACE, SQuAD 1.1 and 2.0.

A task reads its published files and gives rows of tokens with labels (`Examples`). Whoever trains knows nothing of the
files: it puts a head on the model, and hands its outputs for the validation rows back. The task turns these into the
official figures and into predictions files in the official format.

    head               logits of a row          label
    classification     [classes]                which class
    multiple choice    one for each of c rows   which choice
    span               [2, s]                   at which token the answer starts, at which it ends

Sources: arXiv 1909.08053, section 5.3 and appendix A; Megatron-LM v1.0, tasks/ and examples/finetune_*.sh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import numpy as np

from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError, suggestion
from mjax.tasks.glue import Mnli, Qqp
from mjax.tasks.interface import Figure
from mjax.tasks.race import Race
from mjax.tasks.rows import Examples
from mjax.tasks.squad import Squad

__all__ = ["DEFAULTS", "Examples", "LabelledTask", "Recipe", "open_task"]

Head = Literal["classification", "multiple_choice", "span"]


class LabelledTask(Protocol):
    """Files of a task, ready to be trained on and measured by.

    Attributes:
      head: what is put on the model.
      classes: outputs of the head for a row: the classes; 1 for a choice; 2 for a position (start, end).
      choices: c, rows of which a question consists; 1 but for multiple choice.
      metric: name of the figure by which the best checkpoint is chosen; higher is better.
      train: rows to train on; none where no file was given.
      validation: rows to measure by: "matched" and "mismatched", "middle" and "high", or one set named "validation".
      notes: what was left out or cut, a sentence each.
    """

    head: Head
    classes: int
    choices: int
    metric: str
    train: Examples
    validation: dict[str, Examples]
    notes: list[str]

    def figures(self, outputs: dict[str, np.ndarray]) -> list[Figure]:
        """The official figures of the validation sets that have labels.

        Args:
          outputs: by the name of the set, logits float32 [N, classes], [N, c] or [N, 2, s].

        Raises:
          RunError: a logit is not finite.
        """

    def predictions(self, outputs: dict[str, np.ndarray]) -> dict[str, str]:
        """Predictions files in the official format: name → contents. `outputs` and errors as of `figures`."""


@dataclass(frozen=True)
class Recipe:
    """How a model is fine-tuned on a task, where nobody says otherwise.

    Attributes:
      epochs: times the training rows are seen.
      batch: rows a step; a question of RACE counts as one.
      learning_rate: the highest; it falls linearly to 0.
      warmup: share of the steps in which it rises to that.
      weight_decay: of Adam.
      sequence: s, tokens of a row.
    """

    epochs: int
    batch: int
    learning_rate: float
    warmup: float
    weight_decay: float
    sequence: int


# Epochs, batch and learning rate: 1909.08053, table 6, for the 336M model. Warm-up and decay: v1.0's scripts for MNLI
# and RACE, the former for QQP too. It has none for SQuAD, whose epochs, warm-up and decay are those of Google's BERT.
# Tokens: Google's 128 and 384; v1.0 pads each pair of MNLI to 512, at four times the cost, for the few that are longer.
DEFAULTS: dict[str, Recipe] = {
    "mnli": Recipe(10, 128, 1e-5, 0.065, 0.1, 128),
    "qqp": Recipe(12, 128, 5e-5, 0.065, 0.1, 128),
    "race": Recipe(3, 32, 2e-5, 0.06, 0.1, 512),
    "squad1.1": Recipe(2, 64, 3e-5, 0.1, 0.01, 384),
    "squad2.0": Recipe(2, 48, 3e-5, 0.1, 0.01, 384),
}

# name → (training files, validation files, tokenizer, positions) → task
TASKS: dict[str, Callable[..., LabelledTask]] = {
    "mnli": Mnli,
    "qqp": Qqp,
    "race": Race,
    "squad1.1": partial(Squad, "1.1"),
    "squad2.0": partial(Squad, "2.0"),
}


def open_task(
    name: str, train: Sequence[str], validation: Sequence[str], tokenizer: Tokenizer, positions: int
) -> LabelledTask:
    """Read the files of a task.

    Args:
      name: a key of `DEFAULTS`.
      train, validation: its files, as published; folders for RACE. Files without labels may be validated on too: they
        give predictions and no figures.
      tokenizer: the model's.
      positions: s, tokens of a row.

    Raises:
      UsageError: there is no such task, the tokenizer is not BERT's, or a file is missing or malformed.
    """
    if name not in TASKS:
        raise UsageError(f"there is no task {name!r}{suggestion(name, list(TASKS))}; use {', '.join(TASKS)}")
    return TASKS[name](train, validation, tokenizer, positions)
