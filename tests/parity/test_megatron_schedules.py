"""Learning-rate schedules, batch sizes and the loss scale against megatron-core's own classes."""

import os
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from mjax.config import PrecisionConfig
from mjax.config.batch_size import BatchSizes
from mjax.step.learning_rate import learning_rate
from mjax.step.precision import LossScale
from tests.small import small_config

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
torch = pytest.importorskip("torch", reason="torch is not installed: make test-ci")
schedulers = pytest.importorskip(
    "megatron.core.optimizer_param_scheduler", reason="megatron-core is not installed: make test-ci"
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
        for shape in ("exponential", "linear", "minus_sqrt")
    },
}


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("style", STYLES)
def test_schedule_equals_megatron(style, warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0].update(max_lr=3e-4, min_lr=1e-5)
    constant = {"start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 40 * BATCH, "wd_incr_style": "constant"}
    scheduler = schedulers.OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=3e-4,
        min_lr=1e-5,
        lr_warmup_steps=warmup * BATCH,
        lr_decay_steps=40 * BATCH,
        wsd_decay_steps=12 * BATCH,
        **constant,
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
        ours.append(float(learning_rate(config, jnp.int32(step * BATCH), jnp)))
        scheduler.step(increment=BATCH)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-10)


def test_rampup_sizes_equal_megatron():
    from megatron.core import num_microbatches_calculator

    calculator = getattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if calculator is None:
        pytest.skip("megatron-core has no ramp since 0.19: Python 3.11 compares with 0.16")
    random = np.random.default_rng(0)
    drawn = [(int(a), int(b), int(c), int(d)) for a, b, c, d in random.integers(1, [40, 16, 60, 20_000], (40, 4))]
    uneven = [(8, 1, 7, 29), (1, 4, 7, 58), (2, 1, 7, 144)]  # the float quotient falls short of a whole number
    for start, increment, increments, samples in [*drawn, *uneven]:
        end, rampup = start + increments * increment, (start, increment, samples)
        theirs = calculator(end, 1, 1, False, 1, *rampup)
        config = small_config()
        train = replace(config.train, steps=40, global_batch=end, batch_rampup=rampup)
        ours = BatchSizes.from_config(replace(config, train=train))
        consumed, step = 0, 0
        while consumed < samples + 5 * end:
            theirs.update(consumed, consistency_check=True)
            size = theirs.get_current_running_global_batch_size()
            assert (ours.size(step), ours.samples_before(step)) == (size, consumed), (rampup, end, step)
            consumed, step = consumed + size, step + 1
        assert ours.size(step) == end


def test_loss_scale_equals_megatron(monkeypatch):
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
