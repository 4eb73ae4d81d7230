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

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypedDict

from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError, either, suggestion
from mjax.tasks.interface import Metric
from mjax.tasks.labelled_task import LabelledTask, Outputs, Role, TokenPair, clean_text, read_objects, read_table
from mjax.tasks.squad import Squad
from mjax.utils.files import write_whole


class SentencePair(NamedTuple):
    """A pair of sentences in a file.

    Attributes:
      name: index of the pair in a prediction file.
      truth: index of its label; None if the file has none.
    """

    name: str
    first: str
    second: str
    truth: int | None


class SentencePairTask(LabelledTask):
    """A task on pairs of sentences.

    Attributes:
      columns: column names; the last two are the sentences.
      label: column of the label, which a test file lacks.
      label_values: labels by number, as in the files.
      skipped_labels: labels of pairs that are skipped.
      skip_broken_lines: True if a broken line is skipped in a file with labels.
      submission_names: names of GLUE's submissions by the names of its test files, without extensions.
    """

    head = "classification"
    columns: ClassVar[tuple[str, ...]]
    label: ClassVar[str]
    label_values: ClassVar[tuple[str, ...]]
    skipped_labels: ClassVar[tuple[str, ...]] = ()
    skip_broken_lines: ClassVar[bool] = False
    submission_names: ClassVar[dict[str, str]]

    @property
    def classes(self) -> int:
        """One for each label."""
        return len(self.label_values)

    def parse_pair(self, source: str, fields: dict[str, Any]) -> SentencePair | str:
        """The pair of a line, or the reason why the line is skipped.

        Raises:
          UsageError: it is malformed.
        """
        label = fields.get(self.label)
        required = (*self.columns, self.label) if label is not None else self.columns
        empty = [name for name in required if not (isinstance(fields.get(name), str) and fields[name].strip())]
        broken = None in fields or None in fields.values()
        if broken or empty:
            problem = "has too few or too many fields" if broken else f"has no {empty[0]}"
            if self.skip_broken_lines and self.label in fields:
                return problem
            raise UsageError(f"{source} {problem}, and it is not to be skipped; fix it, or give the published file")
        if label in self.skipped_labels:
            return f"has the label {label}"
        if label not in (None, *self.label_values):
            known = either([*self.label_values, *self.skipped_labels])
            raise UsageError(f"{source} has {label!r:.40} for {self.label}; it may be {known}")
        name = next((fields[key] for key in ("index", "pairID", "id") if key in fields), source)
        sentences = (fields[column] for column in self.columns[-2:])
        return SentencePair(str(name), *sentences, None if label is None else self.label_values.index(label))

    def read(self, file: Path) -> list[SentencePair]:
        """Read the pairs of a file; skipped pairs are counted."""
        is_jsonl = file.suffix == ".jsonl"
        rows = read_objects(file, dict[str, Any], PAIR_FORMAT) if is_jsonl else read_table(file, *self.columns)
        pairs = [(source, self.parse_pair(source, fields)) for source, fields in rows]
        if skipped := [(source, reason) for source, reason in pairs if isinstance(reason, str)]:
            source, reason = skipped[0]
            count = f"{len(skipped):,} of {len(pairs):,} pairs were skipped"
            self.notes.append(f"{file}: {count}, such as that of {source}, which {reason}")
        return [pair for _, pair in pairs if isinstance(pair, SentencePair)]

    def encode(self, file: Path, items: list[SentencePair], role: Role):
        """A row and a label for each pair."""
        first = self.tokenizer.encode_batch([clean_text(pair.first) for pair in items])
        second = self.tokenizer.encode_batch([clean_text(pair.second) for pair in items])
        for pair, a, b in zip(items, first, second, strict=True):
            yield pair, [TokenPair(a, b)], [(pair.truth,)]

    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """GLUE's submissions; one for a test set has GLUE's name."""
        files = {}
        for name, predicted in self.argmax_logits(outputs).items():
            file = self.submission_names.get(self._files[name].stem, name) + ".tsv"
            pairs = zip(self._items[name], predicted, strict=True)
            files[file] = "index\tprediction\n" + "".join(f"{pair.name}\t{self.label_values[n]}\n" for pair, n in pairs)
        return files


class Mnli(SentencePairTask):
    """Entailment, contradiction or neither; see the module."""

    columns = ("sentence1", "sentence2")
    label = "gold_label"
    label_values = ("contradiction", "entailment", "neutral")  # v1.0's order
    skipped_labels = ("-",)  # the annotators did not agree
    submission_names: ClassVar[dict[str, str]] = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}

    def set_name(self, file: Path, alone: bool) -> str:
        """The name of the file without GLUE's "dev_"."""
        return file.stem.removeprefix("dev_")


