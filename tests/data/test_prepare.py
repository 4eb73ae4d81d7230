import errno
import gzip
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.blocks import read_blocks
from mjax.data.indexed import IndexedDataset
from mjax.data.metadata import read_metadata, tokenizer_folder
from mjax.data.tokenizers import tokenizer_from_folder, train_sentencepiece
from mjax.errors import RunError, UsageError

SENTENCE = "the quick brown fox jumps over the lazy dog while seven wizards quietly fix broken jukeboxes"
TEXTS = [f"{SENTENCE[i % 30 : i % 30 + 45]} {i}" for i in range(40)]


@pytest.fixture
def lines(tmp_path):
    """A .jsonl file of all TEXTS."""
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return file


def run(*inputs, output, **options):
    return prepare(PrepareArguments(output=str(output), inputs=inputs, **options))


def documents_of(prefix):
    data, tokenizer = IndexedDataset(prefix), tokenizer_from_folder(tokenizer_folder(prefix))
    return [
        "".join(tokenizer.decode(data.get(i)) for i in range(first, last))
        for first, last in itertools.pairwise(data.document_indices)
    ]


def nothing_but(folder, *names):
    return sorted(file.name for file in folder.iterdir()) == sorted(names)


# --- What is written --------------------------------------------------------------------------------------------------


def test_documents_come_back_as_they_went_in(lines, tmp_path):
    summary = run(lines, output=tmp_path / "out" / "d.v1", vocabulary=330)
    assert documents_of(tmp_path / "out" / "d.v1") == [text + "<|endoftext|>" for text in TEXTS]
    assert nothing_but(tmp_path / "out", "d.v1.bin", "d.v1.idx", "d.v1.json", "d.v1.tokenizer")
    assert all(file.exists() for file in summary.files)


def test_the_metadata_says_what_was_done(lines, tmp_path):
    summary = run(lines, output=tmp_path / "d", vocabulary=330)
    metadata = read_metadata(tmp_path / "d")
    assert metadata == summary.metadata
    assert (metadata.tokenizer, metadata.vocabulary, metadata.eod, metadata.documents) == ("sentencepiece", 330, 1, 40)
    assert metadata.tokens == IndexedDataset(tmp_path / "d").tokens
    assert metadata.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert metadata.inputs == [str(lines)]
    assert metadata.bytes_per_token == metadata.text_bytes / metadata.tokens


def test_the_summary_ends_with_the_command_to_type_next(lines, tmp_path, capsys):
    run(lines, output=tmp_path / "d", tokenizer="bytes")
    shown = capsys.readouterr().out
    assert "257  bytes" in shown
    command = f"python train.py --config gpt_demo --data.path {tmp_path}/d"
    assert shown.rstrip().endswith(command)


def test_the_same_text_gives_the_same_bytes(lines, tmp_path):
    for name in ("a", "b"):
        run(lines, output=tmp_path / name, vocabulary=330)
    for part in ("bin", "idx", "json", "tokenizer/tokenizer.model"):
        assert (tmp_path / f"a.{part}").read_bytes() == (tmp_path / f"b.{part}").read_bytes()


