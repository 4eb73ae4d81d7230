"""`mjax scale`: its ladder, resumption, jobs and messages; and forecasts in `mjax plan` and in a run."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from mjax.cluster import launch
from mjax.commands import cli, scale, train
from mjax.commands.train import choose_config
from mjax.config import read_config, save_config
from mjax.config.run import to_dict, write_config
from mjax.errors import UsageError
from mjax.models.build import count_parameters
from mjax.planner import scaling
from mjax.planner.scaling import read_scaling
from mjax.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.small import small_config
from tests.test_train_command import run_here

LLAMA = {"kind": "llama", "layers": 2, "hidden": 64, "heads": 8, "kv_heads": 4, "sequence": 16, "dropout": 0.0}
COMPLETEP = {"parametrization": "completep", "base_width": 32, "base_depth": 2, "warmup_steps": 10}


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(scaling, "DRAWS", 20)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A config file in an empty folder."""
    monkeypatch.chdir(tmp_path)
    made = small_config(**LLAMA)
    made = replace(made, optimizer=replace(made.optimizer, **COMPLETEP), train=replace(made.train, eval_batches=1))
    write_config(made, tmp_path / "mine.py", "A small Llama.")
    return made


def write_run(folder, config, loss=None, steps=None, data="{}"):
    """A run folder as training leaves it, with losses of a law."""
    folder.mkdir(parents=True)
    save_config(config, folder / "config.json")
    (folder / "data.json").write_text(data)
    sample, size = config.train.global_batch * config.model.sequence, count_parameters(config.model)
    lines = []
    for step in range(1, (steps or config.train.steps) + 1):
        line = {"step": step, "loss": 4.0, "tokens": step * sample, "tokens_per_second": 1e4}
        if step % max(config.train.eval_interval, 1) == 0 or step == config.train.steps:
            share = step / config.train.steps
            end = 2.0 + 20 / size**0.3 + 30 / (config.train.steps * sample) ** 0.35 if loss is None else loss
            line["val_loss"] = end if np.isnan(end) else end * (2 - share)
        lines.append(json.dumps(line).replace("NaN", "null"))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.fixture
def trained(monkeypatch):
    """Names of the runs that a stand-in for training has trained, all but the probes."""
    names = []

    def train_run(config, arguments, runs, name, wait=False):
        if not scale._is_done(runs / name):
            write_run(runs / name, config)
            names.extend([] if name == "probe" else [name])
        return 0

    monkeypatch.setattr(scale, "_train", train_run)
    return names


FLAGS = ("--config", "mine.py", "--output", "out", "--minutes", "40")


def test_ladder_leaves_law_table_and_picture(config, trained, tmp_path, capsys):
    assert cli.main(["scale", *FLAGS]) == 0
    text, law = capsys.readouterr().out, read_scaling(tmp_path / "out" / "scaling.json", config)
    assert trained == [run["name"] for run in law.runs]
    assert len(law.runs) == 5
    *line, other = law.runs
    assert [run["parameters"] for run in line] == sorted(run["parameters"] for run in line)
    assert np.allclose([run["tokens"] / run["parameters"] for run in line], 20, rtol=0.02)
    assert (other["parameters"], other["tokens"]) == (
        line[-2]["parameters"],
        pytest.approx(4 * line[-2]["tokens"], rel=0.01),
    )
    assert all(run["layers"] == max(round(run["hidden"] / 32), 2) for run in line)
    needed = sum(run["flops"] / (6 * line[-1]["parameters"] * 1e4) + scale.SECONDS_PER_RUN for run in law.runs)
    assert needed < 2400
    assert (tmp_path / "out" / "scaling.png").stat().st_size > 10_000
    assert not (tmp_path / "out" / "probe").exists()
    wanted = float(re.search(r"10 × the compute .*: (\d\.\d+) \(95%", text)[1])
    largest = line[-1]
    size, tokens = 10**0.5 * largest["parameters"], 10**0.5 * largest["tokens"]
    assert wanted == pytest.approx(2.0 + 20 / size**0.3 + 30 / tokens**0.35, rel=0.01)
    assert cli.main(["runs", "--runs", "out"]) == 0
    assert all(name in capsys.readouterr().out for name in trained[:1])
    curve = law.curve(size, tokens)
    assert max(curve) == 1.0
    middle = min(curve, key=lambda share: abs(share - 0.5))
    assert curve[middle].loss > curve[1.0].loss == pytest.approx(wanted, abs=1e-4)


