"""WikiText103: perplexity on Wikipedia articles, per original word (arXiv 1909.08053, section 5.3 and appendix E.1).

The file is the published wiki.test.tokens. It was tokenized for word-level models: "the 1990s , said @-@ so". Subword
models never saw such text, so it is detokenized first (`detokenize`). Then their perplexity is per subword, and
subwords differ between tokenizers. To compare models, the loss of the whole text is divided by the number of words in
the file before detokenizing, T_o, rather than by its subwords, T:

    raw                  exp(loss)
    adjusted, the code's exp(loss · (T − 1) / (T_o − 1))     Megatron-LM v1.0, tasks/zeroshot_gpt2/evaluate.py
    adjusted, the paper's exp(loss · T / T_o)

with loss the mean over the T − 1 labels. The two differ in the fifth digit on the real file, where GPT-2's tokens give
(T − 1) / (T_o − 1) = 270329 / 245565 = 1.1008449901248143. The papers' tables have the adjusted one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.tasks.interface import Metric, Score, perplexity
from mjax.tasks.windows import check_overlap, overlapping_windows

OVERLAP = 32

# v1.0's list, in its order (tasks/zeroshot_gpt2/detokenizer.py). Published results depend on every line of it,
# including those with little effect: "s '" joins an apostrophe only to a word in s, and the second line matches no real
# text.
REPLACEMENTS: tuple[tuple[str, str | None], ...] = (
    # Contractions
    (re.escape("s '"), "s'"),
    ("/' [0-9]/", "/'[0-9]/"),
    # Separators within words and numbers
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (re.escape(" @.@ "), "."),
    # Punctuation
    (" : ", ": "),
    (" ; ", "; "),
    (re.escape(" . "), ". "),
    (" ! ", "! "),
    (re.escape(" ? "), "? "),
    (" , ", ", "),
    # No space inside brackets and quotes: its r"\(\s*([^\)]*?)\s*\)" takes hours if many are never closed
    ("()", None),
    ("[]", None),
    ("{}", None),
    ('""', None),
    ("''", None),
    # Headings, degrees, line ends
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Detokenized WikiText."""
    for pattern, replacement in REPLACEMENTS:
        text = _stripped_inside(text, *pattern) if replacement is None else re.sub(pattern, replacement, text)
    return text


def _stripped_inside(text: str, left: str, right: str) -> str:
    """`text` without white space after a `left` and before the next `right`; a `left` in between is ordinary text."""
    parts, done = [], 0
    while (begin := text.find(left, done)) >= 0 and (end := text.find(right, begin + 1)) >= 0:
        parts += [text[done : begin + 1], text[begin + 1 : end].strip(), right]
        done = end + 1
    return "".join([*parts, text[done:]])


def count_words(text: str) -> int:
    """T_o: words of the original file, separated by single spaces, as counted in v1.0."""
    return len(text.strip().split(" "))


def token_ratio(tokens: int, words: int) -> float:
    """(T − 1) / (T_o − 1), by which v1.0 multiplies the loss."""
    return (tokens - 1) / (words - 1)


class WikiText103:
    """The task on one file.

    Attributes:
      passes: the overlapping windows of the whole text.
      tokens, words: T and T_o.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, positions: int, overlap: int | None = None):
        """Read the file, detokenize it and split it into windows.

        Args:
          data: wiki.test.tokens, or text in that format.
          positions: s of the model.
          overlap: labels counted in each window after the first; by default 32.

        Raises:
          UsageError: the file is missing, is not UTF-8, or has fewer than two words; the overlap does not fit.
        """
        self.overlap = check_overlap(OVERLAP if overlap is None else overlap, positions)
        original = _read(Path(data))
        tokens = np.array(tokenizer.prompt(detokenize(original)), np.int32)
        self.tokens, self.words = len(tokens), count_words(original)
        if self.words < 2 or self.tokens < 2:
            raise UsageError(f"{data} has fewer than two words; give WikiText103's wiki.test.tokens, or text like it")
        self.passes = [overlapping_windows(tokens, positions, self.overlap)]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """Raw and adjusted perplexity, and the numbers they are computed from."""
        (score,) = scores
        ratio, paper = token_ratio(self.tokens, self.words), perplexity(score.mean * self.tokens / self.words)
        return [
            Metric.number("adjusted_perplexity", perplexity(score.mean * ratio), "per original word: compare this one"),
            Metric.number("adjusted_perplexity_paper", paper, "the same by the paper's T / T_o"),
            Metric.number("perplexity", perplexity(score.mean), "raw: per token of this tokenizer"),
            Metric.number("loss", score.mean, "nats per token"),
            Metric("token_ratio", ratio, f"{ratio:.6f}", "(T - 1) / (T_o - 1), of the first line"),
            Metric.count("tokens", self.tokens, "T, of the detokenized text"),
            Metric.count("words", self.words, "T_o, in the original file"),
            Metric.count("windows", score.windows, f"the later ones count {self.overlap} labels each"),
        ]


def _read(file: Path) -> str:
    if not file.is_file():
        raise UsageError(f"there is no file {file}; give WikiText103's wiki.test.tokens, or text like it")
    try:
        return file.read_bytes().decode("utf-8")  # not read_text: line ends are kept, as in v1.0
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte {error.start}); give wiki.test.tokens as published") from None
