"""GPT-2 as Megatron trains it: learned positions, pre-LN layers, a final LayerNorm, and the embedding as output
layer.

BLOOM (arXiv 2211.05100, section 3.2) is the same with two options: ALiBi instead of learned positions, so that only
attention depends on positions, and a LayerNorm after the embedding, which stabilises training.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.config.model import GPTConfig
from mjax.models.block import stack
from mjax.models.causal import CausalModel
from mjax.models.context import Context
from mjax.models.norms import LayerNorm
from mjax.models.output import Output
from mjax.models.positions import NO_POSITIONS, ALiBi, positions_of
from mjax.models.transformer import transformer_layer
from mjax.parallel import random
from mjax.parallel.layers import VocabParallelEmbedding, normal
from mjax.parallel.sums import lookup
from mjax.parallel.weights import parameter


class GPT(CausalModel):
    """A decoder-only language model."""

    def __init__(self, key: Array, config: GPTConfig, dtype=jnp.float32):
        embedding, positions, blocks = jax.random.split(key, 3)
        self.config = config
        self.embedding = VocabParallelEmbedding(
            embedding, config.vocabulary, config.padded_vocabulary, config.hidden, config.init_std, dtype
        )
        if config.positions == "learned":
            self.positions = parameter(
                positions,
                normal(config.init_std),
                (config.max_positions, config.hidden),
                (None, None),
                dtype,
                ("position", "out"),
            )
        if config.embedding_layernorm:
            self.embedding_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        within = ALiBi(config.heads) if config.positions == "alibi" else NO_POSITIONS
        self.blocks = stack(blocks, config.layers, lambda key: transformer_layer(key, config, dtype, positions=within))
        self.final_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)

    def embed(self, batch: dict[str, Array], context: Context) -> Float[Array, "t h"]:
        tokens = context.tokens
        x = self.embedding(batch["tokens"], tokens)
        if self.config.embedding_layernorm:
            x = self.embedding_norm(x)
        if self.config.positions == "learned" and context.positions is None:
            x = x + tokens.local_rows(positions_of(self.positions[...], tokens))
        elif self.config.positions == "learned":
            x = x + lookup(self.positions[...], tokens.local_rows(context.positions.reshape(-1)))
        return context.of_layer(0).dropout(x, self.config.hidden_dropout, random.EMBEDDING)

    def output(self, x: Float[Array, "t h"]) -> Output:
        return Output(self.embedding, self.final_norm(x))
