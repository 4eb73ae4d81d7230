"""The experts of a layer: every token is multiplied by the matrices of the experts that it chose, and by no others.

    x [b·s, h] ── router ── K experts and weights of each token
       │
     gather         every rank of `expert` has the tokens of all ranks, and a part of the experts
       │
       f            every rank of `model` has all tokens, and a part of every expert's columns
       │
    dispatch        a row for each of the A = K · b·s assignments, sorted by expert (`parallel/grouped.py`)
       │
    A ⊙ B, C        three grouped matmuls: act(x A_e) ⊙ x B_e, times the assignment's weight, times C_e
       │
    combine         the sum of a token's K rows
       │
       g            the sum over ranks of `model`
       │
     scatter        the sum over ranks of `expert`, each with its part of the tokens
       ▼
    y [b·s, h]

The weight multiplies before C_e, as in megatron-core, which is the same sum, and the rows after it need not be saved.

**Experts on several devices** (`--mesh.expert`). An all-to-all would send a token only to the ranks that hold one of
its K experts, but in the worst case one rank receives all tokens of all ranks. A buffer for this case is as large as
the gathered tokens, and a smaller one drops tokens. So tokens are gathered, and their results are summed by a
reduce-scatter: both are exact, and a token is sent to all other ranks of `expert`, rather than to K at most. Where
experts fit on a device, leave `expert` at 1: only weights and their gradients are sent then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from mjax.config import axes
from mjax.models.parts.config import ExpertsConfig
from mjax.models.parts.mlp import GatedMLP, apply_gate
from mjax.models.parts.router import Router, RouterOutput, Sums
from mjax.models.protocol import ForwardContext
from mjax.parallel import mappings
from mjax.parallel.autodiff import linear_call, optimization_barrier, rematerialize
from mjax.parallel.grouped import TILE_ROWS, Groups, assign_rows, grouped_matmul
from mjax.parallel.layers import normal_init
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import COLUMNS, EXPERT, IN, OUT, PART, ROWS, make_param


class Experts(nnx.Module):
    """E gated MLPs, K of them per token, and a shared MLP for all tokens."""

    def __init__(self, key: Array, config: ExpertsConfig, dtype):
        router, up, down, shared = jax.random.split(key, 4)
        experts, width, hidden = config.experts, config.expert_width, config.hidden
        self.config, self.kernel = config, "xla" if config.moe_kernel == "auto" else config.moe_kernel
        self.router = Router(router, config, dtype)
        init, down_init = normal_init(config.init_std), normal_init(config.residual_std)
        self.up = make_param(up, init, (experts, hidden, 2, width), (EXPERT, IN, PART, COLUMNS), dtype)
        self.down = make_param(down, down_init, (experts, width, hidden), (EXPERT, ROWS, OUT), dtype, residual=True)
        if config.shared_expert_ffn_hidden:
            self.shared = GatedMLP(shared, config, dtype, config.shared_expert_ffn_hidden)

    def __call__(self, x: Float[Array, "t h"], context: ForwardContext) -> tuple[Float[Array, "t h"], Sums]:
        """The sum of the experts' results for this rank's rows, and the router's sums of losses and metrics."""
        local, tokens = self.up[...].shape[0], context.tokens
        region = ExpertRegion(tokens, self.config.experts // local, axes.EXPERT in mappings.varying_axes(x))
        routing = self.router(x)
        rows, weights, experts = _gather_routed(x, routing, region)
        tile = TILE_ROWS.get(self.kernel, TILE_ROWS["pallas"])
        local_experts = experts.reshape(-1) - region.rank * local
        groups, rows_of = assign_rows(local_experts, local, tile, max_group_rows=region.num_tokens)
        order = TokenPermutation(rows_of.reshape(experts.shape), _sources(rows_of, len(groups.of_tile) * groups.rows))
        outputs = self._apply_experts(dispatch(rows, order), row_weights(weights, order), groups)
        y = region.reduce_rows(combine(outputs, order))
        if self.config.shared_expert_ffn_hidden:
            y, x = sequence_collectives(y, x, tokens.sequence_parallel)
            y = y + self.shared(x, context)
        sums = self.router.aux_loss_sums(routing, tokens)
        y, sums = sequence_collectives(y, sums, tokens.sequence_parallel)
        return y, self.router.layer_sums(sums, context)

    def _apply_experts(
        self, x: Float[Array, "r h"], weights: Float[Array, " r"], groups: Groups
    ) -> Float[Array, "r h"]:
        """The result of each row's expert times the row's weight: this rank's part of a sum."""
        up = self.up[...]
        gate_up = grouped_matmul(x, up.reshape(*up.shape[:2], -1), groups, self.kernel)
        gate_up = checkpoint_name(gate_up, "mlp_up").reshape(len(x), 2, -1)
        weighted = rematerialize(partial(_apply_weights, activation=self.config.activation))(gate_up, weights)
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
    def num_tokens(self) -> int:
        """T, the tokens of all ranks together."""
        return self.tokens.num_tokens * (self.ranks if self.split else 1)

    @property
    def rank(self) -> Array | int:
        """This device's rank among those that have different experts."""
        return mappings.rank(axes.EXPERT) if self.ranks > 1 else 0

    def gather_rows(
        self, x: Float[Array, "t h"], weights: Float[Array, "t k"]
    ) -> tuple[Float[Array, "T h"], Float[Array, "T k"]]:
        """f of two arrays. With sequence parallelism each row is sent over `expert` once, then over `model`."""
        over_experts = mappings.all_gather_tokens if self.split else mappings.copy_to_region
        steps = [(partial(over_experts, axis=axes.EXPERT), self.split)] if self.ranks > 1 else []
        for gather, waits in (*steps, (self.tokens.gather_rows, self.tokens.sequence_parallel)):
            x, weights = sequence_collectives(gather(x), weights, waits)
            weights, x = sequence_collectives(gather(weights), x, waits)
        return x, weights

    def reduce_rows(self, partial: Float[Array, "T h"]) -> Float[Array, "t h"]:
        """g: the sum of all ranks' partial results."""
        y = self.tokens.reduce_rows(partial)
        if self.ranks == 1:
            return y
        return (mappings.reduce_scatter_tokens if self.split else mappings.reduce_from_region)(y, axes.EXPERT)


def sequence_collectives(result: Array, operands, waits: bool) -> tuple:
    """The result of a collective, if it `waits`, and the operands of the next one, which then begins after it, and in
    the backward pass before it. Simulated devices may begin two independent collectives in different orders, and then
    wait for each other forever; a GPU runs them in the order of the program."""
    return optimization_barrier((result, operands)) if waits else (result, operands)


def _gather_routed(
    x: Float[Array, "t h"], routing: RouterOutput, region: ExpertRegion
) -> tuple[Float[Array, "T h"], Float[Array, "T k"], Int[Array, "T k"]]:
    """f of the rows x, and of their weights and experts in one array."""
    packed = jnp.concatenate([routing.weights, routing.experts.astype(routing.weights.dtype)], axis=-1)
    x, packed = region.gather_rows(x, packed)
    weights, experts = jnp.split(packed, 2, axis=-1)
    return x, weights, experts.astype(jnp.int32)


def _apply_weights(x: Float[Array, "r 2 f"], weights: Float[Array, " r"], activation: str) -> Float[Array, "r f"]:
    return (apply_gate(x, activation).astype(weights.dtype) * weights[:, None]).astype(x.dtype)


# --- Tokens to rows, and back -----------------------------------------------------------------------------------------
# In both directions and both passes rows are looked up, never scatter-added: the sums over a token's experts have one
# order, and are in float32.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenPermutation:
    """The rows of assignments of tokens to experts in a grouped matmul.

    Attributes:
      rows: the row of each assignment; the number of rows for one without.
      sources: the assignment of each row, numbered token by token; b·s · K for rows that fill tiles.
    """

    rows: Int[Array, "t k"]
    sources: Int[Array, " r"]

    @property
    def tokens(self) -> Int[Array, " r"]:
        """The token of each row; b·s for rows that fill tiles."""
        return self.sources // self.rows.shape[1]


def _sources(rows_of: Int[Array, " A"], rows: int) -> Int[Array, " {rows}"]:
    """The assignment in each of the rows, from the row of each assignment."""
    none = jnp.full_like(rows_of, rows_of.size, shape=rows)
    return none.at[rows_of].set(jnp.arange(rows_of.size, dtype=rows_of.dtype), mode="drop", unique_indices=True)


def dispatch(x: Float[Array, "t h"], order: TokenPermutation) -> Float[Array, "r h"]:
    """The rows of the assignments, zeros in rows that fill tiles."""
    return linear_call(_take_tokens, _sum_rows, x, order)


def combine(rows: Float[Array, "r h"], order: TokenPermutation) -> Float[Array, "t h"]:
    """The sum of each token's rows, in float32 or wider."""
    return linear_call(_sum_rows, _take_tokens, rows, order)


def row_weights(weights: Float[Array, "t k"], order: TokenPermutation) -> Float[Array, " r"]:
    """The weight of each row, 0 for rows that fill tiles."""
    return linear_call(
        lambda weights, order: _take_or_zero(weights.reshape(-1), order.sources),
        lambda gradient, order: _take_or_zero(gradient, order.rows),
        weights,
        order,
    )


def _take_tokens(x: Array, order: TokenPermutation) -> Array:
    return _take_or_zero(x, order.tokens)


def _sum_rows(rows: Array, order: TokenPermutation) -> Array:
    wide = accumulation_dtype(rows.dtype)
    return sum(_take_or_zero(rows, ids).astype(wide) for ids in order.rows.T).astype(rows.dtype)


def _take_or_zero(table: Shaped[Array, " rows *dims"], ids: Int[Array, "*ids"]) -> Shaped[Array, ...]:
    """table[ids], and zeros past its end."""
    return table.at[ids].get(mode="fill", fill_value=0)
