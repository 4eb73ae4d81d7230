"""Labelled tasks, for which a pre-trained model is fine-tuned: MNLI, QQP, RACE, and SQuAD 1.1 and 2.0 (`squad.py`).

`labelled_task.py` has their common path.

MNLI is entailment between two sentences (arXiv 1704.05426), QQP whether two questions are duplicates. Both come as
GLUE's tab-separated files (arXiv 1804.07461), whose first line names the columns:

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict

from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError, either, suggestion
from mjax.tasks.interface import Metric
from mjax.tasks.labelled_task import LabelledTask, Outputs, Pair, Role, clean_text, json_object, lines, table
from mjax.tasks.squad import Squad
from mjax.utils.files import write_whole


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
    columns: ClassVar[tuple[str, ...]]
    """Columns of every file, of the two sentences last."""
    label: ClassVar[str]
    """Column of the label, which a test file lacks."""
    names: ClassVar[tuple[str, ...]]
    """Labels by number, as in the files."""
    unclear: ClassVar[tuple[str, ...]] = ()
    """Labels of pairs that are skipped."""
    skips_broken: ClassVar[bool] = False
    """True if a broken line is skipped in a file with labels."""
    submissions: ClassVar[dict[str, str]]
    """Names of GLUE's submissions by the names of its test files, without extensions."""

    @property
    def classes(self) -> int:
        """One for each label."""
        return len(self.names)

    def pair(self, source: str, fields: dict[str, Any]) -> Sentences | str:
        """The pair of a line, or why the line is skipped.

        Raises:
          UsageError: it is malformed.
        """
        label = fields.get(self.label)
        needed = (*self.columns, self.label) if label is not None else self.columns
        empty = [name for name in needed if not (isinstance(fields.get(name), str) and fields[name].strip())]
        broken = None in fields or None in fields.values()
        if broken or empty:
            problem = "has too few or too many fields" if broken else f"has no {empty[0]}"
            if self.skips_broken and self.label in fields:
                return problem
            raise UsageError(f"{source} {problem}, and it is not to be skipped; fix it, or give the published file")
        if label in self.unclear:
            return f"has the label {label}"
        if label not in (None, *self.names):
            known = either([*self.names, *self.unclear])
            raise UsageError(f"{source} has {label!r:.40} for {self.label}; it may be {known}")
        name = next((fields[key] for key in ("index", "pairID", "id") if key in fields), source)
        sentences = (fields[column] for column in self.columns[-2:])
        return Sentences(str(name), *sentences, None if label is None else self.names.index(label))

    def read(self, file: Path) -> list[Sentences]:
        """The pairs of a file; those that are skipped are counted."""
        if file.suffix == ".jsonl":
            rows = ((source, json_object(dict[str, Any], text, source, EXPECTED_LINE)) for source, text in lines(file))
        else:
            rows = table(file, *self.columns)
        read = [(source, self.pair(source, fields)) for source, fields in rows]
        if skipped := [(source, reason) for source, reason in read if isinstance(reason, str)]:
            source, reason = skipped[0]
            count = f"{len(skipped):,} of {len(read):,} pairs were skipped"
            self.notes.append(f"{file}: {count}, such as that of {source}, which {reason}")
        return [pair for _, pair in read if isinstance(pair, Sentences)]

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
        files = {}
        for name, chosen in self.chosen(outputs).items():
            file = self.submissions.get(self._files[name].stem, name) + ".tsv"
            pairs = zip(self._items[name], chosen, strict=True)
            files[file] = "index\tprediction\n" + "".join(f"{pair.name}\t{self.names[n]}\n" for pair, n in pairs)
        return files


class Mnli(SentencePairs):
    """Entailment, contradiction or neither; see the module."""

    columns = ("sentence1", "sentence2")
    label = "gold_label"
    names = ("contradiction", "entailment", "neutral")  # v1.0's order
    unclear = ("-",)  # the annotators did not agree
    submissions: ClassVar[dict[str, str]] = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}

    def set_name(self, file: Path, alone: bool) -> str:
        """The name of the file without GLUE's "dev_"."""
        return file.stem.removeprefix("dev_")


class Qqp(SentencePairs):
    """Duplicate questions; see the module."""

    columns = ("id", "question1", "question2")
    label = "is_duplicate"
    names = ("0", "1")
    skips_broken = True
    submissions: ClassVar[dict[str, str]] = {"test": "QQP"}

    def metrics(self, outputs: Outputs) -> list[Metric]:
        """Accuracy, and F1 of label 1 over all sets: 2 true positives / (2 true positives + both kinds of error)."""
        metrics, chosen = super().metrics(outputs), self.chosen(outputs)
        if metrics:
            labels = {name: examples.labels["label"] for name, examples in self.validation.items() if examples.labels}
            both = sum(int((chosen[name] & label).sum()) for name, label in labels.items())
            either = sum(int((chosen[name] + label).sum()) for name, label in labels.items())
            metrics.append(Metric.share("f1", 2 * both, max(either, 1), "of the pairs that are duplicates"))
        return metrics