def test_a_text_file_is_one_document_without_its_byte_order_mark_and_carriage_returns(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfChapter 1\r\n\r\nCall me Ishmael.\r\n")
    (tmp_path / "b.txt").write_bytes("naïve\n".encode())
    run(tmp_path / "b.txt", tmp_path / "a.txt", output=tmp_path / "d", tokenizer="bytes", append_eod=False)
    assert documents_of(tmp_path / "d") == ["naïve\n", "Chapter 1\n\nCall me Ishmael.\n"]


@pytest.mark.parametrize(
    ("rule", "documents"),
    [
        ("blank-line", ["One.\nTwo.", "  Three.", "Four."]),
        ("2", ["One.\nTwo.", "\n \t", "\n  Three.", "\nFour."]),
        ("100", ["One.\nTwo.\n\n \t\n\n  Three.\n\nFour.\n"]),
    ],
)
def test_a_text_file_is_cut_into_documents_by_a_rule(tmp_path, rule, documents):
    (tmp_path / "a.txt").write_bytes(b"One.\r\nTwo.\r\n\r\n \t\r\n\r\n  Three.\r\n\r\nFour.\r\n")
    (tmp_path / "b.jsonl").write_text('{"text": "a\\n\\nb"}')
    run(
        tmp_path / "a.txt", tmp_path / "b.jsonl",
        output=tmp_path / "d", tokenizer="bytes", append_eod=False, split_documents=rule,
    )  # fmt: skip
    assert documents_of(tmp_path / "d") == [*(text for text in documents if text.strip()), "a\n\nb"]


def test_other_text_is_read_as_text_and_of_a_folder_only_where_there_is_nothing_else(tmp_path):
    for name in ("b.md", "a.py", "c.tex", "d.csv"):
        (tmp_path / name).write_text(name)
    with gzip.open(tmp_path / "e.rst.gz", "wt") as file:
        file.write("e.rst")
    run(tmp_path, output=tmp_path / "d", tokenizer="bytes", append_eod=False)
    assert documents_of(tmp_path / "d") == ["a.py", "b.md", "c.tex", "e.rst"]
    (tmp_path / "z.txt").write_text("z.txt")
    run(tmp_path, tmp_path / "b.md", output=tmp_path / "both", tokenizer="bytes", append_eod=False)
    assert documents_of(tmp_path / "both") == ["z.txt", "b.md"]


def test_of_too_few_documents_for_a_validation_part_the_summary_says_what_to_type(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n\nThree.\n")
    run(tmp_path / "a.txt", output=tmp_path / "d", tokenizer="bytes")
    assert "Next: for one document, prepare it again with --split-documents 1 --overwrite (a" in capsys.readouterr().out
    run(tmp_path / "a.txt", output=tmp_path / "d", tokenizer="bytes", split_documents="blank-line", overwrite=True)
    assert capsys.readouterr().out.rstrip().endswith("--data.split 2,1,0")


def test_a_document_without_text_stays_as_an_empty_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": ""}\n\n{"body": "three"}')
    run(tmp_path / "a.jsonl", output=tmp_path / "d", tokenizer="bytes", key="body")
    assert documents_of(tmp_path / "d") == ["one<|endoftext|>", "", "three<|endoftext|>"]
    metadata = read_metadata(tmp_path / "d")
    assert (metadata.documents, metadata.sequences) == (3, 2)


def test_a_tokenizer_is_trained_on_a_sample_of_a_large_corpus(tmp_path, lines, monkeypatch):
    monkeypatch.setattr("mjax.commands.prepare.TRAINING_CHARACTERS", lines.stat().st_size // 2)
    sampled = []

    def watched(texts, vocabulary):
        sampled.extend(texts)
        return train_sentencepiece(sampled, vocabulary)

    monkeypatch.setattr("mjax.commands.prepare.train_sentencepiece", watched)
    run(lines, output=tmp_path / "d", vocabulary=320)
    assert 10 <= len(sampled) <= 30
    assert set(sampled) < set(TEXTS)
    assert read_metadata(tmp_path / "d").documents == 40


def test_a_dataset_without_metadata_has_none(tmp_path):
    assert read_metadata(tmp_path / "d") is None


def test_the_metadata_of_an_older_version_is_read(lines, tmp_path):
    run(lines, output=tmp_path / "d", tokenizer="bytes")
    file = tmp_path / "d.json"
    values = json.loads(file.read_text())
    for newer in ("sequences", "sentences", "malformed", "malformed_examples"):
        del values[newer]
    file.write_text(json.dumps(values))
    metadata = read_metadata(tmp_path / "d")
    assert (metadata.documents, metadata.sequences, metadata.malformed) == (40, None, 0)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"tokenizer": "bytes"}'])
def test_damaged_metadata_is_named(tmp_path, content):
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(UsageError, match=r"d\.json"):
        read_metadata(tmp_path / "d")


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"tokenizer": "bytes"}, {"vocabulary": 300}])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "one"}\n{"text": oops}\n', r"bad\.jsonl:2: .*; a JSON object such as"),
        ('{"text": "one"}\n\n["two"]\n', r'bad\.jsonl:3: \["two"\] is not an object; a JSON object such as'),
        (
            '{"text": "one"}\n{"id": 3, "body": "x"}\n',
            r"bad\.jsonl:2: there is no key 'text', only 'id', 'body'; .*--key",
        ),
        ("{}", "there is no key 'text', only none"),
        ('{"text": 7}', r"bad\.jsonl:1: 'text' holds 7, which is not text"),
        ('{"text": "\\ud83d"}', r"bad\.jsonl:1: character 0 is half of a surrogate pair"),
    ],
)
def test_a_malformed_line_is_named_and_leaves_nothing(tmp_path, content, message, options):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "bad.jsonl", output=tmp_path / "d", **options)
    assert nothing_but(tmp_path, "bad.jsonl")


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([], {}, "no input; give .txt, .jsonl or .parquet files, or --demo"),
        (["here.txt"], {"workers": 0}, "--workers is 0; it must be at least 1"),
        (
            ["here.txt"],
            {"split_sentences": True, "language": "klingon"},
            "the sentence rules of 'klingon' are missing",
        ),
        (["here.txt"], {"split_documents": "sentence"}, "sentence is neither blank-line nor a number of lines; use"),
        (["here.txt"], {"split_documents": "0"}, "0 is neither blank-line nor a number of lines; use"),
        (["here.jsonl"], {"split_documents": "10"}, "for text files, and here.jsonl has its own documents"),
        ([], {"demo": True, "split_documents": "10"}, "--demo brings its own documents; leave out --split-documents"),
        (["here.txt"], {"demo": True}, "--demo brings its own text; leave out here.txt"),
        (["nowhere.txt"], {}, "there is no file nowhere.txt"),
        (["here.csv"], {}, r"here.csv is neither .txt \(one document\) nor .jsonl"),
        (["latin.txt"], {"tokenizer": "bytes"}, r"latin.txt: it is not UTF-8 \(byte 3\)"),
        (["empty.txt"], {"tokenizer": "bytes"}, "there is no text in empty.txt"),
        (["empty.txt"], {}, "there is no text to train a tokenizer on"),
        (
            ["here.txt"],
            {"tokenizer": "bytes", "vocabulary": 300},
            "--vocabulary 300 is only for training a tokenizer",
        ),
        (["here.txt"], {"tokenizer": "gpt5"}, "--tokenizer gpt5 is not a known kind"),
        (["here.txt"], {"vocabulary": 5000}, "--vocabulary 5000 is too large"),
        (["here.txt"], {"output": "out/"}, "out/ is not a prefix"),
        (["here.txt"], {"output": "out.bin"}, "out.bin is not a prefix"),
        (["here.txt"], {"output": "folder"}, "folder is not a prefix"),
    ],
)
def test_what_cannot_be_prepared_says_what_to_change(tmp_path, monkeypatch, inputs, options, message):
    monkeypatch.chdir(tmp_path)
    Path("here.txt").write_text("a little text")
    Path("here.csv").write_text("a,b")
    Path("here.jsonl").write_text('{"text": "a"}')
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("empty.txt").write_text("")
    Path("folder").mkdir()
    with pytest.raises(UsageError, match=message):
        run(*map(Path, inputs), **{"output": "d", **options})
    assert nothing_but(tmp_path, "here.txt", "here.csv", "here.jsonl", "latin.txt", "empty.txt", "folder")


