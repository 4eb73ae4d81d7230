"""The fused kernels of attention: cuDNN's, and `flash`, with dropout, in Pallas for GPUs (arXiv 2307.08691).

cuDNN's attention has no dropout in JAX's public interface, and XLA's writes scores and probabilities [b, n, s, s] to
memory. Here the mask of a tile is hashed where its probabilities are, from `DropoutKey.row_words`: the same masks as
those of the other kernels, on every mesh, and nothing of the size s × s in memory.

With P = softmax(S), M the mask over 1 − rate, and O = (P ∘ M) V, the backward pass computes P and M again, by tiles:

    dV = (P ∘ M)ᵀ dO      dS = P ∘ (M ∘ (dO Vᵀ) − D)      D_i = Σ_j P_ij M_ij (dO Vᵀ)_ij = Σ_d dO_id O_id

    kernel     a program has       and goes through         it writes
    forward    a block of queries  blocks of keys           O, and for each row the logarithm of its sum
    keys       a block of keys     blocks of queries        dK and dV, summed over the query heads of a key's head
    queries    a block of queries  blocks of keys           dQ
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, UInt32

from mjax.config.kernels import BLOCK, FLASH_INTERPRETED, FUSED
from mjax.errors import UsageError
from mjax.models.parts.mask import MASKED, AttentionMask
from mjax.models.parts.positions import distance_penalty
from mjax.parallel import mappings
from mjax.parallel.random import keep_mask_from_words

FLASH_STAND_IN = "cudnn, traced only"
"""Kernel name for a program that is only traced: inputs, outputs and residuals of cuDNN's or `flash`, on a machine
without them."""
LOG2_E = math.log2(math.e)


class FlashInputs(NamedTuple):
    """The arrays besides queries, keys and values; None where there is no such thing.

    Attributes:
      first, second: words of the rows of probabilities (`DropoutKey.row_words`).
      documents: number of each token's document.
      slopes: of ALiBi.
      starts: the first block of each half of the queries among those of the keys, where the queries are not
        all positions, in order; then there are more keys than queries.
    """

    first: UInt32[Array, "b n s"] | None = None
    second: UInt32[Array, "b n s"] | None = None
    documents: Int[Array, "b S"] | None = None
    slopes: Float[Array, " n"] | None = None
    starts: Int[Array, 2] | None = None


def attend_fused(
    q: Float[Array, "b s n d"], k: Float[Array, "b S k d"], v: Float[Array, "b S k e"], mask: AttentionMask, kernel: str
) -> Float[Array, "b s n e"]:
    """`attention_kernels.attend` with a kernel that writes no scores: cuDNN's, `flash`, or what stands in for one.

    Raises:
      UsageError: the kernel cannot do what is asked; by the config `config/kernels.py` chooses one that can.
    """
    lacks = {"values of another width": v.shape[-1] != q.shape[-1]}
    if kernel == "cudnn":
        lacks |= {"dropout": mask.key is not None, "queries of some positions": mask.position_ids is not None}
    for feature, needed in lacks.items():
        if needed and kernel in FUSED:
            raise UsageError(f"--model.attention {kernel} is not supported with {feature}; use --model.attention xla")
    attend = _attend_cudnn if kernel in ("cudnn", FLASH_STAND_IN) else _attend_flash
    return attend(q, k, v, kernel, mask)


def _attend_cudnn(q: Array, k: Array, v: Array, kernel: str, mask: AttentionMask) -> Array:
    # JAX passes a mask to cuDNN as a bias, which is written out, and cuDNN writes out its gradient, which is not used:
    # 2 b s² bytes each, once for all heads and layers.
    documents = mask.documents
    same = None if documents is None else documents[:, None, :, None] == documents[:, None, None]  # [b, 1, s, s]
    # The same for ALiBi, whose penalty differs between heads: 2 n s² bytes each for it and its gradient, and together
    # with documents 2 b n s².
    bias = None
    if mask.slopes is not None:
        query, other = (jax.lax.broadcasted_iota(jnp.int32, (q.shape[1], q.shape[1]), dim) for dim in (0, 1))
        bias = distance_penalty(mask.slopes, other - query, q.dtype)[None]
    if kernel == FLASH_STAND_IN:
        return flash_stand_in(q, k, v, *(x.astype(q.dtype) for x in (bias, same) if x is not None))
    local = None if mask.window is None else (mask.window - 1, 0)  # JAX counts positions without the query's own
    return jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=same, is_causal=mask.causal, local_window_size=local, implementation="cudnn"
    )


def _attend_flash(q: Array, k: Array, v: Array, kernel: str, mask: AttentionMask) -> Array:
    (positions, heads), rows = q.shape[1:3], mask.position_ids
    run = positions if rows is None else positions // 2
    assert run % BLOCK == k.shape[1] % BLOCK == 0, "flash takes whole blocks of queries and keys (position_unit)"
    words = None, None
    if mask.key is not None:
        words = mask.key.row_words(mask.heads(heads), jnp.arange(positions) if rows is None else rows)
    starts = None if rows is None else jnp.stack([rows[0], rows[positions // 2]]) // BLOCK
    aux = FlashInputs(*words, mask.documents, mask.slopes, starts)
    static = AttentionMask(mask.causal, mask.window, rate=mask.rate)
    return flash_attention(q, k, v, aux, static, kernel == FLASH_INTERPRETED)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def flash_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b S k d"],
    v: Float[Array, "b S k d"],
    aux: FlashInputs,
    how: AttentionMask,
    interpret: bool = False,
) -> Float[Array, "b s n d"]:
    """Attention of the queries to keys and values, of which each has n / k neighbouring query heads.

    S is s, or with `aux.starts` more; documents are those of the keys. `how` has no arrays. With `interpret` the
    kernels run without a GPU, for tests.
    """
    return _forward(q, k, v, aux, how, interpret)[0]


def _forward(q: Array, k: Array, v: Array, aux: FlashInputs, how: AttentionMask, interpret: bool):
    batch, positions, heads, _ = q.shape
    specs, grid = _Specs(q, k, aux), (positions // BLOCK, batch, heads)
    ins, outs = [specs.query_block, specs.keys, specs.keys, *specs.aux], [specs.query_block, specs.row_block]
    shapes = [_like(q), _like(q, (batch, heads, positions), jnp.float32)]
    out, log_sums = _run(_forward_kernel, 2, how, interpret, grid, ins, outs, shapes, (q, k, v, *aux))
    return out, (q, k, v, aux, out, log_sums)


def _backward(how: AttentionMask, interpret: bool, residuals, gradient: Array):
    q, k, v, aux, out, log_sums = residuals
    batch, positions, heads, _ = q.shape
    wide = jnp.float32
    deltas = jnp.einsum("bsnd,bsnd->bns", out.astype(wide), gradient.astype(wide))
    inputs = (q, k, v, gradient, log_sums, deltas, *aux)
    specs, grid = _Specs(q, k, aux, heads // k.shape[2]), (k.shape[1] // BLOCK, batch, k.shape[2])
    ins = [specs.queries, specs.key_block, specs.key_block, specs.queries, specs.rows, specs.rows, *specs.aux]
    outs, shapes = [specs.key_block] * 2, [_like(q, k.shape)] * 2
    to_k, to_v = _run(_keys_kernel, 4, how, interpret, grid, ins, outs, shapes, inputs)
    specs, grid = _Specs(q, k, aux), (positions // BLOCK, batch, heads)
    ins = [specs.query_block, specs.keys, specs.keys, specs.query_block, specs.row_block, specs.row_block, *specs.aux]
    to_q = _run(_queries_kernel, 3, how, interpret, grid, ins, specs.query_block, _like(q), inputs)
    return to_q, to_k, to_v, None


flash_attention.defvjp(_forward, _backward)


def _like(x: Array, shape: tuple[int, ...] | None = None, dtype=None) -> jax.ShapeDtypeStruct:
    """A result that varies over the same mesh axes as `x`."""
    return jax.ShapeDtypeStruct(shape or x.shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).mat)


def _run(kernel: Callable, products: int, how: AttentionMask, interpret: bool, grid, ins, outs, out_shape, inputs):
    """Run a kernel over a grid, with its role and its number of matmuls of s × s in its name in a compiled program."""
    return pl.pallas_call(
        partial(kernel, how=how, size=inputs[0].shape[-1]),
        grid=grid,
        in_specs=ins,
        out_specs=outs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=f"flash{kernel.__name__.removesuffix('_kernel')}{'_causal' * how.causal}_of_{products}",
    )(*inputs)


class _Specs:
    """The part of each array that a program of the grid (block, sample, head) gets. A head is a query head, or with
    `queries` above 1 a key-value head with its query heads. Head sizes are padded to a power of two, as Triton's tiles
    need; `_load` masks the padding."""

    def __init__(self, q: Array, k: Array, aux: FlashInputs, queries: int = 1):
        positions, size, group = q.shape[1], pl.next_power_of_2(q.shape[-1]), q.shape[2] // k.shape[2] // queries
        all_positions = k.shape[1]
        self.query_block = pl.BlockSpec((None, BLOCK, None, size), lambda i, b, n: (b, i, n, 0))
        self.queries = pl.BlockSpec((None, positions, queries, size), lambda i, b, n: (b, 0, n, 0))
        self.key_block = pl.BlockSpec((None, BLOCK, None, size), lambda i, b, n: (b, i, n // group, 0))
        self.keys = pl.BlockSpec((None, all_positions, None, size), lambda i, b, n: (b, 0, n // group, 0))
        self.row_block = pl.BlockSpec((None, None, BLOCK), lambda i, b, n: (b, n, i))
        self.rows = pl.BlockSpec((None, queries, positions), lambda i, b, n: (b, n, 0))
        documents = pl.BlockSpec((None, all_positions), lambda i, b, n: (b, 0))
        slope = pl.BlockSpec((queries,), lambda i, b, n: (n,))
        starts = pl.BlockSpec((2,), lambda i, b, n: (0,))
        every = FlashInputs(self.rows, self.rows, documents, slope, starts)
        self.aux = [None if array is None else spec for array, spec in zip(aux, every, strict=True)]


# --- Traced only ------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def flash_stand_in(q: Array, k: Array, v: Array, *biases: Array) -> Array:
    """Inputs, outputs and residuals of a fused kernel; `biases` are what is written out for it."""
    return _stand_in_forward(q, k, v, *biases)[0]


def _stand_in_forward(*inputs: Array):
    # Besides its result cuDNN's kernel keeps a float32 number for each row of scores.
    like = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype), jax.ShapeDtypeStruct(inputs[0].shape[:-1], "float32")
    context, rows = _never_run(like, *inputs)
    return context, (*inputs, context, rows)


def _stand_in_backward(residuals: tuple[Array, ...], gradient: Array):
    inputs = residuals[:-2]
    return tuple(_never_run([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs], *residuals, gradient))


flash_stand_in.defvjp(_stand_in_forward, _stand_in_backward)


def _never_run(results, *inputs: Array) -> list[Array]:
    def refuse(*_):
        raise NotImplementedError("this attention kernel stands in for cuDNN's in programs that are only traced")

    axes = frozenset().union(*map(mappings.varying_axes, inputs))
    return [mappings.vary(result, axes) for result in jax.pure_callback(refuse, results, *inputs)]


# --- In a program of the grid -----------------------------------------------------------------------------------------


def _span(block) -> pl.Slice:
    return pl.ds(block * BLOCK, BLOCK)


def _load(ref, size: int, *block) -> Array:
    """Rows of a reference [s, padded size], all of it or a block, or [s, heads, padded size], a block of a head; zeros
    in the padding."""
    mask = (jnp.arange(ref.shape[-1]) < size)[None, :]
    if block:
        first, *head = block
        ref = ref.at[_span(first), *head, :]
    return triton.load(ref, mask=mask, other=0.0)


def _store(ref, values: Array, size: int) -> None:
    mask = (jnp.arange(ref.shape[-1]) < size)[None, :]
    triton.store(ref, values.astype(ref.dtype), mask=mask)


class _Query(NamedTuple):
    """A block of queries: its number among this rank's, and among all, which those of keys are counted with; and its
    head among those of the program."""

    local: Array
    position: Array
    head: Array | int


def _query(local, blocks: int, aux: FlashInputs, head: Array | int = 0) -> _Query:
    """The block with this number, of so many."""
    if aux.starts is None:
        return _Query(local, local, head)
    half = blocks // 2
    first, second = aux.starts[0], aux.starts[1]
    return _Query(local, jnp.where(local < half, first + local, second + local - half), head)


def _scores(q: Array, k: Array, query: _Query, key, aux: FlashInputs, how: AttentionMask, size: int) -> Array:
    """Scores of a block of queries and a block of keys, over log 2, with MASKED where a query does not see a key:
    float32 [BLOCK, BLOCK]."""
    scores = triton.dot(q, k.T) * (LOG2_E / math.sqrt(size))
    row, column = query.position * BLOCK + jnp.arange(BLOCK)[:, None], key * BLOCK + jnp.arange(BLOCK)[None, :]
    seen = how.visible(row, column)
    if aux.slopes is not None:
        scores += (LOG2_E * aux.slopes[query.head]) * (column - row).astype(jnp.float32)
    if aux.documents is not None:
        same = aux.documents[_span(query.position)][:, None] == aux.documents[_span(key)][None, :]
        seen = same & seen
    return scores if seen is True else jnp.where(seen, scores, MASKED)


def _apply_dropout(x: Array, query: _Query, key, aux: FlashInputs, how: AttentionMask) -> Array:
    """A tile of probabilities, or of their gradients, with dropout."""
    if aux.first is None:
        return x
    first, second = (words[query.head, _span(query.local)][:, None] for words in (aux.first, aux.second))
    column = (key * BLOCK + jnp.arange(BLOCK)[None, :]).astype(jnp.uint32)
    return jnp.where(keep_mask_from_words(how.rate, first, second, column), x * (1.0 / (1.0 - how.rate)), 0.0)


def _key_range(query: _Query, blocks: int, how: AttentionMask) -> tuple:
    """The first and the last but one of the blocks of keys that a block of queries sees."""
    if not how.causal:
        return 0, blocks
    first = 0 if how.window is None else lax.max(0, lax.div(query.position * BLOCK - how.window + 1, BLOCK))
    return first, query.position + 1


def _query_range(key, blocks: int, aux: FlashInputs, how: AttentionMask) -> list[tuple]:
    """The same of the blocks of queries that see a block of keys, in each run of neighbours."""
    if not how.causal:
        return [(0, blocks)]
    last = None if how.window is None else lax.div((key + 1) * BLOCK + how.window - 2, BLOCK) + 1
    if aux.starts is None:
        return [(key, blocks if last is None else lax.min(blocks, last))]
    half = blocks // 2
    ranges = []
    for i in (0, 1):
        ahead = i * half - aux.starts[i]  # of its number among this rank's blocks before that among all
        end = (i + 1) * half
        ranges.append((lax.max(i * half, key + ahead), end if last is None else lax.min(end, last + ahead)))
    return ranges


def _forward_kernel(q_ref, k_ref, v_ref, *refs, how: AttentionMask, size: int) -> None:
    *aux, out_ref, log_sum_ref = refs
    aux, q = FlashInputs(*aux), _load(q_ref, size)
    query = _query(pl.program_id(0), pl.num_programs(0), aux)

    def add(key, carry):
        out, highest, total = carry
        scores = _scores(q, _load(k_ref, size, key), query, key, aux, how, size)
        following = jnp.maximum(highest, scores.max(-1))
        correction = jnp.exp2(highest - following)
        exponentials = jnp.exp2(scores - following[:, None])
        total = total * correction + exponentials.sum(-1)
        v = _load(v_ref, size, key)
        dropped = _apply_dropout(exponentials, query, key, aux, how).astype(v.dtype)
        return out * correction[:, None] + triton.dot(dropped, v), following, total

    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(BLOCK, MASKED, jnp.float32), jnp.zeros(BLOCK, jnp.float32)
    out, highest, total = lax.fori_loop(*_key_range(query, k_ref.shape[0] // BLOCK, how), add, nothing)
    _store(out_ref, out / total[:, None], size)
    log_sum_ref[...] = highest + jnp.log2(total)


def _tile(q, k, v, gradient, log_sums, deltas, query: _Query, key, aux: FlashInputs, how: AttentionMask, size: int):
    """The probabilities of a tile after dropout, and the gradient of its scores."""
    probabilities = jnp.exp2(_scores(q, k, query, key, aux, how, size) - log_sums[:, None])
    to_dropped = _apply_dropout(triton.dot(gradient, v.T), query, key, aux, how)
    to_scores = probabilities * (to_dropped - deltas[:, None]) * (1 / math.sqrt(size))
    return _apply_dropout(probabilities, query, key, aux, how), to_scores


def _keys_kernel(
    q_ref, k_ref, v_ref, gradient_ref, log_sum_ref, delta_ref, *refs, how: AttentionMask, size: int
) -> None:
    *aux, to_k_ref, to_v_ref = refs
    aux, key, k, v = FlashInputs(*aux), pl.program_id(0), _load(k_ref, size), _load(v_ref, size)
    blocks = q_ref.shape[0] // BLOCK

    def add(head, local, carry):
        to_k, to_v = carry
        query = _query(local, blocks, aux, head)
        q, gradient = _load(q_ref, size, local, head), _load(gradient_ref, size, local, head)
        of_rows = log_sum_ref[head, _span(local)], delta_ref[head, _span(local)]
        dropped, to_scores = _tile(q, k, v, gradient, *of_rows, query, key, aux, how, size)
        to_v += triton.dot(dropped.astype(gradient.dtype).T, gradient)
        return to_k + triton.dot(to_scores.astype(q.dtype).T, q), to_v

    def add_head(head, sums):
        for run in _query_range(key, blocks, aux, how):
            sums = lax.fori_loop(*run, partial(add, head), sums)
        return sums

    nothing = jnp.zeros(k.shape, jnp.float32)
    to_k, to_v = lax.fori_loop(0, q_ref.shape[1], add_head, (nothing, nothing))
    _store(to_k_ref, to_k, size)
    _store(to_v_ref, to_v, size)


def _queries_kernel(
    q_ref, k_ref, v_ref, gradient_ref, log_sum_ref, delta_ref, *refs, how: AttentionMask, size: int
) -> None:
    *aux, to_q_ref = refs
    aux, q, gradient = FlashInputs(*aux), _load(q_ref, size), _load(gradient_ref, size)
    query = _query(pl.program_id(0), pl.num_programs(0), aux)
    of_rows = log_sum_ref[...], delta_ref[...]

    def add(key, to_q):
        k, v = _load(k_ref, size, key), _load(v_ref, size, key)
        _, to_scores = _tile(q, k, v, gradient, *of_rows, query, key, aux, how, size)
        return to_q + triton.dot(to_scores.astype(k.dtype), k)

    blocks = _key_range(query, k_ref.shape[0] // BLOCK, how)
    _store(to_q_ref, lax.fori_loop(*blocks, add, jnp.zeros(q.shape, jnp.float32)), size)
