"""The experts of a layer: every token is multiplied by the matrices of the experts that it chose, and by no others.

    x [t, h] ── router ── k experts and weights of each token
       │
     gather         every rank of `expert` sees the tokens of all of them, and has its own experts
       │
       f            every rank of `model` sees all tokens, and has a part of every expert's columns
       │
    dispatch        a row for each of the A = k · t assignments, sorted by expert (`parallel/grouped.py`)
       │
    A ⊙ B, C        three grouped products: act(x A_e) ⊙ x B_e, times the assignment's weight, times C_e
       │
    combine         the sum of a token's k rows
       │
       g            the sum over ranks of `model`
       │
     scatter        the sum over ranks of `expert`, each with its own tokens
       ▼
    y [t, h]

The weight multiplies before C_e, as in megatron-core, which is the same sum, and the rows after it need not be kept.

**Experts on several devices** (`--mesh.expert`). An all-to-all would send a token only to the ranks that have one of
its k experts, but a rank may have to take all tokens of all ranks: a buffer that can hold them is as large as that of
the gathered tokens, and a smaller one drops tokens. So tokens are gathered, and their results are summed by a
reduce-scatter: both are exact, and a token travels to all other ranks of `expert`, rather than to k at most. Where
experts fit on a device, leave `expert` at 1: nothing is sent then but weights and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from mjax.config.axes import EXPERT
from mjax.models.parts.config import ExpertsConfig
from mjax.models.parts.mlp import GatedMLP, apply_gate
from mjax.models.parts.router import Router, RouterOutput, Sums
from mjax.models.protocol import Context
from mjax.parallel import mappings
from mjax.parallel.autodiff import linear_call, optimization_barrier, rematerialize
from mjax.parallel.grouped import ROWS, Groups, assign_rows, grouped_matmul
from mjax.parallel.layers import normal_init
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import make_param


class Experts(nnx.Module):
    """E gated MLPs of which each token takes k, and a shared one that all take."""

    def __init__(self, key: Array, config: ExpertsConfig, dtype):
        router, up, down, shared = jax.random.split(key, 4)
        experts, width, hidden = config.experts, config.expert_width, config.hidden
        self.config, self.kernel = config, "xla" if config.moe_kernel == "auto" else config.moe_kernel
        self.router = Router(router, config, dtype)
        self.up = make_param(
            up, normal_init(config.init_std), (experts, hidden, 2, width), ("expert", "in", "part", "columns"), dtype
        )
        self.down = make_param(
            down, normal_init(config.residual_std), (experts, width, hidden), ("expert", "rows", "out"), dtype
        )
        if config.shared_expert_ffn_hidden:
            self.shared = GatedMLP(shared, config, dtype, config.shared_expert_ffn_hidden)

    def __call__(self, x: Float[Array, "t h"], context: Context) -> tuple[Float[Array, "t h"], Sums]:
        """The sum of the experts' results for this rank's rows, and what the router adds to the means of the model."""
        local = self.up[...].shape[0]
        region = ExpertRegion(context.tokens, self.config.experts // local, EXPERT in mappings.varying_axes(x))
        choice = self.router(x)
        rows, weights, experts = _enter(x, choice, region)
        rows_of_tile = ROWS.get(self.kernel, ROWS["pallas"])
        which = experts.reshape(-1) - region.rank * local
        groups, row_of = assign_rows(which, local, rows_of_tile, max_group_rows=region.count)
        sent = TokenPermutation(row_of.reshape(experts.shape), _sources(row_of, len(groups.of_tile) * groups.rows))
        y = region.leave(combine(self._apply_experts(dispatch(rows, sent), row_weights(weights, sent), groups), sent))
        if self.config.shared_expert_ffn_hidden:
            y, x = sequence_collectives(y, x, context.tokens.sequence_parallel)
            y = y + self.shared(x, context)
        y, sums = sequence_collectives(
            y, self.router.aux_loss_sums(choice, context.tokens), context.tokens.sequence_parallel
        )
        return y, self.router.sums(sums, context)

    def _apply_experts(
        self, x: Float[Array, "r h"], weights: Float[Array, " r"], groups: Groups
    ) -> Float[Array, "r h"]:
        """Each row's expert's result times its weight: this rank's part of a sum."""
        up = self.up[...]
        both = grouped_matmul(x, up.reshape(*up.shape[:2], -1), groups, self.kernel)
        both = checkpoint_name(both, "mlp_up").reshape(len(x), 2, -1)
        weighted = rematerialize(partial(_apply_weights, activation=self.config.activation))(both, weights)
        return grouped_matmul(weighted, self.down[...], groups, self.kernel)


