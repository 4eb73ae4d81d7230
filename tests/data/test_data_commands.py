"""`mjax data merge` and `mjax data inspect`."""

import json
import shutil

import numpy as np
import pytest

from mjax.commands import cli
from mjax.commands.data import document_lengths
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.config.datasets import metadata_file, read_metadata
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder


def prepared(prefix, *texts, malformed_lines=0, **options):
    file = prefix.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + "{oops}\n" * malformed_lines)
    options = {"tokenizer": "bytes", "malformed": "skip", **options}
    prepare(PrepareArguments(output=str(prefix), inputs=(file,), **options))
    return str(prefix)


def foreign(prefix, documents=(([7, 8, 9], [10]), (), ([11],)), vocabulary=100, dtype=None):
    """A dataset as Megatron leaves it: no metadata, documents of several sequences."""
    with IndexedDatasetWriter(prefix, vocabulary, dtype) as writer:
        for document in documents:
            writer.add_document(*document)
    return str(prefix)


def merge(*arguments):
    return cli.main(["data", "merge", *map(str, arguments)])


@pytest.fixture
def inspect(capsys):
    def run(*arguments):
        capsys.readouterr()
        assert cli.main(["data", "inspect", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


def test_merge_equals_preparing_all_at_once(tmp_path):
    a = prepared(tmp_path / "a", "one", "", "two", malformed_lines=4)
    parts = [a, prepared(tmp_path / "b", "three", "", malformed_lines=4)]
    whole = prepared(tmp_path / "whole", "one", "", "two", "three", "")
    assert merge(tmp_path / "m", *parts) == 0
    for part in ("bin", "idx"):
        assert (tmp_path / f"m.{part}").read_bytes() == (tmp_path / f"whole.{part}").read_bytes()
    ours, theirs = read_metadata(tmp_path / "m"), read_metadata(whole)
    for name in ("documents", "sequences", "tokens", "text_bytes", "vocabulary", "eod"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.malformed == 8
    assert tokenizer_from_folder(tokenizer_folder(tmp_path / "m")).vocabulary == 257


def test_merge_without_metadata_claims_no_tokenizer(tmp_path, capsys):
    part = foreign(tmp_path / "f", dtype=np.int64)
    assert merge(tmp_path / "m", part, part) == 0
    data = IndexedDataset(tmp_path / "m")
    assert data.dtype == np.int64
    assert [data.get(i).tolist() for i in range(len(data))] == [[7, 8, 9], [10], [11]] * 2
    assert data.document_indices.tolist() == [0, 2, 2, 3, 5, 5, 6]
    assert f"no metadata and no tokenizer, because {part}.json does not exist" in capsys.readouterr().out
    old = prepared(tmp_path / "old", "text")
    assert merge(old, part, part, "--overwrite") == 0
    assert not metadata_file(old).exists()
    assert not tokenizer_folder(old).exists()


def test_merge_rejects_parts_that_disagree(tmp_path, capsys):
    text, trained = "the quick brown fox jumps over the lazy dog again", {"tokenizer": None, "vocabulary": 290}
    a, b = prepared(tmp_path / "a", text), prepared(tmp_path / "b", text, append_eod=False)
    c, d = prepared(tmp_path / "c", text, **trained), prepared(tmp_path / "d", text[::-1], **trained)
    wide, lost = foreign(tmp_path / "w", vocabulary=70_000), prepared(tmp_path / "lost", text, **trained)
    shutil.rmtree(tokenizer_folder(lost))
    before = sorted(tmp_path.iterdir())
    for parts, message in (
        (["m", a, b], f"{a} has append_eod True and {b} False; prepare both in the same way"),
        (["m", c, d], f"{c} has tokenizer files "),
        (["m", c, lost], f"there is no {lost}.tokenizer; copy it there"),
        (["m", a, wide], f"{a} has tokens uint16 and {wide} int32"),
        ([a, a, a], "cannot be merged into itself"),
    ):
        assert merge(*(tmp_path / part for part in parts)) == 2
        assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_inspection_counts_documents(tmp_path, inspect):
    """A histogram of the lengths can be drawn."""
    texts = ["[bold]tag", *("x" * length for length in range(1, 11)), ""]
    prefix = prepared(tmp_path / "d", *texts)
    found = json.loads(inspect(prefix, "--json"))
    assert (found["documents"], found["sequences"], found["empty_documents"]) == (12, 11, 1)
    assert (found["tokens"], found["bytes"], found["dtype"]) == (9 + 55 + 11, 150, "uint16")
    assert found["lengths"]["mean"] == pytest.approx(75 / 12)
    assert found["sample"] == "[bold]tag<|endoftext|>"
    assert "document 3:\nxxx<|endoftext|>" in inspect(prefix, "--document", 3, "--figure", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0


def test_inspection_without_tokenizer_shows_ids(tmp_path, inspect):
    prefix = foreign(tmp_path / "f", [([1, 2], [3, 69_999]), (np.arange(300), [5]), ()], 70_000)
    assert document_lengths(IndexedDataset(prefix)).tolist() == [4, 301, 0]
    found = json.loads(inspect(prefix, "--document", 1, "--json"))
    assert (found["metadata"], found["sample_tokens"], found["sample"]) == (None, 301, list(range(200)))
