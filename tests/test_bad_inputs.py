"""What a person may get wrong: each gives one clear sentence, exit code 2 (nothing started) or 1, and loses nothing."""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mjax import cli
from mjax.data.indexed import IndexedDatasetWriter
from tests.conftest import ROOT
from tests.test_train_command import command, environment

TINY = ["--config", str(ROOT / "tests" / "tiny_config.py")]
MESH = [
    "--mesh.data",
    "8",
    "--mesh.model",
    "2",
    "--train.micro-batch",
    "1",
]  # the simulated devices of the test process


def fingerprint(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write_dataset(prefix: Path, vocabulary=257, documents=40, length=50, largest=256):
    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, vocabulary) as writer:
        for _ in range(documents):
            writer.add_document(random.integers(0, largest + 1, length))
    return prefix


@pytest.fixture(scope="module")
def place(tmp_path_factory, quick_runs):
    """A folder with a data set and a finished run, which nothing below may change."""
    folder = tmp_path_factory.mktemp("place")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {i}: the quick brown fox " * 8}) + "\n" for i in range(60)))
    arguments = ["prepare", str(lines), "--tokenizer", "bytes", "--output", str(folder / "data" / "corpus")]
    assert cli.main(arguments) == 0
    write_dataset(folder / "data" / "foreign")
    assert cli.main(_continuing()(folder)) == 0
    return folder


def _train(*flags):
    return lambda place: ["train", *TINY, *MESH, "--runs", str(place / "runs"), "--name", "new", *flags]


def _reading(prefix, *flags):
    def arguments(place):
        prefixes = [str(place / word) if word.startswith(("data/", "scratch/")) else word for word in (prefix, *flags)]
        return _train("--data.no-mock", "--data.path", *prefixes)(place)

    return arguments


def _damaged(name, change):
    """Train on a copy of the foreign data set after `change(bin, idx)`."""

    def arguments(place):
        prefix = place / "scratch" / name
        prefix.parent.mkdir(exist_ok=True)
        for suffix in (".bin", ".idx"):
            shutil.copy(place / "data" / f"foreign{suffix}", prefix.with_suffix(suffix))
        change(prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))
        return _reading(f"scratch/{name}")(place)

    return arguments


def _prepare(content, *flags, suffix=".txt"):
    def arguments(place):
        file = place / "scratch" / f"input{abs(hash(content))}{suffix}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        return ["prepare", str(file), "--output", str(place / "scratch" / "prepared"), *flags]

    return arguments


def _continuing(*flags):
    return lambda place: [
        "train", *TINY, *MESH, "--runs", str(place / "runs"), "--name", "done", "--train.steps", "4", "--data.no-mock",
        "--data.path", str(place / "data" / "corpus"), "--data.split", "80,20,0", *flags,
    ]  # fmt: skip


def _copy_of_run(name, change):
    def arguments(place):
        run = place / "scratch" / name
        shutil.copytree(place / "runs" / "done", run)
        change(run)
        return ["train", "--resume", str(run), "--train.steps", "6"]

    return arguments


def _generate(*flags):
    return lambda place: ["generate", "--checkpoint", str(place / "runs" / "done"), *flags]


def _truncate(file, size=10):
    os.truncate(file, size)


def _flip_every_checkpoint(run):
    for file in (run / "checkpoints").glob("*/model/**/*"):
        if file.is_file() and file.stat().st_size > 1000:
            content = bytearray(file.read_bytes())
            content[500] ^= 1
            file.write_bytes(bytes(content))


