"""From raw blocks to token ids: the part of `mjax prepare` that is worth many cores.

A worker gets a block of raw lines, parses it, splits sentences where asked to, has the tokenizer encode all its texts
in one call and returns arrays, already in the type they have on disk. Python's lists of numbers, ten times their size,
never leave the worker. Blocks are independent and come back in order, so the dataset does not depend on the number of
workers.

The rules are those of Megatron's tools/preprocess_data.py: a sequence without tokens is left out, so a document without
text has no sequence; the end-of-document id is appended to the last sequence of a document, if it has one.
"""

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np

from mjax.data.blocks import Block
from mjax.data.corpus import Malformed, parse
from mjax.data.indexed import token_dtype
from mjax.data.sentences import load_splitter, split
from mjax.data.tokenizers import tokenizer_from_folder


@dataclass(frozen=True)
class Recipe:
    """All that a worker has to know; it crosses to another process."""

    tokenizer: Path
    """Folder the tokenizer is rebuilt from."""
    key: str
    """Field that holds the text."""
    append_eod: bool
    """Whether documents end with the end-of-document id."""
    sentences: str | None
    """Language to split sentences by; None leaves documents whole."""


@dataclass(frozen=True)
class Encoded:
    """The documents of one block."""

    tokens: np.ndarray
    """Token ids of all documents one after the other, [tokens] in the type they have on disk."""
    lengths: np.ndarray
    """Tokens in each sequence, int32 [sequences]."""
    sequences: np.ndarray
    """Sequences in each document, int64 [documents]."""
    text_bytes: int
    """Bytes of their text in UTF-8."""
    size: int
    """Bytes of the input file they took."""
    malformed: list[str] = field(default_factory=list)
    """What is malformed in the block, in order."""


class Encoder:
    """Encodes blocks by a recipe."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.tokenizer = tokenizer_from_folder(recipe.tokenizer)
        self.dtype = token_dtype(self.tokenizer.vocabulary)
        self.splitter = load_splitter(recipe.sentences) if recipe.sentences else None

    def __call__(self, block: Block) -> Encoded:
        texts: list[str] = []
        malformed: list[str] = []
        for item in parse(block, self.recipe.key):
            if isinstance(item, Malformed):
                malformed.append(str(item))
            else:
                texts.append(item.text)
        documents = self._encode(texts)
        kept = [sequence for document in documents for sequence in document]
        lengths = np.fromiter(map(len, kept), np.int32, len(kept))
        return Encoded(
            tokens=np.fromiter(chain.from_iterable(kept), self.dtype, lengths.sum(dtype=np.int64)),
            lengths=lengths,
            sequences=np.fromiter(map(len, documents), np.int64, len(documents)),
            text_bytes=sum(len(text) if text.isascii() else len(text.encode()) for text in texts),
            size=block.size,
            malformed=malformed,
        )

    def _encode(self, texts: list[str]) -> list[list[list[int]]]:
        """Ids of each sequence of each document."""
        pieces = [split(text, self.splitter) for text in texts] if self.splitter else [[text] for text in texts]
        ids = iter(self.tokenizer.encode_batch([sequence for document in pieces for sequence in document]))
        documents = [[found for _ in document if (found := next(ids))] for document in pieces]
        if self.recipe.append_eod:
            for document in documents:
                if document:
                    document[-1].append(self.tokenizer.eod)
        return documents


# --- In a worker process ----------------------------------------------------------------------------------------------

_encoder: Encoder | None = None


def start(recipe: Recipe) -> None:
    """Set this process up for `encode`."""
    global _encoder
    _encoder = Encoder(recipe)


def encode(block: Block) -> Encoded:
    """The block's documents by the recipe that `start` was given."""
    return _encoder(block)
