"""A check that hangs or dies takes its own line with it and no other; and `mjax doctor` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.commands import cli
from mjax.commands import doctor as command
from mjax.doctor import GREEN, RED, YELLOW, Finding, MachineInfo, checks
from tests.conftest import ROOT


def act(question):
    """Do what the name of the check says; runs in the child."""
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
    return [{"status": color, "message": "done"} for color in colors]


@pytest.fixture
def run(monkeypatch):
    def run(*names, limit=20.0, foundation="devices", begin=lambda name: None):
        monkeypatch.setattr(checks, "ANSWER", "tests.doctor.test_checks:act")
        monkeypatch.setattr(checks, "FOUNDATION", foundation)
        facts = MachineInfo(limit=limit, environment=dict(os.environ))
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
    assert findings[1].message == "no answer in 1 s"
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
    assert how in findings[1].message
    assert findings[1].message.endswith(last)
    assert findings[1].advice.startswith("nvidia-smi shows who holds") == (lost == "half")


@pytest.mark.parametrize("name", ["red", "mixed", "half"])
def test_checks_stop_at_red_foundation(run, name):
    findings = run(name, "a", "b", foundation=name)
    assert findings[0].status == RED
    assert (findings[-1].check, findings[-1].status, findings[-1].message) == ("not checked", YELLOW, "a, b")


def test_check_that_raises_is_red(monkeypatch):
    monkeypatch.setattr("mjax.doctor.host.check_open_files", lambda facts: 1 / 0)
    (finding,) = checks.run_check("open files", MachineInfo())
    assert (finding.check, finding.status) == ("open files", RED)
    assert finding.message == "could not be checked: ZeroDivisionError: division by zero"


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
    """The words come from the installed XLA."""
    facts = MachineInfo(environment={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags})
    finding, rest = checks.examine(facts, lambda name: None, ["devices", "matmul"])
    assert (finding.check, finding.status, rest.check) == ("devices", RED, "not checked")
    assert words in finding.message
    assert finding.advice == "remove the flag from XLA_FLAGS, or correct it"


# --- The command ----------------------------------------------------------------------------------------------------


ONE_OF_EACH = [
    Finding(GREEN, "3.11.7", None, {"rate": 2.0, "error": float("inf")}, "python"),
    Finding(YELLOW, "none", "install it", check="driver"),
    Finding(RED, "full", "free some space there", check="storage"),
]


def doctor(*flags, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "mjax", "doctor", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=300)


@pytest.mark.ci
def test_nothing_is_red_on_this_machine(tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    result = doctor("--json", "--runs", str(tmp_path), JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    report = json.loads(result.stdout)
    red = [finding for finding in report["findings"] if finding["status"] == RED]
    assert (result.returncode, report["ok"], red) == (0, True, []), result.stderr
    found = {finding["check"]: finding for finding in report["findings"]}
    assert {"python", "attention", "numerics", "all-reduce", "open files", "storage"} <= set(found)
    assert found["devices"]["message"].startswith("2 simulated devices")


@pytest.mark.ci
def test_absent_platform_leaves_other_lines(tmp_path):
    result = doctor("--runs", str(tmp_path), JAX_PLATFORMS="cuda")
    assert result.returncode == 1
    lines = {line[8:22].strip(): line for line in result.stdout.splitlines()}
    assert lines["devices"].startswith("✗ fail")
    assert "JAX_PLATFORMS=cuda" in lines["devices"]
    assert lines["not checked"].startswith("! warn")
    assert "writes" in lines["storage"]


@pytest.mark.parametrize(("findings", "code"), [(ONE_OF_EACH, 1), (ONE_OF_EACH[:2], 0)])
def test_exit_code_is_1_if_red(monkeypatch, capsys, findings, code):
    monkeypatch.setattr(command, "examine", lambda *_: iter(findings))
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    assert report["findings"][0]["figures"] == {"rate": 2.0, "error": None}  # JSON has no infinity


def test_command_line_imports_no_jax():
    code = "import sys; import mjax.commands.doctor; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_missing_package_of_command_line_is_named(tmp_path):
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError(\"No module named 'tyro'\", name='tyro')")
    result = doctor(PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    message = "the package tyro is not installed; install mjax again, with its requirements"
    assert result.stderr == f"mjax: error: {message}\n"


def sleep(question):
    """A check that sleeps, and holds the pipe that it is named after; runs in the child."""
    name, _ = json.loads(question)
    with open(name, "w", 1) as pipe:
        print("here", file=pipe)
        time.sleep(60)


def test_killed_doctor_ends_its_child(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = f"""
from mjax.doctor import MachineInfo, checks
checks.ANSWER = "tests.doctor.test_checks:sleep"
list(checks.examine(MachineInfo(limit=600), print, [{str(pipe)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    with pipe.open() as lines:
        assert lines.readline() == "here\n"
        process.kill()
        assert lines.read() == ""
    process.wait(300)
