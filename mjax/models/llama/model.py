"""Llama and its relatives: RMSNorm, rotary positions, grouped-query attention and a gated MLP (arXiv 2302.13971,
2407.21783).

    Llama, Mistral, Qwen                      OLMo 2 (arXiv 2501.00656)

    x ─┬─ norm ─ attention ─ + ─ …            x ─┬─ attention ─ norm ─ + ─ …
       └─────────────────────┘                   └─────────────────────┘

Mistral is a Llama with a sliding window. Qwen 2 has a bias on queries, keys and values, Qwen 3 a norm on each head of
queries and keys instead, and OLMo 2 one on all heads together.
"""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mjax.config.axes import MODEL
from mjax.models.block import Block, OutputNormBlock
from mjax.models.causal import CausalModel, Output
from mjax.models.llama.config import DecoderConfig, LlamaConfig
from mjax.models.parts.attention import Attention
from mjax.models.parts.config import RotaryConfig
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm, scale_rows
from mjax.models.parts.rotary import Rotary
from mjax.models.protocol import ForwardContext
from mjax.models.stack import stack
from mjax.parallel import mappings, random
from mjax.parallel.autodiff import rematerialize
from mjax.parallel.layers import VocabParallelEmbedding, local_columns
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.weights import make_param


def llama_layer(key: Array, config: LlamaConfig, dtype, mlp: type[nnx.Module] = GatedMLP) -> Block:
    """One layer, with an MLP of this kind."""
    attention, other = jax.random.split(key)
    norm = partial(RMSNorm, epsilon=config.norm_epsilon, dtype=dtype)
    block = Block if config.norms == "pre" else OutputNormBlock
    return block(
        attention_norm=norm(config.hidden),
        attention=Attention(
            attention,
            config,
            dtype,
            make_rotary(config),
            config.groups,
            bias=config.qkv_bias,
            out_bias=False,
            qk_norm=lambda heads: _qk_norm(heads, config, dtype),
        ),
        mlp_norm=norm(config.hidden),
        mlp=mlp(other, config, dtype),
        dropout=config.hidden_dropout,
    )


def make_rotary(config: RotaryConfig) -> Rotary:
    """The rotary positions of a config."""
    scaling = config.rope_scaling, config.rope_factor, config.rope_original_length
    return Rotary(config.rotary_dim, config.rope_theta, *scaling)


def _qk_norm(heads: int, config: LlamaConfig, dtype) -> nnx.Module | None:
    if config.qk_norm == "head":
        return RMSNorm(config.head_size, config.norm_epsilon, dtype, of_heads=True)
    if config.qk_norm == "heads":
        return AllHeadsRMSNorm(heads, config.head_size, config.norm_epsilon, dtype)
    return None


class AllHeadsRMSNorm(nnx.Module):
    """Normalize all heads of a position together: the ranks of `model` add up one sum of squares for each position.

    The weight [n, d] is split by heads; x are this rank's heads. With fewer heads than ranks each rank has one, the
    same as its neighbors.
    """

    def __init__(self, heads: int, size: int, epsilon: float, dtype):
        self.epsilon, self.heads, self.size = epsilon, heads, size
        self.scale = make_param(None, jax.nn.initializers.ones, (heads, size), ("columns", "out"), dtype)

    def __call__(self, x: Float[Array, "b s n d"]) -> Float[Array, "b s n d"]:
        squares = rematerialize(_sum_squares)(x)
        heads = x.shape[-2] * mappings.size(MODEL)  # a head of several ranks counts several times
        mean = mappings.psum(squares, frozenset({MODEL})) / (heads * self.size)
        scale = local_columns(self.scale[...], self.heads, 0)
        return rematerialize(scale_rows)(x, jax.lax.rsqrt(mean + self.epsilon), scale)


def _sum_squares(x: Float[Array, "b s n d"]) -> Float[Array, "b s 1 1"]:
    return jnp.square(x.astype(accumulation_dtype(x.dtype))).sum((-2, -1), keepdims=True)


class Llama(CausalModel):
    """A decoder-only language model with RMSNorm, rotary positions and a gated MLP.

    Attributes:
      layers: by `LayerKind.weights`, (key, config, dtype) → a layer.
    """

    layers: ClassVar[dict[str, Callable[..., Block]]] = {"": llama_layer}

    def __init__(self, key: Array, config: DecoderConfig, dtype=jnp.float32):
        embedding, blocks, head = jax.random.split(key, 3)
        sizes = config.vocabulary, config.padded_vocabulary, config.hidden, config.init_std
        self.config = config
        self.embedding = VocabParallelEmbedding(embedding, *sizes, dtype)
        layers = {name: partial(layer, config=config, dtype=dtype) for name, layer in self.layers.items()}
        self.blocks = stack(blocks, config, layers)
        self.final_norm = RMSNorm(config.hidden, config.norm_epsilon, dtype)
        if not config.tie_embeddings:
            self.head = VocabParallelEmbedding(head, *sizes, dtype)

    def embed(self, batch: dict[str, Array], context: ForwardContext) -> Float[Array, "t h"]:
        x = self.embedding(batch["tokens"], context.tokens)
        return context.with_layer(0).dropout(x, self.config.hidden_dropout, random.EMBEDDING)

    def output(self, x: Float[Array, "t h"]) -> Output:
        return Output(self.embedding if self.config.tie_embeddings else self.head, self.final_norm(x))
