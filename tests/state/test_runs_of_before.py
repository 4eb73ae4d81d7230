"""Run folders written before models had configs of their own (commit f7db904) continue, on their mesh and on others.

runs_of_f7db904.tar.xz holds four runs after 4 of 6 steps, each with the losses of the two steps that followed, and
a fine-tuned BERT:

    python train.py --config gpt_345m --name gpt --train.steps 4 --model.layers 4 --model.hidden 8 --model.heads 2 \
        --model.sequence 8 --model.vocabulary 20 --model.vocabulary-multiple 32 --mesh.data 1 --data.mock …
    bert          --config bert_336m --model.layernorm post
    interleaved   --mesh.pipe 2 --mesh.chunks 2
    bloom         --config bloom_560m

runs_of_533eb1f.tar.xz holds four runs after 2 of 4 steps, without pictures and environment.json, each with the losses
of the two steps that followed:

    dense         as gpt above with --model.layers 2, --optimizer.learning-rate 0.01
    pipeline      --model.layers 4 --mesh.pipe 2 --mesh.chunks 2
    float16       --precision.compute fp16 --precision.loss-scale-window 1, whose loss scale doubles at every step
    mixture       --config moe_demo --model.experts 4 --model.expert-interval 2: groups of a dense and a sparse layer
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
from mjax.step.layout import lay_out
from tests.conftest import ROOT
from tests.small import named

pytestmark = pytest.mark.usefixtures("quick_runs")


def unpack(commit, folder):
    with tarfile.open(ROOT / "tests" / "state" / f"runs_of_{commit}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def runs(tmp_path):
    return unpack("f7db904", tmp_path)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt", ""),
        pytest.param("bert", "", marks=pytest.mark.ci),
        pytest.param("bloom", "", marks=pytest.mark.all),
        pytest.param("interleaved", "", marks=pytest.mark.all),
        pytest.param("interleaved", "--mesh.pipe 1 --mesh.chunks 1", marks=pytest.mark.ci),
        pytest.param("gpt", "--mesh.pipe 2 --mesh.model 2", marks=pytest.mark.ci),
    ],
)
def test_old_run_continues_with_losses_it_would_have_had(runs, name, mesh, fewer_devices, capsys):
    assert cli.main(["train", "--resume", str(runs / name), "--train.steps", "6", *mesh.split()]) == 0
    assert "continued after step 4" in capsys.readouterr().out
    losses = [record["loss"] for record in read_metrics(runs / name / "metrics.jsonl")]
    assert losses[4:] == pytest.approx(json.loads((runs / name / "losses-5-6.json").read_text()), rel=2e-6)


@pytest.mark.parametrize(
    "name", ["dense", *(pytest.param(name, marks=pytest.mark.ci) for name in ("pipeline", "float16", "mixture"))]
)
def test_run_of_each_kind_continues_with_its_losses(name, tmp_path, fewer_devices):
    run = unpack("533eb1f", tmp_path) / name
    assert cli.main(["train", "--resume", str(run), "--train.steps", "4"]) == 0
    records = read_metrics(run / "metrics.jsonl")[2:]
    assert [record["step"] for record in records] == [3, 4]
    expected = json.loads((run / "losses-3-4.json").read_text())
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=2e-6)
    if name == "float16":
        assert [record["loss_scale"] for record in records] == [2.0**14, 2.0**15]


def test_old_finetuned_model_opens(runs):
    config = read_config(runs / "fine-tuned" / "config.json")
    assert (config.model.head, config.model.answers, config.model.sequences) == ("classification", 3, 1)
    layout = lay_out(config, make_mesh(MeshConfig()))
    _, weights = restore_weights(runs / "fine-tuned", layout.abstract_model, None, print)
    assert np.isfinite(named(weights)["head.kernel"]).all()
