"""Attention, causal or to both sides: the kernels, and the choice among them.

| kernel       | where            | what it does                                                            |
|--------------|------------------|-------------------------------------------------------------------------|
| `cudnn`      | GPUs since A100  | cuDNN's fused flash attention: no s × s matrix in memory, no dropout     |
| `xla`        | anywhere         | scores, softmax and weighted sum as XLA compiles them                   |
| `xla_blocks` | meant for CPUs   | the same over four blocks of queries, leaving out keys of the future    |

All take q, k, v [b, s, n, d] with this rank's heads and return [b, s, n, d]. The kernel of a run is resolved once, at
the start, by rule (`kernels.py`) and by running it (`resolve_attention`); nothing falls back on the way.

Where a sample holds several documents and they must not see each other, all kernels take the number of each token's
document and mask what is not its own. With ALiBi all take the slopes of the heads (`alibi.py`) and add a penalty on
distance to the scores; cuDNN's kernel alone has to be given it written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mjax.config import Config, ModelConfig
from mjax.errors import UsageError
from mjax.models.alibi import alibi_slopes, distance_penalty
from mjax.models.kernels import capability_of, choose_kernel
from mjax.parallel import mappings
from mjax.parallel.mappings import MODEL
from mjax.parallel.random import DropoutKey, dropout

FLASH_STAND_IN = "cudnn, traced only"
"""Kernel name for a program that is only traced: what cuDNN's takes, gives and keeps, on a machine without it."""

# A finite stand-in for −∞: added to a score it leaves exp() exactly 0, and no NaN in any type wider than fp16.
MASKED = -1e30


def attend(
    q: Array,
    k: Array,
    v: Array,
    kernel: str,
    rate: float = 0.0,
    key: DropoutKey | None = None,
    documents: Array | None = None,
    causal: bool = True,
    slopes: Array | None = None,
) -> Array:
    """Softmax(q kᵀ / √d) v over the positions that each query sees: all, or with `causal` those up to its own; of these
    only those in its document, where `documents` are given.

    Args:
      q, k, v: [b, s, n, d].
      kernel: `cudnn`, `xla` or `xla_blocks`.
      rate, key: dropout of the probabilities; not with `cudnn`.
      documents: int [b, s], number of the document that a token belongs to; None: a sample is one document.
      causal: whether a query sees no later position; False: it sees those after it too (BERT).
      slopes: [n], ALiBi's, of these heads; only with `causal`. None: the scores know nothing of positions.
    """
    assert slopes is None or causal, "ALiBi says nothing about positions after a query's own"
    if slopes is not None:
        slopes = mappings.vary(slopes, mappings.varying_axes(q))
    if documents is not None:
        documents = mappings.vary(documents, mappings.varying_axes(q))
    if kernel in ("cudnn", FLASH_STAND_IN):
        assert rate == 0.0 or key is None, "cuDNN attention has no dropout in JAX's public interface"
        # JAX hands cuDNN a mask as a bias, which is written out, and cuDNN writes out a gradient of it that nobody
        # needs: 2 b s² bytes each, once for all heads and layers.
        mask = None if documents is None else _same_document(documents, documents)[:, None]  # [b, 1, s, s]
        # The same for ALiBi, whose penalty differs from head to head: 2 n s² bytes each for it and its gradient, and
        # together with documents 2 b n s².
        bias = None if slopes is None else _written_out(slopes, q.shape[1], q.dtype)
        if kernel == FLASH_STAND_IN:
            return _flash_stand_in(q, k, v, *(x.astype(q.dtype) for x in (bias, mask) if x is not None))
        return jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=causal, implementation="cudnn")
    if slopes is not None:
        # Tied to this layer: else JAX computes the penalty [n, s, s] before the loop over layers, and every layer reads
        # from memory what costs it nothing to compute.
        slopes, _ = jax.lax.optimization_barrier((slopes, jax.lax.stop_gradient(q[0, 0, 0, 0])))
    if kernel == "xla":
        return _attend_block(q, k, v, 0, rate, key, documents, causal, slopes)
    # On a CPU it pays to copy once into [b, n, s, d], to leave out the keys in the future of a whole block, and to
    # compute in float32: XLA runs small bf16 products there on one thread.
    dtype = q.dtype
    q, k, v = (x.swapaxes(1, 2).astype(jnp.promote_types(dtype, jnp.float32)) for x in (q, k, v))
    blocks = 4 if q.shape[2] % 4 == 0 else 1
    width = q.shape[2] // blocks
    outputs = []
    for first in range(0, q.shape[2], width):
        end = first + width
        read = end if causal else q.shape[2]
        outputs.append(
            _attend_block(
                q[:, :, first:end],
                k[:, :, :read],
                v[:, :, :read],
                first,
                rate,
                key,
                documents,
                causal,
                slopes,
                heads_first=True,
            )
        )
    return jnp.concatenate(outputs, axis=2).swapaxes(1, 2).astype(dtype)


