"""The MLP of a layer: two linear layers with an activation between, the feed-forward dim split over `model`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from mjax.model_config import TransformerConfig
from mjax.models.context import Context
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, recomputed


class MLP(nnx.Module):
    """y = gelu(x A + a) B + b. Shapes: x [t, h] → [t, h]."""

    def __init__(self, key: Array, config: TransformerConfig, dtype):
        up, down = jax.random.split(key)
        self.tanh = config.activation == "gelu_tanh"
        self.up = ColumnParallelLinear(up, config.hidden, (config.mlp_width,), 0, config.init_std, dtype)
        self.down = RowParallelLinear(down, (config.mlp_width,), config.hidden, config.residual_std, dtype)

    def __call__(self, x: Array, context: Context) -> Array:
        # Recomputed in the backward pass: autodiff would keep several tensors of width f for it.
        activation = recomputed(partial(gelu, tanh=self.tanh))
        return self.down(activation(checkpoint_name(self.up(x, context.tokens), "mlp_up")), context.tokens)


def gelu(x: Array, tanh: bool) -> Array:
    """GELU in float32 or wider: the tanh form or the exact one. Shapes: any."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.gelu(wide, approximate=tanh).astype(x.dtype)
