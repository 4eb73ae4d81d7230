"""SQuAD 1.1 and 2.0: where in a paragraph of Wikipedia is the answer? (arXiv 1606.05250, 1806.03822)

    {"version": "1.1", "data": [{"title": "…", "paragraphs": [{"context": "…", "qas": [
        {"id": "…", "question": "…", "answers": [{"text": "…", "answer_start": 515}]}]}]}]}

A file is one JSON object, whose `answer_start` counts characters of the context; one without any `answers` gives
predictions only. In 2.0 a question may have no answer (`"answers": []`; `plausible_answers` is unused), which the model
has to detect: its label begins and ends at [CLS]. Predictions have the formats of Google's run_squad.py and of the
official scripts:

    predictions.json         id → answer; in 2.0 "" if none is more likely: its metrics are `exact_match` and `f1`
    null_odds.json           2.0: id → no-answer score minus that of the best answer
    best_answers.json        2.0: id → the best answer in any case; `evaluate-v2.0.py FILE best_answers.json
                             --na-prob-file null_odds.json` finds the thresholds of `best_exact` and `best_f1`
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np

from mjax.errors import UsageError
from mjax.tasks.interface import Metric, read_text
from mjax.tasks.labelled_task import LabelledTask, Outputs, Role, TokenPair, check_finite, parse_json_object

DOC_STRIDE = 128  # tokens between the starts of two windows
MAX_QUESTION_TOKENS = 64
Version = Literal["1.1", "2.0"]
QUESTION_FORMAT = '{"id": "…", "question": "…", "answers": [{"text": "…", "answer_start": 0}]}'
FILE_FORMAT = f'{{"data": [{{"paragraphs": [{{"context": "…", "qas": [{QUESTION_FORMAT}]}}]}}]}}'


class SquadQuestion(NamedTuple):
    """A question, its context, and the consecutive windows that are its rows.

    Attributes:
      truth: text and first character of each answer; empty if there is none; None if the file has no answers.
    """

    name: str
    text: str
    context: Context
    truth: list[tuple[str, int]] | None
    windows: Sequence[DocSpan] = ()

    @property
    def span(self) -> TokenSpan | None:
        """Tokens of the first answer; None if there is none, or if the context has other text there."""
        if not self.truth:
            return None
        text, begin = self.truth[0]
        if begin < 0 or self.context.text[begin : begin + len(text)] != text:
            return None
        return self.context.locate(begin, len(text))


class Squad(LabelledTask):
    """SQuAD, as described in the module."""

    head = "span"
    classes = 2
    label_names = ("start", "end")
    unique_name = "question"

    def __init__(self, version: Version, *arguments, stride: int = DOC_STRIDE):
        """Read the files; `version` selects the rules, `stride` is the number of tokens by which windows advance.

        Other arguments and errors as in `open_task`.
        """
        self.version, self.stride = version, stride
        self.metric = "f1" if version == "1.1" else "best_f1"
        super().__init__(*arguments)

    def read(self, file: Path) -> list[SquadQuestion]:
        """The questions of a file, each with its context."""
        questions: list[SquadQuestion] = []
        articles = parse_json_object(_File, read_text(file), str(file), FILE_FORMAT)["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        encoded = self.tokenizer.encode_with_offsets([paragraph["context"] for paragraph in paragraphs])
        for paragraph, ids_and_characters in zip(paragraphs, encoded, strict=True):
            context = Context(paragraph["context"], *ids_and_characters)
            questions += [_parse_question(values, file, context, self.version) for values in paragraph["qas"]]
            if paragraph["qas"] and not context.ids:
                raise UsageError(f"{file}, question {questions[-1].name} is about a context without text; leave it out")
        return questions

    def encode(self, file: Path, items: list[SquadQuestion], role: Role):
        """One row per window; in training, questions with a wrong answer position in the file are skipped."""
        questions = [q for q in items if role == "validation" or not q.truth or q.span is not None]
        if skipped_count := len(items) - len(questions):
            skipped = f"{skipped_count:,} of {len(items):,} questions were skipped"
            self.notes.append(f"{file}: {skipped}: the context does not contain their answer at its answer_start")
        encoded = self.tokenizer.encode_batch([question.text for question in questions])
        self.note_truncated(file, "questions", map(len, encoded), MAX_QUESTION_TOKENS)
        for question, ids in zip(questions, encoded, strict=True):
            ids, tokens, span = ids[:MAX_QUESTION_TOKENS], question.context.ids, question.span
            if (room := self.positions - len(ids) - 3) < 1:
                problem = f"has {len(ids)} tokens, and a row of {self.positions} has no room left for a context"
                use = f"use rows of {MAX_QUESTION_TOKENS + DOC_STRIDE} tokens or more"
                raise UsageError(f"{file}, question {question.name} {problem}; {use}")
            ranges = split_context(len(tokens), room, self.stride)
            deciding, offset = max_context_windows(ranges, len(tokens)), len(ids) + 2
            is_max = (deciding[window.start : window.stop] == number for number, window in enumerate(ranges))
            windows = [DocSpan(offset, window.start, array) for window, array in zip(ranges, is_max, strict=True)]
            rows = [TokenPair(ids, tokens[window.start : window.stop]) for window in ranges]
            yield question._replace(windows=windows), rows, [answer_position(span, window, offset) for window in ranges]

    def metrics(self, outputs: Outputs) -> list[Metric]:
        """The metrics of the version's official script, over all sets with answers."""
        questions = chain.from_iterable(self._items.values())
        truths = {q.name: [text for text, _ in q.truth] for q in questions if q.truth is not None}
        if not truths:
            return []
        answers = self._answers(outputs)
        best = {name: answers[name].text for name in truths}
        scores = score_answers(best, truths, self.version)
        if self.version == "1.1":
            return metrics_v1(scores)
        return metrics_v2(best, {name: answers[name].null_odds for name in truths}, scores)

    def predictions(self, outputs: Outputs) -> dict[str, str]:
        """The prediction files of the module docstring; with several sets their names begin with the name of the
        set."""
        files = {}
        for name, logits in outputs.items():
            answers = self._answers({name: logits})
            best = {question: answer.text for question, answer in answers.items()}
            contents: dict[str, dict[str, Any]] = {"predictions": best}
            if self.version == "2.0":
                null_odds = {question: answer.null_odds for question, answer in answers.items()}
                predicted = {question: "" if null_odds[question] > 0 else text for question, text in best.items()}
                contents = {"predictions": predicted, "null_odds": null_odds, "best_answers": best}
            before = f"{name}_" if len(self._items) > 1 else ""
            for file, values in contents.items():
                files[f"{before}{file}.json"] = json.dumps(values, ensure_ascii=False, indent=2) + "\n"
        return files

    def _answers(self, outputs: Outputs) -> dict[str, Answer]:
        """The answers to all questions of these sets, by name."""
        answers = {}
        for name, logits in check_finite(outputs).items():
            rows = iter(logits)
            for question in self._items[name]:
                question_logits = np.stack([next(rows) for _ in question.windows])
                answers[question.name] = best_answer(question.context, question.windows, question_logits)
        return answers


