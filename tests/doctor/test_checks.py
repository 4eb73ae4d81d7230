"""A check that hangs or dies takes its own line with it and no other."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from mjax.doctor import GREEN, RED, YELLOW, Facts, checks


def act(question):
    """In the child: what the name of the check says."""
    name, _ = json.loads(question)
    if name == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(os.environ["HUNG"]).write_text(str(os.getpid()))
        time.sleep(600)
    if name == "abort":
        os.write(2, b"F1122 10:00:00.0 1 cuda.cc:1] Check failed: the chip is gone\n*** a stack ***\n")
        os.abort()
    if name == "half":
        os.write(2, b"RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes\n")
        os._exit(4)
    os.write(1, b"a library's words\n")
    colors = {"nothing": [], "mixed": [RED, GREEN], "red": [RED]}.get(name, [GREEN])
    return [{"status": color, "found": "done"} for color in colors]


@pytest.fixture
def run(monkeypatch):
    def run(*names, limit=20.0, foundation="devices", begin=lambda name: None):
        monkeypatch.setattr(checks, "ANSWER", "tests.doctor.test_checks:act")
        monkeypatch.setattr(checks, "FOUNDATION", foundation)
        facts = Facts(limit=limit, environment=dict(os.environ))
        return list(checks.examine(facts, begin, names))

    return run


def statuses(findings):
    return [(finding.check, finding.status) for finding in findings]


def test_checks_are_answered_in_order(run):
    begun = []
    assert statuses(run("a", "nothing", "b", begin=begun.append)) == [("a", GREEN), ("b", GREEN)]
    assert begun == ["a", "nothing", "b"]


def test_hanging_check_is_killed(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HUNG", str(tmp_path / "number"))
    findings = run("a", "hang", "b", limit=1.0)
    assert statuses(findings) == [("a", GREEN), ("hang", RED), ("b", GREEN)]
    assert findings[1].found == "no answer in 1 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), 0)


@pytest.mark.parametrize(
    ("lost", "how", "last"),
    [
        ("abort", "was ended by SIGABRT", "the chip is gone"),
        ("half", "ended with exit code 4: RESOURCE_EXHAUSTED", "allocate 8 bytes"),  # of an answer
    ],
)
def test_lost_check_is_red_with_last_words(run, lost, how, last):
    findings = run("a", lost, "b")
    assert statuses(findings) == [("a", GREEN), (lost, RED), ("b", GREEN)]
    assert how in findings[1].found
    assert findings[1].found.endswith(last)
    assert findings[1].advice.startswith("nvidia-smi shows who holds") == (lost == "half")


@pytest.mark.parametrize("name", ["red", "mixed", "half"])
def test_checks_stop_at_red_foundation(run, name):
    findings = run(name, "a", "b", foundation=name)
    assert findings[0].status == RED
    assert (findings[-1].check, findings[-1].status, findings[-1].found) == ("not checked", YELLOW, "a, b")


def test_check_that_raises_is_red(monkeypatch):
    monkeypatch.setattr("mjax.doctor.host.check_open_files", lambda facts: 1 / 0)
    (finding,) = checks.run_check("open files", Facts())
    assert (finding.check, finding.status) == ("open files", RED)
    assert finding.found == "could not be checked: ZeroDivisionError: division by zero"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--xla_gpu_enable_latency_hiding_schedular=true", "Unknown flag in XLA_FLAGS: --xla_gpu_enable_latency_hid"),
        ("--xla_gpu_autotune_level=x", "Couldn't interpret value x for flag xla_gpu_autotune_level"),
        ("xla_gpu_autotune_level=1", 'Could not open file "xla_gpu_autotune_level=1"'),
    ],
)
def test_wrong_flag_is_named(flags, words):
    """The words are those of the installed XLA."""
    facts = Facts(environment={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    finding, rest = checks.examine(facts, lambda name: None, ["devices", "matmul"])
    assert (finding.check, finding.status, rest.check) == ("devices", RED, "not checked")
    assert words in finding.found
    assert finding.advice == "remove the flag from XLA_FLAGS, or correct it"
