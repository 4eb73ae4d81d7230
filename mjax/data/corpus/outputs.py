"""Output files of `mjax dedup` and `mjax clean`: the documents kept, and a record of those removed.

    OUTPUT.jsonl           the documents kept, in input order
    OUTPUT.removed.jsonl   a line for each document removed: where it came from and why
    OUTPUT.report.json     documents and bytes that each step removed, with examples

All three are written into the folder OUTPUT.jsonl.tmp and renamed when everything is done, OUTPUT.jsonl last: if it
exists, it is complete. After a run that was killed, the next one replaces the others. The same input gives the same
bytes, whatever the number of workers.

Tables and progress bars of the commands that read text are here too.
"""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from rich import filesize
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import TextColumn
from rich.table import Table

from mjax import __version__
from mjax.data.corpus import Corpus, Document, TextArguments
from mjax.data.corpus.blocks import Block
from mjax.data.corpus.workers import Workers
from mjax.errors import RunError, UsageError
from mjax.utils.files import put
from mjax.utils.progress import progress

Part = TypeVar("Part")

EXAMPLES = 10  # of each step, in the report
SHOWN = 200  # characters of a text in an example


@dataclass
class Tally:
    """Documents and bytes of UTF-8 text that a step has counted, with examples."""

    name: str
    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: str, /, **example: Any) -> None:
        """Count one document; the first few keep an `example`."""
        self.documents += 1
        self.bytes += len(text.encode())
        if example and len(self.examples) < EXAMPLES:
            self.examples.append(example)

    def merge(self, later: "Tally") -> None:
        """Add the counts of the documents that follow, from another worker."""
        self.documents += later.documents
        self.bytes += later.bytes
        self.examples += later.examples[: EXAMPLES - len(self.examples)]


@dataclass(frozen=True, kw_only=True)
class FilterArguments(TextArguments):
    """Flags of the commands that remove documents."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE.jsonl")]
    """File for the documents kept; FILE.removed.jsonl lists those removed, FILE.report.json counts them by reason."""


class CleanedFiles:
    """Writes the three files of a run. Use it as a context manager; without `finish` no file gets its final name.

    Attributes:
      kept: stream for the documents kept, as lines of `document_line`.
      removed: stream for the record of documents removed, lines of `json_line` with source, reason and details.
      folder: for temporary files.

    Raises:
      UsageError: `--output` does not end in .jsonl, exists (without `--overwrite`), or is one of `inputs`.
      RunError: the files cannot be written.
    """

    def __init__(self, arguments: FilterArguments, inputs: Sequence[Path]):
        self.output, self._json, self._started = arguments.output, arguments.json, time.perf_counter()
        if self.output.suffix != ".jsonl":
            possible = self.output.with_suffix(".jsonl")
            raise UsageError(f"--output {self.output} is not a .jsonl file; give one such as {possible}")
        self.removed_file = self.output.with_suffix(".removed.jsonl")
        self.report_file = self.output.with_suffix(".report.json")
        read = {file.resolve() for file in inputs}
        for file in (self.output, self.removed_file, self.report_file):
            if file.resolve() in read:
                raise UsageError(f"--output {self.output} would overwrite the input {file}; choose another --output")
        if self.output.exists() and not arguments.overwrite:
            raise UsageError(f"{self.output} exists; choose another --output, or add --overwrite to replace it")
        self.folder = Path(f"{self.output}.tmp")

    def __enter__(self) -> "CleanedFiles":
        try:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
            self.folder.mkdir(parents=True)
            self.kept = (self.folder / "kept").open("wb")
            self.removed = (self.folder / "removed").open("wb")
        except OSError as error:
            raise RunError(f"{self.output} cannot be written: {error}") from error
        return self

    def __exit__(self, kind, error, trace) -> None:
        for file in (self.kept, self.removed):
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"writing {self.output} stopped: {error}; nothing was left under that name") from error

    def finish(self, story: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
        """Give the files their names; returns the report: `story`, malformed lines, output and version."""
        malformed = {"documents": corpus.malformed.count, "examples": corpus.malformed.examples}
        text = report_text({**story, "malformed": malformed, "output": self.output, "mjax_version": __version__})
        (self.folder / "report").write_bytes(text.encode())
        for file in (self.kept, self.removed):
            file.close()
        for name, file in (("report", self.report_file), ("removed", self.removed_file), ("kept", self.output)):
            put(self.folder / name, file)
        return json.loads(text)

    def show(self, report: dict[str, Any], remarks: Iterable[str]) -> None:
        """Print the report as JSON, or as a table with the command's `remarks` and the names of the files."""
        if self._json:
            print(report_text(report), end="")
            return
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{self.output} is ready after {time.perf_counter() - self._started:.1f} s", markup=False)
        console.print(facts(_steps(report), "right"))
        for remark in remarks:
            console.print(f"\n{remark}", markup=False)
        malformed = report["malformed"]
        if malformed["documents"]:
            console.print(f"\n{malformed['documents']:,} malformed lines were skipped, the first ones:")
            for line in malformed["examples"]:
                console.print(f"  {line}", markup=False)
        console.print(f"\nRemoved documents, line by line: {self.removed_file}", markup=False)
        console.print(f"Counts and examples: {self.report_file}", markup=False)


