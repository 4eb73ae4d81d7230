"""The learning rate, as a function of the samples that have trained the model. No JAX is imported here: the train step
passes `jax.numpy`, a check of a resumed run NumPy.

    warm-up to the peak, then    cosine, linear            decay until the end
                                 inverse_square_root       decay for ever
                                 constant                  none
                                 wsd                       none until a final decay (arXiv 2404.06395, 2405.18392)
"""

from types import ModuleType
from typing import Any

from mjax.config import Config
from mjax.config.batch_size import BatchSizes


def learning_rate(config: Config, samples: Any, xp: ModuleType) -> Any:
    """Learning rate after `samples` samples have trained the model: float32 of the shape of `samples`.

    Megatron counts samples rather than steps (core/optimizer_param_scheduler.py), and samples of skipped steps do not
    count. Fields in steps are converted to the samples of that many steps, including a batch ramp-up. The
    first step of a warm-up from 0 uses 0.

    Args:
      xp: NumPy, or `jax.numpy` for arrays of JAX.
    """
    optimizer, batches = config.optimizer, BatchSizes.from_config(config)
    peak, floor = optimizer.learning_rate, optimizer.min_learning_rate
    # Floats: a whole number of 2³¹ samples or more would be above JAX's default integers.
    warmup, end = (float(batches.samples_before(steps)) for steps in (optimizer.warmup_steps, decay_end(config)))
    now = xp.asarray(samples).astype(xp.float32)

    progress = xp.clip((now - warmup) / max(end - warmup, 1), 0.0, 1.0)
    if optimizer.schedule == "constant":
        decayed = xp.full_like(now, peak)
    elif optimizer.schedule == "inverse_square_root":
        decayed = xp.maximum(floor, peak * max(warmup, 1) ** 0.5 / xp.sqrt(xp.maximum(now, 1)))
    elif optimizer.schedule == "wsd":
        length = end - batches.samples_before(decay_start(config))
        part = xp.clip((now - (end - length)) / length, 0.0, 1.0)
        decayed = floor + _decay(optimizer.wsd_decay, part, xp) * (peak - floor)
    else:
        decayed = floor + _decay(optimizer.schedule, progress, xp) * (peak - floor)
    if optimizer.schedule != "constant":
        decayed = xp.where(now > end, floor, decayed)
    return xp.where((warmup > 0) & (now <= warmup), peak * now / max(warmup, 1), decayed).astype(xp.float32)


def decay_end(config: Config) -> int:
    """The step at which the learning rate reaches its minimum."""
    return config.optimizer.decay_steps or config.train.steps


def wsd_decay_steps(config: Config) -> int:
    """Steps of the final decay of wsd."""
    return config.optimizer.wsd_decay_steps or max(decay_end(config) // 10, 1)


def decay_start(config: Config) -> int:
    """The step after which wsd decays."""
    return decay_end(config) - wsd_decay_steps(config)


def _decay(shape: str, part: Any, xp: ModuleType) -> Any:
    """Decay from 1 at part 0 to 0 at part 1."""
    return {
        "linear": 1.0 - part,
        "cosine": 0.5 * (xp.cos(xp.pi * part) + 1.0),
        "exponential": 2.0 * 0.5**part - 1.0,
        "minus_sqrt": 1.0 - xp.sqrt(part),
    }[shape]
