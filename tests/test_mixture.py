"""benchmarks/mixture.py takes packages apart rightly, and goes on without what cannot be fetched."""

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
import zlib

from benchmarks import mixture


def archive(file, **members):
    with tarfile.open(file, "w:gz") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_dot_", "."))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file


def test_dictionary_becomes_pages_of_whole_entries(tmp_path, monkeypatch):
    monkeypatch.setattr(mixture, "PAGE", 30)
    text = b"Abuse v. t.\n   1. To use ill.\n\n   2. To deceive.\n\nAbuse n.\n   Improper use.\n\nAbyss n."
    file = archive(tmp_path / "a.tgz", usr__gcide_dot_dict_dot_dz=gzip.compress(text))
    pages = list(mixture.dictionary(file))
    assert pages[0].startswith("Abuse v. t.")
    assert pages[0].endswith("   2. To deceive."), "an entry's own paragraphs are indented"
    assert "\n\n".join(pages) == text.decode()


def test_psalm_is_a_zlib_block_without_markup(tmp_path):
    texts = [b'<milestone n="x"/>', b'<title>Psalm 1</title> <div sID="g" type="x-p"/> <hi>Blessed</hi> &amp; happy.']
    packed = [zlib.compress(text) for text in texts]
    index = struct.pack("<6I", 0, len(packed[0]), 0, len(packed[0]), len(packed[1]), 0)
    file = archive(tmp_path / "a.tgz", x__tdavid__ot_dot_czs=index, x__tdavid__ot_dot_czz=b"".join(packed))
    assert list(mixture.spurgeon(file)) == ["Psalm 1\n\nBlessed & happy."]


def test_web_page_is_its_words_in_blocks(tmp_path):
    page = b"<html><title>T</title><style>p {}</style><body><p>One\n  <b>two</b>&amp;</p><p>three</p></body></html>"
    file = archive(tmp_path / "a.tgz", usr__html__a_dot_html=page, usr__html__a_dot_png=b"")
    assert list(mixture.web_pages(file)) == ["T\n\nOne two&\n\nthree"]


def test_failing_source_is_named_and_the_rest_mixed(tmp_path, monkeypatch, capsys):
    def failing(folder):
        raise subprocess.CalledProcessError(1, "npm", stderr="some lines\nnpm error 404 Not Found\n")

    monkeypatch.setattr(
        mixture, "SOURCES", {"a": (lambda _: None, lambda _: ["one", " ", "two"]), "b": (failing, None)}
    )
    monkeypatch.setattr(sys, "argv", ["mixture.py", str(tmp_path)])
    assert mixture.main() == 0
    shown = capsys.readouterr()
    assert "left out: b: npm error 404 Not Found" in shown.err
    for name in ("a", "mixture"):
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["text"] for line in lines) == ["one", "two"]
