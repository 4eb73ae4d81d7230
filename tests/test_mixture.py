"""benchmarks/mixture.py takes packages apart rightly, and goes on without what cannot be fetched."""

import gzip
import json
import subprocess
import sys
import tarfile

from benchmarks import mixture


def test_dictionary_becomes_pages_of_whole_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "PAGE", 30)
    text = b"Abuse v. t.\n   1. To use ill.\n\n   2. To deceive.\n\nAbuse n.\n   Improper use.\n\nAbyss n."
    (tmp_path / "gcide.dict.dz").write_bytes(gzip.compress(text))
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as tar:
        tar.add(tmp_path / "gcide.dict.dz", "usr/gcide.dict.dz")
    pages = list(mixture.dictionary(tmp_path / "a.tgz"))
    assert pages[0].startswith("Abuse v. t.")
    assert pages[0].endswith("   2. To deceive."), "an entry's own paragraphs are indented"
    assert "\n\n".join(pages) == text.decode()


def test_failing_source_is_named_and_the_rest_mixed(tmp_path, monkeypatch, capsys):
    def failing(folder):
        raise subprocess.CalledProcessError(1, "npm", stderr="some lines\nnpm error 404 Not Found\n")

    sources = {"a": (lambda _: None, lambda _: ["one", " ", "two"]), "b": (failing, None)}
    monkeypatch.setattr(mixture, "SOURCES", sources)
    monkeypatch.setattr(sys, "argv", ["mixture.py", str(tmp_path)])
    assert mixture.main() == 0
    shown = capsys.readouterr()
    assert "left out: b: npm error 404 Not Found" in shown.err
    for name in ("a", "mixture"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["text"] for line in lines) == ["one", "two"]
