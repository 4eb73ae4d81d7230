"""`mjax data inspect`: what a dataset holds, in figures, as a picture and as text.

It reads the index and one document, whatever the size of the dataset, and takes Megatron's datasets as well. These
bring no tokenizer along, so their sample is shown as token ids.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mjax.data.indexed import IndexedDataset
from mjax.data.metadata import DatasetMetadata, read_metadata, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.errors import UsageError, check_picture

QUANTILES = {"shortest": 0.0, "1%": 0.01, "25%": 0.25, "median": 0.5, "75%": 0.75, "99%": 0.99, "longest": 1.0}
SHOWN_TOKENS = 200  # of the sample


@dataclass(frozen=True)
class InspectArguments:
    """Show what a dataset holds: documents, sequences, tokens, their lengths and a sample."""

    prefix: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """The dataset: data/corpus for data/corpus.bin and data/corpus.idx."""
    document: int = 0
    """Number of the document shown as a sample, from 0."""
    figure: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw a histogram of the documents' lengths into this .png, .pdf or .svg file."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    """Size of PREFIX.bin."""
    dtype: str
    """Type of the tokens on disk."""
    empty_documents: int
    lengths: dict[str, float]
    """Quantiles of the tokens in a document, and their mean."""
    document: int
    """Number of the sample."""
    sample_tokens: int
    """Tokens in all of that document."""
    sample: str | list[int]
    """Its beginning: text, or token ids where the tokenizer is not known."""
    metadata: DatasetMetadata | None
    """What `mjax prepare` noted; None for Megatron's datasets."""


def inspect(arguments: InspectArguments) -> Inspection:
    """Inspect a dataset and print what was found.

    Raises:
      UsageError: there is no such dataset or document, it is damaged, or the figure's format is not known.
    """
    if arguments.figure:
        check_picture("--figure", arguments.figure)
    data, metadata = IndexedDataset(arguments.prefix), read_metadata(arguments.prefix)
    if not 0 <= arguments.document < data.documents:
        raise UsageError(
            f"--document is {arguments.document}; {arguments.prefix} holds documents 0 to {data.documents - 1}"
        )
    lengths = document_lengths(data)
    quantiles = {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()}
    found = Inspection(
        prefix=arguments.prefix,
        documents=data.documents,
        sequences=len(data),
        tokens=data.tokens,
        bytes=data.tokens * data.dtype.itemsize,
        dtype=str(data.dtype),
        empty_documents=int(np.count_nonzero(lengths == 0)),
        lengths={**quantiles, "mean": float(lengths.mean())},
        document=arguments.document,
        sample_tokens=int(lengths[arguments.document]),
        sample=_sample(data, arguments.document, metadata),
        metadata=metadata,
    )
    if arguments.figure:
        from mjax.data.length_figure import draw_lengths  # matplotlib takes a second to import

        draw_lengths(lengths, arguments.prefix, arguments.figure)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False))
    else:
        _show(found, arguments.figure)
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


def _show(found: Inspection, figure: Path | None) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")

    def row(name: str, value: Any, remark: str = "") -> None:
        table.add_row(name, value, escape(remark))

    metadata = found.metadata
    row("documents", f"{found.documents:,}", f"{found.empty_documents:,} without text" if found.empty_documents else "")
    row(
        "sequences",
        f"{found.sequences:,}",
        f"sentences ({metadata.sentences})" if metadata and metadata.sentences else "",
    )
    row("tokens", f"{found.tokens:,}", f"{found.dtype}, {filesize.decimal(found.bytes)}")
    if metadata:
        row("vocabulary", f"{metadata.vocabulary:,}", metadata.tokenizer)
        row("text", filesize.decimal(metadata.text_bytes), f"{metadata.bytes_per_token:.2f} bytes a token")
        if metadata.malformed:
            row("malformed", f"{metadata.malformed:,}", "lines were left out when it was prepared")
    for name, length in found.lengths.items():
        row("tokens a document" if name == "shortest" else "", f"{length:,.0f}", name)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    if figure:
        console.print(f"their lengths are drawn in {figure}", markup=False)

    cut = f", the first {SHOWN_TOKENS} of {found.sample_tokens:,} tokens" if found.sample_tokens > SHOWN_TOKENS else ""
    form = "" if metadata else " (token ids: there is no tokenizer beside the dataset)"
    console.print(f"\ndocument {found.document}{cut}{form}:", style="bold", markup=False)
    console.print(found.sample if metadata else " ".join(map(str, found.sample)), markup=False)
