"""`mjax plan --gpu … --devices …` as a person runs it, and the published runs asked for anew."""

import json
from functools import partial

import pytest

from benchmarks.published import whole_rows
from mjax import cli
from mjax.config import load_config
from mjax.hardware import gpu_named
from mjax.parallel.axes import NAMES
from mjax.planner.memory import predict_memory
from mjax.planner.search import search
from mjax.planner.search_command import SearchArguments, run_search
from mjax.planner.time import predict_time
from mjax.training.metrics import read_metrics
from tests.conftest import ROOT
from tests.planner.configs import changed

TINY = ["--config", str(ROOT / "tests" / "tiny_config.py")]
SEARCH = ["plan", *TINY, "--gpu", "h100", "--devices", "2"]
A100 = gpu_named("a100")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt_1_7b", "gpt_39b", "gpt_145b"])
def test_search_finds_meshes_like_the_papers(name):
    """Rows of arXiv 2104.04473, table 1, as they were run: without sequence parallelism, and in fp16."""
    config = changed(whole_rows(load_config(name)), precision={"compute": "fp16", "loss_scale": 8192.0})
    time_of, keep = partial(predict_time, gpu=A100), ["mesh.zero", "mesh.sequence_parallel", "mesh.schedule"]
    capacity = A100.usable_bytes
    found = search(config, config.mesh.devices, predict_memory, time_of, capacity, [*keep, "train.recompute"])
    best, own = found.ranked[0], config.mesh
    assert float(f"{best.time.total:.4g}") <= float(f"{predict_time(config, A100).total:.4g}")
    assert predict_memory(config).total <= found.capacity
    # Takeaways 1 and 2 of the paper: `model` within a server, and a pipeline across servers where it is not enough.
    assert best.config.mesh.model <= A100.gpus_per_node
    assert best.config.mesh.pipe > 1 or own.pipe == 1
    assert best.config.mesh.pipe * best.config.mesh.model <= 2 * own.pipe * own.model


def test_search_plans_the_fastest(capsys):
    """With another batch, a field that is kept, and a server of two with its own network, by JAX's name of the GPU."""
    flags = ["--target-batch", "16", "--keep", "mesh.model", "train.recompute", "--mesh.model", "2", "--top", "500"]
    server = ["--gpu", "NVIDIA H200", "--devices-per-node", "2", "--network", "800"]
    assert cli.main([*SEARCH, *flags, *server, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = plan["search"]
    best = found["best"][0]
    assert plan["run"]["devices"] == found["devices"] == 2
    assert plan["run"]["mesh"] == {axis: best[f"mesh.{axis}"] for axis in NAMES}
    assert plan["time"]["seconds"] == pytest.approx(best["seconds"])
    assert best["days"] == pytest.approx(plan["time"]["run"]["seconds"] / 86_400)
    assert (found["global_batch"], found["tokens"]) == (16, 6 * 16 * 16)
    assert (found["gpu"], found["devices_per_node"], found["network_bytes_per_second"]) == ("h200", 2, 100e9)
    assert {(each["mesh.model"], each["train.recompute"]) for each in found["best"]} == {(2, "none")}


@pytest.mark.ci
def test_written_config_trains(tmp_path, fewer_devices, capsys):
    file = tmp_path / "found.py"
    assert cli.main([*SEARCH, "--write", str(file)]) == 0
    assert load_config(str(file)).mesh.devices == 2
    few = ["--train.steps", "1", "--optimizer.warmup-steps", "0", "--train.eval-interval", "0"]
    assert cli.main(["train", "--config", str(file), "--runs", str(tmp_path), "--name", "run", *few]) == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1]
    # The same search again does not write over it.
    assert cli.main([*SEARCH, "--write", str(file)]) == 2
    assert "already exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.ci
def test_ramp_up_ranks_by_days_and_narrows():
    config = changed(
        load_config("gpt_175b"),  # from 16 to 1,536 sequences
        model={"attention_dropout": 0.0},
        mesh={"zero": 1, "sequence_parallel": True},
        train={"recompute": "selective"},
    )
    keep = ("mesh.zero", "mesh.schedule", "mesh.sequence_parallel", "train.recompute")
    _, section = run_search(SearchArguments(devices=256, keep=keep, top=1000), "small", config, gpu_named("h200"))
    names = ("seconds", "days", "seconds_at_global_batch")
    seconds, days, whole = ([each[name] for each in section.values["best"]] for name in names)
    rounded = [float(f"{each:.4g}") for each in seconds]
    assert rounded == sorted(rounded)
    assert days == pytest.approx([each * 111_355 / 86_400 for each in seconds])
    assert whole != sorted(whole)  # the whole batch alone would rank them otherwise

    left_out = section.values["narrowed"]
    assert left_out["unit"] == 16
    assert left_out["seconds"] < 0.95 * whole[0]
