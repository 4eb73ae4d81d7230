"""The transformer layer of GPT-2 and Megatron: LayerNorm before attention and MLP (arXiv 1909.08053, figure 2).

    x ─┬─ LayerNorm ─ QKV (columns) ─ attention ─ projection (rows) ─ dropout ─ + ─┬─ …
       └───────────────────────────────────────────────────────────────────────┘
    … ─┬─ LayerNorm ─ MLP up (columns) ─ GELU ─ MLP down (rows) ─ dropout ─ + ─▶
       └────────────────────────────────────────────────────────────────────┘

Two regions are opened and closed, so a layer has two all-reduces forward and two backward.

What a layer keeps for its backward pass has names, and `recompute` says which of them stay (arXiv 2205.05198, section
5): `none` keeps what autodiff asks for, `selective` the four names below, `full` only the layer's input.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from mjax.config import ModelConfig
from mjax.models.attention import KeyValues, attend, attend_cached
from mjax.parallel import random
from mjax.parallel.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear
from mjax.parallel.random import DropoutKey, dropout

# Residuals that stay, by `train.recompute`; None leaves the choice to autodiff.
KEPT: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "selective": ("qkv", "context", "residual", "mlp_up"),
    "full": (),
}


class Attention(nnx.Module):
    """Multi-head causal attention with the heads split over `model`. Shapes: x [b, s, h] → [b, s, h]."""

    def __init__(self, key: Array, config: ModelConfig, dtype):
        self.config = config
        qkv, out = jax.random.split(key)
        heads, size = config.heads, config.head_size
        self.qkv = ColumnParallelLinear(qkv, config.hidden, (3, heads, size), 1, config.init_std, dtype)
        self.out = RowParallelLinear(out, (heads, size), config.hidden, residual_std(config), dtype)

    def __call__(self, x: Array, key: DropoutKey | None) -> Array:
        qkv = checkpoint_name(self.qkv(x), "qkv")  # [b, s, 3, n / p, d]
        q, k, v = (qkv[:, :, i] for i in range(3))
        context = attend(q, k, v, self.config.attention, self.config.attention_dropout, key)
        return self.out(checkpoint_name(context, "context"))

    def decode(self, x: Array, cached: KeyValues | None, lengths: Array) -> tuple[Array, KeyValues]:
        """As `Block.decode`, for attention alone."""
        qkv = self.qkv(x)
        q, k, v = (qkv[:, :, i] for i in range(3))
        context = attend(q, k, v, self.config.attention) if cached is None else attend_cached(q, k, v, cached, lengths)
        return self.out(context), KeyValues(k, v)


class MLP(nnx.Module):
    """Two linear layers with a GELU between, the feed-forward dim split over `model`. Shapes: x [b, s, h] → [b, s,
    h]."""

    def __init__(self, key: Array, config: ModelConfig, dtype):
        up, down = jax.random.split(key)
        self.tanh = config.activation == "gelu_tanh"
        self.up = ColumnParallelLinear(up, config.hidden, (config.mlp_width,), 0, config.init_std, dtype)
        self.down = RowParallelLinear(down, (config.mlp_width,), config.hidden, residual_std(config), dtype)

    def __call__(self, x: Array) -> Array:
        return self.down(gelu(checkpoint_name(self.up(x), "mlp_up"), self.tanh))


# Computed again in the backward pass: autodiff would keep several tensors of width f for it.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(1,))
def gelu(x: Array, tanh: bool) -> Array:
    """GELU in float32 or wider: the tanh form or the exact one. Shapes: any."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.gelu(wide, approximate=tanh).astype(x.dtype)


class Block(nnx.Module):
    """One pre-LN transformer layer. Shapes: x [b, s, h], the same on every rank of `model` → the same."""

    def __init__(self, key: Array, config: ModelConfig, dtype):
        self.config = config
        attention, mlp = jax.random.split(key)
        self.attention_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        self.attention = Attention(attention, config, dtype)
        self.mlp_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        self.mlp = MLP(mlp, config, dtype)

    def __call__(self, x: Array, key: DropoutKey | None) -> Array:
        rate, positions = self.config.hidden_dropout, jnp.arange(x.shape[1])
        at = key.fold if key is not None else lambda site: None
        y = self.attention(self.attention_norm(x), at(random.ATTENTION))
        x = checkpoint_name(x + dropout(y, rate, at(random.ATTENTION_OUTPUT), positions), "residual")
        y = self.mlp(self.mlp_norm(x))
        return x + dropout(y, rate, at(random.MLP_OUTPUT), positions)

    def decode(self, x: Array, cached: KeyValues | None, lengths: Array) -> tuple[Array, KeyValues]:
        """The layer without dropout, and the keys and values of `x`, for generation.

        Args:
          x: [b, s, h], whole prompts; with a cache [b, 1, h], the position after the cached ones.
          cached: this layer's keys and values of the `lengths` int [b] positions before `x`; None at the start.
        """
        y, new = self.attention.decode(self.attention_norm(x), cached, lengths)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), new


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of projections into the residual stream: init_std / √(2 L)."""
    return config.init_std / (2 * config.layers) ** 0.5


def stack_blocks(key: Array, config: ModelConfig, dtype) -> Block:
    """All layers as one `Block` whose weights have a leading layer dim. Layer i is the same draw at any depth L."""
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(config.layers))
    # Without transform_metadata the layer dim would silently be missing from the PartitionSpecs.
    build = nnx.vmap(lambda key: Block(key, config, dtype), transform_metadata={nnx.PARTITION_NAME: None})
    return build(keys)


def run_blocks(blocks: Block, x: Array, key: DropoutKey | None, recompute: str) -> Array:
    """Apply stacked layers one after the other: a scan, so that compile time does not grow with depth."""

    def layer(x, block_and_index):
        block, index = block_and_index
        return block(x, None if key is None else key.fold(index)), None

    kept = KEPT[recompute]
    if kept is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    layers = blocks.attention_norm.scale[...].shape[0]
    x, _ = jax.lax.scan(layer, x, (blocks, jnp.arange(1, layers + 1)))
    return x


def decode_blocks(blocks: Block, x: Array, cached: KeyValues | None, lengths: Array) -> tuple[Array, KeyValues]:
    """`Block.decode` of stacked layers: `cached` and the keys and values returned have a leading layer dim."""

    def layer(x, block_and_cached):
        block, cached = block_and_cached
        return block.decode(x, cached, lengths)

    return jax.lax.scan(layer, x, (blocks, cached))
