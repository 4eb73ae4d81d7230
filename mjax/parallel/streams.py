"""Two streams: the halves of a micro-batch, each of which computes while the other communicates.

In one stream nothing can run beside a collective of the forward pass: the next product waits for its result. With two,
the sum and the gather around one half's products run beside the products of the other half:

    first    ═ gather ═▶ products ── attention ═ sum ═▶ norm ═ gather ═▶ products ── GELU ── product ═ sum ═▶ …
    second      ─ norm ═════════ gather ═══════▶ products ── attention ── product ═ sum ═▶ norm ═ gather ═▶ …

The backward pass is the mirror image. A layer is written once, as a generator that stops at its collectives (`Phases`):
`alone` runs it through, which is the layer of one stream, and `together` runs two of them in turn.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import jax
from jax import Array

from mjax.parallel import mappings
from mjax.parallel.axes import MODEL
from mjax.parallel.layers import ColumnParallelLinear, RowParallelLinear, columns, columns_of
from mjax.parallel.products import Kernel, linear
from mjax.parallel.tokens import Tokens


class Enter(NamedTuple):
    """Open a region: the answer is a tuple of the outputs of column-parallel `layers` with the input `x` [t, h], as of
    `columns`."""

    x: Array
    layers: tuple[ColumnParallelLinear, ...]


class Leave(NamedTuple):
    """Close a region: the answer is the output of a row-parallel `layer` with the input `x` [b · s, *into]."""

    x: Array
    layer: RowParallelLinear


Phases = Generator[Enter | Leave, Any, Any]
"""A layer, or a part of one: it yields an `Enter` and a `Leave` in turn, is sent their answers, and returns its
result."""


def in_phases(part) -> bool:
    """Whether a layer, or a part of one, is written in phases: it has `phases`, and no `__call__` that overrides what
    they do."""
    own = next((kind for kind in type(part).__mro__ if {"phases", "__call__"} & vars(kind).keys()), object)
    return "phases" in vars(own)


def phases_of(part, x: Array, context) -> Phases:
    """`part(x, context)` in phases; a part that is not written in phases is a single one."""
    if in_phases(part):
        return (yield from part.phases(x, context))
    return part(x, context)


def alone(phases: Phases, tokens: Tokens) -> Any:
    """Run a layer through, and return its result."""
    answer = None
    try:
        while True:
            wanted = phases.send(answer)
            if isinstance(wanted, Enter):
                answer = columns(wanted.x, tokens, *wanted.layers)
            else:
                answer = wanted.layer(wanted.x, tokens)
    except StopIteration as end:
        return end.value


def together(first: Phases, second: Phases, tokens: Tokens, again: bool = False) -> tuple[Any, Any]:
    """Run two halves in turn, and return the results.

    Args:
      first, second: the same layers for each half.
      tokens: of a half.
      again: as for `into_columns`.
    """
    results = {}

    def resume(half: Phases, answer=None) -> Enter | Leave | None:
        try:
            return half.send(answer)
        except StopIteration as end:
            results[half] = end.value
            return None

    running, other = first, second
    region, wanted = resume(first), resume(second)
    entered, partial, closing = tokens.enter(region.x), None, None
    while region is not None:
        outputs = columns_of(region.x, entered, tokens, region.layers, again)
        if partial is not None:
            partial, outputs = _backward_beside(partial, outputs)
            closed, outputs = _beside(tokens.leave(partial), outputs)
            wanted = resume(other, closing.biased(closed))
        x, closing = resume(running, outputs)
        partial = _rows(x, closing.kernel[...])
        if wanted is not None:
            entered, partial = _beside(jax.lax.stop_gradient(tokens.enter(wanted.x)), partial)
        running, other, region = other, running, wanted
    resume(other, closing.biased(tokens.leave(partial)))
    return results[first], results[second]


@jax.custom_vjp
def _rows(x: Array, kernel: Kernel) -> Array:
    """The product of a row-parallel layer. Its two gradients are used when both are there: that of the kernel would
    else be computed at the end of the step, beside nothing, and its factors kept until then."""
    return linear(kernel, x, x.ndim - 1)


_rows.defvjp(
    lambda x, kernel: jax.vjp(lambda x, kernel: linear(kernel, x, x.ndim - 1), x, kernel),
    lambda back, gradient: jax.lax.optimization_barrier(back(gradient)),
)


@jax.custom_vjp
def _beside(collected: Array, computed):
    """Both, neither to be used before both are there: so a collective runs during a computation. A sum that is typed as
    replicated keeps this type, and no order."""
    both = collected, computed
    return jax.lax.optimization_barrier(both) if MODEL in mappings.varying_axes(collected) else both


_beside.defvjp(lambda *both: (_beside(*both), None), lambda _, gradients: gradients)


@jax.custom_vjp
def _backward_beside(collected: Array, computed):
    """The same for their gradients, of which that of `collected` comes from a collective."""
    return collected, computed


_backward_beside.defvjp(lambda *both: (both, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))
