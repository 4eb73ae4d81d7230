"""One traced layer and the traced head of a model, from which FLOPs, plans and predictions are derived.

A model states itself once, in its modules. Every size comes from the traced program: how many matrix products a layer
has and of which shapes, what it keeps for its backward pass, what its head reads and writes. So a new architecture gets
its FLOPs, its plan and its MFU without further code.

One layer is traced for one sample on one rank of `model`, or for this rank of `context`'s positions of it: everything
is proportional to the samples of a micro-batch (but for the rows of experts, see `of_micro_batch`). Where layers
differ, one of each kind is traced (`kinds_of`). Dropout is left out, since its masks are recomputed and never kept.

    layer_forward    products and sums of a layer
    layer_program    its forward pass as it runs, with sequence parallelism
    layer_backward   what a layer keeps, and what its backward pass does
    head             products of the head, and what it keeps

**Bytes.** A product, a collective or a cuDNN kernel reads and writes whole arrays, and what is between two of them
fuses. So fused operations move the arrays at these boundaries: each is written once in front of a product, and read
once behind it. The result of a collective that is no product's operand is added to something first, by a kernel of
its own (docs/results/log/2026-11-22-compiled-steps.md). Only arrays that depend on the tokens count; weights are
counted once a step, with the optimizer.

**Model FLOPs** are those of the forward and backward pass as arXiv 2205.05198, appendix A, counts them: matrix products
only, attention over the full s × s matrix, nothing for recomputation. With a feed-forward width of 4 h they are

    72 B L s h² (1 + s / 6h + v / 12hL)

MFU is these over the peak, so recomputation lowers it. A causal model needs half of its attention, and who counts it so
(Megatron today) gives s / 12h for s / 6h: `causal=True`.

The backward pass has two products for one of the forward pass: the gradient of its input, and that of its weight, if
that is trained. A frozen weight, of a model with adapters, has only the first.

**Hardware FLOPs** add the forward products that `train.recompute` repeats, and those of the logits with
`train.loss_chunks`. With full recomputation they are those of arXiv 2104.04473, equation 3,

    96 B L s h² (1 + s / 6h + v / 16hL)

and selective recomputation repeats the attention core, (1 + 2s / 9h + …) for (1 + s / 6h + …). (Appendix A of
2205.05198 has s / 3h there: it counts the repeated core three times, as if its backward pass were repeated too.) What a
kernel repeats inside itself, as flash attention does in its backward pass, is not counted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from mjax.cluster.hardware import gpu_of
from mjax.config import Config, DataConfig, MeshConfig, MixtureConfig, PrecisionConfig, TrainConfig
from mjax.config.axes import MODEL
from mjax.config.kernels import FUSED
from mjax.config.model import ModelConfig
from mjax.config.pattern import stacks_of
from mjax.models.parts.attention_kernels import FLASH_STAND_IN
from mjax.models.stack import run_blocks, runs_in
from mjax.parallel.grouped import ROWS, STAND_IN, tiles_at_most
from mjax.parallel.mesh import abstract_mesh, batch_specs
from mjax.parallel.tokens import Across
from mjax.parallel.weights import are_stacked, joined, metadata_of, split_trained
from mjax.parallel.zero import gather_weights
from mjax.planner.program import (
    SAMPLE_TAGS,
    TAGS,
    Operation,
    Part,
    Product,
    Program,
    Value,
    bytes_of,
    inner_jaxprs,
    is_float8,
    without_factors,
)
from mjax.step.forward import Forward
from mjax.step.layout import Layout, lay_out
from mjax.step.precision import COMPUTE_TYPES
from mjax.step.step import micro_batches_of
from mjax.utils.files import make_private, write_whole
from mjax.utils.packages import source_hashes

MOST = 500
"""Traces in a file, of about 50 KB each."""


@dataclass(frozen=True)
class Layer:
    """The forward pass of a layer, for one sample on one rank of `model`.

    Attributes:
      program: of it, with attention written out; first come `constants` inputs, then the stream, then weights.
      constants: inputs that are the same in every layer.
      elements: of the residual stream on all ranks of `model`.
      branches: the products with weights before each sum over `model`, those of the same input as one; the last of a
        branch is row-parallel.
      of_activations: products of two activations, as in attention.
      trained: for each of `of_weights` whether its weight is trained, so that the backward pass has its gradient.
    """

    program: Program
    constants: int
    elements: int
    branches: tuple[tuple[Product, ...], ...]
    of_activations: tuple[Product, ...]
    trained: tuple[bool, ...]

    @property
    def of_weights(self) -> list[Product]:
        """Products with a weight, in order."""
        return [product for branch in self.branches for product in branch]

    @property
    def of_trained(self) -> list[Product]:
        """Products with a weight that is trained."""
        return [product for product, trained in zip(self.of_weights, self.trained, strict=True) if trained]


@dataclass(frozen=True)
class Backward:
    """The backward pass of a layer, for one sample on one rank of `model`.

    Attributes:
      program: of it; first come `constants` inputs, then `carried` ones, passed from layer to layer.
      weights: inputs that are weights; the others after the constants depend on the tokens.
      kept: bytes that the forward pass keeps for it on the device, without weights: of the stacks of a loop.
      offloaded: bytes that it keeps in host memory.
      kept_unrolled: the same without a loop, where two views of one array are kept once.
      stream: bytes of this rank's rows of the residual stream.
    """

    program: Program
    constants: int
    carried: int
    weights: frozenset[int]
    kept: int
    offloaded: int
    kept_unrolled: int
    stream: int


@dataclass(frozen=True)
class Head:
    """Everything after the last layer, including the loss, for one sample on one rank of `model`.

    Attributes:
      program: of its forward and backward pass; the stream is its last input, and all others are weights.
      products: of all tokens with a weight, in order; those of a few tokens, such as a pooler's, are in `flops` only.
      kept: elements and bytes of each array that its forward pass keeps for its backward pass.
      flops: of its forward pass.
      trained: whether its weights are.
    """

    program: Program
    products: tuple[Product, ...]
    kept: tuple[tuple[int, int], ...]
    flops: float
    trained: bool

    @property
    def logits(self) -> int:
        """Elements of the vocabulary scores: of the last product of all tokens; 0 if there is none."""
        return self.products[-1].m * self.products[-1].n if self.products else 0


@dataclass(frozen=True)
class Traced:
    """Everything that a layer and the head depend on. Configs that share it share their traces.

    Attributes:
      model: without dropout, with stand-ins for its kernels, and with one layer if all are equal.
      data: the arrays of a batch, without what they are read from.
      compute: dtype.
      ranks: of `model`.
      sequence_parallel: as `mesh.sequence_parallel`.
      expert: ranks of `expert`.
      context: ranks of `context`.
      across: as `Config.across`.
      samples: that a layer and a head are traced for.
      kind: number of the stack (`config/pattern.py`) of which a layer is traced; None: of the only one.
    """

    model: ModelConfig
    data: DataConfig
    compute: str
    ranks: int
    sequence_parallel: bool
    expert: int = 1
    context: int = 1
    across: Across | None = None
    samples: int = 1
    kind: int | None = None

    @classmethod
    def of(cls, config: Config) -> Traced:
        """The traced part of a config."""
        model, data, mesh = _undisturbed(config.model), _arrays_of(config.data), config.mesh
        compute, split = config.precision.compute, mesh.splits_tokens
        return cls(model, data, compute, mesh.model, split, mesh.expert, mesh.context, config.across)

    @property
    def scores(self) -> tuple[int, int]:
        """The last dims of attention's scores: positions of a rank's queries, and of their keys."""
        sequence = self.model.sequence
        return sequence // (self.context if self.across == "gather" else 1), sequence

    def config(self, kernel: str, recompute: str) -> Config:
        """A config for its samples on one rank, with this kernel of attention or the stand-in of the fused ones."""
        return Config(
            model=replace(self.model, attention=kernel),
            mesh=MeshConfig(
                data=self.expert,
                model=self.ranks,
                expert=self.expert,
                context=self.context,
                context_attention=self.across or "auto",
                sequence_parallel=self.sequence_parallel,
            ),
            data=self.data,
            precision=PrecisionConfig(compute=self.compute),
            train=TrainConfig(global_batch=self.expert * self.samples, micro_batch=self.samples, recompute=recompute),
        )


def of_micro_batch(of: Traced, samples: int, sizes_of: Callable[[Traced], tuple[float, ...]]) -> list[float]:
    """The results of `sizes_of`, read from the trace of one sample, for the samples of a micro-batch: it is
    proportional to them.

    But rows of experts fill tiles, whose number is a constant and a part proportional to the samples: a layer with
    experts is traced for one sample and for two.
    """
    one = sizes_of(of)
    if samples == 1 or not any(op.grouped for op in layer_forward(of).of_weights):
        return [samples * first for first in one]
    two = sizes_of(replace(of, samples=2))
    return [first + (samples - 1) * (second - first) for first, second in zip(one, two, strict=True)]


@lru_cache(maxsize=64)
def _arrays_of(data: DataConfig) -> DataConfig:
    names = ("reset_positions", "reset_attention", "mask_eod_loss", "conversations")
    return DataConfig(mock=True, **{name: getattr(data, name) for name in names})


@lru_cache(maxsize=64)
def _undisturbed(model: ModelConfig) -> ModelConfig:
    model = replace(model.without_dropout().with_grouped(STAND_IN), attention="xla")
    return model if len(stacks_of(model)) > 1 else replace(model, layers=1)


def kinds_of(config: Config) -> list[tuple[int, Traced]]:
    """For each stack how many layers it has, in order, and what a layer of it depends on."""
    of, stacks = Traced.of(config), stacks_of(config.model)
    if len(stacks) == 1:
        return [(config.model.layers, of)]
    return [(len(stack.numbers), replace(of, kind=number)) for number, stack in enumerate(stacks)]


def layer_forward(of: Traced) -> Layer:
    """The forward pass of a layer.

    Float8 has the products of bf16, and those are traced, without what rounds their operands."""
    return _layer_forward(replace(of, compute="bf16" if of.compute == "fp8" else of.compute))


@lru_cache(maxsize=1024)
def _layer_forward(of: Traced) -> Layer:
    return _layer(of, _part(of, _forward))


def layer_backward(of: Traced, kernel: str, recompute: str) -> Backward:
    """The backward pass of a layer, including recomputation.

    Args:
      kernel: of attention: `xla`, or a fused one, replaced by a stand-in.
      recompute: as `train.recompute`.
    """
    return _layer_backward(of, FLASH_STAND_IN if kernel in FUSED else kernel, recompute)


@lru_cache(maxsize=1024)
def _layer_backward(of: Traced, kernel: str, recompute: str) -> Backward:
    # With `offload` the program is that of `full`; only where the layer's input is kept differs.
    part = _part(of, _backward, kernel, "full" if recompute == "offload" else recompute)
    (layer, program), (first, kept, constants, carried, weights) = part.programs, part.same
    x = layer.inputs[first]
    stacked = [value for value in layer.outputs[kept:] if value is not None]
    here = [value for value in stacked if recompute != "offload" or value != x]
    return Backward(
        program=program,
        constants=constants,
        carried=carried,
        weights=frozenset(weights),
        kept=sum(map(layer.bytes, here)),
        offloaded=layer.bytes(x) if recompute == "offload" else 0,
        kept_unrolled=sum(map(layer.bytes, set(here))),
        stream=layer.bytes(x),
    )


def head(of: Traced) -> Head:
    """The trace of the head, which follows the last layer."""
    return _head_of(replace(of, kind=None, across=None))


@lru_cache(maxsize=1024)
def _head_of(of: Traced) -> Head:
    part = _part(of, _head)
    (differentiated, program), (tokens, *kept) = part.programs, part.values
    products = differentiated.products
    return Head(
        program=program,
        products=tuple(product for product in products if product.of_weight and product.m == tokens.size),
        kept=tuple((value.size, bytes_of(value)) for value in kept),
        flops=sum(product.flops for product in products),
        trained=part.same,
    )


def _part(of: Traced, part: Callable, kernel: str = "xla", recompute: str = "none") -> Part:
    """Return the result of `_trace`, traced or computed; other arguments as for `Traced.config`."""
    if (found := _tagged(of)) is not None:
        tagged, *factors = found
        if (untagged := _traced(tagged, part, kernel, recompute).with_factors(*factors)) is not None:
            return untagged
    return _traced(of, part, kernel, recompute)


@lru_cache(maxsize=1024)
def _traced(of: Traced, part: Callable, kernel: str, recompute: str) -> Part:
    key = hashlib.sha256(repr((of, part.__name__, kernel, recompute)).encode()).hexdigest()
    if _STORES and key in _STORES[-1]:
        return Part.of_plain(_STORES[-1][key])
    made = _trace(of, of.config(kernel, recompute), part)
    if _STORES and type(of.model).__module__.startswith("mjax."):  # the sources of others are not in a file's name
        _STORES[-1][key] = made.plain()
    return made


_STORES: list[dict[str, list]] = []
"""Of `earlier_traces`: plain values of traces by a digest of what they depend on."""


@contextmanager
def earlier_traces(folder: Path) -> Iterator[None]:
    """Within it, traces are those that a command of the same sources of mjax and version of jax has left in `folder`.
    New ones are left there too, the last `MOST`, if nobody else can write there."""
    software = json.dumps([jax.__version__, source_hashes()])
    file, store = folder / f"{hashlib.sha256(software.encode()).hexdigest()[:16]}.json", {}
    private = False
    with suppress(OSError, ValueError, TypeError):  # missing or damaged: everything is traced
        private = make_private(folder) is None
        if private:
            store |= json.loads(file.read_text())
    before = len(store)
    _STORES.append(store)
    try:
        yield
    finally:
        _STORES.pop()
    if private and before < len(store):
        with suppress(OSError):  # such as a full disk
            for other in folder.glob("*.json"):
                other.unlink(missing_ok=True)
            write_whole(file, json.dumps(dict(list(store.items())[-MOST:])))


def _tagged(of: Traced) -> tuple[Traced, dict[int, Fraction | int], int] | None:
    """What to trace instead of a layer with experts, so that its sizes show the numbers of samples, experts and ranks
    of `expert`; and the arguments of `Part.with_factors`. None if other sizes may have their factors too."""
    if not isinstance(model := of.model, MixtureConfig):
        return None
    ranks, local = TAGS if of.expert > 1 else (1, 1)
    derived = (6, model.padded_vocabulary, model.mlp_width, model.width_of_expert)
    others = math.prod(n for n in (*derived, *vars(model).values()) if isinstance(n, int) and n > 0)
    for samples in SAMPLE_TAGS:
        tagged = replace(of, samples=samples, expert=ranks, model=replace(model, experts=model.experts * ranks * local))
        rows, tiles, sums = ranks * samples * model.taken_experts() * model.sequence, _tiles(tagged), 2 * samples + 1
        alone = math.gcd(samples * ranks * local * sums, others) == 1 and without_factors(tiles, others) > 1
        if alone and rows < 2**31:  # numbered with 32 bits
            factors = {tiles: _tiles(of), sums: 2 * of.samples + 1, samples: of.samples}  # a router has such sums
            if of.expert > 1:
                factors |= {ranks: of.expert, local: Fraction(1, of.expert)}
            return tagged, factors, others
    return None


def _tiles(of: Traced) -> int:
    """The tiles of experts' rows, as many as `models/parts/experts.py` makes; 1 without experts."""
    if not (experts := of.model.parted_experts()):
        return 1
    tokens = of.expert * of.samples * of.model.sequence // of.context
    return tiles_at_most(of.model.taken_experts() * tokens, experts // of.expert, ROWS["pallas"], tokens)


def _trace(of: Traced, config: Config, part: Callable) -> Part:
    """The result of `part`, called inside the `shard_map` with the forward pass, weights, a micro-batch and the
    stream; the blocks among the weights are those of the traced kind."""
    mesh, arrays, results = abstract_mesh(config.mesh), config.batch_arrays(), []
    rows = config.train.global_batch
    batch = {name: jax.ShapeDtypeStruct((rows, *shape), kind) for name, (shape, kind) in arrays.items()}

    def on_device(model, batch):
        weights = gather_weights(model, layout.plan, COMPUTE_TYPES[config.precision.compute], config.mesh)
        forward = Forward(config, layout.plan, dict.fromkeys(model.counts(batch), 1.0), np.int32(0))
        micro_batch = jax.tree.map(lambda rows: rows[0], micro_batches_of(config, batch))
        x = forward.embed(weights, micro_batch)
        if of.kind is not None:
            weights.blocks = [stack for stacks in runs_in(weights.blocks) for stack in stacks][of.kind]
            weights.blocks.kinds = weights.blocks.kinds[:1]  # a window changes no size
        results.append(part(forward, weights, micro_batch, x))
        return jnp.zeros(())

    with jax.enable_x64(config.precision.compute == "fp64"):
        layout = _layout(replace(config, train=TrainConfig(), mesh=replace(config.mesh, sequence_parallel=False)))
        specs = layout.specs, batch_specs(arrays, config.model.sequence)
        jax.eval_shape(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P()), layout.abstract_model, batch)
    return results[0]


