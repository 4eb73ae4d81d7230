"""The router of a mixture of experts: the experts of a token, their weights, and the losses that balance them.

    scores l = x R [b·s, E], in float32 whatever the compute dtype
    softmax     w = softmax(l)                 the K best of w           Mixtral, Qwen 3 MoE, OLMoE
    sigmoid     w = σ(l)                       the K best of w           DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)

The weights are w, divided by their sum if `router_normalized`, times `router_scale`. A softmax over the K best
scores is the same as a softmax over all, divided by the sum of those K. With `router_bias_update_rate` experts, and
groups of experts, are chosen by w + bias; the weights still come from w.

No token is dropped: an expert computes all tokens that chose it. So a token's result does not depend on the other
tokens of the batch, as it does with a capacity.

**Losses.** Experts that are chosen more often learn more and are chosen more often still. The balance loss E · Σ f P
(arXiv 2101.03961, section 2.2) compares the share f of assignments with the mean probability P; 1 if all are equal. It
is a sum of products of two means, not a sum over tokens, so it depends on the tokens in the means. Here these are one
sequence's tokens (DeepSeek-V3, section 2.1.2), the same on every mesh. Megatron uses the micro-batch, `transformers`
all layers.

**Bias.** A loss that balances experts also changes the model. `router_bias_update_rate` balances without one (arXiv
2408.15664; DeepSeek-V3, section 2.1.2). After each step the bias of an expert grows by that rate if its load was below
its layer's mean, and falls by it if above. Loads are exact token counts over the whole batch, so the bias is the same
on every mesh.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from mjax.config.axes import CONTEXT
from mjax.models.parts.config import ExpertsConfig
from mjax.models.protocol import ForwardContext
from mjax.parallel import mappings
from mjax.parallel.layers import normal_init
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import CLASS, IN, make_param

Sums = dict[str, Array]


class RouterOutput(NamedTuple):
    """The router's result for rows of the residual stream.

    Attributes:
      experts: the k best, from 0.
      weights: of these experts, float32 or wider, like the other arrays.
      scores: before softmax or sigmoid.
      probabilities: of every expert, with sum 1.
    """

    experts: Int[Array, "t k"]
    weights: Float[Array, "t k"]
    scores: Float[Array, "t E"]
    probabilities: Float[Array, "t E"]


class Router(nnx.Module):
    """Score and choose experts. The weight [h, E] and the bias [E] are replicated. The bias has no gradient and no
    weight decay and is in the master weights' dtype: `Mixture.adjustments` moves it."""

    def __init__(self, key: Array, config: ExpertsConfig, dtype):
        self.config = config
        shape, init = (config.hidden, config.experts), normal_init(config.init_std)
        self.kernel = make_param(key, init, shape, (IN, CLASS), dtype, muon=False, keep_fp32=True)
        if config.has_router_bias:
            self.bias = make_param(key, jax.nn.initializers.zeros, (config.experts,), (CLASS,), dtype, keep_fp32=True)

    def __call__(self, x: Float[Array, "t h"]) -> RouterOutput:
        config, wide = self.config, accumulation_dtype(x.dtype)
        kernel = self.kernel[...].astype(wide)
        scores = jnp.dot(x.astype(wide), kernel, precision=jax.lax.Precision.HIGHEST)
        affinities = jax.nn.softmax(scores) if config.router == "softmax" else jax.nn.sigmoid(scores)
        # Saved in every mode of recomputation: a score that differs in its last bit could choose another expert.
        biased = affinities + self.bias[...].astype(wide) if config.has_router_bias else affinities
        experts = checkpoint_name(self._choose_experts(jax.lax.stop_gradient(biased)), "experts")
        weights = jnp.take_along_axis(affinities, experts, axis=-1)
        if config.router_normalized:
            weights = weights / _clamp_to_tiny(weights.sum(-1, keepdims=True))
        probabilities = affinities
        if config.router != "softmax":
            probabilities = affinities / _clamp_to_tiny(affinities.sum(-1, keepdims=True))
        return RouterOutput(experts, weights * config.router_scale, scores, probabilities)

    def _choose_experts(self, affinities: Float[Array, "t E"]) -> Int[Array, "t k"]:
        """The K best experts of each row, in order; of equal ones the first."""
        config = self.config
        if config.top_groups < config.router_n_groups:
            groups = affinities.reshape(len(affinities), config.router_n_groups, -1)
            group_scores = jax.lax.top_k(groups, config.router_group_best)[0].sum(-1)
            chosen = jax.nn.one_hot(jax.lax.top_k(group_scores, config.top_groups)[1], config.router_n_groups).sum(1)
            affinities = jnp.where(chosen[..., None] > 0, groups, -jnp.inf).reshape(affinities.shape)
        return jax.lax.top_k(affinities, config.experts_per_token)[1].astype(jnp.int32)

    def aux_loss_sums(self, routing: RouterOutput, tokens: TokenLayout) -> Sums:
        """Sums over this rank's rows, from which `layer_sums` computes the layer's losses and metrics."""
        config, scores = self.config, routing.scores
        chosen = jax.nn.one_hot(routing.experts, config.experts, dtype=scores.dtype).sum(1)  # [b·s, E]
        entropy = -(routing.probabilities * jnp.log(_clamp_to_tiny(routing.probabilities))).sum()
        sums = {"router_entropy": jax.lax.stop_gradient(entropy), "expert_load": chosen.sum(0)}
        if config.z_loss:
            sums["z_loss"] = jnp.square(jax.nn.logsumexp(scores, axis=-1)).sum()
        if config.aux_loss_coef:
            sum_rows = _sum_by_sequence if config.aux_loss_scope == "sequence" else lambda rows, _: rows.sum(0)
            sums["balance"] = jnp.stack([sum_rows(rows, tokens) for rows in (chosen, routing.probabilities)])
        return sums

    def layer_sums(self, rank_sums: Sums, context: ForwardContext) -> Sums:
        """The sums that a layer adds to the means of the model: its losses and the tokens of each expert, in
        this layer's row of [l, E], of the l layers with experts."""
        config, sums = self.config, _reduce_sums(rank_sums, context.tokens)
        moe_layer = (context.layer - config.first_dense_layers) // config.moe_layer_freq - 1
        is_this_layer = jnp.arange(config.routers)[:, None] == moe_layer
        sums["expert_load"] = jnp.where(is_this_layer, sums["expert_load"], 0)
        if config.aux_loss_coef:
            sums["balance_loss"] = self._balance_loss(sums.pop("balance"), context.tokens)
        return sums

    def _balance_loss(self, sums: Float[Array, "2 *b E"], tokens: TokenLayout) -> Float[Array, ""]:
        """The balance loss from the assignments and the probabilities of each expert, by sequence or of all tokens."""
        config, by_sequence = self.config, self.config.aux_loss_scope == "sequence"
        # Of whole sequences.
        assignments, probabilities = mappings.reduce_from_region(sums, CONTEXT) if tokens.context_attention else sums
        count = tokens.global_positions * (1 if by_sequence else tokens.sequences)
        loss = (assignments * probabilities).sum() * config.experts / (config.experts_per_token * count**2)
        loss = mappings.mask_to_first_context_rank(loss)
        return loss if by_sequence else loss * tokens.sequences


