"""Failures of records and displays: announced once, nothing recorded is lost, and the run continues."""

import errno
import fcntl
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mjax.checkpoint.folders import lock_folder
from mjax.config import Config, save_config
from mjax.run import metrics
from mjax.run.display import Display, non_fatal_console
from mjax.run.metrics import read_metrics
from mjax.run.start import write_environment
from tests.conftest import ROOT
from tests.training.test_metrics import log_of, record


def error_of(number):
    return OSError(number, os.strerror(number))


FULL = error_of(errno.ENOSPC)


def fail_with(error):
    return Mock(side_effect=error)


# --- Files ------------------------------------------------------------------------------------------------------------

TORN = {
    "torn": b'{"step": 9, "lo',
    "no text": b'{"step": 9, "name": "\xff"}',
    "deep": b"[" * 9999,
    "zeros": b"\0" * 4096,
}


@pytest.mark.parametrize("bad", [*TORN.values(), b"[9]"], ids=[*TORN, "list"])
def test_damaged_line_costs_no_other_at_resume(tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0 + step}).encode() for step in range(1, 25)]
    lines[8] = bad
    original = b"\n".join(lines) + b'\n{"step": 25, "lo'
    file.write_bytes(original)
    said = []
    for _ in range(2):
        with log_of(tmp_path, said, step=20):
            pass
        assert [line["step"] for line in read_metrics(file)] == [step for step in range(1, 21) if step != 9]
    assert said == [f"{file}: skipped line 9 that cannot be read; copied the file to metrics.jsonl.damaged"]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == original


def test_full_disk_tears_only_its_own_lines(tmp_path):
    said = []
    with log_of(tmp_path, said) as log:
        log.write(record(1))
        file = log._file
        log._file = SimpleNamespace(write=lambda line: file.write(line[:10]))  # room for ten bytes
        log.write(record(2))
        log._file = SimpleNamespace(write=fail_with(error_of(errno.EIO)))
        log.write(record(3))
        log._file = file
        log.write(record(4))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
    assert said == ["metrics.jsonl cannot be written ([Errno 28] No space left on device): training continues"]


@pytest.mark.parametrize("content", [*TORN.values(), b'{"a": 1}'], ids=[*TORN, "object"])
def test_damaged_environment_is_kept_beside_a_new_one(tmp_path, content, monkeypatch):
    """Here without git, too."""
    monkeypatch.setattr(subprocess, "run", fail_with(error_of(errno.ENOENT)))
    file, said = tmp_path / "environment.json", []
    file.write_bytes(content)
    write_environment(Config(), tmp_path, said.append)
    [start] = json.loads(file.read_text())
    assert start["git_commit"] is None
    assert (tmp_path / "environment.json.damaged").read_bytes() == content
    assert said == [
        f"{file} is damaged: renamed to environment.json.damaged, started a new one",
        "environment.json has no commit of the source: git cannot be run (No such file or directory)",
    ]


def test_run_folder_without_file_locks_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", fail_with(error_of(errno.ENOLCK)))
    said = []
    with lock_folder(tmp_path / "run", said.append):
        assert (tmp_path / "run").is_dir()
    [line] = said
    assert "on a file system without locks (No locks available): start only one process" in line


# --- Pictures, TensorBoard, W&B ---------------------------------------------------------------------------------------


def test_picture_that_fails_is_announced_once(tmp_path, monkeypatch):
    said, shares = [], {"expert_shares": np.full((2, 4), 0.25)}
    with log_of(tmp_path, said) as log:
        log.write(record(1, metrics={"expert_load": 1.0, "router_entropy": 1.0}, arrays=shares))
        with monkeypatch.context() as patch:
            patch.setattr("matplotlib.figure.Figure.savefig", fail_with(FULL))
            patch.setattr(metrics, "draw_experts", fail_with(ImportError("no matplotlib")))
            log.draw()
            log.draw()
        log.draw()  # there is room again
    assert said == [
        "loss.png cannot be written ([Errno 28] No space left on device): training continues",
        "experts.png cannot be written (no matplotlib): training continues",
    ]
    assert {"loss.png", "experts.png"} <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("fails", ["start", "write", "flush", "close", "init", "log", "finish"])
def test_tracker_that_fails_is_announced_once(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(metrics, "FLUSH_INTERVAL", 0.0)
    tracker, why = "TensorBoard", "[Errno 28] No space left on device"
    if fails in ("init", "log", "finish"):
        tracker, why = "W&B", "api.wandb.ai cannot be reached"
        save_config(Config(), tmp_path / "config.json")
        calls = dict.fromkeys(("init", "define_metric", "log", "finish"), lambda *_, **__: wandb)
        wandb = SimpleNamespace(**calls | {fails: fail_with(ConnectionError(why))})
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    elif fails == "start":
        (tmp_path / "tensorboard").write_text("not a folder")
        why = f"[Errno 17] File exists: '{tmp_path / 'tensorboard'}'"
    said = []
    with log_of(tmp_path, said, tensorboard=tracker == "TensorBoard", wandb="x" if tracker == "W&B" else None) as log:
        log.write(record(1))
        if fails in ("write", "flush", "close"):
            calls = dict.fromkeys(("write", "flush", "close"), lambda *_: None)
            log._trackers[tracker]._file.close()
            log._trackers[tracker]._file = SimpleNamespace(**calls | {fails: fail_with(FULL)})
        for step in range(2, 30):
            log.write(record(step))
    assert said == [f"{tracker} cannot be written ({why}): training continues"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 29


# --- The screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [error_of(errno.EPIPE), FULL, ValueError("I/O operation on closed file")], ids=str)
def test_screen_that_fails_is_announced_once(capfd, error):
    stream = io.StringIO()
    stream.name, stream.write = "<stdout>", fail_with(error)
    display = Display(10, non_fatal_console(stream)).begin(0)
    display.print_line("one")
    display.show(record(1))
    del stream.write
    display.print_line("two")
    assert stream.getvalue() == "two\n"
    assert capfd.readouterr().err == f"<stdout> cannot be written ({error}): continuing without it\n"


def test_terminal_without_the_characters_gets_others(tmp_path):
    Display(10, non_fatal_console(None)).begin(0).print_line("to nobody")
    with (tmp_path / "screen").open("w", encoding="ascii") as stream:
        Display(10, non_fatal_console(stream)).begin(0).print_line("mesh.data: 2 → 1 …")
    assert (tmp_path / "screen").read_text() == "mesh.data: 2 ? 1 ?\n"


HOMELESS = """
import os, sys, tempfile
from pathlib import Path
from mjax.run.display import Display
from mjax.run.metrics import MetricsLog

os.close(0)
tempfile.mkdtemp = lambda *_, **__: os.stat("no temporary directory")
display = Display(10).begin(0)
log = MetricsLog(Path(sys.argv[1]), 0, print_line=lambda line: print(line, file=sys.stderr))
for step in range(1, 11):
    display.print_line("a message")
    log.draw()
print("left", file=sys.stderr)
"""


def test_process_without_home_and_stdout_reaches_its_end(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    hidden = ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables |= {"HOME": "/proc/nobody", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOMELESS, tmp_path]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=variables)
    [home, screen] = sorted(line for line in result.stderr.splitlines() if "cannot be written" in line)[::-1]
    assert "Matplotlib requires access to a writable cache directory" in home
    assert screen.startswith("<stdout>")
    assert (result.stderr.splitlines()[-1], result.returncode) == ("left", 0)
