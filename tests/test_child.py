"""A function in a child process, and the sentence when it does not answer."""

import os
import resource

import pytest

from mjax.errors import RunError
from mjax.utils import child
from mjax.utils.child import Child, ChildError, bound


def misbehave(question):
    """Do what the question says; runs in the child."""
    if question == b"loop":
        while True:
            pass
    if question == b"abort":
        os.abort()
    if question == b"fill":
        return len(bytes(1 << 40))
    return question.decode()


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (b"loop", "^it is not done after 1 s$"),
        (b"abort", r"^it crashes \(SIGABRT\)$"),
        (b"fill", "^it takes more than 256 MiB$"),
        (b"\xff", r"^it crashes \(UnicodeDecodeError: "),
    ],
)
def test_child_is_bounded_and_starts_again(question, words):
    asked = Child("tests.test_child:misbehave", 1.0, 1 << 28)
    assert asked.ask(b"a") == "a"
    with pytest.raises(ChildError, match=words):
        asked.ask(question)
    assert asked.ask(b"again") == "again"
    asked.close()


def test_child_that_cannot_start_says_why():
    with pytest.raises(RunError, match=r"cannot be started: .*No module named 'mjax\.missing'"):
        Child("mjax.missing:name", 1.0, 1 << 28).ask(b"")


def test_system_without_a_limit_is_reported(monkeypatch, capsys):
    def refuse(what, limits):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert not bound(resource.RLIMIT_AS, 1 << 40)
    child._warn_unbounded()
    assert "does not limit process memory" in capsys.readouterr().err
