"""The picture of how a mixture uses its experts: what a run leaves, and what is drawn in it."""

import functools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

import mjax
from mjax.config import MeshConfig, MixtureConfig
from mjax.training import loop
from mjax.training.metrics import read_metrics
from mjax.training.pictures import draw_experts
from tests.tiny_config import config as tiny

MODEL = MixtureConfig(
    layers=2, hidden=16, heads=2, sequence=16, vocabulary=64, vocabulary_multiple=64, experts=4, expert_width=16,
    hidden_dropout=0.0, attention_dropout=0.0, attention="xla", grouped="xla",
)  # fmt: skip
CONFIG = replace(
    tiny,
    model=MODEL,
    mesh=MeshConfig(data=8, model=2),
    train=replace(tiny.train, steps=6, micro_batch=1, eval_interval=3),
)


def shares_of(folder):
    found = json.loads((folder / "experts.json").read_text())
    return found["step"], np.array(found["shares"])


@pytest.mark.ci
def test_a_run_leaves_the_shares_and_the_picture_of_its_last_step_and_continues_both(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build_program", functools.cache(loop.build_program))  # compiled once
    records = []
    trainer = mjax.Trainer(CONFIG, tmp_path, callbacks=[lambda record: record.step == 2], show=False)
    assert trainer.train().exit_code == 75
    stopped, _ = shares_of(tmp_path)
    (tmp_path / "experts.png").unlink()
    assert mjax.Trainer(CONFIG, tmp_path, callbacks=[records.append], show=False).train().exit_code == 0
    lines = read_metrics(tmp_path / "metrics.jsonl")
    step, shares = shares_of(tmp_path)
    assert 2 <= stopped < step == 6 == lines[-1]["step"]
    assert shares.shape == (2, 4)
    np.testing.assert_allclose(shares, records[-1].arrays["expert_shares"], atol=1e-6)
    np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-5)
    assert shares.max() * 4 == pytest.approx(lines[-1]["expert_load"], abs=1e-5)
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert not any("expert_shares" in name for line in lines for name in line)
    assert {"val_expert_load", "val_router_entropy"} <= lines[-1].keys()


def test_the_picture_has_the_numbers_of_the_records(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: (drawn.append(figure), file.touch()))
    records = [{"step": step, "expert_load": 2 - step / 10, "router_entropy": 1 + step / 10} for step in range(1, 5)]
    records[2] |= {"val_expert_load": 1.9, "val_router_entropy": 1.2}
    shares = np.array([[0.4, 0.1, 0.25, 0.25], [0.0, 0.5, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    draw_experts(records, 4, shares, tmp_path / "experts.png", "run")
    load, entropy, heat, _ = drawn[0].axes
    for panel, name in ((load, "expert_load"), (entropy, "router_entropy")):
        raw, _, validation, level = panel.lines
        assert list(raw.get_xdata()) == [1, 2, 3, 4]
        assert list(raw.get_ydata()) == [record[name] for record in records]
        assert list(validation.get_ydata()) == [records[2][f"val_{name}"]]
        assert set(level.get_ydata()) == {1 if panel is load else math.log(4)}
    (image,) = heat.images
    np.testing.assert_array_equal(image.get_array(), shares)
    assert image.norm(0.25) == 0.5  # white where it is balanced
    assert [text.get_text() for text in heat.texts[:4]] == ["40.0%", "10.0%", "25.0%", "25.0%"]
    assert heat.texts[4].get_position() == (0, 2)  # expert 0 of layer 2
    assert heat.get_title().endswith("at step 4")


@pytest.mark.parametrize(("layers", "experts", "steps"), [(1, 1, 1), (1, 2, 2), (48, 128, 90)])
def test_the_picture_is_drawn_for_any_number_of_experts_layers_and_steps(tmp_path, layers, experts, steps):
    records = [{"step": step, "expert_load": 1.5, "router_entropy": None} for step in range(1, steps + 1)]
    draw_experts(records, steps, np.full((layers, experts), 1 / experts), tmp_path / "experts.png", "$")
    assert [file.name for file in tmp_path.iterdir()] == ["experts.png"]