def bias_update_sign(load: Float[Array, "l E"]) -> Int[Array, "l E"]:
    """The sign of each expert's adjustment: 1 if it had fewer tokens than the mean of its layer, -1 if more, 0 if
    equal. Tokens are whole numbers in a float dtype; compared as integers, so that a tie does not depend on the order
    of sums."""
    load = jnp.round(load).astype(jnp.int32)
    mean, rest = jnp.divmod(load.sum(-1, keepdims=True), load.shape[-1])
    return jnp.where(load == mean, jnp.sign(rest), jnp.sign(mean - load))


def _clamp_to_tiny(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


def _reduce_sums(sums: Sums, tokens: TokenLayout) -> Sums:
    """Reduce sums over this rank's rows to sums over all rows, replicated over `model`, in one collective."""
    if not tokens.sequence_parallel:
        return sums
    flat, unravel = ravel_pytree(sums)
    return unravel(mappings.reduce_from_region(flat))


def _sum_by_sequence(rows: Float[Array, "t E"], tokens: TokenLayout) -> Float[Array, "b E"]:
    """The sums over this rank's tokens of each sequence."""
    if not tokens.sequence_parallel:
        return tokens.split_sequences(rows).sum(1)
    sequences = tokens.local_rows(jnp.arange(tokens.num_tokens) // tokens.positions)
    zeros = mappings.vary(jnp.zeros((tokens.sequences, *rows.shape[1:]), rows.dtype), mappings.varying_axes(rows))
    return zeros.at[sequences].add(rows)
