"""LAMBADA: the last word of a passage, which people guess only after reading all of it (arXiv 1606.06031).

The file has one passage per line, `{"text": "…"}`. The model reads the passage, and the last word counts as predicted
if each of its subwords is the most likely one given the true tokens before it (teacher forcing). There are two ways of
splitting off the last word (Megatron-LM v1.0, tasks/zeroshot_gpt2/datasets.py):

    strict      the text after the last white space, encoded with a leading space, all its subwords: the papers' metric
    last token  the last token of the whole passage encoded at once, whether a word or the end of one; easier

Source: arXiv 1909.08053, section 5.3 and appendix E.2. The text is used raw, as there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mjax.data.corpus import Document
from mjax.data.tokenizers import Tokenizer
from mjax.errors import UsageError
from mjax.tasks.interface import Metric, Score, Window, perplexity, read_documents


class Lambada:
    """The task on one file.

    Attributes:
      passes: the passages split for the strict metric, then those for the last token.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, positions: int, overlap: int | None = None):
        """Read the passages.

        Args:
          data: a .jsonl file.
          positions: s of the model.
          overlap: not used here.

        Raises:
          UsageError: the file is missing, is not a .jsonl, is empty, or has a line that is malformed, shorter than two
            words or too long for the model; an overlap is given.
        """
        if overlap is not None:
            raise UsageError("--overlap is for long texts, and lambada's fit the model; leave it out")
        documents = read_documents(data)
        if not documents:
            raise UsageError(f'{data} has no passage; give a file of lines {{"text": "…"}}')
        self.passes: list[Sequence[Window]] = [
            [_window(document, cut(tokenizer, document), positions) for document in documents]
            for cut in (_last_word, _last_token)
        ]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """Both accuracies, and the likelihood of the last words."""
        strict, last = scores
        return [
            Metric.share("accuracy", strict.right, strict.windows, "strict: the whole last word is right"),
            Metric.count("correct", strict.right, f"of {strict.windows:,} passages"),
            Metric.share("last_token_accuracy", last.right, last.windows, "the last token alone is right"),
            Metric.count("last_token_correct", last.right, f"of {last.windows:,} passages"),
            Metric.number("perplexity", perplexity(strict.mean), "per subword of the last words"),
            Metric.number("word_perplexity", perplexity(strict.mean * strict.labels / strict.windows), "per last word"),
            Metric.count("passages", strict.windows),
        ]


def _last_word(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Tokens of the passage without its last word, and of that word with a leading space."""
    words = document.text.split()
    if document.fields is None or len(words) < 2:
        what = "has fewer than two words" if document.fields is not None else "is not a .jsonl file"
        raise UsageError(
            f'{document.source} {what}; lambada needs one passage per line, {{"text": "The cat sat down"}}'
        )
    before = document.text[: document.text.rfind(words[-1])].strip()
    return tokenizer.prompt(before), tokenizer.encode(" " + words[-1])


def _last_token(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Tokens of the whole passage, the last one separately."""
    tokens = tokenizer.prompt(document.text)
    return tokens[:-1], tokens[-1:]


def _window(document: Document, cut: tuple[list[int], list[int]], positions: int) -> Window:
    context, labels = cut
    if len(context) + len(labels) > positions + 1:
        raise UsageError(
            f"{document.source} has {len(context) + len(labels):,} tokens and the model has positions for "
            f"{positions + 1:,}; leave the passage out, or evaluate a model with more"
        )
    return Window(np.array(context + labels, np.int32), len(labels))
