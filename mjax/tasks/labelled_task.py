"""The common path of all labelled tasks: files → items → rows and labels → logits → metrics and predictions.

read         a published file, as items: a pair of sentences, a passage with questions, a question on a paragraph
encode       the rows of an item, [CLS] a [SEP] b [SEP], and its labels
metrics      the official metrics, from the logits of the validation rows
predictions  files in the official format, from the same logits

A task defines how an item is read, encoded and predicted; the rest is here. Training is independent of the files:
it adds the task's head to the model, and returns its logits for the validation rows.

head               logits of a row          label
classification     [classes]                which class
multiple choice    one for each of c rows   which choice
span               [2, s]                   positions of the first and last token of the answer
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import numpy as np

from mjax.config import BERTTaskConfig
from mjax.config.model import ModelConfig, convert_kind
from mjax.config.plain_values import check
from mjax.data.tokenizers import BertTokenizer, Tokenizer
from mjax.errors import RunError, UsageError
from mjax.tasks.interface import NOT_FINITE, Metric, read_text
from mjax.utils.files import parse_json

T = TypeVar("T")
Role = Literal["train", "validation"]
Labels = tuple[int, ...]
Outputs = dict[str, np.ndarray]
"""Logits of the examples by the name of the validation set, float32 [N, classes], [N, c] or [N, 2, s]."""


class LabelledTask(ABC):
    """Files of a task, for training and evaluation.

    Attributes:
      head: of the model.
      classes: outputs of the head per row: the classes; 1 for a choice; 2 for a position (start, end).
      choices: c, rows per example; 1 except for multiple choice.
      metric: name of the metric that selects the best checkpoint; higher is better.
      label_names: of the labels of an example.
      unique_name: word for an item's name in messages, if names have to be unique over all validation sets.
      train: training rows; none if no file was given.
      validation: validation rows: "matched" and "mismatched", "middle" and "high", or one set named "validation".
      notes: sentences about skipped and truncated data.
    """

    head: Literal["classification", "multiple_choice", "span"]
    classes: int = 1
    choices: int = 1
    metric: str = "accuracy"
    label_names: tuple[str, ...] = ("label",)
    unique_name: ClassVar[str | None] = None

    def __init__(self, train: Sequence[str], validation: Sequence[str], tokenizer: Tokenizer, positions: int):
        """Read the files; arguments and errors as in `labelled.open_task`."""
        if not isinstance(tokenizer, BertTokenizer):
            fix = "use a model trained with --tokenizer bert-uncased:vocab.txt or bert-cased:vocab.txt"
            raise UsageError(f"the tokenizer is of kind {tokenizer.scheme}, and this task needs a BERT's; {fix}")
        self.tokenizer, self.positions = tokenizer, positions
        self.notes: list[str] = []
        self.validation: dict[str, Examples] = {}
        self._files: dict[str, Path] = {}
        self._items: dict[str, list[Any]] = {}  # the items of each validation set
        self.train, _ = self._read_examples("train", self.task_files(train))
        files = self.task_files(validation)
        for file in files:
            name = self.set_name(file, alone=len(files) == 1)
            if name in self._files:
                both = f"{self._files[name]} and {file}"
                raise UsageError(f"{both} would both be called {name}; give one, or rename the other")
            self._files[name] = file
            self.validation[name], self._items[name] = self._read_examples("validation", [file])
        times = Counter(item.name for items in self._items.values() for item in items)
        if self.unique_name and (repeated := [name for name, count in times.items() if count > 1]):
            raise UsageError(f"the {self.unique_name} {repeated[0]} is twice in {', '.join(validation)}; leave one out")

    @property
    def has_labels(self) -> bool:
        """True if any validation set has labels."""
        return any(examples.labels for examples in self.validation.values())

    def with_head(self, model: ModelConfig) -> BERTTaskConfig:
        """The config of `model` with the head for this task."""
        current = getattr(model, "num_labels", BERTTaskConfig.num_labels)
        num_labels = {"classification": self.classes, "multiple_choice": self.choices}.get(self.head, current)
        return replace(cast(BERTTaskConfig, convert_kind(model, "bert_task")), head=self.head, num_labels=num_labels)

    # --- Defined by a task --------------------------------------------------------------------------------------------

    def task_files(self, paths: Iterable[str]) -> list[Path]:
        """The files, or folders, to read one by one."""
        return list(map(Path, paths))

    def set_name(self, file: Path, alone: bool) -> str:
        """The name of the validation set of `file`; `alone`: it is the only one."""
        return "validation" if alone else file.stem

    @abstractmethod
    def read(self, file: Path) -> list:
        """Read the items of a file, each with its `name` in predictions, and `truth`: the right answer, or None if the
        file has none.

        Raises:
          UsageError: it is missing or malformed.
        """

    @abstractmethod
    def encode(self, file: Path, items: list, role: Role) -> Iterator[tuple[Any, list[TokenPair], list[Labels]]]:
        """Yield the used items of a file, each with `choices` rows for each of its examples and the examples' labels,
        which are ignored if the file has none."""

    def metrics(self, outputs: Outputs) -> list[Metric]:
        """The official metrics of the validation sets with labels: accuracy over all, and of each of several.

        Raises:
          RunError: a logit is not finite.
        """
        predicted = self.argmax_logits(outputs)
        labels = {name: examples.labels["label"] for name, examples in self.validation.items() if examples.labels}
        if not labels:
            return []
        right = {name: int((predicted[name] == label).sum()) for name, label in labels.items()}
        correct, count = sum(right.values()), sum(map(len, labels.values()))
        per_set = [Metric.fraction(f"{name}_accuracy", right[name], len(label)) for name, label in labels.items()]
        several = len(labels) > 1
        return [
            Metric.fraction("accuracy", correct, count, "of all sets together" if several else ""),
            *(per_set if several else []),
            Metric.count("correct", correct, f"of {count:,} examples"),
        ]

    @abstractmethod
    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """Prediction files in the official format: name → contents. Errors as in `metrics`."""

    # --- Common to all tasks ------------------------------------------------------------------------------------------

    def argmax_logits(self, outputs: Outputs) -> dict[str, np.ndarray]:
        """The index of the highest logit of each example, int [N] by name of the set; the first in a tie."""
        return {name: logits.argmax(-1) for name, logits in check_finite(outputs).items()}

    def _read_examples(self, role: Role, files: Sequence[Path]) -> tuple[Examples, list]:
        """Read the rows of all `files`, and their items."""
        used: list[Any] = []
        pairs: list[TokenPair] = []
        labels: list[Labels] = []
        labelled = True
        for file in files:
            items, before = self.read(file), len(pairs)
            labelled = _has_labels(items, file, role)
            for item, rows, row_labels in self.encode(file, items, role):
                used.append(item)
                pairs += rows
                labels += row_labels
            self.note_truncated(file, "rows", (pair.length for pair in pairs[before:]), self.positions)
        columns = {name: [label[i] for label in labels] for i, name in enumerate(self.label_names)} if labelled else {}
        return build_examples(pairs, self.choices, columns, self.tokenizer, self.positions), used

    def note_truncated(self, file: Path, items: str, lengths: Iterable[int], max_tokens: int) -> None:
        """Add a note if some rows or questions of `file` have more than `max_tokens` tokens."""
        are_long = [length > max_tokens for length in lengths]
        if any(are_long):
            share = f"{sum(are_long):,} of {len(are_long):,} {items} ({np.mean(are_long):.1%})"
            self.notes.append(f"{file}: {share} have more than {max_tokens:,} tokens and are truncated at the end")


def _has_labels(items: Sequence, file: Path, role: Role) -> bool:
    """True if the items of a file have labels.

    Raises:
      UsageError: there is no item, or only some have labels, or none although they are needed for training.
    """
    labelled = sum(item.truth is not None for item in items)
    if not items:
        raise UsageError(f"{file} has no example; give the task's files as published")
    if 0 < labelled < len(items):
        raise UsageError(f"{file} has labels for {labelled:,} of its {len(items):,} examples; give all, or none")
    if role == "train" and not labelled:
        raise UsageError(f"{file} has no labels to train on; give the training file, and this one for validation")
    return labelled > 0


def check_finite(outputs: Outputs) -> Outputs:
    """Check the logits of validation sets, and return them.

    Raises:
      RunError: one is not finite.
    """
    for name, logits in outputs.items():
        if not np.isfinite(logits).all():
            raise RunError(f"the model's outputs for {name} are not finite; {NOT_FINITE}")
    return outputs


# --- Texts as rows of a BERT: [CLS] a [SEP] b [SEP] and padding -------------------------------------------------------
# A row that is too long is truncated at its end, so b loses tokens first, as in Megatron-LM v1.0 (tasks/data_utils.py);
# Google's BERT truncates the longer of the two. Token types are 0 for padding whatever its id; v1.0 uses the padding
# id.


Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Examples:
    """N examples, each of c rows: the choices of a question, 1 for all other tasks.

    Attributes:
      tokens: int32 [N, c, s], `[CLS] a [SEP] b [SEP]` and padding.
      token_types: int32 [N, c, s]; 0 up to the first [SEP] and in the padding, 1 for the rest.
      text: bool [N, c, s]; False is padding.
      labels: int32 [N] each: {"label": …}, or {"start": …, "end": …}, which are positions in the row; empty if the file
        has none.
    """

    tokens: np.ndarray
    token_types: np.ndarray
    text: np.ndarray
    labels: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: np.ndarray) -> Batch:
        """The model's inputs for the examples `argmax_logits`, int [b] → [b, c, s] each."""
        return {
            "tokens": self.tokens[indices],
            "token_types": self.token_types[indices],
            "documents": (~self.text[indices]).astype(np.int32),  # 0 for text, 1 for padding
        }