def _attend_block(
    q: Array,
    k: Array,
    v: Array,
    first: int,
    rate: float,
    key: DropoutKey | None,
    documents: Array | None,
    causal: bool,
    slopes: Array | None,
    heads_first: bool = False,
) -> Array:
    """Attention of the queries from position `first` on: q [b, q, n, d], k and v [b, k, n, d] → [b, q, n, d].

    With `heads_first` all of them are [b, n, …, d]. `documents` are those of the whole sample.
    """
    queries, keys = ("bnqd", "bnkd") if heads_first else ("bqnd", "bknd")
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum(f"{queries},{keys}->bnqk", q / math.sqrt(q.shape[-1]), k, preferred_element_type=wide)
    visible = True
    if causal:
        # Counted on the device: an array from here would be a residual of every layer that computes its scores again.
        query, other = (jax.lax.broadcasted_iota(jnp.int32, scores.shape[2:], dim) for dim in (0, 1))
        visible = other <= first + query  # [q, k]
        if slopes is not None:
            scores = scores + distance_penalty(slopes, other - (first + query), wide)
    if documents is not None:
        end, read = first + scores.shape[2], scores.shape[3]
        same = _same_document(documents[:, first:end], documents[:, :read])
        visible = (visible & same)[:, None]  # [b, 1, q, k]
    # Added rather than selected: the backward pass of a sum keeps no mask.
    scores = scores + jnp.where(visible, 0.0, MASKED).astype(wide)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    if key is not None and rate > 0.0:
        local_heads = scores.shape[1]
        heads = mappings.rank(MODEL) * local_heads + jnp.arange(local_heads)
        probabilities = dropout(probabilities, rate, key, heads, first + jnp.arange(scores.shape[2]))
    return jnp.einsum(f"bnqk,{keys}->{queries}", probabilities, v)


@jax.custom_vjp
def _flash_stand_in(q: Array, k: Array, v: Array, *biases: Array) -> Array:
    return _flash_stand_in_forward(q, k, v, *biases)[0]


def _flash_stand_in_forward(*inputs: Array):
    # Beside its result cuDNN's kernel keeps a float32 number for each row of scores.
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


def _written_out(slopes: Array, positions: int, dtype) -> Array:
    """ALiBi's penalty between all positions of a sample: [1, n, s, s]."""
    query, other = (jax.lax.broadcasted_iota(jnp.int32, (positions, positions), dim) for dim in (0, 1))
    return distance_penalty(slopes, other - query, dtype)[None]


def _same_document(queries: Array, keys: Array) -> Array:
    """Whether query and key are of one document, from its number: int [b, q], int [b, k] → bool [b, q, k]."""
    return queries[:, :, None] == keys[:, None, :]


# --- One position after those in a cache ------------------------------------------------------------------------------


class KeyValues(NamedTuple):
    """Keys and values of the positions read so far: [b, S, n / p, d] each, or [l, b, S, n / p, d] of all layers."""

    keys: Array
    values: Array


