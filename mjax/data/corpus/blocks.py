"""Files as blocks: pieces of half a megabyte, one at a time for each worker.

Reading is the part of `mjax prepare` that workers cannot share: a compressed file is read from its beginning, and lines
must be found before they can be counted. So reading does nothing else: no line is parsed and no text decoded here; a
block holds raw lines and the number of the first one.

    .jsonl .txt           as they are; a .txt file is one block, and so is one of another ending of text (.md, .py, …)
    … .gz, .zst           unpacked on the way, in any number of members or frames
    .parquet              rows, of the text's column alone or of all columns

A document that is too large, such as an endless line or kilobytes of .zst that unpack to gigabytes, is skipped while it
is read, so that memory does not grow with it.
"""

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mjax.errors import UsageError
from mjax.utils.remote import RemoteFile

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

SIZE = 2**19  # bytes of lines in a block
MOST_BYTES = 2**27  # of a document, by default: a book has one million, all of enwik8 a hundred
ROWS = 256  # rows of a Parquet file in a block: a row may be a book
ENDINGS = (".jsonl", ".txt", ".jsonl.gz", ".txt.gz", ".jsonl.zst", ".txt.zst", ".parquet")
OF_ROWS = tuple(ending for ending in ENDINGS if not ending.startswith(".txt"))
"""Endings of files with one JSON object a line, or rows."""
CUT = (".jsonl", ".parquet")
"""Endings of files that tasks share: at line ends, and between row groups."""
OTHER_TEXT = (
    ".md", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go",
    ".rs", ".rb", ".sh", ".sql",
)  # fmt: skip
"""Endings of files that are read like .txt; also followed by .gz or .zst."""


@dataclass(frozen=True)
class Block:
    """A piece of one input file.

    Attributes:
      file: name of the file.
      first: number of its first line or row, from 1; 0 if the file is one document.
      size: bytes of the file it took, compressed ones for a compressed file.
      content: raw lines, the raw document, or rows; None for a document that is too large.
      split: rule that splits a raw document (`--split-documents`).
      most: largest size of a document, in bytes.
    """

    file: str
    first: int
    size: int
    content: bytes | list[dict] | None
    split: str | None = None
    most: int = MOST_BYTES


def ending_of(file: Path) -> str | None:
    """The known ending of `file`, out of ENDINGS or of other text; None if it has none."""
    text = (f"{ending}{packed}" for ending in OTHER_TEXT for packed in ("", ".gz", ".zst"))
    return next((ending for ending in (*ENDINGS, *text) if file.name.endswith(ending)), None)


def count_lines(file: Path, begin: int, end: int, advance: Callable[[int], None]) -> int:
    """Line ends in the bytes from `begin` to `end` of a file; `advance` takes the bytes of each piece."""
    lines, left = 0, end - begin
    with file.open("rb") as stream:
        stream.seek(begin)
        while left and (piece := stream.read(min(left, 8 * SIZE))):
            lines, left = lines + piece.count(b"\n"), left - len(piece)
            advance(len(piece))
    return lines


def read_blocks(
    file: Path, key: str, all_fields: bool, most: int, begin: int = 0, end: int | None = None, before: int = 0
) -> Iterator[Block]:
    """The blocks of a file in order.

    Args:
      file: any of ENDINGS.
      key, all_fields: columns of a Parquet file to read; an empty key need not be there.
      most: largest size of a document in bytes, of a line of .jsonl with all of its fields.
      begin, end: of a file of CUT: only lines or row groups that begin in these bytes.
      before: line ends before `begin`.

    Raises:
      UsageError: the file is damaged or cut short, or, of Parquet, has no column `key` or needs a missing package.
    """
    ending = ending_of(file)
    if ending == ".parquet":
        yield from _rows(file, key, all_fields, most, begin, end)
        return
    with file.open("rb") as raw:
        if ending.endswith((".gz", ".zst")) and not file.stat().st_size:
            raise UsageError(f"{file} is empty, so it is not a compressed file; fetch or compress it again")
        try:
            stream = raw
            if ending.endswith(".gz"):
                stream = gzip.GzipFile(fileobj=raw)
            elif ending.endswith(".zst"):
                stream = zstd.ZstdFile(raw)
            if ending == ".jsonl" and begin:
                raw.seek(begin - 1)
                passed = _pass_line(raw)
                before += passed > 1  # a line that began before
            ends = end if ending == ".jsonl" else None
            yield from _raw_blocks(file, raw, stream, ending.startswith(".jsonl"), most, before + 1, ends)
        except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
            raise UsageError(f"{file} is damaged or cut short ({error}); fetch or compress it again") from None


def _raw_blocks(
    file: Path, raw: BinaryIO, stream: BinaryIO, lines: bool, most: int, number: int, end: int | None
) -> Iterator[Block]:
    if not lines:
        content = _at_most(stream, most + 1)
        yield Block(str(file), 0, file.stat().st_size, None if len(content) > most else content, most=most)
        return
    position = raw.tell()
    while content := stream.read(SIZE if end is None else max(min(SIZE, end - position), 0)):
        rest = b"" if content.endswith(b"\n") else stream.readline(most + 1)  # up to the end of the line
        too_large = len(rest) > most  # `parse` handles shorter ones
        content = content[: content.rfind(b"\n") + 1] if too_large else content + rest
        ended = rest.endswith(b"\n")
        del rest
        if content:
            yield Block(str(file), number, raw.tell() - position, content, most=most)
            number, position = number + content.count(b"\n"), raw.tell()
        if too_large:
            yield Block(str(file), number, raw.tell() - position, None, most=most)
            position = raw.tell()
            if not ended:
                _pass_line(stream)
            position = raw.tell() if end is not None else position
            number += 1


def _pass_line(stream: BinaryIO) -> int:
    """Pass the rest of a line; returns its bytes."""
    size = 0
    while passed := stream.readline(SIZE):
        size += len(passed)
        if passed.endswith(b"\n"):
            break
    return size


def _at_most(stream: BinaryIO, size: int) -> bytes:
    """Up to `size` more bytes; `read(size)` of some streams allocates all of `size`, however little is left."""
    pieces, left = [], size
    while left and (piece := stream.read(min(left, SIZE))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _rows(file: Path, key: str, all_fields: bool, most: int, begin: int, end: int | None) -> Iterator[Block]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise UsageError(
            f"{file} needs the package pyarrow (55 MB), which is not installed; type: python -m pip install pyarrow"
        ) from None
    size = file.stat().st_size
    try:
        source = file.open("rb") if isinstance(file, RemoteFile) else file
        with parquet.ParquetFile(source, page_checksum_verification=True) as table:
            names = table.schema_arrow.names
            if key and key not in names:
                there = ", ".join(map(repr, names)) or "none"
                raise UsageError(f"{file}: there is no column {key!r}, only {there}; name the text's column with --key")
            rows = table.metadata.num_rows
            first = 0
            for group in range(table.metadata.num_row_groups):
                after = first + table.metadata.row_group(group).num_rows
                if begin <= size * first // max(rows, 1) < (size if end is None else end):
                    for batch in table.iter_batches(ROWS, [group], columns=None if all_fields else [key]):
                        share = size * (first + len(batch)) // rows - size * first // rows
                        yield Block(str(file), first + 1, share, batch.to_pylist(), most=most)
                        first += len(batch)
                first = after
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{file} is damaged or cut short ({reason}); fetch or write it again") from None
