"""A task on text: windows of tokens to score, and metrics computed from their scores."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mjax.data.corpus import Document, TextFiles, find_files
from mjax.errors import RunError, UsageError

MOST_NATS = 20.0  # v1.0 shows no perplexity above e^20
FOR_TEXT = True, "which predicts no next token"  # the model that windows of text need, and what others lack


class Window(NamedTuple):
    """Tokens that are read at once.

    Attributes:
      tokens: ids [n + 1]; each but the first is the label of the one before it. n is at most s, the model's positions.
      counted: how many labels count, 1 to n: the last ones. Those before them are context.
    """

    tokens: np.ndarray
    counted: int


@dataclass(frozen=True)
class Score:
    """Sums over windows, whatever batches and devices they were on.

    Attributes:
      loss: nats, over the labels that count.
      labels: how many count.
      correct: how many of these the model holds most likely, each after its true context.
      windows: how many there are.
      right: windows of which every label that counts is correct.
    """

    loss: float = 0.0
    labels: int = 0
    correct: int = 0
    windows: int = 0
    right: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(*map(operator.add, astuple(self), astuple(other)))

    @property
    def mean(self) -> float:
        """Nats a label.

        Raises:
          RunError: it is not finite, so nothing can be said about the model.
        """
        if not math.isfinite(self.loss):
            raise RunError(
                f"the model's loss on this text is {self.loss}: its weights or its activations are not finite; try "
                "--precision.compute fp32, or an earlier --step"
            )
        return self.loss / self.labels


@dataclass(frozen=True)
class Metric:
    """One result.

    Attributes:
      name: key of the JSON object.
      value: None where it is not known.
      shown: how a person reads it.
      remark: what it is.
    """

    name: str
    value: float | int | None
    shown: str
    remark: str = ""

    @classmethod
    def count(cls, name: str, value: int, remark: str = "") -> Metric:
        """A whole number."""
        return cls(name, value, f"{value:,}", remark)

    @classmethod
    def number(cls, name: str, value: float, remark: str = "") -> Metric:
        """Any other number."""
        return cls(name, value, f"{value:,.4f}" if value < 1000 else f"{value:,.0f}", remark)

    @classmethod
    def share(cls, name: str, part: int, whole: int, remark: str = "") -> Metric:
        """A share of a whole: between 0 and 1 in JSON, in percent for people."""
        return cls(name, part / whole, f"{part / whole:.2%}", remark)


class Task(Protocol):
    """A file, ready to be scored."""

    passes: list[Sequence[Window]]
    """Windows whose scores are needed apart."""

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """The results, of a score for each of `passes`."""


def perplexity(nats: float) -> float:
    """e to the `nats` a label; never above e^20, as in v1.0."""
    return math.exp(min(nats, MOST_NATS))


def read_documents(data: str) -> list[Document]:
    """The documents of a file, a folder or a pattern.

    Raises:
      UsageError: there is no such file, or one of unknown type; a line is malformed. An evaluation leaves nothing out.
    """
    files = TextFiles(find_files([Path(data)]), malformed="skip", all_fields=False)
    found = list(files)
    if files.malformed.count:
        raise UsageError(f"{files.malformed.examples[0]}; fix the file: an evaluation leaves nothing out")
    return found