@dataclass(frozen=True)
class ExpertRegion:
    """The region in which experts compute: the tokens of all ranks of `model`, and of `expert` if it splits the
    experts.

    Attributes:
      tokens: this replica's.
      ranks: of `expert`, with a part of the experts each; 1 if a rank has all.
      split: whether ranks of `expert` have different tokens, as in training; in generation they have the same.
    """

    tokens: TokenLayout
    ranks: int
    split: bool

    @property
    def count(self) -> int:
        """T, the tokens of all ranks together."""
        return self.tokens.num_tokens * (self.ranks if self.split else 1)

    @property
    def rank(self) -> Array | int:
        """This device's rank among those that have different experts."""
        return mappings.rank(EXPERT) if self.ranks > 1 else 0

    def enter(
        self, x: Float[Array, "t h"], weights: Float[Array, "t k"]
    ) -> tuple[Float[Array, "T h"], Float[Array, "T k"]]:
        """f of two arrays. With sequence parallelism each row crosses `expert` once, then `model`."""
        over_experts = mappings.all_gather_tokens if self.split else mappings.copy_to_region
        steps = [(partial(over_experts, axis=EXPERT), self.split)] if self.ranks > 1 else []
        for enter, waits in (*steps, (self.tokens.gather_rows, self.tokens.sequence_parallel)):
            x, weights = sequence_collectives(enter(x), weights, waits)
            weights, x = sequence_collectives(enter(weights), x, waits)
        return x, weights

    def leave(self, partial: Float[Array, "T h"]) -> Float[Array, "t h"]:
        """g: the sum of all ranks' partial results."""
        y = self.tokens.reduce_rows(partial)
        if self.ranks == 1:
            return y
        return mappings.reduce_scatter_tokens(y, EXPERT) if self.split else mappings.reduce_from_region(y, EXPERT)


def sequence_collectives(collected: Array, others, waits: bool) -> tuple:
    """The result of a collective, if it `waits`, and the operands of the next one, which then begins after it, and in
    the backward pass before it. Simulated devices may begin two that do not depend on each other in different orders,
    each of them waiting for the other one; a GPU runs them in the order of the program."""
    return optimization_barrier((collected, others)) if waits else (collected, others)


def _enter(
    x: Float[Array, "t h"], choice: RouterOutput, region: ExpertRegion
) -> tuple[Float[Array, "T h"], Float[Array, "T k"], Int[Array, "T k"]]:
    """f of the rows x, and of their weights and experts, which travel together."""
    routing = jnp.concatenate([choice.weights, choice.experts.astype(choice.weights.dtype)], axis=-1)
    x, routing = region.enter(x, routing)
    weights, experts = jnp.split(routing, 2, axis=-1)
    return x, weights, experts.astype(jnp.int32)


def _apply_weights(both: Float[Array, "r 2 f"], weights: Float[Array, " r"], activation: str) -> Float[Array, "r f"]:
    return (apply_gate(both, activation).astype(weights.dtype) * weights[:, None]).astype(both.dtype)


# --- Tokens to rows, and back -----------------------------------------------------------------------------------------
# Both ways and in both passes rows are looked up, never added where they meet: the sums over a token's experts have one
# order, and are in float32.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPermutation:
    """The places of assignments of tokens to experts among the rows of a grouped product.

    Attributes:
      rows: the row of each assignment; the number of rows for one without.
      sources: the assignment of each row, numbered token by token; t · k for rows that fill tiles.
    """

    rows: Int[Array, "t k"]
    sources: Int[Array, " r"]

    @property
    def tokens(self) -> Int[Array, " r"]:
        """The token of each row; t for rows that fill tiles."""
        return self.sources // self.rows.shape[1]


def _sources(row_of: Int[Array, " A"], rows: int) -> Int[Array, " {rows}"]:
    """The assignment in each of the rows."""
    none = jnp.full_like(row_of, row_of.size, shape=rows)
    return none.at[row_of].set(jnp.arange(row_of.size, dtype=row_of.dtype), mode="drop", unique_indices=True)


def dispatch(x: Float[Array, "t h"], sent: TokenPermutation) -> Float[Array, "r h"]:
    """The rows of the assignments, zeros in rows that fill tiles."""
    return linear_call(_take_tokens, _sum_rows, x, sent)


def combine(rows: Float[Array, "r h"], sent: TokenPermutation) -> Float[Array, "t h"]:
    """The sum of each token's rows, in float32 or wider."""
    return linear_call(_sum_rows, _take_tokens, rows, sent)


def row_weights(weights: Float[Array, "t k"], sent: TokenPermutation) -> Float[Array, " r"]:
    """The weight of each row, 0 for rows that fill tiles."""
    return linear_call(
        lambda weights, sent: _take_or_zero(weights.reshape(-1), sent.sources),
        lambda gradient, sent: _take_or_zero(gradient, sent.rows),
        weights,
        sent,
    )


def _take_tokens(x: Array, sent: TokenPermutation) -> Array:
    return _take_or_zero(x, sent.tokens)


def _sum_rows(rows: Array, sent: TokenPermutation) -> Array:
    wide = accumulation_dtype(rows.dtype)
    return sum(_take_or_zero(rows, each).astype(wide) for each in sent.rows.T).astype(rows.dtype)


def _take_or_zero(table: Shaped[Array, " rows *dims"], ids: Int[Array, "*ids"]) -> Shaped[Array, ...]:
    """table[ids], and zeros behind its end."""
    return table.at[ids].get(mode="fill", fill_value=0)
