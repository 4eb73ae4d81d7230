"""Files of a run about its experts."""

import json
from dataclasses import replace

import numpy as np
import pytest

import mjax
from mjax.run.metrics import read_metrics
from tests.callbacks import Records
from tests.models.test_mixture import config_of as mixture
from tests.tiny_config import config as tiny

CONFIG = replace(
    tiny, model=mixture(layers=2, experts_per_token=1).model, train=replace(tiny.train, steps=6, eval_interval=3)
)


@pytest.mark.ci
def test_mixture_run_leaves_shares_of_its_experts(tmp_path, fewer_devices):
    seen = Records()
    assert mjax.Trainer(CONFIG, tmp_path, callbacks=[seen], show=False).train().exit_code == 0
    lines = read_metrics(tmp_path / "metrics.jsonl")
    left = json.loads((tmp_path / "experts.json").read_text())
    shares = np.array(left["shares"])
    assert (left["step"], shares.shape) == (6, (2, 4))
    np.testing.assert_allclose(shares, seen.records[-1].arrays["expert_shares"], atol=1e-6)
    np.testing.assert_allclose(shares.sum(-1), 1, atol=1e-5)
    assert shares.max() * 4 == pytest.approx(lines[-1]["expert_load"], abs=1e-5)
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert {"val_expert_load", "val_router_entropy"} <= lines[-1].keys()