@pytest.mark.parametrize("ending", ["bin", "idx", "json", "tokenizer"])
def test_an_existing_output_is_kept_unless_overwriting_is_asked_for(lines, tmp_path, ending):
    (tmp_path / f"d.{ending}").write_text("precious")
    with pytest.raises(UsageError, match=rf"d\.{ending} exists; choose another name, or add --overwrite"):
        run(lines, output=tmp_path / "d", tokenizer="bytes")
    assert (tmp_path / f"d.{ending}").read_text() == "precious"


def test_overwriting_replaces_all_parts(lines, tmp_path):
    run(lines, output=tmp_path / "d", vocabulary=330)
    run(lines, output=tmp_path / "d", tokenizer="bytes", overwrite=True)
    assert documents_of(tmp_path / "d")[0] == TEXTS[0] + "<|endoftext|>"
    assert read_metadata(tmp_path / "d").vocabulary == 257
    assert nothing_but(tmp_path / "d.tokenizer", "mjax_tokenizer.json")


def test_an_interruption_leaves_the_old_dataset_and_nothing_new(lines, tmp_path, monkeypatch):
    run(lines, output=tmp_path / "d", tokenizer="bytes")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def interrupted(self, texts):
        raise KeyboardInterrupt

    monkeypatch.setattr("mjax.data.tokenizers.ByteTokenizer.encode_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(lines, output=tmp_path / "d", tokenizer="bytes", overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_disk_that_fills_up_leaves_nothing(lines, tmp_path, monkeypatch):
    def save(self, folder):
        folder.mkdir()
        (folder / "half").write_text("")
        raise OSError("No space left on device")

    monkeypatch.setattr("mjax.data.tokenizers.ByteTokenizer.save", save)
    with pytest.raises(RunError, match="stopped: No space left on device; nothing was left"):
        run(lines, output=tmp_path / "out" / "d", tokenizer="bytes")
    assert nothing_but(tmp_path / "out")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_loses_what_was_written_is_an_error_and_nothing_is_called_ready(
    lines, tmp_path, monkeypatch, capsys, number
):
    def fsync(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match=rf"preparing .* stopped: .*{os.strerror(number)}"):
        run(lines, output=f"{tmp_path}/corpus", tokenizer="bytes")
    assert "is ready" not in capsys.readouterr().out
    assert not (tmp_path / "corpus.idx").exists()


def test_an_output_that_cannot_be_written_stops_the_run(lines, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"preparing .* stopped: "):
        run(lines, output=tmp_path / "file" / "d", tokenizer="bytes")


def test_data_is_prepared_without_jax():
    code = "import sys, mjax.commands.prepare, mjax.data.samples, mjax.data.batches; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- Malformed lines that are left out -------------------------------------------------------------------------------


def test_malformed_lines_are_left_out_when_asked_counted_and_the_first_of_them_shown(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + "{oops}\n" * 7 + '{"text": 2}\n{"text": "three"}\n')
    run(tmp_path / "a.jsonl", output=tmp_path / "d", tokenizer="bytes", malformed="skip")
    assert documents_of(tmp_path / "d") == ["one<|endoftext|>", "three<|endoftext|>"]
    metadata = read_metadata(tmp_path / "d")
    assert metadata.malformed == 8
    assert [example.split(": ")[0] for example in metadata.malformed_examples] == [
        f"{tmp_path}/a.jsonl:{line}" for line in (2, 3, 4, 5, 6)
    ]
    shown = capsys.readouterr().out
    assert "8  lines left out" in shown
    assert f"left out: {tmp_path}/a.jsonl:2: Expecting property name" in shown


def test_they_are_left_out_of_what_a_tokenizer_is_trained_on_and_counted_once(lines, tmp_path):
    with lines.open("a") as stream:
        stream.write("{oops}\n")
    run(lines, output=tmp_path / "d", vocabulary=330, malformed="skip")
    assert read_metadata(tmp_path / "d").malformed == 1


# --- Workers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("mjax.data.blocks.SIZE", 300)


def test_the_bytes_do_not_depend_on_the_number_of_workers(lines, tmp_path, small_blocks):
    (tmp_path / "z.txt").write_text("the end")
    with lines.open("a") as stream:
        stream.write('{"text": ""}\n{oops}\n{"text": "née"}\n')
    model = tmp_path / "w1.tokenizer" / "tokenizer.model"
    for workers in (1, 2, 3):
        tokenizer = {"vocabulary": 330} if workers == 1 else {"tokenizer": f"sentencepiece:{model}"}
        summary = run(
            lines, tmp_path / "z.txt", output=tmp_path / f"w{workers}", workers=workers, malformed="skip", **tokenizer
        )
        assert summary.workers == workers
    assert IndexedDataset(tmp_path / "w1").documents == 43
    for part in ("bin", "idx", "json", "tokenizer/tokenizer.model"):
        first = (tmp_path / f"w1.{part}").read_bytes()
        assert all((tmp_path / f"w{workers}.{part}").read_bytes() == first for workers in (2, 3)), part


def test_the_first_malformed_line_is_named_whichever_worker_meets_it(lines, tmp_path, small_blocks):
    with lines.open("a") as stream:
        stream.write("{oops}\n" + '{"text": "and on"}\n' * 100 + "{again}\n")
    with pytest.raises(UsageError, match=r"corpus\.jsonl:41: .*--malformed skip"):
        run(lines, output=tmp_path / "d", tokenizer="bytes", workers=2)
    assert nothing_but(tmp_path, "corpus.jsonl")


def test_a_worker_that_is_killed_ends_the_run_in_one_sentence(lines, tmp_path, small_blocks, monkeypatch):
    def killing_a_worker(*arguments):
        for number, block in enumerate(read_blocks(*arguments)):
            if number == 4:
                for worker in multiprocessing.active_children():
                    worker.kill()
            yield block

    monkeypatch.setattr("mjax.data.corpus.read_blocks", killing_a_worker)
    with pytest.raises(RunError, match="2 worker processes was killed, most likely for lack of memory"):
        run(lines, output=tmp_path / "d", tokenizer="bytes", workers=2)
    assert nothing_but(tmp_path, "corpus.jsonl")


def test_little_text_is_not_worth_another_process(lines, tmp_path):
    assert run(lines, output=tmp_path / "d", tokenizer="bytes").workers == 1


# --- The command line -------------------------------------------------------------------------------------------------


def test_the_command_line_gives_the_arguments():
    line = "a.txt b.jsonl --output data/x --key body --tokenizer bytes --no-append-eod --overwrite"
    line += " --workers 3 --malformed skip"
    assert tyro.cli(PrepareArguments, args=line.split()) == PrepareArguments(
        output="data/x",
        inputs=(Path("a.txt"), Path("b.jsonl")),
        key="body",
        tokenizer="bytes",
        append_eod=False,
        overwrite=True,
        workers=3,
        malformed="skip",
    )
    assert tyro.cli(PrepareArguments, args=["--demo", "--output", "x"]) == PrepareArguments(output="x", demo=True)


def test_the_summary_as_json_is_one_object(lines, tmp_path, capsys):
    run(lines, output=tmp_path / "d", tokenizer="bytes", json=True)
    values = json.loads(capsys.readouterr().out)
    assert (values["prefix"], values["documents"], values["workers"]) == (f"{tmp_path}/d", 40, 1)
    assert values["files"] == [f"{tmp_path}/d.{part}" for part in ("bin", "idx", "json", "tokenizer")]
    assert values["documents_per_second"] == pytest.approx(40 / values["encoding_seconds"])
