"""DeepSeek-V3 as a model of one's own: latent attention (arXiv 2412.19437, 2.1.1) and a cache of
latents, its mixture, and one more token predicted (2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config import Config, PrecisionConfig, TrainConfig
from mjax.config.axes import CONTEXT
from mjax.config.bounds import Count, CountOrZero, NotNegative
from mjax.config.model import register
from mjax.models.block import Block
from mjax.models.causal import Output
from mjax.models.decoding import attend_cached, write_cache
from mjax.models.llama.model import make_rotary
from mjax.models.mixture.model import Mixture
from mjax.models.parts.attention_kernels import attend_over_context
from mjax.models.parts.config import EXPERTS, ExpertsConfig, RotaryConfig
from mjax.models.parts.experts import Experts
from mjax.models.parts.mask import AttentionMask
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm
from mjax.parallel import mappings
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, normal_init
from mjax.parallel.linear import linear
from mjax.parallel.weights import make_param


@register
@dataclass(frozen=True)
class DeepSeekConfig(ExpertsConfig, RotaryConfig):
    kind: Literal["deepseek_v3"] = "deepseek_v3"
    q_rank: Count = 1536
    kv_rank: Count = 512
    nope_dim: Count = 128
    rope_dim: Count = 64
    v_dim: Count = 128
    norm_epsilon: NotNegative = 1e-6
    predict: CountOrZero = 0
    """Further tokens predicted (MTP): 0 or 1."""
    mtp_loss: NotNegative = 0.3

    title: ClassVar[str] = "a DeepSeek-V3"
    module: ClassVar[str] = f"{__name__}:DeepSeek"
    tie_embeddings, hidden_dropout = False, 0.0
    head_size = property(lambda self: self.nope_dim + self.rope_dim)
    value_size = property(lambda self: self.v_dim)
    rotary_dim = property(lambda self: self.rope_dim)


class Narrow(nnx.Module):
    """x A, replicated over `model`: of this rank's rows."""

    mixes_positions = False

    def __init__(self, key, width, out, std, dtype):
        self.kernel = make_param(key, normal_init(std), (width, out), ("in", "out"), dtype)

    def __call__(self, x):
        return linear(self.kernel[...], x, 1)


