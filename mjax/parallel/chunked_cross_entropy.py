"""Cross entropy of x and E, the table of the vocabulary: the rows of E in chunks, whose logits are computed twice and
never kept.

The forward pass keeps a running m and sum, with the algebra that joins the ranks (`cross_entropy.py`). The backward
pass goes through the chunks again: with D the gradient of their logits, Dᵀ x are their rows of the gradient of E, and
the gradient of x is the sum of D E over the chunks. That is a fourth product of the size of the head's three.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mjax.parallel import mappings
from mjax.parallel.layers import VocabParallelEmbedding, drop_padding, local_rows
from mjax.parallel.linear import reduce_overlapped
from mjax.parallel.overlap import tie, vary_alike
from mjax.parallel.reductions import sum_rows, wide_type
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import is_frozen

MULTIPLE = 8  # of the rows of a chunk: on tensor cores a product with other sizes is slow


def chunked_cross_entropy(
    x: Float[Array, "t h"],
    embedding: VocabParallelEmbedding,
    bias: Float[Array, " v_local"] | None,
    labels: Int[Array, " bs"],
    tokens: TokenLayout,
    chunks: int,
) -> Float[Array, " bs"]:
    """`vocab_parallel_cross_entropy` of `embedding.logits(x, tokens, bias)`, with the logits of at most one of `chunks`
    parts of the vocabulary in memory at a time."""
    table = embedding.table[...]
    bias = None if bias is None else mappings.vary(bias, mappings.varying_axes(table) | mappings.varying_axes(x))
    count, frozen = embedding.rank_tokens(table), is_frozen(embedding.table)
    return _chunked_loss(x, table, bias, labels, count, tokens, chunks, frozen)


def split_rows(rows: int, chunks: int) -> list[slice]:
    """Rows in at most `chunks` parts of equal size, a multiple of MULTIPLE; the last may be smaller."""
    size = -(-rows // (chunks * MULTIPLE)) * MULTIPLE
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


class _OnlineSoftmax(NamedTuple):
    """The sums over the rows so far, for each token: the highest logit m, the sum of exp(logit − m), and the label's
    logit, 0 if it is not among them."""

    highest: Float[Array, " bs"]
    total: Float[Array, " bs"]
    label: Float[Array, " bs"]

    def merge(self, other: _OnlineSoftmax) -> _OnlineSoftmax:
        """The sums over the rows of both."""
        highest = jnp.maximum(self.highest, other.highest)
        return _OnlineSoftmax(highest, self.sum_exp(highest) + other.sum_exp(highest), self.label + other.label)

    def sum_exp(self, highest: Array) -> Array:
        """The sum of exp(logit − highest)."""
        return self.total * jnp.exp(self.highest - highest)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _chunked_loss(x: Array, table: Array, bias: Array | None, labels: Array, count: Array | None, *how) -> Array:
    return _chunked_loss_forward(x, table, bias, labels, count, *how)[0]


def _chunked_loss_forward(
    x: Array,
    table: Array,
    bias: Array | None,
    labels: Array,
    count: Array | None,
    tokens: TokenLayout,
    chunks: int,
    _: bool,
):
    x, back = jax.vjp(tokens.enter, x)
    saved, running = x, None
    for rows in split_rows(table.shape[0], chunks):
        logits, is_label = _chunk_logits(x, table, bias, labels, count, rows)
        highest = logits.max(-1)
        total = jnp.exp(logits - highest[:, None]).sum(-1)
        part = _OnlineSoftmax(highest, total, jnp.where(is_label, logits, 0).sum(-1))
        running = part if running is None else running.merge(part)
        # One after the other. The label's logit too: its gradient does not need it, and XLA would compute it later.
        x, *running = tie((x, *running))
        running = _OnlineSoftmax(*running)
    highest = mappings.maximum(running.highest)
    _, owned = local_rows(labels, table.shape[0])
    label = jnp.where(owned, running.label - highest, 0.0)
    exponentials, label = mappings.leave(jnp.stack([running.sum_exp(highest), label]))
    log_sum = jnp.log(exponentials)
    return log_sum - label, (saved, back, table, bias, labels, count, highest + log_sum)


def _chunk_logits(
    x: Array, table: Array, bias: Array | None, labels: Array, count: Array | None, rows: slice
) -> tuple[Float[Array, "bs rows"], Bool[Array, "bs rows"]]:
    """The logits of these rows, float32 or wider, and which of them is the label's."""
    scores = x @ table[rows].T
    scores = scores if bias is None else scores + bias[rows]
    scores = drop_padding(scores, None if count is None else count - rows.start)
    local, owned = local_rows(labels, table.shape[0])
    column = jnp.arange(rows.start, rows.stop, dtype=local.dtype)
    return scores.astype(wide_type(scores.dtype)), owned[:, None] & (column == local[:, None])


def _chunked_loss_backward(tokens: TokenLayout, chunks: int, frozen: bool, residuals, gradient: Array):
    x, back, table, bias, labels, count, log_normalizer = residuals
    previous, to_table, to_bias = [], [], []
    for rows in split_rows(table.shape[0], chunks):
        # One after the other, and behind the forward pass: XLA would find that it computes the same, and keep it.
        x, gradient, *previous = tie(vary_alike(x, gradient, *previous))
        logits, is_label = _chunk_logits(x, table, bias, labels, count, rows)
        probabilities = jnp.exp(logits - log_normalizer[:, None])
        to_logits = ((probabilities - is_label) * gradient[:, None]).astype(x.dtype)
        if bias is not None:  # used three times, and computed once
            to_logits = tie(to_logits)
            to_bias.append(sum_rows(to_logits))
        part = jnp.matmul(to_logits, table[rows], preferred_element_type=wide_type(x.dtype))
        to_table += [] if frozen else [to_logits.T @ x]
        previous = [previous[0] + part if previous else part, *to_table[-1:]]
    to_x, *to_table[-1:] = tie(previous)
    products = tuple(jnp.concatenate(parts) if parts else None for parts in (to_table, to_bias))
    to_x, (to_table, to_bias) = reduce_overlapped(back, to_x.astype(x.dtype), products, tokens)
    return to_x, to_table, to_bias, None, None


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)
