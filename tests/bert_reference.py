"""The names of `tests.reference` that `tests/finetuning/test_scores.py` imports from here."""

from tests.reference import task_loss, task_scores

__all__ = ["task_loss", "task_scores"]
