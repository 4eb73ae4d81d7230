"""GPT-2 as Megatron trains it: learned positions, pre-LN layers, a final LayerNorm, and the embedding as output layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mjax.config import ModelConfig
from mjax.models.transformer import run_blocks, stack_blocks
from mjax.parallel import random
from mjax.parallel.layers import (
    LayerNorm,
    VocabParallelEmbedding,
    normal,
    parameter,
    vocab_parallel_cross_entropy,
)
from mjax.parallel.random import DropoutKey, dropout


class GPT(nnx.Module):
    """A decoder-only language model.

    Built outside `shard_map` it holds whole weights with their PartitionSpecs; passed into `shard_map` the same pytree
    holds this device's shards, and calling it computes with those.
    """

    def __init__(self, key: Array, config: ModelConfig, dtype=jnp.float32):
        embedding, positions, blocks = jax.random.split(key, 3)
        self.config = config
        self.embedding = VocabParallelEmbedding(
            embedding, config.padded_vocabulary, config.hidden, config.init_std, dtype
        )
        self.positions = parameter(
            positions, normal(config.init_std), (config.sequence, config.hidden), (None, None), dtype
        )
        self.blocks = stack_blocks(blocks, config, dtype)
        self.final_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)

    def __call__(self, tokens: Array, key: DropoutKey | None = None, recompute: str = "none") -> Array:
        """Logits of the next token at every position.

        Args:
          tokens: int [b, s], the same on every rank of `model`.
          key: dropout masks of this forward pass; None for evaluation.
          recompute: `none`, `selective` or `full`.

        Returns:
          [b, s, v / p] in the type of the weights, varying over `model`.
        """
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        if key is not None:
            x = dropout(x, self.config.hidden_dropout, key.fold(0).fold(random.EMBEDDING), jnp.arange(tokens.shape[1]))
        x = run_blocks(self.blocks, x, key, recompute)
        return self.embedding.logits(self.final_norm(x))

    def loss(self, tokens: Array, labels: Array, key: DropoutKey | None = None, recompute: str = "none") -> Array:
        """Sum of the cross entropy over this replica's tokens: float32 [], the same on every rank of `model`."""
        return vocab_parallel_cross_entropy(self(tokens, key, recompute), labels).sum()


def build_gpt(seed: int, config: ModelConfig, dtype=jnp.float32) -> GPT:
    """The model whose weights are a function of `seed` and `config`, whatever the mesh it is sharded over."""
    return GPT(jax.random.key(seed), config, dtype)