EXPECTED_LINE = '{"sentence1": "…", "sentence2": "…", "gold_label": "…"}'

# --- RACE: questions on a passage, from English exams for middle and high school in China (arXiv 1704.04683) ----------
# The dataset is a folder of folders, {train,dev,test}/{middle,high}, with a JSON object in each .txt file:
#
#     {"id": "high1.txt", "article": "…", "questions": ["The author is _ ."], "options": [["a", "b", "c", "d"]],
#      "answers": ["C"]}
#
# Each question has four options, and each option is a separate row: the question with the option in place of every "_",
# or appended if there is none; then the article. As in Megatron-LM v1.0 (tasks/race/data.py) question and option come
# first and have at most 128 tokens, so that a row that is too long loses the end of the article.


OPTIONS = "ABCD"
MAX_QUESTION_TOKENS = 128  # tokens of question and option
LEVELS = ("middle", "high")
A_FOLDER = "one of RACE's, such as RACE/dev or RACE/dev/high"
EXPECTED = '{"id": "…", "article": "…", "questions": ["…"], "options": [["…", "…", "…", "…"]], "answers": ["A"]}'


class _Unanswered(TypedDict):
    id: str
    article: str
    questions: list[str]
    options: list[list[str]]


class _File(_Unanswered, total=False):
    answers: list[str] | None


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

    def task_files(self, given) -> list[Path]:
        """The folders, or the levels in them."""
        folders = []
        for folder in map(Path, given):
            if not folder.is_dir():
                problem = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
                raise UsageError(f"{problem}; give {A_FOLDER}")
            folders += [folder / level for level in LEVELS if (folder / level).is_dir()] or [folder]
        return folders

    def set_name(self, file: Path, alone: bool) -> str:
        """The level."""
        return file.resolve().name

    def read(self, file: Path) -> list[Passage]:
        """The passages of all files of a folder."""
        files = sorted(inside for inside in file.glob("*.txt") if inside.is_file())
        if not files:
            raise UsageError(f"the folder {file} has no .txt file; give {A_FOLDER}")
        read = (
            (source, json_object(_File, text, source, EXPECTED)) for inside in files for source, text in lines(inside)
        )
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
        self.note_truncated(file, "questions", map(len, questions), MAX_QUESTION_TOKENS)
        rest = iter(questions)
        for passage, article in zip(items, articles, strict=True):
            count = len(OPTIONS) * len(passage.questions)
            rows = [Pair(next(rest)[:MAX_QUESTION_TOKENS], article) for _ in range(count)]
            yield passage, rows, [(OPTIONS.index(letter),) for letter in passage.truth or ()]

    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """predictions.json: the answers of each file by its id, in the format of the dataset."""
        answers: dict[str, list[str]] = {}
        for name, chosen in self.chosen(outputs).items():
            letters = iter(OPTIONS[number] for number in chosen)
            for passage in self._items[name]:
                answers[passage.name] = [next(letters) for _ in passage.questions]
        return {"predictions.json": json.dumps(answers, ensure_ascii=False, indent=2) + "\n"}


def _passage(values: _File, source: str) -> Passage:
    """The passage that is a JSON object.

    Raises:
      UsageError: a value is impossible, or the numbers of options or answers and of questions differ.
    """
    article, questions, options, answers = (
        values["article"],
        values["questions"],
        values["options"],
        values.get("answers"),
    )
    wrong = {
        "no article or no questions": not (article.strip() and questions),
        "a question without four options": any(len(of_one) != len(OPTIONS) for of_one in options),
        "an answer that is not A, B, C or D": not set(answers or ()) <= set(OPTIONS),
        "not as many options and answers as questions": not (
            len(questions) == len(options) == len(questions if answers is None else answers)
        ),
    }
    if problem := next((what for what, is_so in wrong.items() if is_so), ""):
        raise UsageError(f"{source} has {problem}; {EXPECTED} is expected")
    return Passage(values["id"], article, questions, options, answers)


# --- Names and recipes ------------------------------------------------------------------------------------------------
# Sources: arXiv 1909.08053, section 5.3 and appendix A; Megatron-LM v1.0, tasks/ and examples/finetune_*.sh.


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


def check_name(name: str, known: Sequence[str] = tuple(TASKS), otherwise: str = "") -> None:
    """Reject a task that is not among the `known` ones; `otherwise` ends the sentence unless one is similar.

    Raises:
      UsageError: it is not.
    """
    if name not in known:
        raise UsageError(f"there is no task {name}; {suggestion(name, known, f'use {either(known)}{otherwise}')}")


def write_predictions(folder: Path, task: LabelledTask, outputs: Outputs) -> list[Path]:
    """Write the predictions of a task, files in the official format, into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {folder / name: text for name, text in task.predictions(outputs).items()}
    for file, text in contents.items():
        write_whole(file, text)
    return list(contents)
