"""The router of a mixture of experts: which experts a token takes, with which weights, and how evenly they are used.

    scores l = x R [t, E], in float32 whatever the compute dtype
    softmax     p = softmax(l)                 the k best of p           Mixtral, Qwen 3 MoE, OLMoE
    sigmoid     p = σ(l)                       the k best of p           DeepSeek-V3 (arXiv 2412.19437, section 2.1.2)

The weights are those p, divided by their sum if `router_normalized`, times `router_scale`. A softmax over the k best
scores is the same as a softmax over all, divided by the sum of those k. With `router_bias_update_rate` experts, and
groups of experts, are chosen by p + bias; the weights are still those of p.

Nothing is dropped: an expert takes all tokens that chose it. So a token's result depends on that token alone, not on
those beside it, which a capacity would make it depend on.

**Losses.** Experts that are chosen more often learn more and are chosen more often still. The balance loss
E · Σ f P (arXiv 2101.03961, section 2.2) compares the share f of assignments with the mean probability P; 1 if all are
equal. It is not a sum over tokens but one of products of two means, so the tokens that are compared matter: those of a
sequence here (DeepSeek-V3, section 2.1.2), the same on every mesh; those of a micro-batch in Megatron; those of all
layers in `transformers`.

**Bias.** A loss that balances also pulls at what is learned. `router_bias_update_rate` balances without one (arXiv
2408.15664; DeepSeek-V3, section 2.1.2): after each step the bias of an expert grows by that rate if it had fewer tokens
than the mean of its layer, and falls by it if more. The tokens are those of the whole batch, and their numbers are
exact, so the bias is the same on every mesh.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int

from mjax.config.axes import CONTEXT
from mjax.models.parts.config import ExpertsConfig
from mjax.models.protocol import Context
from mjax.parallel import mappings
from mjax.parallel.layers import normal_init
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import make_param

Sums = dict[str, Array]


class RouterOutput(NamedTuple):
    """The router's result for rows of the stream.

    Attributes:
      experts: from 0.
      weights: float32 or wider, like the others.
      scores: before softmax or sigmoid.
      probabilities: of every expert, with sum 1.
    """

    experts: Int[Array, "t k"]
    weights: Float[Array, "t k"]
    scores: Float[Array, "t E"]
    probabilities: Float[Array, "t E"]


class Router(nnx.Module):
    """Score and choose experts. The weight [h, E] is replicated, and so is the bias [E], without gradient and weight
    decay, in the master weights' dtype: `Mixture.adjustments` moves it."""

    def __init__(self, key: Array, config: ExpertsConfig, dtype):
        self.config = config
        shape, dims = (config.hidden, config.experts), ("in", "out")
        self.kernel = make_param(key, normal_init(config.init_std), shape, dims, dtype, muon=False, keep_fp32=True)
        if config.router_bias_update_rate:
            self.bias = make_param(key, jax.nn.initializers.zeros, (config.experts,), ("out",), dtype, keep_fp32=True)

    def __call__(self, x: Float[Array, "t h"]) -> RouterOutput:
        config, wide = self.config, accumulation_dtype(x.dtype)
        kernel = self.kernel[...].astype(wide)
        scores = jnp.dot(x.astype(wide), kernel, precision=jax.lax.Precision.HIGHEST)
        affinities = jax.nn.softmax(scores) if config.router == "softmax" else jax.nn.sigmoid(scores)
        # Kept whatever is recomputed: a score that differs in its last bit could choose another expert.
        preferred = affinities + self.bias[...].astype(wide) if config.router_bias_update_rate else affinities
        experts = checkpoint_name(self._best(jax.lax.stop_gradient(preferred)), "experts")
        weights = jnp.take_along_axis(affinities, experts, axis=-1)
        if config.router_normalized:
            weights = weights / _min_float32(weights.sum(-1, keepdims=True))
        probabilities = (
            affinities if config.router == "softmax" else affinities / _min_float32(affinities.sum(-1, keepdims=True))
        )
        return RouterOutput(experts, weights * config.router_scale, scores, probabilities)

    def _best(self, affinities: Float[Array, "t E"]) -> Int[Array, "t k"]:
        """The k best experts of each row, in order; of equal ones the first."""
        config = self.config
        if config.top_groups < config.router_n_groups:
            groups = affinities.reshape(len(affinities), config.router_n_groups, -1)
            two_best = jax.lax.top_k(groups, 2)[0].sum(-1)
            chosen = jax.nn.one_hot(jax.lax.top_k(two_best, config.top_groups)[1], config.router_n_groups).sum(1)
            affinities = jnp.where(chosen[..., None] > 0, groups, -jnp.inf).reshape(affinities.shape)
        return jax.lax.top_k(affinities, config.experts_per_token)[1].astype(jnp.int32)

    def aux_loss_sums(self, choice: RouterOutput, tokens: TokenLayout) -> Sums:
        """Sums over this rank's rows, of which `sums` makes the layer's losses and metrics."""
        config, scores = self.config, choice.scores
        chosen = jax.nn.one_hot(choice.experts, config.experts, dtype=scores.dtype).sum(1)  # [t, E]
        entropy = -(choice.probabilities * jnp.log(_min_float32(choice.probabilities))).sum()
        sums = {"router_entropy": jax.lax.stop_gradient(entropy), "expert_load": chosen.sum(0)}
        if config.z_loss:
            sums["z_loss"] = jnp.square(jax.nn.logsumexp(scores, axis=-1)).sum()
        if config.aux_loss_coef:
            of_compared = _sum_by_sequence if config.aux_loss_scope == "sequence" else lambda rows, _: rows.sum(0)
            sums |= {"used": of_compared(chosen, tokens), "given": of_compared(choice.probabilities, tokens)}
        return sums

    def sums(self, of_rows: Sums, context: Context) -> Sums:
        """The sums that a layer adds to the means of the model: its losses and the tokens of each expert, in
        this layer's row of [l, E], of the l layers with experts."""
        config, sums = self.config, _reduce_sums(of_rows, context.tokens)
        moe_layer = (context.layer - config.first_dense_layers) // config.moe_layer_freq - 1
        here = jnp.arange(config.expert_layers)[:, None] == moe_layer
        sums["expert_load"] = jnp.where(here, sums["expert_load"], 0)
        if self.config.aux_loss_coef:
            sums |= self._balance(sums.pop("used"), sums.pop("given"), context.tokens)
        return sums

    def _balance(self, used: Float[Array, "*b E"], given: Float[Array, "*b E"], tokens: TokenLayout) -> Sums:
        """The balance loss of the assignments and the probabilities of each expert, by sequence or of all."""
        config = self.config
        if tokens.context_attention:  # of whole sequences
            used, given = mappings.reduce_from_region(jnp.stack([used, given]), CONTEXT)
        compared = tokens.global_positions * (1 if config.aux_loss_scope == "sequence" else tokens.sequences)
        products = mappings.mask_to_first_context_rank(
            (used * given).sum() * config.experts / (config.experts_per_token * compared**2)
        )
        return {"balance_loss": products if config.aux_loss_scope == "sequence" else products * tokens.sequences}


