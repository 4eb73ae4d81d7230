"""A check that hangs or dies takes its own line with it and no other."""

import os
import sys

import pytest

from mjax.doctor import GREEN, RED, YELLOW
from mjax.doctor.child import run_in_child

# A child like the one of doctor/child.py, whose checks do what their names say.
CHILD = """
import json, os, signal, sys, time
for name in sys.argv[2:]:
    if name == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(os.environ["HUNG"], "w").write(str(os.getpid()))
        time.sleep(600)
    if name == "abort":
        print("F1122 10:00:00.0 1 cuda.cc:1] Check failed: the chip is gone\\n*** a stack ***", file=sys.stderr)
        sys.stderr.flush()
        os.abort()
    if name == "half":
        print("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes", file=sys.stderr)
        print('[{"check": "ha', end="", flush=True)
        os._exit(4)
    if name == "leave":
        os._exit(3)
    found = [] if name == "nothing" else ["red", "green"] if name == "mixed" else [name if name == "red" else "green"]
    print(json.dumps([dict(check=name, status=each, found="done") for each in found]), flush=True)
"""


def run(*names, limit=20.0, **options):
    command = (sys.executable, "-c", CHILD)
    return list(run_in_child(names, {}, os.environ, limit, command=command, **options))


def statuses(findings):
    return [(finding.check, finding.status) for finding in findings]


def test_checks_are_answered_in_order():
    begun = []
    assert statuses(run("a", "nothing", "b", begin=begun.append)) == [("a", GREEN), ("b", GREEN)]
    assert begun == ["a", "nothing", "b"]


def test_hanging_check_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("HUNG", str(tmp_path / "number"))
    findings = run("a", "hang", "b", limit=5.0)  # in which an interpreter starts on a busy machine too
    assert statuses(findings) == [("a", GREEN), ("hang", RED), ("b", GREEN)]
    assert findings[1].found == "no answer in 5 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), 0)


@pytest.mark.parametrize(
    ("lost", "how", "last"),
    [
        ("abort", "was ended by SIGABRT", "the chip is gone"),
        ("half", "ended with exit code 4: RESOURCE_EXHAUSTED", "allocate 8 bytes"),  # of an answer
    ],
)
def test_lost_check_is_red_with_last_words(lost, how, last):
    findings = run("a", lost, "b")
    assert statuses(findings) == [("a", GREEN), (lost, RED), ("b", GREEN)]
    assert how in findings[1].found
    assert findings[1].found.endswith(last)
    assert findings[1].advice.startswith("nvidia-smi shows which process holds") == (lost == "half")


def test_checks_stop_at_red_foundation():
    first, rest = run("red", "a", "b", foundation="red")
    assert (first.status, rest.check, rest.status, rest.found) == (RED, "not checked", YELLOW, "a and b")
    assert statuses(run("leave", "a", foundation="leave")) == [("leave", RED), ("not checked", YELLOW)]
    mixed = run("mixed", "a", foundation="mixed")
    assert statuses(mixed) == [("mixed", RED), ("mixed", GREEN), ("not checked", YELLOW)]
