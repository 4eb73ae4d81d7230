"""Cross entropy of x and E, the table of the vocabulary, in chunks of rows of E, whose logits are computed twice and
never stored.

The forward pass adds the exponentials of one chunk after the other, as the ranks combine theirs (`cross_entropy.py`):
two numbers per token, the logarithm of their sum and the label's logit. The backward pass goes through the chunks
again. With D the gradient of a chunk's logits, Dᵀ x gives its rows of E's gradient, and the gradient of x is the sum of
D E over the chunks. That is a fourth matmul of the size of the head's three.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mjax.parallel import mappings
from mjax.parallel.autodiff import match_varying_axes, optimization_barrier
from mjax.parallel.layers import VocabParallelEmbedding, mask_padding, to_local_ids
from mjax.parallel.linear import reduce_with_overlap
from mjax.parallel.reductions import accumulation_dtype, sum_rows
from mjax.parallel.token_layout import TokenLayout
from mjax.parallel.weights import is_frozen

MULTIPLE = 8  # of the rows of a chunk: on tensor cores a matmul with other sizes is slow


def chunked_cross_entropy(
    x: Float[Array, "t h"],
    embedding: VocabParallelEmbedding,
    bias: Float[Array, " v_local"] | None,
    labels: Int[Array, " bs"],
    tokens: TokenLayout,
) -> Float[Array, " bs"]:
    """`vocab_parallel_cross_entropy` of `embedding.logits(x, tokens, bias)`, with the logits of one of
    `tokens.loss_chunks` parts of the vocabulary in memory at a time."""
    table = embedding.table[...]
    bias = None if bias is None else mappings.vary(bias, mappings.varying_axes(table) | mappings.varying_axes(x))
    vocabulary, frozen = embedding.local_vocabulary(table), is_frozen(embedding.table)
    return _chunked_loss(x, table, bias, labels, vocabulary, tokens, frozen)


def split_rows(rows: int, chunks: int) -> list[slice]:
    """Split rows into at most `chunks` parts of equal size, a multiple of MULTIPLE; the last may be smaller."""
    size = -(-rows // (chunks * MULTIPLE)) * MULTIPLE
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunked_loss(x: Array, table: Array, bias: Array | None, labels: Array, vocabulary: Array | None, *static):
    return _chunked_loss_forward(x, table, bias, labels, vocabulary, *static)[0]


def _chunked_loss_forward(x, table, bias, labels, vocabulary, tokens: TokenLayout, _: bool):
    x = tokens.gather_rows(x)
    saved, log_sum, label = x, -jnp.inf, 0.0
    for rows in split_rows(table.shape[0], tokens.loss_chunks):
        logits, is_label = _chunk_logits(x, table, bias, labels, vocabulary, rows)
        log_sum = jnp.logaddexp(log_sum, jax.nn.logsumexp(logits, axis=-1))
        label = label + jnp.where(is_label, logits, 0).sum(-1)
        # One after the other. The label's logit too: its gradient does not need it, and XLA would compute it later.
        x, log_sum, label = optimization_barrier((x, log_sum, label))
    largest = mappings.pmax(log_sum)
    _, is_local = to_local_ids(labels, table.shape[0])
    label = jnp.where(is_local, label - largest, 0.0)
    total, label = mappings.reduce_from_region(jnp.stack([jnp.exp(log_sum - largest), label]))
    log_total = jnp.log(total)
    return log_total - label, (saved, table, bias, labels, vocabulary, largest + log_total)


def _chunk_logits(
    x: Array, table: Array, bias: Array | None, labels: Array, vocabulary: Array | None, rows: slice
) -> tuple[Float[Array, "bs rows"], Bool[Array, "bs rows"]]:
    """The logits of these rows, float32 or wider, and which of them is the label's."""
    logits = x @ table[rows].T
    logits = logits if bias is None else logits + bias[rows]
    logits = mask_padding(logits, None if vocabulary is None else vocabulary - rows.start)
    local, is_local = to_local_ids(labels, table.shape[0])
    column = jnp.arange(rows.start, rows.stop, dtype=local.dtype)
    return logits.astype(accumulation_dtype(logits.dtype)), is_local[:, None] & (column == local[:, None])


def _chunked_loss_backward(tokens: TokenLayout, frozen: bool, residuals, gradient: Array):
    x, table, bias, labels, vocabulary, log_normalizer = residuals
    previous, dtable, dbias = [], [], []
    for rows in split_rows(table.shape[0], tokens.loss_chunks):
        # One after the other, and after the forward pass: XLA would see the same logits in it, and store them.
        x, gradient, *previous = optimization_barrier(match_varying_axes(x, gradient, *previous))
        logits, is_label = _chunk_logits(x, table, bias, labels, vocabulary, rows)
        probabilities = jnp.exp(logits - log_normalizer[:, None])
        dlogits = ((probabilities - is_label) * gradient[:, None]).astype(x.dtype)
        if bias is not None:  # used three times, and computed once
            dlogits = optimization_barrier(dlogits)
            dbias.append(sum_rows(dlogits))
        part = jnp.matmul(dlogits, table[rows], preferred_element_type=accumulation_dtype(x.dtype))
        dtable += [] if frozen else [dlogits.T @ x]
        previous = [previous[0] + part if previous else part, *dtable[-1:]]
    dx, *dtable[-1:] = optimization_barrier(previous)
    dweights = tuple(jnp.concatenate(parts) if parts else None for parts in (dtable, dbias))
    dx, (dtable, dbias) = reduce_with_overlap(dx.astype(x.dtype), dweights, tokens)
    return dx, dtable, dbias, None, None


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)