def bias_update_sign(load: Float[Array, "l E"]) -> Int[Array, "l E"]:
    """The sign of each expert's adjustment: 1 if it had fewer tokens than the mean of its layer, -1 if more, 0 if as
    many, from its tokens, which are whole numbers in a float dtype. In integers, so that a tie is one in any order of
    sums."""
    load = jnp.round(load).astype(jnp.int32)
    mean, rest = jnp.divmod(load.sum(-1, keepdims=True), load.shape[-1])
    return jnp.where(load == mean, jnp.sign(rest), jnp.sign(mean - load))


def _min_float32(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


def _reduce_sums(sums: Sums, tokens: TokenLayout) -> Sums:
    """Sums over this rank's rows, as those over all of them, replicated over `model`: in one collective."""
    if not tokens.sequence_parallel:
        return sums
    flat, back = ravel_pytree(sums)
    return back(mappings.reduce_from_region(flat))


def _sum_by_sequence(rows: Float[Array, "t E"], tokens: TokenLayout) -> Float[Array, "b E"]:
    """The sums over this rank's tokens of each sequence."""
    if not tokens.sequence_parallel:
        return tokens.split_sequences(rows).sum(1)
    sequences = tokens.local_rows(jnp.arange(tokens.num_tokens) // tokens.positions)
    nothing = mappings.vary(jnp.zeros((tokens.sequences, *rows.shape[1:]), rows.dtype), mappings.varying_axes(rows))
    return nothing.at[sequences].add(rows)
