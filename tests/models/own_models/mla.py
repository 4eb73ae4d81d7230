"""DeepSeek-V3's layer as a model of one's own: multi-head latent attention (arXiv 2412.19437, 2.1.1) that decodes from
a cache of latents, and a mixture of experts with a sigmoid router. Exports open in transformers."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mjax.config import Config, TrainConfig
from mjax.config.bounds import Count, Positive
from mjax.config.model import register
from mjax.models.block import Block
from mjax.models.decoding import attend_cached, write_cache
from mjax.models.deepseek.huggingface import V3
from mjax.models.mixture.model import Mixture
from mjax.models.parts.attention_kernels import attend_over_context
from mjax.models.parts.config import EXPERTS, ExpertsConfig
from mjax.models.parts.experts import Experts
from mjax.models.parts.mask import AttentionMask
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm
from mjax.models.parts.rotary import Rotary
from mjax.parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from mjax.parallel.token_layout import TokenLayout


@register
@dataclass(frozen=True)
class LatentConfig(ExpertsConfig):
    kind: Literal["latent"] = "latent"
    q_lora_rank: Count = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    rope_theta: Positive = 10_000.0

    title: ClassVar[str] = "a mixture with latent attention"
    families: ClassVar[str] = f"{__name__}:FAMILIES"
    tie_embeddings = False
    head_size = property(lambda self: self.qk_nope_head_dim + self.qk_rope_head_dim)
    value_size = property(lambda self: self.v_head_dim)

    def build(self, key, dtype):
        return Latent(key, self, dtype)


class LatentAttention(nnx.Module):
    mixes_positions = False  # except in attend_over_context: --mesh.context may split sequences

    def __init__(self, key, config, dtype):
        keys, c = jax.random.split(key, 5), config
        down = partial(ReplicatedLinear, width=c.hidden, std=c.init_std, dtype=dtype)
        up = partial(ColumnParallelLinear, split=0, std=c.init_std, dtype=dtype, bias=False)
        norm = partial(RMSNorm, epsilon=c.norm_epsilon, dtype=dtype)
        self.config, self.rotary = config, Rotary(c.qk_rope_head_dim, c.rope_theta)
        self.q_down, self.q_norm = down(keys[0], out=c.q_lora_rank), norm(c.q_lora_rank)
        self.q_up = up(keys[1], c.q_lora_rank, (c.heads, c.head_size))
        self.kv_down, self.kv_norm = down(keys[2], out=c.kv_lora_rank + c.qk_rope_head_dim), norm(c.kv_lora_rank)
        self.kv_up = up(keys[3], c.kv_lora_rank, (c.heads, c.qk_nope_head_dim + c.v_head_dim))
        self.out = RowParallelLinear(keys[4], (c.heads, c.v_head_dim), c.hidden, c.residual_std, dtype, bias=False)

    def project(self, x, context):
        """Queries of this rank's heads [b, s, n, d], latents of its rows [t, r], and all heads' key [b, s, 1, d_r]."""
        c, tokens = self.config, context.tokens
        q = tokens.split_sequences(self.q_up(self.q_norm(self.q_down(x, tokens)), tokens))
        latent, shared = jnp.split(self.kv_down(x, tokens), [c.kv_lora_rank], axis=-1)
        shared = tokens.split_sequences(tokens.gather_rows(shared))[:, :, None]  # f, where rows are split
        q_nope, q_rope = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        q_rope, shared = self.rotary.apply_to_qk(q_rope, shared, context)
        return jnp.concatenate([q_nope, q_rope], axis=-1), self.kv_norm(latent), shared

    def attend(self, q, latent, shared, context):
        c, tokens = self.config, context.tokens
        k, v = jnp.split(tokens.split_sequences(self.kv_up(latent, tokens)), [c.qk_nope_head_dim], axis=-1)
        k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:-1], c.qk_rope_head_dim))], axis=-1)
        q, k, v = (checkpoint_name(part, "qkv") for part in (q, k, v))
        mask = AttentionMask(documents=context.documents)
        return self.project_out(attend_over_context(q, k, v, mask, c.attention, tokens), context)

    def project_out(self, attended, context):
        attended = attended.reshape(context.tokens.num_tokens, *attended.shape[2:])
        return self.out(checkpoint_name(attended, "attended"), context.tokens)

    def kv_matrix(self, dtype):
        """The matrix from a latent to this rank's keys and values, with its LoRA adapter, if it has one."""
        if self.kv_up.adapter is None:
            return self.kv_up.kernel[...]
        rank = self.config.kv_lora_rank
        return self.kv_up(jnp.eye(rank, dtype=dtype), TokenLayout(rank, 1))

    def __call__(self, x, context):
        return self.attend(*self.project(x, context), context)

    def empty_cache(self, sequences, slots, dtype):
        return jnp.zeros((sequences, 1, slots, self.config.kv_lora_rank + self.config.qk_rope_head_dim), dtype)

    def decode(self, x, context, cached, lengths):
        c = self.config
        q, latent, shared = self.project(x, context)
        new = jnp.concatenate([context.tokens.split_sequences(latent)[:, :, None], shared], axis=-1)
        cached = write_cache(cached, new, lengths, context.slots)
        if context.slots is None:  # whole prompts
            return self.attend(q, latent, shared, context), cached
        to_keys, to_values = jnp.split(self.kv_matrix(x.dtype), [c.qk_nope_head_dim], axis=-1)
        q, q_rope = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bsnd,rnd->bsnr", q, to_keys), q_rope], axis=-1)  # no key is computed
        mask = AttentionMask(scale=c.head_size**-0.5)
        attended = attend_cached(q, cached, cached, lengths, context.slots, mask)[..., : c.kv_lora_rank]
        return self.project_out(jnp.einsum("bsnr,rne->bsne", attended, to_values), context), cached


def layer(key, config, dtype, mlp):
    attention, other = jax.random.split(key)
    norm = partial(RMSNorm, config.hidden, config.norm_epsilon, dtype)
    return Block(norm(), LatentAttention(attention, config, dtype), norm(), mlp(other, config, dtype))


class Latent(Mixture):
    mixes_positions = False
    layers: ClassVar = {"": partial(layer, mlp=GatedMLP), EXPERTS: partial(layer, mlp=Experts)}


SIZES = {"layers": 5, "hidden": 64, "heads": 4, "sequence": 64, "vocabulary": 257, "feed_forward": 128}
LATENTS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
SPARSE = {"experts": 4, "moe_ffn_hidden": 32, "first_dense_layers": 1, "shared_expert_ffn_hidden": 32}
config = Config(
    model=LatentConfig(**SIZES, **LATENTS, **SPARSE, router="sigmoid", router_bias_update_rate=1e-3),
    train=TrainConfig(steps=20, global_batch=8, micro_batch=1, recompute="selective"),
)
DIFFERENCES = {
    "fixed": {"kind": "latent", "router": "sigmoid"},
    "only": {**V3.only, "rope_interleave": False, "rope_scaling": None, "n_shared_experts": 1},
    "write": lambda model: {"first_k_dense_replace": model.first_dense_layers},  # the setting is not in the table
}
FAMILIES = (replace(V3, **DIFFERENCES),)