@lru_cache(maxsize=256)
def _layout(config: Config) -> Layout:
    """The trace of the weights, which depends on neither samples nor recomputation."""
    return lay_out(config, abstract_mesh(config.mesh))


@lru_cache(maxsize=1024)
def layer_program(of: Traced) -> tuple[Program, int]:
    """The forward pass of a layer as it runs, and its number of constant inputs: with the rows of the stream that this
    rank has, and with the rounding of operands to float8."""
    layer = _layer_forward(of)
    return layer.program, layer.constants


@lru_cache(maxsize=1024)
def layer_collectives(of: Traced, axis: str) -> tuple[tuple[str, int], ...]:
    """The collectives over this axis alone in a layer's forward pass, in order: their names, and bytes of the larger of
    their input and output."""
    program = layer_program(of)[0]
    collectives = [op for op in program.operations if op.is_collective and op.axes == (axis,)]
    return tuple((op.name, max(program.bytes(value) for value in (op.inputs[0], op.outputs[0]))) for op in collectives)


def _run(forward: Forward, blocks, x: Array, micro_batch) -> Array:
    """The stream after the layers of a stack."""
    return run_blocks(blocks, x, forward.layer_context(micro_batch), forward.config.train.recompute)[0]


def _forward(forward: Forward, weights, micro_batch, x: Array) -> Part:
    jaxpr = jax.make_jaxpr(lambda blocks, x: _run(forward, blocks, x, micro_batch))(weights.blocks, x).jaxpr
    (scan,) = _scans(jaxpr)
    frozen = {v for v, of in zip(jaxpr.invars[:-1], metadata_of(weights.blocks, "frozen"), strict=True) if of}
    frozen = tuple(i for i, v in enumerate(scan.invars) if not isinstance(v, Literal) and v in frozen)
    return Part((Program(scan.params["jaxpr"]),), (), (_constants_and_carried(scan)[0], frozen))


