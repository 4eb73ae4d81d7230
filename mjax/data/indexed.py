"""Megatron's indexed dataset: all tokens in one flat file, and an index that locates each sequence.

PREFIX.bin holds the tokens of all sequences one after the other, without a header. PREFIX.idx is little-endian:

    bytes   content
    9       "MMIDIDX\\0\\0"
    8       version, uint64: 1
    1       code of the tokens' dtype: 4 int32, 8 uint16, …
    8       S, uint64: number of sequences
    8       D, uint64: number of document boundaries, documents + 1
    4 S     length of each sequence in tokens, int32
    8 S     where each sequence begins in PREFIX.bin, in bytes, int64
    8 D     the sequence at which each document begins, int64; the first is 0, the last S

A document is one or more sequences: one for GPT, one per sentence for BERT. The index is mapped into memory, so
processes on one machine share its pages, and tokens are read on demand. Each read checks first that the index was not
truncated meanwhile: reading a missing mapped page would kill the process. Opening a dataset checks the whole index,
chunk by chunk: lengths, pointers and documents must agree with each other and with the size of PREFIX.bin, so that no
later read leaves the file or its sequence. That takes a second for a hundred million sequences; a terabyte of text
usually has fewer.

`mjax prepare` also writes PREFIX.json and the folder PREFIX.tokenizer next to them. Megatron's datasets have neither;
mjax can train on them but cannot show their text. A dataset of conversations also has PREFIX.mask: a byte for each
token of PREFIX.bin, 1 if its loss counts.

Source: Megatron-LM, core/datasets/indexed_dataset.py.
"""

import array
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from mjax.config.datasets import DatasetMetadata, metadata_file
from mjax.errors import UsageError
from mjax.utils.files import lock_folder, remove_temporary
from mjax.utils.ranges import Ranges, local_prefix
from mjax.utils.remote import RemoteFile, local_neighbor, locate, put, remove, write_whole

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries; "<" means no padding
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats: no ids
CHECK_CHUNK_SEQUENCES = 2**16  # index entries that are checked at a time: they fit a core's cache
DIGEST_SPANS, DIGEST_SPAN_TOKENS = 256, 512  # spans of tokens that a digest reads, and their length
COPY_CHUNK_TOKENS = 2**22  # tokens that a merge copies at a time


def index_file(prefix: str | Path) -> Path:
    """PREFIX.idx."""
    return locate(Path(f"{prefix}.idx"))  # not with_suffix: a prefix may hold dots


def token_file(prefix: str | Path) -> Path:
    """PREFIX.bin."""
    return locate(Path(f"{prefix}.bin"))


def mask_file(prefix: str | Path) -> Path:
    """PREFIX.mask."""
    return locate(Path(f"{prefix}.mask"))


def token_dtype(vocabulary: int) -> type[np.integer]:
    """Dtype in which Megatron writes the tokens of a vocabulary: uint16 below 65,500, else int32."""
    return np.uint16 if vocabulary < 65500 else np.int32


# --- Reading ----------------------------------------------------------------------------------------------------------


