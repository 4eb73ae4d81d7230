"""Perplexity and bits per byte of any text.

Every document is read from its beginning, after the end-of-document token that precedes it in training. So each of its
tokens is predicted, including the first, and the loss is that of the whole text. Divided by bytes rather than tokens,
it is comparable across tokenizers:

    perplexity     exp(nats / tokens)
    bits per byte  nats / ln 2 / bytes of UTF-8

A document longer than the model's sequence is split into windows (`windows.py`): adjacent, or overlapping on request,
which takes longer and gives a lower loss. Ends of documents are not predicted, whether the dataset contains them or
not, so a text gives the same metrics as the dataset prepared from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from mjax.config.datasets import read_metadata
from mjax.data.indexed import IndexedDataset, index_file, token_file, tokenizer_folder
from mjax.data.tokenizers import Tokenizer, tokenizer_from_folder
from mjax.errors import UsageError
from mjax.tasks.interface import Metric, Score, Window, perplexity, read_documents
from mjax.tasks.windows import check_overlap, overlapping_windows


class Perplexity:
    """The task on files of text, or on a dataset.

    Attributes:
      passes: the windows of all documents.
      documents: number with text.
      bytes: UTF-8 bytes of the text; None for a dataset without that information.
    """

    def __init__(self, data: str, tokenizer: Tokenizer, positions: int, overlap: int | None = None):
        """Read the documents and split them into windows.

        Args:
          data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
          positions: s of the model.
          overlap: labels counted in a window after a document's first; by default s, for adjacent windows.

        Raises:
          UsageError: there is nothing under that name, or no text in it; the dataset was made with another tokenizer;
            the overlap does not fit.
        """
        overlap = check_overlap(positions if overlap is None else overlap, positions)
        documents, self.bytes = open_text(data, tokenizer)
        windows: list[Window] = []
        self.documents = 0
        for tokens in documents:
            if len(tokens):
                self.documents += 1
                windows += overlapping_windows(np.array([tokenizer.start, *tokens], np.int32), positions, overlap)
        if not windows:
            raise UsageError(f"{data} has no text; give a file or a dataset that does")
        self.passes: list[Sequence[Window]] = [windows]

    def metrics(self, scores: Sequence[Score]) -> list[Metric]:
        """Perplexity, bits per byte, and the numbers they are computed from."""
        (score,) = scores
        bits, length = Metric("bits_per_byte", None, "unknown", "the size of the text is in no .json"), []
        if self.bytes is not None:
            per_byte = score.mean * score.labels / math.log(2) / self.bytes
            bits = Metric.number("bits_per_byte", per_byte, "independent of the tokenizer")
            length = [Metric.count("bytes", self.bytes, "of text, in UTF-8")]
        return [
            Metric.number("perplexity", perplexity(score.mean), "per token of this tokenizer"),
            bits,
            Metric.number("loss", score.mean, "nats per token"),
            Metric.count("tokens", score.labels),
            *length,
            Metric.count("documents", self.documents),
            Metric.count("windows", score.windows),
        ]


def open_text(data: str, tokenizer: Tokenizer) -> tuple[Iterator[Sequence[int]], int | None]:
    """The tokens of every document, without ends of documents, and the bytes of the whole text, if they are known.

    Args:
      data: a .txt, .jsonl or .parquet file, a folder or a pattern of such; or the prefix of an indexed dataset.
      tokenizer: of the model.

    Raises:
      UsageError: there is nothing under that name, or the dataset was made with another tokenizer.
    """
    if index_file(data).is_file() or token_file(data).is_file() or data.endswith((".bin", ".idx")):
        metadata = read_metadata(data)
        return _of_dataset(data, tokenizer), None if metadata is None else metadata.text_bytes
    texts = [document.text for document in read_documents(data)]
    return (tokenizer.encode(text) for text in texts), sum(len(text.encode("utf-8")) for text in texts)


def _of_dataset(prefix: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """The documents of a dataset, without what begins and ends them."""
    data = IndexedDataset(prefix)
    _check_tokenizer(prefix, tokenizer)
    for first, last in pairwise(data.document_indices.tolist()):
        tokens = np.concatenate([np.zeros(0, np.int32), *(data.get(sequence) for sequence in range(first, last))])
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocabulary:
            raise UsageError(
                f"{prefix} holds token ids from {tokens.min()} to {tokens.max()} and the run's tokenizer has "
                f"{tokenizer.vocabulary:,}; use data that were prepared with the tokenizer of the run"
            )
        if len(tokens) and tokens[0] == tokenizer.bos:
            tokens = tokens[1:]
        yield tokens[:-1] if len(tokens) and tokens[-1] == tokenizer.eod else tokens


def _check_tokenizer(prefix: str, tokenizer: Tokenizer) -> None:
    """Refuse a dataset that has another tokenizer than the run; Megatron's datasets have none."""
    folder = tokenizer_folder(prefix)
    if folder.is_dir() and _identity(tokenizer_from_folder(folder)) != _identity(tokenizer):
        raise UsageError(
            f"{prefix} was prepared with another tokenizer than the run's, so the same id means different text; "
            "prepare it again with the tokenizer of the run, or give the text itself"
        )


def _identity(tokenizer: Tokenizer) -> tuple:
    return tokenizer.scheme, tokenizer.vocabulary, tokenizer.eod, tokenizer.contents
