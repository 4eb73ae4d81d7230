"""Bytes that the kernels between the products of a traced layer and head read and write.

A region (`regions.py`) reads its inputs and writes its outputs once, except as follows. All exceptions were read from
programs compiled for H100s (docs/results/log/2026-11-22-compiled-steps.md):

* what is only added to a product, or has its size and no function of it, is the product's epilogue;
* what is added to the result of a collective is a kernel of its own, whose result the rest of the region reads;
* a sum over tokens of what a region writes is part of that region, and one that also finishes rows (the backward pass
  of a norm) reads its inputs twice, since the statistics of a row come first;
* a region that needs the result of a collective on its own sums, such as the logits' largest, reads its inputs again.

Only arrays that depend on the tokens count; weights are counted once a step, with the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from mjax.trace import layers as trace
from mjax.trace.float8 import SCALE_KERNELS, agreed, of_weights, transposed
from mjax.trace.program import Program
from mjax.trace.regions import Region, Regions, activation_elements

PRODUCT, COLLECTIVE = "dot_general", "collective"
# Of a loop over layers: times that what a layer keeps, and its weights, are read or written by copies into and out of
# stacks; before, each stack is filled with zeros.
COPIES_OF_KEPT, COPIES_OF_WEIGHTS, COPY_KERNELS = 3, 6, 20
SMALL = 1 / 8  # of a region's largest array: what is smaller is a sum


class Moved(NamedTuple):
    """The bytes that kernels move, for the samples of the trace.

    Attributes:
      bytes: read and written, without `scores`.
      scores: of regions with arrays [..., s, s].
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
    ranks = of.ranks
    layer, constants = trace.layer_program(of)
    backward, head = trace.layer_backward(of, kernel, recompute), trace.head(of).program
    inputs = enumerate(backward.program.inputs[backward.constants :], backward.constants)
    # A scale is a number, which weights have as well.
    tokens = [value for number, value in inputs if number not in backward.weights and backward.program.shape(value)]
    return Kernels(
        moved(layer, layer.inputs[constants : constants + 1], of.scores, ranks, recompute == "none"),
        moved(backward.program, tokens, of.scores, ranks),
        moved(head, head.inputs[-1:], of.scores, ranks),
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


def at_least(of: trace.Traced, kernel: str, recompute: str, samples: int) -> Kernels:
    """The least that `of_micro_batch` can find, from the trace of a whole sample: ranks of `model` and `context` have a
    part of each of its arrays."""
    whole, ranks = of.of_sample(), of.ranks * of.context

    def part(moved: Moved) -> Moved:
        return moved._replace(bytes=moved.bytes / ranks, scores=moved.scores / ranks, weights=0.0, agreed=())

    *passes, kept = of_micro_batch(whole, kernel, recompute, samples)
    return Kernels(*map(part, passes), kept / ranks)


@lru_cache(maxsize=1024)
def activations(of: trace.Traced) -> float:
    """Elements of the activation functions in a layer's forward pass."""
    return activation_elements(trace.layer_forward(of).program)


def looped(kept: float, weights: float, beside: bool) -> tuple[float, int]:
    """Bytes and launches that a loop over layers adds to each.

    Args:
      kept: bytes that the layer keeps for its backward pass.
      weights: bytes of its weights in the compute dtype.
      beside: copies run beside products, and cost nothing.
    """
    fills = kept + weights
    return (fills, 0) if beside else (fills + COPIES_OF_KEPT * kept + COPIES_OF_WEIGHTS * weights, COPY_KERNELS)


def moved(program: Program, tokens: Iterable[int], last_dims: tuple[int, int], ranks: int, kept: bool = False) -> Moved:
    """The bytes that the regions of a program move.

    Args:
      tokens: inputs that depend on the tokens.
      last_dims: of attention's scores (`Traced.scores`).
      ranks: of `model`; on one, a sum over it needs no kernel.
      kept: inputs of products in float8 are kept for the backward pass.
    """
    regions, size, depends = Regions(program), program.bytes, depending(program, tokens)
    producers = {value: op for op in program.operations for value in op.outputs}

    def maker(value: int) -> str:
        operation = producers.get(value)
        while operation is not None and operation.is_collective and ranks == 1:
            operation = producers.get(operation.inputs[0])
        if operation is None:
            return ""
        return COLLECTIVE if operation.is_collective else operation.name

    def is_score(value: int) -> bool:
        shape = program.shape(value)
        return len(shape) > 2 and shape[-2:] == last_dims

    total, scores, kernels = 0.0, 0.0, 0
    for region in regions:
        read, written = (sorted(depends.intersection(values)) for values in (region.inputs, region.outputs))
        if not read or not written:
            continue
        if any(map(is_score, (*read, *written))):
            scores += sum(map(size, (*read, *written)))
            kernels += 1
            continue
        amount, launches = _moved(region, regions, read, written, maker)
        total, kernels = total + amount, kernels + launches
    copies, weights = transposed(program, depends, kept), of_weights(program, depends, kept)
    kernels += copies[1] + weights[1]
    return Moved(total + copies[0], scores, kernels, weights[0], agreed(program, depends))


def depending(program: Program, inputs: Iterable[int]) -> set[int]:
    """The values of a program that depend on some of its inputs, and these."""
    depends = set(inputs)
    for operation in program.operations:
        if depends.intersection(operation.inputs):
            depends.update(operation.outputs)
    return depends


def _moved(
    region: Region, regions: Regions, read: list[int], written: list[int], maker: Callable[[int], str]
) -> tuple[float, int]:
    """Bytes and launches of one region; `maker` names the operation that makes a value."""
    size = regions.program.bytes
    largest = max(map(size, (*read, *written)))
    sums = [value for value in written if size(value) < SMALL * largest]
    if len(sums) == len(written):  # sums over tokens, in two stages
        alone = regions.read_for_scale(region)
        outside = [value for value in read if (regions.of(value) is None if alone is None else value in alone)]
        return sum(map(size, outside)), bool(outside) + len(sums) + SCALE_KERNELS * (alone is not None)
    if len(read) == len(written) == 1 and size(read[0]) == size(written[0]) and not _computes(region):
        return 0.0, 0
    times = _rounds(region, regions.program) or int(region.reduces and bool(sums))
    total, launches = sum(map(size, (*read * (1 + times), *written))), 1 + len(sums) + 3 * times
    if len(read) > 1 and not region.has_function and not region.rounds:
        total -= sum(size(value) for value in read if maker(value) == PRODUCT)
        if sent := [size(value) for value in read if maker(value) == COLLECTIVE and not times]:
            total, launches = total + sum(sent) + max(sent), launches + len(sent)
    return total, launches


def _rounds(region: Region, program: Program) -> int:
    """Collectives that a region waits for with a result of its own."""
    return sum(
        bool(region.outputs.intersection(op.inputs) and region.inputs.intersection(op.outputs))
        for op in program.operations
        if op.is_collective
    )


def _computes(region: Region) -> bool:
    return region.reduces or region.has_function
