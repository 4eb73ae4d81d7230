"""The fused attention kernels: cuDNN's, and `flash`, with dropout, in Pallas for GPUs (arXiv 2307.08691).

cuDNN's attention has no dropout in JAX's public interface, and XLA's writes scores and probabilities [b, n, s, s] to
memory. Here each tile hashes its dropout mask from `DropoutKey.row_words`, next to its probabilities. The masks equal
the other kernels' masks on every mesh, and no s × s array is stored.

With P = softmax(S), M the mask over 1 − rate, and O = (P ∘ M) V, the backward pass recomputes P and M, by tiles:

    dV = (P ∘ M)ᵀ dO      dS = P ∘ (M ∘ (dO Vᵀ) − D)      D_i = Σ_j P_ij M_ij (dO Vᵀ)_ij = Σ_d dO_id O_id

    kernel     a program has       and loops over           it writes
    forward    a block of queries  blocks of keys           O, and for each row the logarithm of its sum
    keys       a block of keys     blocks of queries        dK and dV, summed over the query heads of a key's head
    queries    a block of queries  blocks of keys           dQ
"""

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

from mjax.config.kernels import BLOCK, FLASH_INTERPRETED, FUSED, AttentionWork, kernel_obstacle
from mjax.errors import UsageError
from mjax.models.parts.mask import MASKED, AttentionMask
from mjax.models.parts.positions import distance_penalty
from mjax.parallel.autodiff import match_varying_axes
from mjax.parallel.random import keep_mask_from_words

FLASH_STAND_IN = "cudnn, traced only"
"""Kernel name for a program that is only traced: inputs, outputs and residuals of cuDNN's or `flash`, on a machine
without them."""
LOG2_E = math.log2(math.e)


class FlashInputs(NamedTuple):
    """The arrays besides queries, keys and values; None if not used.

    Attributes:
      first, second: words of the rows of probabilities (`DropoutKey.row_words`).
      documents: number of each token's document.
      slopes: of ALiBi.
      starts: index of each query half's first block among the key blocks; needed if a rank has more keys than queries.
    """

    first: UInt32[Array, "b n s"] | None = None
    second: UInt32[Array, "b n s"] | None = None
    documents: Int[Array, "b S"] | None = None
    slopes: Float[Array, " n"] | None = None
    starts: Int[Array, " 2"] | None = None


def attend_fused(
    q: Float[Array, "b s n d"], k: Float[Array, "b S k d"], v: Float[Array, "b S k e"], mask: AttentionMask, kernel: str
) -> Float[Array, "b s n e"]:
    """`attention_kernels.attend` with a kernel that writes no scores: cuDNN's, `flash`, or a stand-in.

    They need one width of queries, keys and values. The narrower are padded with zeros, which change no score.

    Raises:
      UsageError: the kernel does not support it; `config/kernels.py` chooses one that does.
    """
    size, width, positions = v.shape[-1], max(q.shape[-1], v.shape[-1]), k.shape[1]
    chunks = 1 if mask.position_ids is None else 2 * positions // q.shape[1]
    bias = "documents" if mask.documents is not None else "ALiBi" if mask.slopes is not None else ""
    work = AttentionWork(width, positions, chunks, mask.rate if mask.key is not None else 0.0, bias)
    if kernel in FUSED and (obstacle := kernel_obstacle(kernel, work)):
        raise UsageError(f"--model.attention {kernel} is not supported here ({obstacle}); use --model.attention xla")
    if size != q.shape[-1]:
        q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q, k, v))
    attend = _attend_cudnn if kernel in ("cudnn", FLASH_STAND_IN) else _attend_flash
    return attend(q, k, v, kernel, mask)[..., :size]


def _attend_cudnn(q: Array, k: Array, v: Array, kernel: str, mask: AttentionMask) -> Array:
    # JAX passes a mask to cuDNN as a bias in memory, and cuDNN writes its gradient to memory, which is not used:
    # 2 b s² bytes each, once for all heads and layers.
    documents = mask.documents
    same = None if documents is None else documents[:, None, :, None] == documents[:, None, None]  # [b, 1, s, s]
    # The same for ALiBi, whose penalty differs between heads: 2 n s² bytes each for it and its gradient, and together
    # with documents 2 b n s².
    bias = None
    if mask.slopes is not None:
        query, key = (jax.lax.broadcasted_iota(jnp.int32, (q.shape[1], q.shape[1]), dim) for dim in (0, 1))
        bias = distance_penalty(mask.slopes, key - query, q.dtype)[None]
    if kernel == FLASH_STAND_IN:
        return flash_stand_in(q, k, v, *(x.astype(q.dtype) for x in (bias, same) if x is not None))
    local = None if mask.window is None else (mask.window - 1, 0)  # JAX does not count the query's position
    return jax.nn.dot_product_attention(
        q, k, v, bias, same, scale=mask.scale, is_causal=mask.causal, local_window_size=local, implementation="cudnn"
    )


