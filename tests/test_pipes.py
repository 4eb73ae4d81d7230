"""`mjax … | head`: a reader that has had enough is not an error."""

import errno
import os
import subprocess
import sys

import pytest

from mjax.commands import cli
from tests.conftest import ROOT


def run(*argv, stdout, program=("-m", "mjax"), **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *program, *argv]
    return subprocess.run(command, stdout=stdout, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def unread():
    """The writing end of a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    ("argv", "unbuffered"), [(["--version"], ""), (["--version"], "1"), (["data", "inspect", "--help"], "")]
)
def test_unread_output_ends_silently_with_141(argv, unbuffered, unread):
    result = run(*argv, stdout=unread, PYTHONUNBUFFERED=unbuffered)
    assert (result.returncode, result.stderr) == (141, "")


def test_user_error_is_shown_when_output_is_unread(unread):
    result = run("plam", stdout=unread)
    assert (result.returncode, result.stderr.startswith("mjax: error: ")) == (2, True)


CLOSED = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'mjax', *sys.argv[1:]])"


def test_command_without_any_output_works():
    result = run("--version", stdout=subprocess.PIPE, program=("-c", CLOSED))
    assert (result.returncode, result.stderr) == (0, "")


def test_other_broken_pipe_is_an_error(capsys):
    assert cli.explain(BrokenPipeError(errno.EPIPE, "Broken pipe")) == 1
    assert "Broken pipe" in capsys.readouterr().err
