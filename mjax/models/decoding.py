"""Generation with a cache: reading whole prompts, and one more token of each sequence.

    prefill      prompts, in one forward     → logits after each prompt, and the cache
    decode       one token of each sequence  → logits after it, and the cache with one more slot

The cache is the layers' own: `Block.empty_cache` makes it, `Block.decode` reads and writes it, and the rest carries it.
Attention caches the keys and values of earlier positions (`write_cache`, `attend_cached`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mjax.config.axes import CONTEXT, MODEL
from mjax.models.parts.mask import MASKED, AttentionMask
from mjax.models.parts.positions import distance_penalty
from mjax.models.protocol import ForwardContext, Model
from mjax.parallel import mappings
from mjax.parallel.reductions import accumulation_dtype
from mjax.parallel.token_layout import ContextAttention, TokenLayout

if TYPE_CHECKING:
    from mjax.models.causal import CausalModel


@runtime_checkable
class Layers(Protocol):
    """The methods of a `Block`, for all layers of a model (`generation/generate.py`), also over pipeline stages."""

    def empty_cache(self, sequences: int, slots: int, dtype) -> Any: ...

    def decode(self, x: Array, context: ForwardContext, cached: Any, lengths: Array) -> tuple[Array, Any]: ...


class Cache(NamedTuple):
    """The cache of a model for some sequences.

    Attributes:
      layers: the layers' caches.
      slots: the positions in this rank's slots: all, in order, or its part of them, which then varies over `context`.
    """

    layers: Any
    slots: Int[Array, " S"]


def prefill(
    model: CausalModel,
    prompts: Int[Array, "b s"],
    lengths: Int[Array, " b"],
    slots: int,
    layers: Layers,
    context_attention: ContextAttention | None = None,
) -> tuple[Float[Array, "b v"], Cache]:
    """Read whole prompts at once into a cache.

    The slot in the cache is the position. With context parallelism every rank of `context` reads and stores a part of
    the positions, as in training; the slots after the prompts are split equally, too.

    Args:
      prompts: padded on the right with any valid id.
      lengths: tokens of each prompt, at least 1.
      slots: size of the cache over all ranks of `context`, at least s; both are multiples of
        `Config.sequence_chunks` and of that axis.
      layers: of this model.
      context_attention: as in `TokenLayout`; None: every rank reads all positions.

    Returns:
      Logits of the token after each prompt, replicated over `model` and `context`, and the cache.
    """
    x, tokens, cached = run_layers(model, prompts, lengths, slots, layers, context_attention)
    position_ids, more = tokens.position_ids(), (slots - prompts.shape[1]) * tokens.positions // prompts.shape[1]
    first = prompts.shape[1] + (more * mappings.rank(CONTEXT) if context_attention else 0)
    is_last = position_ids == (lengths - 1)[:, None]
    last = tokens.split_sequences(x).sum(1, where=is_last[..., None])  # of one, so exact
    if context_attention:
        last = mappings.psum(last, frozenset({CONTEXT}))
    slot_positions = jnp.concatenate([position_ids, first + jnp.arange(more, dtype=jnp.int32)])
    return _token_logits(model, last), Cache(cached, slot_positions)


def run_layers(
    model: CausalModel,
    ids: Int[Array, "b s"],
    lengths: Int[Array, " b"],
    slots: int,
    layers: Layers,
    context_attention: ContextAttention | None,
) -> tuple[Float[Array, "t h"], TokenLayout, Any]:
    """This rank's rows of whole texts after the layers, their layout, and the cache with them."""
    x, context = embed_texts(model, ids, context_attention)
    slots = slots * context.tokens.positions // ids.shape[1]
    x, cached = layers.decode(x, context, layers.empty_cache(len(ids), slots, x.dtype), lengths)
    return x, context.tokens, cached


