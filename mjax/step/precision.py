"""Compute dtypes, and Megatron's dynamic loss scale.

Parameters and optimizer moments are float32. A step casts the parameters to the compute dtype once. Gradients are
accumulated in float32: over the tokens in a micro-batch (`parallel/reductions.py`), over micro-batches and over
replicas. The dtype fp16 cannot represent small gradients, so the loss is multiplied by a scale and the gradients
divided by it. A step is skipped if its gradients overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from mjax.config import PrecisionConfig
from mjax.errors import UsageError

HYSTERESIS = 2  # overflows until the dynamic loss scale halves; it is refilled only when the scale doubles
MIN_LOSS_SCALE = 1.0

COMPUTE_TYPES = {
    "fp8": jnp.bfloat16,  # of everything but the matmuls of linear layers (`parallel/float8.py`)
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp32": jnp.float32,
    "fp64": jnp.float64,
}


def parameter_type(compute: str):
    """Dtype of the master weights: float32, or float64 for tests in fp64.

    Raises:
      UsageError: fp64 while JAX would use float32.
    """
    if compute == "fp64" and not jax.config.jax_enable_x64:
        fix = "set JAX_ENABLE_X64=1 before the command"
        raise UsageError(f"--precision.compute fp64: JAX would compute in float32; {fix}")
    return jnp.float64 if compute == "fp64" else jnp.float32


def uses_float8(config: PrecisionConfig) -> bool:
    """True if linear layers inside transformer layers multiply in float8, in training."""
    return config.compute == "fp8"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The loss scale and its history; the same on every device.

    Attributes:
      scale: float32 []; 1 outside fp16.
      clean_steps: int32 [], steps since the last overflow or change of the scale.
      hysteresis: int32 [], overflows still tolerated before the scale halves.
    """

    scale: Array
    clean_steps: Array
    hysteresis: Array

    @classmethod
    def initial(cls, config: PrecisionConfig) -> LossScale:
        """The initial loss scale; 1 outside fp16."""
        value = config.initial_loss_scale if config.compute == "fp16" else 1.0
        return cls(jnp.float32(value), jnp.int32(0), jnp.int32(HYSTERESIS))

    def update(self, finite: Array, config: PrecisionConfig) -> LossScale:
        """The scale after a step whose gradients were all `finite` (bool []).

        Megatron's rule (core/optimizer/grad_scaler.py, DynamicGradScaler): an overflow uses up hysteresis, and once
        that is gone every overflow halves the scale; a window of clean steps in a row doubles it and refills the
        hysteresis.
        """
        if config.compute != "fp16":
            return self
        hysteresis = jnp.where(finite, self.hysteresis, self.hysteresis - 1)
        shrunk = jnp.where(hysteresis <= 0, jnp.maximum(self.scale * 0.5, MIN_LOSS_SCALE), self.scale)
        clean_steps = jnp.where(finite, self.clean_steps + 1, 0)
        grow = clean_steps == config.loss_scale_window
        return LossScale(
            scale=jnp.where(finite, jnp.where(grow, self.scale * 2.0, self.scale), shrunk).astype(jnp.float32),
            clean_steps=jnp.where(grow, 0, clean_steps).astype(jnp.int32),
            hysteresis=jnp.where(grow, HYSTERESIS, hysteresis).astype(jnp.int32),
        )
