"""train.py as a person runs it: what it leaves, how it stops, and how it continues."""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import pytest

from mjax import cli
from mjax.training.metrics import read_metrics
from tests.conftest import COMPILE_QUICKLY, ROOT

CONFIG = str(ROOT / "tests" / "tiny_config.py")


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


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(folder / "run" / "metrics.jsonl")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    output = run(folder)
    return folder, output.stdout, losses(folder)


def test_a_run_leaves_what_the_readme_says(uninterrupted):
    folder, output, found = uninterrupted
    left = folder / "run"
    assert list(found) == list(range(1, 13))
    records = read_metrics(left / "metrics.jsonl")
    assert set(records[0]) >= {
        "step", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped", "tokens", "seconds",
        "tokens_per_second", "tflops", "mfu",
    }  # fmt: skip
    assert records[0]["learning_rate"] == 0.0
    assert records[-1]["tokens"] == 12 * 8 * 16
    assert records[-1]["mfu"] is None
    assert [r["step"] for r in records if "val_loss" in r] == [5, 10, 12]
    assert records[-1]["loss"] < records[0]["loss"]
    assert json.loads((left / "config.json").read_text())["model"]["hidden"] == 32
    start = json.loads((left / "environment.json").read_text())[-1]
    assert start["attention"] == "xla_blocks"
    assert start["mesh"] == {"pipe": 1, "data": 1, "expert": 1, "context": 1, "model": 1}
    assert (left / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(entry.name for entry in (left / "checkpoints").iterdir()) == ["12", "8", "good.json"]
    assert "validation loss" in output


def test_a_finished_run_says_so_and_keeps_everything(uninterrupted, fewer_devices, capsys):
    folder, _, found = uninterrupted
    assert cli.main(["train", *command(folder)[2:]]) == 0
    assert "all 12 steps are done" in capsys.readouterr().out
    assert losses(folder) == found


def _start(folder, *flags):
    return subprocess.Popen(
        command(folder, *flags), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _wait_for_step(process, folder, step):
    deadline = time.monotonic() + 200
    while max(losses(folder), default=0) < step:
        assert process.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.ci
def test_a_run_killed_in_the_middle_continues_bit_for_bit(uninterrupted, tmp_path):
    for step in (5, 10):
        process = _start(tmp_path)
        _wait_for_step(process, tmp_path, step)
        process.kill()
        process.wait()
    run(tmp_path)
    assert losses(tmp_path) == uninterrupted[2]


@pytest.mark.ci
def test_sigterm_sent_again_and_again_saves_exits_75_and_the_same_command_continues_bit_for_bit(
    uninterrupted, tmp_path
):
    output = run(tmp_path, "--config", str(ROOT / "tests" / "impatient_launcher.py"), code=75)
    [done] = re.findall(r"stopped by SIGTERM after step (\d+), which is saved", output.stdout)
    assert max(losses(tmp_path)) == int(done)
    assert done in os.listdir(tmp_path / "run" / "checkpoints")
    assert output.stderr.count("SIGTERM: saving after the steps in flight") == 1
    run(tmp_path)
    assert losses(tmp_path) == uninterrupted[2]


def test_a_run_continues_on_another_mesh(uninterrupted, tmp_path, fewer_devices, capsys):
    assert cli.main(["train", *command(tmp_path, "--mesh.data", "2", "--mesh.model", "2")[2:]]) == 0
    on_four = losses(tmp_path)
    assert on_four == pytest.approx(uninterrupted[2], rel=1e-5)

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(tmp_path / "run"), "--mesh.data", "1", "--mesh.model", "1"]) == 0
    output = capsys.readouterr().out
    assert "changed mesh.data: 2 → 1" in output
    assert "continued after step 8" in output
    assert losses(tmp_path) == pytest.approx(uninterrupted[2], rel=1e-5)
