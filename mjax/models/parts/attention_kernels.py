"""The kernels of attention, causal or bidirectional.

| kernel       | where            | implementation                                                          |
|--------------|------------------|-------------------------------------------------------------------------|
| `cudnn`      | GPUs since A100  | cuDNN's fused flash attention: no s × s matrix in memory, no dropout     |
| `flash`      | GPUs since A100  | flash attention in Pallas, with dropout (`flash.py`); only if asked for, |
|              |                  | or for queries of some positions                                        |
| `xla`        | anywhere         | scores, softmax and weighted sum, compiled by XLA                       |
| `xla_blocks` | meant for CPUs   | the same over four blocks of queries, skipping keys that none sees      |

All take q, k, v [b, s, n, d] with this rank's heads and return [b, s, n, d]. `xla` and `flash` also take the queries of
some positions with the keys of all (`across.py`). The kernel of a run is resolved once, at the start, by rule
(`config/kernels.py`); nothing falls back later. `mjax doctor` runs it.

If a sample has several documents that must be kept apart, all kernels take the number of each token's document and mask
other documents. With ALiBi all take the slopes of the heads (`positions.py`) and add a penalty on distance to the
scores; only cuDNN's kernel needs it written out. With a window all mask the keys before it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mjax.config.axes import CONTEXT, MODEL
from mjax.config.kernels import BLOCK, FLASH_INTERPRETED
from mjax.models.parts.flash import MASKED, Aux, How, flash_attention
from mjax.models.parts.positions import distance_penalty
from mjax.parallel import mappings, scopes
from mjax.parallel.overlap import tie
from mjax.parallel.random import DropoutKey, dropout
from mjax.parallel.sums import wide_type
from mjax.parallel.tokens import Tokens

FLASH_STAND_IN = "cudnn, traced only"
"""Kernel name for a program that is only traced: inputs, outputs and residuals of cuDNN's or `flash`, on a machine
without them."""


@jax.named_scope(scopes.ATTENTION)
def attend(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b S k d"],
    v: Float[Array, "b S k d"],
    kernel: str,
    rate: float = 0.0,
    key: DropoutKey | None = None,
    documents: Int[Array, "b S"] | None = None,
    causal: bool = True,
    slopes: Float[Array, " n"] | None = None,
    window: int | None = None,
    first_head: Int[Array, ""] | None = None,
    position_ids: Int[Array, " s"] | None = None,
) -> Float[Array, "b s n d"]:
    """Softmax(q kᵀ / √d) v over the positions that each query sees: all, or with `causal` those up to its own; of these
    only the last `window`, and only those in its document, if given.

    Args:
      q, k, v: keys and values may have fewer heads, each shared by as many neighbouring query heads, and with
        `position_ids` more positions.
      kernel: `cudnn`, `flash`, `xla` or `xla_blocks`.
      rate, key: dropout of the probabilities; not with `cudnn`.
      documents: number of a token's document; None: a sample is one document.
      causal: whether a query sees no later position; False: bidirectional (BERT).
      slopes: of ALiBi for these heads; only with `causal`. None: the scores do not depend on positions.
      window: how many positions a query sees, including its own; only with `causal`. None: all up to its own.
      first_head: number of the first of these heads among those of all ranks, for dropout; by default that of equal
        parts over `model`.
      position_ids: positions of the queries among those of the keys, ascending in each half; None: the same.
    """
    assert slopes is None or causal, "ALiBi says nothing about positions after a query's own"
    assert window is None or causal, "a window ends at a query's own position"
    if window is not None and window >= k.shape[1]:
        window = None  # no effect
    if slopes is not None:
        slopes = mappings.vary(slopes, mappings.varying_axes(q))
    if documents is not None:
        documents = mappings.vary(documents, mappings.varying_axes(q))
    seen = _Seen(rate, key, documents, causal, slopes, window, first_head, position_ids)
    if kernel in ("cudnn", FLASH_STAND_IN):
        assert rate == 0.0 or key is None, "cuDNN attention has no dropout in JAX's public interface"
        assert position_ids is None or kernel == FLASH_STAND_IN, (
            "cuDNN attention has queries and keys of the same positions"
        )
        return _attend_cudnn(q, k, v, kernel, seen)
    if kernel in ("flash", FLASH_INTERPRETED):
        return _attend_flash(q, k, v, kernel, seen)
    k, v = for_every_query(q, k, v)
    if slopes is not None:
        # Tied to this layer: otherwise JAX computes the penalty [n, s, s] before the loop over layers, and every layer
        # reads from memory what is free to compute.
        slopes, _ = tie((slopes, jax.lax.stop_gradient(q[0, 0, 0, 0])))
        seen = seen._replace(slopes=slopes)
    if kernel == "xla" or position_ids is not None:
        return _attend_block(q, k, v, 0, seen)
    return _attend_in_blocks(q, k, v, seen)


class _Seen(NamedTuple):
    """The arguments of `attend` that determine which positions are seen."""

    rate: float
    key: DropoutKey | None
    documents: Array | None
    causal: bool
    slopes: Array | None
    window: int | None
    first_head: Array | None
    position_ids: Array | None

    def heads(self, count: int) -> Int[Array, " n"]:
        """The numbers of this rank's heads among those of all ranks."""
        first = mappings.rank(MODEL) * count if self.first_head is None else self.first_head
        return first + jnp.arange(count)


