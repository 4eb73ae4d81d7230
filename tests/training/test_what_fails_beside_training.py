"""What only records or shows may fail: it is announced once, nothing that was recorded is lost, and the run goes on."""

import contextlib
import errno
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from mjax.config import Config
from mjax.finetuning import report
from mjax.training import environment, metrics
from mjax.training.display import Display, lasting_console
from mjax.training.metrics import MetricsLog, read_metrics
from mjax.training.pictures import draw_loss
from tests.conftest import ROOT
from tests.products import one_in
from tests.training.test_metrics import _record


def error_of(number):
    return OSError(number, os.strerror(number))


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


def log_of(folder, said, step=0, **options):
    return contextlib.closing(MetricsLog(folder, step, **{"tensorboard": False, **options}, say=said.append))


# --- metrics.jsonl ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"   ",
        b"\0" * 4096,
        b'{"step": 9, "lo',
        b'{"step": 9, "name": "\xff"}',
        b"[9]",
        b'{"loss": 1}',
        b"[" * 9999,
    ],
)
def test_a_line_that_cannot_be_read_costs_no_other_at_resume(tmp_path, bad):
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 1.0 + step}).encode() for step in range(1, 25)]
    lines[8] = bad
    original = b"\n".join(lines) + b"\n"
    file.write_bytes(original)
    others = [step for step in range(1, 25) if step != 9]
    assert [record["step"] for record in read_metrics(file)] == others
    said = []
    with log_of(tmp_path, said, step=24):
        pass
    assert [record["step"] for record in read_metrics(file)] == others
    assert said == [f"{file}: skipped line 9 that cannot be read; kept the file as metrics.jsonl.damaged"]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == original
    with log_of(tmp_path, said, step=24):
        pass
    assert len(said) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.damaged"]


def test_metrics_that_cannot_be_written_are_announced_once_and_later_lines_stand_on_their_own(tmp_path):
    said = []
    with log_of(tmp_path, said) as log:
        log.write(_record(1))

        class Full(io.RawIOBase):
            def write(self, line):
                return file.write(line[:10])

        file, log._file = log._file, Full()  # room for ten bytes
        log.write(_record(2))
        log._file = type("Broken", (), {"write": fail_with(error_of(errno.EIO))})()
        log.write(_record(3))
        log._file = file
        log.write(_record(4))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 4]
    assert said == ["metrics.jsonl cannot be written ([Errno 28] No space left on device): training continues"]


# --- environment.json -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b'[{"date": "2026', b'[{"host": "\xff"}]', b"\0\0\0\0", b"", b'{"a": 1}', b"[" * 9999]
)
def test_a_damaged_environment_is_kept_beside_a_new_one(tmp_path, content):
    file, said = tmp_path / "environment.json", []
    file.write_bytes(content)
    environment.write(Config(), tmp_path, said.append)
    [start] = json.loads(file.read_text())
    assert start["python"]
    assert (tmp_path / "environment.json.damaged").read_bytes() == content
    assert said[0] == f"{file} is damaged: kept as environment.json.damaged, started a new one"


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_without_git_a_run_starts_and_says_what_it_does_not_know(tmp_path, monkeypatch, number):
    monkeypatch.setattr(subprocess, "run", fail_with(error_of(number)))
    said = []
    environment.write(Config(), tmp_path, said.append)
    assert json.loads((tmp_path / "environment.json").read_text())[0]["git_commit"] is None
    assert said == [f"environment.json has no commit of the source: git cannot be run ({os.strerror(number)})"]


# --- Pictures, TensorBoard, W&B ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a_$b_$", "$", r"\frac{", "$x^$", "näme €"])
def test_any_name_can_stand_above_a_picture(tmp_path, name):
    records = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}]
    draw_loss(records, tmp_path / "loss.png", name)
    epochs = {1: [{"epoch": 1, "figures": {"accuracy": 0.5}}]}
    report.draw("accuracy", epochs, tmp_path / "report.png", name)
    for picture in ("loss.png", "report.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_announced_once(tmp_path, monkeypatch):
    said = []
    with log_of(tmp_path, said) as log:
        log.write(_record(1))
        with monkeypatch.context() as patch:
            patch.setattr("matplotlib.figure.Figure.savefig", fail_with(error_of(errno.ENOSPC)))
            log.draw()
            log.draw()
        assert said == ["loss.png cannot be written ([Errno 28] No space left on device): training continues"]
        log.draw()  # there is room again
    assert (tmp_path / "loss.png").is_file()


def test_the_picture_of_a_mixture_that_cannot_be_drawn_is_announced_once(tmp_path, monkeypatch):
    said, shares = [], {"expert_shares": np.full((2, 4), 0.25)}
    with log_of(tmp_path, said) as log:
        log.write(_record(1, metrics={"expert_load": 1.0, "router_entropy": 1.0}, arrays=shares))
        with monkeypatch.context() as patch:
            patch.setattr(metrics, "draw_experts", fail_with(ImportError("no matplotlib")))
            log.draw()
            log.draw()
        assert said == ["experts.png cannot be written (no matplotlib): training continues"]
        assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "experts.json", "loss.png"}
        log.go_back(0)
        log.draw()  # nothing is known of the steps that are left
        assert not (tmp_path / "experts.png").exists()
        log.write(_record(1, metrics={"expert_load": 1.0, "router_entropy": 1.0}, arrays=shares))
        log.draw()
    assert (tmp_path / "experts.png").is_file()
    assert json.loads((tmp_path / "experts.json").read_text()) == {"step": 1, "shares": [[0.25] * 4] * 2}