# --- The file ---------------------------------------------------------------------------------------------------------


class _Answer(TypedDict):
    text: str
    answer_start: int


class _TestQuestion(TypedDict):
    id: str
    question: str


class _LabelledQuestion(_TestQuestion, total=False):
    answers: list[_Answer] | None


class _Paragraph(TypedDict):
    context: str
    qas: list[_LabelledQuestion]


class _Article(TypedDict):
    paragraphs: list[_Paragraph]


class _File(TypedDict):
    data: list[_Article]


def _parse_question(values: _LabelledQuestion, file: Path, context: Context, version: Version) -> SquadQuestion:
    answers, name = values.get("answers"), values["id"]
    if answers == [] and version == "1.1":
        problem = f"{file}, question {name} has no answer, which SQuAD 1.1 does not allow"
        raise UsageError(f"{problem}; use the task squad2.0 for this file")
    truth = None if answers is None else [(answer["text"], answer["answer_start"]) for answer in answers]
    return SquadQuestion(name, values["question"], context, truth)


# --- The answer to a question from the logits of its windows, as in Google's run_squad.py -----------------------------
# A span's score is the logit of its first token as a start plus that of its last as an end. All spans of a window's
# context count that have at most 30 tokens and begin where the window decides. (Google's code considers only the 20
# tokens of a row with the highest logits, including those of the question, which may leave no span at all.) In SQuAD
# 2.0 "no answer" is another candidate, with [CLS] as start and end; its score is the lowest of the windows.


MAX_ANSWER_TOKENS = 30


class Answer(NamedTuple):
    """An answer to a question.

    Attributes:
      text: the most likely span.
      null_odds: the score of "no answer" minus the span's score; above 0 the prediction is "no answer".
    """

    text: str
    null_odds: float


