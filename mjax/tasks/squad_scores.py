"""SQuAD's official metrics: exact match and F1 of an answer (arXiv 1606.05250, section 6.1; 1806.03822, section 6).

Answers are compared after `normalize`, which leaves words only. With several true answers the best match counts.

    exact match   the same words
    F1            2 P R / (P + R), over words including repetitions: P is the share of predicted words that are true,
                  R the share of true words that are predicted

In SQuAD 2.0 a question may have no answer; then "" is right and everything else is wrong, by both measures. There a
system also gives a no-answer score, and the metrics at the best threshold for it are computed too.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mjax.tasks.interface import Metric

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only; other punctuation stays


def normalize(answer: str) -> str:
    """`answer` in lower case without punctuation, then without articles, its words separated by single spaces."""
    return " ".join(ARTICLES.sub(" ", answer.lower().translate(PUNCTUATION)).split())


def exact(answer: str, truth: str) -> bool:
    """Return True if two answers consist of the same words."""
    return normalize(answer) == normalize(truth)


def f1(answer: str, truth: str, empty_agree: bool) -> float:
    """F1 of the words of two answers, 0 to 1.

    Two answers without words agree by the rules of SQuAD 2.0 (`empty_agree`), but not by those of 1.1.
    """
    words, true = normalize(answer).split(), normalize(truth).split()
    if not words or not true:
        return float(empty_agree and words == true)
    common = (Counter(words) & Counter(true)).total()
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(true)
    return 2 * precision * recall / (precision + recall)


class Scored(NamedTuple):
    """A question and the agreement of its answer: exact match and F1, 0 to 1."""

    question: str
    exact: float
    f1: float
    answerable: bool


def score(answers: Mapping[str, str], truths: Mapping[str, Sequence[str]], version: str) -> list[Scored]:
    """Compare the answers to questions with the true ones, by the rules of SQuAD "1.1" or "2.0".

    Args:
      answers: by question; "" for no answer.
      truths: by question; empty for a question without an answer.
    """
    two, scored = version == "2.0", []
    for question, true in truths.items():
        # By 2.0's rules an answer without words does not count, and a question that has no other has no answer.
        of_words = [text for text in true if normalize(text)] or [""] if two else true
        answer = answers[question]
        best = (max(exact(answer, text) for text in of_words), max(f1(answer, text, two) for text in of_words))
        scored.append(Scored(question, float(best[0]), best[1], bool(true)))
    return scored


# --- Metrics ----------------------------------------------------------------------------------------------------------


def metrics_1(scored: Sequence[Scored]) -> list[Metric]:
    """The metrics of SQuAD 1.1's official script, in percent."""
    return _means(scored, "exact_match", "f1", "total", "questions")


def metrics_2(answers: Mapping[str, str], null_odds: Mapping[str, float], scored: Sequence[Scored]) -> list[Metric]:
    """The metrics of SQuAD 2.0's official script, in percent.

    Args:
      answers: the best answer to each question, in any case.
      null_odds: the no-answer score minus that of the best answer; above 0 the prediction is "no answer".
      scored: `answers` against the true ones.
    """
    given = []
    for one in scored:
        right = float(not one.answerable)
        given.append(one if null_odds[one.question] <= 0 else one._replace(exact=right, f1=right))
    metrics = _means(given, "exact", "f1", "total", "questions")
    for name, answerable in (("HasAns", True), ("NoAns", False)):
        if of_kind := [one for one in given if one.answerable == answerable]:
            metrics += _means(of_kind, f"{name}_exact", f"{name}_f1", f"{name}_total")
    for name in ("exact", "f1"):
        best, threshold = best_threshold(answers, null_odds, scored, [getattr(one, name) for one in scored])
        metrics += [
            _percent(f"best_{name}", best, len(scored), "at the best threshold of this set"),
            Metric(f"best_{name}_thresh", threshold, f"{threshold:.4f}", "above it the prediction is no answer"),
        ]
    return metrics


def best_threshold(
    answers: Mapping[str, str], null_odds: Mapping[str, float], scored: Sequence[Scored], values: Sequence[float]
) -> tuple[float, float]:
    """The highest sum of `values`, one for each of `scored`, over all thresholds for `null_odds`, and that threshold.

    Below the lowest no question is answered, and those without an answer are right. Then they are answered one by one.
    With equal odds the official script counts only the first, as if a threshold could separate them, and so does this.
    """
    total = sum(not one.answerable for one in scored)
    best, threshold = float(total), 0.0
    for one, value in sorted(zip(scored, values, strict=True), key=lambda pair: null_odds[pair[0].question]):
        if one.answerable:
            total += value
        elif answers[one.question]:
            total -= 1
        if total > best:
            best, threshold = total, null_odds[one.question]
    return best, threshold


def _means(scored: Sequence[Scored], exact: str, f1: str, total: str, what: str = "") -> list[Metric]:
    """Both measures over `scored`, and their number, by name."""
    count = len(scored)
    return [
        _percent(exact, sum(one.exact for one in scored), count),
        _percent(f1, sum(one.f1 for one in scored), count),
        Metric.count(total, count, what),
    ]


def _percent(name: str, total: float, count: int, remark: str = "") -> Metric:
    mean = 100 * total / count
    return Metric(name, mean, f"{mean:.2f}%", remark)
