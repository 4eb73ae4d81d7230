"""The transformer layer of GPT-2 and Megatron: LayerNorm before attention and MLP (arXiv 1909.08053, figures 2, 7b).

    x ─┬─ LayerNorm ─ QKV (columns) ─ attention ─ projection (rows) ─ dropout ─ + ─┬─ …
       └───────────────────────────────────────────────────────────────────────┘
    … ─┬─ LayerNorm ─ MLP up (columns) ─ GELU ─ MLP down (rows) ─ dropout ─ + ─▶
       └────────────────────────────────────────────────────────────────────┘

With `layernorm` `post` each LayerNorm stands behind its sum instead, as in the original BERT (figure 7a):

    x ─┬─ QKV ─ attention ─ projection ─ dropout ─ + ─ LayerNorm ─┬─ MLP … ─ dropout ─ + ─ LayerNorm ─▶
       └───────────────────────────────────────────┘              └────────────────────┘

Two regions are opened and closed, so a layer has two all-reduces forward and two backward. Between them the stream is
[t, h], a row a token: all tokens of the micro-batch, or with sequence parallelism this rank's.

What a layer keeps for its backward pass has names, and `recompute` says which of them stay (arXiv 2205.05198, section
5): `none` keeps what autodiff asks for, `selective` the four names below, `full` only the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from mjax.config import ModelConfig
from mjax.models.alibi import local_slopes
from mjax.models.attention import KeyValues, attend, attend_cached
from mjax.parallel import random
from mjax.parallel.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, recomputed
from mjax.parallel.random import DropoutKey, dropout_tokens
from mjax.parallel.tokens import Tokens
from mjax.parallel.zero import all_but_gathered_weights

# Residuals that stay, by `train.recompute`; None leaves the choice to autodiff.
KEPT: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "selective": ("qkv", "context", "residual", "mlp_up"),
    "full": (),
}


class Attention(nnx.Module):
    """Multi-head attention with the heads split over `model`, causal but in BERT. Shapes: x [t, h] → [t, h]."""

    def __init__(self, key: Array, config: ModelConfig, dtype):
        self.config = config
        qkv, out = jax.random.split(key)
        heads, size = config.heads, config.head_size
        self.qkv = ColumnParallelLinear(qkv, config.hidden, (3, heads, size), 1, config.init_std, dtype)
        self.out = RowParallelLinear(out, (heads, size), config.hidden, residual_std(config), dtype)

    def __call__(self, x: Array, tokens: Tokens, key: DropoutKey | None, documents: Array | None = None) -> Array:
        q, k, v = self._project(x, tokens)
        config, slopes = self.config, self._slopes()
        context = attend(q, k, v, config.attention, config.attention_dropout, key, documents, config.causal, slopes)
        context = context.reshape(tokens.count, *context.shape[2:])
        return self.out(checkpoint_name(context, "context"), tokens)

    def decode(self, x: Array, tokens: Tokens, cached: KeyValues | None, lengths: Array) -> tuple[Array, KeyValues]:
        """As `Block.decode`, for attention alone."""
        (q, k, v), slopes = self._project(x, tokens), self._slopes()
        if cached is None:
            context = attend(q, k, v, self.config.attention, slopes=slopes)
        else:
            context = attend_cached(q, k, v, cached, lengths, slopes)
        return self.out(context.reshape(tokens.count, *context.shape[2:]), tokens), KeyValues(k, v)

    def _project(self, x: Array, tokens: Tokens) -> tuple[Array, Array, Array]:
        """Queries, keys and values [b, s, n / p, d] of this rank's heads."""
        qkv = tokens.by_sequence(checkpoint_name(self.qkv(x, tokens), "qkv"))  # [b, s, 3, n / p, d]
        return tuple(qkv[:, :, i] for i in range(3))

    def _slopes(self) -> Array | None:
        return local_slopes(self.config.heads) if self.config.positions == "alibi" else None


class MLP(nnx.Module):
    """Two linear layers with a GELU between, the feed-forward dim split over `model`. Shapes: x [t, h] → [t, h]."""

    def __init__(self, key: Array, config: ModelConfig, dtype):
        up, down = jax.random.split(key)
        self.tanh = config.activation == "gelu_tanh"
        self.up = ColumnParallelLinear(up, config.hidden, (config.mlp_width,), 0, config.init_std, dtype)
        self.down = RowParallelLinear(down, (config.mlp_width,), config.hidden, residual_std(config), dtype)

    def __call__(self, x: Array, tokens: Tokens) -> Array:
        # Computed again in the backward pass: autodiff would keep several tensors of width f for it.
        activation = recomputed(partial(gelu, tanh=self.tanh))
        return self.down(activation(checkpoint_name(self.up(x, tokens), "mlp_up")), tokens)


