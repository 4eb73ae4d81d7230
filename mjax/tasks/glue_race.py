"""MNLI and QQP: entailment between two sentences (arXiv 1704.05426), and whether two questions are duplicates.

Both come as GLUE's tab-separated files (arXiv 1804.07461), whose first line names the columns:

    MNLI   index … sentence1 sentence2 … gold_label     train.tsv, dev_matched.tsv, dev_mismatched.tsv
           index … sentence1 sentence2                  test_matched.tsv, test_mismatched.tsv
    QQP    id qid1 qid2 question1 question2 is_duplicate     train.tsv, dev.tsv
           id question1 question2                            test.tsv

A tab always separates columns: quotation marks are text. MNLI's original files, .txt of the same kind and .jsonl, are
read too; there "-" is the label of pairs on which the annotators did not agree, and these are skipped and counted.
QQP's files contain lines that were broken in two: as in Megatron-LM v1.0 (tasks/glue/qqp.py) they are skipped and
counted. Nothing is skipped in a file without labels, because each of its pairs needs a prediction.

A row is [CLS] first [SEP] second [SEP]. Prediction files are GLUE submissions, `index<tab>prediction`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mjax.errors import UsageError
from mjax.tasks.interface import Metric
from mjax.tasks.labelled_task import LabelledTask, Outputs, Pair, Role, clean_text, json_object, lines, table


class Sentences(NamedTuple):
    """Two sentences of a file.

    Attributes:
      name: index of the pair in a prediction file.
      truth: number of its label; None if the file has none.
    """

    name: str
    first: str
    second: str
    truth: int | None


class SentencePairs(LabelledTask):
    """A task on pairs of sentences."""

    head = "classification"
    names: ClassVar[tuple[str, ...]]
    """Labels by number, as in the files."""
    submissions: ClassVar[dict[str, str]]
    """Names of GLUE's submissions by the names of its test files, without extensions."""

    @property
    def classes(self) -> int:
        """One for each label."""
        return len(self.names)

    @abstractmethod
    def pairs(self, file: Path) -> Iterator[tuple[str, Sentences | str]]:
        """FILE:LINE and the pair of each line of a file, or why the line is not used."""

    def read(self, file: Path) -> list[Sentences]:
        """The pairs of a file; those that are skipped are counted."""
        found = list(self.pairs(file))
        if left_out := [(source, reason) for source, reason in found if isinstance(reason, str)]:
            source, reason = left_out[0]
            self.notes.append(
                f"{file}: {len(left_out):,} of {len(found):,} pairs were skipped, such as that of {source}, which "
                f"{reason}"
            )
        return [pair for _, pair in found if isinstance(pair, Sentences)]

    def encode(self, file: Path, items: list[Sentences], role: Role):
        """A row and a label for each pair."""
        first, second = (
            self.tokenizer.encode_batch([clean_text(text) for text in texts])
            for texts in ([pair.first for pair in items], [pair.second for pair in items])
        )
        for pair, a, b in zip(items, first, second, strict=True):
            yield pair, [Pair(a, b)], [(pair.truth,)]

    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """GLUE's submissions; one for a test set has GLUE's name."""
        found = {}
        for name, chosen in self.chosen(outputs).items():
            file = self.submissions.get(self._files[name].stem, name) + ".tsv"
            pairs = zip(self._asked[name], chosen, strict=True)
            found[file] = "index\tprediction\n" + "".join(f"{pair.name}\t{self.names[n]}\n" for pair, n in pairs)
        return found


