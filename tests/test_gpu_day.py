"""benchmarks/gpu.py at toy sizes: its parts end, fail, and run out of time without ending the others."""

import json
import subprocess
import sys

import jax
import pytest

from benchmarks import gpu, gpu_kernels
from benchmarks.day import LEAST, Day
from tests.conftest import ROOT
from tests.test_train_command import environment


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.ci
def test_dry_run_leaves_its_tables(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--output", str(tmp_path / "day"), "--tiny", "--parts"]
    parts = ["about", "first"]
    result = subprocess.run([*command, *parts], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    found = json.loads((tmp_path / "day" / "results.json").read_text())
    assert found["commands"][-1]["part"] == "first"
    assert {each["verdict"] for each in found["commands"]} == {"ok"}
    (table,) = found["tables"]
    assert table["rows"][0]["ms"] > 0
    assert "| mjax |" in (tmp_path / "day" / "results.md").read_text()


@pytest.mark.ci
def test_broken_command_is_named_and_next_runs(tmp_path):
    found = Day(tmp_path / "day", 60.0, tiny=True)
    found.part = "about"
    found.run("failing", python("import sys; print('why'); sys.exit(3)"), 30)
    found.run("missing", [str(tmp_path / "nothing")], 30)
    found.run("hanging", python("import time; time.sleep(60)"), LEAST)
    ready = tmp_path / "ready"
    found.run("killed", python(f"import time; open({str(ready)!r}, 'w'); time.sleep(60)"), 30, kill_when=ready.exists)
    found.run("fine", python("pass"), 30)
    verdicts = [each.verdict for each in found.ended]
    assert verdicts[0] == "exit code 3"
    assert verdicts[1].startswith("FileNotFoundError")
    assert verdicts[2:] == ["over its limit", "killed as planned", "ok"]
    assert [each.fine for each in found.ended] == [False, False, False, True, True]
    assert "| about | hanging | over its limit |" in (tmp_path / "day" / "results.md").read_text()


def test_raising_part_is_named_and_next_runs(tmp_path, monkeypatch, capsys):
    def broken(_):
        raise KeyError("rows")

    ran = []
    monkeypatch.setattr(gpu, "PARTS", {"about": broken, "doctor": ran.append})
    flags = ["--output", str(tmp_path / "day"), "--tiny", "--parts", "about", "doctor"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *flags])
    assert gpu.main() == 1
    assert len(ran) == 1
    assert "-- about: KeyError: 'rows'" in capsys.readouterr().out


def test_different_losses_are_named_by_step(tmp_path):
    found = Day(tmp_path / "day", 60.0, tiny=True)
    for name, third in (("one", 2.0), ("same", 2.0), ("other", 2.5)):
        file = tmp_path / "day" / "runs" / name / "metrics.jsonl"
        file.parent.mkdir(parents=True)
        losses = {1: 4.0, 2: 3.0, 3: third}
        file.write_text("".join(json.dumps({"step": n, "loss": x, "grad_norm": 1.0}) + "\n" for n, x in losses.items()))
    for other in ("same", "other", "none"):
        gpu._compared(found, "title", "one", other)
    words = [rows[0]["losses"] for _, _, rows in found.tables]
    assert words == ["equal bit for bit", "differ from step 3 on", "no step in both"]


def test_day_without_gpu_is_rejected(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", "x"])
    assert gpu.main() == 2
    assert "there is no NVIDIA GPU here; add --tiny to try the command on a CPU" in capsys.readouterr().err


def test_kernels_of_a_layer_read_arguments_only():
    config = gpu_kernels.one_micro_batch(gpu_kernels.Arguments(tiny=True))
    found = list(gpu_kernels.all_kernels(config, "xla"))
    products = sum(timed.times * timed.flops for timed in found)
    assert len(found) == 22
    for timed in found:
        traced = jax.make_jaxpr(gpu_kernels.chained(timed.function))(timed.shapes)
        assert not traced.consts
        assert [x.shape for x in traced.out_avals] == [x.shape for x in timed.shapes]
    # Attention is counted over what the mask lets through, which is half of what `model_flops` counts, and 3.5 times
    # its forward pass.
    model = config.model
    scores = 4.0 * config.train.micro_batch * model.sequence**2 * model.hidden * model.layers
    assert products == pytest.approx(gpu_kernels.model_flops(config) - 3 * scores + 3.5 * scores / 2)
