"""A hybrid: of three layers two have a gated linear recurrence (a minimal Mamba-2), and the last attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from mjax.config import Config, PrecisionConfig, TrainConfig
from mjax.config.axes import MODEL
from mjax.config.model import register
from mjax.config.pattern import LayerKind, Pattern
from mjax.models.block import Block
from mjax.models.causal import CausalModel, Output
from mjax.models.parts.attention import Attention
from mjax.models.parts.config import GatedMLPConfig
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm
from mjax.models.stack import stack
from mjax.parallel import mappings
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding


@register
@dataclass(frozen=True)
class HybridConfig(GatedMLPConfig):
    kind: Literal["recurrent_hybrid"] = "recurrent_hybrid"

    title: ClassVar[str] = "a hybrid"
    module: ClassVar[str] = f"{__name__}:Hybrid"
    pattern = Pattern((LayerKind(weights="recurrence"),) * 2 + (LayerKind(weights="attention"),))


class Recurrence(nnx.Module):
    def __init__(self, key, config, dtype):
        into, out = jax.random.split(key)
        heads = self.heads = config.heads, config.head_size
        self.into = ColumnParallelLinear(into, config.hidden, (3, *heads), 1, config.init_std, dtype, bias=False)
        self.out = RowParallelLinear(out, heads, config.hidden, config.residual_std, dtype, bias=False)

    def recur(self, x, context, state):
        """The states [b, s, n, d] after each position, from the state before them, and the result [t, h]."""
        y = context.tokens.split_sequences(self.into(x, context.tokens))
        new, decay, gate = (y[:, :, part] for part in range(3))
        decay = jax.nn.sigmoid(decay + 2)
        product = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])  # noqa: E731
        decayed, states = jax.lax.associative_scan(product, (decay, (1 - decay) * new), axis=1)
        states = states + decayed * state[:, None]
        y = (states * jax.nn.silu(gate)).reshape(context.tokens.num_tokens, *gate.shape[2:])
        return states, self.out(y, context.tokens)

    def __call__(self, x, context):
        return self.recur(x, context, self.empty_cache(context.tokens.sequences, 0, x.dtype))[1]

    def empty_cache(self, sequences, slots, dtype):
        heads, size = self.heads
        return jnp.zeros((sequences, heads // mappings.size(MODEL), size), dtype)

    def decode(self, x, context, cached, lengths):
        states, y = self.recur(x, context, cached)
        last = lengths - 1 if context.slots is None else jnp.zeros_like(lengths)  # prompts are padded
        return y, states[jnp.arange(len(lengths)), last]


def layer(key, config, dtype, mixer):
    attention, mlp = jax.random.split(key)
    norm = partial(RMSNorm, config.hidden, 1e-6, dtype)
    return Block(norm(), mixer(attention, config, dtype), norm(), GatedMLP(mlp, config, dtype))


class Hybrid(CausalModel):
    def __init__(self, key, config, dtype=jnp.float32):
        embedding, blocks = jax.random.split(key)
        sizes = config.vocabulary, config.padded_vocabulary, config.hidden
        make = partial(layer, config=config, dtype=dtype)
        mixers = {"recurrence": Recurrence, "attention": partial(Attention, bias=False)}
        self.config = config
        self.embedding = VocabParallelEmbedding(embedding, *sizes, config.init_std, dtype)
        self.blocks = stack(blocks, config, {name: partial(make, mixer=mixer) for name, mixer in mixers.items()})
        self.final_norm = RMSNorm(config.hidden, 1e-6, dtype)

    def embed(self, batch, context):
        return self.embedding(batch["tokens"], context.tokens)

    def output(self, x):
        return Output(self.embedding, self.final_norm(x))


config = Config(
    model=HybridConfig(
        layers=6, hidden=32, heads=4, sequence=16, vocabulary=60, vocabulary_multiple=64, feed_forward=48,
        attention="xla",
    ),
    precision=PrecisionConfig(compute="fp64"),
    train=TrainConfig(steps=20, global_batch=8, micro_batch=2),
)  # fmt: skip
