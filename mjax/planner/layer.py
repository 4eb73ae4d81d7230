"""One traced layer and the traced head of a model, from which FLOPs, plans and predictions are derived.

Every size comes from the traced program: number and shapes of a layer's matmuls, its saved activations, the reads and
writes of the head. So a new architecture gets its FLOPs, its plan and its MFU without further code.

One layer is traced for one sample on one rank of `model`, or for this rank of `context`'s positions of it: everything
is proportional to the samples of a micro-batch (but for `expert_rows`). Where layers differ, one of each kind is traced
(`layer_kinds`). Dropout is left out, since its masks are recomputed and never saved.

    layer_forward    matmuls and collectives of a layer; the time of a step follows from them
    layer_backward   saved activations of a layer, and the largest arrays of its backward pass, for the memory of a step
    head             matmuls of the head, and its saved activations

A trace is a few numbers, which `earlier_traces` keeps for the next command.

**Model FLOPs** count the forward and backward pass as in arXiv 2205.05198, appendix A: matmuls only, attention over the
full s × s matrix, nothing for recomputation. With a feed-forward width of 4 h they are

    72 B L s h² (1 + s / 6h + v / 12hL)

MFU is model FLOPs over the peak, so recomputation lowers it. A causal model needs half of its attention; counted so, as
Megatron does today, it has s / 12h for s / 6h: `causal=True`.

The backward pass has two matmuls for one of the forward pass: dgrad, and wgrad if the weight is trained.

**Hardware FLOPs** add the forward matmuls that `train.recompute` repeats, and the logits with `train.loss_chunks`. With
full recomputation they equal arXiv 2104.04473, equation 3,

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
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from mjax.cluster.hardware import find_gpu
from mjax.config import Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from mjax.config.axes import EXPERT
from mjax.config.kernels import FUSED, with_moe_kernel
from mjax.config.model import ModelConfig
from mjax.config.pattern import StackRows, find_stack, layer_stacks, stack_rows
from mjax.config.plain_values import to_tuples
from mjax.errors import UsageError
from mjax.models.build import abstract_weights
from mjax.models.parts.config import Hop
from mjax.models.parts.flash import FLASH_STAND_IN
from mjax.models.stack import layer_runs, run_blocks
from mjax.parallel.grouped import STAND_IN as GROUPED_STAND_IN
from mjax.parallel.grouped import TILE_ROWS, max_tiles
from mjax.parallel.mesh import abstract_mesh, batch_specs
from mjax.parallel.weights import are_stacked, combine, partition_trainable, weight_metadata
from mjax.parallel.zero import gather_weights
from mjax.planner.program import KERNELS, Product, Program, array_bytes, inner_jaxprs
from mjax.step.forward import Forward
from mjax.step.layout import Layout, build_layout
from mjax.step.precision import COMPUTE_TYPES
from mjax.step.step import split_micro_batches
from mjax.utils.files import make_private, write_whole
from mjax.utils.packages import source_hashes

MAX_TRACES = 2000  # in a file, of about 1 KB each


class Layer(NamedTuple):
    """The forward pass of a layer, for one sample on one rank of `model`.

    Attributes:
      elements: of the residual stream on all ranks of `model`.
      branches: the matmuls with weights before each sum over `model`, merged if they share their input; the last of a
        branch is row-parallel.
      activation_products: matmuls of two activations, as in attention.
      collectives: collectives over one axis: the axis, the name, bytes of the larger of input and output, and the ring,
        as of an `Operation`.
      weights: inner and outer size of each weight.
    """

    elements: int
    branches: tuple[tuple[Product, ...], ...]
    activation_products: tuple[Product, ...]
    collectives: tuple[tuple[str, str, int, tuple[int, int] | None], ...]
    weights: tuple[tuple[int, int], ...]

    @property
    def weight_products(self) -> list[Product]:
        """Products with a weight, in order."""
        return [product for branch in self.branches for product in branch]

    @property
    def trained_products(self) -> list[Product]:
        """Products with a weight that is trained."""
        return [product for product in self.weight_products if product.trained]

    @classmethod
    def from_json(cls, elements: int, branches: tuple, activations: tuple, sent: tuple, weights: tuple) -> Layer:
        """The layer of plain values."""
        return cls(elements, tuple(map(_products, branches)), _products(activations), sent, weights)


class Backward(NamedTuple):
    """The backward pass of a layer, for one sample on one rank of `model`: bytes of its arrays.

    Attributes:
      saved: activations saved by the forward pass on the device, in the stacks of a loop over layers.
      saved_unrolled: the same without a loop, where two views of one array are saved once.
      saved_rows: of `saved`, arrays with the rows of experts.
      stream: this rank's rows of the residual stream.
      largest: the largest array that a kernel writes, without scores.
      scores: the largest scores of attention that a kernel writes.
      gathered: the largest result of a collective that is larger than its operand.
    """

    saved: int
    saved_unrolled: int
    saved_rows: int
    stream: int
    largest: int
    scores: int
    gathered: int


class Head(NamedTuple):
    """Everything after the last layer, including the loss, for one sample on one rank of `model`.

    Attributes:
      products: matmuls of all tokens with a weight, in order; matmuls of a few tokens, such as a pooler's, are in
        `flops` only.
      saved: bytes saved for the backward pass, and of the largest array again; without logits.
      flops: of its forward pass.
      trained: True if its weights are.
    """

    products: tuple[Product, ...]
    saved: int
    flops: float
    trained: bool

    @property
    def logit_products(self) -> list[Product]:
        """The matmuls of the vocabulary scores, of equal shape: the last one of all tokens, or several."""
        return [product for product in self.products if product == self.products[-1]]

    @property
    def logits(self) -> int:
        """Elements of the vocabulary scores; 0 if there are none."""
        return sum(product.m * product.n for product in self.logit_products)

    @classmethod
    def from_json(cls, products: tuple, *values) -> Head:
        """The head of plain values."""
        return cls(_products(products), *values)


def _products(plain: Iterable) -> tuple[Product, ...]:
    return tuple(Product(*fields) for fields in plain)


@dataclass(frozen=True)
class TraceSpec:
    """The part of a config that the traces of a layer and the head depend on.

    Attributes:
      model: without dropout, with stand-ins for its kernels, and with one layer if all are equal.
      data: the arrays of a batch, without their sources.
      compute: dtype.
      mesh: as far as the work of layers depends on it, without a pipeline, replicas and gathers of weights.
      kind: number of the stack (`config/pattern.py`) with the traced layer; None: the only stack.
    """

    model: ModelConfig
    data: DataConfig
    compute: str
    mesh: MeshConfig
    kind: int | None = None

    @classmethod
    def from_config(cls, config: Config) -> TraceSpec:
        """The traced part of a config."""
        mesh = MeshConfig(
            data=config.mesh.expert,
            model=config.mesh.model,
            expert=config.mesh.expert,
            context=config.mesh.context,
            context_attention=config.context_attention or "auto",
            sequence_parallel=config.mesh.splits_tokens,
        )
        model = _drop_dropout_and_barriers(resolve_dispatcher(config.model, config.mesh.expert))
        return cls(model, _list_arrays(config.data), config.precision.compute, mesh)

    def without_experts(self) -> TraceSpec:
        """The same for what no rank of `expert` splits."""
        mesh = replace(self.mesh, data=1, expert=1)
        return replace(self, model=resolve_dispatcher(self.model, 1), mesh=mesh)

    @property
    def scores(self) -> tuple[int, int]:
        """The last dims of attention's scores: positions of a rank's queries, and of their keys."""
        sequence, mesh = self.model.sequence, self.mesh
        return sequence // (mesh.context if mesh.context_attention == "allgather" else 1), sequence

    def config(self, kernel: str, recompute: str) -> Config:
        """A config for one sample on each rank, with this kernel of attention or the stand-in of the fused ones."""
        return Config(
            model=replace(self.model, attention=kernel),
            mesh=self.mesh,
            data=self.data,
            precision=PrecisionConfig(compute=self.compute),
            train=TrainConfig(global_batch=self.mesh.data, micro_batch=1, recompute=recompute),
        )


@lru_cache(maxsize=64)
def resolve_dispatcher(model: ModelConfig, ranks: int) -> ModelConfig:
    """The model with its way of tokens to experts on so many ranks of `expert`; `auto` on one, where all are equal."""
    if not model.experts:
        return model
    changes: dict[str, Any] = {"moe_token_dispatcher": model.token_dispatcher(ranks) if ranks > 1 else "auto"}
    return replace(model, **changes)


def expert_rows(spec: TraceSpec, samples: int) -> int:
    """Rows of the tiles of a layer's experts for a micro-batch, or for one round of it, enough for any distribution; 0
    without experts."""
    model, mesh = spec.model, spec.mesh
    if not model.experts:
        return 0
    max_rows = mesh.expert * samples * model.sequence // mesh.context
    assignments = model.experts_per_token * max_rows
    if hops := expert_hops(spec, samples):
        assignments = max_rows = hops[-1].ranks * hops[-1].rows * (mesh.model if mesh.sequence_parallel else 1)
    return TILE_ROWS["pallas"] * max_tiles(assignments, model.experts // mesh.expert, TILE_ROWS["pallas"], max_rows)


def expert_hops(spec: TraceSpec, samples: int) -> tuple[Hop, ...]:
    """The all-to-alls of a micro-batch to a layer's experts; none if all tokens are gathered."""
    model, mesh = spec.model, spec.mesh
    if not model.experts or model.token_dispatcher(mesh.expert) != "alltoall":
        return ()
    tokens = samples * model.sequence // mesh.context
    return model.hops(tokens // (mesh.model if mesh.sequence_parallel else 1), mesh.expert)


@lru_cache(maxsize=64)
def _list_arrays(data: DataConfig) -> DataConfig:
    names = ("reset_positions", "reset_attention", "mask_eod_loss", "conversations")
    return DataConfig(mock=True, **{name: getattr(data, name) for name in names})


@lru_cache(maxsize=64)
def _drop_dropout_and_barriers(model: ModelConfig) -> ModelConfig:
    model = replace(with_moe_kernel(model.without_dropout(), GROUPED_STAND_IN), attention="xla")
    return model if len(layer_stacks(model)) > 1 else replace(model, layers=1)


def layer_kinds(config: Config) -> list[tuple[StackRows, TraceSpec]]:
    """List, for each stack in order, its layers on each stage and the trace spec of one of them."""
    spec, rows = TraceSpec.from_config(config), stack_rows(config.model, config.mesh)
    if len(rows) == 1:
        return [(rows[0], spec)]
    specs = (spec if with_experts else spec.without_experts() for with_experts in _stacks_with_experts(config.model))
    return [(layers, replace(spec, kind=kind)) for kind, (layers, spec) in enumerate(zip(rows, specs, strict=True))]


@lru_cache(maxsize=64)
def _stacks_with_experts(model: ModelConfig) -> tuple[bool, ...]:
    weights = [find_stack(model, name) for name, (_, spec) in abstract_weights(model).items() if EXPERT in spec]
    return tuple(stack in weights for stack in layer_stacks(model))


def layer_forward(spec: TraceSpec) -> Layer:
    """The forward pass of a layer, with attention written out.

    Float8 has the same matmuls as bf16, so the bf16 layer is traced, without the rounding of operands."""
    return _record(replace(spec, compute="bf16" if spec.compute == "fp8" else spec.compute), Layer)


def layer_backward(spec: TraceSpec, kernel: str, recompute: str) -> Backward:
    """The backward pass of a layer, including recomputation.

    Args:
      kernel: of attention: `xla`, or a fused one, replaced by a stand-in.
      recompute: as `train.recompute`.
    """
    kernel = FLASH_STAND_IN if kernel in FUSED else kernel
    if recompute != "offload":
        return _record(spec, Backward, kernel, recompute)
    full = _record(spec, Backward, kernel, "full")  # with the layer's input in host memory
    return full._replace(saved=full.saved - full.stream, saved_unrolled=full.saved_unrolled - full.stream)


def head(spec: TraceSpec) -> Head:
    """The trace of the head, which follows the last layer."""
    spec = replace(spec.without_experts(), kind=None)
    return _record(replace(spec, mesh=replace(spec.mesh, context_attention="auto")), Head)


@lru_cache(maxsize=64)
def scores_in_chunks(config: Config) -> bool:
    """True if the model's loss supports `train.loss_chunks`."""
    spec = TraceSpec.from_config(replace(config, mesh=MeshConfig()))
    whole = spec.config("xla", "none")
    try:
        chunked = _trace(spec, replace(whole, train=replace(whole.train, loss_chunks=2)), _head)
    except UsageError:
        return False
    return chunked.products != head(spec).products


@lru_cache(maxsize=4096)
def _record(spec: TraceSpec, kind: type, kernel: str = "xla", recompute: str = "none") -> Any:
    """A `Layer`, a `Backward` or a `Head`, traced now or by an earlier command; arguments as for `TraceSpec.config`."""
    key = spec, kind.__name__, kernel, recompute
    trace = lambda: _trace(spec, spec.config(kernel, recompute), _TRACERS[kind])  # noqa: E731
    return trace_once(key, spec.model, trace, lambda *plain: getattr(kind, "from_json", kind)(*plain))


def trace_once(key: Any, model: ModelConfig, trace: Callable[[], Any], from_json: Callable[..., Any]) -> Any:
    """Return the result of `trace`, or of `from_json` on the values that an earlier command has stored under `key`."""
    if not _STORES or not type(model).__module__.startswith("mjax."):  # the store depends on mjax's sources only
        return trace()
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    if digest in _STORES[-1]:
        return from_json(*to_tuples(_STORES[-1][digest]))
    return _STORES[-1].setdefault(digest, trace())


# Of `earlier_traces`: plain values of traces, by a digest of their key.
_STORES: list[dict[str, Any]] = []


@contextmanager
def earlier_traces(folder: Path) -> Iterator[None]:
    """Read traces from `folder`, if stored with the same sources of mjax and version of jax, and store the last
    `MAX_TRACES` new ones there, if only this user can write there."""
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
            write_whole(file, json.dumps(dict(list(store.items())[-MAX_TRACES:])))


def _trace(spec: TraceSpec, config: Config, part: Callable) -> Any:
    """The result of `part`, called inside the `shard_map` with `spec`, the forward pass, weights, a micro-batch and the
    residual stream. The weights contain only the blocks of the traced kind."""
    mesh, arrays, results = abstract_mesh(config.mesh), config.batch_arrays(), []
    rows = config.train.global_batch
    batch = {name: jax.ShapeDtypeStruct((rows, *shape), kind) for name, (shape, kind) in arrays.items()}

    def call_model(model, batch):
        weights = gather_weights(model, layout.plan, COMPUTE_TYPES[config.precision.compute], config.mesh)
        forward = Forward(config, layout.plan, dict.fromkeys(model.counts(batch), 1.0), np.int32(0))
        micro_batch = jax.tree.map(lambda rows: rows[0], split_micro_batches(config, batch))
        x = forward.embed(weights, micro_batch)
        if spec.kind is not None:
            weights.blocks = [stack for stacks in layer_runs(weights.blocks) for stack in stacks][spec.kind]
            weights.blocks.kinds = weights.blocks.kinds[:1]  # a window changes no size
        results.append(part(spec, forward, weights, micro_batch, x))
        return jnp.zeros(())

    with jax.enable_x64(config.precision.compute == "fp64"):
        layout = _layout(replace(config, train=TrainConfig(), mesh=replace(config.mesh, sequence_parallel=False)))
        specs = layout.specs, batch_specs(arrays, config.model.sequence)
        on_mesh = jax.shard_map(call_model, mesh=mesh, in_specs=specs, out_specs=P())
        jax.eval_shape(on_mesh, layout.abstract_model, batch)
    return results[0]


@lru_cache(maxsize=256)
def _layout(config: Config) -> Layout:
    """The trace of the weights, which depends on neither samples nor recomputation."""
    return build_layout(config, abstract_mesh(config.mesh))


def _run(forward: Forward, blocks, x: Array, micro_batch) -> Array:
    """The stream after the layers of a stack."""
    return run_blocks(blocks, x, forward.layer_context(micro_batch), forward.config.train.recompute)[0]


def _forward(spec: TraceSpec, forward: Forward, weights, micro_batch, x: Array) -> Layer:
    jaxpr = jax.make_jaxpr(lambda blocks, x: _run(forward, blocks, x, micro_batch))(weights.blocks, x).jaxpr
    (scan,) = _scans(jaxpr)
    stored = zip(jaxpr.invars[:-1], weight_metadata(weights.blocks, "frozen"), strict=True)
    frozen = {variable for variable, is_frozen in stored if is_frozen}
    frozen = {i for i, v in enumerate(scan.invars) if not isinstance(v, Literal) and v in frozen}
    program, (constants, _) = Program(scan.params["jaxpr"]), _constants_and_carried(scan)
    x = program.values[program.inputs[constants]]
    branches, weights, activations, collectives, last = [[]], [], [], [], None
    for operation in program.operations:
        product = operation.product
        if operation.is_collective and len(operation.axes) == 1:
            whole = max(program.bytes(value) for value in (operation.inputs[0], operation.outputs[0]))
            collectives.append((operation.axes[0], operation.name, whole, operation.ring))
        if operation.is_collective and program.shape(operation.outputs[0]) == x.shape:
            branches.append([])
        elif product is not None and not product.has_weight:
            activations.append(product)
        elif product is not None:
            weights.append((product.k, product.n))
            product = _scale_to_assignments(spec, product)
            operands = operation.inputs[0], program.source(operation.inputs[1]) not in frozen
            if operands == last:  # such as queries, keys and values: the backward pass has them as one
                product = product._replace(n=product.n + branches[-1].pop().n)
            branches[-1].append(product._replace(trained=operands[1]))
            last = operands
    return Layer(
        elements=x.size * (spec.mesh.model if spec.mesh.sequence_parallel else 1),
        branches=tuple(tuple(branch) for branch in branches if branch),
        activation_products=tuple(activations),
        collectives=tuple(collectives),
        weights=tuple(weights),
    )


def _scale_to_assignments(spec: TraceSpec, product: Product) -> Product:
    """A grouped matmul of all tiles, reduced to the rows of the assignments: equal groups for the experts of a rank,
    or for fewer if their number does not divide the rows."""
    if not product.grouped:
        return product
    assignments = spec.model.experts_per_token * spec.model.sequences * spec.model.sequence // spec.mesh.context
    groups = math.gcd(assignments, spec.model.experts // spec.mesh.expert)
    return product._replace(m=assignments // groups, batch=groups)


def _backward(spec: TraceSpec, forward: Forward, weights, micro_batch, x: Array) -> Backward:
    """The stacked layers run in a scan: its body is one layer, and its stacked outputs are the saved activations."""

    def gradients(blocks, x, gradient):
        trained, frozen = partition_trainable(blocks)
        y, backward = jax.vjp(lambda trained, x: _run(forward, combine(trained, frozen), x, micro_batch), trained, x)
        return y, backward(gradient)

    first, backward = _scans(jax.make_jaxpr(gradients)(weights.blocks, x, x).jaxpr)
    begin, carried = _constants_and_carried(first)
    layer, program = Program(first.params["jaxpr"]), Program(backward.params["jaxpr"])
    stacked = [value for value in layer.outputs[carried:] if value is not None]
    kernels = [op for op in program.operations if op.name in KERNELS or op.is_collective]
    written = {value for operation in kernels for value in operation.outputs}
    scores = {v for v, x in enumerate(program.values) if len(x.shape) > 2 and x.shape[-2:] == spec.scores}
    collectives = [(op.inputs[0], op.outputs[0]) for op in kernels if op.is_collective]

    def largest(values: Iterable[int]) -> int:
        return max(map(program.bytes, values), default=0)

    return Backward(
        saved=sum(map(layer.bytes, stacked)),
        saved_unrolled=sum(map(layer.bytes, set(stacked))),
        saved_rows=sum(layer.bytes(value) for value in stacked if expert_rows(spec, 1) in layer.shape(value)),
        stream=layer.bytes(layer.inputs[begin]),
        largest=largest(written - scores),
        scores=largest(written & scores),
        gathered=largest(whole for part, whole in collectives if program.bytes(whole) > program.bytes(part)),
    )


def _head(spec: TraceSpec, forward: Forward, weights, micro_batch, x: Array) -> Head:
    trained, frozen = partition_trainable(weights)

    def differentiate(trained, frozen, x):
        loss = lambda trained, x: sum(forward.loss(combine(trained, frozen), x, micro_batch).values())  # noqa: E731
        return jax.vjp(loss, trained, x)

    jaxpr = jax.make_jaxpr(differentiate)(trained, frozen, x).jaxpr
    # One array may be saved for several backward passes; inputs count where they are computed.
    saved = [v for v in dict.fromkeys(jaxpr.outvars[1:]) if not isinstance(v, Literal) and v not in jaxpr.invars]
    matmuls, tokens = [op.product for op in Program(jaxpr).operations if op.product is not None], micro_batch["tokens"]
    products = tuple(product for product in matmuls if product.has_weight and product.m == tokens.size)
    logits = products[-1].m * products[-1].n if products else 0
    sizes = [array_bytes(variable.aval) for variable in saved if variable.aval.size != logits]
    flops = sum(product.flops for product in matmuls)
    return Head(products, sum(sizes) + max(sizes, default=0), flops, trained=not all(are_stacked(trained)))


_TRACERS = {Layer: _forward, Backward: _backward, Head: _head}


def _constants_and_carried(scan) -> tuple[int, int]:
    """The numbers of constants and of carried inputs of a scan, whose names differ between versions of jax.

    All other inputs are stacks, whose arrays have one more dim outside.
    """
    body = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"])

    def stacks(outside, inside) -> int:
        return sum(x.aval.ndim != y.aval.ndim for x, y in zip(outside, inside, strict=True))

    carried = len(scan.outvars) - stacks(scan.outvars, body.outvars)
    return len(scan.invars) - stacks(scan.invars, body.invars) - carried, carried


def _scans(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        else:
            for inner in inner_jaxprs(equation):
                yield from _scans(inner)


# --- FLOPs of a step --------------------------------------------------------------------------------------------------


def model_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of one step over all devices, nothing counted twice.

    Args:
      config: validated.
      causal: count the half of the attention that a causal model needs; a model that is not causal needs all of it.
    """
    end, (weights, frozen, attention) = _whole_head(config), _layers(config, causal)
    forward = weights + attention + end.flops
    frozen += 0.0 if end.trained else end.flops
    return config.train.global_batch * (3 * forward - frozen)


def hardware_flops(config: Config, causal: bool = False) -> float:
    """FLOPs of a step: `model_flops`, and the forward matmuls that `train.recompute` and `train.loss_chunks`
    repeat."""
    train, (weights, _, attention) = config.train, _layers(config, causal)
    repeated = {"none": 0.0, "selective": attention}.get(train.recompute, weights + attention)
    if train.loss_chunks > 1:
        repeated += sum(product.flops for product in _whole_head(config).logit_products)
    return model_flops(config, causal) + train.global_batch * repeated


def _layers(config: Config, causal: bool) -> tuple[float, float, float]:
    """Forward FLOPs of the layers per sample: of all weights, of frozen weights, and of scores and weighted sums."""
    whole = replace(config, mesh=MeshConfig())
    layers = [(rows.slots, layer_forward(spec)) for rows, spec in layer_kinds(whole)]
    products = [(count, product) for count, layer in layers for product in layer.weight_products]
    frozen = sum(count * product.flops for count, product in products if not product.trained)
    attention = sum(count * product.flops for count, layer in layers for product in layer.activation_products)
    masked = 2 if causal and config.model.causal else 1
    return sum(count * product.flops for count, product in products), frozen, attention / masked


def _whole_head(config: Config) -> Head:
    """The head on one device."""
    return head(TraceSpec.from_config(replace(config, mesh=MeshConfig())))


def peak_tflops(device_kind: str, compute: str) -> float | None:
    """Dense peak of one device for the MFU, in TFLOP/s; None if it is unknown.

    Args:
      device_kind: as named by JAX. `mjax/cluster/hardware.py` has the table, and describes how to add a device.
      compute: compute dtype of the config; fp8 has the peak of bf16 (`Gpu.mfu_peak`).
    """
    gpu = find_gpu(device_kind)
    peak = None if gpu is None else gpu.mfu_peak(compute)
    return None if peak is None else peak / 1e12
