"""GPT-2 as Megatron trains it: learned positions, pre-LN layers, a final LayerNorm, and the embedding as output
layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mjax.config import ModelConfig
from mjax.models.attention import KeyValues
from mjax.models.transformer import decode_blocks, run_blocks, stack_blocks
from mjax.parallel import mappings, random
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

    def prefill(self, prompts: Array, lengths: Array, slots: int) -> tuple[Array, KeyValues]:
        """Read whole prompts at once, and keep the keys and values of their positions.

        A position's slot in the cache is its number. So prompts of different lengths are padded on the right: causal
        attention never looks at what comes later, and decoding overwrites the padding before it could.

        Args:
          prompts: int [b, s], padded on the right with any valid id.
          lengths: int [b], tokens of each prompt, at least 1.
          slots: size of the cache, at least s.

        Returns:
          Logits of the token after each prompt [b, v], the same on every rank of `model`, and the cache
          [l, b, slots, n / p, d].
        """
        x = self.embedding(prompts) + self.positions[: prompts.shape[1]]
        x, new = decode_blocks(self.blocks, x, None, lengths)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        room = [(0, 0), (0, 0), (0, slots - prompts.shape[1]), (0, 0), (0, 0)]
        return self._row(last), jax.tree.map(lambda part: jnp.pad(part, room), new)

    def decode(self, tokens: Array, cached: KeyValues, lengths: Array) -> tuple[Array, KeyValues]:
        """Read one token of each sequence, whose `lengths` tokens before it are in the cache.

        Args:
          tokens: int [b], the tokens at positions `lengths`.
          cached: [l, b, S, n / p, d].
          lengths: int [b], below S.

        Returns:
          Logits of the token after it [b, v], the same on every rank of `model`, and the cache that includes it.
        """
        x = self.embedding(tokens[:, None]) + self.positions[lengths][:, None]
        x, new = decode_blocks(self.blocks, x, cached, lengths)
        sequences = jnp.arange(tokens.shape[0])
        cached = jax.tree.map(lambda slots, one: slots.at[:, sequences, lengths].set(one[:, :, 0]), cached, new)
        return self._row(x), cached

    def _row(self, x: Array) -> Array:
        """Logits of one position of each sequence: x [b, 1, h] → [b, v], the same on every rank of `model`."""
        return mappings.gather_over_model(self.embedding.logits(self.final_norm(x)))[:, 0]


def build_gpt(seed: int, config: ModelConfig, dtype=jnp.float32) -> GPT:
    """The model whose weights are a function of `seed` and `config`, whatever the mesh it is sharded over."""
    return GPT(jax.random.key(seed), config, dtype)