def _attend_flash(q: Array, k: Array, v: Array, kernel: str, mask: AttentionMask) -> Array:
    (positions, heads), rows = q.shape[1:3], mask.position_ids
    words = None, None
    if mask.key is not None:
        words = mask.key.row_words(mask.heads(heads), jnp.arange(positions) if rows is None else rows)
    starts = None if rows is None else jnp.stack([rows[0], rows[positions // 2]]) // BLOCK
    aux = FlashInputs(*words, mask.documents, mask.slopes, starts)
    static = AttentionMask(mask.causal, mask.window, mask.scale, mask.rate)
    return flash_attention(q, k, v, aux, static, kernel == FLASH_INTERPRETED)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def flash_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b S k d"],
    v: Float[Array, "b S k d"],
    aux: FlashInputs,
    mask: AttentionMask,
    interpret: bool = False,
) -> Float[Array, "b s n d"]:
    """Attend with queries to keys and values; each key-value head serves n / k neighboring query heads.

    S is s, or with `aux.starts` more; `documents` belong to the keys. `mask` has no arrays. With `interpret` the
    kernels run without a GPU, for tests.
    """
    return _forward(q, k, v, aux, mask, interpret)[0]


def _forward(q: Array, k: Array, v: Array, aux: FlashInputs, mask: AttentionMask, interpret: bool):
    batch, positions, heads, _ = q.shape
    specs, grid = _Specs(q, k, aux), (positions // BLOCK, batch, heads)
    ins, outs = [specs.query_block, specs.keys, specs.keys, *specs.aux], [specs.query_block, specs.row_block]
    shapes = [_like(q), _like(q, (batch, heads, positions), jnp.float32)]
    out, log_sums = _call(_forward_kernel, 2, mask, interpret, grid, ins, outs, shapes, (q, k, v, *aux))
    return out, (q, k, v, aux, out, log_sums)


def _backward(mask: AttentionMask, interpret: bool, residuals, gradient: Array):
    q, k, v, aux, out, log_sums = residuals
    batch, positions, heads, _ = q.shape
    wide = jnp.float32
    deltas = jnp.einsum("bsnd,bsnd->bns", out.astype(wide), gradient.astype(wide))
    inputs = (q, k, v, gradient, log_sums, deltas, *aux)
    specs, grid = _Specs(q, k, aux, heads // k.shape[2]), (k.shape[1] // BLOCK, batch, k.shape[2])
    ins = [specs.queries, specs.key_block, specs.key_block, specs.queries, specs.rows, specs.rows, *specs.aux]
    outs, shapes = [specs.key_block] * 2, [_like(q, k.shape)] * 2
    dk, dv = _call(_keys_kernel, 4, mask, interpret, grid, ins, outs, shapes, inputs)
    specs, grid = _Specs(q, k, aux), (positions // BLOCK, batch, heads)
    ins = [specs.query_block, specs.keys, specs.keys, specs.query_block, specs.row_block, specs.row_block, *specs.aux]
    dq = _call(_queries_kernel, 3, mask, interpret, grid, ins, specs.query_block, _like(q), inputs)
    return dq, dk, dv, None


flash_attention.defvjp(_forward, _backward)


def _like(x: Array, shape: tuple[int, ...] | None = None, dtype=None) -> jax.ShapeDtypeStruct:
    """A result that varies over the same mesh axes as `x`."""
    return jax.ShapeDtypeStruct(shape or x.shape, dtype or x.dtype, manual_axis_type=jax.typeof(x).mat)


def _call(kernel: Callable, matmuls: int, mask: AttentionMask, interpret: bool, grid, ins, outs, out_shape, inputs):
    """Run a kernel over a grid, with its role and its number of matmuls of s × s in its name in a compiled program."""
    return pl.pallas_call(
        partial(kernel, mask=mask, size=inputs[0].shape[-1]),
        grid=grid,
        in_specs=ins,
        out_specs=outs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name=f"flash{kernel.__name__.removesuffix('_kernel')}{'_causal' * mask.causal}_of_{matmuls}",
    )(*inputs)


class _Specs:
    """The part of each array in a program of the grid (block, sample, head). A head is a query head, or with `queries`
    above 1 a key-value head with its query heads. Head sizes are padded to a power of two, as Triton's tiles need;
    `_load` masks the padding."""

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
        aux_specs = FlashInputs(self.rows, self.rows, documents, slope, starts)
        self.aux = [None if array is None else spec for array, spec in zip(aux, aux_specs, strict=True)]


# --- Traced only ------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def flash_stand_in(q: Array, k: Array, v: Array, *biases: Array) -> Array:
    """Inputs, outputs and residuals of a fused kernel; `biases` are the biases that it needs in memory."""
    return _stand_in_forward(q, k, v, *biases)[0]


def _stand_in_forward(*inputs: Array):
    # Besides its result cuDNN's kernel saves a float32 number for each row of scores.
    like = jax.ShapeDtypeStruct(inputs[0].shape, inputs[0].dtype), jax.ShapeDtypeStruct(inputs[0].shape[:-1], "float32")
    attended, rows = _never_run(like, *inputs)
    return attended, (*inputs, attended, rows)


def _stand_in_backward(residuals: tuple[Array, ...], gradient: Array):
    inputs = residuals[:-2]
    return tuple(_never_run([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs], *residuals, gradient))


flash_stand_in.defvjp(_stand_in_forward, _stand_in_backward)


def _never_run(results, *inputs: Array) -> list[Array]:
    def refuse(*_):
        raise NotImplementedError("this attention kernel stands in for cuDNN's in programs that are only traced")

    return list(match_varying_axes(jax.pure_callback(refuse, results, *inputs), inputs)[0])


# --- In a program of the grid -----------------------------------------------------------------------------------------


def _block_slice(block) -> pl.Slice:
    return pl.ds(block * BLOCK, BLOCK)


def _load(ref, size: int, *block) -> Array:
    """Rows of a reference [s, padded size], all of it or a block, or [s, heads, padded size], a block of a head; zeros
    in the padding."""
    mask = (jnp.arange(ref.shape[-1]) < size)[None, :]
    if block:
        first, *head = block
        ref = ref.at[_block_slice(first), *head, :]
    return triton.load(ref, mask=mask, other=0.0)


def _store(ref, values: Array, size: int) -> None:
    mask = (jnp.arange(ref.shape[-1]) < size)[None, :]
    triton.store(ref, values.astype(ref.dtype), mask=mask)


class _Query(NamedTuple):
    """A block of queries: its number on this rank, its number among the blocks of keys, and its head within the
    program."""

    local: Array
    position: Array
    head: Array | int


def _make_query(local, blocks: int, aux: FlashInputs, head: Array | int = 0) -> _Query:
    """The block with this number, of so many."""
    if aux.starts is None:
        return _Query(local, local, head)
    half = blocks // 2
    first, second = aux.starts[0], aux.starts[1]
    return _Query(local, jnp.where(local < half, first + local, second + local - half), head)


def _scores(q: Array, k: Array, query: _Query, key, aux: FlashInputs, mask: AttentionMask) -> Array:
    """Scores of a block of queries and a block of keys, over log 2, with MASKED where a key is not visible: float32
    [BLOCK, BLOCK]."""
    scores = triton.dot(q, k.T) * (LOG2_E * mask.scale)
    row, column = query.position * BLOCK + jnp.arange(BLOCK)[:, None], key * BLOCK + jnp.arange(BLOCK)[None, :]
    visible = mask.visible(row, column)
    if aux.slopes is not None:
        scores += (LOG2_E * aux.slopes[query.head]) * (column - row).astype(jnp.float32)
    if aux.documents is not None:
        same = aux.documents[_block_slice(query.position)][:, None] == aux.documents[_block_slice(key)][None, :]
        visible = same & visible
    return scores if visible is True else jnp.where(visible, scores, MASKED)


def _apply_dropout(x: Array, query: _Query, key, aux: FlashInputs, mask: AttentionMask) -> Array:
    """A tile of probabilities, or of their gradients, with dropout."""
    if aux.first is None:
        return x
    first, second = (words[query.head, _block_slice(query.local)][:, None] for words in (aux.first, aux.second))
    column = (key * BLOCK + jnp.arange(BLOCK)[None, :]).astype(jnp.uint32)
    return jnp.where(keep_mask_from_words(mask.rate, first, second, column), x * (1.0 / (1.0 - mask.rate)), 0.0)


def _key_range(query: _Query, blocks: int, mask: AttentionMask) -> tuple:
    """The range of the blocks of keys that are visible to a block of queries."""
    if not mask.causal:
        return 0, blocks
    first = 0 if mask.window is None else lax.max(0, lax.div(query.position * BLOCK - mask.window + 1, BLOCK))
    return first, query.position + 1


def _query_range(key, blocks: int, aux: FlashInputs, mask: AttentionMask) -> list[tuple]:
    """The ranges of the blocks of queries to which a block of keys is visible, one for each run of neighbors."""
    if not mask.causal:
        return [(0, blocks)]
    last = None if mask.window is None else lax.div((key + 1) * BLOCK + mask.window - 2, BLOCK) + 1
    if aux.starts is None:
        return [(key, blocks if last is None else lax.min(blocks, last))]
    half = blocks // 2
    ranges = []
    for i in (0, 1):
        ahead = i * half - aux.starts[i]  # a block's number among this rank's, less that among all
        end = (i + 1) * half
        ranges.append((lax.max(i * half, key + ahead), end if last is None else lax.min(end, last + ahead)))
    return ranges


def _forward_kernel(q_ref, k_ref, v_ref, *refs, mask: AttentionMask, size: int) -> None:
    *aux, out_ref, log_sum_ref = refs
    aux, q = FlashInputs(*aux), _load(q_ref, size)
    query = _make_query(pl.program_id(0), pl.num_programs(0), aux)

    def add(key, carry):
        out, largest, total = carry
        scores = _scores(q, _load(k_ref, size, key), query, key, aux, mask)
        new_largest = jnp.maximum(largest, scores.max(-1))
        correction = jnp.exp2(largest - new_largest)
        exponentials = jnp.exp2(scores - new_largest[:, None])
        total = total * correction + exponentials.sum(-1)
        v = _load(v_ref, size, key)
        dropped = _apply_dropout(exponentials, query, key, aux, mask).astype(v.dtype)
        return out * correction[:, None] + triton.dot(dropped, v), new_largest, total

    start = jnp.zeros(q.shape, jnp.float32), jnp.full(BLOCK, MASKED, jnp.float32), jnp.zeros(BLOCK, jnp.float32)
    out, largest, total = lax.fori_loop(*_key_range(query, k_ref.shape[0] // BLOCK, mask), add, start)
    _store(out_ref, out / total[:, None], size)
    log_sum_ref[...] = largest + jnp.log2(total)


def _tile_grad(q, k, v, gradient, log_sums, deltas, query: _Query, key, aux: FlashInputs, mask: AttentionMask):
    """The probabilities of a tile after dropout, and the gradient of its scores."""
    probabilities = jnp.exp2(_scores(q, k, query, key, aux, mask) - log_sums[:, None])
    ddropped = _apply_dropout(triton.dot(gradient, v.T), query, key, aux, mask)
    dscores = probabilities * (ddropped - deltas[:, None]) * mask.scale
    return _apply_dropout(probabilities, query, key, aux, mask), dscores


def _keys_kernel(
    q_ref, k_ref, v_ref, gradient_ref, log_sum_ref, delta_ref, *refs, mask: AttentionMask, size: int
) -> None:
    *aux, dk_ref, dv_ref = refs
    aux, key, k, v = FlashInputs(*aux), pl.program_id(0), _load(k_ref, size), _load(v_ref, size)
    blocks = q_ref.shape[0] // BLOCK

    def add(head, local, carry):
        dk, dv = carry
        query = _make_query(local, blocks, aux, head)
        q, gradient = _load(q_ref, size, local, head), _load(gradient_ref, size, local, head)
        row_inputs = log_sum_ref[head, _block_slice(local)], delta_ref[head, _block_slice(local)]
        dropped, dscores = _tile_grad(q, k, v, gradient, *row_inputs, query, key, aux, mask)
        dv += triton.dot(dropped.astype(gradient.dtype).T, gradient)
        return dk + triton.dot(dscores.astype(q.dtype).T, q), dv

    def add_head(head, sums):
        for run in _query_range(key, blocks, aux, mask):
            sums = lax.fori_loop(*run, partial(add, head), sums)
        return sums

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, q_ref.shape[1], add_head, (zeros, zeros))
    _store(dk_ref, dk, size)
    _store(dv_ref, dv, size)


def _queries_kernel(
    q_ref, k_ref, v_ref, gradient_ref, log_sum_ref, delta_ref, *refs, mask: AttentionMask, size: int
) -> None:
    *aux, dq_ref = refs
    aux, q, gradient = FlashInputs(*aux), _load(q_ref, size), _load(gradient_ref, size)
    query = _make_query(pl.program_id(0), pl.num_programs(0), aux)
    row_inputs = log_sum_ref[...], delta_ref[...]

    def add(key, dq):
        k, v = _load(k_ref, size, key), _load(v_ref, size, key)
        _, dscores = _tile_grad(q, k, v, gradient, *row_inputs, query, key, aux, mask)
        return dq + triton.dot(dscores.astype(k.dtype), k)

    blocks = _key_range(query, k_ref.shape[0] // BLOCK, mask)
    _store(dq_ref, lax.fori_loop(*blocks, add, jnp.zeros(q.shape, jnp.float32)), size)
