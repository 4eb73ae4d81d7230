"""Outputs of the text commands in an object store: the same bytes as of local ones, whatever happens on the way."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest

from mjax.commands import cli, prepare
from mjax.data.indexed import IndexedDataset
from mjax.errors import RunError, UsageError
from mjax.utils import ranges, stores
from mjax.utils.stores import Store
from tests.data.test_tasks import COMMANDS, OUTPUTS, typed
from tests.object_store import bucket

pytestmark = pytest.mark.ci
pytest.importorskip("s3fs")
FOLDER = "s3://bucket/data/a [1] é"


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"document {number} with {'some ' * 12}words"}) + "\n" for number in range(60)]
    Path("in.jsonl").write_text("".join(rows))
    Path("evaluation.txt").write_text("none of these nine words is in any document there")
    with bucket(monkeypatch, tmp_path / "caches") as server:
        yield server


def run(command, output, **options):
    function, arguments, more = COMMANDS[command]
    output = output if command == "prepare" else Path(output)
    return function(arguments(inputs=(Path("in.jsonl"),), output=output, **more, **options))


def contents(folder):
    """The files of an output by name, without what names the output itself."""
    if isinstance(folder, Path):
        found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    else:
        found = {name: Store("s3").read(f"{folder}/{name}") for name in Store("s3").files(folder)}
    return {name: content.replace(str(folder).encode(), b"") for name, content in found.items()}


def expected(command, folder=Path("here")):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    run(command, f"{folder}/{OUTPUTS[command]}")
    return contents(folder)


@pytest.mark.parametrize("command", OUTPUTS)
def test_output_in_a_store_has_the_bytes_of_a_local_one(server, command, capsys):
    files = expected(command)
    capsys.readouterr()
    flags = ["--output", f"{FOLDER}/{OUTPUTS[command]}", "--tasks", "3", "--workers", "2"]
    line = [word for word in typed(command, ["in.jsonl"])[3:] if word not in ("--output", OUTPUTS[command])]
    Store("s3").write(f"{FOLDER}/out.mask", b"of older conversations")
    assert cli.main([*line, *flags, "--overwrite"]) == 0
    if command == "prepare":
        assert f"--data.path '{FOLDER}/out'" in capsys.readouterr().out
    else:
        Store("s3").remove([f"{FOLDER}/out.mask"])
    assert contents(FOLDER) == files
    assert not list(Path().glob("*.tmp"))
    assert cli.main([*line, *flags]) == 2
    assert f"{FOLDER}/out" in capsys.readouterr().err


def test_dataset_in_a_store_is_inspected_and_merged(server, capsys):
    for name in ("a", "b"):
        run("prepare", name)
        run("prepare", f"{FOLDER}/{name}")
    ranges.local_prefix.cache_clear()
    capsys.readouterr()
    assert cli.main(["data", "inspect", f"{FOLDER}/a", "--json", "--document", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["sample"].startswith("document 7 with")
    assert cli.main(["data", "merge", "whole", "a", "b"]) == 0
    assert cli.main(["data", "merge", f"{FOLDER}/whole", f"{FOLDER}/a", f"{FOLDER}/b"]) == 0
    assert Store("s3").read(f"{FOLDER}/whole.bin") == Path("whole.bin").read_bytes()
    assert IndexedDataset(f"{FOLDER}/whole").digest == IndexedDataset("whole").digest


def write(command, environment, overwrite):
    os.environ.update(environment)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run(command, f"{FOLDER}/{OUTPUTS[command]}", overwrite=overwrite)


@pytest.mark.parametrize("command", ["prepare", "clean"])
def test_copies_killed_at_any_request_continue(server, command):
    """SIGKILL before or after a PUT takes effect, of the last file and the one before; an older output is replaced."""
    spawn = multiprocessing.get_context("forkserver")
    spawn.set_forkserver_preload(["s3fs", __name__])
    files, last = expected(command), "out.idx" if command == "prepare" else "out.jsonl"
    older = Path("in.jsonl").read_bytes()
    environment = {**server.environment(), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}

    def killed_at(number, after=None):
        if number or not server.writes:
            Store("s3").put([(Path("in.jsonl"), f"{FOLDER}/{name}") for name in files])
        process = spawn.Process(target=write, args=(command, environment, True))
        process.start()
        server.kill_at(number, process.pid, after=after)
        process.join(60)
        return process.exitcode

    assert killed_at(0) == 0
    writes = server.writes
    assert writes >= 5
    for number, after in ((4, True), (writes - 1, True), (writes, False), (writes, True)):
        assert killed_at(number, after) == -signal.SIGKILL
        there = contents(FOLDER)
        assert there.get(last) in (None, older, files[last])
        assert there.get(last) != files[last] or there == files
        assert command != "prepare" or there.get(last) != older or there["out.bin"] == older
        assert killed_at(0) == 0
        assert contents(FOLDER) == files
        assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize("command", ["prepare", "clean"])
def test_store_that_fails_is_written_by_the_next_command(server, command, monkeypatch, capsys):
    """It answers 503 for longer than a command waits: the work is stored, and not repeated."""
    files = expected(command)
    monkeypatch.setattr(stores, "PATIENCE", 0.5)
    server.rule = lambda environ: environ["REQUEST_METHOD"] == "PUT" and not environ["PATH_INFO"].endswith(".tmp")
    with pytest.raises(RunError, match=r"was not copied: writing .* request rate.*; the same command in this folder"):
        run(command, f"{FOLDER}/{OUTPUTS[command]}")
    assert f"copying to {FOLDER}/out" in capsys.readouterr().err
    server.rule = None
    monkeypatch.setattr(prepare, "Encoder", None)
    monkeypatch.setattr("mjax.commands.clean.CleanJob.clean", None)
    run(command, f"{FOLDER}/{OUTPUTS[command]}")
    assert contents(FOLDER) == files
    assert not list(Path().glob("*.tmp"))


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("https://127.0.0.1:1/x", "https://127.0.0.1:1/x.* cannot be written .* give a local name such as x"),
        ("s3://none/x", "s3://none/x.*: there is no bucket none; create it"),
        ("s3://bucket", "s3://bucket.* is a bucket; give a name in it, such as s3://bucket.*/corpus"),
    ],
)
def test_impossible_address_is_one_sentence(server, output, sentence):
    with pytest.raises(UsageError, match=sentence):
        run("prepare", output)
    if output != "s3://bucket":
        with pytest.raises(UsageError, match=sentence):
            run("clean", f"{output}.jsonl")


@pytest.mark.parametrize(
    "command",
    [
        "convert from-hf hf s3://bucket/x",
        "convert from-hf s3://bucket/x run",
        "convert to-hf run s3://bucket/x",
        "convert to-megatron run s3://bucket/x",
        "finetune --run run --task mnli --train a.tsv --validation a.tsv --output s3://bucket/x",
    ],
)
def test_command_without_outputs_in_stores_names_the_address(server, command, capsys):
    Path("hf").mkdir()
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert "mjax: error: s3://bucket/x is " in error
    assert error.count("\n") == 1


def test_unwritable_bucket_is_one_sentence(server, monkeypatch):
    def denied(*_):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(Store("s3").fs, "pipe_file", denied)
    with pytest.raises(UsageError, match=r"writing s3://bucket/x.* failed \(Access Denied\); check the cred"):
        run("prepare", "s3://bucket/x")
    assert not list(Path().glob("*.tmp"))
