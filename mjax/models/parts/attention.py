"""Attention, causal or bidirectional. Its kernels are in `attention_kernels.py`, and its cache for generation in
`decoding.py`."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from mjax.config.axes import MODEL
from mjax.config.model import ModelConfig
from mjax.models.decoding import KeyValues, attend_cached, write_cache
from mjax.models.parts.attention_kernels import attend_over_context
from mjax.models.parts.mask import AttentionMask
from mjax.models.parts.positions import NO_POSITIONS, Positions
from mjax.models.protocol import ForwardContext
from mjax.parallel import mappings, random
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, apply_column_parallel


class Attention(nnx.Module):
    """Multi-head attention with the heads split over `model`."""

    def __init__(
        self,
        key: Array,
        config: ModelConfig,
        dtype,
        positions: Positions = NO_POSITIONS,
        kv_heads: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        qk_norm: Callable[[int], nnx.Module | None] = lambda heads: None,
    ):
        """Initialize the weights.

        Args:
          key: of `jax.random`.
          config: sizes, kernel and dropout rate.
          dtype: of the weights.
          positions: position encoding in attention.
          kv_heads: key-value heads k, each shared by as many neighbouring query heads (arXiv 2305.13245); by default n.
            With n queries, keys and values are one matrix [h, 3, n, d], else two, [h, n, d] and [h, 2, k, d].
          bias: whether these and the output have a bias.
          out_bias: whether the output has a bias; by default as `bias`.
          scale: as in `AttentionMask`.
          qk_norm: makes the norm of queries or keys [b, s, heads / t, d_h] from a number of heads; None: no norm.
        """
        qkv, out = jax.random.split(key)
        heads, size = config.heads, config.head_size
        self.config, self.positions, self.scale, self.kv_heads = config, positions, scale, kv_heads or heads
        self.grouped = self.kv_heads != heads
        linear = partial(ColumnParallelLinear, width=config.hidden, std=config.init_std, dtype=dtype, bias=bias)
        if self.grouped:
            query, key_value = jax.random.split(qkv)
            self.query = linear(query, out=(heads, size), split=0, parts=("q",))
            self.key_value = linear(key_value, out=(2, kv_heads, size), split=1, unfused=True, parts=("k", "v"))
        else:
            self.qkv = linear(qkv, out=(3, heads, size), split=1, unfused=True, parts=("q", "k", "v"))
        out_bias = bias if out_bias is None else out_bias
        self.out = RowParallelLinear(out, (heads, size), config.hidden, config.residual_std, dtype, out_bias)
        self.query_norm, self.key_norm = qk_norm(heads), qk_norm(kv_heads or heads)

    def __call__(self, x: Float[Array, "t h"], context: ForwardContext) -> Float[Array, "t h"]:
        lora = context.layer_key(random.LORA_QKV)
        q, k, v = self._split_heads(apply_column_parallel(x, context.tokens, *self._projections(), key=lora), context)
        attended = attend_over_context(q, k, v, self._mask(context), self.config.attention, context.tokens)
        attended = attended.reshape(context.tokens.num_tokens, *attended.shape[2:])
        return self.out(checkpoint_name(attended, "attended"), context.tokens, context.layer_key(random.LORA_OUT))

    def probabilities(self, x: Float[Array, "t h"], context: ForwardContext) -> Float[Array, "bs n S"]:
        """The weights with which this rank's heads attend from this rank's positions to all ranks' positions."""
        tokens = context.tokens
        q, k, _ = self._split_heads(apply_column_parallel(x, tokens, *self._projections()), context)
        # Attention is linear in the values: with one-hot values its output is the weights, over any mesh.
        one_hot = jax.nn.one_hot(tokens.position_ids(), tokens.global_positions, dtype=q.dtype)[None, :, None]
        v = jnp.broadcast_to(one_hot, (*k.shape[:3], one_hot.shape[-1]))
        v = mappings.vary(v, mappings.varying_axes(k))
        weights = attend_over_context(q, k, v, self._mask(context), "xla", tokens)
        return weights.reshape(tokens.num_tokens, *weights.shape[2:])

    def empty_cache(self, sequences: int, slots: int, dtype) -> KeyValues:
        """Like `Block.empty_cache`, for attention alone."""
        heads = max(self.kv_heads // mappings.size(MODEL), 1)
        empty = jnp.zeros((sequences, heads, slots, self.config.head_size), dtype)
        return KeyValues(empty, empty)

    def decode(
        self, x: Float[Array, "t h"], context: ForwardContext, cached: KeyValues, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], KeyValues]:
        """Like `Block.decode`, for attention alone."""
        # Splitting the outputs is cheaper than splitting the weights for every token.
        outputs = apply_column_parallel(x, context.tokens, *self._projections(), whole=True)
        parts = [part for y in outputs for part in (y[None] if y.ndim == 3 else y.swapaxes(0, 1))]
        (q, k, v), mask = self._split_heads(parts, context), self._mask(context)
        cached = write_cache(cached, KeyValues(k, v), lengths, context.slots)
        if context.slots is None:
            attended = attend_over_context(q, k, v, mask, self.config.attention, context.tokens)
        else:
            attended = attend_cached(q, *cached, lengths, context.slots, mask)
        return self.out(attended.reshape(context.tokens.num_tokens, *attended.shape[2:]), context.tokens), cached

    def _mask(self, context: ForwardContext) -> AttentionMask:
        config, slopes = self.config, self.positions.slopes()
        window, rate, documents = context.kind.window, config.attention_dropout, context.documents
        key = context.layer_key(random.ATTENTION) if rate else None
        return AttentionMask(config.causal, window, self.scale, rate, key, documents, slopes)

    def _projections(self) -> tuple[ColumnParallelLinear, ...]:
        return (self.query, self.key_value) if self.grouped else (self.qkv,)

    def _split_heads(
        self, parts: Sequence[Float[Array, "bs _ d"]], context: ForwardContext
    ) -> tuple[Float[Array, "b s n d"], Float[Array, "b s k d"], Float[Array, "b s k d"]]:
        """Queries, keys and values of this rank's heads, at least one, with norms and positions applied."""
        q, k, v = (context.tokens.split_sequences(checkpoint_name(part, "qkv")) for part in parts)
        if self.query_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = self.positions.apply_to_qk(q, k, context)
        return q, k, v