def for_every_query(
    q: Float[Array, "b _ n d"], k: Float[Array, "b s k d"], v: Float[Array, "b s k d"]
) -> tuple[Float[Array, "b s n d"], Float[Array, "b s n d"]]:
    """Keys and values repeated to one head per query head."""
    if (group := q.shape[2] // k.shape[2]) == 1:
        return k, v
    return _repeat_heads(k, group), _repeat_heads(v, group)


# Written out because autodiff would sum the gradients of a group in 16 bits.
@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeat_heads(x: Float[Array, "b s k d"], count: int) -> Float[Array, "b s n d"]:
    return jnp.repeat(x, count, axis=2)


def _repeat_heads_backward(count: int, _, gradient: Array):
    groups = gradient.reshape(*gradient.shape[:2], -1, count, gradient.shape[-1])
    return (groups.sum(3, dtype=wide_type(gradient.dtype)).astype(gradient.dtype),)


_repeat_heads.defvjp(lambda x, count: (_repeat_heads(x, count), None), _repeat_heads_backward)


def _attend_cudnn(q: Array, k: Array, v: Array, kernel: str, seen: _Seen) -> Array:
    documents, causal, slopes, window = seen.documents, seen.causal, seen.slopes, seen.window
    # JAX passes a mask to cuDNN as a bias, which is written out, and cuDNN writes out its gradient, which is not used:
    # 2 b s² bytes each, once for all heads and layers.
    mask = None if documents is None else _same_document(documents, documents)[:, None]  # [b, 1, s, s]
    # The same for ALiBi, whose penalty differs between heads: 2 n s² bytes each for it and its gradient, and together
    # with documents 2 b n s².
    bias = None if slopes is None else _written_out(slopes, q.shape[1], q.dtype)
    if kernel == FLASH_STAND_IN:
        return _flash_stand_in(q, k, v, *(x.astype(q.dtype) for x in (bias, mask) if x is not None))
    local = None if window is None else (window - 1, 0)  # JAX counts positions without the query's own
    return jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, is_causal=causal, local_window_size=local, implementation="cudnn"
    )


