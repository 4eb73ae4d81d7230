"""MNLI and QQP: what one sentence says of another (arXiv 1704.05426), and whether two questions are the same.

Both come as GLUE's tab-separated files (arXiv 1804.07461), whose first line names the columns:

    MNLI   index … sentence1 sentence2 … gold_label     train.tsv, dev_matched.tsv, dev_mismatched.tsv
           index … sentence1 sentence2                  test_matched.tsv, test_mismatched.tsv
    QQP    id qid1 qid2 question1 question2 is_duplicate     train.tsv, dev.tsv
           id question1 question2                            test.tsv

A tab always parts two columns: quotation marks are text. MNLI's original files, .txt of the same kind and .jsonl, are
read too; there "-" is the label of pairs on which the annotators did not agree, and these are left out and counted.
QQP's files hold lines that were broken in two: as in Megatron-LM v1.0 (tasks/glue/qqp.py) they are left out, and
counted. Nothing is left out of a file without labels, because a prediction is due for each of its pairs.

A row is [CLS] first [SEP] second [SEP]. Files of predictions are GLUE's submissions, `index<tab>prediction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from mjax.data.tokenizers import BertTokenizer, Tokenizer
from mjax.errors import UsageError
from mjax.tasks import accuracy
from mjax.tasks.interface import Figure
from mjax.tasks.rows import Examples, Pair, as_rows, bert_tokenizer, clean_text, cut_note
from mjax.tasks.task_files import by_name, by_stem, check_labels, json_object, lines, table


class Sentences(NamedTuple):
    """Two sentences of a file.

    Attributes:
      index: name of the pair in a predictions file.
      label: number of its label; None where the file has none.
    """

    index: str
    first: str
    second: str
    label: int | None


class LeftOut(NamedTuple):
    """A line of a file that is not used: FILE:LINE, and what is wrong with it."""

    source: str
    reason: str


MEND = "mend it, or give the published file"


class SentencePairs(ABC):
    """A task on pairs of sentences; see `LabelledTask`."""

    head: Literal["classification"] = "classification"
    choices = 1
    metric = "accuracy"
    names: ClassVar[tuple[str, ...]]
    """Labels by their numbers, as they stand in files."""
    submissions: ClassVar[dict[str, str]]
    """Names of GLUE's submissions by those of its test files, without their endings."""

    def __init__(self, train: Sequence[str], validation: Sequence[str], tokenizer: Tokenizer, positions: int):
        """Read the files; arguments and errors as of `open_task`."""
        self.classes = len(self.names)
        self.notes: list[str] = []
        rows_of = bert_tokenizer(tokenizer), positions
        self.train, _ = self._examples("train", [Path(file) for file in train], *rows_of)
        self.validation: dict[str, Examples] = {}
        self._predicted: dict[str, tuple[str, list[str]]] = {}  # name of the file of predictions, and its indices
        for name, file in self._named([Path(file) for file in validation]).items():
            self.validation[name], indices = self._examples("validation", [file], *rows_of)
            self._predicted[name] = self.submissions.get(file.stem, name) + ".tsv", indices

    def figures(self, outputs: dict[str, np.ndarray]) -> list[Figure]:
        """Accuracy, and of QQP F1."""
        return accuracy.accuracies(accuracy.labelled(accuracy.choose(outputs), self.validation))

    def predictions(self, outputs: dict[str, np.ndarray]) -> dict[str, str]:
        """GLUE's submissions; one for a test set is named as GLUE asks for it."""
        found = {}
        for name, chosen in accuracy.choose(outputs).items():
            file, indices = self._predicted[name]
            answers = [f"{index}\t{self.names[label]}\n" for index, label in zip(indices, chosen, strict=True)]
            found[file] = "".join(["index\tprediction\n", *answers])
        return found

    def _named(self, files: list[Path]) -> dict[str, Path]:
        return by_stem(files)

    @abstractmethod
    def _read(self, file: Path) -> Iterator[Sentences | LeftOut]:
        """The pairs of a file, or why a line of it is none."""

    def _examples(
        self, role: Literal["train", "validation"], files: list[Path], tokenizer: BertTokenizer, positions: int
    ) -> tuple[Examples, list[str]]:
        pairs: list[Sentences] = []
        for file in files:
            found = list(self._read(file))
            used = [item for item in found if isinstance(item, Sentences)]
            if left_out := [item for item in found if isinstance(item, LeftOut)]:
                self.notes.append(
                    f"{file}: {len(left_out):,} of {len(found):,} pairs are left out, such as that of "
                    f"{left_out[0].source}, which {left_out[0].reason}"
                )
            check_labels([pair.label is not None for pair in used], file, role)
            pairs += used
        first, second = (
            tokenizer.encode_batch([clean_text(text) for text in texts])
            for texts in ([pair.first for pair in pairs], [pair.second for pair in pairs])
        )
        ids = [Pair(a, b) for a, b in zip(first, second, strict=True)]
        self.notes += cut_note(ids, positions, ", ".join(map(str, files)))
        labels = {"label": [pair.label for pair in pairs]} if not pairs or pairs[0].label is not None else {}
        return as_rows(ids, 1, labels, tokenizer, positions), [pair.index for pair in pairs]


