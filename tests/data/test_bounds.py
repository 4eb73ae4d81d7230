"""Documents without end and files that unpack to a thousand times their size: one sentence, and flat memory."""

import gzip
import json
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from mjax import cli
from mjax.data.blocks import MOST_BYTES, SIZE, zstd
from mjax.data.corpus import TextFiles
from mjax.data.indexed import IndexedDataset, IndexedDatasetWriter, index_file, token_file
from mjax.errors import UsageError

MOST = 2 * SIZE
HUGE = 64 * SIZE
PACK = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def line(text):
    return json.dumps({"text": text}).encode() + b"\n"


def documents(folder, ending, packing, content, malformed="stop"):
    file = folder / f"a{ending}{packing}"
    file.write_bytes(PACK[packing](content))
    return TextFiles([file], malformed=malformed, most=MOST)


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_a_document_that_never_ends_is_refused_and_memory_stays_flat(tmp_path, ending, packing):
    corpus = documents(tmp_path, ending, packing, bytes(HUGE))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=rf"a\{ending}.*: a document has more than {MOST:,} bytes; split it"):
            list(corpus)
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST < HUGE / 4
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packing", PACK)
def test_a_line_that_is_too_long_is_left_out_and_the_others_keep_their_numbers(tmp_path, packing):
    first, last = [line(f"first {i}") for i in range(3)], [line("last"), b"no JSON\n"]
    for length in (MOST - 12, MOST - 13, MOST - 14, MOST + SIZE, 5 * MOST):  # {"text": ""} and a line end have 13
        too_long = length > MOST - 13
        corpus = documents(tmp_path, ".jsonl", packing, b"".join([*first, line("x" * length), *last]), "skip")
        texts = [document.text[:10] for document in corpus]
        assert texts == ["first 0", "first 1", "first 2", *([] if too_long else ["x" * 10]), "last"]
        numbers = [example.split(": ")[0].rsplit(":")[-1] for example in corpus.malformed.examples]
        assert numbers == (["4", "6"] if too_long else ["6"])


def test_long_lines_in_a_row_are_each_counted(tmp_path):
    content = b"".join([line("a" * 2 * MOST), line("b" * 2 * MOST), line("c"), line("d" * 2 * MOST)])
    corpus = documents(tmp_path, ".jsonl", "", content, "skip")
    assert [(document.text, document.source[-1]) for document in corpus] == [("c", "3")]
    assert [example.split(": ")[0][-1] for example in corpus.malformed.examples] == ["1", "2", "4"]


def test_a_row_of_parquet_that_is_too_large_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a", "b" * (MOST + 1)]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=r"a\.parquet:2: a document has more than"):
        list(TextFiles([tmp_path / "a.parquet"], most=MOST))


def test_a_damaged_page_of_parquet_is_found_by_its_checksum(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["once upon a time"] * 3})
    parquet.write_table(
        table, file, write_page_checksum=True, compression="none", use_dictionary=False, write_statistics=False
    )
    content = file.read_bytes()
    file.write_bytes(content.replace(b"upon", b"upin", 1))
    with pytest.raises(UsageError, match=r"a\.parquet is damaged or cut short"):
        list(TextFiles([file]))


@pytest.mark.parametrize("command", ["prepare", "dedup", "clean"])
def test_the_largest_document_can_be_chosen(command, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(b"".join(line(f"{i} " * 40) for i in range(4)) + line("x" * 1000))
    output = ["--output", str(tmp_path / "out.jsonl")]
    arguments = [command, str(tmp_path / "a.jsonl"), *output, "--max-document-bytes", "500"]
    assert cli.main([*arguments, *(["--tokenizer", "bytes"] if command == "prepare" else [])]) == 2
    assert "a.jsonl:5: a document has more than 500 bytes" in capsys.readouterr().err
    assert cli.main([command, str(tmp_path / "a.jsonl"), *output, "--max-document-bytes", "0"]) == 2
    assert "--max-document-bytes is 0; it must be at least 1" in capsys.readouterr().err


LIMITED = """
import resource, sys
from mjax import cli
import mjax.commands.prepare
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.ci
def test_gigabytes_in_a_small_file_end_in_a_sentence_under_a_limit_on_memory(tmp_path, packing):
    file = tmp_path / f"a.jsonl{packing}"
    with gzip.open(file, "wb", compresslevel=1) if packing == ".gz" else zstd.open(file, "wb") as stream:
        for _ in range(128):
            stream.write(bytes(2**24))
    assert file.stat().st_size < 2**24
    arguments = ["prepare", str(file), "--tokenizer", "bytes", "--workers", "1", "--output", str(tmp_path / "d")]
    ended = subprocess.run([sys.executable, "-c", LIMITED, *arguments], capture_output=True, text=True, check=False)
    assert f"a.jsonl{packing}:1: a document has more than {MOST_BYTES:,} bytes" in ended.stderr
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)


# --- Files that are cut short while they are read ---------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", 100) as writer:
        for number in range(4000):
            writer.add_document([number % 100] * 5)
    return IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("file", [token_file, index_file])
def test_a_dataset_that_is_cut_short_while_it_is_read_is_named(dataset, file):
    assert dataset.get(3999).tolist() == [99] * 5
    os.truncate(file(dataset.prefix), 4096)
    for read in (lambda: dataset.get(3999), lambda: dataset.join(np.array([3998, 3999]), 0, 5)):
        with pytest.raises(UsageError, match=rf"{file('d').name} was cut short while it was read"):
            read()


def test_a_dataset_that_is_cut_short_while_it_is_merged_is_named(dataset, tmp_path):
    os.truncate(token_file(dataset.prefix), 4096)
    with (
        pytest.raises(UsageError, match=r"d\.bin was cut short while it was read"),
        IndexedDatasetWriter(tmp_path / "whole", 100) as writer,
    ):
        list(writer.add_dataset(dataset))
    assert not token_file(tmp_path / "whole").exists()


def test_sequences_that_follow_each_other_or_do_not_are_joined_alike(dataset):
    random = np.random.default_rng(0)
    for _ in range(50):
        chosen = np.sort(random.integers(0, 60, random.integers(1, 9)))
        whole = np.concatenate([dataset.get(i) for i in chosen])
        begin, end = random.integers(0, 3), random.integers(3, 6)
        assert dataset.join(chosen, begin, end).tolist() == whole[begin : len(whole) - 5 + end].tolist()
