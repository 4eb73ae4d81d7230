"""Gemma 3 (arXiv 2503.19786).

    x ─┬─ norm ─ attention ─ norm ─ + ─┬─ norm ─ MLP ─ norm ─ + ─▶
       └────────────────────────────┘  └──────────────────────┘

Five layers have a window and a small rotary base, the sixth has full attention and a large base. Their weights have the
same shapes, so a group of six is one stack. 4B has 34 layers: the four after the last group are a second stack, of
layers with windows.

The norm is y = cast(x / √(mean(x²) + ε) · (1 + w)), rounded once, where a Llama's rounds before · w. The
embedding is multiplied by √h in the compute type (√640 = 25.298 is 25.25 in bf16). Both are as in `transformers`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from mjax.models.block import Block
from mjax.models.gemma3.config import Gemma3Config
from mjax.models.llama.model import Llama, make_rotary
from mjax.models.parts.attention import Attention
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm
from mjax.models.parts.positions import Positions
from mjax.models.parts.rotary import Rotary
from mjax.models.protocol import ForwardContext
from mjax.parallel.autodiff import rematerialize
from mjax.parallel.reductions import accumulation_dtype


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm of the last dim with the weight 1 + w. Shapes: x […, width] → the same."""

    initial_scale = staticmethod(jax.nn.initializers.zeros)

    def __call__(self, x: Array) -> Array:
        return rematerialize(partial(_zero_centered_rms_norm, epsilon=self.epsilon))(x, self.scale[...])


def _zero_centered_rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    wide = x.astype(accumulation_dtype(x.dtype))
    normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon)
    return (normed * (1 + scale.astype(wide.dtype))).astype(x.dtype)


@dataclass(frozen=True)
class LocalGlobalRotary(Positions):
    """Rotary positions of layers with a window and of layers with full attention."""

    config: Gemma3Config

    def apply_to_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        config = self.config
        local = Rotary(config.rotary_dim, config.local_rope_theta)
        rotary = local if context.kind.window else make_rotary(config)
        return rotary.apply_to_qk(q, k, context)


def _layer(key: Array, config: Gemma3Config, dtype) -> Block:
    attention, mlp = jax.random.split(key)
    norm = partial(ZeroCenteredRMSNorm, epsilon=config.norm_epsilon, dtype=dtype)
    return Block(
        attention_norm=norm(config.hidden),
        attention=Attention(
            attention,
            config,
            dtype,
            LocalGlobalRotary(config),
            config.groups,
            bias=False,
            scale=1 / math.sqrt(config.query_pre_attn_scalar),
            qk_norm=lambda heads: norm(config.head_size, of_heads=True),
        ),
        attention_out_norm=norm(config.hidden),
        mlp_norm=norm(config.hidden),
        mlp=GatedMLP(mlp, config, dtype),
        mlp_out_norm=norm(config.hidden),
        dropout=config.hidden_dropout,
    )


class Gemma3(Llama):
    """A decoder-only language model with layers of two kinds."""

    layers: ClassVar = {"": _layer}

    def __init__(self, key: Array, config: Gemma3Config, dtype=jnp.float32):
        super().__init__(key, config, dtype)
        self.final_norm = ZeroCenteredRMSNorm(config.hidden, config.norm_epsilon, dtype)

    def embed(self, batch: dict[str, Array], context: ForwardContext) -> Array:
        x = super().embed(batch, context)
        return x * jnp.asarray(math.sqrt(self.config.hidden), x.dtype)
