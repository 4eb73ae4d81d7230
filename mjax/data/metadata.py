"""Files that `mjax prepare` writes beside a dataset: PREFIX.json, and the tokenizer's folder PREFIX.tokenizer.

Megatron's datasets have neither; mjax can train on them but cannot show their text.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mjax.config.plain_values import build
from mjax.data.indexed import IndexedDatasetWriter, index_file, temporary_files, token_file
from mjax.errors import RunError, UsageError
from mjax.utils.atomic import put, remove, write_whole
from mjax.utils.json_files import read_json


@dataclass(frozen=True)
class DatasetMetadata:
    """Origin and size of a dataset; every field is a plain JSON value.

    Attributes:
      tokenizer: scheme of the tokenizer in PREFIX.tokenizer.
      vocabulary: token ids run from 0 to vocabulary - 1.
      eod: id that ends a document.
      append_eod: whether every document that is not empty ends with `eod`.
      documents: documents, empty ones included.
      tokens: tokens, ends of documents included.
      text_bytes: bytes of the text in UTF-8.
      inputs: files the text was read from, in order.
      mjax_version: version that wrote it.
      sequences: one per document that is not empty, or one per sentence; None in files of older versions.
      sentences: language whose rules split documents into sentences; None if they were not split.
      malformed: malformed lines that were skipped.
      malformed_examples: the first of them, as FILE:LINE: reason.
      bos: id before the tokens of every document that is not empty; None: there is none.
    """

    tokenizer: str
    vocabulary: int
    eod: int
    append_eod: bool
    documents: int
    tokens: int
    text_bytes: int
    inputs: list[str]
    mjax_version: str
    sequences: int | None = None
    sentences: str | None = None
    malformed: int = 0
    malformed_examples: list[str] = field(default_factory=list)
    bos: int | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token; converts a loss per token into one per byte."""
        return self.text_bytes / self.tokens


def metadata_file(prefix: str | Path) -> Path:
    """PREFIX.json."""
    return Path(f"{prefix}.json")


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer."""
    return Path(f"{prefix}.tokenizer")


def digest_of_folder(folder: Path) -> str:
    """SHA-256 of the files in a folder, such as a tokenizer's, and of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def read_metadata(prefix: str | Path) -> DatasetMetadata | None:
    """Read PREFIX.json; None if it does not exist, as for Megatron's datasets.

    Raises:
      UsageError: it is damaged.
    """
    file = metadata_file(prefix)
    if not file.is_file():
        return None
    fix = "prepare the data again, or delete it to train without metadata"
    values = read_json(file, fix)
    names = [field.name for field in dataclasses.fields(DatasetMetadata)]
    known = {name: values[name] for name in names if name in values} if isinstance(values, dict) else values
    try:
        found = build(DatasetMetadata, known, str(file))
    except UsageError as error:
        raise UsageError(f"{error}; {fix}") from None
    counts = (found.documents, found.text_bytes, found.sequences or 0, found.malformed)
    if not 0 <= found.eod < found.vocabulary or found.tokens < 1 or min(counts) < 0:
        raise UsageError(f"{file} is damaged: its counts are impossible; {fix}")
    return found


# --- Putting a dataset in place ---------------------------------------------------------------------------------------


def dataset_files(prefix: str | Path) -> list[Path]:
    """All files of a dataset: tokens, index, metadata and the tokenizer's folder."""
    return [token_file(prefix), index_file(prefix), metadata_file(prefix), tokenizer_folder(prefix)]


def temporary_tokenizer(prefix: str | Path) -> Path:
    """Folder of a dataset's tokenizer until the dataset is complete."""
    return Path(f"{tokenizer_folder(prefix)}.tmp")


def check_output(prefix: str, overwrite: bool) -> None:
    """Check that a dataset may be written under `prefix`.

    Files of a killed run do not prevent it: if tokens or an index have a temporary name and no index has the final one,
    the files beside them are its own.

    Raises:
      UsageError: `prefix` is not a valid prefix, or the dataset exists and `overwrite` is not set.
    """
    if prefix.endswith(("/", ".bin", ".idx")) or Path(prefix).is_dir():
        raise UsageError(f"{prefix} is not a prefix; give one such as data/corpus, to which .bin and .idx are added")
    unfinished = any(file.exists() for file in temporary_files(prefix)) and not index_file(prefix).exists()
    existing = [str(file) for file in dataset_files(prefix) if file.exists()]
    if existing and not overwrite and not unfinished:
        raise UsageError(f"{existing[0]} exists; choose another name, or add --overwrite to replace the dataset")


@contextmanager
def writing(prefix: str, verb: str, vocabulary: int, dtype: np.dtype | None = None) -> Iterator[IndexedDatasetWriter]:
    """Write the dataset `prefix`; the block may fill `temporary_tokenizer(prefix)`, which is removed afterwards.

    Raises:
      RunError: it cannot be written; `verb` names the work.
    """
    tokenizer = temporary_tokenizer(prefix)
    try:
        with IndexedDatasetWriter(prefix, vocabulary, dtype) as writer:
            try:
                shutil.rmtree(tokenizer, ignore_errors=True)  # of a run that was killed
                yield writer
            finally:
                shutil.rmtree(tokenizer, ignore_errors=True)
    except OSError as error:
        raise RunError(f"{verb} {prefix} stopped: {error}; nothing was left under that name") from error


def put_beside(prefix: str | Path, metadata: DatasetMetadata | None) -> None:
    """Give the metadata and the temporary tokenizer their final names, replacing those of an older dataset.

    Call it when the tokens are written but not yet renamed: this removes an old dataset, and the index, which makes the
    new one readable, comes last. With None the new dataset has neither metadata nor tokenizer.
    """
    remove(index_file(prefix))
    shutil.rmtree(tokenizer_folder(prefix), ignore_errors=True)
    if metadata is None:
        metadata_file(prefix).unlink(missing_ok=True)
        return
    put(temporary_tokenizer(prefix), tokenizer_folder(prefix))
    write_metadata(prefix, metadata)


def write_metadata(prefix: str | Path, metadata: DatasetMetadata) -> None:
    """Write PREFIX.json, atomically."""
    values = json.dumps(dataclasses.asdict(metadata), indent=2, ensure_ascii=False)
    write_whole(metadata_file(prefix), f"{values}\n")
