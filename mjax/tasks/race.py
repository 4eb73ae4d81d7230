"""RACE: questions on a passage, of English exams for middle and high school in China (arXiv 1704.04683).

The data set is a folder of folders, {train,dev,test}/{middle,high}, with a JSON object in each .txt file:

    {"id": "high1.txt", "article": "…", "questions": ["The author is _ ."], "options": [["a", "b", "c", "d"]],
     "answers": ["C"]}

Each question has four options, and each option is a row of its own: the question with the option in place of every
"_", or behind it where there is none; then the article. As in Megatron-LM v1.0 (tasks/race/data.py) question and option
come first and have at most 128 tokens, so that a row that is too long loses the end of the article.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mjax.data.tokenizers import BertTokenizer, Tokenizer
from mjax.errors import UsageError
from mjax.tasks import accuracy
from mjax.tasks.interface import Figure
from mjax.tasks.rows import Examples, Pair, as_rows, bert_tokenizer, clean_text, cut_note, long_questions_note
from mjax.tasks.task_files import by_name, check_labels, json_object, lines

OPTIONS = "ABCD"
LONGEST_QUESTION = 128  # tokens of question and option
LEVELS = ("middle", "high")
EXPECTED = '{"id": "…", "article": "…", "questions": ["…"], "options": [["…", "…", "…", "…"]], "answers": ["A"]}'


class Passage(NamedTuple):
    """An article and the questions on it; `answers` are None where the file has none."""

    name: str
    article: str
    questions: list[str]
    options: list[list[str]]
    answers: list[str] | None


class Race:
    """The task on folders; see the module and `LabelledTask`."""

    head: Literal["multiple_choice"] = "multiple_choice"
    classes = 1
    choices = len(OPTIONS)
    metric = "accuracy"

    def __init__(self, train: Sequence[str], validation: Sequence[str], tokenizer: Tokenizer, positions: int):
        """Read the folders; arguments and errors as of `open_task`.

        A folder is given by itself, such as RACE/dev/high, or as RACE/dev for both of its levels.
        """
        self.notes: list[str] = []
        rows_of = bert_tokenizer(tokenizer), positions
        self.train, _ = self._examples("train", [part for folder in train for part in _levels(Path(folder))], *rows_of)
        folders = [part for folder in validation for part in _levels(Path(folder))]
        self.validation: dict[str, Examples] = {}
        self._passages: dict[str, list[Passage]] = {}
        for name, folder in by_name(folders, lambda folder: folder.resolve().name).items():
            self.validation[name], self._passages[name] = self._examples("validation", [folder], *rows_of)
        ids = [passage.name for passages in self._passages.values() for passage in passages]
        if twice := [name for name, times in Counter(ids).items() if times > 1]:
            raise UsageError(f"the id {twice[0]} is twice in {', '.join(validation)}; leave one out")

    def figures(self, outputs: dict[str, np.ndarray]) -> list[Figure]:
        """Accuracy over all questions, and over those of each level."""
        return accuracy.accuracies(accuracy.labelled(accuracy.choose(outputs), self.validation))

    def predictions(self, outputs: dict[str, np.ndarray]) -> dict[str, str]:
        """predictions.json: the answers of each file by its id, in the form in which the data set has them."""
        answers: dict[str, list[str]] = {}
        for name, chosen in accuracy.choose(outputs).items():
            letters = iter(OPTIONS[number] for number in chosen)
            for passage in self._passages[name]:
                answers[passage.name] = [next(letters) for _ in passage.questions]
        return {"predictions.json": json.dumps(answers, ensure_ascii=False, indent=2) + "\n"}

    def _examples(
        self, role: Literal["train", "validation"], folders: list[Path], tokenizer: BertTokenizer, positions: int
    ) -> tuple[Examples, list[Passage]]:
        passages: list[Passage] = []
        for folder in folders:
            found = [passage for file in _files(folder) for passage in _read(file)]
            check_labels([passage.answers is not None for passage in found], folder, role)
            passages += found
        articles = tokenizer.encode_batch([clean_text(passage.article) for passage in passages])
        pairs: list[Pair] = []
        questions: list[Sequence[int]] = []
        for passage, article in zip(passages, articles, strict=True):
            texts = [
                clean_text(_fill(question, option))
                for question, options in zip(passage.questions, passage.options, strict=True)
                for option in options
            ]
            with_options = tokenizer.encode_batch(texts)
            questions += with_options
            pairs += [Pair(ids[:LONGEST_QUESTION], article) for ids in with_options]
        self.notes += long_questions_note(questions, LONGEST_QUESTION, ", ".join(map(str, folders)))
        self.notes += cut_note(pairs, positions, ", ".join(map(str, folders)))
        answers = [OPTIONS.index(letter) for passage in passages for letter in passage.answers or ()]
        labels = {"label": answers} if not passages or passages[0].answers is not None else {}
        return as_rows(pairs, len(OPTIONS), labels, tokenizer, positions), passages


def _fill(question: str, option: str) -> str:
    return question.replace("_", option) if "_" in question else f"{question} {option}"


# --- Folders and files ------------------------------------------------------------------------------------------------


def _levels(folder: Path) -> list[Path]:
    """`folder`, or the levels it is parted into."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; give one of RACE's, such as RACE/dev or RACE/dev/high")
    return [folder / level for level in LEVELS if (folder / level).is_dir()] or [folder]


def _files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.glob("*.txt") if file.is_file())
    if not files:
        raise UsageError(
            f"the folder {folder} holds no .txt file; give one of RACE's, such as RACE/dev or RACE/dev/high"
        )
    return files


def _read(file: Path) -> list[Passage]:
    return [_passage(json_object(text, source, EXPECTED), source) for source, text in lines(file)]


def _passage(values: dict[str, Any], source: str) -> Passage:
    """The passage that is a JSON object.

    Raises:
      UsageError: a key is missing, holds what it should not, or there are not as many options or answers as questions.
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
