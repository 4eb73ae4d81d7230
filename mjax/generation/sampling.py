"""Choosing the next token from a row of logits.

    logits / temperature ─ top-k ─ top-p ─ Gumbel noise ─ argmax

A token is drawn by the Gumbel-max rule: the argmax of logits / temperature + noise is distributed as their softmax. The
noise belongs to the id; its key is folded from (seed, index of the sequence, position). So every mesh generates the
same tokens, and a continuation does not depend on the other prompts of a batch. Everything is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from mjax.config.bounds import Bounds, Count, CountOrZero, NotNegative, Seed


@dataclass(frozen=True)
class Sampling:
    """Sampling options, and the number of tokens."""

    tokens: Count = 128
    """Maximum number of tokens to generate."""
    temperature: NotNegative = 0.8
    """Divides the logits: below 1 likely tokens become likelier; 0 always takes the most likely one."""
    top_k: CountOrZero = 0
    """Sample from this many most likely tokens; 0: all."""
    top_p: Annotated[float, Bounds(gt=0, le=1)] = 0.9
    """Sample from the smallest set of tokens with at least this probability; 1: all. Applied after temperature and
    top-k."""
    seed: Seed = 0
    """Determines the samples."""


def draw(
    logits: Array, positions: Array, vocabulary: int, temperature: Array, top_k: Array, top_p: Array, seed: Array
) -> Array:
    """The next token of each sequence: int32 [b].

    Args:
      logits: [b, v]; ids from `vocabulary` on are padding of the embedding and never drawn.
      positions: int [b], the positions of the new tokens.
      temperature, top_k, top_p, seed: as in `Sampling`, scalars; they may be traced.
    """
    is_token = jnp.arange(logits.shape[-1]) < vocabulary
    logits = jnp.where(is_token, logits.astype(jnp.float32), -jnp.inf)

    def noisy(logits):
        # Shift the largest to 0 first: divided by a tiny temperature, none overflows to +∞.
        scaled = (logits - logits.max(-1, keepdims=True)) / temperature
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(logits.shape[0]))
        keys = jax.vmap(jax.random.fold_in)(keys, positions)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:], jnp.float32))(keys)
        return jnp.where(allowed(scaled, top_k, top_p), scaled + noise, -jnp.inf)

    scores = jax.lax.cond(temperature > 0, noisy, lambda logits: logits, logits)
    return jnp.argmax(scores, -1).astype(jnp.int32)


def allowed(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Mask of the tokens left by top-k, and then top-p: bool [b, v], at least one in each row.

    Tokens are ranked by logit, ties by id. The first `top_k` are kept (0: all). Of these the first are kept until their
    probability reaches `top_p` (arXiv 1904.09751, section 3.1: the smallest such set).

    Args:
      logits: float32 [b, v], divided by the temperature; −∞ where a token is impossible.
      top_k, top_p: scalars; they may be traced.
    """
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    first = (jnp.arange(logits.shape[-1]) < top_k) | (top_k == 0)
    ranked = jnp.where(first, jnp.take_along_axis(logits, order, -1), -jnp.inf)
    probabilities = jax.nn.softmax(ranked, -1)
    before = jnp.cumsum(probabilities, -1) - probabilities  # 0 for the first of a row, which is therefore kept
    stays = first & ((before < top_p) | (top_p >= 1))
    return jnp.put_along_axis(jnp.zeros(logits.shape, bool), order, stays, axis=-1, inplace=False)
