"""What `mjax dedup` and `mjax clean` leave behind: the documents that stay, and the story of those that went.

    OUTPUT.jsonl           the documents that stay, in the order they came
    OUTPUT.removed.jsonl   a line for each that went: where it came from and why
    OUTPUT.report.json     how many documents and bytes each step took, with examples

All three are written into the folder OUTPUT.jsonl.tmp and get their names when everything is done, OUTPUT.jsonl last:
if it is there, it is whole. What a killed run leaves of the others, the next run replaces. The same input gives the
same bytes, whatever the number of workers.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import filesize
from rich.console import Console
from rich.table import Table

from mjax import __version__
from mjax.data.atomic import put
from mjax.data.blocks import Block
from mjax.data.corpus import Corpus, Document
from mjax.errors import RunError, UsageError
from mjax.progress import progress

EXAMPLES = 10  # of each step, in the report
SHOWN = 200  # characters of a text in an example


@dataclass
class Tally:
    """How many documents and bytes of UTF-8 text a step has taken, and some of them."""

    name: str
    documents: int = 0
    bytes: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: str, /, **example: Any) -> None:
        """Count one document; an `example` is kept while there are few."""
        self.documents += 1
        self.bytes += len(text.encode())
        if example and len(self.examples) < EXAMPLES:
            self.examples.append(example)

    def merge(self, later: "Tally") -> None:
        """Add what another worker has counted in the documents that follow."""
        self.documents += later.documents
        self.bytes += later.bytes
        self.examples += later.examples[: EXAMPLES - len(self.examples)]


class CleanedFiles:
    """Writes the three files of a run. Use as a context; without `finish` nothing gets its final name.

    Raises:
      UsageError: `output` does not end in .jsonl, exists (unless `overwrite`), or is one of `inputs`.
      RunError: the files cannot be written.
    """

    def __init__(self, output: Path, inputs: Sequence[Path], overwrite: bool):
        if output.suffix != ".jsonl":
            raise UsageError(f"--output {output} is not a .jsonl file; give one such as {output.with_suffix('.jsonl')}")
        self.output, self.removed_file, self.report_file = output_files(output)
        for file in (self.output, self.removed_file, self.report_file):
            if any(file.resolve() == one.resolve() for one in inputs):
                raise UsageError(f"--output {output} would write {file}, which is read; choose another --output")
        if output.exists() and not overwrite:
            raise UsageError(f"{output} exists; choose another --output, or add --overwrite to replace it")
        self.folder = Path(f"{output}.tmp")

    def __enter__(self) -> "CleanedFiles":
        try:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
            self.folder.mkdir(parents=True)
            self._kept = (self.folder / "kept").open("wb")
            self._removed = (self.folder / "removed").open("wb")
        except OSError as error:
            raise RunError(f"{self.output} cannot be written: {error}") from error
        return self

    def __exit__(self, kind, error, trace) -> None:
        for file in (self._kept, self._removed):
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"writing {self.output} stopped: {error}; nothing was left under that name") from error

    def keep(self, lines: bytes) -> None:
        """Write documents that stay, each as `document_line` gives it."""
        self._kept.write(lines)

    def remove(self, lines: bytes) -> None:
        """Write the story of documents that do not stay, each as `json_line` of source, reason and details."""
        self._removed.write(lines)

    def finish(self, story: dict[str, Any], corpus: Corpus) -> dict[str, Any]:
        """Give the files their names; returns the report, which is `story` and what else there is to say."""
        malformed = {"documents": corpus.malformed.count, "examples": corpus.malformed.examples}
        report = _plain({**story, "malformed": malformed, "output": str(self.output), "mjax_version": __version__})
        (self.folder / "report").write_bytes(report_text(report).encode())
        for file in (self._kept, self._removed):
            file.close()
        for name, file in (("report", self.report_file), ("removed", self.removed_file), ("kept", self.output)):
            put(self.folder / name, file)
        return report


def output_files(output: Path) -> tuple[Path, Path, Path]:
    """The documents that stay, the list of those that went, and the report."""
    return output, output.with_suffix(".removed.jsonl"), output.with_suffix(".report.json")


def document_line(document: Document, key: str, **changes: Any) -> bytes:
    """A document that stays, with all its fields; `changes` replace or add some."""
    return json_line({**(document.fields or {}), key: document.text, **changes})


def json_line(values: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8; what JSON cannot say, such as a date of a Parquet file, becomes text."""
    line = json.dumps(values, ensure_ascii=False, default=str)
    try:
        return f"{line}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair in another field: \\ud83d is all that JSON can write
        return f"{json.dumps(values, default=str)}\n".encode()


def report_text(report: dict[str, Any]) -> str:
    """The report as it stands in the file and as --json prints it."""
    return json.dumps(report, indent=2, ensure_ascii=False, default=str).encode(errors="replace").decode() + "\n"


# --- What a person sees -----------------------------------------------------------------------------------------------


def watched_blocks(corpus: Corpus, verb: str) -> Iterator[Block]:
    """The blocks of a corpus, under a progress bar."""
    with progress(verb, corpus.size) as advance:
        for block in corpus.blocks():
            yield block
            advance(block.size)


def excerpt(text: str, start: int = 0) -> str:
    """What an example shows of a text: some characters from `start` on."""
    end = start + SHOWN
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def where_they_differ(one: str, other: str) -> tuple[str, str]:
    """Excerpts of two texts from shortly before their first difference."""
    shorter = min(len(one), len(other))
    same = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    start = 0 if same < SHOWN // 2 else same - SHOWN // 4
    return excerpt(one, start), excerpt(other, start)


def show(output: Path, report: dict[str, Any], seconds: float, remarks: Iterable[str]) -> None:
    """Print what a run of `seconds` has done, with `remarks` of the command, and where its story is."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{output} is ready after {seconds:.1f} s", markup=False)
    console.print(_table(report))
    for remark in remarks:
        console.print(f"\n{remark}", markup=False)
    malformed = report["malformed"]
    if malformed["documents"]:
        console.print(f"\n{malformed['documents']:,} malformed lines were skipped, the first ones:")
        for line in malformed["examples"]:
            console.print(f"  {line}", markup=False)
    _, removed, summary = output_files(output)
    console.print(f"\nWhat went, line by line: {removed}\nCounts and examples:     {summary}", markup=False)


def _table(report: dict[str, Any]) -> Table:
    """Documents and bytes: read, changed or removed by each step, kept."""
    table = Table.grid(padding=(0, 2))
    for style, justify in (("bold", "left"), (None, "right"), (None, "right"), ("dim", "right")):
        table.add_column(style=style, justify=justify)
    rows = [(report["read"], ""), *((step, "") for step in report.get("changed", ()))]
    rows += [*((step, "− ") for step in report["removed"]), (report["kept"], "= ")]
    for tally, sign in rows:
        share = tally["documents"] / max(report["read"]["documents"], 1)
        bytes_of_text = filesize.decimal(tally["bytes"])
        table.add_row(sign + tally["name"], f"{tally['documents']:,} documents", bytes_of_text, f"{share:.1%}")
    return table


def _plain(value: Any) -> Any:
    """Tallies as plain JSON objects."""
    if isinstance(value, Tally):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value
