"""The MLP of a layer: two linear layers with an activation between, the feed-forward dim split over `model`; plain, or
with a gate."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from mjax.models.parts.config import GatedMLPConfig, MLPConfig
from mjax.models.protocol import ForwardContext
from mjax.parallel import random
from mjax.parallel.autodiff import rematerialize
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mjax.parallel.reductions import accumulation_dtype


class MLP(nnx.Module):
    """y = gelu(x A + a) B + b."""

    def __init__(self, key: Array, config: MLPConfig, dtype):
        up, down = jax.random.split(key)
        self.activation = config.activation
        self.up = ColumnParallelLinear(up, config.hidden, (config.mlp_width,), 0, config.init_std, dtype)
        self.down = RowParallelLinear(down, (config.mlp_width,), config.hidden, config.residual_std, dtype)

    def __call__(self, x: Float[Array, "t h"], context: ForwardContext) -> Float[Array, "t h"]:
        up = checkpoint_name(self.up(x, context.tokens, context.layer_key(random.LORA_UP)), "mlp_up")
        # Recomputed in the backward pass: autodiff would save several tensors of width f for it.
        activation = rematerialize(partial(activate, name=self.activation))
        return self.down(activation(up), context.tokens, context.layer_key(random.LORA_DOWN))


class GatedMLP(nnx.Module):
    """y = (act(x A) ⊙ x B) C: SwiGLU or GeGLU (arXiv 2002.05202).

    A and B are one weight [h, 2, f]: a rank has the same columns of both.
    """

    def __init__(self, key: Array, config: GatedMLPConfig, dtype, width: int | None = None):
        up, down = jax.random.split(key)
        width, std = config.mlp_width if width is None else width, config.init_std
        self.activation = config.activation
        self.up = ColumnParallelLinear(up, config.hidden, (2, width), 1, std, dtype, bias=False, parts=("gate", "up"))
        self.down = RowParallelLinear(down, (width,), config.hidden, config.residual_std, dtype, bias=False)

    def __call__(self, x: Float[Array, "t h"], context: ForwardContext) -> Float[Array, "t h"]:
        gate_up = self.up(x, context.tokens, context.layer_key(random.LORA_UP))
        gate_up = checkpoint_name(gate_up, "mlp_up")  # [b s, 2, f / t]
        activation = rematerialize(partial(apply_gate, activation=self.activation))
        return self.down(activation(gate_up), context.tokens, context.layer_key(random.LORA_DOWN))


def apply_gate(gate_up: Float[Array, "bs 2 f"], activation: str) -> Float[Array, "bs f"]:
    """act(x A) ⊙ x B of both halves."""
    return activate(gate_up[:, 0], activation) * gate_up[:, 1]


def activate(x: Float[Array, "*dims"], name: str) -> Float[Array, "*dims"]:
    """`gelu_tanh`, `gelu_erf` or `silu` of x, computed in float32 or wider."""
    wide = x.astype(accumulation_dtype(x.dtype))
    match name:
        case "silu":
            y = jax.nn.silu(wide)
        case "gelu_tanh":
            y = jax.nn.gelu(wide)
        case "gelu_erf":
            y = 0.5 * wide * (1 + erf(math.sqrt(0.5) * wide))
    return y.astype(x.dtype)


@jax.custom_jvp
def erf(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """The error function. Its derivative in jax 0.12 has no rule for varying axes, so it is written here."""
    return lax.erf(x)


erf.defjvps(lambda tangent, _, x: tangent * (2 / math.sqrt(math.pi)) * jnp.exp(-x * x))