class Qqp(SentencePairTask):
    """Duplicate questions; see the module."""

    columns = ("id", "question1", "question2")
    label = "is_duplicate"
    label_values = ("0", "1")
    skip_broken_lines = True
    submission_names: ClassVar[dict[str, str]] = {"test": "QQP"}

    def metrics(self, outputs: Outputs) -> list[Metric]:
        """Accuracy, and F1 of label 1 over all sets: 2 true positives / (2 true positives + both kinds of error)."""
        metrics, predicted = super().metrics(outputs), self.argmax_logits(outputs)
        if metrics:
            labels = {name: examples.labels["label"] for name, examples in self.validation.items() if examples.labels}
            both = sum(int((predicted[name] & label).sum()) for name, label in labels.items())
            errors = sum(int((predicted[name] + label).sum()) for name, label in labels.items())
            metrics.append(Metric.fraction("f1", 2 * both, max(errors, 1), "of the pairs that are duplicates"))
        return metrics


PAIR_FORMAT = '{"sentence1": "…", "sentence2": "…", "gold_label": "…"}'

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
FOLDER_HINT = "one of RACE's, such as RACE/dev or RACE/dev/high"
PASSAGE_FORMAT = '{"id": "…", "article": "…", "questions": ["…"], "options": [["…", "…", "…", "…"]], "answers": ["A"]}'


class _TestPassage(TypedDict):
    id: str
    article: str
    questions: list[str]
    options: list[list[str]]


class _PassageFile(_TestPassage, total=False):
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
    unique_name = "id"

    def task_files(self, paths) -> list[Path]:
        """The folders, or the levels in them."""
        folders = []
        for folder in map(Path, paths):
            if not folder.is_dir():
                problem = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
                raise UsageError(f"{problem}; give {FOLDER_HINT}")
            folders += [folder / level for level in LEVELS if (folder / level).is_dir()] or [folder]
        return folders

    def set_name(self, file: Path, alone: bool) -> str:
        """The level."""
        return file.resolve().name

    def read(self, file: Path) -> list[Passage]:
        """Read the passages of all files of a folder."""
        files = sorted(path for path in file.glob("*.txt") if path.is_file())
        if not files:
            raise UsageError(f"the folder {file} has no .txt file; give {FOLDER_HINT}")
        objects = chain.from_iterable(read_objects(path, _PassageFile, PASSAGE_FORMAT) for path in files)
        return [_parse_passage(values, source) for source, values in objects]

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
        remaining = iter(questions)
        for passage, article in zip(items, articles, strict=True):
            count = len(OPTIONS) * len(passage.questions)
            rows = [TokenPair(next(remaining)[:MAX_QUESTION_TOKENS], article) for _ in range(count)]
            yield passage, rows, [(OPTIONS.index(letter),) for letter in passage.truth or ()]

    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """predictions.json: the answers of each file by its id, in the format of the dataset."""
        answers: dict[str, list[str]] = {}
        for name, predicted in self.argmax_logits(outputs).items():
            letters = iter(OPTIONS[number] for number in predicted)
            for passage in self._items[name]:
                answers[passage.name] = [next(letters) for _ in passage.questions]
        return {"predictions.json": json.dumps(answers, ensure_ascii=False, indent=2) + "\n"}


def _parse_passage(values: _PassageFile, source: str) -> Passage:
    """Convert a JSON object to a passage.

    Raises:
      UsageError: a value is impossible, or the numbers of options or answers and of questions differ.
    """
    passage = Passage(values["id"], values["article"], values["questions"], values["options"], values.get("answers"))
    questions, answers = passage.questions, passage.questions if passage.truth is None else passage.truth
    problems = {
        "no article or no questions": not (passage.article.strip() and questions),
        "a question without four options": any(len(options) != len(OPTIONS) for options in passage.options),
        "an answer that is not A, B, C or D": not {*(passage.truth or ())} <= {*OPTIONS},
        "not as many options and answers as questions": not len(questions) == len(passage.options) == len(answers),
    }
    if problem := next((problem for problem, occurs in problems.items() if occurs), ""):
        raise UsageError(f"{source} has {problem}; {PASSAGE_FORMAT} is expected")
    return passage


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
# and RACE; QQP uses MNLI's. It has none for SQuAD, so epochs, warm-up and decay come from Google's BERT.
# Tokens: Google's 128 and 384; v1.0 pads each pair of MNLI to 512, at four times the cost, for the few that are longer.
RECIPES: dict[str, Recipe] = {
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
      name: a key of `RECIPES`.
      train, validation: its files, as published; folders for RACE. Validation files without labels give predictions but
        no metrics.
      tokenizer: the model's.
      positions: s, tokens per row.

    Raises:
      UsageError: there is no such task, the tokenizer is not BERT's, or a file is missing or malformed.
    """
    check_task_name(name)
    return TASKS[name](train, validation, tokenizer, positions)


def check_task_name(name: str, known: Sequence[str] = tuple(TASKS), otherwise: str = "") -> None:
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
