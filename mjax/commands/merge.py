"""`mjax data merge`: several indexed datasets as one, document after document.

Byte for byte what Megatron's tools/merge_datasets.py writes of the same parts in the same order. Tokens are copied as
they are, a few megabytes at a time, so the parts have to agree on the tokenizer; where one is unknown, because the part
has no metadata, nothing is claimed of the whole.
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
from mjax.data.corpus import EXAMPLES
from mjax.data.indexed import IndexedDataset
from mjax.data.metadata import (
    DatasetMetadata,
    check_output,
    digest_of_folder,
    metadata_file,
    put_beside,
    read_metadata,
    temporary_tokenizer,
    tokenizer_folder,
    writing,
)
from mjax.data.progress import showing
from mjax.errors import UsageError

AGREEING = ("tokenizer", "vocabulary", "eod", "append_eod", "sentences")  # fields of the metadata
ADDED = ("documents", "tokens", "text_bytes", "malformed")


@dataclass(frozen=True)
class MergeArguments:
    """Write the documents of several datasets, one after the other, as one dataset."""

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
        raise UsageError(f"there is nothing to merge into {output}; give two prefixes or more after it")
    if Path(output) in map(Path, parts):
        raise UsageError(f"{output} cannot be merged into itself; choose another name for the whole")
    check_output(output, arguments.overwrite)
    datasets = [IndexedDataset(part) for part in parts]
    dtype = datasets[0].dtype
    for other in datasets:
        if other.dtype != dtype:
            raise UsageError(
                f"{parts[0]} holds tokens of dtype {dtype} and {other.prefix} of dtype {other.dtype}; "
                "prepare them with the same tokenizer"
            )
    known = [read_metadata(part) for part in parts]
    metadata = None if None in known else _merged(parts, known)
    with writing(output, "merging into", int(np.iinfo(dtype).max) + 1, dtype) as writer:
        with showing("copying", sum(dataset.tokens for dataset in datasets) * dtype.itemsize) as advance:
            for dataset in datasets:
                for copied in writer.add_dataset(dataset):
                    advance(copied, 0, copied)
                advance(0, dataset.documents, 0)
        if metadata is not None:
            shutil.copytree(tokenizer_folder(parts[0]), temporary_tokenizer(output))
        put_beside(output, metadata)

    tokens = sum(dataset.tokens for dataset in datasets)
    documents = sum(dataset.documents for dataset in datasets)
    size = filesize.decimal(tokens * dtype.itemsize)
    print(f"{output} is ready after {time.perf_counter() - began:.1f} s")
    print(f"{documents:,} documents, {tokens:,} tokens, {size}")
    if metadata is None:
        unknown = metadata_file(parts[known.index(None)])
        print(
            f"its tokenizer is unknown because {unknown} does not exist; it has no PREFIX.json and no PREFIX.tokenizer"
        )


def _merged(parts: Sequence[str], known: Sequence[DatasetMetadata]) -> DatasetMetadata:
    """The metadata of the whole, once the parts agree on all that must be the same."""
    for part in parts:
        if not tokenizer_folder(part).is_dir():
            raise UsageError(
                f"there is no {tokenizer_folder(part)} beside {metadata_file(part)}; copy it along, or prepare {part} "
                "again"
            )
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
