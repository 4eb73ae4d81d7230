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
processes on one machine share its pages, and tokens are read on demand. A file that is cut short meanwhile is noticed
before it is read: reading mapped pages that are gone would kill the process. Opening a dataset checks the whole index,
piece by piece: lengths, pointers and documents must agree with each other and with the size of PREFIX.bin, so that no
later read leaves the file or its sequence. That takes a second for a hundred million sequences; a terabyte of text
usually has fewer.

`mjax prepare` also writes PREFIX.json and the folder PREFIX.tokenizer next to them. Megatron's datasets have neither;
mjax can train on them but cannot show their text. A dataset of conversations also has PREFIX.mask: a byte for each
token of PREFIX.bin, 1 if the model is trained to write it.

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
PIECE = 2**16  # sequences whose index entries are checked at a time: they fit a core's cache
SAMPLED, SAMPLED_TOKENS = 256, 512  # runs of tokens that a digest reads, and their length
COPIED = 2**22  # tokens that a merge copies at a time


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
      masked: whether there is a PREFIX.mask.

    Raises:
      UsageError: a file is missing, invalid, cut short, or has no tokens.
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
        described = _check_pointers(index_file(prefix), self.lengths, self.pointers, self.dtype.itemsize)
        _check_size(token_file(prefix), described)
        if described == 0:
            raise UsageError(f"{token_file(prefix)} has no tokens; prepare it again from files with text")
        self._stream = token_file(prefix).open("rb", buffering=0)
        self._ranges = Ranges.from_file(token_file(prefix)), Ranges.from_file(mask_file(prefix))
        self.tokens = described // self.dtype.itemsize
        self.masked = mask_file(prefix).is_file()
        if self.masked:
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
        """SHA-256 of the sequences' lengths, in hexadecimal: all that the order of samples needs of the files."""
        return hashlib.sha256(self.lengths).hexdigest()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the index and of tokens from all over the file, in hexadecimal: identifies the dataset.

        The tokens are read in `SAMPLED` runs, so that a terabyte takes a moment; a small dataset is read whole.
        """
        digest = hashlib.sha256(f"{self.dtype.str} {self.fingerprint}".encode())
        digest.update(self.document_indices)
        starts = np.linspace(0, max(self.tokens - SAMPLED_TOKENS, 0), SAMPLED, dtype=np.int64)
        for stored, size in zip(self._ranges, (self.dtype.itemsize, 1), strict=True):
            if stored is not None:  # all of them at a time
                ends = np.minimum(starts + SAMPLED_TOKENS, self.tokens)
                stored.need(list(zip((starts * size).tolist(), (ends * size).tolist(), strict=True)))
        for start in np.unique(starts).tolist():
            ranges = [(start, min(start + SAMPLED_TOKENS, self.tokens))]
            digest.update(self._read(ranges))
            digest.update(self._read(ranges, masks=True) if self.masked else b"")
        return digest.hexdigest()

    def get(self, index: int) -> np.ndarray:
        """Tokens of a sequence; `dtype` [length].

        Raises:
          IndexError: there is no such sequence.
          UsageError: a file has been cut short since it was opened.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}, which holds {len(self)}")
        self._check_index()
        return self.join(np.array([index]), 0, int(self.lengths[index]))

    def mask(self, index: int) -> np.ndarray:
        """Which tokens of a sequence the model is trained to write; bool [length]. Raises as `get`."""
        begin = int(self.pointers[index]) // self.dtype.itemsize
        return self._read([(begin, begin + int(self.lengths[index]))], masks=True).astype(bool)

    def join(self, sequences: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Tokens of `sequences` [n ≥ 1], concatenated, from token `begin` of the first up to `end` of the last.

        Raises:
          UsageError: a file has been cut short since it was opened.
        """
        self._check_index()
        starts = self.pointers[sequences] // self.dtype.itemsize  # [n], as tokens of the file
        stops = starts + self.lengths[sequences]
        stops[-1] = starts[-1] + end
        starts[0] += begin
        return self._read(list(zip(starts.tolist(), stops.tolist(), strict=True)))

    def _read(self, ranges: list[tuple[int, int]], masks: bool = False) -> np.ndarray:
        """The tokens of the file in these ranges, concatenated; or their masks."""
        stream, dtype = (self._mask, np.dtype(np.uint8)) if masks else (self._stream, self.dtype)
        joined: list[list[int]] = []  # adjacent sentences are read in one call
        for begin, end in ranges:
            if joined and joined[-1][1] == begin:
                joined[-1][1] = end
            else:
                joined.append([begin, end])
        size, done = dtype.itemsize, 0
        if (stored := self._ranges[masks]) is not None:
            stored.need([(begin * size, end * size) for begin, end in joined])
        out = np.empty(sum(end - begin for begin, end in joined), dtype)
        room = memoryview(out.view(np.uint8))
        for begin, end in joined:
            position, stop = begin * size, done + (end - begin) * size
            while done < stop:  # the system may return less
                got = os.preadv(stream.fileno(), [room[done:stop]], position)
                if not got:
                    raise _cut_short(Path(stream.name))
                done, position = done + got, position + got
        return out

    def _check_index(self) -> None:
        if self._index.size() < len(self._index):  # the file now, and when it was mapped
            raise _cut_short(index_file(self.prefix))


def _cut_short(file: Path) -> UsageError:
    return UsageError(f"{file} was cut short while it was read; copy or prepare it again")


def _damage_error(file: Path, problem: str) -> UsageError:
    return UsageError(f"{file} is damaged: {problem}; copy or prepare it again")


def _check_size(file: Path, described: int) -> None:
    """Check that a file has the bytes that the index describes."""
    if (size := file.stat().st_size) != described:
        raise UsageError(f"{file} is {size:,} bytes and its index describes {described:,}; copy or prepare both again")


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
    """Number of sequences and dtype of the tokens, once the file's size agrees with its header."""
    with file.open("rb") as stream:
        header = stream.read(HEADER.size)
    if not header.startswith(MAGIC):
        fix = "give a prefix that `mjax prepare` or Megatron's preprocess_data wrote"
        raise UsageError(f"{file} is not the index of an indexed dataset: it begins with {header[:9]!r}; {fix}")
    _, version, code, sequences, boundaries = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
    size, expected = file.stat().st_size, HEADER.size + 12 * sequences + 8 * boundaries
    if len(header) < HEADER.size or boundaries == 0 or size < expected:
        raise _damage_error(file, f"it is cut short after {size:,} bytes")
    if version != VERSION or code not in DTYPES or size > expected:
        fix = f"mjax reads version {VERSION} and codes {', '.join(map(str, DTYPES))}: prepare its text again"
        odd = f"version {version}, dtype code {code} and {size - expected:,} bytes too many"
        raise UsageError(f"{file} has {odd}, like multimodal ones; {fix}")
    return sequences, np.dtype(DTYPES[code]).newbyteorder("<")


def _check_documents(file: Path, boundaries: np.ndarray, sequences: int) -> None:
    """Check that documents begin at 0, never before the previous one, and end with the last sequence."""
    if boundaries[0] != 0 or boundaries[-1] != sequences:
        raise _damage_error(file, f"its documents cover sequences {boundaries[0]} to {boundaries[-1]} of {sequences}")
    for start in range(0, len(boundaries), PIECE):
        piece = boundaries[start : start + PIECE + 1]  # with the first of the next
        backwards = piece[1:] < piece[:-1]
        if backwards.any():
            raise _damage_error(file, f"document {start + int(np.argmax(backwards))} ends before it begins")


def _check_pointers(file: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> int:
    """Bytes of all sequences; checks that each begins where the previous one ends."""
    end = 0
    for start in range(0, len(lengths), PIECE):
        sizes = lengths[start : start + PIECE].astype(np.int64)
        sizes *= itemsize  # [PIECE], in bytes
        begins = pointers[start : start + PIECE]
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
    exception in the block leaves nothing. An existing dataset of that name is replaced. A process that is killed leaves
    the folder PREFIX.tmp at most, which the next writer of that name empties.

    `dtype` is Megatron's choice for the vocabulary by default.

    Raises:
      UsageError: another process is writing a dataset of that name.
    """

    def __init__(self, prefix: str | Path, vocabulary: int, dtype: np.dtype | None = None):
        self.prefix, self.vocabulary, self.folder = prefix, vocabulary, working_folder(prefix)
        self.dtype = np.dtype(dtype or token_dtype(vocabulary)).newbyteorder("<")
        self.lengths = array.array("i")  # 4 and 8 bytes an item: a billion documents fit
        self.document_indices = array.array("q", [0])
        self.tokens = 0
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
        self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray, trained: np.ndarray | None = None
    ) -> None:
        """Append many documents with a few NumPy calls.

        Args:
          tokens: token ids of all documents one after the other, integers [tokens].
          lengths: tokens in each sequence, integers [sequences].
          sequences: sequences in each document, integers [documents].
          trained: of conversations, whether each token is trained, bool [tokens]; all documents have it, or none.

        Raises:
          ValueError: a token id is negative or not below the vocabulary, or the counts do not add up.
        """
        if lengths.sum() != len(tokens) or sequences.sum() != len(lengths):
            raise ValueError(f"{len(tokens)} tokens and {len(lengths)} sequences do not add up")
        check_ids(tokens, self.vocabulary)
        self._write(tokens.astype(self.dtype, copy=False), None if trained is None else trained.astype(np.uint8))
        self._add_index(lengths, sequences)

    def _write(self, tokens: np.ndarray, masks: np.ndarray | None) -> int:
        if masks is not None:
            self._masks = self._masks or (self.folder / "mask").open("wb")
            self._masks.write(masks.tobytes())
        return self._stream.write(tokens.tobytes())

    def add_dataset(self, dataset: IndexedDataset) -> Iterator[int]:
        """Append all documents of another dataset of the same dtype; yields bytes of tokens as they are copied.

        Raises:
          UsageError: its tokens have been cut short since it was opened.
        """
        for start in range(0, dataset.tokens, COPIED):
            part = [(start, min(start + COPIED, dataset.tokens))]
            yield self._write(dataset._read(part), dataset._read(part, masks=True) if dataset.masked else None)
        self._add_index(dataset.lengths, np.diff(dataset.document_indices))

    def _add_index(self, lengths: np.ndarray, sequences: np.ndarray) -> None:
        ends = np.cumsum(sequences, dtype=np.int64) + len(self.lengths)
        self.lengths.frombytes(lengths.astype(np.int32, copy=False).tobytes())
        self.document_indices.frombytes(ends.tobytes())
        self.tokens += int(lengths.sum(dtype=np.int64))

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
        ends = np.asarray(self.document_indices)[1:]
        shape = Shape(len(ends), len(self.lengths), self.tokens)
        put_index(self.folder / "idx", self.dtype, Shape(), shape, np.asarray(self.lengths), ends)
        remove(index_file(self.prefix))  # an old index must never meet the new tokens
        remove(mask_file(self.prefix))
        put(self.folder / "bin", token_file(self.prefix))
        if self._masks is not None:
            self._masks.flush()
            put(self.folder / "mask", mask_file(self.prefix))
        put(self.folder / "idx", index_file(self.prefix))


class Shape(NamedTuple):
    """Documents, sequences and tokens of a dataset or of a part of one."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0


def put_index(
    file: Path, dtype: np.dtype, before: Shape, whole: Shape, lengths: np.ndarray, document_ends: np.ndarray
) -> None:
    """Write a part of an index at its place in `file`, which may have other parts.

    Args:
      file: made if it is not there.
      dtype: of the tokens.
      before: what is in the parts before.
      whole: what is in all parts.
      lengths: tokens of each sequence of the part.
      document_ends: the sequence of the part after each document's last.
    """
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    ends = np.cumsum(lengths, dtype="<i8") + before.tokens
    documents = HEADER.size + 12 * whole.sequences
    pieces = [
        (HEADER.size + 4 * before.sequences, lengths.astype("<i4")),
        (HEADER.size + 4 * whole.sequences + 8 * before.sequences, ((ends - lengths) * dtype.itemsize).astype("<i8")),
        (documents, np.zeros(1, "<i8")),  # the first document begins with sequence 0
        (documents + 8 * (before.documents + 1), (document_ends + before.sequences).astype("<i8")),
    ]
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, code, whole.sequences, whole.documents + 1))
        for place, values in pieces:
            stream.seek(place)
            stream.write(values.tobytes())


