"""User errors: each gets one sentence, exit code 2 (nothing started) or 1, and loses nothing."""

import hashlib
import io
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mjax.checkpoint.folders import lock_folder
from mjax.commands import cli
from mjax.config.checks import check_devices
from mjax.data.indexed import IndexedDatasetWriter
from mjax.errors import MAX_MESSAGE_CHARACTERS, RunError, UsageError
from tests.conftest import ROOT

TINY = str(ROOT / "tests" / "tiny_config.py")


def fingerprint(folder: Path) -> dict[str, str]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != ".lock"]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def sentence_of(argv, code, capsys):
    """Return stderr of a command line that must end with `code`."""
    try:
        found = cli.main(argv)
    except SystemExit as stop:  # tyro's own errors
        found = stop.code
    message = capsys.readouterr().err
    assert found == code, message
    assert message.count("\n") == 1 or not message.startswith("mjax: error: "), "one sentence, on one line"
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host:8080/a.txt: no", "https://…@host:8080/a.txt: no"),
        ("s3:/key:pa@ss@bucket/a.txt", "s3:/…@bucket/a.txt"),  # as a Path
        ("https://host/a.txt?token; give", "https://host/a.txt?…; give"),
        ("('https://host/a?X-Amz-Date=1&b=c/d', 3)", "('https://host/a?…', 3)"),
        ("https://host/a.jsonl?…:3: what?", "https://host/a.jsonl?…:3: what?"),
        ("s3://bucket/20?6/part-?.jsonl and /a/b@c", "s3://bucket/20?6/part-?.jsonl and /a/b@c"),
    ],
)
def test_sentence_has_no_secret_of_an_address(text, shown):
    assert str(UsageError(text)) == str(RunError(UsageError(text))) == shown


TRAIN_FLAGS = {
    # --- what the mesh divides
    "--mesh.model 3": "does not divide heads 16; use 1, 2, 4, 8 or 16",
    "--model.feed-forward 1000 --mesh.model 16": "does not divide feed-forward width 1000",
    "--model.heads 7": "does not divide hidden size 1024; use 1, 2, 4, 8",
    "--model.kind llama --model.hidden 384 --model.heads 24 --model.kv-heads 12 --mesh.model 8": "use 1, 2 or 4",
    "--model.kind llama --model.kv-heads 5": "--model.kv-heads 5 does not divide --model.heads 16",
    "--model.kind llama --model.global-attention-interval 2": "add --model.window",
    "--model.kind llama --model.global-attention-interval 5 --model.window 8 --mesh.pipe 12": "use at most 8 stages",
    "--model.kind llama --model.rope-factor 8": "add --model.rope-scaling yarn, llama3 or linear",
    "--model.kind llama --model.rope-scaling yarn": "add --model.rope-original-length",
    "--model.kind bert --model.vocabulary 2": "is too small for a BERT",
    "--model.sequence 2048 --model.max-position-embeddings 1024": "exceeds the 1024 learned positions",
    "--mesh.data 3": "use a multiple of 3, such as 513",
    "--train.micro-batch 3": "does not divide the 512 sequences",
    "--mesh.expert 2": "needs experts, and a GPT is dense; remove it",
    "--model.kind mixture --mesh.expert 4 --mesh.data 2": "does not divide --mesh.data 2",
    "--mesh.replicate 2 --mesh.data 4": "--mesh.zero 0 makes none; add --mesh.zero 3",
    "--mesh.replicate 3 --mesh.data 4 --mesh.zero 3": "does not divide --mesh.data 4: it is the number of groups",
    "--model.kind mixture --mesh.expert 3 --mesh.data 3 --train.global-batch 24": "does not divide 8 experts",
    "--model.kind mixture --model.router-n-groups 4 --model.router-topk-groups 1 --model.experts-per-token 3": "the 2",
    "--mesh.context 3": "cannot cut 1024 positions into 6 equal parts",
    "--mesh.context 3 --mesh.context-attention ulysses --model.sequence 768": "use --mesh.context 2, 4, 8 or 16",
    "--mesh.model 4 --mesh.sequence-parallel --train.micro-batch 1 --model.sequence 1022": "a multiple of 4, or",
    # --- pipelines
    "--mesh.pipe 2 --mesh.virtual-stages 24": "is more than a GPT can fill with 24 layers; use at most 24 stages",
    "--mesh.pipe 2 --mesh.stage-layers 20 5": "does not fit: --mesh.pipe 2 × --mesh.virtual-stages 1 needs 2 numbers",
    "--mesh.virtual-stages 2": "--mesh.virtual-stages 2 needs a pipeline",
    "--mesh.pipe 3 --mesh.virtual-stages 2": "micro-batches",
    "--mesh.pipe 2 --train.unroll on": "(stages save activations by slot); remove it",
    "--mesh.pipe 2 --train.recompute offload": "use --train.recompute full",
    # --- offloading
    "--train.recompute offload --train.unroll on": "offload is not supported with --train.unroll on",
    # --- the batch
    "--train.batch-rampup 504 5 100": "in whole increments; use a START below it and an INCREMENT that divides",
    "--train.batch-rampup 4 4 100": "not a multiple of 8 (data 1 × micro-batch 8); use multiples, also as",
    "--train.batch-rampup 256 16 100000 --mesh.pipe 4 --mesh.virtual-stages 2": "272 from step 26 on, which is not a",
    # --- settings that do nothing, or that contradict
    "--optimizer.warmup-steps 300000": "must be below the 300000 steps of the schedule",
    "--optimizer.min-learning-rate 1": "is above --optimizer.learning-rate",
    "--optimizer.schedule wsd --optimizer.wsd-decay-steps 299999": "use 297000 or fewer",
    "--optimizer.wsd-decay minus_sqrt": "is for --optimizer.schedule wsd",
    "--data.train-samples 7": "is below the 153600000 samples",
    "--data.no-pack": "is for samples of conversations, and this run has text; remove it",
}
"""Flags after `train --config gpt_345m` on one device."""


