"""`mjax finetune` on small sets in the published formats: what it learns, leaves, prints, and how it continues."""

import functools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tyro

from mjax.commands import cli
from mjax.commands.evaluate import EvaluateArguments, evaluate
from mjax.commands.finetune import finetune
from mjax.config import read_config
from mjax.finetuning import tuning
from mjax.finetuning.tuning import find_best, read_epochs
from mjax.generation.inference import restore_weights
from mjax.parallel.mesh import make_mesh
from mjax.run.health import Guard
from mjax.run.metrics import read_metrics
from mjax.step.layout import build_layout
from mjax.tasks.labelled import RECIPES
from tests.conftest import ROOT
from tests.finetuning.pretrained import arguments_of, tuned, words_of, write_run
from tests.ports import free_port
from tests.small import named
from tests.tasks.synthetic import write_task
from tests.test_bad_inputs import fingerprint
from tests.test_train_command import environment
from tests.training.saved import data_file

RECIPE = ("--batch", 16, "--learning-rate", 3e-3, "--warmup", 0.25)
MNLI = (*RECIPE, "--epochs", 4, "--seeds", 2)  # 4 steps an epoch
SHORT = ("--batch", 16, "--learning-rate", 1e-3, "--epochs", 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("pretrained") / "bert", dropout=0.05)


@pytest.fixture(scope="module")
def mnli(run):
    return write_task(run.parent / "mnli", "mnli", train=72, validation=24)  # 4 whole batches and a half


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Commands with equal configs share a program, which would be traced again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "build_program", functools.cache(tuning.build_program))
        yield


ASKED = []
"""The numbers of steps after which `done` asked whether the processes are to stop."""


