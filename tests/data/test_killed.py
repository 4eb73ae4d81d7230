"""Killed at any point, `mjax prepare` and `mjax data merge` leave nothing half-written and end in the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mjax.commands.prepare import PrepareArguments, prepare
from mjax.data.indexed import IndexedDatasetWriter
from mjax.errors import UsageError
from tests.conftest import ROOT


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
@pytest.mark.parametrize("command", ["prepare", "merge"])
def test_a_run_killed_before_any_file_operation_leaves_a_whole_dataset_or_none_and_can_be_repeated(
    tmp_path, command, flags
):
    line = [sys.executable, "-m", "tests.data.kill_points", command, str(tmp_path / "place"), *flags]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.splitlines()[-1]) >= 15


# Reads three blocks, then says so and waits: by then its workers are at work or wait for more.
STALLED = """
import sys, time
from pathlib import Path
import mjax.data.blocks, mjax.data.corpus
from mjax.commands.prepare import PrepareArguments, prepare

def three_blocks(*arguments, read=mjax.data.corpus.read_blocks):
    for number, block in enumerate(read(*arguments)):
        if number == 3:
            time.sleep(2)
            print("stalled", flush=True)
            time.sleep(600)
        yield block

if __name__ == "__main__":
    mjax.data.blocks.SIZE = 200
    mjax.data.corpus.read_blocks = three_blocks
    prepare(PrepareArguments(output=sys.argv[2], inputs=(Path(sys.argv[1]),), tokenizer="bytes", workers=2))
"""


def children_of(process: int) -> list[int]:
    stats = (file.read_text() for file in Path("/proc").glob("[0-9]*/stat") if file.exists())
    fields = ((int(stat.split()[0]), stat.rpartition(")")[2].split()) for stat in stats)
    return [number for number, rest in fields if int(rest[1]) == process and rest[0] != "Z"]


def running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc, as Linux has it")
def test_workers_die_with_a_parent_that_is_killed_and_the_next_run_takes_over_what_it_left(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {i} with some words"}) + "\n" for i in range(60)))
    (tmp_path / "stalled.py").write_text(STALLED)
    (tmp_path / "out").mkdir()
    line = [sys.executable, str(tmp_path / "stalled.py"), str(lines), str(tmp_path / "out" / "d")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "stalled\n"
        workers = children_of(parent.pid)
        assert len(workers) >= 2
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(map(running, workers)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.05)
    left = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert left == ["d.bin.tmp", "d.tokenizer.tmp"]
    (tmp_path / "out" / "d.tokenizer.tmp" / "tokenizer.model").write_text("of another tokenizer")

    prepare(PrepareArguments(output=str(tmp_path / "out" / "d"), inputs=(lines,), tokenizer="bytes"))
    prepare(PrepareArguments(output=str(tmp_path / "clean"), inputs=(lines,), tokenizer="bytes"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["d.bin", "d.idx", "d.json", "d.tokenizer"]
    assert [file.name for file in (tmp_path / "out" / "d.tokenizer").iterdir()] == ["mjax_tokenizer.json"]
    for part in ("bin", "idx", "json"):
        assert (tmp_path / "out" / f"d.{part}").read_bytes() == (tmp_path / f"clean.{part}").read_bytes()


def test_two_runs_do_not_write_the_same_dataset_at_once(tmp_path):
    with IndexedDatasetWriter(tmp_path / "d", 100) as first:
        first.add_document([1, 2, 3])
        with (
            pytest.raises(UsageError, match=r"another process is writing .*d; wait for it, or choose"),
            IndexedDatasetWriter(tmp_path / "d", 100),
        ):
            pass
        first.add_document([4])
    assert (tmp_path / "d.bin").stat().st_size == 8
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_a_disk_that_is_full_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 50_000)
    code = (
        "import resource, signal, sys; from mjax import cli; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); sys.exit(cli.main(sys.argv[1:]))"
    )
    line = [sys.executable, "-c", code, "prepare", "a.txt", "--tokenizer", "bytes", "--output", "out/d"]
    result = subprocess.run(
        line, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 1
    assert "preparing out/d stopped: [Errno 27] File too large; nothing was left under that name" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []
