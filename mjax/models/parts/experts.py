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
`Hop.rows` rows for each rank, as many as the fullest rank needs: exact, with the same memory for every router, and one
round if it is balanced. Where experts fit on a device, leave `expert` at 1: only weights and their gradients are sent
then. Megatron's names (core/transformer/moe/token_dispatcher.py, 0.19), whose all-to-all has buffers for the worst
case.

**Nodes.** A router with groups limits a token to experts of few groups (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
If several ranks hold each group, they are a node, such as a server, and a token takes two hops (`ExpertsConfig.hops`).
It crosses the network once per node, however many of its experts are there. A token of rank 0 with an expert on rank 1
and two on ranks 4 and 5, of 6 ranks in 3 nodes:

    node 0    rank 0 ─────▶ rank 1     hop 1, vertical: to the ranks with the same place in their nodes, one row with
                 │                     the weights and numbers of the token's experts
    node 1       │ rank 2   rank 3
                 ▼                     hop 2, horizontal: within the node, one row for each expert
    node 2    rank 4 ─────▶ rank 5

Results return in the same way: rank 4 adds those of its node and sends one row. Each round of hop 1 has the rounds of
hop 2 that its rows need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from mjax.config import axes
from mjax.models.parts.config import ExpertsConfig, Hop
from mjax.models.parts.mlp import GatedMLP, apply_gate
from mjax.models.parts.router import Router, Sums
from mjax.models.protocol import ForwardContext
from mjax.parallel import mappings
from mjax.parallel.autodiff import linear_call, match_varying_axes, optimization_barrier, rematerialize, sum_rounds
from mjax.parallel.grouped import TILE_ROWS, assign_rows, grouped_matmul
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
        region = ExpertRegion(tokens, ranks, way, self.config.hops(len(x), ranks) if way == "alltoall" else ())
        sums, rows = self.router.aux_loss_sums(routing, tokens), Rows(x, routing.weights, routing.experts)
        if way == "alltoall":
            y, rounds = self._compute_in_rounds(kernels, rows, region)
            sums["dispatch_rounds"] = (rounds * len(x)).astype(routing.weights.dtype)
        else:
            y = self._compute(kernels, rows, region)
        if self.config.shared_expert_ffn_hidden:
            y, x = sequence_collectives(y, x, tokens.sequence_parallel)
            y = y + self.shared(x, context)
        y, sums = sequence_collectives(y, sums, tokens.sequence_parallel)
        return y, self.router.layer_sums(sums, context)

    def _compute_in_rounds(
        self, kernels: tuple[Array, Array], rows: Rows, region: ExpertRegion
    ) -> tuple[Float[Array, "t h"], Int[Array, ""]]:
        """The result of `_compute` in rounds, with at most `Hop.rows` rows for each target of the next hop, and their
        number. A row is for one expert, or on the way to a node for all of its token's experts there."""
        hop, last = region.hops[0], len(region.hops) == 1
        first = mappings.rank(axes.EXPERT) // (hop.ranks * hop.stride) * hop.ranks
        target = rows.experts // (len(kernels[0]) * hop.stride) - first
        if not last:
            nodes = jnp.arange(hop.ranks)
            target = jnp.where((target[:, :, None] == nodes).any(1), nodes, -1)
        slots, slot = assign_rows(target.reshape(-1), hop.ranks, hop.rows)  # for each target a tile in each round
        slot = slot.reshape(target.shape) - slots.first[target] * hop.rows
        round_of = jnp.where((target >= 0) & (target < hop.ranks), slot // hop.rows, -1)
        row, none = target * hop.rows + slot % hop.rows, hop.ranks * hop.rows
        ranks_in_step = tuple(sorted({axes.EXPERT, axes.MODEL} & mappings.varying_axes(rows.x)))
        rounds = mappings.pmax(slots.tiles.max(), ranks_in_step)
        x, rounds = optimization_barrier(match_varying_axes(rows.x, rounds))

        def compute_round(number, differentiable, constants):
            (kernels, x, weights), (experts, round_of, row) = differentiable, constants
            order = TokenPermutation.from_rows(jnp.where(round_of == number, row, none), none)
            weights = row_weights(weights, order)[:, None] if last else dispatch(weights, order)
            experts = _take(experts.reshape(-1, 1), order.sources, -1) if last else _take(experts, order.tokens, -1)
            return combine(self._compute(kernels, Rows(dispatch(x, order), weights, experts), region), order)

        return sum_rounds(compute_round, (kernels, x, rows.weights), (rows.experts, round_of, row), rounds), rounds

    def _compute(self, kernels: tuple[Array, Array], rows: Rows, region: ExpertRegion) -> Float[Array, "t h"]:
        """The sum of the results of each row's experts, times their weights."""
        rows, rest = region.gather_rows(rows), replace(region, hops=region.hops[1:])
        y = self._compute_in_rounds(kernels, rows, rest)[0] if rest.hops else self._apply_experts(kernels, rows, region)
        return region.reduce_rows(y)

    def _apply_experts(self, kernels: tuple[Array, Array], rows: Rows, region: ExpertRegion) -> Float[Array, "t h"]:
        """The sum of the results of this rank's experts for each row, on this rank's columns: its part of a sum."""
        (up, down), tile = kernels, TILE_ROWS.get(self.kernel, TILE_ROWS["pallas"])
        experts = rows.experts - (mappings.rank(axes.EXPERT) * len(up) if region.ranks > 1 else 0)
        groups, rows_of = assign_rows(experts.reshape(-1), len(up), tile, max_group_rows=len(experts))
        order = TokenPermutation.from_rows(rows_of.reshape(experts.shape), len(groups.of_tile) * groups.rows)
        gate_up = grouped_matmul(dispatch(rows.x, order), up.reshape(*up.shape[:2], -1), groups, self.kernel)
        gate_up = checkpoint_name(gate_up, "mlp_up").reshape(len(gate_up), 2, -1)
        apply_weights = rematerialize(partial(_apply_weights, activation=self.config.activation))
        weighted = apply_weights(gate_up, row_weights(rows.weights, order))
        return combine(grouped_matmul(weighted, down, groups, self.kernel), order)


class Rows(NamedTuple):
    """Rows of the residual stream, with k experts for each, a negative number for none, and their weights."""

    x: Float[Array, "t h"]
    weights: Float[Array, "t k"]
    experts: Int[Array, "t k"]


_OVER_EXPERTS: dict[str, tuple[Callable, Callable]] = {
    "local": (lambda x, axis: x,) * 2,
    "replicated": (mappings.copy_to_region, mappings.reduce_from_region),
    "allgather": (mappings.all_gather_tokens, mappings.reduce_scatter_tokens),
    "alltoall": (mappings.exchange_rows,) * 2,
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
      hops: the all-to-alls that are left on this way. The last one enters the region.
    """

    tokens: TokenLayout
    ranks: int
    way: str
    hops: tuple[Hop, ...] = ()

    def gather_rows(self, rows: Rows) -> Rows:
        """f of the rows. With sequence parallelism each is sent over `expert` once, then over `model`."""
        x, packed = rows.x, jnp.concatenate([rows.weights, rows.experts.astype(rows.weights.dtype)], axis=-1)
        steps = [(self._collectives[0], self.way in ("allgather", "alltoall"))]
        if not self.hops[1:]:
            steps.append((self.tokens.gather_rows, self.tokens.sequence_parallel))
        for gather, waits in steps:
            x, packed = sequence_collectives(gather(x), packed, waits)
            packed, x = sequence_collectives(gather(packed), x, waits)
        weights, experts = jnp.split(packed, 2, axis=-1)
        return Rows(x, weights, experts.astype(jnp.int32))

    def reduce_rows(self, partial: Float[Array, "T h"]) -> Float[Array, "t h"]:
        """g: the sum of all ranks' partial results."""
        return self._collectives[1](partial if self.hops[1:] else self.tokens.reduce_rows(partial))

    @property
    def _collectives(self) -> list[Callable]:
        """f and g over `expert`."""
        ring = {"ranks": self.hops[0].ranks, "stride": self.hops[0].stride} if self.hops else {}
        return [partial(function, axis=axes.EXPERT, **ring) for function in _OVER_EXPERTS[self.way]]


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
        lambda weights, order: _take(weights.reshape(-1), order.sources),
        lambda gradient, order: _take(gradient, order.rows),
        weights,
        order,
    )


def _take_tokens(x: Array, order: TokenPermutation) -> Array:
    return _take(x, order.tokens)


def _sum_rows(rows: Array, order: TokenPermutation) -> Array:
    wide = accumulation_dtype(rows.dtype)
    return sum(_take(rows, ids).astype(wide) for ids in order.rows.T).astype(rows.dtype)


def _take(table: Shaped[Array, " rows *dims"], ids: Int[Array, "*ids"], fill: int = 0) -> Shaped[Array, ...]:
    """table[ids], and `fill` past its end."""
    return table.at[ids].get(mode="fill", fill_value=fill)