class TokenPair(NamedTuple):
    """Ids of the two texts of a row, without special tokens."""

    a: Sequence[int]
    b: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of the whole row."""
        return len(self.a) + len(self.b) + 3


def build_examples(
    pairs: Sequence[TokenPair], choices: int, labels: dict[str, Sequence[int]], tokenizer: BertTokenizer, positions: int
) -> Examples:
    """Build rows of `positions` tokens, `choices` consecutive ones per example."""
    tokens = np.full((len(pairs), positions), tokenizer.pad, np.int32)
    token_types = np.zeros_like(tokens)
    text = np.zeros(tokens.shape, bool)
    for row, (a, b) in enumerate(pairs):
        ids = [*[tokenizer.cls, *a, tokenizer.sep, *b][: positions - 1], tokenizer.sep]
        tokens[row, : len(ids)], text[row, : len(ids)] = ids, True
        token_types[row, len(a) + 2 : len(ids)] = 1
    arrays = (array.reshape(-1, choices, positions) for array in (tokens, token_types, text))
    return Examples(*arrays, labels={name: np.array(values, np.int32) for name, values in labels.items()})


def iterate_batches(examples: Examples, size: int) -> Iterator[tuple[int, Batch]]:
    """Yield batches of `size` examples in order, without labels, each with its number of examples.

    The last batch is padded with copies of its first example.
    """
    for first in range(0, len(examples), size):
        count = min(size, len(examples) - first)
        yield count, examples.batch(first + np.arange(size) * (np.arange(size) < count))


def clean_text(text: str) -> str:
    """Collapse white space, and remove the space before a full stop, as in v1.0."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):  # consecutive full stops share their spaces
        text = text.replace(" . ", ". ")
    return text


