"""The layer of GPT-2, BERT and Megatron-LM: LayerNorm, attention, and an MLP with GELU (arXiv 1909.08053, figure 2).

x ─┬─ LayerNorm ─ QKV (columns) ─ attention ─ projection (rows) ─ dropout ─ + ─┬─ …
   └───────────────────────────────────────────────────────────────────────┘
… ─┬─ LayerNorm ─ MLP up (columns) ─ GELU ─ MLP down (rows) ─ dropout ─ + ─▶
   └────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import jax
from jax import Array

from mjax.config.model import TransformerConfig
from mjax.models.attention import Attention
from mjax.models.block import Block
from mjax.models.mlp import MLP
from mjax.models.norms import LayerNorm
from mjax.models.positions import NO_POSITIONS, Positions


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