def _attend_flash(q: Array, k: Array, v: Array, kernel: str, seen: _Seen) -> Array:
    rate, key, documents, causal, slopes, window, _, position_ids = seen
    positions, heads = q.shape[1:3]
    cut = positions if position_ids is None else positions // 2
    assert not cut % BLOCK, "flash takes whole blocks of queries (position_unit)"
    assert not k.shape[1] % BLOCK, "flash takes whole blocks of keys (position_unit)"
    first = second = None
    if key is not None and rate > 0.0:
        heads = seen.heads(heads)
        axes = mappings.varying_axes(q)
        rows = jnp.arange(positions) if position_ids is None else position_ids
        first, second = (mappings.vary(words, axes) for words in key.rows(heads, rows))
    starts = None
    if position_ids is not None:
        starts = jnp.stack([position_ids[0], position_ids[positions // 2]]) // BLOCK
    aux = Aux(first, second, documents, slopes, starts)
    return flash_attention(q, k, v, aux, How(causal, window, rate, interpret=kernel == FLASH_INTERPRETED))


def _attend_in_blocks(q: Array, k: Array, v: Array, seen: _Seen) -> Array:
    """Attention over four blocks of queries.

    On a CPU it pays to copy once into [b, n, s, d], to skip the keys that no query of a block sees, in its future or
    before its window, and to compute in float32: XLA runs small bf16 products there on one thread. The backward pass
    computes the probabilities again: kept, they and the keys of every block are a third of a step's activations.
    """
    positions, dtype = q.shape[1], q.dtype
    width = positions // (1 if positions % 4 else 4)

    @jax.checkpoint
    def attended(q: Array, k: Array, v: Array) -> Array:
        def block(first: int) -> Array:
            start = 0 if seen.window is None else max(0, first - seen.window + 1)
            end = first + width if seen.causal else positions
            k_read, v_read = k[:, :, start:end], v[:, :, start:end]
            return _attend_block(q[:, :, first : first + width], k_read, v_read, first, seen, start, heads_first=True)

        return jnp.concatenate([block(first) for first in range(0, positions, width)], axis=2)

    q, k, v = (x.swapaxes(1, 2).astype(jnp.promote_types(dtype, jnp.float32)) for x in (q, k, v))
    return attended(q, k, v).swapaxes(1, 2).astype(dtype)


def _attend_block(
    q: Array, k: Array, v: Array, first: int, seen: _Seen, first_key: int = 0, heads_first: bool = False
) -> Array:
    """Attention of the queries from position `first` on, or at `position_ids`, to the keys from `first_key` on.

    Shapes: q [b, q, n, d], k and v [b, k, n, d] → [b, q, n, d]; with `heads_first` all of them are [b, n, …, d].
    """
    rate, key, documents, causal, slopes, window, _, position_ids = seen
    queries, keys = ("bnqd", "bnkd") if heads_first else ("bqnd", "bknd")
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum(f"{queries},{keys}->bnqk", q / math.sqrt(q.shape[-1]), k, preferred_element_type=wide)
    visible = True
    if causal:
        # Computed on the device: a NumPy array would be a residual of every layer that recomputes its scores.
        query, other = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[2:], dim) for dim in (0, 1))
        # Numbered from the first key, like the keys.
        query = (first + query if position_ids is None else position_ids[:, None]) - first_key
        visible = other <= query  # [q, k]
        if window is not None:
            visible = visible & (other > query - window)
        if slopes is not None:
            scores = scores + distance_penalty(slopes, other - query, wide)
    if documents is not None:
        end, read = first + scores.shape[2], first_key + scores.shape[3]
        of_queries = documents[:, first:end] if position_ids is None else documents[:, position_ids]
        same = _same_document(of_queries, documents[:, first_key:read])
        visible = (visible & same)[:, None]  # [b, 1, q, k]
    # Added rather than selected: the backward pass of a sum keeps no mask.
    scores = scores + jnp.where(visible, 0.0, MASKED).astype(wide)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if key is not None and rate > 0.0:
        heads = seen.heads(scores.shape[1])
        rows = first + jnp.arange(scores.shape[2]) if position_ids is None else position_ids
        probabilities = dropout(probabilities, rate, key, heads, rows, first_column=first_key)
    return jnp.einsum(f"bnqk,{keys}->{queries}", probabilities, v)


@jax.custom_vjp
def _flash_stand_in(q: Array, k: Array, v: Array, *biases: Array) -> Array:
    return _flash_stand_in_forward(q, k, v, *biases)[0]


def _flash_stand_in_forward(*inputs: Array):
    # Besides its result cuDNN's kernel keeps a float32 number for each row of scores.
    like = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype), jax.ShapeDtypeStruct(inputs[0].shape[:-1], "float32")
    context, rows = _never_run(like, *inputs)
    return context, (*inputs, context, rows)


def _flash_stand_in_backward(kept: tuple[Array, ...], gradient: Array):
    inputs = kept[:-2]
    return tuple(_never_run([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs], *kept, gradient))