def _layer(of: Traced, part: Part) -> Layer:
    (program,), (constants, frozen) = part.programs, part.same
    branches, trained, last = [[]], [], None
    x = program.values[program.inputs[constants]]
    for operation in program.operations:
        if (product := operation.product) is not None and product.of_weight:
            product = _of_assignments(of, product)
            factors = operation.inputs[0], program.source(operation.inputs[1]) not in frozen
            if factors == last:  # such as queries, keys and values: the backward pass has them as one
                product = product._replace(n=product.n + branches[-1].pop().n)
            else:
                trained.append(factors[1])
            branches[-1].append(product)
            last = factors
        elif operation.is_collective and program.shape(operation.outputs[0]) == x.shape:
            branches.append([])
    return Layer(
        program=program,
        constants=constants,
        elements=x.size * (of.ranks if of.sequence_parallel else 1),
        branches=tuple(tuple(branch) for branch in branches if branch),
        of_activations=tuple(product for product in program.products if not product.of_weight),
        trained=tuple(trained),
    )


def _of_assignments(of: Traced, product: Product) -> Product:
    """A product with the rows of all tiles as that of the rows that assignments need, as many for each group: of all
    experts of a rank, or of fewer if their number does not divide the rows."""
    if not product.grouped:
        return product
    assignments = of.model.taken_experts() * of.samples * of.model.sequences * of.model.sequence // of.context
    groups = math.gcd(assignments, of.model.parted_experts() // of.expert)
    return product._replace(m=assignments // groups, batch=groups)


def _backward(forward: Forward, weights, micro_batch, x: Array) -> Part:
    """The stacked layers run in a scan: its body is one layer, and what it stacks is what a layer keeps."""

    def gradients(blocks, x, gradient):
        own, frozen = split_trained(blocks)
        y, backward = jax.vjp(lambda own, x: _run(forward, joined(own, frozen), x, micro_batch), own, x)
        return y, backward(gradient)

    jaxpr = jax.make_jaxpr(gradients)(weights.blocks, x, x).jaxpr
    first, backward = _scans(jaxpr)
    (begin, kept), (constants, carried) = map(_constants_and_carried, (first, backward))
    layer, stacks = Program(first.params["jaxpr"]), set(jaxpr.invars[:-2])
    inputs = tuple(i for i, v in enumerate(backward.invars) if not isinstance(v, Literal) and v in stacks)
    return Part((layer, Program(backward.params["jaxpr"])), (), (begin, kept, constants, carried, inputs))


def _head(forward: Forward, weights, micro_batch, x: Array) -> Part:
    own, frozen = split_trained(weights)

    def loss(own, frozen, x):
        return sum(forward.loss(joined(own, frozen), x, micro_batch).values())

    def differentiated(own, frozen, x):
        return jax.vjp(lambda own, x: loss(own, frozen, x), own, x)

    jaxpr = jax.make_jaxpr(differentiated)(own, frozen, x).jaxpr
    # One array may be kept for several backward passes; inputs are kept by whoever made them.
    kept = [v for v in dict.fromkeys(jaxpr.outvars[1:]) if not isinstance(v, Literal) and v not in jaxpr.invars]
    trained = not all(are_stacked(own))
    both = jax.make_jaxpr(jax.value_and_grad(loss, (0, 2)))(own, frozen, x)
    values = jax.typeof(micro_batch["tokens"]), *(variable.aval for variable in kept)
    values = tuple(Value(value.shape, value.dtype) for value in values)
    return Part((Program(jaxpr), Program(both)), values, trained)


def _constants_and_carried(scan) -> tuple[int, int]:
    """The numbers of inputs of a scan that are the same in every turn, and that are passed from turn to turn.

    The others are stacks, whose arrays have one more dim outside. (No two versions of jax give these numbers the same
    names.)
    """
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])

    def stacks(outside, inside) -> int:
        return sum(one.aval.ndim != other.aval.ndim for one, other in zip(outside, inside, strict=True))

    carried = len(scan.outvars) - stacks(scan.outvars, body.outvars)
    return len(scan.invars) - stacks(scan.invars, body.invars) - carried, carried