def test_repeated_command_trains_what_is_missing(config, trained, tmp_path, monkeypatch, capsys):
    whole, calls = scale._train, []

    def stopped(config, arguments, runs, name, wait=False):
        calls.append(name)
        return whole(config, arguments, runs, name) if len(calls) < 5 else scale.PREEMPTED

    with monkeypatch.context() as patch:
        patch.setattr(scale, "_train", stopped)
        assert cli.main(["scale", *FLAGS]) == scale.PREEMPTED
    first, plan = list(trained), (tmp_path / "out" / "ladder.json").read_text()
    assert len(first) == 2
    assert cli.main(["scale", *FLAGS]) == 0
    assert len(trained) == len(set(trained)) == 5
    assert (tmp_path / "out" / "ladder.json").read_text() == plan
    capsys.readouterr()
    assert cli.main(["scale", *FLAGS, "--optimizer.learning-rate", "1"]) == 2
    expected = "out was planned with optimizer.learning_rate 0.01, now 1.0; choose another --output"
    assert expected in capsys.readouterr().err
    assert cli.main(["scale", *FLAGS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alpha"] > 0


def test_runs_have_settings_in_proportion(config, tmp_path, monkeypatch):
    """The command line of a run gives its config; the warm-up keeps its share of the steps."""
    default = scale.ScaleArguments(config="mine.py", settings=config, simulate=1)
    run = scale.choose_runs(default, config, scale.list_sizes(config))[0]
    wanted = scale.run_config(config, run)
    commands, simulated = [], []

    class Process:
        def __init__(self, command, **_):
            commands.append(command)

        def wait(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert scale._train(wanted, default, tmp_path / "out", run["name"]) == 0
    monkeypatch.setattr(launch, "simulate_devices", simulated.append)
    arguments, *_ = train._train_arguments(commands[0][4:], choose_config, "train")
    assert simulated == [1]
    assert arguments.settings == wanted
    assert wanted.optimizer.warmup_steps / wanted.train.steps == pytest.approx(0.1, abs=0.01)
    assert wanted.train.steps * 8 * 16 == run["tokens"]
    assert count_parameters(wanted.model) == run["parameters"]


def test_jobs_are_submitted_once(config, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # of the stand-in
    monkeypatch.chdir(tmp_path)
    calls, queued = [], set()

    def slurm(*command, script=""):
        name = next(word.partition("=")[2] for word in command if "name=" in word)
        if command[0] == "squeue":
            return "7\n" if name in queued else ""
        calls.append((command, script))
        queued.add(name)
        return "7\n"

    monkeypatch.setattr(scale, "run_command", slurm)
    monkeypatch.setattr(scale, "_measure_speed", lambda *_: 1e11)
    for _ in range(2):
        assert cli.main(["scale", *FLAGS, "--sbatch", "partition=gpu"]) == 0
        assert "when the jobs are done, repeat the command" in capsys.readouterr().out
    assert len(calls) == 5
    assert all("--partition=gpu" in command for command, _ in calls)
    assert shlex.split(calls[0][1].splitlines()[1])[1:5] == [sys.executable, "-m", "mjax", "train"]


def test_bad_runs_are_rejected(config, tmp_path):
    """One sentence each."""
    made = [replace(config, train=replace(config.train, steps=steps, eval_interval=5)) for steps in (10, 20, 40)]
    runs = [write_run(tmp_path / f"run{one.train.steps}", one) for one in made]
    other = replace(made[0], model=replace(made[0].model, vocabulary=50))
    bad = {
        r"determine no curve; give three different runs": runs[:2],
        r"two has diverged: its validation loss is not finite": [
            *runs[:2],
            write_run(tmp_path / "two", made[2], np.nan),
        ],
        r"up has diverged: its validation loss 9.0+ is above": [*runs[:2], write_run(tmp_path / "up", made[2], 9.0)],
        r"run10 and .*voc have different vocabularies \(60 and 50\)": [*runs, write_run(tmp_path / "voc", other)],
        r"different data; leave one": [*runs, write_run(tmp_path / "data", made[0], data='{"path": ["5d"]}')],
        r"half has taken 20 of 40 steps; continue it": [*runs, write_run(tmp_path / "half", made[2], steps=20)],
        r"missing does not exist": [*runs, "missing"],
    }
    (tmp_path / "spelt" / "tokenizer").mkdir(parents=True)
    (tmp_path / "spelt").rename(tmp_path / "aside")
    spelt = write_run(tmp_path / "spelt", made[0])
    (tmp_path / "aside" / "tokenizer").rename(tmp_path / "spelt" / "tokenizer")
    bad[r"different tokenizers; leave one"] = [*runs, spelt]
    for message, folders in bad.items():
        with pytest.raises(UsageError, match=message):
            scale.scale([*folders, "--config", "mine.py", "--output", "out"])
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(UsageError, match="add --output, such as scaling/mine"):
        scale.scale(runs)


def test_impossible_ladders_are_rejected(config, trained):
    for flags, message in {
        ("--minutes", "0.5"): r"--minutes 0.5 is too short for 5 runs of mine.py: the smallest take about \d",
        (
            "--ladder",
            "16",
            "--model.heads",
            "1",
            "--model.kv-heads",
            "1",
        ): r"mine.py has 3 sizes .* too few for --ladder 16",
    }.items():
        with pytest.raises(UsageError, match=message):
            scale.scale([*FLAGS[:4], *flags])


@pytest.fixture
def law(config, tmp_path):
    made = [
        replace(config, train=replace(config.train, steps=steps, eval_interval=steps // 10)) for steps in (20, 40, 80)
    ]
    runs = [write_run(tmp_path / "fitted" / f"{one.train.steps}", one) for one in made]
    assert scale.scale([*runs, "--config", "mine.py", "--output", "law"]) == 0
    return read_scaling(tmp_path / "law" / "scaling.json", config)


def test_plan_forecasts_loss(law, capsys):
    capsys.readouterr()
    assert cli.main(["plan", "--config", "mine.py", "--scaling", "law/scaling.json", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    forecast = law.predict(values["run"]["parameters"], 100 * 8 * 16)
    assert values["forecast"]["loss"] == pytest.approx(forecast.loss)
    assert values["forecast"]["interval"] == pytest.approx([forecast.low, forecast.high])
    half = values["forecast"]["same_loss"][0]
    assert law.predict(half["parameters"], half["tokens"]).loss == pytest.approx(forecast.loss)
    assert half["compute"] == pytest.approx(half["tokens"] / 2 / (100 * 8 * 16))
    assert cli.main(["plan", "--config", "mine.py", "--scaling", "law/scaling.json", "--train.global-batch", "16"]) == 0
    assert "the small runs had train.global_batch 8" in capsys.readouterr().out
    assert cli.main(["plan", "--config", "gpt_demo", "--scaling", "law/scaling.json"]) == 2
    assert "is of runs with model.kind llama, and this config has gpt" in capsys.readouterr().err
    assert cli.main(["plan", "--config", "mine.py", "--scaling", "mine.py"]) == 2


def test_run_outside_of_forecast_is_reported(law, tmp_path, capsys):
    """And its forecast is on disk before the first step."""
    law = replace(law, settings={})
    law.write(tmp_path / "scaling.json")
    flags = ("--log.scaling", str(tmp_path / "scaling.json"), "--train.eval-interval", "4")
    run_here(tmp_path, *flags)
    lines = capsys.readouterr().out.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("forecast of the last validation loss"))
    outside = [
        number for number, line in enumerate(lines) if re.search(r"validation loss .* is (above|below) its", line)
    ]
    assert outside
    assert start < outside[0]
    forecast = json.loads((tmp_path / "run" / "forecast.json").read_text())
    assert forecast["source"].startswith("a fit of 3 runs")
    assert len(forecast["steps"]) == 10


def test_forecast_without_interval_reports_no_loss(law, tmp_path, capsys, fewer_devices):
    """A law without draws has none. A run whose scaling.json is gone does not continue without it."""
    file = tmp_path / "scaling.json"
    replace(law, settings={}, draws=[]).write(file)
    run_here(tmp_path, "--log.scaling", str(file), "--train.eval-interval", "4")
    printed = capsys.readouterr().out
    assert "forecast of the last validation loss" in printed
    assert "its forecast" not in printed
    assert "NaN" not in (tmp_path / "run" / "forecast.json").read_text()
    file.unlink()
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--train.steps", "200"]) == 2
    assert f"{file} does not exist; give the scaling.json of mjax scale, or None" in capsys.readouterr().err
    assert cli.main(["train", "--run", str(tmp_path / "run"), "--log.scaling", "None"]) == 0


@pytest.mark.ci
def test_killed_ladder_continues(config, tmp_path):
    """Real runs in processes of their own: SIGTERM to the command saves the run that is in progress."""
    command = [sys.executable, "-m", "mjax", "scale", *FLAGS[:4], "--minutes", "1000", "--ladder", "3"]
    command += ["--tokens-per-parameter", "0.5"]
    runs = scale.choose_runs(
        scale.ScaleArguments(config="mine.py", settings=config, ladder=3, tokens_per_parameter=0.5),
        config, scale.list_sizes(config),
    )  # fmt: skip
    (tmp_path / "out").mkdir()
    flags = {"minutes": 1000, "ladder": 3, "tokens_per_parameter": 0.5}
    plan = {"flags": flags, "config": to_dict(config), "runs": runs}
    (tmp_path / "out" / "ladder.json").write_text(json.dumps(plan))
    environment = {**scale.os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    metrics = tmp_path / "out" / runs[-1]["name"] / "metrics.jsonl"
    while process.poll() is None and len(read_metrics(metrics)) < 20:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == scale.PREEMPTED
    done = len(read_metrics(metrics))
    assert 20 <= done < read_config(metrics.parent / "config.json").train.steps
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "10 × the compute of" in result.stdout
    assert len(json.loads((metrics.parent / "goodput.json").read_text())) == 2
