"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): a mixture of experts with multi-head latent attention.

    x ─┬─ norm ─ latent attention ─ + ─┬─ norm ─ router ─ K of E experts, and a shared one ─ + ─▶
       └────────────────────────────┘  └─────────────────────────────────────────────────────┘

**Latent attention** (MLA; 2405.04434, section 2.1). Keys and values of all heads are computed from one narrow latent c
of a token, and a key that all heads share carries the position:

    c = norm(x A)  [r]      k = [c K_i, rope(x R)]      v = c V_i      q = [Q_i, rope(Q'_i)]      for head i

A and R are one matrix. With `q_lora_rank` the queries have a latent, too.

A cache stores c and rope(x R), r + d_r numbers a token instead of n (d + e). Decoding computes no key and no value of
earlier tokens: a score is (Q_i K_iᵀ) · c, and V_i multiplies the weighted sum of c.

**Multi-token prediction** (MTP; 2412.19437, section 2.2). In training one more layer reads the stream h after the last
norm and the embedding of the next token, and predicts the token after that, with the embedding and the head of the
model:

    h'_i = layer([norm(E(t_(i+1))), norm(h_i)] M)      P(t_(i+2)) = softmax(head(norm(h'_i)))

The coefficient of its loss is `mtp_loss_coef`. Generation ignores it.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Shaped

from mjax.models.block import Block, Sums, split_sums
from mjax.models.causal import Output
from mjax.models.decoding import attend_cached, write_cache
from mjax.models.deepseek.config import DeepSeekConfig
from mjax.models.mixture.model import Mixture
from mjax.models.parts.attention_kernels import attend_over_context, repeat_heads
from mjax.models.parts.config import EXPERTS
from mjax.models.parts.experts import Experts
from mjax.models.parts.mask import AttentionMask
from mjax.models.parts.mlp import GatedMLP
from mjax.models.parts.norms import RMSNorm
from mjax.models.parts.rotary import Rotary
from mjax.models.protocol import ForwardContext
from mjax.models.stack import SAVED
from mjax.parallel import mappings, random
from mjax.parallel.autodiff import start_after
from mjax.parallel.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from mjax.parallel.token_layout import TokenLayout

Latents = Float[Array, "b 1 S c"]  # the cache of a layer


@dataclass(frozen=True)
class NeighborRotary(Rotary):
    """Rotary positions of neighboring dims, as in DeepSeek's files; YaRN's magnitude is in the scale of the scores."""

    def apply_to_qk(
        self, q: Float[Array, "b s n d"], k: Float[Array, "b s k d"], context: ForwardContext
    ) -> tuple[Float[Array, "b s n d"], Float[Array, "b s k d"]]:
        # The same order of dims in queries and keys changes no score.
        q, k = (jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) for x in (q, k))
        return super().apply_to_qk(q, k, context)

    def magnitude(self) -> float:
        return 1.0