def _scans(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from _scans(inner)


# --- Bytes that the kernels between the products read and write -------------------------------------------------------


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
def kernels_of(of: Traced, kernel: str, recompute: str) -> Kernels:
    """The kernels of a traced model; arguments as in `layer_backward`."""
    layer, constants = layer_program(of)
    backward, end = layer_backward(of, kernel, recompute), head(of).program
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
        moved(end, end.inputs[-1:], of),
        backward.kept,
    )


def kernels_of_micro_batch(of: Traced, kernel: str, recompute: str, samples: int) -> Kernels:
    """`kernels_of` for the samples of a micro-batch."""
    one = kernels_of(of, kernel, recompute)

    def proportional(of: Traced) -> tuple[float, ...]:
        *passes, kept = kernels_of(of, kernel, recompute)
        return (*(op.bytes for op in passes), *(op.scores for op in passes), kept)

    *bytes_and_scores, kept = of_micro_batch(of, samples, proportional)
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


def moved(program: Program, tokens: Iterable[int], of: Traced, agree: Iterable[int] = ()) -> Moved:
    """The bytes that the fused operations of a program move.

    Args:
      tokens: inputs that depend on the tokens.
      of: what was traced.
      agree: inputs on which arrays depend that ranks find a scale for: one all-reduce each, with which XLA combines
        those of weights and of arrays that are computed again.
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
    agreed = tuple(op.axes for op in scales if agreeing.intersection(op.inputs))
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


# --- FLOPs of a step --------------------------------------------------------------------------------------------------


def model_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of one step over all devices, nothing counted twice.

    Args:
      config: validated.
      causal: count the half of the attention that a causal model needs; a model that is not causal needs all of it.
    """
    of_head = head(_whole(Traced.of(config)))
    forward = _layers(config, causal) + of_head.flops
    frozen = _frozen(config) + (0.0 if of_head.trained else of_head.flops)
    return config.train.global_batch * (3 * forward - frozen)


