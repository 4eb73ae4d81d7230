"""The answer to a question from the logits of its windows, as in Google's run_squad.py.

A span's score is the logit of its first token as a start plus that of its last as an end. All spans of a window's
context count that have at most 30 tokens and begin where the window decides. (Google's code considers only the 20
tokens of a row with the highest logits, including those of the question, which may leave no span at all.) In SQuAD 2.0
"no answer" is another candidate, with [CLS] as start and end; its score is the lowest of the windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mjax.tasks.squad_windows import Context, Span, Window

BEST = 20  # answers to keep
LONGEST_ANSWER = 30  # tokens


class Answer(NamedTuple):
    """A possible answer and its logits; `text` is "" for "no answer"."""

    text: str
    start: float
    end: float

    @property
    def score(self) -> float:
        """Sum of the logits."""
        return self.start + self.end


def best_answers(
    context: Context, windows: Sequence[Window], logits: np.ndarray, best: int = BEST, longest: int = LONGEST_ANSWER
) -> list[Answer]:
    """The `best` answers with different texts, the most likely first; at least one.

    Args:
      windows: those of one question.
      logits: float32 [windows, 2, s], of starts and of ends.
    """
    found = []  # for each window: first tokens, last tokens, their logits as start and as end
    for window, (start, end) in zip(windows, logits.astype(np.float64), strict=True):
        count = len(window.deciding)
        inside = slice(window.offset, window.offset + count)
        start, end = np.where(window.deciding, start[inside], -np.inf), end[inside]
        last = np.arange(count)[:, None] + np.arange(longest)  # [first token, tokens after it]
        score = np.where(last < count, start[:, None] + end[last.clip(max=count - 1)], -np.inf).ravel()
        # Few spans have the same text: ten times as many as are kept nearly always contain enough different ones.
        highest = np.argpartition(-score, 10 * best)[: 10 * best] if score.size > 10 * best else np.arange(score.size)
        first, after = np.divmod(np.sort(highest[score[highest] > -np.inf]), longest)
        found.append(np.stack([window.first + first, window.first + first + after, start[first], end[first + after]]))
    spans = np.concatenate(found, axis=1)  # [4, spans]

    answers: dict[str, Answer] = {}
    for first, last, start, end in spans.T[np.argsort(-(spans[2] + spans[3]), kind="stable")].tolist():
        text = context.cut(Span(int(first), int(last)))
        answers.setdefault(text, Answer(text, start, end))
        if len(answers) == best:
            break
    return list(answers.values())


def no_answer(logits: np.ndarray) -> Answer:
    """The score of "no answer", the lowest of the windows; `logits` as in `best_answers`."""
    start, end = min(logits[:, :, 0].astype(np.float64).tolist(), key=sum)
    return Answer("", start, end)


class Answers(NamedTuple):
    """The possible answers to a question.

    Attributes:
      best: answers, the most likely first.
      none: "no answer"; None in SQuAD 1.1.
    """

    best: list[Answer]
    none: Answer | None

    @property
    def null_odds(self) -> float:
        """The no-answer score minus that of the best answer; above 0 the prediction is "no answer"."""
        return self.none.score - self.best[0].score

    def listed(self) -> list[dict[str, str | float]]:
        """The entries of nbest_predictions.json; the probabilities are those among the listed answers."""
        ranked = sorted([*self.best, *([self.none] if self.none else [])], key=lambda answer: -answer.score)
        listed = ranked[:BEST]
        if self.none and self.none not in listed:
            listed.append(self.none)
        powers = np.exp(np.array([answer.score for answer in listed]) - listed[0].score)
        return [
            {"text": answer.text, "probability": share, "start_logit": answer.start, "end_logit": answer.end}
            for answer, share in zip(listed, (powers / powers.sum()).tolist(), strict=True)
        ]
