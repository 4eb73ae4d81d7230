"""How a mixture uses its experts: what a run leaves of it."""

import json
from dataclasses import replace

import numpy as np
import pytest

import mjax
from mjax.config import MixtureConfig
from mjax.training.metrics import read_metrics
from tests.tiny_config import config as tiny

MODEL = MixtureConfig(
    layers=2, hidden=16, heads=2, sequence=16, vocabulary=64, experts=4, expert_width=16, hidden_dropout=0.0,
    attention_dropout=0.0, attention="xla", grouped="xla",
)  # fmt: skip
CONFIG = replace(tiny, model=MODEL, train=replace(tiny.train, steps=6, eval_interval=3))


@pytest.mark.ci
def test_mixture_run_leaves_shares_of_its_experts(tmp_path, fewer_devices):
    records = []
    assert mjax.Trainer(CONFIG, tmp_path, callbacks=[records.append], show=False).train().exit_code == 0
    lines = read_metrics(tmp_path / "metrics.jsonl")
    left = json.loads((tmp_path / "experts.json").read_text())
    shares = np.array(left["shares"])
    assert (left["step"], shares.shape) == (6, (2, 4))
    np.testing.assert_allclose(shares, records[-1].arrays["expert_shares"], atol=1e-6)
    np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-5)
    assert shares.max() * 4 == pytest.approx(lines[-1]["expert_load"], abs=1e-5)
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert {"val_expert_load", "val_router_entropy"} <= lines[-1].keys()
