import json

import numpy as np
import pytest

from mjax import cli
from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter
from mjax.data.metadata import metadata_file, read_metadata, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder


def prepared(prefix, *texts, **options):
    file = prefix.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + options.pop("more", ""))
    prepare(PrepareArguments(output=str(prefix), inputs=(file,), **{"tokenizer": "bytes", **options}))
    return str(prefix)


def foreign(prefix, vocabulary=257, dtype=None):
    with IndexedDatasetWriter(prefix, vocabulary, dtype) as writer:
        writer.add_document([7, 8, 9], [10])
        writer.add_document()
        writer.add_document([11])
    return str(prefix)


def merge(*arguments):
    return cli.main(["data", "merge", *map(str, arguments)])


def test_a_merged_dataset_is_the_one_prepared_of_all_texts_at_once(tmp_path, capsys):
    parts = [prepared(tmp_path / name, *texts) for name, texts in (("a", ["one", "", "two"]), ("b", ["three", ""]))]
    whole = prepared(tmp_path / "whole", "one", "", "two", "three", "")
    capsys.readouterr()
    assert merge(tmp_path / "m", *parts) == 0
    for part in ("bin", "idx"):
        assert (tmp_path / f"m.{part}").read_bytes() == (tmp_path / f"whole.{part}").read_bytes()
    ours, theirs = read_metadata(tmp_path / "m"), read_metadata(whole)
    assert (ours.documents, ours.sequences, ours.tokens, ours.text_bytes) == (
        theirs.documents, theirs.sequences, theirs.tokens, theirs.text_bytes,
    )  # fmt: skip
    assert ours.inputs == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert tokenizer_from_folder(tokenizer_folder(tmp_path / "m")).vocabulary == 257
    assert "5 documents, 14 tokens, 28 bytes" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.tmp"))


def test_malformed_lines_of_the_parts_are_added_up(tmp_path):
    parts = [prepared(tmp_path / name, "text", more="{oops}\n" * 4, malformed="skip") for name in "ab"]
    merge(tmp_path / "m", *parts)
    metadata = read_metadata(tmp_path / "m")
    assert metadata.malformed == 8
    assert [example.split(":")[0][-7:] for example in metadata.malformed_examples] == ["a.jsonl"] * 4 + ["b.jsonl"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_parts_without_metadata_are_merged_and_the_whole_claims_nothing(tmp_path, capsys, dtype):
    part = foreign(tmp_path / "f", 100, dtype)
    assert merge(tmp_path / "m", part, part) == 0
    data = IndexedDataset(tmp_path / "m")
    assert data.dtype == dtype
    assert [data.get(i).tolist() for i in range(len(data))] == [[7, 8, 9], [10], [11]] * 2
    assert data.document_indices.tolist() == [0, 2, 2, 3, 5, 5, 6]
    assert not metadata_file(tmp_path / "m").exists()
    assert f"no metadata and no tokenizer, because {part}.json does not exist" in capsys.readouterr().out


def test_overwriting_with_parts_of_an_unknown_tokenizer_removes_the_old_one(tmp_path):
    output, part = prepared(tmp_path / "m", "text"), foreign(tmp_path / "f")
    assert merge(output, part, prepared(tmp_path / "a", "text"), "--overwrite") == 0
    assert not metadata_file(output).exists()
    assert not tokenizer_folder(output).exists()


def test_what_does_not_agree_is_refused_and_leaves_nothing(tmp_path, capsys):
    text = "the quick brown fox jumps over the lazy dog again and again"
    a, b = prepared(tmp_path / "a", text), prepared(tmp_path / "b", text, append_eod=False)
    c = prepared(tmp_path / "c", text, tokenizer=None, vocabulary=290)
    d = prepared(tmp_path / "d", text[::-1], tokenizer=None, vocabulary=290)
    wide = foreign(tmp_path / "w", 70_000)
    lost = prepared(tmp_path / "lost", text, tokenizer=None, vocabulary=290)
    for file in tokenizer_folder(lost).iterdir():
        file.unlink()
    tokenizer_folder(lost).rmdir()
    before = sorted(tmp_path.iterdir())
    for parts, message in (
        ([a], "merge takes two datasets or more"),
        ([a, a, tmp_path / "none"], "none.bin does not exist"),
        ([a, b], f"{a}.json says append_eod True and {b}.json False; prepare both in the same way"),
        ([a, c], f"{a}.json says tokenizer 'bytes' and {c}.json 'sentencepiece'"),
        ([c, d], f"{c}.tokenizer and {d}.tokenizer are different tokenizers of the same kind and size"),
        ([c, lost], f"there is no {lost}.tokenizer beside {lost}.json; copy it there"),
        ([a, wide], f"{a} has tokens of dtype uint16 and {wide} of dtype int32"),
    ):
        assert merge(tmp_path / "m", *parts) == 2
        assert message in capsys.readouterr().err
    assert merge(a, a, a) == 2
    assert "cannot be merged into itself" in capsys.readouterr().err
    assert merge(a, c, c) == 2
    assert "a.bin exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
