"""The experts of a layer: every token is multiplied by the matrices of the experts that it chose, and by no others.

    x [b·s, h] ── router ── K experts and weights of each token
       │
     gather         every rank of `expert` has the tokens of all ranks, or only of its experts, and a part of these
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
     scatter        the sum over ranks of `expert`, each with its part of the tokens, or an all-to-all back
       ▼
    y [b·s, h]

The weight multiplies before C_e, as in megatron-core, which is the same sum, and the rows after it need not be saved.

**Experts on several devices** (`--mesh.expert`). Gathered tokens reach all ranks of `expert`. An all-to-all sends a
token only to the ranks of its experts, but in the worst case one rank receives all tokens of all ranks. A buffer for
this case is as large as the gathered tokens, and a smaller one drops tokens. So the all-to-all has rounds, each with
`ExpertsConfig.dispatch_capacity` rows for each rank, as many as the fullest rank needs: exact, with the same memory for
every router, and one round if it is balanced. Where experts fit on a device, leave `expert` at 1: only weights and
their gradients are sent then. Megatron's names (core/transformer/moe/token_dispatcher.py, 0.19), whose all-to-all has
buffers for the worst case.
"""

from __future__ import annotations

from collections.abc import Callable
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
from mjax.parallel.autodiff import linear_call, match_varying_axes, optimization_barrier, rematerialize, sum_rounds
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
        kernels, tokens = (self.up[...], self.down[...]), context.tokens
        ranks, routing = self.config.experts // len(kernels[0]), self.router(x)
        way = self.config.token_dispatcher(ranks) if axes.EXPERT in mappings.varying_axes(x) else "replicated"
        region = ExpertRegion(tokens, ranks, way)
        sums = self.router.aux_loss_sums(routing, tokens)
        if way == "alltoall":
            y, rounds = self._compute_in_rounds(kernels, x, routing, region)
            sums["dispatch_rounds"] = (rounds * len(x)).astype(routing.weights.dtype)
        else:
            y = self._compute(kernels, x, routing.weights, routing.experts, region)
        if self.config.shared_expert_ffn_hidden:
            y, x = sequence_collectives(y, x, tokens.sequence_parallel)
            y = y + self.shared(x, context)
        y, sums = sequence_collectives(y, sums, tokens.sequence_parallel)
        return y, self.router.layer_sums(sums, context)

    def _compute_in_rounds(
        self, kernels: tuple[Array, Array], x: Float[Array, "t h"], routing: RouterOutput, region: ExpertRegion
    ) -> tuple[Float[Array, "t h"], Int[Array, ""]]:
        """The sum of the experts' results, with at most `dispatch_capacity` rows for each rank in a round; and the
        number of rounds."""
        experts, capacity = routing.experts, self.config.dispatch_capacity(len(x), region.ranks)
        rank_of = experts // len(kernels[0])
        slots, slot = assign_rows(rank_of.reshape(-1), region.ranks, capacity)  # for each rank a tile in each round
        slot = slot.reshape(experts.shape) - slots.first[rank_of] * capacity
        round_of, row = slot // capacity, rank_of * capacity + slot % capacity
        ranks_in_step = tuple(sorted({axes.EXPERT, axes.MODEL} & mappings.varying_axes(x)))
        rounds = mappings.pmax(slots.tiles.max(), ranks_in_step)
        x, rounds = optimization_barrier(match_varying_axes(x, rounds))

        def compute_round(number, differentiable, constants):
            (kernels, x, weights), (experts, round_of, row) = differentiable, constants
            none = region.ranks * capacity
            order = TokenPermutation.from_rows(jnp.where(round_of == number, row, none), none)
            chosen = experts.reshape(-1).at[order.sources].get(mode="fill", fill_value=-1)
            rows = dispatch(x, order), row_weights(weights, order)[:, None], chosen[:, None]
            return combine(self._compute(kernels, *rows, region), order)

        return sum_rounds(compute_round, (kernels, x, routing.weights), (experts, round_of, row), rounds), rounds

    def _compute(
        self,
        kernels: tuple[Array, Array],
        x: Float[Array, "t h"],
        weights: Float[Array, "t k"],
        experts: Int[Array, "t k"],
        region: ExpertRegion,
    ) -> Float[Array, "t h"]:
        """The sum of the results of `experts` for each row, times `weights`; of no expert if its number is negative."""
        local = len(kernels[0])
        packed = jnp.concatenate([weights, experts.astype(weights.dtype)], axis=-1)
        x, packed = region.gather_rows(x, packed)
        weights, experts = jnp.split(packed, 2, axis=-1)
        first = mappings.rank(axes.EXPERT) * local if region.ranks > 1 else 0
        experts = experts.astype(jnp.int32) - first
        tile = TILE_ROWS.get(self.kernel, TILE_ROWS["pallas"])
        groups, rows_of = assign_rows(experts.reshape(-1), local, tile, max_group_rows=len(x))
        order = TokenPermutation.from_rows(rows_of.reshape(experts.shape), len(groups.of_tile) * groups.rows)
        outputs = self._apply_experts(kernels, dispatch(x, order), row_weights(weights, order), groups)
        return region.reduce_rows(combine(outputs, order))

    def _apply_experts(
        self, kernels: tuple[Array, Array], x: Float[Array, "r h"], weights: Float[Array, " r"], groups: Groups
    ) -> Float[Array, "r h"]:
        """The result of each row's expert times the row's weight: this rank's part of a sum."""
        up, down = kernels
        gate_up = grouped_matmul(x, up.reshape(*up.shape[:2], -1), groups, self.kernel)
        gate_up = checkpoint_name(gate_up, "mlp_up").reshape(len(x), 2, -1)
        weighted = rematerialize(partial(_apply_weights, activation=self.config.activation))(gate_up, weights)
        return grouped_matmul(weighted, down, groups, self.kernel)