class Mnli(SentencePairs):
    """Entailment, contradiction or neither; see the module."""

    names = ("contradiction", "entailment", "neutral")  # v1.0's order
    submissions: ClassVar[dict[str, str]] = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}

    def set_name(self, file: Path, alone: bool) -> str:
        """The name of the file without GLUE's "dev_"."""
        return file.stem.removeprefix("dev_")

    def pairs(self, file: Path) -> Iterator[tuple[str, Sentences | str]]:
        """All pairs except those on whose label the annotators did not agree."""
        for source, fields in _objects(file) if file.suffix == ".jsonl" else _rows(file):
            sentences = [fields.get(key) for key in ("sentence1", "sentence2")]
            if not all(isinstance(sentence, str) and sentence.strip() for sentence in sentences):
                raise UsageError(f"{source} lacks a sentence; {FIX}")
            label = fields.get("gold_label")
            if label not in (None, "-", *self.names):
                raise UsageError(f"{source} has the gold label {label!r:.40}; it may be {', '.join(self.names)} or -")
            if label == "-":
                yield source, "has the gold label -"
            else:
                index = next((fields[key] for key in ("index", "pairID") if key in fields), source)
                yield source, Sentences(str(index), *sentences, None if label is None else self.names.index(label))


class Qqp(SentencePairs):
    """Duplicate questions; see the module."""

    names = ("0", "1")
    submissions: ClassVar[dict[str, str]] = {"test": "QQP"}

    def metrics(self, outputs: Outputs) -> list[Metric]:
        """Accuracy, and F1 of label 1 over all sets: 2 true positives / (2 true positives + both kinds of error)."""
        metrics, chosen = super().metrics(outputs), self.chosen(outputs)
        if metrics:
            answers = [(chosen[name], of.labels["label"]) for name, of in self.validation.items() if of.labels]
            found, label = (np.concatenate(arrays) for arrays in zip(*answers, strict=True))
            both, either = int((found & label).sum()), int((found + label).sum())
            metrics.append(Metric.share("f1", 2 * both, max(either, 1), "of the pairs that are duplicates"))
        return metrics

    def pairs(self, file: Path) -> Iterator[tuple[str, Sentences | str]]:
        """All pairs except broken ones, which a file without labels may not have."""
        columns, rows = table(file, "id", "question1", "question2")
        labelled = "is_duplicate" in columns
        used = ["id", "question1", "question2", *(["is_duplicate"] if labelled else [])]
        for source, row in rows:
            fields = dict(zip(columns, row, strict=False))
            if len(row) != len(columns):
                found = f"has {len(row)} fields, not {len(columns)}"
            elif empty := [name for name in used if not fields[name].strip()]:
                found = f"has an empty {empty[0]}"
            elif labelled and fields["is_duplicate"] not in self.names:
                raise UsageError(f"{source} has {fields['is_duplicate']!r:.40} for is_duplicate; it may be 0 or 1")
            else:
                name, first, second, *label = (fields[name] for name in used)
                found = Sentences(name, first, second, self.names.index(*label) if labelled else None)
            if isinstance(found, str) and not labelled:
                raise UsageError(f"{source} {found}, and each pair needs a prediction; {FIX}")
            yield source, found


FIX = "fix it, or give the published file"


