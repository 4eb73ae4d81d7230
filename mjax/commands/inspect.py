"""`mjax data inspect`: the contents of a dataset in numbers, as a figure and as text.

It reads only the index and one document, whatever the size of the dataset, and accepts Megatron's datasets too. These
have no tokenizer, so their sample is shown as token ids.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich import filesize
from rich.console import Console

from mjax.config.datasets import DatasetMetadata, read_metadata
from mjax.data.corpus.outputs import facts
from mjax.data.indexed import IndexedDataset, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.errors import UsageError, check_picture

QUANTILES = {"shortest": 0.0, "1%": 0.01, "25%": 0.25, "median": 0.5, "75%": 0.75, "99%": 0.99, "longest": 1.0}
SHOWN_TOKENS = 200  # of the sample


@dataclass(frozen=True)
class InspectArguments:
    """Show the contents of a dataset: documents, sequences, tokens, lengths and a sample."""

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """The dataset: data/corpus for data/corpus.bin and data/corpus.idx."""
    document: int = 0
    """Index of the document to show as a sample, from 0."""
    figure: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw a histogram of the documents' lengths into this .png, .pdf or .svg file."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


def inspect(arguments: InspectArguments) -> dict[str, Any]:
    """Inspect a dataset, print a summary and return it.

    Returns:
      prefix, documents, sequences, tokens; bytes, the size of PREFIX.bin; dtype of the tokens on disk; empty_documents;
      lengths, quantiles of the tokens in a document and their mean; document, the index of the sample; sample_tokens,
      those of that whole document; sample, its beginning: text, or token ids if the tokenizer is unknown; metadata of
      `mjax prepare`, None for Megatron's datasets.

    Raises:
      UsageError: there is no such dataset or document, it is damaged, or the figure's format is unknown.
    """
    if arguments.figure:
        check_picture("--figure", arguments.figure)
    data, metadata = IndexedDataset(arguments.prefix), read_metadata(arguments.prefix)
    if not 0 <= arguments.document < data.documents:
        raise UsageError(
            f"--document is {arguments.document}; {arguments.prefix} has documents 0 to {data.documents - 1}"
        )
    lengths = document_lengths(data)
    quantiles = {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()}
    found = {
        "prefix": arguments.prefix,
        "documents": data.documents,
        "sequences": len(data),
        "tokens": data.tokens,
        "bytes": data.tokens * data.dtype.itemsize,
        "dtype": str(data.dtype),
        "empty_documents": int(np.count_nonzero(lengths == 0)),
        "lengths": {**quantiles, "mean": float(lengths.mean())},
        "document": arguments.document,
        "sample_tokens": int(lengths[arguments.document]),
        "sample": _sample(data, arguments.document, metadata),
        "metadata": metadata and dataclasses.asdict(metadata),
    }
    if arguments.figure:
        from mjax.pictures.lengths import draw_lengths  # matplotlib takes a second to import

        draw_lengths(lengths, arguments.prefix, arguments.figure)
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        _show(found, metadata, arguments.figure)
    return found


def document_lengths(data: IndexedDataset) -> np.ndarray:
    """Tokens in each document, int64 [documents]."""
    ends = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])  # tokens before each sequence, and in all
    return np.diff(ends[data.document_indices])


def _sample(data: IndexedDataset, document: int, metadata: DatasetMetadata | None) -> str | list[int]:
    ids: list[int] = []
    for sequence in range(*data.document_indices[document : document + 2]):
        ids += data.get(sequence)[: SHOWN_TOKENS - len(ids)].tolist()
    return tokenizer_from_folder(tokenizer_folder(data.prefix)).decode(ids) if metadata else ids


def _show(found: dict[str, Any], metadata: DatasetMetadata | None, figure: Path | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(facts(_facts(found, metadata)))
    if figure:
        console.print(f"histogram of lengths: {figure}", markup=False)

    tokens = found["sample_tokens"]
    cut = f", the first {SHOWN_TOKENS} of {tokens:,} tokens" if tokens > SHOWN_TOKENS else ""
    form = "" if metadata else " (token ids: the dataset has no tokenizer)"
    console.print(f"\ndocument {found['document']}{cut}{form}:", style="bold", markup=False)
    console.print(found["sample"] if metadata else " ".join(map(str, found["sample"])), markup=False)


def _facts(found: dict[str, Any], metadata: DatasetMetadata | None) -> Iterator[tuple[str, str, str]]:
    empty = found["empty_documents"]
    yield "documents", f"{found['documents']:,}", f"{empty:,} without text" if empty else ""
    sentences = f"sentences ({metadata.sentences})" if metadata and metadata.sentences else ""
    yield "sequences", f"{found['sequences']:,}", sentences
    yield "tokens", f"{found['tokens']:,}", f"{found['dtype']}, {filesize.decimal(found['bytes'])}"
    if metadata:
        yield "vocabulary", f"{metadata.vocabulary:,}", metadata.tokenizer
        yield "text", filesize.decimal(metadata.text_bytes), f"{metadata.bytes_per_token:.2f} bytes a token"
        if metadata.malformed:
            yield "malformed", f"{metadata.malformed:,}", "lines were skipped by prepare"
    for name, length in found["lengths"].items():
        yield "tokens a document" if name == "shortest" else "", f"{length:,.0f}", name
