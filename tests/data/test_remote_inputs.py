"""`mjax prepare`, `dedup` and `clean` of files in an object store: the same bytes as of local ones."""

import gzip
import json
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from mjax.commands.clean import CleanArguments, clean
from mjax.commands.dedup import DedupArguments, dedup
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.corpus.documents import find_files
from mjax.errors import UsageError
from mjax.utils.remote import locate
from tests.object_store import bucket

pytestmark = pytest.mark.ci
WORDS = "the quick brown fox jumps over the lazy dog while seven wizards quietly fix broken jukeboxes"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A bucket, a folder of this machine with the same files, and the bucket's server."""
    pytest.importorskip("s3fs")
    rows = [{"text": f"{WORDS} {i} é\n" * 40} for i in range(200)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    local = tmp_path / "local"
    (local / "a b" / "c").mkdir(parents=True)
    (local / "a b" / "1 [x].jsonl").write_bytes(lines[: lines.index(b"\n") + 1])
    (local / "a b" / "c" / "2.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    (local / "a b" / "3.jsonl").write_bytes(lines)
    (local / "a b" / "README.md").write_bytes(b"not data")
    parquet.write_table(pyarrow.Table.from_pylist(rows), local / "a b" / "c" / "4.parquet")
    with bucket(monkeypatch, tmp_path / "caches") as server:
        fsspec.filesystem("s3").put(str(local / "a b"), "s3://bucket/data/a b", recursive=True)
        yield "s3://bucket/data", local, server


@pytest.mark.parametrize("given", ["a b/3.jsonl", "a b", "a b/*.jsonl", "**/*.jsonl.gz", "a b/c/4.parquet"])
def test_prepare_reads_what_it_reads_locally(store, tmp_path, given):
    remote, local, _ = store
    for name, folder in (("far", remote), ("near", local)):
        prepare(PrepareArguments(output=str(tmp_path / name), inputs=(Path(f"{folder}/{given}"),), tokenizer="bytes"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"far.{ending}").read_bytes() == (tmp_path / f"near.{ending}").read_bytes()
    names = [json.loads((tmp_path / f"{name}.json").read_text())["inputs"] for name in ("far", "near")]
    assert names[0] == [name.replace(str(local), remote) for name in names[1]]


def test_dedup_and_clean_read_what_they_read_locally(store, tmp_path):
    """Also the evaluation sets that `clean` cuts out, and with several tasks."""
    remote, local, _ = store
    for name, folder in (("far", remote), ("near", local)):
        files, deduped = (Path(f"{folder}/a b"),), tmp_path / f"{name}.jsonl"
        dedup(DedupArguments(inputs=files, output=deduped, exact=True, tasks=3, workers=1))
        cleaned, sets = tmp_path / f"{name}-clean.jsonl", (Path(f"{folder}/a b/1*.jsonl"),)
        clean(CleanArguments(inputs=files, output=cleaned, decontaminate=sets, common=10**6, min_tokens=0))
    assert (tmp_path / "far.jsonl").read_bytes() == (tmp_path / "near.jsonl").read_bytes() != b""
    assert (tmp_path / "far-clean.jsonl").read_bytes() == (tmp_path / "near-clean.jsonl").read_bytes()


def test_store_is_asked_for_large_ranges(store, tmp_path):
    """A task reads 20 MB in three requests, and one more for its beginning at most."""
    server = store[-1]
    line = json.dumps({"text": WORDS * 100}).encode() + b"\n"
    fsspec.filesystem("s3").pipe_file("s3://bucket/large.jsonl", line * (20_000_000 // len(line)))
    server.requests.clear()
    prepare(
        PrepareArguments(
            output=str(tmp_path / "d"), inputs=(Path("s3://bucket/large.jsonl"),), tokenizer="bytes", tasks=1
        )
    )
    assert len([method for method, _, _ in server.requests if method == "GET"]) <= 4, server.requests
    assert len(server.requests) <= 12, server.requests


def test_listed_files_need_no_request_each(store):
    remote, _, server = store
    server.requests.clear()
    files = [file for file in locate(Path(f"{remote}/a b")).rglob("*") if file.stat().st_size]
    assert len(files) == 5
    assert [method for method, _, _ in server.requests] == ["GET"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("none.jsonl", "there is no file .*://bucket/data/none.jsonl"),
        ("*.txt", r"no file matches .*://bucket/data/\*.txt"),
        ("a b/README.md/x.jsonl", "there is no file"),
    ],
)
def test_missing_remote_files_are_one_sentence(store, tmp_path, given, sentence):
    with pytest.raises(UsageError, match=sentence):
        prepare(PrepareArguments(output=str(tmp_path / "d"), inputs=(Path(f"{store[0]}/{given}"),), tokenizer="bytes"))


def test_secrets_of_addresses_are_not_recorded(tmp_path, capsys):
    """Searches the dataset, its working folder, a report, and sentences about lines and files."""
    pytest.importorskip("fsspec")
    address = "memory://me:password@bucket/a.jsonl?sig=presigned&e=.jsonl"
    fsspec.filesystem("memory").pipe_file(address, b'{"text": "some text"}\n{"text": 3}\n' * 3)
    given, shown = (Path(address),), "memory://…@bucket/a.jsonl?…"
    how = PrepareArguments(output=str(tmp_path / "d"), inputs=given, tokenizer="bytes", malformed="skip")
    assert prepare(how).metadata.inputs == [shown]
    clean(CleanArguments(inputs=given, output=tmp_path / "c.jsonl", malformed="skip", min_tokens=9))
    with pytest.raises(UsageError) as stopped:
        prepare(PrepareArguments(output=str(tmp_path / "e"), inputs=given, tokenizer="bytes"))
    with pytest.raises(UsageError) as missing:
        find_files([Path(f"{address}x"), Path(f"{address}x")])
    texts = [str(stopped.value), str(missing.value), capsys.readouterr().out]
    texts += [file.read_text() for file in tmp_path.rglob("*.json*")]
    assert len(texts) > 7
    assert f"{shown}:2: 'text' holds 3" in texts[0]
    assert not [text for text in texts if "password" in text or "presigned" in text]


def test_unknown_addresses_are_one_sentence():
    with pytest.raises(UsageError, match=r"nosuch:// cannot be read: Protocol not known: nosuch"):
        find_files([Path("nosuch://x/a.jsonl")])


def test_secret_quoted_without_its_scheme_is_hidden():
    """botocore's message has the bucket, or a part of the address instead."""
    message = str(UsageError('Invalid bucket name "me:password@bucket", at 10:20 by a@b.c; see file.jsonl:3: x@y'))
    assert message == 'Invalid bucket name "…@bucket", at 10:20 by a@b.c; see file.jsonl:3: x@y'