class IndexedDataset:
    """Read-only view of PREFIX.bin and PREFIX.idx; `len()` is the number of sequences.

    Attributes:
      lengths: tokens in each sequence, int32 [S].
      pointers: byte at which each sequence begins, int64 [S].
      document_indices: sequence at which each document begins, then S, int64 [documents + 1].
      dtype: dtype of the tokens on disk.
      tokens: number of tokens.
      has_mask: True if there is a PREFIX.mask.

    Raises:
      UsageError: a file is missing, invalid or truncated, or has no tokens.
    """

    def __init__(self, prefix: str | Path):
        self.prefix = prefix = local_prefix(str(prefix))
        for file in (token_file(prefix), index_file(prefix)):
            if not file.is_file():
                raise UsageError(_describe_missing(prefix, file))
        sequences, self.dtype = _read_header(index_file(prefix))

        with index_file(prefix).open("rb") as stream:
            self._index = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        index = np.frombuffer(self._index, np.uint8)
        fields = np.split(index[HEADER.size :], np.cumsum([4 * sequences, 8 * sequences]))
        self.lengths = fields[0].view("<i4")
        self.pointers = fields[1].view("<i8")
        self.document_indices = fields[2].view("<i8")
        _check_documents(index_file(prefix), self.document_indices, sequences)
        data_bytes = _check_pointers(index_file(prefix), self.lengths, self.pointers, self.dtype.itemsize)
        _check_size(token_file(prefix), data_bytes)
        if data_bytes == 0:
            raise UsageError(f"{token_file(prefix)} has no tokens; prepare it again from files with text")
        self._stream = token_file(prefix).open("rb", buffering=0)
        self._ranges = Ranges.from_file(token_file(prefix)), Ranges.from_file(mask_file(prefix))
        self.tokens = data_bytes // self.dtype.itemsize
        self.has_mask = mask_file(prefix).is_file()
        if self.has_mask:
            self._mask = mask_file(prefix).open("rb", buffering=0)
            _check_size(mask_file(prefix), self.tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the sequences' lengths, in hexadecimal: the order of samples depends on nothing else."""
        return hashlib.sha256(self.lengths).hexdigest()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the index and of tokens across the file, in hexadecimal: identifies the dataset.

        It reads `DIGEST_SPANS` spans of tokens, so that a terabyte takes a moment; a small dataset is read whole.
        """
        digest = hashlib.sha256(f"{self.dtype.str} {self.fingerprint}".encode())
        digest.update(self.document_indices)
        starts = np.linspace(0, max(self.tokens - DIGEST_SPAN_TOKENS, 0), DIGEST_SPANS, dtype=np.int64)
        for remote, size in zip(self._ranges, (self.dtype.itemsize, 1), strict=True):
            if remote is not None:  # fetch all spans together
                ends = np.minimum(starts + DIGEST_SPAN_TOKENS, self.tokens)
                remote.need(list(zip((starts * size).tolist(), (ends * size).tolist(), strict=True)))
        for start in np.unique(starts).tolist():
            ranges = [(start, min(start + DIGEST_SPAN_TOKENS, self.tokens))]
            digest.update(self._read(ranges))
            digest.update(self._read(ranges, masks=True) if self.has_mask else b"")
        return digest.hexdigest()

    def get(self, index: int) -> np.ndarray:
        """Tokens of a sequence; `dtype` [length].

        Raises:
          IndexError: there is no such sequence.
          UsageError: a file has been cut short since it was opened.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which has {len(self)}")
        self._check_index()
        return self.read_span(np.array([index]), 0, int(self.lengths[index]))

    def loss_mask(self, index: int) -> np.ndarray:
        """True for the tokens of a sequence whose loss counts; bool [length]. Errors as in `get`."""
        begin = int(self.pointers[index]) // self.dtype.itemsize
        return self._read([(begin, begin + int(self.lengths[index]))], masks=True).astype(bool)

    def read_span(self, sequences: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Tokens of `sequences` [n ≥ 1], concatenated, from token `begin` of the first up to `end` of the last.

        Raises:
          UsageError: a file has been cut short since it was opened.
        """
        self._check_index()
        starts = self.pointers[sequences] // self.dtype.itemsize  # [n], token positions in the file
        stops = starts + self.lengths[sequences]
        stops[-1] = starts[-1] + end
        starts[0] += begin
        return self._read(list(zip(starts.tolist(), stops.tolist(), strict=True)))

    def _read(self, ranges: list[tuple[int, int]], masks: bool = False) -> np.ndarray:
        """Tokens of the file in these ranges, concatenated; or their loss mask."""
        stream, dtype = (self._mask, np.dtype(np.uint8)) if masks else (self._stream, self.dtype)
        spans: list[list[int]] = []  # adjacent ranges are merged and read in one call
        for begin, end in ranges:
            if spans and spans[-1][1] == begin:
                spans[-1][1] = end
            else:
                spans.append([begin, end])
        size, filled = dtype.itemsize, 0
        if (remote := self._ranges[masks]) is not None:
            remote.need([(begin * size, end * size) for begin, end in spans])
        tokens = np.empty(sum(end - begin for begin, end in spans), dtype)
        buffer = memoryview(tokens.view(np.uint8))
        for begin, end in spans:
            position, stop = begin * size, filled + (end - begin) * size
            while filled < stop:  # the system may read less than requested
                size_read = os.preadv(stream.fileno(), [buffer[filled:stop]], position)
                if not size_read:
                    raise _cut_short(Path(stream.name))
                filled, position = filled + size_read, position + size_read
        return tokens

    def _check_index(self) -> None:
        if self._index.size() < len(self._index):  # size of the file now, and when it was mapped
            raise _cut_short(index_file(self.prefix))


def _cut_short(file: Path) -> UsageError:
    return UsageError(f"{file} was cut short while it was read; copy or prepare it again")


def _damage_error(file: Path, problem: str) -> UsageError:
    return UsageError(f"{file} is damaged: {problem}; copy or prepare it again")


def _check_size(file: Path, expected_bytes: int) -> None:
    """Check that a file has the bytes that the index describes."""
    if (size := file.stat().st_size) != expected_bytes:
        problem = f"is {size:,} bytes and its index describes {expected_bytes:,}"
        raise UsageError(f"{file} {problem}; copy or prepare both again")


DEMOS = {"data/demo": "", "data/bert_demo": " --tokenizer bert-uncased --split-sentences --no-append-eod"}
"""Datasets of configs/, with the flags of `mjax prepare --demo` that make each."""


def _describe_missing(prefix: str, file: Path) -> str:
    """The sentence about a dataset without `file`, which is one of its files."""
    if prefix.endswith((".bin", ".idx")):
        return f"{file} does not exist; give the prefix without the ending: {prefix[:-4]}"
    if Path(prefix).is_file():
        return f"{prefix} is not a dataset; type `mjax prepare {prefix} --output data/NAME`, and give data/NAME"
    prepare = f"`mjax prepare FILES --output {prefix}`"
    if prefix in DEMOS:
        demo = f"`mjax prepare --demo --output {prefix}{DEMOS[prefix]}`"
        return f"{prefix} is not prepared; type {demo}, or use your own text: {prepare}"
    return f"{prefix} is not prepared, {file} does not exist; type {prepare}"


def _read_header(file: Path) -> tuple[int, np.dtype]:
    """Number of sequences and dtype of the tokens, after a check of the file's size."""
    with file.open("rb") as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC):
        fix = "give a prefix that `mjax prepare` or Megatron's preprocess_data wrote"
        raise UsageError(f"{file} is not an indexed dataset's .idx file: it begins with {header[:9]!r}; {fix}")
    _, version, code, sequences, boundaries = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    size, expected = file.stat().st_size, HEADER.size + 12 * sequences + 8 * boundaries
    if len(header) < HEADER.size or boundaries == 0 or size < expected:
        raise _damage_error(file, f"it is cut short after {size:,} bytes")
    if version != VERSION or code not in DTYPES or size > expected:
        fix = f"mjax reads version {VERSION} and codes {', '.join(map(str, DTYPES))}: prepare its text again"
        problem = f"version {version}, dtype code {code} and {size - expected:,} bytes too many"
        raise UsageError(f"{file} has {problem}, like multimodal ones; {fix}")
    return sequences, np.dtype(DTYPES[code]).newbyteorder("<")


def _check_documents(file: Path, boundaries: np.ndarray, sequences: int) -> None:
    """Check that documents begin at 0, never before the previous one, and end with the last sequence."""
    if boundaries[0] != 0 or boundaries[-1] != sequences:
        raise _damage_error(file, f"its documents cover sequences {boundaries[0]} to {boundaries[-1]} of {sequences}")
    for start in range(0, len(boundaries), CHECK_CHUNK_SEQUENCES):
        chunk = boundaries[start : start + CHECK_CHUNK_SEQUENCES + 1]  # with the first of the next
        backwards = chunk[1:] < chunk[:-1]
        if backwards.any():
            raise _damage_error(file, f"document {start + int(np.argmax(backwards))} ends before it begins")


def _check_pointers(file: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Check that each sequence begins where the previous one ends, and return the bytes of all."""
    end = 0
    for start in range(0, len(lengths), CHECK_CHUNK_SEQUENCES):
        sizes = lengths[start : start + CHECK_CHUNK_SEQUENCES].astype(np.int64)
        sizes *= itemsize  # [PIECE], in bytes
        begins = pointers[start : start + CHECK_CHUNK_SEQUENCES]
        # Differences may wrap around, but sums of fewer than 2^31 × 8 × sequences bytes cannot.
        follows = begins[1:] - begins[:-1] == sizes[:-1]
        if sizes.min() < 0:
            sequence = start + int(np.argmax(sizes < 0))
            raise _damage_error(file, f"sequence {sequence} has {lengths[sequence]} tokens")
        if begins[0] != end or not follows.all():
            sequence = start + (0 if begins[0] != end else 1 + int(np.argmin(follows)))
            where = f"begins at byte {pointers[sequence]:,} of the tokens, which is not where the one before it ends"
            raise _damage_error(file, f"sequence {sequence} {where}")
        end = int(begins[-1] + sizes[-1])
    return end


# --- Writing ----------------------------------------------------------------------------------------------------------


class IndexedDatasetWriter:
    """Writes an indexed dataset, a document or many at a time; tokens go to disk as they come.

    with IndexedDatasetWriter("data/corpus", vocabulary=50257) as writer:
        writer.add_document([17, 4, 50256])

    The files get their final names when the block ends, the index last, so a dataset that can be opened is complete. An
    exception in the block removes everything. An existing dataset of that name is replaced. A killed process leaves at
    most the folder PREFIX.tmp, which the next writer of that name empties.

    By default `dtype` is Megatron's for the vocabulary.

    Raises:
      UsageError: another process is writing a dataset of that name.
    """

    def __init__(self, prefix: str | Path, vocabulary: int, dtype: np.dtype | None = None):
        self.prefix, self.vocabulary, self.folder = prefix, vocabulary, working_folder(prefix)
        self.dtype = np.dtype(dtype or token_dtype(vocabulary)).newbyteorder("<")
        self.lengths = array.array("i")  # 4 and 8 bytes an item: a billion documents fit
        self.document_indices = array.array("q", [0])
        self._masks: BinaryIO | None = None

    def __enter__(self) -> "IndexedDatasetWriter":
        self._lock = lock_folder(self.folder, str(self.prefix))
        self._lock.truncate(0)
        for file in self.folder.iterdir():  # of a process that was killed
            if file.name != "plan.json":
                remove(file)
        self._stream = (self.folder / "bin").open("wb")
        return self

    def add_document(self, *sequences: Sequence[int] | np.ndarray) -> None:
        """Append a document of sequences of token ids, possibly none; a sequence may be empty.

        Raises:
          ValueError: a token id is negative or not below the vocabulary.
        """
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        lengths = np.array([len(tokens) for tokens in arrays], dtype=np.int32)
        tokens = np.concatenate(arrays) if arrays else np.empty(0, np.int64)
        self.add_documents(tokens, lengths, np.array([len(arrays)]))

    def add_documents(
        self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray, loss_mask: np.ndarray | None = None
    ) -> None:
        """Append many documents with a few NumPy calls.

        Args:
          tokens: token ids of all documents one after the other, integers [tokens].
          lengths: tokens in each sequence, integers [sequences].
          sequences: sequences in each document, integers [documents].
          loss_mask: for conversations, True if the loss counts, bool [tokens]; all documents have it, or none.

        Raises:
          ValueError: a token id is negative or not below the vocabulary, or the counts do not add up.
        """
        if lengths.sum() != len(tokens) or sequences.sum() != len(lengths):
            raise ValueError(f"{len(tokens)} tokens and {len(lengths)} sequences do not add up")
        check_ids(tokens, self.vocabulary)
        self._write(tokens.astype(self.dtype, copy=False), None if loss_mask is None else loss_mask.astype(np.uint8))
        self._add_index(lengths, sequences)

    def _write(self, tokens: np.ndarray, masks: np.ndarray | None) -> int:
        if masks is not None:
            self._masks = self._masks or (self.folder / "mask").open("wb")
            self._masks.write(masks.tobytes())
        return self._stream.write(tokens.tobytes())

    def add_dataset(self, dataset: IndexedDataset) -> Iterator[int]:
        """Append all documents of another dataset of the same dtype; yields the bytes of each copied chunk.

        Raises:
          UsageError: its tokens were truncated since it was opened.
        """
        for start in range(0, dataset.tokens, COPY_CHUNK_TOKENS):
            span = [(start, min(start + COPY_CHUNK_TOKENS, dataset.tokens))]
            yield self._write(dataset._read(span), dataset._read(span, masks=True) if dataset.has_mask else None)
        self._add_index(dataset.lengths, np.diff(dataset.document_indices))

    def _add_index(self, lengths: np.ndarray, sequences: np.ndarray) -> None:
        ends = np.cumsum(sequences, dtype=np.int64) + len(self.lengths)
        self.lengths.frombytes(lengths.astype(np.int32, copy=False).tobytes())
        self.document_indices.frombytes(ends.tobytes())

    def __exit__(self, exception, error, traceback) -> None:
        try:
            if exception is None:
                self._finish()
        finally:
            for stream in (self._stream, self._masks):
                if stream is not None:
                    stream.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()

    def _finish(self) -> None:
        self._stream.flush()
        lengths, ends = np.asarray(self.lengths), np.asarray(self.document_indices)[1:]
        shape = DatasetSize(len(ends), len(lengths), int(lengths.sum(dtype=np.int64)))
        write_index_part(self.folder / "idx", self.dtype, DatasetSize(), shape, lengths, ends)
        remove(index_file(self.prefix))  # so that an old index never describes the new tokens
        remove(mask_file(self.prefix))
        put(self.folder / "bin", token_file(self.prefix))
        if self._masks is not None:
            self._masks.flush()
            put(self.folder / "mask", mask_file(self.prefix))
        put(self.folder / "idx", index_file(self.prefix))


class DatasetSize(NamedTuple):
    """Numbers of documents, sequences and tokens in a dataset or a part of it."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0


def write_index_part(
    file: Path, dtype: np.dtype, offset: DatasetSize, total: DatasetSize, lengths: np.ndarray, document_ends: np.ndarray
) -> None:
    """Write a part of an index into `file`, which may have other parts.

    Args:
      file: created if missing.
      dtype: of the tokens.
      offset: size of the parts before this one.
      total: size of all parts.
      lengths: tokens of each sequence of the part.
      document_ends: index in the part of the sequence after each document.
    """
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    begins = offset.tokens + np.cumsum(lengths, dtype="<i8") - lengths
    pointers = HEADER.size + 4 * total.sequences
    documents = pointers + 8 * total.sequences
    arrays = [
        (HEADER.size + 4 * offset.sequences, lengths.astype("<i4")),
        (pointers + 8 * offset.sequences, (begins * dtype.itemsize).astype("<i8")),
        (documents, np.zeros(1, "<i8")),  # the first document begins with sequence 0
        (documents + 8 * (offset.documents + 1), (document_ends + offset.sequences).astype("<i8")),
    ]
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, code, total.sequences, total.documents + 1))
        for position, values in arrays:
            stream.seek(position)
            stream.write(values.tobytes())


