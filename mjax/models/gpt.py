"""GPT-2 as Megatron trains it: learned positions, pre-LN layers, a final LayerNorm, and the embedding as output
layer.

BLOOM (arXiv 2211.05100, section 3.2) is the same with two options: ALiBi in the place of learned positions, so that
attention alone knows where a token stands, and a LayerNorm after the embedding, which steadies training.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mjax.config import ModelConfig
from mjax.models.attention import KeyValues
from mjax.models.transformer import Block, decode_blocks, run_blocks, stack_blocks
from mjax.parallel import mappings, random
from mjax.parallel.layers import (
    LayerNorm,
    VocabParallelEmbedding,
    normal,
    parameter,
    vocab_parallel_cross_entropy,
)
from mjax.parallel.random import DropoutKey, dropout_tokens
from mjax.parallel.sums import lookup, tile_rows
from mjax.parallel.tokens import Tokens

# (stacked layers, x, which tokens, cached keys and values, lengths) → (x, new keys and values)
DecodeBlocks = Callable[[Block, Array, Tokens, KeyValues | None, Array], tuple[Array, KeyValues]]


class GPT(nnx.Module):
    """A decoder-only language model.

    Built outside `shard_map` it holds whole weights with their PartitionSpecs; passed into `shard_map` the same pytree
    holds this device's shards, and calling it computes with those.
    """

    def __init__(self, key: Array, config: ModelConfig, dtype=jnp.float32):
        embedding, positions, blocks = jax.random.split(key, 3)
        self.config = config
        self.embedding = VocabParallelEmbedding(
            embedding, config.vocabulary, config.padded_vocabulary, config.hidden, config.init_std, dtype
        )
        if config.positions == "learned":
            self.positions = parameter(
                positions, normal(config.init_std), (config.sequence, config.hidden), (None, None), dtype
            )
        if config.embedding_layernorm:
            self.embedding_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)
        self.blocks = stack_blocks(blocks, config, dtype)
        self.final_norm = LayerNorm(config.hidden, config.layernorm_epsilon, dtype)

    def __call__(
        self,
        ids: Array,
        key: DropoutKey | None = None,
        recompute: str = "none",
        positions: Array | None = None,
        documents: Array | None = None,
    ) -> Array:
        """Logits of the next token at every position.

        Args:
          ids: int [b, s], the same on every rank of `model`.
          key: dropout masks of this forward pass; None for evaluation.
          recompute: `none`, `selective` or `full`.
          positions: int [b, s], which learned position a token has; 0 … s − 1 when not given. Not with ALiBi, which
            counts distances.
          documents: int [b, s], number of each token's document, where attention must stay within it.

        Returns:
          [b, s, v / p] in the type of the weights, varying over `model`.
        """
        tokens = Tokens(*ids.shape)
        x = self.embed(ids, tokens, key, positions)
        x = run_blocks(self.blocks, x, tokens, key, recompute, documents=documents)
        return tokens.by_sequence(self.logits(x, tokens))

    def embed(self, ids: Array, tokens: Tokens, key: DropoutKey | None = None, positions: Array | None = None) -> Array:
        """The stream before the first layer: `ids` int [b, s], and `positions` as in `__call__` → [t, h]."""
        x = self.embedding(ids, tokens)
        if self.config.embedding_layernorm:
            x = self.embedding_norm(x)
        if self.config.positions == "learned" and positions is None:
            x = x + tokens.mine(tile_rows(self.positions[: tokens.positions], tokens.sequences))
        elif self.config.positions == "learned":
            x = x + lookup(self.positions[...], tokens.mine(positions.reshape(-1)))
        place = None if key is None else key.fold(0).fold(random.EMBEDDING)
        return dropout_tokens(x, self.config.hidden_dropout, place, tokens)

    def embed_batch(self, batch: dict[str, Array], tokens: Tokens, key: DropoutKey | None) -> Array:
        """`embed` of what `DataConfig.batch_types` lists."""
        return self.embed(batch["tokens"], tokens, key, batch.get("positions"))

    def logits(self, x: Array, tokens: Tokens) -> Array:
        """Scores of the next token after the last layer: x [t, h] → [b · s, v / p], varying over `model`."""
        return self.embedding.logits(self.final_norm(x), tokens)

    def loss(self, x: Array, labels: Array, tokens: Tokens, mask: Array | None = None) -> Array:
        """Sum of the cross entropy over this replica's labels, or those that `mask` lets count, from the stream after
        the last layer.

        Shapes: x [t, h], labels int [b, s], mask bool [b, s] → float32 [], the same on every rank of `model`.
        """
        losses = vocab_parallel_cross_entropy(self.logits(x, tokens), labels.reshape(-1))  # [b · s]
        return losses.sum() if mask is None else losses.sum(where=mask.reshape(-1))

    def batch_loss(self, x: Array, batch: dict[str, Array], tokens: Tokens, key: DropoutKey | None = None) -> Array:
        """`loss` of what `DataConfig.batch_types` lists. The head has no dropout."""
        return self.loss(x, batch["labels"], tokens, batch.get("loss_mask"))

    def prefill(
        self, prompts: Array, lengths: Array, slots: int, decode: DecodeBlocks = decode_blocks
    ) -> tuple[Array, KeyValues]:
        """Read whole prompts at once, and keep the keys and values of their positions.

        A position's slot in the cache is its number. So prompts of different lengths are padded on the right: causal
        attention never looks at what comes later, and decoding overwrites the padding before it could.

        Args:
          prompts: int [b, s], padded on the right with any valid id.
          lengths: int [b], tokens of each prompt, at least 1.
          slots: size of the cache, at least s.
          decode: runs the layers; another one than `decode_blocks` where they are spread over a pipeline.

        Returns:
          Logits of the token after each prompt [b, v], the same on every rank of `model`, and the cache
          [l, b, slots, n / p, d].
        """
        tokens = Tokens(*prompts.shape)
        x, new = decode(self.blocks, self.embed(prompts, tokens), tokens, None, lengths)
        last = jnp.take_along_axis(tokens.by_sequence(x), (lengths - 1)[:, None, None], axis=1)[:, 0]
        room = [(0, 0), (0, 0), (0, slots - prompts.shape[1]), (0, 0), (0, 0)]
        return self._row(last), jax.tree.map(lambda part: jnp.pad(part, room), new)

    def decode(
        self, tokens: Array, cached: KeyValues, lengths: Array, decode: DecodeBlocks = decode_blocks
    ) -> tuple[Array, KeyValues]:
        """Read one token of each sequence, whose `lengths` tokens before it are in the cache.

        Args:
          tokens: int [b], the tokens at positions `lengths`.
          cached: [l, b, S, n / p, d].
          lengths: int [b], below S.
          decode: as for `prefill`.

        Returns:
          Logits of the token after it [b, v], the same on every rank of `model`, and the cache that includes it.
        """
        rows = Tokens(tokens.shape[0], 1)
        x = self.embed(tokens[:, None], rows, positions=lengths[:, None])
        x, new = decode(self.blocks, x, rows, cached, lengths)
        sequences = jnp.arange(tokens.shape[0])
        cached = jax.tree.map(lambda slots, one: slots.at[:, sequences, lengths].set(one[:, :, 0]), cached, new)
        return self._row(x), cached

    def _row(self, x: Array) -> Array:
        """Logits of one position of each sequence: x [b, h] → [b, v], the same on every rank of `model`."""
        return mappings.gather_over_model(self.logits(x, Tokens(x.shape[0], 1)))
