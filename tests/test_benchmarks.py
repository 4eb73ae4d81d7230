"""The benchmark runs from its command line to its table, and a contender that cannot run has its reason there."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import grouped, index, predicted, ratios
from mjax.planner.time import H100, read_calibration
from tests.conftest import ROOT
from tests.test_train_command import CONFIG, environment


def run(*flags, code=0):
    command = [sys.executable, str(ROOT / "benchmarks" / "train_step.py"), "--config", CONFIG, *flags]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result


@pytest.mark.ci
def test_train_step_benchmark_has_every_figure():
    (row,) = json.loads(run("--peers", "none", "--rounds", "3", "--steps", "2", "--json").stdout)["rows"]
    assert (row["name"], row["failed"], row["mfu"]) == ("mjax", None, None), "no peak of this machine's CPU is known"
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["tokens_per_second"] == pytest.approx(8 * 16 / (row["ms"] / 1e3))
    assert row["first_loss"] == pytest.approx(5.55, abs=0.1), "the logarithm of 257 tokens"
    assert 0.05 < row["memory_gib"] < 4
    assert row["first_step_seconds"] > row["ms"] / 1e3


@pytest.mark.ci
def test_failed_contender_is_a_row_with_reason():
    output = run("--peers", "none", "--mesh.model", "2", code=1).stdout
    assert "mjax failed: " in output
    assert "2 devices" in output


@pytest.mark.ci
def test_index_benchmark_has_row_for_every_part(monkeypatch, capsys):
    # Without megatron-core, whose ten processes need a minute to import it; tests/parity compares the indices.
    monkeypatch.setitem(sys.modules, "megatron", None)
    sizes = "--rounds 1 --tokens 100000 --samples 1000 --sequences 1000 --batch 4"
    monkeypatch.setattr(sys, "argv", ["index.py", *sizes.split()])
    assert index.main() == 0
    assert capsys.readouterr().out.count("\n| ") >= 11


@pytest.mark.ci
def test_grouped_benchmark_counts_tiles_of_each_load(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grouped.py", "--shape", "tiny", "--rounds", "1", "--rows", "5", "100"])
    assert grouped.main() == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    found = {tuple(row[:3]): float(row[3]) for row in rows if row and row[0] in grouped.LOADS}
    # 100 rows, 4 experts: ragged_dot computes them for each, and its masks cost something as well.
    assert all(4 <= found[load, "ragged_dot", "–"] < 5 for load in grouped.LOADS)
    assert [found[load, "xla", "100"] for load in grouped.LOADS] == [4, 4, 4, 1]
    for load in grouped.LOADS:
        counts = np.bincount(grouped.assigned(grouped.SHAPES["tiny"], load), minlength=4)
        assert found[load, "xla", "5"] == sum(-(-counts // 5)) * 5 / 100


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("aot.step", ["--gpu", "v100"], "--gpu v100 cannot be compiled for; use one of a100, b200, h100, h200"),
        ("calibrate", ["--output", "none/rates.json"], "--output none/rates.json: there is no folder none; create it"),
        ("calibrate", ["--output", "x.json", "--gpu", "v100", "--compute", "bf16"], "v100 has no bf16; use --compute"),
        ("grouped", ["--shape", "qwen3_30b"], "--shape qwen3_30b needs an NVIDIA GPU and this process"),
        ("index", ["--tokens", "5000"], "--tokens is 5,000; with --batch 3072 use 18874368 or more"),
        ("memory", ["--only", "gpt_5"], "--only gpt_5: no row of compiled_memory.json has that in its name"),
        ("predicted", ["--gpu", "v100", "--configs", "gpt_345m"], "no bf16 peak is known for v100"),
        ("train_step", ["--steps", "0"], "--steps is 0; it must be at least 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[-40:],
)
def test_benchmark_rejects_flags_in_one_sentence(name, flags, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    assert importlib.import_module(f"benchmarks.{name}").main() == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"{name}.py: error: ")
    assert sentence in shown.err


def test_predictions_stand_next_to_measured_steps(monkeypatch, tmp_path, capsys):
    """Given times of steps yield the error bar, but no rate."""
    times, file = iter([0.9, 1.1]), tmp_path / "rates.json"
    monkeypatch.setattr(predicted, "measure", lambda *_: (next(times), 3.0 * 2**30, "a slow device"))
    flags = ["--gpu", "h100", "--configs", CONFIG, CONFIG, "--write", str(file)]
    monkeypatch.setattr(sys, "argv", ["predicted.py", *flags])
    assert predicted.main() == 0
    _, row, _ = capsys.readouterr().out.splitlines()[:3]
    predicted_seconds, measured = (float(cell.replace(",", "")) / 1000 for cell in row.split()[1:3])
    assert measured == 0.9
    found = read_calibration(file)
    assert found.error == pytest.approx(1 - predicted_seconds / 1.1, abs=1e-3)
    compared = ("error", "sequences", "date", "source")
    assert found == replace(H100, **{name: getattr(found, name) for name in compared})


@pytest.mark.ci
def test_figures_stand_next_to_their_goals(monkeypatch, capfd, tmp_path):
    pytest.importorskip("lm_eval")
    measured = [f'Figure("{name}", 1.25, "×", 1.5, {least})' for name, least in (("fast", True), ("slow", False))]
    for number, figure in enumerate(measured):
        script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks.command import Figure, collect"
        (tmp_path / f"{number}.py").write_text(f"{script}\ncollect({figure})\n")
    monkeypatch.setattr(ratios, "PARTS", {"two": [f"{tmp_path}/0.py", f"{tmp_path}/1.py"], "none": ["missing.py"]})
    monkeypatch.setattr(sys, "argv", ["ratios.py"])
    assert ratios.main() == 1
    shown = capfd.readouterr()
    assert "1 of the benchmarks failed, see above: missing.py" in shown.err
    assert shown.out.splitlines()[-2:] == [
        "| fast | 1.25 × | at least 1.5 | missed |",
        "| slow | 1.25 × | at most 1.5 | reached |",
    ]


@pytest.mark.all
def test_host_benchmark_has_every_part(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "host.py"), "--steps", "4", "--milliseconds", "5"]
    result = subprocess.run(command, env=environment() | {"XLA_FLAGS": ""}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.rsplit(None, 2) for line in result.stdout.splitlines()[-3:]]
    assert [row[0].strip() for row in rows] == ["host, between two steps", "dispatch", "waiting for a batch"]
    assert all(float(median) > 0 for _, median, _ in rows)


@pytest.mark.all
def test_checkpoint_benchmark_has_every_contender():
    pytest.importorskip("moto")
    script = str(ROOT / "benchmarks" / "checkpoint_blocking.py")
    command = [sys.executable, script, "--config", CONFIG, "--rounds", "1", "--steps", "10"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| none", "| disk", "| store"]
    assert [float(row[1].split()[0]) > 0 for row in rows] == [False, True, True]