class LatentAttention(nnx.Module):
    """Multi-head latent attention with the heads split over `model`."""

    def __init__(self, key: Array, config: DeepSeekConfig, dtype):
        q_down, q_up, kv_down, kv_up, out = jax.random.split(key, 5)
        hidden, heads, std, rank = config.hidden, config.heads, config.init_std, config.q_lora_rank
        down = partial(ReplicatedLinear, width=hidden, std=std, dtype=dtype)
        up = partial(ColumnParallelLinear, split=0, std=std, dtype=dtype, bias=False)
        norm = partial(RMSNorm, epsilon=config.latent_norm_epsilon, dtype=dtype)
        self.config = config
        if rank is None:
            self.query = up(q_up, hidden, (heads, config.head_size))
        else:
            self.q_down, self.q_norm = down(q_down, out=rank), norm(rank)
            self.q_up = up(q_up, rank, (heads, config.head_size))
        self.kv_down = down(kv_down, out=config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_norm = norm(config.kv_lora_rank)
        self.kv_up = up(kv_up, config.kv_lora_rank, (heads, config.qk_nope_head_dim + config.v_head_dim))
        self.out = RowParallelLinear(out, (heads, config.v_head_dim), hidden, config.residual_std, dtype, bias=False)

    def __call__(self, x: Float[Array, "t h"], context: ForwardContext) -> Float[Array, "t h"]:
        return self._attend(*self._project(x, context), context)

    def empty_cache(self, sequences: int, slots: int, dtype) -> Latents:
        """Like `Block.empty_cache`: the latents and the keys that all heads share, the same on all ranks of `model`."""
        return jnp.zeros((sequences, 1, slots, self.config.kv_lora_rank + self.config.qk_rope_head_dim), dtype)

    def decode(
        self, x: Float[Array, "t h"], context: ForwardContext, cached: Latents, lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "t h"], Latents]:
        """Like `Block.decode`: no key or value of a cached position is computed."""
        config, tokens = self.config, context.tokens
        q, latent, shared_key = self._project(x, context)
        new = jnp.concatenate([tokens.split_sequences(latent)[:, :, None], shared_key], axis=-1)
        cached = write_cache(cached, new, lengths, context.slots)
        if context.slots is None:
            return self._attend(q, latent, shared_key, context), cached
        to_keys, to_values = jnp.split(self._kv_matrix(), [config.qk_nope_head_dim], axis=-1)
        q, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        q = jnp.concatenate([jnp.einsum("bsnd,rnd->bsnr", q, to_keys), q_rope], axis=-1)
        # The cache is the values, too: a slice of it would be copied for every token.
        attended = attend_cached(q, cached, cached, lengths, context.slots, self._mask(context))
        attended = jnp.einsum("bsnr,rne->bsne", attended[..., : config.kv_lora_rank], to_values)
        return self._project_out(attended, context), cached

    def _kv_matrix(self) -> Float[Array, "r n _"]:
        """The matrix from the latent to this rank's keys and values, with its adapter, if it has one."""
        if self.kv_up.adapter is None:
            return self.kv_up.kernel[...]
        rank = self.config.kv_lora_rank
        return self.kv_up(jnp.eye(rank, dtype=self.kv_up.kernel[...].dtype), TokenLayout(rank, 1))

    def _project(
        self, x: Float[Array, "t h"], context: ForwardContext
    ) -> tuple[Float[Array, "b s n d"], Float[Array, "t r"], Float[Array, "b s 1 d_r"]]:
        """Queries of this rank's heads, the latent of this rank's rows, and the rotated key that all heads share."""
        config, tokens, lora = self.config, context.tokens, context.layer_key(random.LORA_QKV)
        to_queries, narrow = (
            (self.query, x) if config.q_lora_rank is None else (self.q_up, self.q_norm(self.q_down(x, tokens, lora)))
        )
        q = to_queries(narrow, tokens, lora)
        q = tokens.split_sequences(checkpoint_name(q, "qkv"))
        latent, shared_key = jnp.split(self.kv_down(x, tokens, lora), [config.kv_lora_rank], axis=-1)
        shared_key = tokens.gather_rows(shared_key).reshape(tokens.sequences, tokens.positions, 1, -1)
        q, q_rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        scaling = config.rope_scaling, config.rope_factor, config.rope_original_length, config.rope_beta_fast
        rotary = NeighborRotary(config.qk_rope_head_dim, config.rope_theta, *scaling)
        q_rope, shared_key = rotary.apply_to_qk(q_rope, shared_key, context)
        return jnp.concatenate([q, q_rope], axis=-1), self.kv_norm(latent), shared_key

    def _attend(
        self, q: Float[Array, "b s n d"], latent: Float[Array, "t r"], shared_key: Array, context: ForwardContext
    ) -> Float[Array, "t h"]:
        """The output of attention over these positions, with keys and values computed from their latents."""
        config, tokens = self.config, context.tokens
        kv = self.kv_up(latent, tokens, context.layer_key(random.LORA_QKV))
        kv = tokens.split_sequences(checkpoint_name(kv, "qkv"))
        k, v = jnp.split(kv, [config.qk_nope_head_dim], axis=-1)
        k = jnp.concatenate([k, repeat_heads(shared_key, k.shape[2])], axis=-1)
        return self._project_out(attend_over_context(q, k, v, self._mask(context), config.attention, tokens), context)

    def _project_out(self, attended: Float[Array, "b s n e"], context: ForwardContext) -> Float[Array, "t h"]:
        attended = attended.reshape(context.tokens.num_tokens, *attended.shape[2:])
        return self.out(checkpoint_name(attended, "attended"), context.tokens, context.layer_key(random.LORA_OUT))

    def _mask(self, context: ForwardContext) -> AttentionMask:
        return AttentionMask(scale=self.config.attention_scale, documents=context.documents)


def deepseek_layer(key: Array, config: DeepSeekConfig, dtype, mlp: type[nnx.Module] = GatedMLP) -> Block:
    """One layer, with an MLP of this kind."""
    attention, other = jax.random.split(key)
    norm = partial(RMSNorm, config.hidden, config.norm_epsilon, dtype)
    return Block(norm(), LatentAttention(attention, config, dtype), norm(), mlp(other, config, dtype))


