import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from backports import zstd
from pyarrow import parquet

from mjax.data import blocks
from mjax.data.corpus import TextFiles, find_files
from mjax.errors import UsageError

TEXTS = ["plain", "naïve “quotes”\u2028and a line separator", "", "tab\tand\r\nreturn", "🙂" * 50, "x" * 700]


def lines_of(texts, **fields):
    return "".join(
        json.dumps({"id": i, "text": text, **fields}, ensure_ascii=False) + "\n" for i, text in enumerate(texts)
    )


def write(file, data):
    """Write bytes compressed as the name of the file says."""
    compress = {".gz": gzip.compress, ".zst": zstd.compress}.get(file.suffix, bytes)
    file.write_bytes(compress(data))
    return file


def write_parquet(file, texts, **options):
    parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), file, **options)
    return file


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "SIZE", 64)
    monkeypatch.setattr(blocks, "ROWS", 2)


# --- What is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("size", [1, 64, 2**19])
def test_lines_come_back_with_their_numbers_whatever_the_size_of_a_block(tmp_path, monkeypatch, ending, size):
    monkeypatch.setattr(blocks, "SIZE", size)
    file = write(tmp_path / f"a{ending}", lines_of(TEXTS).encode())
    documents = list(TextFiles([file]))
    assert [document.text for document in documents] == TEXTS
    assert [document.source for document in documents] == [f"{file}:{line}" for line in range(1, 7)]
    assert [document.fields["id"] for document in documents] == list(range(6))


def test_the_sizes_of_the_documents_add_up_to_the_file(tmp_path, small_blocks):
    files = [
        write(tmp_path / f"a{ending}", lines_of(TEXTS).encode()) for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst")
    ]
    files += [write_parquet(tmp_path / "a.parquet", TEXTS), write(tmp_path / "b.txt.gz", b"a text")]
    for file in files:
        corpus = TextFiles([file])
        assert sum(document.size for document in corpus) == pytest.approx(file.stat().st_size, abs=len(TEXTS))
        assert sum(block.size for block in corpus.blocks()) == pytest.approx(corpus.size, abs=8), "the last checksum"


def test_compressed_files_of_several_members_are_read_to_their_end(tmp_path):
    for ending, compress in ((".gz", gzip.compress), (".zst", zstd.compress)):
        file = tmp_path / f"a.jsonl{ending}"
        file.write_bytes(b"".join(compress(lines_of([text]).encode()) for text in TEXTS))
        assert [document.text for document in TextFiles([file])] == TEXTS


@pytest.mark.parametrize("ending", [".txt", ".txt.gz", ".txt.zst"])
def test_a_text_file_is_one_document_compressed_or_not(tmp_path, ending):
    file = write(tmp_path / f"a{ending}", b"\xef\xbb\xbfone\r\ntwo\n")
    (document,) = TextFiles([file])
    assert (document.text, document.source, document.fields) == ("one\ntwo\n", str(file), None)


def test_a_parquet_file_is_a_document_a_row(tmp_path, small_blocks):
    file = write_parquet(tmp_path / "a.parquet", TEXTS, row_group_size=4)
    documents = list(TextFiles([file]))
    assert [document.text for document in documents] == TEXTS
    assert [document.source for document in documents] == [f"{file}:{row}" for row in range(1, 7)]
    assert [document.fields["id"] for document in documents] == list(range(6))
    assert [document.fields for document in TextFiles([file], all_fields=False)] == [{"text": text} for text in TEXTS]


def test_blank_lines_are_passed_over_and_counted(tmp_path):
    file = write(tmp_path / "a.jsonl", b'\n  \n{"text": "one"}\n\n{"text": "two"}')
    assert [(document.text, document.source) for document in TextFiles([file])] == [
        ("one", f"{file}:3"), ("two", f"{file}:5"),
    ]  # fmt: skip


# --- What is not as it should be --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".txt.gz", ".txt.zst"])
@pytest.mark.parametrize("damage", [lambda data: data[:-6], lambda data: b"no such format" + data])
def test_a_compressed_file_that_is_cut_short_or_foreign_is_named(tmp_path, ending, damage):
    file = write(tmp_path / f"a{ending}", lines_of(TEXTS * 20).encode())
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UsageError, match=r"a\.\w+\.\w+ is damaged or cut short \(.*\); fetch or compress it again"):
        list(TextFiles([file], malformed="skip"))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"PAR1" * 9])
def test_a_parquet_file_that_is_cut_short_or_foreign_is_named(tmp_path, damage):
    file = write_parquet(tmp_path / "a.parquet", TEXTS)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UsageError, match=r"a\.parquet is damaged or cut short \(.*\); fetch or write it again"):
        list(TextFiles([file], malformed="skip"))


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(UsageError, match=r"a\.parquet: there is no column 'body', only 'id', 'text'; .* with --key"):
        list(TextFiles([file], key="body", malformed="skip"))


def test_a_parquet_file_without_pyarrow_says_what_to_type(tmp_path, monkeypatch):
    file = write_parquet(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match="which is not installed; type: python -m pip install pyarrow"):
        list(TextFiles([file]))


def test_what_is_malformed_is_skipped_and_counted_anew_by_each_reading(tmp_path):
    files = [
        write(
            tmp_path / "a.jsonl", b'{"text": "one"}\n\xff\n{"text": null}\n[]\n{"text": "\\ud800"}\n' + b"[" * 100_000
        ),
        write(tmp_path / "latin.txt", b"caf\xe9"),
        write_parquet(tmp_path / "a.parquet", ["two", None]),
    ]
    corpus = TextFiles(files, malformed="skip")
    for _ in range(2):
        assert [document.text for document in corpus] == ["one", "two"]
        assert corpus.malformed.count == 7
        places = [example.removeprefix(f"{tmp_path}/").split(": ")[0] for example in corpus.malformed.examples]
        assert places == ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4", "a.jsonl:5", "a.jsonl:6"]


# --- Which files are meant --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.jsonl", "b/10.jsonl.gz", "b/deep/1.txt", "b/notes.md", "a.jsonl", "c[1].jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["b"], ["b/10.jsonl.gz", "b/2.jsonl", "b/deep/1.txt"]),
        (["b/*.jsonl", "a.jsonl"], ["b/2.jsonl", "a.jsonl"]),
        (["**/*.txt"], ["b/deep/1.txt"]),
        (["c[1].jsonl"], ["c[1].jsonl"]),
        (["b/*"], ["b/10.jsonl.gz", "b/2.jsonl", "b/notes.md"]),
        (["./a.jsonl"], ["a.jsonl"]),
    ],
)
def test_folders_and_patterns_stand_for_their_files_in_the_order_of_their_paths(folder, given, found):
    assert find_files([Path(name) for name in given]) == [Path(name) for name in found]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["x/*.jsonl"], r"no file matches x/\*\.jsonl; give another pattern"),
        (["b/deep", "b"], r"b/deep/1\.txt is given twice and would be read twice; leave one out"),
        (["empty"], r"the folder empty has no \.jsonl, .* or \.parquet file"),
    ],
)
def test_what_matches_nothing_or_twice_is_refused(folder, given, message):
    Path("empty").mkdir()
    with pytest.raises(UsageError, match=message):
        find_files([Path(name) for name in given])
