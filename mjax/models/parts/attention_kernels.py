"""The kernels of attention, causal or bidirectional.

| kernel       | where            | implementation                                                          |
|--------------|------------------|-------------------------------------------------------------------------|
| `cudnn`      | GPUs since A100  | cuDNN's fused flash attention: no s × s matrix in memory, no dropout     |
| `flash`      | GPUs since A100  | flash attention in Pallas, with dropout (`flash.py`); only if selected,  |
|              |                  | or for queries of some positions                                        |
| `xla`        | anywhere         | scores, softmax and weighted sum, compiled by XLA                       |
| `xla_blocks` | meant for CPUs   | the same over four blocks of queries, without keys that all of them mask |

All map q, k, v [b, s, n, d] with this rank's heads to [b, s, n, d]. `xla` and `flash` also support the queries of some
positions with the keys of all (`attend_over_context`). A rule selects the kernel of a run once, at the start
(`config/kernels.py`); nothing falls back later. `mjax doctor` runs it.

If a sample has several separate documents, all kernels use the number of each token's document and mask other
documents. With ALiBi all use the slopes of the heads (`positions.py`) and add a penalty on distance to the scores; only
cuDNN's kernel needs the penalty in memory. With a window all mask the keys before it.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mjax.config.axes import CONTEXT, MODEL
from mjax.models.parts.flash import attend_fused
from mjax.models.parts.mask import MASKED, AttentionMask
from mjax.models.parts.positions import distance_penalty
from mjax.parallel import mappings, named_scopes
from mjax.parallel.autodiff import linear_call, optimization_barrier
from mjax.parallel.random import dropout
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.token_layout import TokenLayout


@jax.named_scope(named_scopes.ATTENTION)
def attend(
    q: Float[Array, "b s n d"], k: Float[Array, "b S k d"], v: Float[Array, "b S k e"], mask: AttentionMask, kernel: str
) -> Float[Array, "b s n e"]:
    """Softmax attention of this rank's heads.

    Args:
      q, k, v: keys and values may have fewer heads, each shared by as many neighboring query heads, and with
        `mask.position_ids` more positions.
      mask: the visible keys of a query, scale, ALiBi and dropout.
      kernel: `cudnn`, `flash`, `xla` or `xla_blocks`.

    Raises:
      UsageError: a fused kernel does not support it.
    """
    assert mask.slopes is None or mask.causal, "ALiBi needs causal attention"
    assert mask.window is None or mask.causal, "a window needs causal attention"
    axes = mappings.varying_axes(q)
    mask = jax.tree.map(lambda x: mappings.vary(x, axes), replace(mask, scale=mask.scale_for(q)))
    if mask.window is not None and mask.window >= k.shape[1]:
        mask = replace(mask, window=None)  # no effect
    if not kernel.startswith("xla"):
        return attend_fused(q, k, v, mask, kernel)
    k, v = (repeat_heads(x, q.shape[2]) for x in (k, v))
    if mask.slopes is not None:
        # A barrier in this layer: otherwise JAX computes the penalty [n, s, s] before the loop over layers, and every
        # layer reads it from memory, although it is free to compute.
        slopes, _ = optimization_barrier((mask.slopes, jax.lax.stop_gradient(q[0, 0, 0, 0])))
        mask = replace(mask, slopes=slopes)
    if kernel == "xla" or mask.position_ids is not None:
        return _attend_block(q, k, v, 0, mask)
    return _attend_in_blocks(q, k, v, mask)


def repeat_heads(x: Float[Array, "b s k d"], heads: int) -> Float[Array, "b s n d"]:
    """Keys or values with each head repeated, to so many."""
    if (count := heads // x.shape[2]) == 1:
        return x

    def sum_copies(gradient, _):  # autodiff would sum the gradients of a group in 16 bits
        groups = gradient.reshape(*gradient.shape[:2], -1, count, gradient.shape[-1])
        return groups.sum(3, dtype=accumulation_dtype(gradient.dtype)).astype(gradient.dtype)

    return linear_call(lambda x, _: jnp.repeat(x, count, axis=2), sum_copies, x)


def _attend_in_blocks(q: Array, k: Array, v: Array, mask: AttentionMask) -> Array:
    """Attention over four blocks of queries.

    On a CPU it is faster to copy once into [b, n, s, d], to skip the keys that all queries of a block mask, in its
    future or before its window, and to compute in float32: XLA runs small bf16 matmuls there on one thread. The
    backward pass recomputes the probabilities: they and the keys of every block are a third of a step's activations.
    """
    positions, dtype = q.shape[1], q.dtype
    width = positions // (1 if positions % 4 else 4)

    @jax.checkpoint
    def attend_block(q: Array, k: Array, v: Array) -> Array:
        def block(first: int) -> Array:
            start = 0 if mask.window is None else max(0, first - mask.window + 1)
            end = first + width if mask.causal else positions
            keys, values, queries = k[:, :, start:end], v[:, :, start:end], q[:, :, first : first + width]
            return _attend_block(queries, keys, values, first, mask, start, heads_first=True)

        return jnp.concatenate([block(first) for first in range(0, positions, width)], axis=2)

    q, k, v = (x.swapaxes(1, 2).astype(jnp.promote_types(dtype, jnp.float32)) for x in (q, k, v))
    return attend_block(q, k, v).swapaxes(1, 2).astype(dtype)


def _attend_block(
    q: Array, k: Array, v: Array, first: int, mask: AttentionMask, first_key: int = 0, heads_first: bool = False
) -> Array:
    """Attention of the queries from position `first` on, or at `position_ids`, to the keys from `first_key` on.

    Shapes: q [b, q, n, d], k [b, k, n, d], v [b, k, n, e] → [b, q, n, e]; with `heads_first` all are [b, n, …].
    """
    documents, rows = mask.documents, mask.position_ids
    queries, keys = ("bnqd", "bnkd") if heads_first else ("bqnd", "bknd")
    wide = accumulation_dtype(q.dtype)
    scores = mask.scale * jnp.einsum(f"{queries},{keys}->bnqk", q, k, preferred_element_type=wide)
    visible = True
    if mask.causal:
        # Computed on the device: a NumPy array would be a residual of every layer that recomputes its scores.
        query, key = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[2:], dim) for dim in (0, 1))
        # Numbered from the first key, like the keys.
        query = (first + query if rows is None else rows[:, None]) - first_key
        visible = mask.visible(query, key)  # [q, k]
        if mask.slopes is not None:
            scores = scores + distance_penalty(mask.slopes, key - query, wide)
    if documents is not None:
        end, end_key = first + scores.shape[2], first_key + scores.shape[3]
        query_documents = documents[:, first:end] if rows is None else documents[:, rows]
        same = query_documents[:, :, None] == documents[:, None, first_key:end_key]
        visible = (visible & same)[:, None]  # [b, 1, q, k]
    # Added rather than selected: the backward pass of a sum saves no mask.
    scores = scores + jnp.where(visible, 0.0, MASKED).astype(wide)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if mask.key is not None:
        heads = mask.heads(scores.shape[1])
        rows = first + jnp.arange(scores.shape[2]) if rows is None else rows
        probabilities = dropout(probabilities, mask.rate, mask.key, heads, rows, first_column=first_key)
    return jnp.einsum(f"bnqk,{keys}->{queries}", probabilities, v)


# --- Sequences over context -------------------------------------------------------------------------------------------
# Attention of sequences whose positions are split over `context`, with any of the kernels above.
#
#     ulysses   an all-to-all gives each rank all positions of n / c of the heads, and a second one its positions of all
#               heads (DeepSpeed-Ulysses, arXiv 2309.14509). Kernels, windows, documents and masks see whole sequences.
#
#                   [b, s / c, n, d] ── all-to-all ──▶ [b, s, n / c, d] ── attention ── all-to-all ──▶ [b, s / c, n, d]
#
#     allgather every rank gathers the keys and values of all positions, and attends from its queries (Llama 3, arXiv
#               2407.21783, section 3.3.2). With grouped heads these are few. The backward pass sums their gradients by
#               a reduce-scatter. Queries are in zigzag order: rank r of c has the chunks r and 2c − 1 − r of 2c
#               (`token_layout.py`).
#
# Numbers sent by a rank in the forward pass of a layer: 4 · (c − 1) / c · b s n d_h / c by `ulysses`, and
# 2 · (c − 1) / c · b s k d_h by `allgather`, with n heads and k key-value heads on a rank of `model`.
#
# If there are fewer key-value heads than ranks of `context`, `ulysses` sends copies of them: lcm(k, c) heads, and each
# rank gets the heads it needs. Their gradients are summed on the rank that sent them.


HEADS, POSITIONS = 2, 1


def attend_over_context(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k e"],
    mask: AttentionMask,
    kernel: str,
    tokens: TokenLayout,
) -> Float[Array, "b s n e"]:
    """`attend` for the positions of all ranks of `context`.

    Args:
      q, k, v: with this rank's positions, and its heads of `model`; keys and values may have fewer.
      mask: with the slopes of these heads, and documents of whole sequences.
      kernel: as for `attend`.
      tokens: these positions, and how to attend to other ranks' positions.
    """
    if tokens.context_attention == "ulysses":
        local, slopes = q.shape[HEADS] // mappings.size(CONTEXT), mask.slopes
        first = mappings.rank(CONTEXT) * local
        if slopes is not None:
            slopes = jax.lax.dynamic_slice_in_dim(slopes, first, local)
        first = mappings.rank(MODEL) * q.shape[HEADS] + first
        kv_heads = math.lcm(k.shape[HEADS], mappings.size(CONTEXT))
        k, v = (repeat_heads(x, kv_heads) for x in (k, v))
        q, k, v = (mappings.all_to_all(x, CONTEXT, HEADS, POSITIONS) for x in (q, k, v))
        attended = attend(q, k, v, replace(mask, slopes=slopes, first_head=first), kernel)
        return mappings.all_to_all(attended, CONTEXT, POSITIONS, HEADS)
    if tokens.context_attention == "allgather":
        mask = replace(mask, position_ids=tokens.position_ids())
        k, v = tokens.gather_positions(k), tokens.gather_positions(v)
    return attend(q, k, v, mask, kernel)