class Mnli(SentencePairs):
    """Entailment, contradiction or neither; see the module."""

    names = ("contradiction", "entailment", "neutral")  # v1.0's order
    submissions: ClassVar[dict[str, str]] = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}

    def _named(self, files: list[Path]) -> dict[str, Path]:
        return by_name(files, lambda file: file.stem.removeprefix("dev_"))

    def _read(self, file: Path) -> Iterator[Sentences | LeftOut]:
        for source, fields in _objects(file) if file.suffix == ".jsonl" else _rows(file):
            sentences = [fields.get(key) for key in ("sentence1", "sentence2")]
            if not all(isinstance(sentence, str) and sentence.strip() for sentence in sentences):
                raise UsageError(f"{source} lacks a sentence; {MEND}")
            label = fields.get("gold_label")
            if label not in (None, "-", *self.names):
                raise UsageError(f"{source} has the gold label {label!r:.40}; it may be {', '.join(self.names)} or -")
            if label == "-":
                yield LeftOut(source, "has the gold label -")
                continue
            index = next((fields[key] for key in ("index", "pairID") if key in fields), source)
            yield Sentences(str(index), *sentences, None if label is None else self.names.index(label))


class Qqp(SentencePairs):
    """Duplicate questions; see the module."""

    names = ("0", "1")
    submissions: ClassVar[dict[str, str]] = {"test": "QQP"}

    def figures(self, outputs: dict[str, np.ndarray]) -> list[Figure]:
        """Accuracy and F1."""
        answers = accuracy.labelled(accuracy.choose(outputs), self.validation)
        return [*accuracy.accuracies(answers), *accuracy.f1(answers)]

    def _read(self, file: Path) -> Iterator[Sentences | LeftOut]:
        columns, rows = table(file, "id", "question1", "question2")
        labelled = "is_duplicate" in columns
        for source, row in rows:
            fields = dict(zip(columns, row, strict=False))
            used = ("id", "question1", "question2", *(["is_duplicate"] if labelled else []))
            if len(row) != len(columns):
                reason = f"has {len(row)} fields, not {len(columns)}"
            elif empty := [name for name in used if not fields[name].strip()]:
                reason = f"has an empty {empty[0]}"
            elif labelled and fields["is_duplicate"] not in self.names:
                raise UsageError(f"{source} has {fields['is_duplicate']!r:.40} for is_duplicate; it may be 0 or 1")
            else:
                label = self.names.index(fields["is_duplicate"]) if labelled else None
                yield Sentences(fields["id"], fields["question1"], fields["question2"], label)
                continue
            if not labelled:
                raise UsageError(f"{source} {reason}, and a prediction is due for each pair; {MEND}")
            yield LeftOut(source, reason)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """FILE:LINE and fields by their columns, of MNLI's tables."""
    columns, rows = table(file, "sentence1", "sentence2")
    for source, row in rows:
        if len(row) != len(columns):
            raise UsageError(f"{source} has {len(row)} fields, not {len(columns)}; {MEND}")
        yield source, dict(zip(columns, row, strict=True))


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """FILE:LINE and fields, of MNLI's .jsonl files."""
    for source, text in lines(file):
        yield source, json_object(text, source, '{"sentence1": "…", "sentence2": "…", "gold_label": "…"}')