def embed_texts(
    model: Model, ids: Int[Array, "b s"], context_attention: ContextAttention | None, documents: Array | None = None
) -> tuple[Float[Array, "t h"], ForwardContext]:
    """This rank's rows of whole texts before the first layer, and their context."""
    ranks = mappings.size(CONTEXT) if context_attention else 1
    tokens = TokenLayout(ids.shape[0], ids.shape[1] // ranks, context_attention=context_attention)
    context = ForwardContext(tokens, documents=documents)
    ids = ids[:, tokens.position_ids()]
    return model.embed({"tokens": ids, "token_types": jnp.zeros_like(ids)}, context), context


def decode(
    model: CausalModel, tokens: Int[Array, " b"], cached: Cache, lengths: Int[Array, " b"], layers: Layers
) -> tuple[Float[Array, "b v"], Cache]:
    """Read one token of each sequence, whose `lengths` previous tokens are in the cache.

    Args:
      tokens: the tokens at positions `lengths`.
      cached: by `prefill` and `decode`.
      lengths: below the number of all slots.
      layers: of this model.

    Returns:
      Logits of the next token, replicated over `model` and `context`, and the cache including it.
    """
    context = ForwardContext(TokenLayout(tokens.shape[0], 1), positions=lengths[:, None], slots=cached.slots)
    x = model.embed({"tokens": tokens[:, None]}, context)
    x, new = layers.decode(x, context, cached.layers, lengths)
    return _token_logits(model, x), Cache(new, cached.slots)


def _token_logits(model: CausalModel, x: Float[Array, "b h"]) -> Float[Array, "b v"]:
    """Logits of one position of each sequence, replicated over `model`."""
    return mappings.all_gather_invariant(model.logits(x, TokenLayout(x.shape[0], 1)), MODEL, -1)


# --- The cache of a layer with attention ------------------------------------------------------------------------------


class KeyValues(NamedTuple):
    """The cache of a layer's keys and values; attention reads all of them at each position."""

    keys: Float[Array, "b k S d"]
    values: Float[Array, "b k S e"]


def write_cache(cached: Any, new: Any, lengths: Int[Array, " b"], slots: Int[Array, " S"] | None) -> Any:
    """Write new positions to a layer's cache: whole prompts to the first slots, or one position of each sequence.

    Prompts of different lengths are padded on the right: causal attention never sees later positions, and decoding
    overwrites the padding before it could.

    Args:
      cached: arrays [b, k, S, d], such as `KeyValues`; the slots of a head are contiguous, as a matmul reads them.
      new: the same pytree of new positions, [b, s, k, d].
      lengths: positions of each sequence before the new one.
      slots: as `ForwardContext.slots`: the positions in this rank's slots, the same on all ranks of `context`, or split
        over it; None: prompts.
    """

    def fill(cached: Array, new: Array) -> Array:
        return jnp.pad(new.swapaxes(1, 2), [(0, 0), (0, 0), (0, cached.shape[2] - new.shape[1]), (0, 0)])

    if slots is None:
        return jax.tree.map(fill, cached, new)
    is_new = slots == lengths[:, None]  # [b, S]
    new_slot = jnp.where(is_new.any(-1), is_new.argmax(-1), slots.size)  # past the end: on another rank

    def write(cached: Array, new: Array) -> Array:
        # Heads one by one, since XLA turns a scatter of a single row into a slice that it copies.
        new = mappings.vary(new[:, 0], mappings.varying_axes(cached))
        sequences, heads = jnp.arange(new.shape[0])[:, None], jnp.arange(new.shape[1])
        return cached.at[sequences, heads, new_slot[:, None]].set(new, mode="drop")

    return jax.tree.map(write, cached, new)


def attend_cached(
    q: Float[Array, "b 1 n d"],
    keys: Float[Array, "b k S d"],
    values: Float[Array, "b k S e"],
    lengths: Int[Array, " b"],
    slots: Int[Array, " S"],
    mask: AttentionMask,
) -> Float[Array, "b 1 n e"]:
    """Attend from one position of each sequence to it and earlier ones, in the cache.

    The write comes before the read, so that XLA writes in place and copies no cache. Where the slots are split over
    `context`, every rank attends to its slots, and two sums and a maximum of one number per head and sequence combine
    the parts (flash-decoding).

    Args:
      q: of the position `lengths`, with n / k neighboring heads for each head of the cache.
      keys, values: of this layer's cache; those from `lengths` + 1 on are empty.
      lengths, slots: as for `write_cache`.
      mask: window, scale and slopes; a sequence is one document.

    Returns:
      The output of attention, the same on all ranks of `context`.
    """
    wide, split_over = accumulation_dtype(q.dtype), frozenset({CONTEXT}) & mappings.varying_axes(slots)
    groups = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
    scores = mask.scale_for(q) * jnp.einsum("bkgd,bksd->bkgs", groups, keys, preferred_element_type=wide)
    if mask.slopes is not None:  # the new position, at `lengths`, has distance 0 to itself
        penalty = distance_penalty(mask.slopes, (slots - lengths[:, None])[:, None], wide)
        scores = scores + penalty.reshape(scores.shape)
    visible = mask.visible(lengths[:, None], slots)
    scores = scores + jnp.where(visible, 0.0, MASKED).astype(wide)[:, None, None]
    scores = jnp.exp(scores - mappings.pmax(scores.max(-1, keepdims=True), tuple(split_over)))
    scores = (scores / mappings.psum(scores.sum(-1, keepdims=True), split_over)).astype(q.dtype)
    attended = mappings.psum(jnp.einsum("bkgs,bksd->bkgd", scores, values), split_over)
    return attended.reshape(*q.shape[:-1], -1)
