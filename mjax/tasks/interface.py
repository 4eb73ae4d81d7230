"""A task on text: windows of tokens to score, and metrics computed from their scores."""

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from mjax.errors import RunError, UsageError

NOT_FINITE = "its weights or activations are not finite: try --precision.compute fp32, or an earlier --step"
CAUSAL_ONLY = True, "which predicts no next token"  # the kind of model that text windows need, and the reason


class ContextWindow(NamedTuple):
    """Tokens of one forward pass.

    Attributes:
      tokens: ids [n + 1]; each but the first is the label of the previous one. n is at most s, the model's positions.
      counted: number of unmasked labels, 1 to n: the last ones. The others are context.
    """

    tokens: np.ndarray
    counted: int

    @classmethod
    def from_context(cls, context: list[int], labels: list[int], positions: int) -> Self:
        """`labels`, which all count, after as much of the end of their context as fits into `positions`."""
        return cls(np.array([*context, *labels][-(positions + 1) :], np.int32), len(labels))


@dataclass(frozen=True)
class Score:
    """Sums over windows, independent of batches and devices.

    Attributes:
      loss: nats, over the unmasked labels.
      labels: number of unmasked labels.
      correct: number of these with the highest probability, given the true context.
      windows: number of windows.
      all_correct: windows in which every unmasked label is correct.
    """

    loss: float = 0.0
    labels: int = 0
    correct: int = 0
    windows: int = 0
    all_correct: int = 0

    def __add__(self, other: Self) -> Self:
        return Score(*map(operator.add, astuple(self), astuple(other)))

    @property
    def mean(self) -> float:
        """Nats per label.

        Raises:
          RunError: it is not finite, so there is no result.
        """
        if not math.isfinite(self.loss):
            raise RunError(f"the model's loss on this text is {self.loss}; {NOT_FINITE}")
        return self.loss / self.labels


@dataclass(frozen=True)
class Metric:
    """One result.

    Attributes:
      name: key of the JSON object.
      value: None if it is unknown; of a table its rows, an object each.
      formatted: text for people; a table is printed below the other metrics.
      note: explanation.
    """

    name: str
    value: float | int | list[dict[str, Any]] | None
    formatted: str
    note: str = ""

    @classmethod
    def count(cls, name: str, value: int, note: str = "") -> Self:
        """A whole number."""
        return cls(name, value, f"{value:,}", note)

    @classmethod
    def number(cls, name: str, value: float, note: str = "") -> Self:
        """Any other number."""
        return cls(name, value, f"{value:,.4f}" if value < 1000 else f"{value:,.0f}", note)

    @classmethod
    def fraction(cls, name: str, part: int, whole: int, note: str = "") -> Self:
        """A fraction: between 0 and 1 in JSON, in percent for people."""
        return cls(name, part / whole, f"{part / whole:.2%}", note)


class Task(Protocol):
    """A file to be scored.

    Attributes:
      passes: lists of windows to score separately, each with its sum.
    """

    passes: list[Sequence[ContextWindow]]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """The results, from one score for each of `passes`."""


def read_text(file: Path, expected: str = "the task's files as published") -> str:
    """Read a text file in UTF-8, with its line ends.

    Raises:
      UsageError: there is no such file, or it is not UTF-8; `expected` names the file to give.
    """
    if not file.is_file():
        raise UsageError(f"there is no file {file}; give {expected}")
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        lines = error.object[: error.start].split(b"\n")
        raise UsageError(f"{file}:{len(lines)} is not UTF-8 (byte {len(lines[-1])}); give {expected}") from None


# --- Windows over a text that is longer than the model's sequence -----------------------------------------------------
#     text      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9          s = 6 positions, stride o = 2
#     window 0  [t0 t1 t2 t3 t4 t5]→t1…t6              counts all six labels
#     window 1        [t2 t3 t4 t5 t6 t7]→t3…t8        counts the last two, t7 and t8
#     window 2              [t4 t5 t6 t7 t8]→t5…t9     counts t9
#
# Every label counts once. The smaller o, the more context each has, at least s − o tokens, and the more windows there
# are; o = s splits the text into adjacent windows. Megatron-LM calls the stride an overlap.
#
# Source: arXiv 1909.08053, appendix E.1 ("overlapping evaluation", o = 32), and Megatron-LM v1.0,
# tasks/zeroshot_gpt2/datasets.py. That makes ⌈(N − 1 − o) / o⌉ + 1 windows of N tokens. The last of them, s / o − 1 if
# o divides s, have no unmasked label and are left out here.


def split_into_windows(tokens: np.ndarray, positions: int, stride: int) -> list[ContextWindow]:
    """Windows in which every token of `tokens` [N] except the first is an unmasked label once; views, not copies.

    Args:
      positions: s, maximum tokens of a window.
      stride: o, labels counted in each window after the first.
    """
    labels = len(tokens) - 1
    windows = [ContextWindow(tokens[: positions + 1], min(labels, positions))]
    for start in range(stride, labels - positions + stride, stride):
        counted = min(stride, labels - start - positions + stride)
        windows.append(ContextWindow(tokens[start : start + positions + 1], counted))
    return windows
