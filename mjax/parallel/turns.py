"""Pipeline stages that run one after the other, for text generation, which has too little work to fill a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mjax.parallel import mappings
from mjax.parallel.axes import PIPE
from mjax.parallel.slots import at, branch, buffer, put, vary_over_pipe

Weights = Any  # a pytree of arrays


def run_in_turns(
    stages: int,
    chunks: int,
    layers: Callable[[Weights, Array, Any], tuple[Array, Any]],
    blocks: Weights,
    x: Array,
    kept,
) -> tuple[Array, Any]:
    """Run one stage after the other, for text generation.

    Args:
      stages, chunks: P and V.
      layers: (layers of a chunk, stream, cache of the chunk) → (stream after them, new cache entries).
      blocks: this stage's layers, as for `pipeline_gradients`.
      x: the stream before the first layer, the same on every stage.
      kept: caches of the chunks, a pytree with a leading dim of this stage's layers, or None.

    Returns:
      The stream after the last layer, replicated over stages, and the new cache entries, with a leading dim of this
      stage's layers.
    """

    def chunk_of(tree, chunk, cut: bool):
        if chunks == 1:
            return tree
        return at(tree if cut else jax.tree.map(lambda a: a.reshape(chunks, -1, *a.shape[1:]), tree), chunk)

    blocks, x, kept = vary_over_pipe((blocks, x, kept))
    run = lambda chunk, x: layers(chunk_of(blocks, chunk, True), x, chunk_of(kept, chunk, False))  # noqa: E731
    new = jax.tree.map(lambda kind: buffer(chunks, kind), jax.eval_shape(run, 0, x)[1])

    def turn(carry, number):
        def mine(x, new):
            y, found = run(number // stages, x)
            return y, jax.tree.map(lambda buffer, value: put(buffer, number // stages, value), new, found)

        is_mine = (mappings.rank(PIPE) == number % stages).astype(jnp.int32)
        x, new = branch("turn", is_mine, mine, lambda *kept: kept, *carry)
        return (mappings.to_next_stage(x), new), None

    (x, new), _ = lax.scan(turn, (x, new), jnp.arange(stages * chunks))
    return mappings.from_first_stage(x), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), new)