def test_a_run_of_another_model_has_no_picture_of_experts(tmp_path):
    with log_of(tmp_path, []) as log:
        log.write(_record(1))
        log.draw()
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "loss.png"}


def test_tensorboard_that_cannot_start_is_announced_once(tmp_path):
    (tmp_path / "tensorboard").write_text("not a folder")
    said = []
    with log_of(tmp_path, said, tensorboard=True) as log:
        for step in range(1, 30):
            log.write(_record(step))
    [line] = said
    assert line.startswith("TensorBoard cannot be written (")
    assert line.endswith("): training continues")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 29


@pytest.mark.parametrize("method", ["write_event", "flush", "close"])
def test_tensorboard_that_fails_later_is_announced_once_and_does_not_hold_the_run(tmp_path, monkeypatch, method):
    """The thread of tensorboardX's own writer dies of it, and the eleventh scalar waits for it for ever."""
    monkeypatch.setattr(metrics, "FLUSH", 0.0)
    said = []
    with log_of(tmp_path, said, tensorboard=True) as log:
        log.write(_record(1))
        monkeypatch.setattr(f"tensorboardX.event_file_writer.EventsWriter.{method}", fail_with(error_of(errno.ENOSPC)))
        for step in range(2, 30):
            log.write(_record(step))
    assert said == ["TensorBoard cannot be written ([Errno 28] No space left on device): training continues"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 29


class FailingWandb:
    def __init__(self, fails):
        self.fails = fails

    def __getattr__(self, name):
        def call(*_, **__):
            if name == self.fails:
                raise ConnectionError("api.wandb.ai cannot be reached")
            return self

        return call


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_wandb_that_fails_is_announced_once(tmp_path, monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "wandb", FailingWandb(fails))
    said = []
    with log_of(tmp_path, said, wandb="project") as log:
        for step in range(1, 4):
            log.write(_record(step))
    assert said == ["W&B cannot be written (api.wandb.ai cannot be reached): training continues"]


# --- The screen -------------------------------------------------------------------------------------------------------


class FailingStream(io.StringIO):
    name = "<stdout>"

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        if self.error:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error",
    [*map(error_of, (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF)), ValueError("I/O operation on closed file")],
    ids=str,
)
def test_a_screen_that_fails_is_announced_once_and_shown_on_again_when_it_works(capfd, error):
    stream = FailingStream(error)
    with Display(10, lasting_console(stream)).begin(0) as display:
        display.say("one")
        display.show(_record(1))
        stream.error = None
        display.say("two")
    assert stream.getvalue() == "two\n"
    assert capfd.readouterr().err == f"<stdout> cannot be written ({error}): continuing without it\n"


def test_a_process_without_a_screen_shows_nothing():
    Display(10, lasting_console(None)).begin(0).say("one")


SHOWING = """
import os, sys
from mjax.training.display import Display
from tests.training.test_metrics import _record
os.close(0)
with Display(10).begin(0) as display:
    for step in range(1, 11):
        display.show(_record(step))
        display.say("a message")
print("left", file=sys.stderr)
"""


@pytest.mark.parametrize("stdout", one_in(3, ["pipe", "/dev/full", "closed"]))
def test_a_process_whose_stdout_fails_reaches_its_end_with_exit_code_0(stdout):
    command = [sys.executable, "-c", SHOWING]
    if stdout == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    elif stdout == "closed":
        command, writer = ["sh", "-c", 'exec "$@" >&-', "sh", *command], subprocess.PIPE
    else:
        writer = os.open(stdout, os.O_WRONLY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    announced = [line for line in result.stderr.splitlines() if "cannot be written" in line]
    assert len(announced) == (stdout != "closed"), result.stderr
    assert result.stderr.splitlines()[-1] == "left"
    assert result.returncode == 0


def test_a_terminal_without_the_characters_gets_others(tmp_path):
    with (tmp_path / "screen").open("w", encoding="ascii") as stream:
        Display(10, lasting_console(stream)).begin(0).say("mesh.data: 2 → 1 …")
    assert (tmp_path / "screen").read_text() == "mesh.data: 2 ? 1 ?\n"


HOMELESS = """
import sys, tempfile
from pathlib import Path
from mjax.training.metrics import MetricsLog

def none(*_, **__):
    raise FileNotFoundError(2, "No usable temporary directory found")

tempfile.mkdtemp = none
log = MetricsLog(Path(sys.argv[1]), 0, tensorboard=False)
log.draw()
log.draw()
"""


def test_matplotlib_without_a_home_and_a_temporary_folder_is_announced_once(tmp_path):
    hidden = ("MPLCONFIGDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    result = subprocess.run(
        [sys.executable, "-c", HOMELESS, tmp_path],
        env={**variables, "HOME": "/proc/nobody", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    [line] = [line for line in result.stdout.splitlines() if "loss.png cannot be written" in line]
    assert "Matplotlib requires access to a writable cache directory" in line