def check_ids(tokens: np.ndarray, vocabulary: int) -> None:
    """Check ids before they are narrowed, which would wrap.

    Raises:
      ValueError: an id is negative or not below the vocabulary.
    """
    if tokens.size and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        raise ValueError(f"token ids {tokens.min()} to {tokens.max()} do not fit a vocabulary of {vocabulary}")


def working_folder(prefix: str | Path) -> Path:
    """PREFIX.tmp: what a dataset is made of until it is complete."""
    return Path(f"{local_neighbor(prefix)}.tmp")


# --- Metadata and tokenizer next to a dataset -------------------------------------------------------------------------


def tokenizer_folder(prefix: str | Path) -> Path:
    """PREFIX.tokenizer."""
    return locate(Path(f"{prefix}.tokenizer"))


def folder_digest(folder: Path) -> str:
    """SHA-256 of the files in a folder, such as a tokenizer's, and of their names."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()


# --- Giving a dataset its names ---------------------------------------------------------------------------------------


def dataset_files(prefix: str | Path) -> list[Path]:
    """All files of a dataset: tokens, index, metadata, the tokenizer's folder, and of conversations the mask."""
    masks = [mask_file(prefix)] * mask_file(prefix).exists()
    return [token_file(prefix), index_file(prefix), metadata_file(prefix), tokenizer_folder(prefix), *masks]


def temporary_tokenizer(prefix: str | Path) -> Path:
    """Folder of a dataset's tokenizer until the dataset is complete."""
    return working_folder(prefix) / "new-tokenizer"


def check_output(prefix: str, overwrite: bool) -> None:
    """Check that a dataset may be written under `prefix`.

    Files of a killed run do not prevent it: if there is its working folder and no index, the files are of that run.

    Raises:
      UsageError: `prefix` is not a valid prefix, the dataset exists and `overwrite` is not set, or a store refuses
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
    """Give the metadata and the temporary tokenizer their final names, replacing those of an older dataset.

    Call it when the tokens are written but not yet renamed: this removes an old dataset, and the index, which makes the
    new one readable, comes last. With None the new dataset has neither metadata nor tokenizer.
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
