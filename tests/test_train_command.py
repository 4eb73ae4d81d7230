"""train.py as a person runs it: what it leaves, how it stops, and how it continues."""

import functools
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mjax.commands import cli
from mjax.run import loop
from mjax.run.metrics import read_metrics
from tests.conftest import COMPILE_QUICKLY, ROOT

CONFIG = str(ROOT / "tests" / "tiny_config.py")
IMPATIENT = ["--config", str(ROOT / "tests" / "impatient_launcher.py")]


def environment():
    variables = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return {
        **variables,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": COMPILE_QUICKLY,
        "PYTHONUNBUFFERED": "1",
    }


def command(folder, *flags):
    return [sys.executable, str(ROOT / "train.py"), "--config", CONFIG, "--runs", str(folder), "--name", "run", *flags]


def run(folder, *flags, code=0):
    result = subprocess.run(command(folder, *flags), env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result


@pytest.fixture(scope="module", autouse=True)
def one_program():
    """Runs of equal configs in this process share their program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build_program", functools.cache(loop.build_program))
        yield


def run_here(folder, *flags):
    """The same command on one of the devices of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "check_devices", lambda *_: None)
        assert cli.main(["train", *command(folder, *flags)[2:]]) == 0


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_here(folder)
    return folder


def test_run_folder_holds_what_readme_says(uninterrupted, capsys):
    left, found = uninterrupted / "run", losses(uninterrupted)
    assert list(found) == list(range(1, 13))
    records = read_metrics(left / "metrics.jsonl")
    assert set(records[0]) >= {
        "step", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "tokens", "seconds",
        "tokens_per_second", "tflops", "mfu",
    }  # fmt: skip
    assert (records[0]["learning_rate"], records[-1]["tokens"], records[-1]["mfu"]) == (0.0, 12 * 8 * 16, None)
    assert [record["step"] for record in records if "val_loss" in record] == [5, 10, 12]
    blocked = {r["step"]: r["checkpoint_blocked_seconds"] for r in records if "checkpoint_blocked_seconds" in r}
    assert list(blocked) == [5, 9]  # the records after the saves of steps 4 and 8
    assert all(0 < seconds < 60 for seconds in blocked.values())
    assert records[-1]["loss"] < records[0]["loss"]
    assert json.loads((left / "config.json").read_text())["model"]["hidden"] == 32
    start = json.loads((left / "environment.json").read_text())[-1]
    assert start["attention"] == "xla_blocks"
    assert start["mesh"] == {"pipe": 1, "replicate": 1, "data": 1, "expert": 1, "context": 1, "model": 1}
    assert (left / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(entry.name for entry in (left / "checkpoints").iterdir()) == ["12", "8", "good.json"]
    capsys.readouterr()
    run_here(uninterrupted)
    assert "all 12 steps are done" in capsys.readouterr().out
    assert cli.main(["train", "--run", str(left), "--train.steps", "3"]) == 0
    assert capsys.readouterr().out == "--train.steps 3 is below the 12 steps already done; nothing to do\n"
    assert losses(uninterrupted) == found


def test_run_resumes_bit_for_bit_after_sigterm_and_sigkill(uninterrupted, tmp_path, capsys):
    """SIGTERM arrives again and again while the run saves, SIGKILL while it saves and trains."""
    output = run(tmp_path, *IMPATIENT, code=75)
    [done] = re.findall(r"stopped by SIGTERM after step (\d+), which is saved", output.stdout)
    assert max(losses(tmp_path)) == int(done)
    assert done in os.listdir(tmp_path / "run" / "checkpoints")
    assert output.stderr.count("SIGTERM: saving after the steps in flight") == 1
    run(tmp_path, *IMPATIENT, code=-signal.SIGKILL)
    assert {done, "8.writing"} <= set(os.listdir(tmp_path / "run" / "checkpoints"))
    run_here(tmp_path)
    output = capsys.readouterr().out
    assert f"continued after step {done}" in output
    assert "mfu " not in output  # of a CPU
    assert "removed 8.writing: an unfinished save of checkpoint 8" in output
    assert losses(tmp_path) == losses(uninterrupted)