_exchange = partial(mappings.all_to_all, split=0, join=0)
_OVER_EXPERTS: dict[str, tuple[Callable, Callable]] = {
    "local": (lambda x, axis: x,) * 2,
    "replicated": (mappings.copy_to_region, mappings.reduce_from_region),
    "allgather": (mappings.all_gather_tokens, mappings.reduce_scatter_tokens),
    "alltoall": (_exchange, _exchange),
}


@dataclass(frozen=True)
class ExpertRegion:
    """The region in which experts compute: the tokens of all ranks of `model`, and of `expert` if it splits the
    experts.

    Attributes:
      tokens: this replica's.
      ranks: of `expert`, with a part of the experts each; 1 if a rank has all.
      way: of tokens to them and of results back, from `ExpertsConfig.token_dispatcher`; `replicated` if all ranks have
        the same tokens, as in generation.
    """

    tokens: TokenLayout
    ranks: int
    way: str

    def gather_rows(
        self, x: Float[Array, "t h"], weights: Float[Array, "t k"]
    ) -> tuple[Float[Array, "T h"], Float[Array, "T k"]]:
        """f of two arrays. With sequence parallelism each row is sent over `expert` once, then over `model`."""
        over_experts = partial(_OVER_EXPERTS[self.way][0], axis=axes.EXPERT), self.way in ("allgather", "alltoall")
        for gather, waits in (over_experts, (self.tokens.gather_rows, self.tokens.sequence_parallel)):
            x, weights = sequence_collectives(gather(x), weights, waits)
            weights, x = sequence_collectives(gather(weights), x, waits)
        return x, weights

    def reduce_rows(self, partial: Float[Array, "T h"]) -> Float[Array, "t h"]:
        """g: the sum of all ranks' partial results."""
        return _OVER_EXPERTS[self.way][1](self.tokens.reduce_rows(partial), axis=axes.EXPERT)


def sequence_collectives(result: Array, operands, waits: bool) -> tuple:
    """The result of a collective, if it `waits`, and the operands of the next one, which then begins after it, and in
    the backward pass before it. Simulated devices may begin two independent collectives in different orders, and then
    wait for each other forever; a GPU runs them in the order of the program."""
    return optimization_barrier((result, operands)) if waits else (result, operands)


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

    @classmethod
    def from_rows(cls, rows: Int[Array, "t k"], number: int) -> TokenPermutation:
        """The permutation with these rows, of `number` rows."""
        sources = jnp.full_like(rows, rows.size, shape=number)
        ids = jnp.arange(rows.size, dtype=rows.dtype)
        return cls(rows, sources.at[rows.reshape(-1)].set(ids, mode="drop", unique_indices=True))

    @property
    def tokens(self) -> Int[Array, " r"]:
        """The token of each row; b·s for rows that fill tiles."""
        return self.sources // self.rows.shape[1]


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
