"""`mjax doctor` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax import cli
from mjax.commands import doctor as command
from mjax.doctor.finding import GREEN, RED, YELLOW, Finding
from mjax.doctor.report import Report
from tests.conftest import ROOT

ONE_OF_EACH = [
    Finding("python", GREEN, "3.11.7", None, {"rate": 2.0, "error": float("inf")}),
    Finding("driver", YELLOW, "none", "install it"),
    Finding("storage", RED, "full", "free some space there"),
]


def doctor(*flags, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment |= variables
    return subprocess.run(
        [sys.executable, "-m", "mjax", "doctor", *flags],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.ci
def test_nothing_is_red_on_this_machine(tmp_path):
    flags = "--xla_force_host_platform_device_count=2"
    result = doctor("--json", "--runs", str(tmp_path), JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    report = json.loads(result.stdout)
    red = [finding for finding in report["findings"] if finding["status"] == RED]
    assert (result.returncode, report["ok"], red) == (0, True, []), result.stderr
    found = {finding["check"]: finding for finding in report["findings"]}
    assert {"python", "flags", "attention", "numerics", "all-reduce", "open files", "storage"} <= set(found)
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
    assert result.stderr == "mjax: error: the package tyro is not installed; pip install -r requirements.txt\n"


def test_later_checks_run_without_wrong_flags(monkeypatch):
    """A wrong flag in XLA_FLAGS would end every child."""
    environments = []

    def run_in_child(names, settings, environment, *_, **__):
        environments.append(environment["XLA_FLAGS"])
        return iter(())

    monkeypatch.setenv("XLA_FLAGS", "--wrong")
    monkeypatch.setattr(command.flags, "check_flags", lambda *_: ([], {"XLA_FLAGS": "repaired"}))
    monkeypatch.setattr(command, "run_in_child", run_in_child)
    arguments = command.DoctorArguments(json=True)
    list(command.examine(None, arguments, Report(shown=False)))
    assert environments == ["repaired"] * 2


# A doctor whose one check sleeps in a child, which writes its number into a file. It says when it waits for the child:
# a signal between the start of the child and this moment leaves the child alone.
ASLEEP = """
import os, sys
from mjax.commands import doctor as command
from mjax.doctor.child import run_in_child
child = (sys.executable, "-c", "import os, time; print(os.getpid(), file=open(%r, 'w'), flush=True); time.sleep(600)")
waits = lambda name: print("waits", flush=True)
command.examine = lambda *_: run_in_child(("sleep",), {}, os.environ, 600, waits, command=child)
command.doctor(command.DoctorArguments(json=True))
"""


def test_terminated_doctor_ends_its_child(tmp_path):
    file, command = tmp_path / "child", [sys.executable, "-c"]
    process = subprocess.Popen([*command, ASLEEP % str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "waits\n"
        _wait(lambda: file.exists() and file.read_text().endswith("\n"))
        child = int(file.read_text())
        process.terminate()
        assert process.wait(300) == 128 + signal.SIGTERM
        _wait(lambda: not _alive(child))
    finally:
        process.kill()


def _wait(until):
    end = time.monotonic() + 300
    while not until():
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(number):
    """A process that ended and for which nobody has waited yet is not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
