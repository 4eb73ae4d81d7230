"""`mjax finetune` on small sets in the published formats: what it learns, leaves, prints, and how it continues."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import tyro

from mjax import cli
from mjax.commands.evaluate import EvaluateArguments, evaluate
from mjax.commands.finetune import finetune
from mjax.config import read_config
from mjax.finetuning import tuning
from mjax.finetuning.seed import SeedRun, read_epochs
from mjax.inference import restore_weights
from mjax.parallel.mesh import make_mesh
from mjax.state.layout import lay_out
from mjax.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.finetuning.pretrained import arguments_of, tuned, write_run
from tests.products import diagonal, one_in, seldom
from tests.small import named
from tests.tasks.synthetic import write_task
from tests.test_bad_inputs import fingerprint
from tests.test_train_command import environment
from tests.training.saved import data_file

RECIPE = ("--batch", 16, "--learning-rate", 3e-3, "--warmup", 0.1)
MNLI = (*RECIPE, "--epochs", 5, "--seeds", 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("pretrained") / "bert", dropout=0.05)


@pytest.fixture(scope="module")
def mnli(run):
    return write_task(run.parent / "mnli", "mnli", train=328)  # 20 whole batches and a half


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    """Commands with equal configs share a program, which would be traced again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "build_program", functools.cache(tuning.build_program))
        yield


@pytest.fixture(scope="module")
def asked():
    """The numbers of steps after which `done` asked whether the processes are to stop."""
    return []


