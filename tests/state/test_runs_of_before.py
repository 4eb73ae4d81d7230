"""Run folders that mjax 0.2.0 wrote continue, with the losses that it would have had.

runs_of_0.2.0.tar.xz holds five runs after 2 of 4 steps, without pictures and environment.json, each with the losses of
the two steps that followed, and a fine-tuned BERT:

    mjax train --config gpt_345m --name dense --model.layers 2 --model.hidden 8 --model.heads 2 --model.sequence 8 \
        --model.vocabulary 20 --model.vocabulary-multiple 32 --data.mock --train.steps 2 --train.global-batch 4 …
    pipeline      --model.layers 4 --mesh.pipe 2 --mesh.chunks 2 --mesh.schedule zb-h1, which is 1f1b now
    float16       --precision.compute fp16 --precision.loss-scale-window 1, whose loss scale doubles at every step
    mixture       --config moe_demo --model.experts 4 --model.expert-interval 2: groups of a dense and a sparse layer
    bert          --config bert_336m --model.layernorm post
    fine-tuned    mjax finetune --task mnli, the best of one epoch
"""

import json
import tarfile

import numpy as np
import pytest

from mjax.commands import cli
from mjax.config import MeshConfig, read_config
from mjax.generation.inference import restore_weights
from mjax.parallel.mesh import make_mesh
from mjax.run.metrics import read_metrics
from mjax.step.layout import build_layout
from tests.conftest import ROOT
from tests.small import named

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture
def runs(tmp_path):
    with tarfile.open(ROOT / "tests" / "state" / "runs_of_0.2.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("dense", ""),
        ("pipeline", ""),
        pytest.param("pipeline", "--mesh.pipe 1 --mesh.virtual-stages 1 --mesh.data 2", marks=pytest.mark.ci),
        pytest.param("dense", "--mesh.pipe 2 --mesh.model 2", marks=pytest.mark.ci),
        *(pytest.param(name, "", marks=pytest.mark.ci) for name in ("float16", "mixture", "bert")),
    ],
)
def test_run_of_before_continues_with_its_losses(name, mesh, runs, fewer_devices):
    assert cli.main(["train", "--run", str(runs / name), "--train.steps", "4", *mesh.split()]) == 0
    records = read_metrics(runs / name / "metrics.jsonl")[2:]
    assert [record["step"] for record in records] == [3, 4]
    expected = json.loads((runs / name / "losses-3-4.json").read_text())
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-3 if mesh else 2e-6)  # bf16
    if name == "float16":
        assert [record["loss_scale"] for record in records] == [2.0**14, 2.0**15]


def test_finetuned_model_of_before_opens(runs):
    config = read_config(runs / "fine-tuned" / "config.json")
    assert (config.model.head, config.model.num_labels, config.model.sequences) == ("classification", 3, 1)
    layout = build_layout(config, make_mesh(MeshConfig()))
    _, weights = restore_weights(runs / "fine-tuned", layout.abstract_model, None, print)
    assert np.isfinite(named(weights)["head.kernel"]).all()
