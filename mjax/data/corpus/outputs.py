"""Output files of `mjax dedup` and `mjax clean`: the documents kept, and a record of those removed.

    OUTPUT.jsonl           the documents kept, in input order
    OUTPUT.removed.jsonl   a line for each document removed: where it came from and why
    OUTPUT.report.json     documents and bytes that each step removed, with examples

All three are written into the folder OUTPUT.jsonl.tmp and renamed, or copied to a store, when everything is done,
OUTPUT.jsonl last: if it exists, it is complete. After an interruption the same command continues. The same input
gives the same bytes, whatever the number of tasks and workers.

Tables of the commands that read text are here too.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import filesize
from rich.console import Console

from mjax import __version__
from mjax.data.corpus import Corpus, Document, MalformedLines
from mjax.data.corpus.tasks import Job
from mjax.errors import UsageError
from mjax.utils.progress import facts
from mjax.utils.remote import RemoteFile, located

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


def check_outputs(arguments: Any, inputs: Sequence[Path]) -> None:
    """Check `--output`.

    Raises:
      UsageError: it does not end in .jsonl, exists (without `--overwrite`), or is one of `inputs`.
    """
    output = located(arguments.output)
    if output.suffix != ".jsonl":
        raise UsageError(f"--output {output} is not a .jsonl file; give one such as {output.with_suffix('.jsonl')}")
    if isinstance(output, RemoteFile):
        output.check_writable()
    read = {file.resolve() for file in inputs}
    for file in output_files(output).values():
        if file.resolve() in read:
            raise UsageError(f"--output {output} would overwrite the input {file}; choose another --output")
    if output.exists() and not arguments.overwrite:
        raise UsageError(f"{output} exists; choose another --output, or add --overwrite to replace it")


def output_files(output: Path) -> dict[str, Path]:
    """The files of a run by their names in the working folder, in the order in which they are put in place."""
    removed = output.with_suffix(".removed.jsonl")
    return {"report": output.with_suffix(".report.json"), "removed": removed, "kept": output}


class FilterJob(Job):
    """A job that writes the three files of a run; a stage before `merge` writes the parts `kept` and `removed`."""

    def __init__(self, arguments: Any, corpus: Corpus, stages: Sequence[str]):
        arguments = dataclasses.replace(arguments, output=located(arguments.output))
        super().__init__(arguments, corpus, arguments.output, stages)

    def merge(self, rank: int) -> None:
        """Copy a task's parts to their places."""
        for name in ("kept", "removed"):
            self.put_part(name, rank, self.folder / name, self.offset(name, rank))

    def put_files(self, story: dict[str, Any], malformed: MalformedLines) -> dict[str, Any]:
        """Give the files their names; returns the report: `story`, malformed lines, output and version."""
        lines = {"documents": malformed.count, "examples": malformed.examples}
        text = report_text({**story, "malformed": lines, "output": self.arguments.output, "mjax_version": __version__})
        if (self.folder / "kept").exists():  # else a run that was killed just before its end has put all
            (self.folder / "report").write_bytes(text.encode())
        self.copies = isinstance(self.arguments.output, RemoteFile)
        self.put_outputs(output_files(self.arguments.output))
        return json.loads(text)

    def remarks(self, report: dict[str, Any]) -> Iterable[str]:
        """Sentences below the table."""
        raise NotImplementedError

    def show(self, report: dict[str, Any]) -> None:
        """Print the report as JSON, or as a table with remarks and the names of the files."""
        if self.arguments.json:
            print(report_text(report), end="")
            return
        output = self.arguments.output
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"{output} is ready after {time.time() - self.began:.1f} s", markup=False)
        console.print(facts(_steps(report), "right"))
        for remark in self.remarks(report):
            console.print(f"\n{remark}", markup=False)
        malformed = report["malformed"]
        if malformed["documents"]:
            console.print(f"\n{malformed['documents']:,} malformed lines were skipped, the first ones:")
            for line in malformed["examples"]:
                console.print(f"  {line}", markup=False)
        files = output_files(output)
        console.print(f"\nRemoved documents, line by line: {files['removed']}", markup=False)
        console.print(f"Counts and examples: {files['report']}", markup=False)


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


def speed(documents: int, text_bytes: int, seconds: float) -> str:
    """'1,234 documents/s  5.6 MB/s'."""
    return f"{documents / seconds:,.0f} documents/s  {text_bytes / seconds / 1e6:.1f} MB/s"


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