@pytest.fixture(scope="module")
def done(run, mnli, asked):
    """The folder of a fine-tuning of two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mjax.training.loop.told_to_stop", asked.append)
        assert finetune(arguments_of(run, "mnli", mnli, *MNLI)) == 0
    return run.parent / "bert-mnli"


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def evaluated(capsys, run, task, data, *flags):
    given = ["--checkpoint", run, "--task", task, "--data", data, *flags, "--json"]
    assert evaluate(tyro.cli(EvaluateArguments, args=[str(flag) for flag in given])) == 0
    return json.loads(capsys.readouterr().out)


def weights_of(run):
    config = read_config(run / "config.json")
    return named(restore_weights(run, lay_out(config, make_mesh(config.mesh)).abstract_model, None, print)[1])


@pytest.mark.ci
def test_a_separable_set_is_learned_and_the_report_has_every_seed_their_median_and_the_best(done):
    report = report_of(done)
    assert [seed["seed"] for seed in report["seeds"]] == [1234, 1235]
    assert report["metric"] == "accuracy"
    values = [seed["figures"]["accuracy"] for seed in report["seeds"]]
    assert min(values) > 0.95
    assert report["median"]["accuracy"] == pytest.approx(sum(values) / 2)
    assert report["best"]["figures"]["accuracy"] == max(values)
    assert (report["epochs"], report["batch"], report["sequence"], report["step"]) == (5, 16, 48, 10)
    assert (report["task"], report["examples"], report["weight_decay"]) == ("mnli", 328, 0.1)
    assert (done / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_every_epoch_is_measured_and_the_first_of_the_best_is_kept(done):
    for seed in report_of(done)["seeds"]:
        epochs = read_epochs(done / f"seed-{seed['seed']}")
        assert [(epoch["epoch"], epoch["step"]) for epoch in epochs] == [(n, 20 * n) for n in range(1, 6)]
        values = [epoch["figures"]["accuracy"] for epoch in epochs]
        assert seed["epoch"] == values.index(max(values)) + 1
        bests = [20 * n for n in range(1, 6) if values[n - 1] > max(values[: n - 1], default=-1)]
        kept = done / f"seed-{seed['seed']}" / "best" / "checkpoints"
        assert sorted(int(entry.name) for entry in kept.iterdir()) == bests[-2:]
        states = done / f"seed-{seed['seed']}" / "checkpoints"
        assert sorted(entry.name for entry in states.iterdir()) == ["100", "80", "good.json"]  # one to fall back to
        records = read_metrics(done / f"seed-{seed['seed']}" / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, 101))
        rates = [record["learning_rate"] for record in records]
        assert (rates[0], max(rates)) == (0.0, pytest.approx(3e-3))
        assert rates.index(max(rates)) == 10  # a tenth of the steps
        assert records[-1]["val_accuracy"] == values[-1]
    losses = [read_epochs(done / f"seed-{seed}")[0]["loss"] for seed in (1234, 1235)]
    assert losses[0] != losses[1]


@pytest.mark.ci
def test_the_number_by_which_processes_agree_to_stop_grows_from_seed_to_seed(done, asked):
    """JAX stops them after the number that follows the highest it was asked with, so none may come again."""
    assert asked == list(range(1, 201))  # 100 steps a seed


@pytest.mark.ci
def test_the_best_folder_is_a_run_that_is_evaluated_to_the_same_figures_on_any_mesh(done, mnli, capsys, tmp_path):
    best = report_of(done)["best"]
    assert os.readlink(done / "best") == f"seed-{best['seed']}/best"
    mesh = ("--mesh.data", 2, "--mesh.model", 2, "--mesh.sequence-parallel")
    for data, name, flags in zip(mnli.validation, ("matched", "mismatched"), ((), mesh), strict=True):
        found = evaluated(capsys, done / "best", "mnli", data, "--predictions", tmp_path, *flags)
        assert found["step"] == best["step"]
        assert found["accuracy"] == best["figures"][f"{name}_accuracy"]
        written = (tmp_path / f"{name}.tsv").read_text()
        assert written == (done / "best" / "predictions" / f"{name}.tsv").read_text()
        assert written.startswith("index\tprediction\n0\t")


@pytest.mark.ci
def test_a_file_without_labels_gives_predictions_alone(done, mnli, capsys, tmp_path):
    (tmp_path / "test_matched.tsv").write_text("index\tsentence1\tsentence2\n7\tthe old bird\tindeed the bird\n")
    data = tmp_path / "test_matched.tsv"
    found = evaluated(capsys, done / "best", "mnli", data, "--predictions", tmp_path)
    assert found.keys() == {"task", "data", "checkpoint", "step"}
    assert (tmp_path / "MNLI-m.tsv").read_text() == "index\tprediction\n7\tentailment\n"
    argv = ["evaluate", "--checkpoint", str(done / "best"), "--task", "mnli", "--data", str(data)]
    assert cli.main(argv) == 2
    assert "has no labels to compute metrics from; add --predictions FOLDER" in capsys.readouterr().err


@pytest.mark.ci
def test_what_is_done_is_not_trained_again(run, mnli, done, capsys):
    before = fingerprint(done / "seed-1234")
    report = tuned(capsys, run, "mnli", mnli, *MNLI)
    assert report == report_of(done)
    assert fingerprint(done / "seed-1234") == before


@pytest.mark.ci
def test_the_table_names_seeds_figures_and_the_median(run, mnli, done, capsys):
    assert finetune(arguments_of(run, "mnli", mnli, *MNLI)) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    report = report_of(done)
    assert ["seed", "1234", "1235", "median"] in lines
    figures = [seed["figures"]["matched_accuracy"] for seed in report["seeds"]]
    values = [f"{value:.4f}" for value in (*figures, report["median"]["matched_accuracy"])]
    assert ["matched", "accuracy", *values] in lines
    assert f"seed {report['best']['seed']}, epoch {report['best']['epoch']}" in err
    assert "\x1b" not in out + err


@pytest.mark.ci
@pytest.mark.parametrize(
    "flag",
    [("--batch", 8), ("--epochs", 6), ("--sequence", 40), ("--weight-decay", 0), ("--precision.compute", "bf16")],
)
def test_a_folder_is_continued_only_with_what_it_was_begun_with(run, mnli, done, capsys, flag):
    before = fingerprint(done)
    given = ["--checkpoint", run, "--task", "mnli", "--train", *mnli.train, "--validation", *mnli.validation]
    assert cli.main(["finetune", *(str(word) for word in (*given, *MNLI, *flag))]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"was fine-tuned with {flag[0]} " in message
    assert f", now {flag[1]}" in message
    assert fingerprint(done) == before


@pytest.mark.parametrize(
    ("stop", "damaged"),
    one_in(2, [(40, True), (40, False), (51, False), (100, False)], often=pytest.mark.ci, others=pytest.mark.all),
)
def test_one_that_is_told_to_stop_continues_bit_for_bit(run, mnli, done, monkeypatch, capsys, tmp_path, stop, damaged):
    """Step 40 ends an epoch, which is measured when the command runs again, or continued from the epoch before where
    its checkpoint is damaged; 51 is in the middle of one, 100 is the last of all."""
    flags = (*MNLI, "--seeds", 1, "--seed", 1235, "--output", tmp_path / "again")
    write = SeedRun._write

    def write_and_stop(self, record):
        write(self, record)
        if record.step == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SeedRun, "_write", write_and_stop)
    assert finetune(arguments_of(run, "mnli", mnli, *flags)) == 75
    assert len(read_epochs(tmp_path / "again" / "seed-1235")) == {40: 1, 51: 2, 100: 4}[stop]
    monkeypatch.setattr(SeedRun, "_write", write)
    if damaged:
        data_file(tmp_path / "again" / "seed-1235" / "checkpoints" / str(stop)).unlink()
    capsys.readouterr()
    assert tuned(capsys, run, "mnli", mnli, *flags)["seeds"] == report_of(done)["seeds"][1:]
    expected, found = done / "seed-1235", tmp_path / "again" / "seed-1235"
    assert read_epochs(found) == read_epochs(expected)
    losses = [[record["loss"] for record in read_metrics(folder / "metrics.jsonl")] for folder in (expected, found)]
    assert losses[1] == losses[0]
    again = weights_of(found / "best")
    for name, weight in weights_of(expected / "best").items():
        np.testing.assert_array_equal(again[name], weight, err_msg=name)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("task", "layernorm"), [("qqp", "post"), ("race", "pre"), ("squad1.1", "post"), ("squad2.0", "pre")]
)
def test_every_kind_of_task_is_learned_from_its_published_format(task, layernorm, capsys, tmp_path):
    run = write_run(tmp_path / "bert", layernorm=layernorm)
    files = write_task(tmp_path / "data", task, train=128 if task == "race" else 256)
    report = tuned(capsys, run, task, files, *RECIPE, "--epochs", 5)
    whole = 100.0 if task.startswith("squad") else 1.0
    assert report["best"]["figures"][report["metric"]] > 0.95 * whole
    best = tmp_path / f"bert-{task}" / "best"
    found = evaluated(capsys, best, task, files.validation[0], "--predictions", tmp_path / "predictions")
    assert found[report["metric"]] == report["best"]["figures"][report["metric"]]
    for file in (best / "predictions").iterdir():
        assert (tmp_path / "predictions" / file.name).read_text() == file.read_text()


TASKS = ("mnli", "race", "squad2.0")
MESHES = (
    ("--mesh.data", 2, "--mesh.model", 2, "--mesh.sequence-parallel", "--mesh.zero", 3),
    ("--mesh.data", 2, "--mesh.pipe", 2, "--train.micro-batch", 2, "--train.recompute", "full"),
    ("--mesh.context", 4, "--mesh.data", 2, "--mesh.context-attention", "gather"),
)


@pytest.mark.parametrize(("task", "mesh"), seldom(product(TASKS, MESHES), some=diagonal(3, TASKS, MESHES)))
def test_a_mesh_ends_in_the_same_counts_and_losses_as_one_device(task, mesh, capsys, tmp_path):
    run = write_run(tmp_path / "bert", dropout=0.1)
    files = write_task(tmp_path / "data", task, train=64, validation=22)
    recipe = ("--batch", 16, "--learning-rate", 1e-3, "--epochs", 2)
    one = tuned(capsys, run, task, files, *recipe, "--output", tmp_path / "one")
    many = tuned(capsys, run, task, files, *recipe, *mesh, "--output", tmp_path / "many")
    for expected, found in zip(*(read_epochs(tmp_path / name / "seed-1234") for name in ("one", "many")), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert many["best"]["figures"] == pytest.approx(one["best"]["figures"], rel=1e-4)


@pytest.mark.ci
def test_two_processes_print_one_report_that_of_one_process(run, capsys, tmp_path):
    files = write_task(tmp_path / "data", "mnli", train=64, validation=22)
    recipe = ("--batch", 16, "--learning-rate", 1e-3, "--epochs", 2)
    expected = tuned(capsys, run, "mnli", files, *recipe, "--output", tmp_path / "one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    given = ["--checkpoint", run, "--task", "mnli", "--train", *files.train, "--validation", *files.validation, *recipe]
    where = ["--distributed.coordinator", address, "--distributed.processes", 2, "--simulate", 1, "--mesh.data", 2]
    command = [sys.executable, "-m", "mjax", "finetune", *given, *where, "--output", tmp_path / "two", "--json"]
    group = [
        subprocess.Popen(
            [str(word) for word in (*command, "--distributed.process", number)],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
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
    assert "\x1b" not in ends[0][1]