def best_answer(
    context: Context, windows: Sequence[DocSpan], logits: np.ndarray, max_tokens: int = MAX_ANSWER_TOKENS
) -> Answer:
    """The most likely span, the first of equals.

    Args:
      windows: of one question.
      logits: float32 [windows, 2, s], of starts and of ends.
    """
    text, highest, logits = "", -np.inf, logits.astype(np.float64)
    for window, (start, end) in zip(windows, logits, strict=True):
        count = len(window.is_max_context)
        inside = slice(window.offset, window.offset + count)
        start, end = np.where(window.is_max_context, start[inside], -np.inf), end[inside]
        last = np.arange(count)[:, None] + np.arange(max_tokens)  # [first token, tokens after it]
        score = np.where(last < count, start[:, None] + end[last.clip(max=count - 1)], -np.inf)
        first, after = map(int, np.unravel_index(score.argmax(), score.shape))
        if score[first, after] > highest:
            text = context.extract_text(TokenSpan(window.first + first, window.first + first + after))
            highest = score[first, after]
    return Answer(text, float(logits[:, :, 0].sum(1).min() - highest))


# --- SQuAD's rows: [CLS] question [SEP] window of the context [SEP] ---------------------------------------------------
# A context that is longer than a row is read in overlapping windows, each beginning 128 tokens after the previous one.
# A token may then be in several windows, in the middle of one and at the end of another; an answer counts only from the
# window with the most context on both sides of its first token (`is_max_context`), so each answer comes once (Google's
# run_squad.py).
#
# The tokenizer gives the character range of each token. So an answer is mapped to tokens by its characters, and a
# predicted one is cut out of the original text. Google's code has no character ranges and reconstructs the text from
# word pieces; where that fails, it returns whole words, including attached punctuation.


class TokenSpan(NamedTuple):
    """Tokens of a context from `first` to `last`, both of them included."""

    first: int
    last: int


class Context:
    """A text, its tokens, and the characters of each.

    Attributes:
      ids: token ids.
      begin, end: int [tokens]; token i is text[begin[i] : end[i]].
    """

    def __init__(self, text: str, ids: Sequence[int], characters: Sequence[tuple[int, int]]):
        self.text, self.ids = text, ids
        self.begin, self.end = np.array(characters, np.int64).reshape(-1, 2).T

    def locate(self, begin: int, length: int) -> TokenSpan | None:
        """First and last token with any of `length` characters from `begin` on; None if there is none."""
        first = int(np.searchsorted(self.end, begin, side="right"))
        last = int(np.searchsorted(self.begin, begin + length, side="left")) - 1
        return TokenSpan(first, last) if first <= last else None

    def extract_text(self, span: TokenSpan) -> str:
        """The original text of these tokens."""
        begin, end = int(self.begin[span.first]), int(self.end[span.last])
        while end < len(self.text) and unicodedata.combining(self.text[end]):
            end += 1  # a combining accent belongs to its letter, and tokens without accents omit it
        return self.text[begin:end]


class DocSpan(NamedTuple):
    """Tokens of a context that are in one row.

    Attributes:
      offset: position in the row of the window's first token.
      first: that token's index in the context.
      is_max_context: bool [tokens of the window], True if an answer that begins there counts.
    """

    offset: int
    first: int
    is_max_context: np.ndarray


def split_context(tokens: int, max_tokens: int, stride: int) -> list[range]:
    """Ranges of at most `max_tokens` of a context's `tokens`, each `stride` after the previous one, up to the end."""
    step = min(max_tokens, stride)
    windows = [range(min(max_tokens, tokens))]
    while windows[-1].stop < tokens:
        start = windows[-1].start + step
        windows.append(range(start, min(start + max_tokens, tokens)))
    return windows


def max_context_windows(windows: Sequence[range], tokens: int) -> np.ndarray:
    """int [tokens]: the window with the most context for each token: the largest minimum of tokens before and after it.

    As in Google's run_squad.py a hundredth of the window's length is added. In a tie the first window wins.
    """
    deciding, best = np.zeros(tokens, np.int64), np.full(tokens, -1.0)
    for number, window in enumerate(windows):
        inside, index = slice(window.start, window.stop), np.arange(len(window))
        shown = np.minimum(index, index[::-1]) + 0.01 * len(window)
        better = shown > best[inside]
        deciding[inside][better], best[inside][better] = number, shown[better]
    return deciding


def answer_position(span: TokenSpan | None, window: range, offset: int) -> tuple[int, int]:
    """Positions in the row of an answer's first and last token; both 0, [CLS], if it is not entirely in the window."""
    if span is None or span.first < window.start or span.last >= window.stop:
        return 0, 0
    return span.first - window.start + offset, span.last - window.start + offset


# --- SQuAD's official metrics: exact match and F1 of an answer (1606.05250, section 6.1; 1806.03822, section 6) -------
# Answers are compared after `normalize_answer`, which leaves words only. With several true answers the best one counts.
#
#     exact match   the same words
#     F1            2 P R / (P + R), over words including repetitions: P is the share of predicted words that are true,
#                   R the share of true words that are predicted
#
# In SQuAD 2.0 a question may have no answer; then "" is right and everything else is wrong, by both measures. There a
# system also gives a no-answer score, and the metrics at the best threshold for it are computed too.


ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only; other punctuation stays