def attend_cached(
    q: Array, k: Array, v: Array, cached: KeyValues, lengths: Array, slopes: Array | None = None
) -> Array:
    """Attention of one new position of each sequence over the positions before it and itself.

    The cache is only read, so a scan over layers need not copy it; the new key and value have a column of their own.

    Args:
      q, k, v: [b, 1, n, d], of the new positions.
      cached: [b, S, n, d], of which the first `lengths` slots of a sequence hold its positions.
      lengths: int [b].
      slopes: [n], ALiBi's, of these heads.

    Returns:
      [b, 1, n, d].
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = q / math.sqrt(q.shape[-1])
    before = jnp.einsum("bqnd,bknd->bnqk", q, cached.keys, preferred_element_type=wide)
    slots = jnp.arange(cached.keys.shape[1])
    if slopes is not None:  # a position's slot is its number; the new one, at `lengths`, is at no distance to itself
        before = before + distance_penalty(slopes, (slots - lengths[:, None])[:, None], wide)
    written = slots < lengths[:, None]
    before = before + jnp.where(written, 0.0, MASKED).astype(wide)[:, None, None]
    itself = jnp.einsum("bqnd,bqnd->bnq", q, k, preferred_element_type=wide)[..., None]
    probabilities = jax.nn.softmax(jnp.concatenate([before, itself], -1), axis=-1).astype(q.dtype)
    context = jnp.einsum("bnqk,bknd->bqnd", probabilities[..., :-1], cached.values)
    return context + jnp.einsum("bnqk,bknd->bqnd", probabilities[..., -1:], v)


# --- Which kernel a run uses ------------------------------------------------------------------------------------------


def with_kernel(config: Config, announce: Callable[[str], None] = print) -> Config:
    """`config` with the kernel that this process's devices will run in `model.attention` (`resolve_attention`).

    Raises:
      UsageError: the kernel asked for cannot do what the run needs, or fails when it is run.
    """
    documents = "documents" in config.batch_arrays()
    kernel = resolve_attention(config.model, config.precision.compute, jax.default_backend(), announce, documents)
    return replace(config, model=replace(config.model, attention=kernel))


def resolve_attention(
    model: ModelConfig,
    compute: str,
    platform: str,
    announce: Callable[[str], None] = print,
    documents: bool = False,
) -> str:
    """The kernel of this run: chosen by rule, then run once on a small array and compared with the plain one.

    Args:
      model: `model.attention` is the wish; `auto` leaves the choice to the rule in `kernels.py`.
      compute: compute type of the run, as in the config.
      platform: `jax.default_backend()`.
      announce: receives one sentence where a slower kernel than cuDNN's has to be taken on a GPU.
      documents: whether attention stays within documents (`data.reset_attention`, and BERT's padding).

    Raises:
      UsageError: the kernel asked for cannot do what the run needs, or fails when it is run.
    """
    capability = capability_of(jax.local_devices()[0])
    kernel, obstacle = choose_kernel(model, compute, platform, documents, capability)
    if model.attention == "auto" and platform == "gpu" and obstacle:
        announce(f"attention: the slower kernel xla is used instead of cuDNN flash, because {obstacle}")
    refusal = _self_test(kernel, model, compute, documents)
    if refusal is None:
        return kernel
    biased = [what for what, is_there in (("document masks", documents), ("ALiBi", _alibi(model))) if is_there]
    if model.attention == "auto" and kernel == "cudnn" and biased:  # a bias is not for every version and GPU
        what = " and ".join(biased)
        announce(f"attention: the slower kernel xla is used, because cuDNN flash refuses {what} ({refusal})")
        return "xla"
    raise UsageError(f"the attention kernel {kernel} does not run here ({refusal}); use --model.attention xla")


def _alibi(model: ModelConfig) -> bool:
    return model.positions == "alibi"


def _self_test(kernel: str, model: ModelConfig, compute: str, documents: bool) -> str | None:
    """Run `kernel` forward and backward on two heads, and compare with `xla` in float32.

    With `documents` on samples of several, each sample cut elsewhere.

    Returns:
      What was said where it does not run.

    Raises:
      UsageError: it gives wrong numbers.
    """
    if kernel == "xla":
        return None  # it is the reference
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(compute, jnp.float32)
    shape = (2, min(model.sequence, 128), 2, model.head_size)
    q, k, v = (jax.random.normal(key, shape, jnp.float32) for key in jax.random.split(jax.random.key(0), 3))
    numbers = jnp.arange(shape[1]) // jnp.array([[5], [7]]) if documents else None  # [b, s]
    slopes = jnp.asarray(alibi_slopes(shape[2])) if _alibi(model) else None

    def output_and_gradients(kernel, dtype):
        def total(q, k, v):
            q, k, v = (x.astype(dtype) for x in (q, k, v))
            out = attend(q, k, v, kernel, documents=numbers, causal=model.causal, slopes=slopes)
            out = out.astype(jnp.float32)
            return jnp.square(out).sum(), out

        return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    try:
        found = jax.block_until_ready(output_and_gradients(kernel, dtype))
    except Exception as error:  # whatever the library says, it says it about this kernel
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    expected = output_and_gradients("xla", jnp.float32)
    tolerance = 1e-4 if dtype == jnp.float32 else 5e-2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        difference = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        if not difference < tolerance:
            raise UsageError(
                f"the attention kernel {kernel} gives wrong numbers here (off by {difference:.1e} of the largest); "
                "use --model.attention xla and report the versions in environment.json"
            )
    return None