WRONG = {
    "unknown config": (lambda p: ["train", "--config", "gpt_8c"], 2, "no config 'gpt_8c', did you mean 'gpt_8b'?"),
    "config file that is not there": (lambda p: ["train", "--config", "mine.py"], 2, "there is no config file mine.py"),
    "unknown command": (lambda p: ["trian"], 2, "there is no command 'trian', did you mean 'train'?"),
    "unknown command of a group": (
        lambda p: ["data", "inspct"], 2, "mjax data has no command 'inspct', did you mean 'inspect'?",
    ),
    "misspelt flag": (_train("--mesh.dta", "2"), 2, "mjax train has no --mesh.dta, did you mean --mesh.data?"),
    "flag of another trainer": (
        _train("--tensor-model-parallel-size", "2"), 2, "no --tensor-model-parallel-size; type --mesh.model 2",
    ),
    "a context that does not divide the positions": (
        _train("--mesh.data", "5", "--mesh.context", "3"), 2, "--mesh.context 3 cannot cut 16 positions into 6",
    ),
    "offloading in a pipeline": (
        _train("--mesh.pipe", "2", "--mesh.data", "4", "--train.recompute", "offload"), 2, "--train.recompute offload",
    ),
    "a task of evaluation that is not there": (
        lambda p: ["evaluate", "--run", str(p / "runs" / "done"), "--task", "needles", "--data", "x"], 2, "needle",
    ),
    "run and config": (
        lambda p: ["train", "--run", str(p / "runs" / "done"), *TINY], 2, "has no effect with --run",
    ),
    "value of another type": (_train("--train.steps", "many"), 2, "many"),
    "negative batch": (_train("--train.global-batch", "-8"), 2, "--train.global-batch is -8; it must be at least 1"),
    "batch that does not divide": (_train("--train.global-batch", "12"), 2, "does not divide over --mesh.data 8"),
    "ramp-up that does not divide": (
        _train("--train.batch-rampup", "4", "4", "100"), 2, "from step 1 on, which is not a multiple of 8",
    ),
    "ramp-up past the batch": (_train("--train.batch-rampup", "8", "8", "100"), 2, "does not start below"),
    "ramp-up of two numbers": (_train("--train.batch-rampup", "8", "8"), 2, "INT INT INT"),
    "ramp-up and schedule": (
        _train("--train.batch-rampup", "8", "8", "9", "--train.batch-schedule", "0:8"), 2, "leave one of them out",
    ),
    "schedule of another form": (_train("--train.batch-schedule", "8,16"), 2, "write it like '0:768 250B:1536'"),
    "schedule that ends elsewhere": (
        _train("--train.batch-schedule", "0:8 1K:16"), 2, "use --train.global-batch 16",
    ),
    "heads that do not divide": (_train("--mesh.model", "3"), 2, "does not divide heads 4; use 1, 2 or 4"),
    "more devices than there are": (_train("--mesh.model", "4"), 2, "needs 32 devices (data 8 × model 4); 16 found"),
    "no data": (_train("--data.no-mock"), 2, "has no data: prepare some with `python -m mjax prepare"),
    "missing data": (_reading("data/nothing"), 2, "nothing"),
    "truncated .bin": (_damaged("bin", lambda b, i: _truncate(b)), 2, "bin.bin"),
    "truncated .idx": (_damaged("idx", lambda b, i: _truncate(i, 40)), 2, "idx.idx"),
    "foreign .idx": (_damaged("magic", lambda b, i: i.write_bytes(b"TNTIDX\0\0" * 20)), 2, "magic.idx"),
    "ids beyond the vocabulary": (_reading("data/foreign", "--model.vocabulary", "100"), 2, "holds the id"),
    "vocabulary below the tokenizer's": (
        _reading("data/corpus", "--model.vocabulary", "100"), 2, "use --model.vocabulary 257",
    ),
    "validation part too small": (_reading("data/foreign", "--data.split", "1,0,0"), 2, "validation part"),
    "weights for some datasets": (
        _train("--data.no-mock", "--data.path", "0.3", "data/a", "data/b"), 2, "write a weight before every prefix",
    ),
    "training without validation": (
        _train("--data.no-mock", "--data.train-path", "data/a"), 2, "add --data.valid-path, or --train.eval-interval 0",
    ),
    "a blend that is used up": (
        _reading("data/foreign", "data/foreign", "--data.split", "1,1,0", "--train.steps", "100000"), 2,
        "give weights to go over them again, such as 0.5 PREFIX 0.5 PREFIX",
    ),
    "nonsense split": (_reading("data/foreign", "--data.split", "all"), 2, "--data.split"),
    "cuDNN on a CPU": (_train("--model.attention", "cudnn"), 2, "it needs an NVIDIA GPU"),
    "float64 that JAX has not been told of": (_train("--precision.compute", "fp64"), 2, "set JAX_ENABLE_X64=1"),
    "no devices to simulate": (_train("--simulate", "0"), 2, "--simulate is 0"),
    "resuming nothing": (lambda p: ["train", "--resume", str(p)], 2, "has no checkpoint"),
    "checkpoint of another model": (_continuing("--model.hidden", "64"), 2, "model (model.hidden 32, now 64)"),
    "another GELU": (_continuing("--model.activation", "gelu_erf"), 2, "(model.activation gelu_tanh, now gelu_erf)"),
    "another kind of positions": (_continuing("--model.positions", "alibi"), 2, "(model.positions learned, now alibi)"),
    "another learning rate in a run": (
        _continuing("--optimizer.learning-rate", "2e-3"), 2,
        "was trained with other settings (optimizer.learning_rate 0.01, now 0.002)",
    ),
    "another seed in a run named by its folder": (
        lambda p: ["train", "--resume", str(p / "runs" / "done"), "--train.seed", "1"], 2,
        "config.json --name NEW instead of --run, and to continue this one with the change --allow-change",
    ),
    "config.json that is not JSON": (
        _copy_of_run("not_json", lambda run: (run / "config.json").write_text("{")), 2, "is not JSON",
    ),
    "config.json with a code in it": (
        _copy_of_run("code", lambda run: (run / "config.json").write_text('{"model": "__import__(\'os\')"}')), 2,
        "must be an object",
    ),
    "every checkpoint damaged": (_copy_of_run("damaged", _flip_every_checkpoint), 1, "is damaged"),
    "missing text": (lambda p: ["prepare", str(p / "no.txt"), "--output", str(p / "scratch" / "o")], 2, "no.txt"),
    "empty corpus": (_prepare(""), 2, "there is no text"),
    "malformed JSON line": (_prepare('{"text": "good"}\n{"text": \n', suffix=".jsonl"), 2, ":2"),
    "JSON without text": (_prepare('{"body": "good"}\n', suffix=".jsonl"), 2, "body"),
    "unknown tokenizer": (_prepare("some text", "--tokenizer", "morse"), 2, "morse"),
    "output that is there": (
        lambda p: ["prepare", str(p / "text.txt"), "--output", str(p / "data" / "corpus"), "--tokenizer", "bytes"], 2,
        "--overwrite",
    ),
    "generating from nothing": (lambda p: ["generate", "--checkpoint", "no", "--prompt", "a"], 2, "config.json"),
    "no prompt": (_generate(), 2, "--prompt"),
    "prompt beyond the positions": (_generate("--prompt", "word " * 40), 2, "positions"),
    "negative temperature": (_generate("--prompt", "a", "--temperature", "-1"), 2, "--temperature is -1"),
    "runs folder that is a file": (
        lambda p: ["train", *TINY, *MESH, "--runs", str(p / "text.txt"), "--name", "x"], 1, "text.txt",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_mistake_gets_one_sentence_and_loses_nothing(what, place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    arguments, code, words = WRONG[what]
    kept = [place / "data", place / "runs" / "done"]
    before = [fingerprint(folder) for folder in kept]
    argv = arguments(place)
    capsys.readouterr()
    try:
        found = cli.main(argv)
    except SystemExit as stop:  # tyro's own errors
        found = stop.code
    message = capsys.readouterr().err
    assert found == code, message
    assert words in message
    if message.startswith("mjax: error: "):
        assert message.count("\n") == 1, "one sentence, on one line"
    assert "Traceback" not in message
    assert [fingerprint(folder) for folder in kept] == before


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_that_is_not_installed_is_said_before_anything_starts(place, capsys):
    assert cli.main(_train("--log.wandb", "project")(place)) == 2
    assert "pip install wandb" in capsys.readouterr().err


def test_two_processes_cannot_train_in_one_folder(place, tmp_path):
    from mjax.state.runs import locked

    with locked(tmp_path / "run", print):
        result = subprocess.run(command(tmp_path), env=environment(), capture_output=True, text=True)
    assert result.returncode == 2
    assert "is in use by another process" in result.stderr


def test_a_full_disk_stops_the_run_with_its_reason_and_keeps_what_was_saved(tmp_path, fewer_devices, capsys):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount the small disk that this fills")
    disk = tmp_path / "disk"
    disk.mkdir()
    # Room for one checkpoint of 0.7 MB and the small files, not for two.
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        argv = ["train", *command(disk, "--checkpoint.interval", "4", "--checkpoint.keep-last", "3")[2:]]
        assert cli.main(argv) == 1
        said = capsys.readouterr().err
        assert "No space left on device" in said
        assert "Traceback" not in said
        saved = [entry.name for entry in (disk / "run" / "checkpoints").iterdir() if entry.name.isdigit()]
        assert saved == ["4"]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert cli.main(argv) == 0
        assert "continued after step 4" in capsys.readouterr().out
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