class NextPrediction(nnx.Module):
    """The layer of multi-token prediction. Its activations are recomputed, because memory peaks at the logits."""

    def __init__(self, key: Array, config: DeepSeekConfig, dtype):
        projection, block = jax.random.split(key)
        norm = partial(RMSNorm, config.hidden, config.norm_epsilon, dtype)
        self.embedding_norm, self.hidden_norm, self.final_norm = norm(), norm(), norm()
        self.projection = ReplicatedLinear(projection, 2 * config.hidden, config.hidden, config.init_std, dtype)
        self.block = deepseek_layer(block, config, dtype, Experts)

    def __call__(
        self, embedded: Float[Array, "t h"], x: Float[Array, "t h"], context: ForwardContext
    ) -> tuple[Float[Array, "t h"], Sums]:
        """The input of the head, and the sums of the block, from the embedding of the next token and the stream."""
        both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(x)], axis=-1)
        y = self.projection(both, context.tokens)
        policy = jax.checkpoint_policies.save_only_these_names(*SAVED["full"])
        y, sums = jax.checkpoint(lambda block, y: split_sums(block(y, context)), policy=policy)(self.block, y)
        return self.final_norm(y), sums


class DeepSeek(Mixture):
    """A decoder-only mixture of experts with latent attention, and in training multi-token prediction."""

    layers: ClassVar = {"": deepseek_layer, EXPERTS: partial(deepseek_layer, mlp=Experts)}

    def __init__(self, key: Array, config: DeepSeekConfig, dtype=jnp.float32):
        super().__init__(key, config, dtype)
        if config.mtp_layers:
            self.mtp = NextPrediction(jax.random.fold_in(key, 1), config, dtype)
            self.loss_weights = self.loss_weights | {"mtp_loss": config.mtp_loss_coef}

    def counts(self, batch: dict[str, Array]) -> dict[str, Array | int]:
        counts = super().counts(batch)
        if self.config.mtp_layers:
            has_label = _has_mtp_label(batch)
            first = mappings.mask_to_first_context_rank(has_label[:, 0])  # no token is two before the second one
            counts["mtp_loss"] = has_label.sum(dtype=jnp.int32) - first.sum(dtype=jnp.int32)
        return counts

    def loss(self, x: Float[Array, "t h"], batch: dict[str, Array], context: ForwardContext) -> dict[str, Array]:
        sums = super().loss(x, batch, context)
        if not self.config.mtp_layers:
            return sums
        batch = start_after(sums["loss"], batch)
        # Not the labels, which a mask makes arbitrary; but after the last position there is no other.
        next_tokens = _shift(batch["tokens"], context.tokens, context.tokens.gather_positions(batch["labels"])[:, -1])
        embedded = self.embedding(next_tokens, context.tokens)
        layer = self.config.layers + self.config.moe_layer_freq  # the next one that would have experts
        y, block_sums = self.mtp(embedded, self.final_norm(x), context.with_layer(layer))
        labels, has_label = (_shift(values, context.tokens) for values in (batch["labels"], _has_mtp_label(batch)))
        losses = Output(self.head, y).cross_entropy(labels, context)
        return sums | block_sums | {"mtp_loss": losses.sum(where=has_label.reshape(-1))}

    def adjustments(self, means: dict[str, Array]) -> dict[str, Array]:
        adjustments = super().adjustments(means)
        if not (adjustments and self.config.mtp_layers):
            return adjustments
        ((name, steps),) = adjustments.items()
        return {name: steps[:-1], "mtp.block.mlp.router.bias": steps[-1]}


def _has_mtp_label(batch: dict[str, Array]) -> Bool[Array, "b s"]:
    """True for each label that is in the loss mask and, but for the first one, in the document of the token two
    before it."""
    has_label = batch.get("loss_mask", batch["labels"] >= 0)
    return has_label & (batch["positions"] > 0) if "positions" in batch else has_label


def _shift(values: Shaped[Array, "b s"], tokens: TokenLayout, last: Shaped[Array, " b"] | int = 0) -> Array:
    """For each of this rank's positions the value of the next one; at the end `last`."""
    values = jnp.roll(tokens.gather_positions(values), -1, axis=1).at[:, -1].set(jnp.asarray(last, values.dtype))
    return values[:, tokens.position_ids()]
