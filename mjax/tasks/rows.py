"""Texts as rows of a BERT: [CLS] a [SEP] b [SEP] and padding.

A row that is too long is truncated at its end, so b loses tokens first, as in Megatron-LM v1.0 (tasks/data_utils.py);
Google's BERT truncates the longer of the two. Token types are 0 for padding whatever its id; v1.0 uses the padding id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mjax.data.tokenizers import BertTokenizer

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Examples:
    """N examples, each of c rows: the choices of a question, 1 for all other tasks.

    Attributes:
      tokens: int32 [N, c, s], `[CLS] a [SEP] b [SEP]` and padding.
      token_types: int32 [N, c, s]; 0 up to the first [SEP] and in the padding, 1 for the rest.
      text: bool [N, c, s]; False is padding.
      labels: int32 [N] each: {"label": …}, or {"start": …, "end": …}, which are positions in the row; empty if the file
        has none.
    """

    tokens: np.ndarray
    token_types: np.ndarray
    text: np.ndarray
    labels: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, chosen: np.ndarray) -> Batch:
        """The model's inputs for the examples `chosen`, int [b] → [b, c, s] each."""
        return {
            "tokens": self.tokens[chosen],
            "token_types": self.token_types[chosen],
            "documents": (~self.text[chosen]).astype(np.int32),  # 0 for text, 1 for padding
        }


class Pair(NamedTuple):
    """Ids of the two texts of a row, without special tokens."""

    a: Sequence[int]
    b: Sequence[int]

    @property
    def length(self) -> int:
        """Tokens of the whole row."""
        return len(self.a) + len(self.b) + 3


def as_rows(
    pairs: Sequence[Pair], choices: int, labels: dict[str, Sequence[int]], tokenizer: BertTokenizer, positions: int
) -> Examples:
    """Rows of `positions` tokens, `choices` consecutive ones per example."""
    place = np.arange(positions)
    length = np.array([pair.length for pair in pairs], np.int32).clip(max=positions)[:, None]  # [N c, 1]
    second = np.array([len(pair.a) + 2 for pair in pairs], np.int32)[:, None]  # where b begins
    text = place < length  # [N c, s]
    tokens = np.full((len(pairs), positions), tokenizer.pad, np.int32)
    for row, (a, b) in zip(tokens, pairs, strict=True):
        ids = [tokenizer.cls, *a, tokenizer.sep, *b][: positions - 1]
        row[: len(ids) + 1] = [*ids, tokenizer.sep]
    shape = (-1, choices, positions)
    return Examples(
        tokens.reshape(shape),
        (text & (place >= second)).astype(np.int32).reshape(shape),
        text.reshape(shape),
        {name: np.array(values, np.int32) for name, values in labels.items()},
    )


def padded_batches(examples: Examples, size: int) -> Iterator[tuple[int, Batch]]:
    """All examples in order, without labels: the number of examples in a batch of `size`, and the batch.

    The last one is filled with copies of its first example, which are not used.
    """
    for first in range(0, len(examples), size):
        count = min(size, len(examples) - first)
        yield count, examples.batch(first + np.arange(size) * (np.arange(size) < count))


def clean_text(text: str) -> str:
    """`text` with white space collapsed, and no space before a full stop, as in v1.0."""
    text = re.sub(r"\s+", " ", text)
    for _ in range(3):  # consecutive full stops share their spaces
        text = text.replace(" . ", ". ")
    return text