def gelu(x: Array, tanh: bool) -> Array:
    """GELU in float32 or wider: the tanh form or the exact one. Shapes: any."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.nn.gelu(wide, approximate=tanh).astype(x.dtype)


class Block(nnx.Module):
    """One transformer layer. Shapes: x [t, h], this rank's rows of the stream → the same."""

    def __init__(self, key: Array, config: ModelConfig, dtype):
        self.config = config
        attention, mlp = jax.random.split(key)
        self.attention_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        self.attention = Attention(attention, config, dtype)
        self.mlp_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        self.mlp = MLP(mlp, config, dtype)

    def __call__(self, x: Array, tokens: Tokens, key: DropoutKey | None, documents: Array | None = None) -> Array:
        rate, pre = self.config.hidden_dropout, self.config.layernorm == "pre"
        at = key.fold if key is not None else lambda site: None
        y = self.attention(self.attention_norm(x) if pre else x, tokens, at(random.ATTENTION), documents)
        x = checkpoint_name(x + dropout_tokens(y, rate, at(random.ATTENTION_OUTPUT), tokens), "residual")
        x = x if pre else self.attention_norm(x)
        y = self.mlp(self.mlp_norm(x) if pre else x, tokens)
        x = x + dropout_tokens(y, rate, at(random.MLP_OUTPUT), tokens)
        # What a LayerNorm reads is kept for its backward pass; in the pre-LN layer that is the next layer's input.
        return x if pre else self.mlp_norm(checkpoint_name(x, "residual"))

    def decode(self, x: Array, tokens: Tokens, cached: KeyValues | None, lengths: Array) -> tuple[Array, KeyValues]:
        """The pre-LN layer without dropout, and the keys and values of `x`, for generation.

        Args:
          x: [t, h], whole prompts; with a cache one position a sequence, the one after the cached ones.
          tokens: which tokens they are.
          cached: this layer's keys and values of the `lengths` int [b] positions before `x`; None at the start.
        """
        y, new = self.attention.decode(self.attention_norm(x), tokens, cached, lengths)
        x = x + y
        return x + self.mlp(self.mlp_norm(x), tokens), new


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of projections into the residual stream: init_std / √(2 L)."""
    return config.init_std / (2 * config.layers) ** 0.5


def stack_blocks(key: Array, config: ModelConfig, dtype) -> Block:
    """All layers as one `Block` whose weights have a leading layer dim. Layer i is the same draw at any depth L."""
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(config.layers))
    # Without transform_metadata the layer dim would silently be missing from the PartitionSpecs.
    build = nnx.vmap(lambda key: Block(key, config, dtype), transform_metadata={nnx.PARTITION_NAME: None})
    return build(keys)


def run_blocks(
    blocks: Block,
    x: Array,
    tokens: Tokens,
    key: DropoutKey | None,
    recompute: str,
    first_layer: Array | int = 1,
    weights_of: Callable[[Block], Block] | None = None,
    documents: Array | None = None,
) -> Array:
    """Apply stacked layers one after the other: a scan, so that compile time does not grow with depth.

    Args:
      blocks: weights with a leading layer dim.
      x: [t, h].
      tokens: which tokens the rows of `x` are.
      key: dropout masks of this forward pass; None for evaluation.
      recompute: `none`, `selective` or `full`.
      first_layer: number of the first of these layers in the model, from 1; it chooses the dropout masks.
      weights_of: turns what is stored of one layer into its weights, where they are gathered layer by layer (FSDP).
        They are gathered anew in the backward pass, never kept.
      documents: int [b, s], number of each token's document, where attention must stay within it.
    """

    def layer(x, block_and_index):
        block, index = block_and_index
        if weights_of is not None:
            block = weights_of(block)
        return block(x, tokens, None if key is None else key.fold(index), documents), None

    kept = KEPT[recompute]
    if kept is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        layer = jax.checkpoint(layer, prevent_cse=False, policy=policy)
    elif weights_of is not None:
        layer = jax.checkpoint(layer, prevent_cse=False, policy=all_but_gathered_weights)
    layers = blocks.attention_norm.scale[...].shape[0]
    x, _ = jax.lax.scan(layer, x, (blocks, first_layer + jnp.arange(layers)))
    return x


def decode_blocks(
    blocks: Block,
    x: Array,
    tokens: Tokens,
    cached: KeyValues | None,
    lengths: Array,
    weights_of: Callable[[Block], Block] | None = None,
) -> tuple[Array, KeyValues]:
    """`Block.decode` of stacked layers: `cached` and the keys and values returned have a leading layer dim.

    `weights_of` is that of `run_blocks`.
    """

    def layer(x, block_and_cached):
        block, cached = block_and_cached
        block = block if weights_of is None else weights_of(block)
        return block.decode(x, tokens, cached, lengths)

    return jax.lax.scan(layer, x, (blocks, cached))
