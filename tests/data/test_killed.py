"""Killed at any point, the commands leave nothing half-written and end in the same bytes; workers die with them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.commands.clean import CleanArguments, clean
from mjax.data.corpus.tasks import INTERRUPTS
from mjax.errors import RunError, UsageError
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("command", "flags", "points"),
    [
        ("prepare", [], 15),
        ("prepare", ["--overwrite"], 15),
        ("clean", ["--overwrite"], 12),
        ("cache", [], 12),
        pytest.param("merge", [], 15, marks=pytest.mark.ci),
        pytest.param("merge", ["--overwrite"], 15, marks=pytest.mark.ci),
        pytest.param("dedup", [], 12, marks=pytest.mark.ci),
        pytest.param("dedup", ["--overwrite"], 12, marks=pytest.mark.ci),
        pytest.param("clean", [], 12, marks=pytest.mark.ci),
        pytest.param("clean", ["--tasks"], 40, marks=pytest.mark.all),
        pytest.param("dedup", ["--tasks"], 80, marks=pytest.mark.all),
        pytest.param("prepare", ["--tasks"], 40, marks=pytest.mark.all),
    ],
)
def test_run_killed_anywhere_can_be_repeated(tmp_path, command, flags, points):
    line = [sys.executable, "-m", "tests.data.kill_points", command, str(tmp_path / "place"), *flags]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.splitlines()[-1]) >= points


# Each worker reads three blocks, prints a line and waits.
STALLED = """
import os, sys, time
from pathlib import Path
import mjax.data.corpus.documents
from mjax.commands import cli

def three_blocks(*arguments, read=mjax.data.corpus.documents.read_blocks):
    for number, block in enumerate(read(*arguments)):
        if number == 3:
            os.write(1, b"stalled\\n")  # whole, beside the line of the other worker
            time.sleep(600)
        yield block

mjax.data.corpus.documents.BLOCK_BYTES = 200
mjax.data.corpus.documents.read_blocks = three_blocks
if __name__ == "__main__":
    how = ["--tokenizer", "bytes", "--workers", "2", "--tasks", "2"]
    sys.exit(cli.main(["prepare", sys.argv[1], "--output", sys.argv[2], *how]))
"""


def fields_of(process: int) -> list[str]:
    """State and parent of a process, as /proc has them; none if it has ended."""
    stat = Path(f"/proc/{process}/stat")
    return stat.read_text().rpartition(")")[2].split()[:2] if stat.exists() else ["Z", ""]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc, as Linux has it")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_die_with_an_interrupted_parent(tmp_path, number):
    """However busy they are; and what interrupts, but for SIGKILL, is answered in one line within two seconds."""
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {i} with some words"}) + "\n" for i in range(60)))
    (tmp_path / "stalled.py").write_text(STALLED)
    line = [sys.executable, str(tmp_path / "stalled.py"), str(lines), str(tmp_path / "d")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, **pipes, text=True, env=environment, start_new_session=True) as parent:
        assert parent.stdout.readline() == "stalled\n"
        processes = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        workers = [process for process in processes if fields_of(process)[1] == str(parent.pid)]
        assert len(workers) >= 2
        sent = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.send_signal(number)
        error = parent.stderr.read()
        assert time.monotonic() < sent + 2
    if number != signal.SIGKILL:
        assert parent.returncode == 75
        assert error.splitlines()[-1] == f"mjax: stopping; the same command continues from {tmp_path}/d.tmp"
        assert all(
            line.startswith(("mjax: stopping", "lines (1 of 4): ", "encode (2 of 4): ")) for line in error.splitlines()
        ), error
    deadline = time.monotonic() + 60
    while any(fields_of(worker)[0] != "Z" for worker in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_warnings_of_launchers_interrupt(number):
    with pytest.raises(KeyboardInterrupt), INTERRUPTS:
        signal.raise_signal(number)


def test_killed_worker_ends_the_command(tmp_path):
    """Also with the errors of its functions, which come from another process."""
    (tmp_path / "hooks.py").write_text(
        "import os\ndef dies(text):\n    os._exit(9)\ndef forgets(text):\n    return None\n"
    )
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    for function, error, words in (
        ("dies", RunError, "one of 2 worker processes was killed"),
        ("forgets", UsageError, "returned None for"),
    ):
        keep, how = (f"{tmp_path / 'hooks.py'}:{function}",), {"workers": 2, "tasks": 2, "min_tokens": 0}
        with pytest.raises(error, match=words):
            clean(CleanArguments(inputs=(lines,), output=tmp_path / "out.jsonl", filter=keep, **how))
        assert not (tmp_path / "out.jsonl").exists()
