"""`mjax plan --gpu … --devices …` as a user runs it, and the published runs searched again."""

import json
from functools import partial

import pytest

from benchmarks.published import whole_rows
from mjax.cluster.hardware import gpu_named
from mjax.commands import cli
from mjax.config import load_config
from mjax.config.axes import NAMES
from mjax.planner.memory import predict_memory
from mjax.planner.search import search
from mjax.planner.time import predict_time
from tests.conftest import ROOT
from tests.planner.configs import changed

A100 = gpu_named("a100")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["gpt_1_7b", "gpt_39b", "gpt_145b"])
def test_search_finds_meshes_like_the_papers(name):
    """Rows of arXiv 2104.04473, table 1, as they were run: without sequence parallelism, and in fp16."""
    config = changed(whole_rows(load_config(name)), precision={"compute": "fp16"})
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
    """Sets another batch, fixed fields, and a server of two with its own network, by JAX's name of the GPU."""
    flags = ["--train.global-batch", "16", "--fix", "mesh.model", "train.recompute", "--mesh.model", "2"]
    server = ["--gpu", "NVIDIA H200", "--devices", "2", "--devices-per-node", "2", "--network", "800"]
    tiny = str(ROOT / "tests" / "tiny_config.py")
    assert cli.main(["plan", "--config", tiny, *flags, *server, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    found = plan["search"]
    best = found["best"][0]
    assert plan["run"]["devices"] == found["devices"] == 2
    assert plan["run"]["mesh"] == {axis: best[f"mesh.{axis}"] for axis in NAMES}
    assert plan["time"]["seconds"] == pytest.approx(best["seconds"])
    assert best["days"] == pytest.approx(plan["time"]["run"]["seconds"] / 86_400)
    assert (found["global_batch"], found["tokens"]) == (16, 12 * 16 * 16)
    assert (found["gpu"], found["devices_per_node"], found["network_bytes_per_second"]) == ("h200", 2, 100e9)
    assert {(each["mesh.model"], each["train.recompute"]) for each in found["best"]} == {(2, "none")}