def check_ids(tokens: np.ndarray, vocabulary: int) -> None:
    """Check ids before a cast to fewer bits, which would wrap around.

    Raises:
      ValueError: an id is negative or not below the vocabulary.
    """
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise ValueError(f"token ids {tokens.min()} to {tokens.max()} do not fit a vocabulary of {vocabulary}")


def working_folder(prefix: str | Path) -> Path:
    """PREFIX.tmp: the files of a dataset until it is complete."""
    return Path(f"{local_neighbor(prefix)}.tmp")


# --- Metadata and tokenizer next to a dataset -------------------------------------------------------------------------


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer."""
    return locate(Path(f"{prefix}.tokenizer"))


def digest_folder(folder: Path) -> str:
    """SHA-256 of the files in a folder, such as a tokenizer's, and of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


# --- Final names of a dataset's files ---------------------------------------------------------------------------------


def dataset_files(prefix: str | Path) -> list[Path]:
    """All files of a dataset: tokens, index, metadata, the tokenizer's folder, and for conversations the mask."""
    masks = [mask_file(prefix)] * mask_file(prefix).exists()
    return [token_file(prefix), index_file(prefix), metadata_file(prefix), tokenizer_folder(prefix), *masks]


def temporary_tokenizer(prefix: str | Path) -> Path:
    """Folder of a dataset's tokenizer until the dataset is complete."""
    return working_folder(prefix) / "new-tokenizer"


