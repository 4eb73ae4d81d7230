"""Learning-rate schedules and the loss scale against megatron-core's own classes."""

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import PrecisionConfig
from mjax.training.optimizer import learning_rate
from mjax.training.precision import LossScale
from tests.small import small_config

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
torch = pytest.importorskip("torch", reason="torch is not installed: make test-parity")
schedulers = pytest.importorskip(
    "megatron.core.optimizer_param_scheduler", reason="megatron-core is not installed: make test-parity"
)
pytestmark = pytest.mark.parity

BATCH = 8
STYLES = {
    "cosine": {"lr_decay_style": "cosine"},
    "linear": {"lr_decay_style": "linear"},
    "constant": {"lr_decay_style": "constant"},
    "inverse_square_root": {"lr_decay_style": "inverse-square-root"},
    **{
        f"wsd {shape}": {"lr_decay_style": "WSD", "lr_wsd_decay_style": shape}
        for shape in ("exponential", "linear", "cosine", "minus_sqrt")
    },
}


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("style", STYLES)
def test_every_schedule_equals_megatrons(style, warmup):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.param_groups[0].update(max_lr=3e-4, min_lr=1e-5)
    scheduler = schedulers.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=3e-4,
        min_lr=1e-5,
        lr_warmup_steps=warmup * BATCH,
        lr_decay_steps=40 * BATCH,
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=40 * BATCH,
        wd_incr_style="constant",
        wsd_decay_steps=12 * BATCH,
        **STYLES[style],
    )
    schedule, _, shape = style.partition(" ")
    config = small_config()
    config = replace(
        config,
        train=replace(config.train, steps=40, global_batch=BATCH),
        optimizer=replace(
            config.optimizer,
            learning_rate=3e-4,
            min_learning_rate=1e-5,
            schedule=schedule,
            warmup_steps=warmup,
            wsd_decay_steps=12,
            wsd_decay=shape or "exponential",
        ),
    )
    ours, theirs = [], []
    for step in range(50):
        theirs.append(optimizer.param_groups[0]["lr"])
        ours.append(float(learning_rate(config, jnp.int32(step * BATCH))))
        scheduler.step(increment=BATCH)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-10)


def test_the_loss_scale_moves_as_megatrons(monkeypatch):
    from megatron.core.optimizer import grad_scaler

    tensor = torch.tensor
    monkeypatch.setattr(grad_scaler.torch, "tensor", lambda *args, device=None, **kwargs: tensor(*args, **kwargs))
    theirs = grad_scaler.DynamicGradScaler(
        initial_scale=2.0**16, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=5, hysteresis=2
    )
    config = PrecisionConfig(compute="fp16", initial_loss_scale=2.0**16, loss_scale_window=5)
    ours = LossScale.initial(config)
    random = np.random.default_rng(0)
    for finite in random.random(400) > 0.2:
        theirs.update(not finite)
        ours = ours.update(jnp.bool_(finite), config)
        assert float(ours.scale) == theirs.scale.item()