# --- Files of labelled tasks: their lines, columns and objects --------------------------------------------------------


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield FILE:LINE and text of each non-blank line; only a line feed ends a line, possibly after a carriage return.

    Raises:
      UsageError: there is no such file, or it is not UTF-8.
    """
    for number, line in enumerate(read_text(file).split("\n"), start=1):
        if line.strip():
            yield f"{file}:{number}", line.rstrip("\r")


def read_table(file: Path, *needed: str) -> Iterator[tuple[str, dict[str | None, str | None]]]:
    """Yield FILE:LINE and fields by column of each line of a tab-separated file, whose first line names the columns.

    A missing field becomes None; the last field without a column is under the key None.

    Raises:
      UsageError: the file is missing or empty, or has no column of a name in `needed`.
    """
    rows = ((source, text.split("\t")) for source, text in read_lines(file))
    source, header = next(rows, (f"{file}:1", []))
    columns = [name.strip() for name in header]
    if missing := [name for name in needed if name not in columns]:
        names = " and no ".join(missing)
        raise UsageError(f"{source} names no column {names}; give the published file, with the names in its first line")
    for source, fields in rows:
        yield source, dict(zip_longest(columns, fields))


def read_objects(file: Path, kind: type[T], expected: str) -> Iterator[tuple[str, T]]:
    """Yield FILE:LINE and the JSON object of each line of a file; arguments and errors as in `parse_json_object`."""
    for source, text in read_lines(file):
        yield source, parse_json_object(kind, text, source, expected)


def parse_json_object(kind: type[T], text: str, source: str, expected: str) -> T:
    """Parse the JSON object in `text`, of the type `kind` as in `plain_values.check`.

    Raises:
      UsageError: it is not one; `expected` shows the format.
    """
    values = parse_json(text, source, f"{expected} is expected")
    if "\\ud" in text.lower() and re.search("[\ud800-\udfff]", json.dumps(values, ensure_ascii=False)):
        raise UsageError(f"{source} has an unpaired surrogate, which is not valid text; replace or drop it")
    return check(kind, values, source, f"{expected} is expected")