def _rows(file: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """FILE:LINE and fields by column, from MNLI's tables."""
    columns, rows = table(file, "sentence1", "sentence2")
    for source, row in rows:
        if len(row) != len(columns):
            raise UsageError(f"{source} has {len(row)} fields, not {len(columns)}; {FIX}")
        yield source, dict(zip(columns, row, strict=True))


def _objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """FILE:LINE and fields, from MNLI's .jsonl files."""
    for source, text in lines(file):
        yield source, json_object(text, source, '{"sentence1": "…", "sentence2": "…", "gold_label": "…"}')


# --- RACE: questions on a passage, from English exams for middle and high school in China (arXiv 1704.04683) ----------
# The dataset is a folder of folders, {train,dev,test}/{middle,high}, with a JSON object in each .txt file:
#
#     {"id": "high1.txt", "article": "…", "questions": ["The author is _ ."], "options": [["a", "b", "c", "d"]],
#      "answers": ["C"]}
#
# Each question has four options, and each option is a separate row: the question with the option in place of every "_",
#   or
# appended if there is none; then the article. As in Megatron-LM v1.0 (tasks/race/data.py) question and option come
# first and have at most 128 tokens, so that a row that is too long loses the end of the article.


OPTIONS = "ABCD"
LONGEST_QUESTION = 128  # tokens of question and option
LEVELS = ("middle", "high")
EXPECTED = '{"id": "…", "article": "…", "questions": ["…"], "options": [["…", "…", "…", "…"]], "answers": ["A"]}'


class Passage(NamedTuple):
    """An article and the questions on it; `truth` has the letters of their answers, None if the file has none."""

    name: str
    article: str
    questions: list[str]
    options: list[list[str]]
    truth: list[str] | None


class Race(LabelledTask):
    """The task on folders; see the module. A folder is RACE/dev/high, or RACE/dev for both of its levels."""

    head = "multiple_choice"
    choices = len(OPTIONS)
    unique = "id"

    def files_of(self, given) -> list[Path]:
        """The folders, or the levels in them."""
        found = []
        for folder in map(Path, given):
            if not folder.is_dir():
                raise UsageError(f"there is no folder {folder}; give one of RACE's, such as RACE/dev or RACE/dev/high")
            found += [folder / level for level in LEVELS if (folder / level).is_dir()] or [folder]
        return found

    def set_name(self, file: Path, alone: bool) -> str:
        """The level."""
        return file.resolve().name

    def read(self, file: Path) -> list[Passage]:
        """The passages of all files of a folder."""
        files = sorted(inside for inside in file.glob("*.txt") if inside.is_file())
        if not files:
            raise UsageError(
                f"the folder {file} has no .txt file; give one of RACE's, such as RACE/dev or RACE/dev/high"
            )
        read = ((source, json_object(text, source, EXPECTED)) for inside in files for source, text in lines(inside))
        return [_passage(values, source) for source, values in read]

    def encode(self, file: Path, items: list[Passage], role: Role):
        """Four rows and a label for each question."""
        articles = self.tokenizer.encode_batch([clean_text(passage.article) for passage in items])
        texts = [
            clean_text(question.replace("_", option) if "_" in question else f"{question} {option}")
            for passage in items
            for question, options in zip(passage.questions, passage.options, strict=True)
            for option in options
        ]
        questions = self.tokenizer.encode_batch(texts)
        self.note_long_questions(questions, LONGEST_QUESTION, file)
        rest = iter(questions)
        for passage, article in zip(items, articles, strict=True):
            count = len(OPTIONS) * len(passage.questions)
            rows = [Pair(next(rest)[:LONGEST_QUESTION], article) for _ in range(count)]
            yield passage, rows, [(OPTIONS.index(letter),) for letter in passage.truth or ()]

    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """predictions.json: the answers of each file by its id, in the format of the dataset."""
        answers: dict[str, list[str]] = {}
        for name, chosen in self.chosen(outputs).items():
            letters = iter(OPTIONS[number] for number in chosen)
            for passage in self._asked[name]:
                answers[passage.name] = [next(letters) for _ in passage.questions]
        return {"predictions.json": json.dumps(answers, ensure_ascii=False, indent=2) + "\n"}


def _passage(values: dict[str, Any], source: str) -> Passage:
    """The passage that is a JSON object.

    Raises:
      UsageError: a key is missing or invalid, or the numbers of options or answers and of questions differ.
    """
    name, article, questions, options = (values.get(key) for key in ("id", "article", "questions", "options"))
    answers = values.get("answers")
    if not (isinstance(name, str) and isinstance(article, str) and article.strip() and _texts(questions) and questions):
        raise UsageError(f"{source} lacks an id, an article or questions; {EXPECTED} is expected")
    if not (isinstance(options, list) and all(_texts(of_one) and len(of_one) == len(OPTIONS) for of_one in options)):
        raise UsageError(f"{source} has a question without four options; {EXPECTED} is expected")
    if answers is not None and not (_texts(answers) and all(len(a) == 1 and a in OPTIONS for a in answers)):
        raise UsageError(f"{source} has an answer that is not A, B, C or D; {EXPECTED} is expected")
    counts = [len(questions), len(options), *([] if answers is None else [len(answers)])]
    if len(set(counts)) > 1:
        of_answers = "" if answers is None else f" and {len(answers)} answers"
        raise UsageError(
            f"{source} has {len(questions)} questions, options for {len(options)}{of_answers}; give as many of each"
        )
    return Passage(name, article, questions, options, answers)


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
