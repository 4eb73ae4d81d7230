"""`mjax doctor` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from mjax.commands import cli
from mjax.commands import doctor as command
from mjax.doctor import GREEN, RED, YELLOW, Finding
from tests.conftest import ROOT

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
    assert found["devices"]["found"].startswith("2 simulated devices")


@pytest.mark.ci
def test_absent_platform_leaves_other_lines(tmp_path):
    result = doctor("--runs", str(tmp_path), JAX_PLATFORMS="cuda")
    assert result.returncode == 1
    lines = {line[8:22].strip(): line for line in result.stdout.splitlines()}
    assert lines["devices"].startswith("✗ fix")
    assert "JAX_PLATFORMS=cuda" in lines["devices"]
    assert lines["not checked"].startswith("! look")
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
    assert result.stderr == "mjax: error: the package tyro is not installed; install mjax again, with what it needs\n"


def sleep(question):
    """In the child: a check that sleeps, and holds the pipe that it is named after."""
    name, _ = json.loads(question)
    with open(name, "w", 1) as pipe:
        print("here", file=pipe)
        time.sleep(60)


ASLEEP = """
from mjax.commands import doctor as command
from mjax.doctor import checks
checks.ANSWER = "tests.doctor.test_command:sleep"
command.examine = lambda facts, begin: checks.examine(facts, begin, [{pipe!r}])
command.doctor(command.DoctorArguments(json=True, limit=600))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_terminated_doctor_ends_its_child(tmp_path, number):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen([sys.executable, "-c", ASLEEP.format(pipe=str(pipe))], cwd=ROOT)
    with pipe.open() as lines:
        assert lines.readline() == "here\n"
        process.send_signal(number)
        assert lines.read() == ""
    assert process.wait(300) == -number