@pytest.fixture(scope="module")
def done(run, mnli):
    """The folder of a fine-tuning of two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mjax.run.loop.stop_agreed", ASKED.append)
        assert finetune(arguments_of(run, "mnli", mnli, *MNLI)) == 0
    return run.parent / "bert-mnli"


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def evaluated(capsys, run, task, data, *flags):
    given = ["--run", run, "--task", task, "--data", data, *flags, "--json"]
    evaluate(tyro.cli(EvaluateArguments, args=[str(flag) for flag in given]))
    return json.loads(capsys.readouterr().out)


def weights_of(run):
    config = read_config(run / "config.json")
    return named(restore_weights(run, build_layout(config, make_mesh(config.mesh)).abstract_model, None, print)[1])


def test_report_has_seeds_median_and_best(done):
    report = report_of(done)
    assert [seed["seed"] for seed in report["seeds"]] == [1234, 1235]
    assert report["seeds"][0]["loss"] != report["seeds"][1]["loss"]
    values = [seed["figures"]["accuracy"] for seed in report["seeds"]]
    assert report["median"]["accuracy"] == pytest.approx(sum(values) / 2)
    assert report["best"]["figures"]["accuracy"] == max(values)
    assert (report["task"], report["examples"], report["epochs"], report["step"]) == ("mnli", 72, 4, 10)
    assert (done / "seed-1234" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_every_epoch_is_measured_and_first_best_kept(done):
    for seed in report_of(done)["seeds"]:
        folder = done / f"seed-{seed['seed']}"
        epochs = read_epochs(folder)
        assert [(epoch["epoch"], epoch["step"]) for epoch in epochs] == [(n, 4 * n) for n in range(1, 5)]
        values = [epoch["figures"]["accuracy"] for epoch in epochs]
        assert seed["epoch"] == values.index(max(values)) + 1
        bests = [4 * n for n in range(1, 5) if values[n - 1] > max(values[: n - 1], default=-1)]
        assert sorted(int(entry.name) for entry in (folder / "best" / "checkpoints").iterdir()) == bests[-2:]
        # One to fall back to.
        assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["12", "16", "good.json"]
        records = read_metrics(folder / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, 17))
        rates = [record["learning_rate"] for record in records]
        assert (rates[0], max(rates)) == (0.0, pytest.approx(3e-3))
        assert rates.index(max(rates)) == 4  # a quarter of the steps
        assert records[-1]["val_accuracy"] == values[-1]
    # JAX stops processes after the number that follows the highest it was asked with, so none may come again.
    assert list(range(1, 33)) == ASKED
    assert find_best([{"figures": {"f1": value}, "epoch": n} for n, value in enumerate((1, 2, 2))], "f1")["epoch"] == 1


@pytest.mark.parametrize(
    ("stop", "damaged"),
    [(8, False), *(pytest.param(*case, marks=pytest.mark.ci) for case in ((8, True), (10, False), (16, False)))],
)
def test_interrupted_finetuning_ends_bit_identical(run, mnli, done, monkeypatch, capsys, tmp_path, stop, damaged):
    """Step 8 ends an epoch, which is measured when the command runs again. If its checkpoint is damaged, the run
    continues from the epoch before. Step 10 is in the middle of an epoch, 16 is the last of all."""
    flags = (*MNLI, "--seeds", 1, "--seed", 1235, "--output", tmp_path / "again")
    expected, found = done / "seed-1235", tmp_path / "again" / "seed-1235"
    on_step = Guard.on_step

    def finish_and_stop(self, run, step, metrics):
        on_step(self, run, step, metrics)
        if step == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Guard, "on_step", finish_and_stop)
    assert finetune(arguments_of(run, "mnli", mnli, *flags)) == 75
    assert len(read_epochs(found)) == (stop - 1) // 4
    monkeypatch.setattr(Guard, "on_step", on_step)
    if damaged:
        data_file(found / "checkpoints" / str(stop)).unlink()
    if stop == 8:  # as after a kill: a later epoch was measured, and its checkpoint is not there
        (found / "epochs.json").write_text(json.dumps([*read_epochs(found), read_epochs(expected)[2]]))
    capsys.readouterr()
    assert tuned(capsys, run, "mnli", mnli, *flags)["seeds"] == report_of(done)["seeds"][1:]
    assert read_epochs(found) == read_epochs(expected)
    losses = [[record["loss"] for record in read_metrics(folder / "metrics.jsonl")] for folder in (expected, found)]
    assert losses[1] == losses[0]
    again = weights_of(found / "best")
    for name, weight in weights_of(expected / "best").items():
        np.testing.assert_array_equal(again[name], weight, err_msg=name)


@pytest.mark.parametrize("flag", [("--batch", 8), ("--precision.compute", "bf16")])
def test_folder_continues_only_with_its_settings(run, mnli, done, capsys, flag):
    before = fingerprint(done)
    assert cli.main(["finetune", *words_of(run, "mnli", mnli, *MNLI, *flag)]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"was fine-tuned with {flag[0]} " in message
    assert f", now {flag[1]}" in message
    assert fingerprint(done) == before


@pytest.mark.ci
def test_best_folder_is_evaluated_to_same_metrics(done, mnli, capsys, tmp_path):
    """Also on a mesh; a file without labels gives predictions only."""
    best = report_of(done)["best"]
    assert os.readlink(done / "best") == f"seed-{best['seed']}/best"
    mesh = ("--mesh.data", 2, "--mesh.model", 2, "--mesh.sequence-parallel")
    for data, name, flags in zip(mnli.validation, ("matched", "mismatched"), ((), mesh), strict=True):
        found = evaluated(capsys, done / "best", "mnli", data, "--predictions", tmp_path, *flags)
        assert found["step"] == best["step"]
        assert found["accuracy"] == best["figures"][f"{name}_accuracy"]
        written = (tmp_path / f"{name}.tsv").read_text()
        assert written == (done / "best" / "predictions" / f"{name}.tsv").read_text()
    data = tmp_path / "test_matched.tsv"
    data.write_text("index\tsentence1\tsentence2\n7\tthe old bird\tindeed the bird\n")
    assert "accuracy" not in evaluated(capsys, done / "best", "mnli", data, "--predictions", tmp_path)
    assert (tmp_path / "MNLI-m.tsv").read_text().startswith("index\tprediction\n7\t")
    argv = ["evaluate", "--run", str(done / "best"), "--task", "mnli", "--data", str(data)]
    assert cli.main(argv) == 2
    assert "no labels to compute metrics from; add --predictions" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.parametrize("task", RECIPES)
def test_task_is_learned_from_published_format(task, capsys, tmp_path):
    run = write_run(tmp_path / "bert", layernorm="pre" if task in ("race", "squad2.0") else "post")
    files = write_task(tmp_path / "data", task, train=128 if task == "race" else 256)
    report = tuned(capsys, run, task, files, *RECIPE, "--epochs", 5)
    whole = 100.0 if task.startswith("squad") else 1.0
    assert report["best"]["figures"][report["metric"]] > 0.95 * whole


@pytest.mark.ci
def test_two_processes_print_report_of_one(run, capsys, tmp_path):
    files = write_task(tmp_path / "data", "mnli", train=64, validation=22)
    expected = tuned(capsys, run, "mnli", files, *SHORT, "--output", tmp_path / "one")
    where = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", 2]
    where += ["--simulate", 1, "--mesh.data", 2]
    words = words_of(run, "mnli", files, *SHORT, *where, "--output", tmp_path / "two", "--json")
    argv = [sys.executable, "-m", "mjax", "finetune", *words, "--distributed.process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    group = [subprocess.Popen([*argv, str(number)], cwd=ROOT, env=environment(), **pipes) for number in range(2)]
    try:
        ends = [process.communicate(timeout=400) for process in group]
    finally:
        for process in group:
            process.kill()
    assert [process.returncode for process in group] == [0, 0], ends
    # Gloo, which carries the collectives between CPUs, says something on stdout too.
    objects = [[line for line in out.splitlines() if line.startswith("{")] for out, _ in ends]
    assert [len(lines) for lines in objects] == [1, 0]
    found = json.loads(objects[0][0])
    assert found["best"]["figures"] == expected["best"]["figures"]
    assert found["best"]["loss"] == pytest.approx(expected["best"]["loss"], rel=1e-4)
