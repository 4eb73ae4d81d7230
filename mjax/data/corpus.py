"""Where text comes from: files of the user's, read document by document.

- A .txt file is one document (a book, a speech) in UTF-8, or several by a rule (`splitting.py`); line ends become
  "\\n". It is read whole. So are .md, .py and other files of text.
- A .jsonl file is one document a line, `{"text": "…"}`, and is read block by block however large it is.
- Both may be compressed: .gz and .zst.
- A .parquet file is one document a row; the package pyarrow reads it.

A line that is not what it should be stops the reading, or is skipped and counted, with the first ones kept as examples.
"""

import glob
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from mjax.data.blocks import KINDS, MOST_BYTES, OTHER_TEXT, Block, kind_of, raw_lines, read_blocks
from mjax.data.splitting import check_rule, split_documents
from mjax.errors import UsageError

EXAMPLES = 5  # malformed lines that are kept to show


class Document(NamedTuple):
    """One text and where it came from."""

    text: str
    size: int
    """Bytes of the input file it took; of a compressed file, its share of the compressed."""
    source: str
    """FILE:LINE, or FILE where the file is the document; of one that is cut into several, the first line."""
    fields: dict[str, Any] | None
    """The JSON object or the Parquet row; None for a .txt file."""


class Malformed(NamedTuple):
    """A line, row or file that holds no text."""

    source: str
    """FILE:LINE, or FILE."""
    reason: str
    """What is wrong with it and what is expected."""

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}"


@dataclass
class MalformedLines:
    """What to do with malformed lines, and what was met.

    Raises:
      UsageError: on adding one where they are to stop the reading: names file and line.
    """

    policy: Literal["stop", "skip"]
    count: int = 0
    examples: list[str] = field(default_factory=list)
    """The first ones, as FILE:LINE: reason."""

    def add(self, message: str) -> None:
        """Note one malformed line."""
        if self.policy == "stop":
            raise UsageError(f"{message}; mend it, or leave such lines out with --malformed skip")
        self.count += 1
        self.examples += [message] if len(self.examples) < EXAMPLES else []

    def clear(self) -> None:
        """Begin to count again, as each reading of a corpus does."""
        self.count, self.examples = 0, []


class Corpus(Protocol):
    """Documents that can be read again and again, in the same order."""

    names: list[str]
    """What is read, for the record."""
    size: int
    """Bytes of input in all."""
    key: str
    """Field that holds the text."""
    malformed: MalformedLines
    """Filled anew by each iteration."""

    def blocks(self) -> Iterator[Block]:
        """The input as raw pieces, which `parse` turns into documents."""

    def __iter__(self) -> Iterator[Document]:
        """All documents."""


class TextFiles:
    """The documents of files, in the order given; `key` names the text of a JSON line or a Parquet row.

    With `all_fields` a Parquet file's documents carry all of their row, else the text alone. `malformed` says whether a
    malformed line stops the reading or is skipped and counted in the attribute of that name, as is a document of more
    than `most` bytes. `split` is the rule by which files of text are cut into documents; None leaves them whole.

    Raises:
      UsageError: a file is missing or of no known type; on reading, a file is damaged or a line malformed.
    """

    def __init__(
        self,
        files: Sequence[Path],
        key: str = "text",
        malformed: Literal["stop", "skip"] = "stop",
        all_fields: bool = True,
        split: str | None = None,
        most: int = MOST_BYTES,
    ):
        if split is not None:
            check_rule(split)
        if most < 1:
            raise UsageError(f"--max-document-bytes is {most}; it must be at least 1")
        for file in files:
            if not file.is_file():
                raise UsageError(f"there is no file {file}; give .txt, .jsonl or .parquet files, a folder or a pattern")
            if not kind_of(file):
                raise UsageError(
                    f'{file} is neither .txt (one document) nor .jsonl (one document a line, {{"{key}": "…"}}), plain, '
                    f".gz or .zst, nor .parquet, nor other text ({', '.join(OTHER_TEXT)}); convert or rename it"
                )
        if split is not None and files and all(kind_of(file).startswith((".jsonl", ".parquet")) for file in files):
            raise UsageError(
                f"--split-documents is for files of text, and {files[0]} has its own documents; leave it out"
            )
        self.files, self.key, self.all_fields, self.split, self.most = files, key, all_fields, split, most
        self.malformed = MalformedLines(malformed)
        self.names = [str(file) for file in files]
        self.size = sum(file.stat().st_size for file in files)

    def blocks(self) -> Iterator[Block]:
        """The files as raw pieces, in order."""
        for file in self.files:
            for block in read_blocks(file, self.key, self.all_fields, self.most):
                yield replace(block, split=self.split)

    def __iter__(self) -> Iterator[Document]:
        return documents_of(self)


