"""RACE: questions on a passage, from English exams for middle and high school in China (arXiv 1704.04683).

The dataset is a folder of folders, {train,dev,test}/{middle,high}, with a JSON object in each .txt file:

    {"id": "high1.txt", "article": "…", "questions": ["The author is _ ."], "options": [["a", "b", "c", "d"]],
     "answers": ["C"]}

Each question has four options, and each option is a separate row: the question with the option in place of every "_",
  or
appended if there is none; then the article. As in Megatron-LM v1.0 (tasks/race/data.py) question and option come first
and have at most 128 tokens, so that a row that is too long loses the end of the article.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mjax.errors import UsageError
from mjax.tasks.labelled_task import LabelledTask, Outputs, Role
from mjax.tasks.rows import Pair, clean_text
from mjax.tasks.task_files import json_object, lines

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