def document_line(document: Document, key: str, **changes: Any) -> bytes:
    """A line of JSON for a document, with all its fields; `changes` replace or add some."""
    return json_line({**(document.fields or {}), key: document.text, **changes})


def json_line(values: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; values that JSON lacks, such as a date of a Parquet file, become text."""
    line = json.dumps(values, ensure_ascii=False, default=str)
    try:
        return f"{line}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair in another field, which JSON can only escape: \\ud83d
        return f"{json.dumps(values, default=str)}\n".encode()


def report_text(report: dict[str, Any]) -> str:
    """The report as the file holds it and --json prints it."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=_plain)
    return text.encode(errors="replace").decode() + "\n"


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Tally) else str(value)


# --- On the terminal --------------------------------------------------------------------------------------------------


def watched_blocks(corpus: Corpus, verb: str) -> Iterator[Block]:
    """The blocks of a corpus, under a progress bar."""
    with progress(verb, corpus.size) as advance:
        for block in corpus.blocks():
            yield block
            advance(block.size)


def first_reading(corpus: Corpus, verb: str, workers: Workers, function: Callable[..., Part]) -> Iterator[Part]:
    """Yield `function(block)` by `workers` for each block, in order, and count the `malformed` lines in it."""
    corpus.malformed.clear()
    for part in workers.map(function, watched_blocks(corpus, verb)):
        corpus.malformed.add(part.malformed)
        yield part


@contextmanager
def text_progress(verb: str, size: int) -> Iterator[Callable[[int, int, int], None]]:
    """Show progress over `size` bytes of input, with the mean rates of documents and of text.

    Yields a function to call with the bytes of input, documents and bytes of text done since the last call.
    """
    began, documents, text_bytes = time.perf_counter(), 0, 0
    with progress(verb, size, TextColumn("{task.description}")) as show:

        def advance(done: int, more_documents: int, more_text_bytes: int) -> None:
            nonlocal documents, text_bytes
            documents, text_bytes = documents + more_documents, text_bytes + more_text_bytes
            figures = speed(documents, text_bytes, time.perf_counter() - began)
            show(done, description=f"{documents:,} documents  {figures}")

        yield advance


def speed(documents: int, text_bytes: int, seconds: float) -> str:
    """'1,234 documents/s  5.6 MB/s'."""
    return f"{documents / seconds:,.0f} documents/s  {text_bytes / seconds / 1e6:.1f} MB/s"


def facts(rows: Iterable[Sequence[str]], justify: JustifyMethod = "left") -> Table:
    """A table of names, values and remarks; `justify` is for the last column."""
    rows = list(rows)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for _ in rows[0][1:-1]:
        table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def excerpt(text: str, start: int = 0) -> str:
    """Shorten a text for an example: some characters from `start` on."""
    end = start + SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Excerpts of two texts from shortly before their first difference."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
    start = 0 if same < SHOWN // 2 else same - SHOWN // 4
    return excerpt(one, start), excerpt(other, start)


def _steps(report: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Documents and bytes: read, changed or removed by each step, kept."""
    rows = [(report["read"], ""), *((step, "") for step in report.get("changed", ()))]
    rows += [*((step, "− ") for step in report["removed"]), (report["kept"], "= ")]
    for tally, sign in rows:
        share = tally["documents"] / max(report["read"]["documents"], 1)
        documents = f"{tally['documents']:,} documents"
        yield sign + tally["name"], documents, filesize.decimal(tally["bytes"]), f"{share:.1%}"
