"""Text files as documents: every format, blocks of any size, documents without end, and damage that is named."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from mjax.data.corpus.documents import BLOCK_BYTES, TextFiles, find_files, zstd
from mjax.errors import UsageError

TEXTS = ["plain", "naïve “quotes”\u2028and a line separator", "", "tab\tand\r\nreturn", "🙂" * 50, "x" * 700]
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}
MOST = 2 * BLOCK_BYTES


def lines_of(texts):
    lines = (json.dumps({"id": i, "text": text}, ensure_ascii=False) + "\n" for i, text in enumerate(texts))
    return "".join(lines).encode()


def write(file, data):
    """Write bytes compressed as the name of the file says."""
    file.write_bytes(PACK.get(file.suffix, bytes)(data))
    return file


def write_parquet(file, texts, **options):
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), file, **options)
    return file


def places(corpus):
    """Return the positions of malformed lines."""
    return [example.split(": ")[0].rsplit("/")[-1] for example in corpus.malformed.examples]


# --- Formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("size", [1, 64, 2**19])
def test_documents_do_not_depend_on_blocks(tmp_path, monkeypatch, ending, size):
    monkeypatch.setattr("mjax.data.corpus.documents.BLOCK_BYTES", size)
    monkeypatch.setattr("mjax.data.corpus.documents.BLOCK_ROWS", 2)
    file = tmp_path / f"a{ending}"
    if ending == ".parquet":
        write_parquet(file, TEXTS, row_group_size=4)
    else:
        write(file, lines_of(TEXTS))
    corpus = TextFiles([file])
    documents = list(corpus)
    assert [document.text for document in documents] == TEXTS
    assert [document.source for document in documents] == [f"{file}:{line}" for line in range(1, 7)]
    assert [document.fields["id"] for document in documents] == list(range(6))
    assert sum(block.size for block in corpus.blocks()) == pytest.approx(corpus.size, abs=8)  # the last checksum


def test_text_file_is_one_document(tmp_path):
    file = write(tmp_path / "a.txt.gz", b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (document,) = TextFiles([file])
    assert (document.text, document.source, document.fields) == ("one\ntwo\nthree\n", str(file), None)


def test_members_are_read_and_blank_lines_not(tmp_path):
    """Compressed files of several members are read to their end."""
    for packing in (".gz", ".zst"):
        file = tmp_path / f"a.jsonl{packing}"
        file.write_bytes(b"".join(PACK[packing](lines_of([text])) for text in TEXTS))
        assert [document.text for document in TextFiles([file])] == TEXTS
    file = write(tmp_path / "a.jsonl", b'\n  \n{"text": "one"}\n\n{"text": "two"}')
    found = [(document.text, document.source) for document in TextFiles([file])]
    assert found == [("one", f"{file}:3"), ("two", f"{file}:5")]


# --- Damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl.gz", ".txt.zst", ".parquet"])
def test_damaged_file_is_named(tmp_path, ending):
    file = tmp_path / f"a{ending}"
    if ending == ".parquet":
        write_parquet(file, TEXTS)
    else:
        write(file, lines_of(TEXTS * 20))
    whole = file.read_bytes()
    for damaged in (whole[:-6], b"no such format" + whole, b""):
        file.write_bytes(damaged)
        words = r"a\.\S+ is (damaged or cut short \(.*\)|empty, .*); (fetch|fetch or \w+) (or compress )?it again"
        with pytest.raises(UsageError, match=words):
            list(TextFiles([file], malformed="skip"))


def test_checksum_of_parquet_page_is_checked(tmp_path):
    file = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    write_parquet(file, ["once upon a time"] * 3, **options)
    file.write_bytes(file.read_bytes().replace(b"upon", b"upin", 1))  # which the page's checksum tells
    with pytest.raises(UsageError, match=r"a\.parquet is damaged or cut short"):
        list(TextFiles([file]))


def test_malformed_lines_are_counted_by_each_reading(tmp_path, monkeypatch):
    monkeypatch.setattr("mjax.data.corpus.documents.BLOCK_BYTES", 10)
    lines = [b'{"text": "one"}', b"\xff", b'{"text": null}', b"[]", b'{"text": "\\ud800"}', b"[" * 100_000]
    files = [
        write(tmp_path / "a.jsonl", b"\n".join(lines)),
        write(tmp_path / "latin.txt", b"caf\xe9"),
        write_parquet(tmp_path / "a.parquet", ["two", None]),
    ]
    corpus = TextFiles(files, malformed="skip")
    for _ in range(2):
        assert [document.text for document in corpus] == ["one", "two"]
        assert corpus.malformed.count == 7
        assert places(corpus) == [f"a.jsonl:{line}" for line in (2, 3, 4, 5, 6)]


# --- Documents without end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".txt.gz", ".jsonl.zst"])
def test_endless_document_is_rejected_in_flat_memory(tmp_path, ending):
    file = write(tmp_path / f"a{ending}", bytes(64 * BLOCK_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=rf"a\{ending}.*: a document has more than {MOST:,} bytes; split it"):
            list(TextFiles([file], max_bytes=MOST))
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packing", PACK)
def test_line_that_is_too_long_is_skipped(tmp_path, packing):
    """The lines after it keep their numbers."""

    def line(text):
        return json.dumps({"text": text}).encode() + b"\n"

    for length in (MOST - 12, MOST - 13, MOST + BLOCK_BYTES, 5 * MOST):  # {"text": ""} and a line end have 13
        too_long = length > MOST - 13
        content = [line("first"), line("x" * length), line("y" * 2 * MOST), line("last"), b"no JSON\n"]
        corpus = TextFiles([write(tmp_path / f"a.jsonl{packing}", b"".join(content))], malformed="skip", max_bytes=MOST)
        found = [(document.text[:5], document.source[-1]) for document in corpus]
        assert found == [("first", "1"), *([] if too_long else [("xxxxx", "2")]), ("last", "4")]
        assert [place[-1] for place in places(corpus)] == (["2", "3", "5"] if too_long else ["3", "5"])


# --- Which files are meant --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.jsonl", "b/10.jsonl.gz", "b/deep/1.txt", "b/notes.md", "a.jsonl", "c[1].jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["b"], ["b/10.jsonl.gz", "b/2.jsonl", "b/deep/1.txt"]),
        (["b/*.jsonl", "a.jsonl"], ["b/2.jsonl", "a.jsonl"]),
        (["c[1].jsonl"], ["c[1].jsonl"]),
    ],
)
def test_folders_and_patterns_mean_sorted_files(folder, given, found):
    assert find_files([Path(name) for name in given]) == [Path(name) for name in found]


def test_file_given_twice_is_rejected(folder):
    with pytest.raises(UsageError, match=r"b/deep/1\.txt is given twice and would be read twice; leave one out"):
        find_files([Path("b/deep"), Path("b")])
