"""Bytes that the kernels between the products of a traced layer and head read and write.

A product, a collective or a cuDNN kernel reads and writes whole arrays; everything between two of them fuses. So what
fused operations move are the arrays at these boundaries: each is written once by the kernel in front of a product, and
read once by the kernel behind it. The result of a collective that is not a product's operand is added to something
first, by a kernel of its own (docs/results/log/2026-11-22-compiled-steps.md).

Only arrays that depend on the tokens count; weights are counted once a step, with the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from mjax.config.axes import MODEL
from mjax.trace import layers as trace
from mjax.trace.program import Operation, Program, is_float8

OF_COLLECTIVE = 3
"""Passes over the result of a collective: it is read, and the sum with it is written and read."""
OF_FLOAT8, SCALE_KERNELS = 6, 3
"""Passes over an array in float8: two in 16 bit, for its scale and to round it, and one each to write it as it is and
transposed. Launches that find a scale."""
# Of a loop over layers: times that what a layer keeps, and its weights, are read or written by copies into and out of
# stacks; before, each stack is filled with zeros.
COPIES_OF_KEPT, COPIES_OF_WEIGHTS, COPY_KERNELS = 3, 6, 20


class Moved(NamedTuple):
    """The bytes that kernels move, for the samples of the trace.

    Attributes:
      bytes: read and written, without `scores`.
      scores: of arrays [..., s, s].
      kernels: launches, whatever the number of samples.
      weights: bytes that are read and written to round weights to float8, whatever the number of samples.
      agreed: of scales of arrays in float8, the mesh axes of each all-reduce.
    """

    bytes: float
    scores: float
    kernels: int
    weights: float = 0.0
    agreed: tuple[tuple[str, ...], ...] = ()


class Kernels(NamedTuple):
    """The bytes that the kernels of a layer and of the head move, backward with what is computed again; and the bytes
    that a layer keeps for its backward pass."""

    forward: Moved
    backward: Moved
    head: Moved
    kept: int


@lru_cache(maxsize=1024)
def kernels_of(of: trace.Traced, kernel: str, recompute: str) -> Kernels:
    """The kernels of a traced model; arguments as in `trace.layer_backward`."""
    layer, constants = trace.layer_program(of)
    backward, head = trace.layer_backward(of, kernel, recompute), trace.head(of).program
    program, first = backward.program, backward.constants
    # A scale is a number, which weights have as well.
    tokens = [
        value
        for number, value in enumerate(program.inputs)
        if number >= first and number not in backward.weights and program.shape(value)
    ]
    stream = layer.inputs[constants : constants + 1]
    return Kernels(
        moved(layer, stream, of, agree=stream),
        moved(program, tokens, of, agree=program.inputs[first : first + backward.carried]),
        moved(head, head.inputs[-1:], of),
        backward.kept,
    )


def of_micro_batch(of: trace.Traced, kernel: str, recompute: str, samples: int) -> Kernels:
    """`kernels_of` for the samples of a micro-batch."""
    one = kernels_of(of, kernel, recompute)

    def proportional(of: trace.Traced) -> tuple[float, ...]:
        *passes, kept = kernels_of(of, kernel, recompute)
        return (*(op.bytes for op in passes), *(op.scores for op in passes), kept)

    *bytes_and_scores, kept = trace.of_micro_batch(of, samples, proportional)
    moved, scores = bytes_and_scores[:3], bytes_and_scores[3:]
    passes = (op._replace(bytes=b, scores=s) for op, b, s in zip(one, moved, scores, strict=False))
    return Kernels(*passes, kept)


def looped(kept: float, weights: float, beside: bool) -> tuple[float, int]:
    """Bytes and launches that a loop over layers adds to each.

    Args:
      kept: bytes that the layer keeps for its backward pass.
      weights: bytes of its weights in the compute dtype.
      beside: copies run beside products, and cost nothing.
    """
    fills = kept + weights
    return (fills, 0) if beside else (fills + COPIES_OF_KEPT * kept + COPIES_OF_WEIGHTS * weights, COPY_KERNELS)


def moved(program: Program, tokens: Iterable[int], of: trace.Traced, agree: Iterable[int] = ()) -> Moved:
    """The bytes that the fused operations of a program move.

    Args:
      tokens: inputs that depend on the tokens.
      of: what was traced.
      agree: inputs on which arrays depend that ranks find a scale for: one all-reduce each. XLA combines those of
        weights with each other, and those of arrays that are computed again with these.
    """
    depends, ranks = depending(program, tokens), of.ranks
    is_kernel = [op.is_kernel and not (ranks == 1 and op.axes == (MODEL,)) for op in program.operations]
    kernels, fused = (
        [op for op, kernel in zip(program.operations, is_kernel, strict=True) if kernel == wanted]
        for wanted in (True, False)
    )
    written = _outputs(fused) & (_inputs(kernels) | set(program.outputs))
    read = _inputs(fused) & (_outputs(kernels) | set(program.inputs))
    sent = _outputs(op for op in kernels if op.is_collective)
    total = scores = weights = launches = 0
    for value in [*written, *read]:
        size, narrow = program.bytes(value), is_float8(program.values[value])
        if value not in depends:
            weights += OF_FLOAT8 * size * narrow
        elif program.ends_with(value, of.scores):
            scores += size
        else:
            total += size * (OF_FLOAT8 if narrow else OF_COLLECTIVE if value in sent else 1)
        if value in written and (narrow or value in depends):
            launches += 1 + SCALE_KERNELS * narrow
    scales, agreeing = [op for op in program.operations if op.name == "pmax"], depending(program, agree)
    of_weights = {op.axes for op in scales if depends.isdisjoint(op.inputs)}
    agreed = *(op.axes for op in scales if agreeing.intersection(op.inputs)), *of_weights
    return Moved(total, scores, launches, weights, agreed)


def depending(program: Program, inputs: Iterable[int]) -> set[int]:
    """The values of a program that depend on some of its inputs, and these."""
    depends = set(inputs)
    for operation in program.operations:
        if depends.intersection(operation.inputs):
            depends.update(operation.outputs)
    return depends


def _inputs(operations: Iterable[Operation]) -> set[int | None]:
    return {value for operation in operations for value in operation.inputs}


def _outputs(operations: Iterable[Operation]) -> set[int]:
    return {value for operation in operations for value in operation.outputs}