def hardware_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of a step: `model_flops` and the forward products that `train.recompute` and `train.loss_chunks` do
    again."""
    train = config.train
    whole = _layers(config, causal)
    again = {"none": 0.0, "selective": _attention(config, causal), "full": whole, "offload": whole}
    scores = head(_whole(Traced.of(config))).products[-1].flops if train.loss_chunks > 1 else 0.0
    return model_flops(config, causal) + train.global_batch * (again[train.recompute] + scores)


def _layers(config: Config, causal: bool) -> float:
    """Forward FLOPs of the layers per sample."""
    weights = sum(count * sum(op.flops for op in layer.of_weights) for count, layer in _kinds(config))
    return weights + _attention(config, causal)


def _frozen(config: Config) -> float:
    """Forward FLOPs of the layers' frozen weights per sample."""
    return sum(
        count * (sum(op.flops for op in layer.of_weights) - sum(op.flops for op in layer.of_trained))
        for count, layer in _kinds(config)
    )


def _attention(config: Config, causal: bool) -> float:
    """FLOPs of scores and weighted sums."""
    full = sum(count * sum(op.flops for op in layer.of_activations) for count, layer in _kinds(config))
    return full / 2 if causal and config.model.causal else full


def _kinds(config: Config) -> list[tuple[int, Layer]]:
    """For each kind of layers how many the model has, and one of them."""
    return [(layers, layer_forward(_whole(of))) for layers, of in kinds_of(config)]


def _whole(of: Traced) -> Traced:
    """The traced model without any split."""
    return replace(of, ranks=1, sequence_parallel=False, expert=1, context=1, across=None)


def peak_tflops(device_kind: str, compute: str) -> float | None:
    """Dense peak of one device that an MFU is a share of, in TFLOP/s, or None if it is unknown: then no MFU is printed.

    Args:
      device_kind: as named by JAX. `mjax/cluster/hardware.py` has the table, and describes how to add a device.
      compute: compute dtype of the config; fp8 has the peak of bf16 (`Gpu.mfu_peak`).
    """
    gpu = gpu_of(device_kind)
    peak = None if gpu is None else gpu.mfu_peak(compute)
    return None if peak is None else peak / 1e12
