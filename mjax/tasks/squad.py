"""SQuAD 1.1 and 2.0: where in a paragraph of Wikipedia is the answer? (arXiv 1606.05250, 1806.03822)

In 2.0 a question may have no answer, which a model has to notice; to it that is an answer that begins and ends at
[CLS]. Predictions, in the formats of Google's run_squad.py and of the official scripts:

    predictions.json         id → answer; in 2.0 "" where none is more likely: its figures are `exact` and `f1`
    nbest_predictions.json   id → the 20 most likely, with their probabilities and logits
    null_odds.json           2.0: id → score of there being no answer, less that of the best one
    best_answers.json        2.0: id → the best one even so; `evaluate-v2.0.py FILE best_answers.json --na-prob-file
                             null_odds.json` finds the thresholds of `best_exact` and `best_f1`
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
from mjax.tasks import squad_scores
from mjax.tasks.interface import Figure
from mjax.tasks.rows import Examples, Pair, as_rows, bert_tokenizer, long_questions_note
from mjax.tasks.squad_answers import Answers, best_answers, no_answer
from mjax.tasks.squad_files import Question, Version, read
from mjax.tasks.squad_windows import (
    LONGEST_QUESTION,
    STRIDE,
    Context,
    Span,
    Window,
    answer_position,
    cut_into_windows,
    deciding_windows,
)
from mjax.tasks.task_files import by_stem, check_labels, finite


class Asked(NamedTuple):
    """A question, what it is about, and the windows that are its rows, one after another."""

    question: Question
    context: Context
    windows: list[Window]


class Squad:
    """The task on files; see the module and `LabelledTask`."""

    head: Literal["span"] = "span"
    classes = 2
    choices = 1

    def __init__(
        self,
        version: Version,
        train: Sequence[str],
        validation: Sequence[str],
        tokenizer: Tokenizer,
        positions: int,
        stride: int = STRIDE,
    ):
        """Read the files; `version` says by whose rules, `stride` by how many tokens a window moves on.

        Other arguments and errors as of `open_task`.
        """
        self.version = version
        self.metric = "f1" if version == "1.1" else "best_f1"
        self.notes: list[str] = []
        rows_of = bert_tokenizer(tokenizer), positions, stride
        self.train, _ = self._examples("train", [Path(file) for file in train], *rows_of)
        self.validation: dict[str, Examples] = {}
        self._asked: dict[str, list[Asked]] = {}
        for name, file in by_stem([Path(file) for file in validation]).items():
            self.validation[name], self._asked[name] = self._examples("validation", [file], *rows_of)
        names = [asked.question.name for of_set in self._asked.values() for asked in of_set]
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            raise UsageError(f"the question {twice[0]} is twice in {', '.join(validation)}; leave one out")

    def figures(self, outputs: dict[str, np.ndarray]) -> list[Figure]:
        """What the official script of the version prints, over all sets that have answers."""
        found = self._answers(outputs)
        truths = {
            question.name: [text for text, _ in question.answers]
            for of_set in self._asked.values()
            for question, _, _ in of_set
            if question.answers is not None
        }
        if not truths:
            return []
        best = {name: found[name].best[0].text for name in truths}
        scored = squad_scores.score(best, truths, self.version)
        if self.version == "1.1":
            return squad_scores.figures_1(scored)
        return squad_scores.figures_2(best, {name: found[name].null_odds for name in truths}, scored)

    def predictions(self, outputs: dict[str, np.ndarray]) -> dict[str, str]:
        """The files that the module tells of; those of several sets begin with the name of the set."""
        files = {}
        for name, logits in outputs.items():
            found = self._answers({name: logits})
            best = {question: answers.best[0].text for question, answers in found.items()}
            contents: dict[str, dict[str, Any]] = {"predictions": best}
            if self.version == "2.0":
                null_odds = {question: answers.null_odds for question, answers in found.items()}
                given = {question: "" if null_odds[question] > 0 else text for question, text in best.items()}
                contents = {"predictions": given, "null_odds": null_odds, "best_answers": best}
            contents["nbest_predictions"] = {question: answers.listed() for question, answers in found.items()}
            before = f"{name}_" if len(self._asked) > 1 else ""
            for file, values in contents.items():
                files[f"{before}{file}.json"] = json.dumps(values, ensure_ascii=False, indent=2) + "\n"
        return files

    def _answers(self, outputs: dict[str, np.ndarray]) -> dict[str, Answers]:
        """The possible answers of all questions of these sets, by their names."""
        found = {}
        for name, logits in finite(outputs).items():
            row = 0
            for question, context, windows in self._asked[name]:
                of_question = logits[row : row + len(windows)]
                none = no_answer(of_question) if self.version == "2.0" else None
                found[question.name] = Answers(best_answers(context, windows, of_question), none)
                row += len(windows)
        return found

    def _examples(
        self,
        role: Literal["train", "validation"],
        files: list[Path],
        tokenizer: BertTokenizer,
        positions: int,
        stride: int,
    ) -> tuple[Examples, list[Asked]]:
        pairs: list[Pair] = []
        asked: list[Asked] = []
        labels: dict[str, list[int]] = {"start": [], "end": []}
        for file in files:
            contexts, questions = self._read(role, file, tokenizer)
            asked_ids = tokenizer.encode_batch([question.text for question in questions])
            self.notes += long_questions_note(asked_ids, LONGEST_QUESTION, str(file))
            for question, ids in zip(questions, asked_ids, strict=True):
                ids, context = ids[:LONGEST_QUESTION], contexts[question.context]
                if (room := positions - len(ids) - 3) < 1:
                    raise UsageError(
                        f"{file}, question {question.name} has {len(ids)} tokens, and a row of {positions} has no room "
                        f"for a context then; read rows of {LONGEST_QUESTION + STRIDE} tokens or more"
                    )
                ranges = cut_into_windows(len(context.ids), room, stride)
                deciding, offset = deciding_windows(ranges, len(context.ids)), len(ids) + 2
                windows = []
                for number, window in enumerate(ranges):
                    inside = slice(window.start, window.stop)
                    windows.append(Window(offset, window.start, deciding[inside] == number))
                    pairs.append(Pair(ids, context.ids[inside]))
                    if question.answers is not None:
                        start, end = answer_position(_span(question, context), window, offset)
                        labels["start"].append(start)
                        labels["end"].append(end)
                asked.append(Asked(question, context, windows))
        if asked and asked[0].question.answers is None:
            labels = {}
        return as_rows(pairs, 1, labels, tokenizer, positions), asked

    def _read(
        self, role: Literal["train", "validation"], file: Path, tokenizer: BertTokenizer
    ) -> tuple[list[Context], list[Question]]:
        """Contexts and questions of a file; from training those are left out whose answer is not where it should be."""
        texts, questions = read(file, self.version)
        encoded = tokenizer.encode_with_characters(texts)
        contexts = [Context(text, *of_text) for text, of_text in zip(texts, encoded, strict=True)]
        for question in questions:
            if not contexts[question.context].ids:
                raise UsageError(f"{file}, question {question.name} is about a context without text; leave it out")
        check_labels([question.answers is not None for question in questions], file, role)
        if role == "validation":
            return contexts, questions
        found = [q for q in questions if not q.answers or _span(q, contexts[q.context]) is not None]
        if lost := len(questions) - len(found):
            self.notes.append(
                f"{file}: {lost:,} of {len(questions):,} questions are left out: the context does not hold their "
                "answer at its answer_start"
            )
        return contexts, found


def _span(question: Question, context: Context) -> Span | None:
    """Tokens of the first answer; None where there is none, or where the context holds other text at that place."""
    if not question.answers:
        return None
    text, begin = question.answers[0]
    if begin < 0 or context.text[begin : begin + len(text)] != text:
        return None
    return context.locate(begin, len(text))
