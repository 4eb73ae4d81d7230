"""SQuAD's files: one JSON object, whose `answer_start` counts characters of the context.

    {"version": "1.1", "data": [{"title": "…", "paragraphs": [{"context": "…", "qas": [
        {"id": "…", "question": "…", "answers": [{"text": "…", "answer_start": 515}]}]}]}]}

A question of SQuAD 2.0 may have `"answers": []`; what it then says in `plausible_answers` is no answer. A file without
`answers` at all has predictions only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from mjax.errors import UsageError
from mjax.tasks.task_files import json_object, must_exist

Version = Literal["1.1", "2.0"]
EXPECTED = '{"data": [{"paragraphs": [{"context": "…", "qas": […]}]}]}'
EXPECTED_QUESTION = '{"id": "…", "question": "…", "answers": [{"text": "…", "answer_start": 0}]}'


class Question(NamedTuple):
    """A question of a file.

    Attributes:
      context: number of the paragraph it is about.
      answers: text and first character of each; none where there is none; None where the file does not say.
    """

    name: str
    text: str
    context: int
    answers: list[tuple[str, int]] | None


def read(file: Path, version: Version) -> tuple[list[str], list[Question]]:
    """The contexts of a file, and its questions.

    Raises:
      UsageError: the file is missing or no JSON, or something in it is not where the format has it; a question of 1.1
        has no answer.
    """
    try:
        text = must_exist(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte {error.start}); give the published file") from None
    contexts: list[str] = []
    questions: list[Question] = []
    for place, paragraph in _paragraphs(json_object(text, str(file), EXPECTED), file):
        context, asked = paragraph.get("context"), paragraph.get("qas")
        if not isinstance(context, str) or not isinstance(asked, list):
            raise UsageError(f"{file}, {place} lacks 'context' or 'qas'; {EXPECTED} is expected")
        for number, values in enumerate(asked):
            questions.append(_question(values, f"{file}, {place}.qas[{number}]", len(contexts), version))
        contexts.append(context)
    return contexts, questions


def _paragraphs(values: dict[str, Any], file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Where each paragraph is in the file, and what it holds."""
    found = []
    articles = values.get("data")
    if not isinstance(articles, list):
        raise UsageError(f"{file} has no list 'data'; {EXPECTED} is expected")
    for i, article in enumerate(articles):
        paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
        if not isinstance(paragraphs, list):
            raise UsageError(f"{file}, data[{i}] has no list 'paragraphs'; {EXPECTED} is expected")
        for j, paragraph in enumerate(paragraphs):
            place = f"data[{i}].paragraphs[{j}]"
            if not isinstance(paragraph, dict):
                raise UsageError(f"{file}, {place} is not an object; {EXPECTED} is expected")
            found.append((place, paragraph))
    return found


def _question(values: Any, source: str, context: int, version: Version) -> Question:
    name, text = (values.get(key) if isinstance(values, dict) else None for key in ("id", "question"))
    if not isinstance(name, str) or not isinstance(text, str):
        raise UsageError(f"{source} lacks 'id' or 'question'; {EXPECTED_QUESTION} is expected")
    answers = values.get("answers")
    if answers is None:
        return Question(name, text, context, None)
    found = []
    for answer in answers if isinstance(answers, list) else [answers]:
        of_answer = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(of_answer[0], str) or type(of_answer[1]) is not int:
            raise UsageError(
                f"{source} has an answer without 'text' or 'answer_start'; {EXPECTED_QUESTION} is expected"
            )
        found.append(of_answer)
    if not found and version == "1.1":
        raise UsageError(f"{source} has no answer, which SQuAD 1.1 does not know; use the task squad2.0 for this file")
    return Question(name, text, context, found)
