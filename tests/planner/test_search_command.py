"""`mjax plan --gpu … --devices …` as a person runs it, and the published runs asked for anew."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from mjax import cli
from mjax.config import load_config
from mjax.hardware import gpu_named
from mjax.planner.memory import predict_memory
from mjax.planner.search import search
from mjax.planner.time import predict_time
from mjax.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.test_train_command import environment

TINY = ["--config", str(ROOT / "tests" / "tiny_config.py")]
SEARCH = ["plan", *TINY, "--gpu", "h100", "--devices", "2"]
A100 = gpu_named("a100")
TABLE_1 = ("gpt_1_7b", "gpt_3_6b", "gpt_7_5b", "gpt_18b", "gpt_39b", "gpt_76b", "gpt_145b", "gpt_310b", "gpt_530b",
           "gpt_1t")  # fmt: skip


def published(name):
    """A row of arXiv 2104.04473, table 1, as it was run: its mesh and fp16."""
    config = load_config(name)
    return replace(config, precision=replace(config.precision, compute="fp16", loss_scale=8192.0))


def searched(config, keep=()):
    time_of = partial(predict_time, gpu=A100)
    return search(config, config.mesh.devices, predict_memory, time_of, A100.usable_bytes, keep)


@pytest.mark.parametrize("name", TABLE_1)
def test_among_the_settings_of_the_paper_the_search_finds_meshes_like_the_papers(name):
    config = published(name)
    found = searched(config, ["mesh.zero", "mesh.sequence_parallel", "mesh.schedule", "train.recompute"])
    best, own = found.ranked[0], config.mesh
    assert float(f"{best.time.total:.4g}") <= float(f"{predict_time(config, A100).total:.4g}")
    assert predict_memory(config).total <= found.capacity
    # Takeaways 1 and 2 of the paper: `model` within a server, and a pipeline across servers where it is not enough.
    assert best.config.mesh.model <= A100.gpus_per_node
    assert best.config.mesh.pipe > 1 or own.pipe == 1
    assert best.config.mesh.pipe * best.config.mesh.model <= 2 * own.pipe * own.model


@pytest.mark.parametrize("name", ["gpt_18b", *[pytest.param(name, marks=pytest.mark.long) for name in TABLE_1]])
def test_among_all_settings_the_search_finds_what_is_faster_than_the_paper(name):
    config = published(name)
    best = searched(config).ranked[0]
    assert best.time.total < predict_time(config, A100).total
    assert best.config.mesh.model <= 2 * A100.gpus_per_node


def test_a_search_prints_the_plan_of_the_fastest_and_how_it_was_found(capsys):
    assert cli.main([*SEARCH, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best = plan["search"]["best"][0]
    assert plan["run"]["devices"] == plan["search"]["devices"] == 2
    assert plan["run"]["mesh"] == {axis: best[f"mesh.{axis}"] for axis in ("pipe", "data", "model")}
    assert plan["time"]["seconds"] == pytest.approx(best["seconds"])
    assert best["days"] == pytest.approx(plan["time"]["run"]["seconds"] / 86_400)
    assert plan["search"]["tokens"] == 12 * 8 * 16
    seconds = [each["seconds"] for each in plan["search"]["best"]]
    assert len(seconds) == 10
    assert seconds == pytest.approx(sorted(seconds), rel=1e-3)


def test_flags_change_the_batch_and_hold_what_is_kept(capsys):
    flags = ["--target-batch", "16", "--keep", "mesh.model", "train.recompute", "--mesh.model", "2", "--top", "500"]
    assert cli.main([*SEARCH, *flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["search"]["global_batch"] == 16
    assert plan["search"]["tokens"] == 6 * 16 * 16
    assert {each["mesh.model"] for each in plan["search"]["best"]} == {2}
    assert {each["train.recompute"] for each in plan["search"]["best"]} == {"none"}


def test_the_written_config_trains(tmp_path, capsys):
    file = tmp_path / "found.py"
    assert cli.main([*SEARCH, "--write", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"written to {file}" in printed
    config = load_config(str(file))
    assert config.mesh.devices == 2
    assert "the fastest of" in file.read_text()
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(file), "--runs", str(tmp_path), "--name", "run"]
    few = ["--simulate", "2", "--train.steps", "1", "--optimizer.warmup-steps", "0", "--train.eval-interval", "0"]
    result = subprocess.run([*command, *few], env=environment(), capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    # The same search again does not write over it.
    before = file.read_text()
    assert cli.main([*SEARCH, "--write", str(file)]) == 2
    assert "is there already and stays as it is" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--devices", "8"], "--devices 8 needs to know of what kind; add --gpu, such as --gpu h100"),
        (["--devices", "8", "--gpu", "h10"], "--gpu h10 is not known, did you mean 'h100'?"),
        (["--devices", "0", "--gpu", "h100"], "--devices is 0; it must be at least 1"),
        (["--devices", "12", "--gpu", "h100"], "--devices 12 is no whole number of nodes of 8 GPUs; use 8 or 16"),
        (["--devices", "8", "--gpu", "h100", "--top", "0"], "--top is 0; it must be at least 1"),
        (["--devices", "8", "--gpu", "h100", "--price", "-1"], "--price is -1; it must be 0 or more"),
        (["--price", "2"], "--price is for the search; add --devices, such as --devices 8"),
        (["--top", "0"], "--top is for the search; add --devices, such as --devices 8"),
        (["--devices-per-node", "0"], "--devices-per-node is the server that --compile compiles for; add --compile"),
        (
            ["--devices", "8", "--gpu", "h100", "--target-batch", "200_000_000"],
            "--target-batch 200000000 is more than the 153,600,000 samples of the run; use 153600000 or less",
        ),
        (["--write", "plan.py"], "--write is for the search; add --devices, such as --devices 8"),
        (["--devices", "8", "--gpu", "v100"], "bf16"),
        (["--devices", "8", "--gpu", "h100", "--keep", "mesh.zeros"], "did you mean 'mesh.zero'?"),
        (["--config", "gpt_1t", "--devices", "8", "--gpu", "h100"], "use --devices "),
        (["--config", "bloom_176b", "--devices", "384", "--gpu", "a100"], "grows there by multiples of 16; use"),
    ],
)
def test_what_cannot_be_searched_is_one_sentence_and_exit_code_2(capsys, flags, message):
    assert cli.main(["plan", "--config", "gpt_8b", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_how_many_gpus_are_enough_is_true(capsys):
    assert cli.main(["plan", "--config", "gpt_39b", "--devices", "8", "--gpu", "h100"]) == 2
    enough = int(capsys.readouterr().err.split("use --devices ")[1].split(",")[0])
    assert cli.main(["plan", "--config", "gpt_39b", "--devices", str(enough), "--gpu", "h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["search"]["best"]


def test_nothing_is_written_where_something_else_is_refused(tmp_path, capsys):
    file = tmp_path / "found.py"
    picture = str(tmp_path / "s.png")
    keep = ["--keep", "mesh.pipe", "--mesh.pipe", "1", "--mesh.data", "2"]
    assert cli.main([*SEARCH, *keep, "--write", str(file), "--schedule-figure", picture]) == 2
    assert "--keep mesh.pipe" in capsys.readouterr().err
    assert not file.exists()


def test_a_price_without_end_is_refused(capsys):
    assert cli.main([*SEARCH, "--price", "inf"]) == 2
    assert "--price is inf" in capsys.readouterr().err


def test_a_gpu_may_be_named_as_jax_names_it(capsys):
    assert cli.main(["plan", *TINY, "--gpu", "NVIDIA H200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["gpu"] == "h200"