_flash_stand_in.defvjp(_flash_stand_in_forward, _flash_stand_in_backward)


def _never_run(results, *inputs: Array) -> list[Array]:
    def refuse(*_):
        raise NotImplementedError("this attention kernel stands in for cuDNN's in programs that are only traced")

    axes = frozenset().union(*map(mappings.varying_axes, inputs))
    return [mappings.vary(result, axes) for result in jax.pure_callback(refuse, results, *inputs)]


def _written_out(slopes: Float[Array, " n"], positions: int, dtype) -> Float[Array, "1 n s s"]:
    """ALiBi's penalty between all positions of a sample."""
    query, other = (jax.lax.broadcasted_iota(jnp.int32, (positions, positions), dim) for dim in (0, 1))
    return distance_penalty(slopes, other - query, dtype)[None]


def _same_document(queries: Int[Array, "b q"], keys: Int[Array, "b k"]) -> Bool[Array, "b q k"]:
    """Mask of query and key pairs within a document."""
    return queries[:, :, None] == keys[:, None, :]


# --- Sequences over context -------------------------------------------------------------------------------------------
# Attention of sequences whose positions are split over `context`, with any of the kernels
# (`attention_kernels.py`).
#
#     heads     an all-to-all gives each rank all positions of n / c of the heads, and one back its own positions of all
#               (DeepSpeed-Ulysses, arXiv 2309.14509). Kernels, windows, documents and masks see whole sequences.
#
#                   [b, s / c, n, d] ── all-to-all ──▶ [b, s, n / c, d] ── attention ── all-to-all ──▶ [b, s / c, n, d]
#
#     gather    every rank gets the keys and values of all positions, and attends from its own queries (Llama 3, arXiv
#               2407.21783, section 3.3.2). With grouped heads these are few. The backward pass sums their gradients by
#               a reduce-scatter. Queries are balanced: rank r of c has the chunks r and 2c − 1 − r of 2c (`tokens.py`).
#
# Numbers sent by a rank in the forward pass of a layer: 4 · (c − 1) / c · b s n d / c of `heads`, and 2 · (c − 1) / c ·
# b s k d of `gather`, with n heads and k key-value heads on a rank of `model`.
#
# Where there are fewer key-value heads than ranks of `context`, `heads` sends copies of them, which rank needs which:
# lcm(k, c) heads. Their gradients are summed where they come from.


HEADS, POSITIONS = 2, 1


def attend_across(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    kernel: str,
    tokens: Tokens,
    slopes: Float[Array, " n"] | None = None,
    **seen,
) -> Float[Array, "b s n d"]:
    """`attend` for the positions of all ranks of `context`.

    Args:
      q, k, v: with this rank's positions, and its heads of `model`; keys and values may have fewer.
      tokens: which positions they are, and how to attend to those of other ranks.
      slopes: of ALiBi.
      seen: as for `attend`; documents are of whole sequences.
    """
    if tokens.across == "heads":
        local = q.shape[HEADS] // mappings.size(CONTEXT)
        first = mappings.rank(CONTEXT) * local
        if slopes is not None:
            slopes = jax.lax.dynamic_slice_in_dim(slopes, first, local)
        first = mappings.rank(MODEL) * q.shape[HEADS] + first
        q, k, v = (mappings.exchange(x, CONTEXT, HEADS, POSITIONS) for x in (q, *map(_enough, (k, v))))
        attended = attend(q, k, v, kernel, slopes=slopes, first_head=first, **seen)
        return mappings.exchange(attended, CONTEXT, POSITIONS, HEADS)
    if tokens.across == "gather":
        seen["position_ids"] = tokens.position_ids()
        k, v = tokens.all_positions(k), tokens.all_positions(v)
    return attend(q, k, v, kernel, slopes=slopes, **seen)


def _enough(x: Float[Array, "b s k d"]) -> Float[Array, "b s _ d"]:
    """Key-value heads repeated until `context` divides their number."""
    heads, ranks = x.shape[HEADS], mappings.size(CONTEXT)
    copies = math.lcm(heads, ranks) // heads
    return jnp.repeat(x, copies, axis=HEADS) if copies > 1 else x
