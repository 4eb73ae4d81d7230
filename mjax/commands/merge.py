"""`mjax data merge`: concatenate indexed datasets.

The result is byte-identical to that of Megatron's tools/merge_datasets.py for the same parts in the same order. Tokens
are copied unchanged, a few megabytes at a time, so the parts must share a tokenizer; if one part has no metadata, its
tokenizer is unknown and the result gets no metadata either.
"""

import dataclasses
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich import filesize

from mjax import __version__
from mjax.config.datasets import DatasetMetadata, metadata_file, read_metadata
from mjax.data.corpus import EXAMPLES
from mjax.data.indexed import (
    IndexedDataset,
    check_output,
    digest_of_folder,
    put_beside,
    temporary_tokenizer,
    tokenizer_folder,
    writing,
)
from mjax.errors import UsageError
from mjax.utils.progress import progress

AGREEING = ("tokenizer", "vocabulary", "eod", "append_eod", "bos", "sentences")  # fields of the metadata
ADDED = ("documents", "tokens", "text_bytes", "malformed")


@dataclass(frozen=True)
class MergeArguments:
    """Concatenate several datasets into one."""

    output: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Prefix of the new dataset."""
    parts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IN …")]
    """Prefixes of the datasets to merge, in this order."""
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace an existing dataset of that name."""


def merge(arguments: MergeArguments) -> None:
    """Merge datasets and print a summary.

    Raises:
      UsageError: a part is missing or damaged, the parts do not agree, or the output exists.
      RunError: the output cannot be written.
    """
    began = time.perf_counter()
    output, parts = arguments.output, arguments.parts
    if len(parts) < 2:
        raise UsageError(f"mjax data merge takes two datasets or more; give their prefixes after {output}")
    if Path(output) in map(Path, parts):
        raise UsageError(f"{output} cannot be merged into itself; choose another output prefix")
    check_output(output, arguments.overwrite)
    datasets = [IndexedDataset(part) for part in parts]
    dtype, tokens = datasets[0].dtype, sum(dataset.tokens for dataset in datasets)
    for other in datasets:
        if other.dtype != dtype:
            raise UsageError(
                f"{parts[0]} has tokens of dtype {dtype} and {other.prefix} of dtype {other.dtype}; "
                "prepare them with the same tokenizer"
            )
    known = [read_metadata(part) for part in parts]
    metadata = None if None in known else _merged(parts, known)
    with writing(output, "merging into", int(np.iinfo(dtype).max) + 1, dtype) as writer:
        with progress("copying", tokens * dtype.itemsize) as advance:
            for dataset in datasets:
                for copied in writer.add_dataset(dataset):
                    advance(copied)
        if metadata is not None:
            shutil.copytree(tokenizer_folder(parts[0]), temporary_tokenizer(output))
        put_beside(output, metadata)

    documents = sum(dataset.documents for dataset in datasets)
    size = filesize.decimal(tokens * dtype.itemsize)
    print(f"{output} is ready after {time.perf_counter() - began:.1f} s")
    print(f"{documents:,} documents, {tokens:,} tokens, {size}")
    if metadata is None:
        unknown = metadata_file(parts[known.index(None)])
        print(f"it has no metadata and no tokenizer, because {unknown} does not exist")


def _merged(parts: Sequence[str], known: Sequence[DatasetMetadata]) -> DatasetMetadata:
    """The metadata of the whole.

    Raises:
      UsageError: the parts do not agree.
    """
    for part in parts:
        if not tokenizer_folder(part).is_dir():
            missing = f"there is no {tokenizer_folder(part)} beside {metadata_file(part)}"
            raise UsageError(f"{missing}; copy it there, or prepare {part} again")
    for part, metadata in zip(parts[1:], known[1:], strict=True):
        for field in AGREEING:
            ours, theirs = getattr(known[0], field), getattr(metadata, field)
            if ours != theirs:
                raise UsageError(
                    f"{metadata_file(parts[0])} says {field} {ours!r} and {metadata_file(part)} {theirs!r}; "
                    "prepare both in the same way"
                )
        if digest_of_folder(tokenizer_folder(parts[0])) != digest_of_folder(tokenizer_folder(part)):
            raise UsageError(
                f"{tokenizer_folder(parts[0])} and {tokenizer_folder(part)} are different tokenizers of the same kind "
                "and size; prepare both with the same one"
            )
    sequences = [metadata.sequences for metadata in known]
    return dataclasses.replace(
        known[0],
        **{name: sum(getattr(metadata, name) for metadata in known) for name in ADDED},
        inputs=[name for metadata in known for name in metadata.inputs],
        mjax_version=__version__,
        sequences=None if None in sequences else sum(sequences),
        malformed_examples=[line for metadata in known for line in metadata.malformed_examples][:EXAMPLES],
    )
