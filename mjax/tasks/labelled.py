"""Labelled tasks, for which a pre-trained model is fine-tuned: MNLI, QQP, RACE, SQuAD 1.1 and 2.0.

`labelled_task.py` has their common path; here are their names and their recipes.

Sources: arXiv 1909.08053, section 5.3 and appendix A; Megatron-LM v1.0, tasks/ and examples/finetune_*.sh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError, either, suggestion
from mjax.tasks.glue_race import Mnli, Qqp, Race
from mjax.tasks.labelled_task import Examples, LabelledTask, Outputs, is_fine_tuned, what_is_told
from mjax.tasks.squad import Squad
from mjax.utils.files import write_whole

__all__ = ["DEFAULTS", "Examples", "LabelledTask", "Recipe", "is_fine_tuned", "open_task", "what_is_told"]


@dataclass(frozen=True)
class Recipe:
    """Default hyperparameters of a task.

    Attributes:
      epochs: over the training rows.
      batch: rows per step; a question of RACE counts as one.
      learning_rate: peak; it decays linearly to 0.
      warmup: share of the steps with linear warm-up.
      weight_decay: of Adam.
      sequence: s, tokens per row.
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
      train, validation: its files, as published; folders for RACE. Validation files without labels give predictions but
        no metrics.
      tokenizer: the model's.
      positions: s, tokens per row.

    Raises:
      UsageError: there is no such task, the tokenizer is not BERT's, or a file is missing or malformed.
    """
    check_name(name)
    return TASKS[name](train, validation, tokenizer, positions)


def check_name(name: str, known: Sequence[str] = tuple(TASKS)) -> None:
    """Refuse a task that is not among the `known` ones.

    Raises:
      UsageError: it is not.
    """
    if name not in known:
        raise UsageError(f"there is no task {name!r}{suggestion(name, list(known))}; use {either(known)}")


def write_predictions(folder: Path, task: LabelledTask, outputs: Outputs) -> list[Path]:
    """Write the predictions of a task, files in the official format, into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {folder / name: text for name, text in task.predictions(outputs).items()}
    for file, text in contents.items():
        write_whole(file, text)
    return list(contents)