@pytest.mark.parametrize("flags", TRAIN_FLAGS)
def test_impossible_settings_get_one_sentence(flags, capsys):
    argv = ["train", "--config", "gpt_345m", "--data.mock", "--mesh.data", "1", *shlex.split(flags)]
    assert TRAIN_FLAGS[flags] in sentence_of(argv, 2, capsys)


@pytest.fixture(scope="module")
def one_device(quick_runs):
    """A run sees a machine with one device, so that small programs suffice."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mjax.run.loop.check_devices", lambda config, _, name: check_devices(config, 1, name))
        yield


def write_datasets(folder: Path) -> None:
    """A dataset of ids up to 256, and copies of it that are cut off."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(folder / "foreign", 257) as writer:
        for _ in range(40):
            writer.add_document(random.integers(0, 257, 50))
    for name in ("cut_bin", "cut_idx"):
        for suffix in (".bin", ".idx"):
            shutil.copy(folder / f"foreign{suffix}", folder / f"{name}{suffix}")
    os.truncate(folder / "cut_bin.bin", 10)
    os.truncate(folder / "cut_idx.idx", 40)


@pytest.fixture(scope="module")
def place(tmp_path_factory, one_device):
    """A folder with texts, datasets and runs, which no mistake may change."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    lines = [json.dumps({"text": f"document {i}: the quick brown fox " * 8}) for i in range(60)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    (folder / "empty.txt").touch()
    (folder / "malformed.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["prepare", "lines.jsonl", "--tokenizer", "bytes", "--output", "data/corpus"]) == 0
        write_datasets(folder / "data")
        assert cli.main(shlex.split(CONTINUE.replace("TINY", TINY))) == 0
        with lock_folder(folder / "runs" / "busy", print):
            yield folder


CONTINUE = "train --config TINY --name done --train.steps 4 --data.no-mock --data.path data/corpus --data.split 80,20,0"
READ = "train --config TINY --name new --data.no-mock --data.path"
NEW = "train --config TINY --name new"
GENERATE = "generate --run runs/done"

LONG = "x" * 5000

MISTAKES = {
    "train --config gpt_8c": "no config gpt_8c; did you mean gpt_8b? `mjax configs` lists all",
    "train --config mine.py": "there is no config file mine.py",
    "train --config runs/done": "runs/done is a run folder; type --run runs/done, or --config runs/done/config.json",
    "--config gpt_demo": "--config follows a command; type `python train.py --config gpt_demo`",
    "trian": "no command 'trian'; did you mean `mjax train`?",
    "convert publish runs/done out": "no command 'publish'; `mjax convert --help` lists them",
    f"{NEW} --train.steps many": "many",
    "train --run runs/done --config TINY": "has no effect with --run",
    "train --run nowhere": "nowhere does not exist; give a run folder",
    "train --run runs/done --step 3": "has no such checkpoint; use 4",
    f"{NEW} --step 3": "goes with --run or --init",
    f"{NEW} --mesh.model 4 --mesh.data 2": "needs 8 devices (data 2 × model 4); 1 available",
    f"{NEW} --name busy": "is in use by another process",
    f"{NEW} --simulate 0": "0 devices cannot be simulated; give 1 or more",
    f"{NEW} --log.wandb project": "pip install wandb",
    f"{NEW} --log.trackio project": "pip install trackio",
    f"{NEW} --model.attention cudnn": "it needs an NVIDIA GPU",
    f"{NEW} --precision.compute fp64": "set JAX_ENABLE_X64=1",
    # --- data
    "train --config gpt_demo": "data/demo is not prepared; type `mjax prepare --demo --output data/demo`, or use",
    f"{READ} data/none": "data/none is not prepared, data/none.bin does not exist; type `mjax prepare FILES",
    f"{READ} text.txt": "text.txt is not a dataset; type `mjax prepare text.txt --output data/NAME`",
    f"{NEW} --data.no-mock": "has no data; type `mjax prepare FILES --output data/corpus`",
    f"{READ} data/cut_bin": "cut_bin.bin",
    f"{READ} data/cut_idx": "cut_idx.idx",
    f"{READ} data/foreign --model.vocabulary 100": "holds the id",
    f"{READ} data/corpus --model.vocabulary 100": "use --model.vocabulary 257",
    f"{READ} data/foreign --data.split 1,0,0": "validation split",
    f"{READ} data/foreign --data.split all": "--data.split",
    f"{READ} 0.3 data/foreign data/corpus": "write a weight above 0 before every prefix",
    f"{READ} data/foreign data/foreign --data.split 1,1,0 --train.steps 100000": "0.5 PREFIX 0.5 PREFIX",
    f"{READ} data/foreign --data.train-path data/corpus": "--data.path excludes --data.train-path",
    f"{NEW} --data.no-mock --data.train-path data/foreign": "add --data.valid-path, or --train.eval-interval 0",
    # --- names that no file system has
    f"train --name {LONG}": "xxxx",
    f"prepare {LONG} --output y": "xxxx",
    # --- a run that is there
    f"{CONTINUE} --model.hidden 64": "model (model.hidden 32, now 64)",
    f"{CONTINUE} --optimizer.learning-rate 2e-3": "(optimizer.learning_rate 0.01, now 0.002)",
    "train --run runs/done --train.seed 1": "to continue this one with the change --allow-change",
    # --- other commands
    "prepare no.txt --output scratch/a": "no.txt",
    "prepare empty.txt --output scratch/b": "there is no text",
    "prepare malformed.jsonl --output scratch/c": ":2",
    "prepare text.txt --output scratch/e --tokenizer morse": "morse",
    "prepare text.txt --output x --tokenizer meta-llama/Llama-3.1-8B": "--tokenizer hf:Llama-3.1-8B/tokenizer.json",
    "prepare text.txt --output data/corpus --tokenizer bytes": "--overwrite",
    "convert from-hf runs/done scratch/f --vocabulary-multiple 0": "is 0; it must be at least 1",
    "convert to-megatron runs/done scratch/f --tensor 2": "--tensor 2 is for --format torch",
    "evaluate --run runs/done --task position --data x": "positions",
    "evaluate --run runs/done --task mmlu --data x": "`mjax lm-eval --run runs/done --tasks mmlu`",
    "evaluate --task mmlu": "mjax evaluate needs --run and --data; type mjax evaluate --run",
    "generate --run no --prompt a": "no does not exist",
    "generate --run runs/dne --prompt a": "runs/dne does not exist; did you mean runs/done?",
    "generate --run runs/x --prompt a": "runs/x does not exist; runs in runs: done",
    "generate --run done --prompt a": "done does not exist; did you mean runs/done?",
    "generate --run runs/done/checkpoints/4 --prompt a": "no config.json; did you mean runs/done --step 4?",
    "generate --run 4 --prompt a": "4 does not exist; give a run folder such as runs/demo, and --step 4 for its",
    "sft --init Qwen/Qwen3-0.6B --data x": "type `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`",
    "generate --prompt a": "mjax generate needs --run; type mjax generate --run runs/demo --prompt hi",
    "convert to-hf": "mjax convert to-hf needs RUN and DIR",
    "generate --run runs/done --prompt": "--prompt needs a value, such as --prompt TEXT",
    "plan --gpu": "--gpu needs a value, such as --gpu h100",
    "clean text.txt --output scratch/x.jsonl --filter f": "--filter f names no function; write FILE.py:FUNCTION",
    "generate --run runs/done a": "a belongs to no flag of mjax generate",
    GENERATE: "--prompt",
    f"{GENERATE} --prompt '{'word ' * 40}'": "positions",
    f"{GENERATE} --prompt a --temperature -1": "--temperature is -1",
}
ENDED_LATER = "train --config TINY --runs text.txt --name x"
"""Seen only after the start: exit code 1."""


@pytest.mark.parametrize("line", [*MISTAKES, ENDED_LATER], ids=lambda line: line[:80])
def test_user_error_gets_one_sentence_and_loses_nothing(line, place, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for package in ("wandb", "trackio"):  # as where they are not installed
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(place)
    code, words = (2, MISTAKES[line]) if line in MISTAKES else (1, "text.txt")
    before = fingerprint(place)
    capsys.readouterr()
    message = sentence_of(shlex.split(line.replace("TINY", TINY)), code, capsys)
    assert words in message
    assert "Errno" not in message or code == 1
    assert len(message) < 2 * MAX_MESSAGE_CHARACTERS
    assert before.items() <= fingerprint(place).items()
