"""A model that is not part of mjax: RMSNorm, a gated MLP, rotary positions, fewer key-value heads, an untied head.

python train.py --config tests/toy_model.py --data.mock --name toy
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config import Config, PrecisionConfig, TrainConfig
from mjax.config.bounds import Count, NotNegative
from mjax.config.model import ModelConfig, register
from mjax.models.block import Block
from mjax.models.causal import CausalModel, Output
from mjax.models.parts.attention import Attention
from mjax.models.parts.positions import Positions
from mjax.models.stack import stack
from mjax.parallel.autodiff import rematerialize
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


@register
@dataclass(frozen=True)
class ToyConfig(ModelConfig):
    kind: Literal["toy"] = "toy"
    feed_forward: Count = 96
    """Width of the MLP."""
    kv_heads: Count = 4
    """Heads of keys and values."""
    epsilon: NotNegative = 1e-6
    """Added to the mean square in RMSNorm."""

    title: ClassVar[str] = "a toy"
    module: ClassVar[str] = f"{__name__}:Toy"

    def columns(self):
        return {**super().columns(), "key-value heads": self.kv_heads, "feed-forward width": self.feed_forward}


class RMSNorm(nnx.Module):
    mixes_positions = False

    def __init__(self, width, epsilon, dtype):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(width, dtype), out_sharding=(None,), eager_sharding=False)

    def __call__(self, x):
        return rematerialize(partial(rms_norm, epsilon=self.epsilon))(x, self.scale[...])


def rms_norm(x, scale, epsilon):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (normed * scale).astype(x.dtype)


class GatedMLP(nnx.Module):
    mixes_positions = False

    def __init__(self, key, config, dtype):
        up, down = jax.random.split(key)
        width, std = config.feed_forward, config.init_std
        self.up = ColumnParallelLinear(up, config.hidden, (2, width), 1, std, dtype, bias=False)
        self.down = RowParallelLinear(down, (width,), config.hidden, config.residual_std, dtype, bias=False)

    def __call__(self, x, context):
        both = checkpoint_name(self.up(x, context.tokens), "mlp_up")  # [b s, 2, f / p]
        return self.down(rematerialize(lambda both: jax.nn.silu(both[:, 0]) * both[:, 1])(both), context.tokens)


@dataclass(frozen=True)
class Rotary(Positions):
    mixes_positions = False

    def apply_to_qk(self, q, k, context):
        half = q.shape[-1] // 2
        angle = context.position_ids()[..., None, None] * (1e4 ** (-jnp.arange(half) / half))  # [b, s, 1, d / 2]
        return tuple(turned(x, jnp.cos(angle), jnp.sin(angle)) for x in (q, k))


def turned(x, cos, sin):
    a, b = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def toy_layer(key, config, dtype):
    attention, mlp = jax.random.split(key)
    return Block(
        attention_norm=RMSNorm(config.hidden, config.epsilon, dtype),
        attention=Attention(attention, config, dtype, Rotary(), config.kv_heads, bias=False),
        mlp_norm=RMSNorm(config.hidden, config.epsilon, dtype),
        mlp=GatedMLP(mlp, config, dtype),
    )


class Toy(CausalModel):
    mixes_positions = False

    def __init__(self, key, config, dtype):
        embedding, blocks, head = jax.random.split(key, 3)
        table = partial(VocabParallelEmbedding, vocabulary=config.vocabulary, rows=config.padded_vocabulary)
        table = partial(table, width=config.hidden, std=config.init_std, dtype=dtype)
        self.config = config
        self.embedding = table(embedding)
        self.blocks = stack(blocks, config, partial(toy_layer, config=config, dtype=dtype))
        self.final_norm = RMSNorm(config.hidden, config.epsilon, dtype)
        self.head = table(head)

    def embed(self, batch, context):
        return self.embedding(batch["tokens"], context.tokens)

    def output(self, x):
        return Output(self.head, self.final_norm(x))


config = Config(
    model=ToyConfig(layers=2, hidden=64, heads=8, sequence=32, vocabulary=257, vocabulary_multiple=64),
    precision=PrecisionConfig(compute="fp32"),
    train=TrainConfig(steps=20, global_batch=8, micro_batch=4),
)