def normalize_answer(answer: str) -> str:
    """Lower case, without punctuation, then without articles, words separated by single spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, truth: str) -> bool:
    """True if two answers consist of the same words."""
    return normalize_answer(answer) == normalize_answer(truth)


def f1(answer: str, truth: str, empty_agree: bool) -> float:
    """F1 of the words of two answers, 0 to 1.

    Two answers without words agree by the rules of SQuAD 2.0 (`empty_agree`), but not by the 1.1 rules.
    """
    words, true = normalize_answer(answer).split(), normalize_answer(truth).split()
    if not words or not true:
        return float(empty_agree and words == true)
    common = (Counter(words) & Counter(true)).total()
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(true)
    return 2 * precision * recall / (precision + recall)


class QuestionScore(NamedTuple):
    """A question and the agreement of its answer: exact match and F1, 0 to 1."""

    question: str
    exact: float
    f1: float
    answerable: bool


def score_answers(answers: Mapping[str, str], truths: Mapping[str, Sequence[str]], version: str) -> list[QuestionScore]:
    """Compare the answers to questions with the true ones, by the rules of SQuAD "1.1" or "2.0".

    Args:
      answers: by question; "" for no answer.
      truths: by question; empty for a question without an answer.
    """
    v2, scores = version == "2.0", []
    for question, true in truths.items():
        # By 2.0's rules an answer without words does not count, and a question without others has no answer.
        texts = [text for text in true if normalize_answer(text)] or [""] if v2 else true
        answer = answers[question]
        best = (max(exact_match(answer, text) for text in texts), max(f1(answer, text, v2) for text in texts))
        scores.append(QuestionScore(question, float(best[0]), best[1], bool(true)))
    return scores


# --- Metrics ----------------------------------------------------------------------------------------------------------


def metrics_v1(scores: Sequence[QuestionScore]) -> list[Metric]:
    """The metrics of SQuAD 1.1's official script, in percent."""
    return _mean_metrics(scores, "exact_match", "f1", "total", "questions")


def metrics_v2(answers: Mapping[str, str], null_odds: Mapping[str, float], scores: Sequence[QuestionScore]):
    """The metrics of SQuAD 2.0's official script, in percent, as `Metric`s.

    Args:
      answers: the best answer to each question, in any case.
      null_odds: the no-answer score minus the score of the best answer; above 0 the prediction is "no answer".
      scores: of `answers`.
    """
    predicted = []
    for score in scores:
        right = float(not score.answerable)
        predicted.append(score if null_odds[score.question] <= 0 else score._replace(exact=right, f1=right))
    metrics = _mean_metrics(predicted, "exact", "f1", "total", "questions")
    for name, answerable in (("HasAns", True), ("NoAns", False)):
        if subset := [score for score in predicted if score.answerable == answerable]:
            metrics += _mean_metrics(subset, f"{name}_exact", f"{name}_f1", f"{name}_total")
    for name in ("exact", "f1"):
        best, threshold = best_threshold(answers, null_odds, scores, [getattr(score, name) for score in scores])
        metrics += [
            _percent(f"best_{name}", best, len(scores), "at the best threshold of this set"),
            Metric(f"best_{name}_thresh", threshold, f"{threshold:.4f}", "above it the prediction is no answer"),
        ]
    return metrics


def best_threshold(
    answers: Mapping[str, str], null_odds: Mapping[str, float], scores: Sequence[QuestionScore], values: Sequence[float]
) -> tuple[float, float]:
    """The highest sum of `values`, one for each of `scores`, over all thresholds for `null_odds`, and that threshold.

    Below the lowest threshold no question is answered, and those without an answer are right. Then they are answered
    one by one. With equal odds the official script counts only the first, as if a threshold could separate them.
    """
    total = sum(not score.answerable for score in scores)
    best, threshold = float(total), 0.0
    for score, value in sorted(zip(scores, values, strict=True), key=lambda pair: null_odds[pair[0].question]):
        if score.answerable:
            total += value
        elif answers[score.question]:
            total -= 1
        if total > best:
            best, threshold = total, null_odds[score.question]
    return best, threshold


def _mean_metrics(scores: Sequence[QuestionScore], exact: str, f1: str, total: str, note: str = "") -> list[Metric]:
    """Both measures over `scores`, and their number, by name."""
    exact_mean = _percent(exact, sum(score.exact for score in scores), len(scores))
    f1_mean = _percent(f1, sum(score.f1 for score in scores), len(scores))
    return [exact_mean, f1_mean, Metric.count(total, len(scores), note)]


def _percent(name: str, total: float, count: int, note: str = "") -> Metric:
    mean = 100 * total / count
    return Metric(name, mean, f"{mean:.2f}%", note)
