"""Weights that fine-tuning starts from."""

from dataclasses import replace

import numpy as np
import pytest

from mjax.config import MeshConfig, read_config
from mjax.config.model import convert_kind
from mjax.finetuning.tuning import FinetuningStart
from mjax.generation.inference import restore_weights
from mjax.parallel.mesh import make_mesh
from mjax.step.layout import build_layout
from mjax.step.step import build_program
from tests.finetuning.pretrained import write_run
from tests.small import named

ONE = MeshConfig()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("start") / "run")


def beginning(run, mesh=ONE, **changes) -> FinetuningStart:
    saved = read_config(run / "config.json")
    model = replace(convert_kind(saved.model, "bert_task"), attention="xla", **{"num_labels": 3} | changes)
    config = replace(saved, model=model, mesh=mesh)
    return FinetuningStart(run, saved, config, make_mesh(mesh), build_program(config, make_mesh(mesh)))


def test_trunk_is_kept_and_head_drawn(run):
    start = beginning(run, sequence=20, max_position_embeddings=48)
    assert start.new == ["head.bias", "head.kernel"]
    (step, first), (_, second) = (start.state(seed, None, print) for seed in (7, 8))
    saved = read_config(run / "config.json")
    before = named(restore_weights(run, build_layout(saved, make_mesh(ONE)).abstract_model, 10, print)[1])
    found, other = named(first.model), named(second.model)
    assert step == 10
    assert found.keys() - before.keys() == {"head.bias", "head.kernel"}
    assert {name.split(".")[0] for name in before.keys() - found.keys()} == {"mlm", "order"}
    for name in found.keys() & before.keys():
        np.testing.assert_array_equal(found[name], before[name])
    assert found["positions"].shape == (48, 32)
    assert np.abs(found["head.kernel"] - other["head.kernel"]).max() > 0.01
    assert found["head.kernel"].std() == pytest.approx(saved.model.init_std, rel=0.3)
    assert (found["head.bias"] == 0).all()
    assert [int(state.samples) for state in (first, second)] == [0, 0]
    assert int(second.step) - int(first.step) == start.config.train.steps  # other dropout masks


@pytest.mark.ci
def test_start_is_same_on_every_mesh(run):
    _, one = beginning(run).state(7, None, print)
    _, many = beginning(run, MeshConfig(data=2, model=2, sequence_parallel=True, zero=3)).state(7, None, print)
    for name, weight in named(one).items():
        np.testing.assert_array_equal(named(many)[name], weight, err_msg=name)


def test_head_of_another_task_is_not_kept(run):
    """A span has no pooler."""
    saved = read_config(run / "config.json")
    of_span = replace(saved, model=replace(convert_kind(saved.model, "bert_task"), attention="xla", head="span"))
    program = build_program(of_span, make_mesh(ONE))
    for before in (saved, of_span):
        assert FinetuningStart(run, before, of_span, make_mesh(ONE), program).new == ["head.bias", "head.kernel"]
    assert "pooler.kernel" not in named(program.abstract_state.model)