def documents_of(corpus: Corpus) -> Iterator[Document]:
    """All documents of a corpus; its malformed lines are counted, or stop the reading."""
    corpus.malformed.clear()
    for block in corpus.blocks():
        for item in parse(block, corpus.key):
            if isinstance(item, Malformed):
                corpus.malformed.add(str(item))
            else:
                yield item


# --- Naming files -----------------------------------------------------------------------------------------------------


def find_files(inputs: Sequence[Path]) -> list[Path]:
    """Files that are meant: each input is a file, a folder, or a pattern that the shell left alone, such as '*.jsonl'.

    Inputs keep their order. The files of a pattern, and those of a folder that have a known ending, at any depth, are
    sorted by their path, so the same command reads the same documents in the same order everywhere. Of a folder that
    holds .jsonl, .txt or .parquet files these are meant, and not the README.md beside them.

    Raises:
      UsageError: nothing matches, or a file is meant twice.
    """
    found: list[Path] = []
    for given in inputs:
        if given.is_dir():
            inside = sorted(file for file in given.rglob("*") if file.is_file() and kind_of(file))
            inside = [file for file in inside if kind_of(file) in KINDS] or inside
            if not inside:
                raise UsageError(
                    f"the folder {given} holds no {', '.join(KINDS[:-1])} or {KINDS[-1]} file, nor other text such as "
                    ".md; name another"
                )
            found += inside
        elif not given.exists() and glob.has_magic(str(given)):
            matching = sorted(Path(name) for name in glob.glob(str(given), recursive=True) if Path(name).is_file())
            if not matching:
                raise UsageError(f"no file matches {given}; give another pattern, or files by name")
            found += matching
        else:
            found.append(given)
    twice = [file for file, times in Counter(found).items() if times > 1]
    if twice:
        raise UsageError(f"{twice[0]} is given twice, and would be read twice; leave one out")
    return found


# --- From raw pieces to documents -------------------------------------------------------------------------------------


def parse(block: Block, key: str) -> Iterator[Document | Malformed]:
    """The documents of a block, and what is malformed in it."""
    if block.too_large:
        source = f"{block.file}:{block.first}" if block.first else block.file
        yield Malformed(source, _too_large(block.most))
    elif isinstance(block.content, list):
        share = block.size / max(len(block.content), 1)
        for number, row in enumerate(block.content, start=block.first):
            found = _from_fields(row, key, f"{block.file}:{number}", round(share))
            large = isinstance(found, Document) and len(found.text) > block.most
            yield Malformed(found.source, _too_large(block.most)) if large else found
    elif block.first == 0:
        document = _from_text(block)
        if block.split is None or isinstance(document, Malformed):
            yield document
            return
        parts = split_documents(document.text, block.split)
        for line, text in parts:
            yield Document(text, block.size // len(parts), f"{block.file}:{line}", None)
    else:
        share = block.size / len(block.content)  # 1 but for compressed files
        for number, line in raw_lines(block):
            source = f"{block.file}:{number}"
            if len(line) > block.most:
                yield Malformed(source, _too_large(block.most))
            else:
                yield _from_line(line, key, source, round(len(line) * share))


def _from_line(line: bytes, key: str, source: str, size: int) -> Document | Malformed:
    expected = _expected(key)
    try:
        values = json.loads(line)
    except ValueError as error:  # malformed JSON or UTF-8
        return Malformed(source, f"{error}; {expected}")
    except RecursionError:
        return Malformed(source, f"brackets are nested too deeply; {expected}")
    if not isinstance(values, dict):
        shown = line[:40].decode(errors="replace").strip()
        return Malformed(source, f"{shown} is not an object; {expected}")
    return _from_fields(values, key, source, size)


def _from_fields(values: dict[str, Any], key: str, source: str, size: int) -> Document | Malformed:
    if key not in values:
        there = ", ".join(map(repr, values)) or "none"
        return Malformed(source, f"there is no key {key!r}, only {there}; name the one that holds the text with --key")
    text = values[key]
    if not isinstance(text, str):
        return Malformed(source, f"{key!r} holds {text!r:.40}, which is not text; {_expected(key)}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return Malformed(source, f"character {error.start} is half of a surrogate pair; replace or drop it")
    return Document(text, size, source, values)


def _from_text(block: Block) -> Document | Malformed:
    try:
        text = block.content.decode("utf-8-sig")  # old Gutenberg files begin with a byte order mark
    except UnicodeDecodeError as error:
        return Malformed(block.file, f"it is not UTF-8 (byte {error.start}); convert it, for example with iconv")
    return Document(text.replace("\r\n", "\n").replace("\r", "\n"), block.size, block.file, None)


def _too_large(most: int) -> str:
    return (
        f"a document has more than {most:,} bytes; cut it into several, or allow more with the --max-document-bytes of "
        "prepare, dedup and clean"
    )


def _expected(key: str) -> str:
    return f'a JSON object such as {{"{key}": "Once upon a time"}} is expected'