class LatentAttention(nnx.Module):
    mixes_positions = False  # but in `attend_over_context` and `attend_cached`

    def __init__(self, key, config: DeepSeekConfig, dtype):
        qa, qb, kva, kvb, out = jax.random.split(key, 5)
        c, std, norm = config, config.init_std, partial(RMSNorm, epsilon=config.norm_epsilon, dtype=dtype)
        self.config, self.positions = config, make_rotary(config)
        self.q_down, self.q_norm = Narrow(qa, c.hidden, c.q_rank, std, dtype), norm(c.q_rank)
        self.kv_down, self.kv_norm = Narrow(kva, c.hidden, c.kv_rank + c.rope_dim, std, dtype), norm(c.kv_rank)
        column = partial(ColumnParallelLinear, split=0, std=std, dtype=dtype, bias=False)
        self.q_up = column(qb, c.q_rank, (c.heads, c.head_size))
        self.kv_up = column(kvb, c.kv_rank, (c.heads, c.nope_dim + c.v_dim))
        self.out = RowParallelLinear(out, (c.heads, c.v_dim), c.hidden, c.residual_std, dtype, bias=False)

    def compressed(self, x, context):
        """Queries [b, s, n / p, d], the latent [t, r], and the key that all heads share [b, s, 1, d_r]."""
        c, tokens = self.config, context.tokens
        q = tokens.split_sequences(self.q_up(self.q_norm(self.q_down(x)), tokens))
        latent, shared = jnp.split(self.kv_down(x), [c.kv_rank], axis=-1)
        shared = tokens.split_sequences(tokens.gather_rows(shared))[:, :, None]
        q_nope, q_rope = jnp.split(q, [c.nope_dim], axis=-1)
        q_rope, shared = self.positions.apply_to_qk(q_rope, shared, context)
        return jnp.concatenate([q_nope, q_rope], axis=-1), self.kv_norm(latent), shared

    def expanded(self, latent, shared, tokens):
        """Keys and values of this rank's heads."""
        k, v = jnp.split(tokens.split_sequences(self.kv_up(latent, tokens)), [self.config.nope_dim], axis=-1)
        shared = jnp.broadcast_to(shared, (*k.shape[:-1], self.config.rope_dim))
        return jnp.concatenate([k, shared], axis=-1), v

    def attended(self, q, latent, shared, context):
        k, v = self.expanded(latent, shared, context.tokens)
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        mask = AttentionMask(documents=context.documents)
        return self.joined(attend_over_context(q, k, v, mask, self.config.attention, context.tokens), context)

    def joined(self, attended, context):
        attended = attended.reshape(context.tokens.num_tokens, *attended.shape[2:])
        return self.out(checkpoint_name(attended, "attended"), context.tokens)

    def __call__(self, x, context):
        return self.attended(*self.compressed(x, context), context)

    def empty_cache(self, sequences, slots, dtype):
        return jnp.zeros((sequences, 1, slots, self.config.kv_rank + self.config.rope_dim), dtype)

    def decode(self, x, context, cached, lengths):
        (q, latent, shared), split = self.compressed(x, context), context.tokens.split_sequences
        new = jnp.concatenate([split(latent)[:, :, None], shared], axis=-1)
        cached = write_cache(cached, new, lengths, context.slots)
        if context.slots is None:
            return self.attended(q, latent, shared, context), cached
        to_key, to_value = jnp.split(self.kv_up.kernel[...], [self.config.nope_dim], axis=-1)
        q_nope, q_rope = jnp.split(q, [self.config.nope_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bqnd,rnd->bqnr", q_nope, to_key), q_rope], axis=-1)  # no key is expanded
        mask = AttentionMask(scale=self.config.head_size**-0.5)
        latent = attend_cached(q, cached, cached, lengths, context.slots, mask)[..., : self.config.kv_rank]
        return self.joined(jnp.einsum("bqnr,rne->bqne", latent, to_value), context), cached


def layer(key, config, dtype, experts=False):
    attention, mlp = jax.random.split(key)
    norm = partial(RMSNorm, config.hidden, config.norm_epsilon, dtype)
    kind = Experts if experts else GatedMLP
    return Block(norm(), LatentAttention(attention, config, dtype), norm(), kind(mlp, config, dtype))


class DeepSeek(Mixture):
    mixes_positions = False
    layers: ClassVar = {"": layer, EXPERTS: partial(layer, experts=True)}

    def __init__(self, key, config, dtype=jnp.float32):
        super().__init__(key, config, dtype)
        if config.predict:
            join, block = jax.random.split(jax.random.fold_in(key, 1))
            self.mtp_norms = nnx.List([RMSNorm(config.hidden, config.norm_epsilon, dtype) for _ in range(3)])
            self.mtp_join = Narrow(join, 2 * config.hidden, config.hidden, config.init_std, dtype)
            self.mtp_block = layer(block, config, dtype)
            self.loss_weights = self.loss_weights | {"mtp": config.mtp_loss}

    def counts(self, batch):
        rows, positions = batch["tokens"].shape
        labels = rows * (positions * mappings.size(CONTEXT) - 1)
        more = {"mtp": mappings.mask_count_to_first_context_rank(labels)} if self.config.predict else {}
        return super().counts(batch) | more

    def loss(self, x, batch, context):
        sums, tokens = super().loss(x, batch, context), context.tokens
        if not self.config.predict:
            return sums
        of_stream, of_token, last = self.mtp_norms
        after = self.embedding(batch["labels"], tokens)  # of the next token
        y = self.mtp_join(jnp.concatenate([of_stream(x), of_token(after)], axis=-1))
        y = self.mtp_block(y, context.with_layer(self.config.layers + 1))
        labels = jnp.pad(tokens.gather_positions(batch["labels"])[:, 1:], [(0, 0), (0, 1)])[:, tokens.position_ids()]
        has_label = jnp.broadcast_to(tokens.position_ids() < tokens.global_positions - 1, labels.shape)
        losses = Output(self.head, last(y)).cross_entropy(labels, context)
        return sums | {"mtp": losses.sum(where=has_label.reshape(-1))}


config = Config(
    model=DeepSeekConfig(layers=3, hidden=32, heads=4, sequence=16, vocabulary=60, vocabulary_multiple=64, q_rank=24,
        kv_rank=16, nope_dim=8, rope_dim=4, v_dim=6, experts=4, experts_per_token=2, moe_ffn_hidden=16,
        first_dense_layers=1, router="sigmoid", router_bias_update_rate=1e-3, shared_expert_ffn_hidden=16,
        feed_forward=48, predict=1, attention="xla"),
    precision=PrecisionConfig(compute="fp64"),
    train=TrainConfig(steps=20, global_batch=8, micro_batch=2, recompute="selective"),
)  # fmt: skip