def check_output(prefix: str, overwrite: bool) -> None:
    """Check that a dataset may be written under `prefix`.

    Files of a killed run may be replaced: the working folder exists, and no index.

    Raises:
      UsageError: `prefix` is not a valid prefix, the dataset exists and `overwrite` is not set, or a store rejects
        it.
    """
    if prefix.endswith(("/", ".bin", ".idx")) or Path(prefix).is_dir():
        raise UsageError(f"{prefix} is not a prefix; give one such as data/corpus, to which .bin and .idx are added")
    if isinstance(output := locate(Path(prefix)), RemoteFile):
        output.check_writable()
    unfinished = working_folder(prefix).exists() and not index_file(prefix).exists()
    existing = [str(file) for file in dataset_files(prefix) if file.exists()]
    if existing and not overwrite and not unfinished:
        raise UsageError(f"{existing[0]} exists; choose another name, or add --overwrite to replace the dataset")


def publish_metadata(prefix: str | Path, metadata: DatasetMetadata | None) -> None:
    """Give the metadata and the temporary tokenizer their final names, replacing an older dataset's files.

    Call it when the tokens are written but not yet renamed: it removes an old dataset, and the index, which makes the
    new one readable, is renamed last. With None the new dataset has neither metadata nor tokenizer.
    """
    remove(index_file(prefix))
    remove(tokenizer_folder(prefix))
    if metadata is None:
        remove(metadata_file(prefix))
        return
    put(temporary_tokenizer(prefix), tokenizer_folder(prefix))
    write_metadata(prefix, metadata)


def write_metadata(prefix: str | Path, metadata: DatasetMetadata) -> None:
    """Write PREFIX.json, atomically."""
    file = metadata_file(prefix)
    if not isinstance(file, RemoteFile):
        remove_temporary(file.parent, file.name)
    values = json.dumps(dataclasses.asdict(metadata), indent=2, ensure_ascii=False)
    write_whole(file, f"{values}\n")
