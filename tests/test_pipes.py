"""`mjax … | head`: a reader that has had enough is no error."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mjax import cli
from tests.conftest import ROOT

TINY = str(ROOT / "tests" / "tiny_config.py")


def run(*argv, stdout, program=("-m", "mjax"), **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *program, *argv]
    return subprocess.run(command, stdout=stdout, env=environment, stderr=subprocess.PIPE, text=True, **options)


@pytest.fixture
def unread():
    """The writing end of a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


WAYS = [
    (["plan", "--config", TINY], "1"),
    (["data", "inspect", "--help"], "1"),
    (["data", "inspect", "--help"], ""),
    (["--version"], ""),
    (["--version"], "1"),
    ([], ""),
]


@pytest.mark.parametrize(("argv", "unbuffered"), WAYS, ids=[f"{' '.join(argv)} {way}" for argv, way in WAYS])
def test_a_command_whose_reader_is_gone_ends_in_silence_with_141(argv, unbuffered, unread, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    result = run(*argv, stdout=unread)
    assert (result.returncode, result.stderr) == (141, "")


def test_what_a_user_must_know_is_said_though_nobody_reads_the_output(unread):
    result = run("plan", "--config", "gpt_8c", stdout=unread)
    assert result.returncode == 2
    assert result.stderr.startswith("mjax: error: ")


def test_head_takes_its_lines_and_nobody_complains():
    pipe = f"{sys.executable} -m mjax plan --config {TINY} | head -1; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(["bash", "-c", pipe], env=environment, capture_output=True, text=True)
    first, code = result.stdout.splitlines()
    assert first.startswith(f"--- {Path(TINY)}")
    assert code in ("0", "141")  # head may be slower than the plan is
    assert result.stderr == ""


def test_another_broken_pipe_is_an_error_like_all_others(capsys):
    assert cli.explain(BrokenPipeError(errno.EPIPE, "Broken pipe")) == 1
    assert "Broken pipe" in capsys.readouterr().err


def test_a_command_without_any_output_works():
    code = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'mjax', *sys.argv[1:]])"
    result = run("--version", stdout=subprocess.PIPE, program=("-c", code))
    assert (result.returncode, result.stderr) == (0, "")
