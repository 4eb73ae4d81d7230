"""`mjax data`: inspect an indexed dataset, or merge several.

    mjax data inspect PREFIX       documents, tokens, lengths, a sample
    mjax data merge OUT IN IN …    one dataset from several

`inspect` reads only the index and one document, whatever the size of the dataset, and accepts Megatron's datasets too.
These have no tokenizer, so their sample is shown as token ids.

For the same parts in the same order `merge` writes the same bytes as Megatron's tools/merge_datasets.py. Tokens are
copied unchanged, a few megabytes at a time, so the parts must share a tokenizer; if one part has no metadata, its
tokenizer is unknown and the result gets no metadata either.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import filesize
from rich.console import Console

from mjax import __version__
from mjax.commands.arguments import InspectArguments, MergeArguments
from mjax.config.datasets import DatasetMetadata, metadata_file, read_metadata
from mjax.data import indexed
from mjax.data.corpus.documents import MAX_EXAMPLES
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder
from mjax.errors import RunError, UsageError, check_picture
from mjax.utils.progress import facts, progress

QUANTILES = {"shortest": 0.0, "1%": 0.01, "25%": 0.25, "median": 0.5, "75%": 0.75, "99%": 0.99, "longest": 1.0}
SHOWN_TOKENS = 200  # of the sample
AGREEING = ("tokenizer", "vocabulary", "eod", "append_eod", "bos", "sentences")  # fields of the metadata
ADDED = ("documents", "tokens", "text_bytes", "malformed")


# --- Inspect ----------------------------------------------------------------------------------------------------------


def inspect(arguments: InspectArguments) -> dict[str, Any]:
    """Inspect a dataset, print a summary and return it.

    Returns:
      prefix, documents, sequences, tokens; bytes, the size of PREFIX.bin; dtype of the tokens on disk; empty_documents;
      lengths, quantiles of the tokens in a document and their mean; document, the index of the sample; sample_tokens,
      the number of tokens in that document; sample, its beginning: text, or token ids if the tokenizer is unknown;
      metadata of `mjax prepare`, None for Megatron's datasets.

    Raises:
      UsageError: there is no such dataset or document, it is damaged, or the figure's format is unknown.
    """
    if arguments.figure:
        check_picture("--figure", arguments.figure)
    data, metadata = IndexedDataset(arguments.prefix), read_metadata(arguments.prefix)
    if not 0 <= arguments.document < data.documents:
        raise UsageError(f"--document {arguments.document}: {data.prefix} has documents 0 to {data.documents - 1}")
    lengths = document_lengths(data)
    quantiles = {name: float(np.quantile(lengths, share)) for name, share in QUANTILES.items()}
    summary = {
        "prefix": arguments.prefix, "documents": data.documents, "sequences": len(data), "tokens": data.tokens,
        "bytes": data.tokens * data.dtype.itemsize, "dtype": str(data.dtype),
        "empty_documents": int(np.count_nonzero(lengths == 0)),
        "lengths": {**quantiles, "mean": float(lengths.mean())}, "document": arguments.document,
        "sample_tokens": int(lengths[arguments.document]),
        "sample": _sample(data, arguments.document, metadata),
        "metadata": metadata and dataclasses.asdict(metadata),
    }  # fmt: skip
    if arguments.figure:
        from mjax.pictures.figures import draw_lengths  # matplotlib takes a second to import

        draw_lengths(lengths, arguments.prefix, arguments.figure)
    if arguments.json:
        print(json.dumps(summary, ensure_ascii=False))
    else:
        _show(summary, metadata, arguments.figure)
    return summary


def document_lengths(data: IndexedDataset) -> np.ndarray:
    """Tokens in each document, int64 [documents]."""
    ends = np.concatenate([[0], np.cumsum(data.lengths, dtype=np.int64)])  # tokens before each sequence, and in all
    return np.diff(ends[data.document_indices])


def _sample(data: IndexedDataset, document: int, metadata: DatasetMetadata | None) -> str | list[int]:
    ids: list[int] = []
    for sequence in range(*data.document_indices[document : document + 2]):
        ids += data.get(sequence)[: SHOWN_TOKENS - len(ids)].tolist()
    return tokenizer_from_folder(tokenizer_folder(data.prefix)).decode(ids) if metadata else ids


def _show(summary: dict[str, Any], metadata: DatasetMetadata | None, figure: Path | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(facts(_facts(summary, metadata)))
    if figure:
        console.print(f"histogram of lengths: {figure}", markup=False)

    tokens = summary["sample_tokens"]
    cut = f", the first {SHOWN_TOKENS} of {tokens:,} tokens" if tokens > SHOWN_TOKENS else ""
    form = "" if metadata else " (token ids: the dataset has no tokenizer)"
    console.print(f"\ndocument {summary['document']}{cut}{form}:", style="bold", markup=False)
    console.print(summary["sample"] if metadata else " ".join(map(str, summary["sample"])), markup=False)


def _facts(summary: dict[str, Any], metadata: DatasetMetadata | None) -> Iterator[tuple[str, str, str]]:
    empty = summary["empty_documents"]
    yield "documents", f"{summary['documents']:,}", f"{empty:,} without text" if empty else ""
    sentences = f"sentences ({metadata.sentences})" if metadata and metadata.sentences else ""
    yield "sequences", f"{summary['sequences']:,}", sentences
    yield "tokens", f"{summary['tokens']:,}", f"{summary['dtype']}, {filesize.decimal(summary['bytes'])}"
    if metadata and metadata.trained is not None:
        yield "trained", f"{metadata.trained:,}", f"{metadata.trained / summary['tokens']:.1%} of the tokens"
    if metadata:
        yield "vocabulary", f"{metadata.vocabulary:,}", metadata.tokenizer
        yield "text", filesize.decimal(metadata.text_bytes), f"{metadata.bytes_per_token:.2f} bytes a token"
        if metadata.malformed:
            yield "malformed", f"{metadata.malformed:,}", "lines were skipped by prepare"
    for name, length in summary["lengths"].items():
        yield "tokens a document" if name == "shortest" else "", f"{length:,.0f}", name


# --- Merge ------------------------------------------------------------------------------------------------------------


def merge(arguments: MergeArguments) -> None:
    """Merge datasets and print a summary.

    Raises:
      UsageError: a part is missing or damaged, the parts do not agree, or the output exists.
      RunError: the output cannot be written.
    """
    began = time.perf_counter()
    output, parts = arguments.output, arguments.parts
    if len(parts) < 2:
        raise UsageError(f"mjax data merge needs two datasets or more; type mjax data merge {output} data/a data/b")
    if Path(output) in map(Path, parts):
        raise UsageError(f"{output} cannot be merged into itself; choose another output prefix")
    indexed.check_output(output, arguments.overwrite)
    datasets = [IndexedDataset(part) for part in parts]
    parts = [dataset.prefix for dataset in datasets]  # local ones
    dtype, tokens = datasets[0].dtype, sum(dataset.tokens for dataset in datasets)
    known = [read_metadata(part) for part in parts]
    _check_agreement(datasets, known)
    metadata = None if None in known else _merge_metadata(known)
    try:
        with IndexedDatasetWriter(output, int(np.iinfo(dtype).max) + 1, dtype) as writer:
            with progress("copying", tokens * dtype.itemsize) as advance:
                for dataset in datasets:
                    for copied in writer.add_dataset(dataset):
                        advance(copied)
            if metadata is not None:
                shutil.copytree(tokenizer_folder(parts[0]), indexed.temporary_tokenizer(output))
            indexed.publish_metadata(output, metadata)
    except OSError as error:
        raise RunError(f"merging into {output} stopped: {error}; nothing was left under that name") from error

    documents = sum(dataset.documents for dataset in datasets)
    size = filesize.decimal(tokens * dtype.itemsize)
    print(f"{output} is ready after {time.perf_counter() - began:.1f} s")
    print(f"{documents:,} documents, {tokens:,} tokens, {size}")
    if metadata is None:
        unknown = metadata_file(parts[known.index(None)])
        print(f"it has no metadata and no tokenizer, because {unknown} does not exist")


def _check_agreement(datasets: Sequence[IndexedDataset], known: Sequence[DatasetMetadata | None]) -> None:
    """Compare the parts, and where all have metadata these and their tokenizers.

    Raises:
      UsageError: the parts do not agree, or one has metadata and no tokenizer.
    """
    facts = [{"tokens": dataset.dtype, "masks": dataset.has_mask} for dataset in datasets]
    for fact, dataset, metadata in zip(facts, datasets, known, strict=True):
        folder = tokenizer_folder(dataset.prefix)
        if None in known:
            continue
        if not folder.is_dir():
            raise UsageError(f"there is no {folder}; copy it there, or prepare {dataset.prefix} again")
        fact |= {name: getattr(metadata, name) for name in AGREEING}
        fact["tokenizer files"] = indexed.digest_folder(folder)[:8]
    for fact, dataset in zip(facts, datasets, strict=True):
        for name, first in facts[0].items():
            if fact[name] != first:
                parts = f"{datasets[0].prefix} has {name} {first} and {dataset.prefix} {fact[name]}"
                raise UsageError(f"{parts}; prepare both in the same way")


def _merge_metadata(known: Sequence[DatasetMetadata]) -> DatasetMetadata:
    """The metadata of the whole."""
    sequences = [metadata.sequences for metadata in known]
    return dataclasses.replace(
        known[0],
        **{name: sum(getattr(metadata, name) for metadata in known) for name in ADDED},
        inputs=[name for metadata in known for name in metadata.inputs],
        mjax_version=__version__,
        sequences=None if None in sequences else sum(sequences),
        trained=None if known[0].trained is None else sum(metadata.trained or 0 for metadata in known),
        malformed_examples=[line for metadata in known for line in metadata.malformed_examples][:MAX_EXAMPLES],
    )
