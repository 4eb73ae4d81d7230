"""GPT-2 as Megatron trains it: learned positions, pre-LN layers, a final LayerNorm, and the embedding as output
layer.

BLOOM (arXiv 2211.05100, section 3.2) is the same with two options: ALiBi instead of learned positions, so that only
attention depends on positions, and a LayerNorm after the embedding, which stabilises training.

`transformer_layer` is the layer of GPT-2, BERT and Megatron-LM (arXiv 1909.08053, figure 2):

    x ─┬─ LayerNorm ─ QKV (columns) ─ attention ─ projection (rows) ─ dropout ─ + ─┬─ …
       └───────────────────────────────────────────────────────────────────────┘
    … ─┬─ LayerNorm ─ MLP up (columns) ─ GELU ─ MLP down (rows) ─ dropout ─ + ─▶
       └────────────────────────────────────────────────────────────────────┘
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.models.block import Block
from mjax.models.causal import CausalModel, Output
from mjax.models.gpt.config import GPTConfig, TransformerConfig
from mjax.models.parts.attention import Attention
from mjax.models.parts.mlp import MLP
from mjax.models.parts.norms import LayerNorm
from mjax.models.parts.positions import NO_POSITIONS, ALiBi, Positions, position_embeddings
from mjax.models.protocol import ForwardContext
from mjax.models.stack import stack
from mjax.parallel import random
from mjax.parallel.layers import VocabParallelEmbedding, normal_init
from mjax.parallel.reductions import lookup
from mjax.parallel.weights import OUT, POSITION, make_param


class GPT(CausalModel):
    """A decoder-only language model."""

    def __init__(self, key: Array, config: GPTConfig, dtype=jnp.float32):
        embedding, positions, blocks = jax.random.split(key, 3)
        self.config, hidden, std = config, config.hidden, config.init_std
        sizes = config.vocabulary, config.padded_vocabulary, hidden, std
        self.embedding = VocabParallelEmbedding(embedding, *sizes, dtype)
        if config.positions == "learned":
            shape = config.max_positions, hidden
            self.positions = make_param(positions, normal_init(std), shape, (POSITION, OUT), dtype)
        if config.embedding_layernorm:
            self.embedding_norm = LayerNorm(hidden, config.layernorm_epsilon, dtype)
        encoding = ALiBi(config.heads) if config.positions == "alibi" else NO_POSITIONS
        self.blocks = stack(blocks, config, lambda key: transformer_layer(key, config, dtype, positions=encoding))
        self.final_norm = LayerNorm(hidden, config.layernorm_epsilon, dtype)

    def embed(self, batch: dict[str, Array], context: ForwardContext) -> Float[Array, "t h"]:
        tokens = context.tokens
        x = self.embedding(batch["tokens"], tokens)
        if self.config.embedding_layernorm:
            x = self.embedding_norm(x)
        if self.config.positions == "learned" and context.positions is None:
            x = x + tokens.local_rows(position_embeddings(self.positions[...], tokens))
        elif self.config.positions == "learned":
            x = x + lookup(self.positions[...], tokens.local_rows(context.positions.reshape(-1)))
        return context.with_layer(0).dropout(x, self.config.hidden_dropout, random.EMBEDDING)

    def output(self, x: Float[Array, "t h"]) -> Output:
        return Output(self.embedding, self.final_norm(x))


def transformer_layer(
    key: Array, config: TransformerConfig, dtype, block: type[Block] = Block, positions: Positions = NO_POSITIONS
) -> Block:
    """One layer, in the form given by `block`."""
    attention, mlp = jax.random.split(key)
    return block(
        attention_norm=LayerNorm(config.hidden, config.layernorm_epsilon, dtype),
        attention=Attention(attention, config, dtype, positions),
        mlp_norm=LayerNorm(config.hidden, config.layernorm_epsilon, dtype),
        mlp=MLP(mlp, config, dtype),
        dropout=config.hidden_dropout,
    )
