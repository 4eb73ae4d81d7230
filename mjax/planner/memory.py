"""Memory of a device, before anything is compiled: a sum in which every term names its arrays.

    master weights, moments  float32: 12 bytes per element (8 of a matrix with Muon), sharded by `parallel/zero.py`;
                             frozen weights are stored in the compute dtype, and have no moments and no gradients
    compute weights          a copy in the compute dtype, cast at the start of the step, gathered if sharded
    saved activations        for the backward pass, of every layer and micro-batch in flight; with `train.recompute
                             offload` the layer inputs count as host memory
    gradients                of each weight in the compute dtype; float32 accumulators with several micro-batches, and
                             of a layer's experts with several rounds of all-to-alls
    logits                   [b·s, v / t] of one micro-batch
    workspace                temporaries of one layer's backward pass at its peak

A layer's saved activations are read from the traced layer (`layer.py`) and multiplied by layers, micro-batches and
stages. The temporaries of its backward pass are a multiple of the largest array that one of its kernels writes
(`ARRAY_TEMPORARIES`). Memory can peak at four points in a step, and the largest of them determines the step:

    head        every saved activation, and the logits
    backward    every saved activation, the gradients of all layers, the temporaries of one layer
    reduction   no activation, but float32 copies of the gradients while they are summed over `data`
    update      with Muon: the momentum of all weights in the dtype of its iteration, the temporaries of one weight

`tests/planner/compiled_memory.json` has XLA's allocations for the same configs; `benchmarks/memory.py` compiles them
again. The counting follows arXiv 2205.05198, section 4, with JAX's residuals instead of PyTorch's.

Letters: b sequences, s positions, v vocabulary, t devices along `model`.

The storage of weights on a mesh (`parallel/zero.py`) is arithmetic on the shapes of a model that is traced once. Muon's
matrices have the shapes of the weights (`parallel/muon_resharding.py`); its matmuls are read from the traced iteration
(`step/muon.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter, itemgetter, mul
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from mjax.config import Config, MeshConfig, axes
from mjax.config.axes import copies, shards
from mjax.config.kernels import FUSED, HOPPER, attention_on_gpu, is_unrolled
from mjax.config.model import ModelConfig
from mjax.config.pattern import StackRows, find_stack, layer_stacks, stack_rows
from mjax.models.build import abstract_weights, frozen_weights, matrix_dims, trace_model, weight_dims
from mjax.models.stack import layer_runs
from mjax.parallel.chunked_cross_entropy import split_rows
from mjax.parallel.mesh import abstract_mesh
from mjax.parallel.muon_resharding import MatrixLayout
from mjax.parallel.weights import OUT, TOKEN, Dims
from mjax.parallel.zero import Storage, compute_spec, plan_weight_storage
from mjax.planner import layer as trace
from mjax.planner.layer import trace_once
from mjax.planner.program import Product, Program
from mjax.step.muon import ITERATE_IN, newton_schulz
from mjax.step.precision import COMPUTE_TYPES

# Bytes per element of each dtype.
DTYPE_BYTES = {"fp8": 2, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# Share of a GPU's memory that has to stay free: predictions are off by up to this.
HEADROOM = 0.05
# Live copies of this rank's rows of the residual stream while a layer is differentiated: the layer's input and the
# stream after attention, sliced from the saved activations; the incoming gradient, and those of the branches.
LIVE_RESIDUAL_STREAMS = 6
# Live temporaries of a layer's backward pass, as multiples of the largest array that a kernel writes, and of the
# scores of attention. Fitted to every second row of `compiled_memory.json`.
ARRAY_TEMPORARIES, SCORE_TEMPORARIES = 3.5, 2.5
# Kinds of memory as displayed, in the order of the fields of `Memory`.
KINDS = ("weights", "optimizer state", "gradients", "activations", "logits", "workspace")


class Memory(NamedTuple):
    """Bytes at the peak of a training step, on the device that needs most.

    Attributes:
      parameters: float32 master weights, and the step's copy in the compute dtype.
      optimizer: Adam's two moments; of a matrix with Muon one.
      gradients: of all layers in the compute dtype, and float32 sums over micro-batches.
      activations: saved for the backward pass.
      logits: vocabulary scores; 0 if the peak is at another point.
      workspace: everything else, mostly the temporaries of one layer.
      host: in host memory, for this device: the inputs of all layers with `train.recompute offload`. Not in `total`.
      moment: the point of the peak: `head`, `backward`, `reduction` or `update`.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float = 0.0
    logits: float = 0.0
    workspace: float = 0.0
    host: float = 0.0
    moment: str = "backward"

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by kind."""
        return dict(zip(KINDS, self, strict=False))

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self.parts.values())

    def free(self, usable: float) -> float:
        """The fraction of `usable` bytes left free; below HEADROOM the run may not fit."""
        return 1 - self.total / usable

    def fits(self, usable: float, host: float | None = None) -> bool:
        """True if it leaves HEADROOM of `usable` bytes, and fits in `host` bytes of a device; None: not known."""
        return self.free(usable) >= HEADROOM and self.fits_host(host)

    def fits_host(self, host: float | None) -> bool:
        """True if activations in host memory fit into the `host` bytes of a device; None if they are not known."""
        return host is None or self.host <= host


def usable_memory(device) -> float | None:
    """Bytes that XLA may allocate on a JAX device; None if it is not a GPU or has no limit."""
    return (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None


def predict_memory(config: Config, capability: tuple[int, ...] = HOPPER, least: bool = False) -> Memory:
    """Predict the memory of a training step of `config`, on the device that needs most; no device is used.

    Args:
      config: validated; `model.attention` is a kernel's name, or `auto`, resolved as on this GPU.
      capability: compute capability of the GPU.
      least: return a lower bound, for which no backward pass is traced.

    Raises:
      UsageError: `model.attention` is cudnn, which does not support the config.
    """
    sizes = _Sizes(config, attention_on_gpu(config, capability), _bound_sizes if least else _measure_sizes)
    points = [_head(sizes), _backward(sizes), _reduction(sizes)]
    if config.optimizer.name == "muon":
        points.append(_update(sizes))
    return max(points, key=lambda memory: memory.total)


# --- Sizes of the arrays of one device --------------------------------------------------------------------------------


class _Sizes:
    """Bytes of the arrays of a step, for one micro-batch on one device.

    Attributes:
      config, unrolled: the config, and whether its layers are compiled without a loop on a GPU.
      weights, trained: all weights and the trained weights of a device.
      width: bytes of the compute dtype.
      master: bytes of a master weight and of a gradient accumulator.
      layers: by kind.
      stream: this rank's rows of the residual stream.
      largest_chunk: the share of a stage's layers in its largest virtual stage.
      saved: activations of a virtual stage's layers on the device.
      host: the same in host memory.
      work: temporaries of a layer's backward pass, without its weights; of the kind that needs most.
      logits: vocabulary scores, of a chunk of the loss.
      heads: other residuals of the head, and their gradients.
      batch: the device's part of a batch.
      accumulates: gradients are accumulated over micro-batches, in float32.
      sharded: weights are gathered from shards.
      master_weights, computed, activations, messages: of all points (`_memory`, `_compute_copies`).
      sums: float32 accumulators of gradients over micro-batches.
    """

    def __init__(self, config: Config, kernel: str, measure: Callable[..., _PerSample]):
        mesh, train, model, recompute = config.mesh, config.train, config.model, config.train.recompute
        self.config, self.unrolled = config, is_unrolled(config, on_gpu=True)
        self.weights, self.trained = (device_weights(model, mesh, trained=trained) for trained in (False, True))
        self.width = DTYPE_BYTES[config.precision.compute]
        self.master = max(4, self.width)
        self.layers = []
        for rows, spec in trace.layer_kinds(config):
            weights = (device_weights(model, mesh, spec.kind, trained) for trained in (False, True))
            sample = measure(spec, kernel, recompute, train.micro_batch)
            self.layers.append(_LayerGroup(rows, *weights, sample))
        # The dropout mask has one byte per element. If attention is recomputed and there are collectives, XLA starts
        # with it during one of them, so its probabilities exist twice.
        twice = recompute == "selective" and (mesh.model > 1 or (mesh.zero == 3 and shards(mesh) > 1))
        masks = (config.model.attention_dropout > 0) + self.width * twice
        sample = max((kind.sample for kind in self.layers), key=lambda sample: sample.work + masks * sample.scores)
        self.stream = sample.stream
        counts = list(zip(*(kind.rows.counts for kind in self.layers), strict=True))  # of each virtual stage
        self.largest_chunk = max(map(sum, counts)) / sum(kind.rows.slots for kind in self.layers)
        layer_bytes = list(map(self._layer_bytes, self.layers))
        self.saved = max(sum(map(mul, layers, layer_bytes)) for layers in counts)
        self.host = sum(kind.rows.slots * kind.sample.offloaded for kind in self.layers)
        self.work = sample.work + masks * sample.scores
        rows = config.model.padded_vocabulary // mesh.model
        self.logits = sample.logits * split_rows(rows, config.train.loss_chunks)[0].stop / rows
        self.heads = sample.heads
        arrays = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in config.batch_arrays().values())
        self.batch = arrays * train.global_batch / copies(mesh)
        self.accumulates = mesh.pipe > 1 or config.micro_batches > 1
        self.sharded = mesh.pipe > 1 or (mesh.zero > 0 and shards(mesh) > 1)
        self.master_weights = self.bytes_in_storage(self.weights.stored, self.trained.stored)
        self.computed, trained = _compute_copies(self), self.trained
        # Of weights gathered in the loop only the shard is accumulated.
        accumulated = trained.layers - trained.gathered + trained.gathered_shards + trained.shared
        self.sums = self.master * accumulated if self.accumulates else 0.0
        # The backward pass of a pipeline reads its slot of the ring buffer into a separate array.
        self.activations = self.saved * (1 if mesh.pipe == 1 else _chunks_in_flight(config) + 1)
        # Buffers of a pipeline: activations and gradients that have arrived and are sent, streams for the head.
        self.messages = 8 * self.stream if mesh.pipe > 1 else 0.0

    def _layer_bytes(self, kind: _LayerGroup) -> float:
        """Saved activations of a layer on the device."""
        mesh, train = self.config.mesh, self.config.train
        if not self.unrolled:
            return kind.sample.saved
        saved = kind.sample.saved_unrolled
        if mesh.splits_tokens and train.recompute != "none":
            saved += kind.sample.stream * mesh.model  # without a loop XLA gathers the tokens of all layers early
        # Without a loop the shards of a layer that are gathered again are saved by the forward pass.
        saved += self.bytes_in_storage(kind.weights.gathered_shards, kind.trained.gathered_shards) / kind.rows.slots
        if mesh.zero == 0 and mesh.model == 1 and copies(mesh) > 1:
            # XLA computes the gradients of weights after those of all streams, during the all-reduces over `data`.
            saved = max(saved, kind.sample.factors)
        return saved

    def bytes_in_storage(self, weights: float, trained: float) -> float:
        """Bytes of weights as stored; `trained` elements of them are trained."""
        return self.master * trained + self.width * (weights - trained)


class _LayerGroup(NamedTuple):
    """Layers of one kind (`trace.layer_kinds`) on a device: those of each stage, weights of all, trained weights, sizes
    of one layer."""

    rows: StackRows
    weights: DeviceWeights
    trained: DeviceWeights
    sample: _PerSample


class _PerSample(NamedTuple):
    """Attributes of `_Sizes` for some samples, and elements of attention's scores."""

    stream: float
    saved: float
    offloaded: float
    saved_unrolled: float
    factors: float
    work: float
    scores: float
    logits: float
    heads: float


@lru_cache(maxsize=4096)
def _measure_sizes(spec: trace.TraceSpec, kernel: str, recompute: str, samples: int) -> _PerSample:
    """The sizes of a layer and the head for the samples of a micro-batch."""
    layer, backward, head = trace.layer_forward(spec), trace.layer_backward(spec, kernel, recompute), trace.head(spec)
    width, rows = DTYPE_BYTES[spec.compute], trace.expert_rows(spec, samples)
    more_rows = rows * backward.saved_rows / max(trace.expert_rows(spec, 1), 1) - samples * backward.saved_rows
    scores = (product.batch * product.m * product.n for product in layer.activation_products if kernel not in FUSED)
    temporaries = samples * max(ARRAY_TEMPORARIES * backward.largest, SCORE_TEMPORARIES * backward.scores)
    if experts := [product for product in layer.weight_products if product.grouped]:
        # Of each matmul the dispatched rows and their gradients, and one more array between them or at their end: XLA
        # dispatches tokens and gradients together, and computes gradients of weights after those of rows.
        up, down = experts
        temporaries = width * rows * (up.k + 2 * up.n + down.n + max(down.k, up.k))
        # Of each all-to-all the rows as sent and as received, and the gradients of both.
        temporaries += 4 * width * up.k * sum(hop.ranks * hop.rows for hop in trace.expert_hops(spec, samples))
    # The stream, or keys and values of all positions, whose gradients are whole too.
    gathered = (4 if spec.mesh.context_attention == "allgather" else 2) * backward.gathered
    return _PerSample(
        stream=samples * backward.stream,
        saved=samples * backward.saved + more_rows,
        offloaded=samples * backward.stream if recompute == "offload" else 0,
        saved_unrolled=samples * backward.saved_unrolled + more_rows,
        factors=samples * width * sum(p.batch * p.m * (p.k + p.n) for p in layer.trained_products),
        work=samples * (LIVE_RESIDUAL_STREAMS * backward.stream + gathered) + temporaries,
        scores=samples * max(scores, default=0),
        logits=samples * width * head.logits,
        heads=samples * head.saved,
    )


@lru_cache(maxsize=4096)
def _bound_sizes(spec: trace.TraceSpec, kernel: str, recompute: str, samples: int) -> _PerSample:
    """Lower bounds of `_measure_sizes` from the forward pass: saved are the layer's input, or those of its matmuls."""
    layer, width = trace.layer_forward(spec), DTYPE_BYTES[spec.compute]
    parts = spec.mesh.model if spec.mesh.sequence_parallel else 1  # gathered tokens are not saved
    stream = samples * width * layer.elements / parts
    # `selective` saves the results of the experts' first matmul instead of its inputs, the dispatched rows.
    unsaved = [p for p in layer.weight_products if p.grouped][:1] if recompute == "selective" else []
    ends = [(p, 1 if p is branch[-1] else parts) for branch in layer.branches for p in branch if p.trained]
    inputs = samples * width * sum(p.batch * p.m * p.k / split for p, split in ends if p not in unsaved)
    saved = {"full": stream, "offload": 0.0}.get(recompute, inputs)
    return _PerSample(stream, saved, 0.0, saved, 0.0, LIVE_RESIDUAL_STREAMS * stream, 0.0, 0.0, 0.0)


# --- Residuals --------------------------------------------------------------------------------------------------------


def layer_residual_bytes(config: Config) -> float:
    """Mean bytes per layer of the saved activations of one micro-batch on the device."""
    sizes = _Sizes(config, attention_on_gpu(config), _measure_sizes)
    return sizes.saved / (sizes.largest_chunk * sum(kind.rows.slots for kind in sizes.layers))


def _chunks_in_flight(config: Config) -> int:
    """Micro-batches in flight, one for each virtual stage, on the stage with most.

    The slots of `pipeline_schedules.build_schedule`, in closed form.
    """
    mesh, m = config.mesh, config.micro_batches
    passes, stages = m * mesh.virtual_stages, mesh.pipe
    return passes if mesh.schedule == "gpipe" else min(passes, 2 * stages - 1 + (mesh.virtual_stages - 1) * stages)


# --- Points in a step -------------------------------------------------------------------------------------------------


def _compute_copies(sizes: _Sizes) -> tuple[float, float]:
    """Bytes of the compute weights: of the layers, and of everything else."""
    mesh, weights, trained = sizes.config.mesh, sizes.weights, sizes.trained
    if sizes.width == sizes.master and not sizes.sharded:
        return 0.0, 0.0  # the master weights themselves
    layers = trained.layers - trained.gathered if sizes.width != sizes.master or mesh.zero else 0
    # Frozen weights are stored as they are used: copied where they are gathered; and where layers without a loop are
    # recomputed, whose slices of the stacks XLA writes before them and leaves alive.
    if (mesh.zero and shards(mesh) > 1) or (sizes.unrolled and sizes.config.train.recompute != "none"):
        layers += weights.layers - weights.gathered - (trained.layers - trained.gathered)
    exchanged = sizes.master * weights.exchanged if mesh.zero == 3 else 0.0  # gathered later, so in float32
    return sizes.width * layers + exchanged, sizes.width * (weights.shared if sizes.sharded else trained.shared)


def _layer_gradients(sizes: _Sizes) -> float:
    """Bytes of the gradients that one backward pass through a virtual stage stacks."""
    weights = sizes.trained
    if sizes.unrolled and weights.gathered:  # of the last layer
        return sizes.master * sizes.layers[0].trained.gathered_shards / sizes.layers[0].rows.slots
    stacked = sizes.width * (weights.layers - weights.gathered) + sizes.master * weights.gathered_shards
    return stacked * sizes.largest_chunk


def _live_weights(sizes: _Sizes) -> float:
    """Bytes of the weights that an iteration of a scan has sliced from the stack, or gathered, and of their gradients;
    and of the copy of a virtual stage's weights, if it does not use all rows of a rank."""
    loops, model, ranks = Counter(), sizes.config.model, sizes.config.mesh.expert
    in_rounds = ranks > 1 and model.token_dispatcher(ranks) == "alltoall"
    for kind, stack in zip(sizes.layers, layer_stacks(model), strict=True):
        # Reduce-scatter of float32 gradients whose shards are not contiguous: a copy in another order.
        weights = sizes.width * (kind.weights.layers + kind.weights.gathered)
        gradients = sizes.master * (kind.trained.gathered + kind.trained.transposed)
        # The sum over the rounds of an all-to-all, and the gradient of one.
        sums = in_rounds * (sizes.master + sizes.width) * kind.trained.experts
        loops[stack.run] += (weights + gradients + sums) / kind.rows.slots
    copied = sizes.largest_chunk if any({kind.rows.slots} != {*kind.rows.counts} for kind in sizes.layers) else 0
    return max(loops.values()) + copied * sizes.width * sizes.weights.layers


def _memory(sizes: _Sizes, moment: str, computed: float, gradients: float, **kinds: float) -> Memory:
    """The memory at a point, with master weights and moments; `computed` are bytes of the compute weights."""
    single = sizes.trained.matrices if sizes.config.optimizer.name == "muon" else 0
    moments = sizes.master * (2 * sizes.trained.stored - single)
    return Memory(sizes.master_weights + computed, moments, gradients, **kinds, host=sizes.host, moment=moment)


def _backward(sizes: _Sizes) -> Memory:
    """While the layers are differentiated, after the first one."""
    layers, shared = sizes.computed
    # The gradient of a tied embedding waits for that of its other use; a pipeline accumulates it immediately.
    waiting = sizes.width * sizes.trained.table if sizes.config.mesh.pipe == 1 else 0.0
    stacked = _layer_gradients(sizes)
    if sizes.unrolled and copies(sizes.config.mesh) == 1 and not sizes.accumulates:
        # Not stacked: the gradients of a layer take less than its saved activations, which are free then.
        stacked = sizes.width * max(kind.trained.layers / kind.rows.slots for kind in sizes.layers)
    gradients = stacked + sizes.sums + waiting
    work = sizes.work + _live_weights(sizes) + sizes.messages + sizes.batch
    computed = layers + (shared if sizes.accumulates else 0.0)  # the next micro-batch needs the embedding
    return _memory(sizes, "backward", computed, gradients, activations=sizes.activations, workspace=work)


def _head(sizes: _Sizes) -> Memory:
    """The logits, which their gradient overwrites; or the logits of a chunk of the vocabulary."""
    layers, shared = sizes.computed
    # The gradient of the embedding overwrites its copy, unless another micro-batch needs that.
    gradients = sizes.sums + (sizes.width * sizes.trained.table if sizes.accumulates else 0.0)
    work = sizes.heads + sizes.messages + sizes.batch
    if sizes.config.train.loss_chunks > 1:
        work += sizes.width * sizes.weights.table  # cut into chunks
    # It does so where their matmul is Triton's, as in the loops compiled for the table; not where it is cuBLAS's.
    logits = sizes.logits * (2 if sizes.unrolled else 1)
    computed = layers + shared
    return _memory(sizes, "head", computed, gradients, activations=sizes.activations, logits=logits, workspace=work)


def _reduction(sizes: _Sizes) -> Memory:
    """After the backward pass: gradients in the compute dtype become float32 and are summed over `data`."""
    weights, mesh = sizes.trained, sizes.config.mesh
    whole = weights.layers - weights.gathered + weights.shared
    is_summed = copies(mesh) > 1 or sizes.accumulates
    gradients = sizes.master * (whole + weights.gathered_shards) if is_summed else sizes.width * whole
    return _memory(sizes, "reduction", 0.0, gradients, workspace=sizes.batch)


def _update(sizes: _Sizes) -> Memory:
    """While Muon orthogonalizes the matrices of the largest weight; all other matrices wait in the same dtype."""
    waiting = muon_width(sizes.config) * sizes.trained.stored
    return _memory(sizes, "update", 0.0, waiting, workspace=muon_workspace(sizes.config) + sizes.batch)


# --- Weights on one device --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceWeights:
    """Elements that one device holds, on the pipeline stage with its share of the layers.

    Attributes:
      stored: master weights between steps, of layers and everything else; as many float32 gradients.
      matrices: of `stored`, the matrices, for which Muon has one moment rather than two.
      layers: weights of its layers, as used in the computation: split over `model`, and experts over `expert`.
      exchanged: of `layers`, the weights that stages send each other, before they are gathered from replicas.
      experts: of `layers`, the weights that `expert` splits, which are shared by fewer replicas than all others.
      shared: all other weights, as used in the computation.
      gathered: of `layers`, the weights gathered layer by layer inside the loop (ZeRO-3), never all at the same time.
      gathered_shards: their shards, of the layers of the stage.
      table: of `shared`, the embedding of the tokens.
      largest: of `layers`, the largest weight.
      transposed: of `gathered`, the largest weight whose shards are not contiguous: gathering it, and scattering its
        gradient, takes a copy in another order.
    """

    stored: int = 0
    matrices: int = 0
    layers: int = 0
    exchanged: int = 0
    experts: int = 0
    shared: int = 0
    gathered: int = 0
    gathered_shards: int = 0
    table: int = 0
    largest: int = 0
    transposed: int = 0


OF_ONE_WEIGHT = "table", "largest", "transposed"  # fields of one weight, the largest


def device_weights(
    model: ModelConfig, mesh: MeshConfig, kind: int | None = None, trained: bool = False
) -> DeviceWeights:
    """Elements of `model` that one device of `mesh` holds, or of those that are `trained`; with `kind`
    (`trace.layer_kinds`) of the layers of that kind alone."""
    return _elements(model, _storage_fields(model, mesh), trained and _has_frozen(model))[kind]


def muon_matrices(model: ModelConfig, mesh: MeshConfig) -> tuple[MatrixLayout, ...]:
    """The matrices of `model` on `mesh`, one entry a weight."""
    return _matrices(model, _storage_fields(model, mesh))


# The fields of a mesh that the storage of weights depends on.
STORAGE_FIELDS = "pipe", "data", "model", "expert", "context", "zero", "replicate", "virtual_stages", "stage_layers"


def _storage_fields(model: ModelConfig, mesh: MeshConfig) -> tuple:
    """The values of `STORAGE_FIELDS`, equal for all virtual stages if they are even."""
    fields = attrgetter(*STORAGE_FIELDS)(mesh)
    return (*fields[:-2], 1, ()) if all(rows.even for rows in stack_rows(model, mesh)) else fields


def _mesh(storage: tuple) -> MeshConfig:
    return MeshConfig(**dict(zip(STORAGE_FIELDS, storage, strict=True)))


class Weight(NamedTuple):
    """A weight of a traced model: the number of its stack (`config/pattern.py`) or None, its shape, PartitionSpec and
    dims (`parallel/weights.py`), its rows and columns if it is a matrix for Muon, and whether it is trained."""

    stack: int | None
    shape: tuple[int, ...]
    spec: tuple
    dims: Dims
    matrix: tuple[tuple[int, ...], tuple[int, ...]] | None
    trained: bool

    def storage(self, model: ModelConfig, mesh: MeshConfig) -> Storage:
        """The storage of the weight of a model on a mesh, except for the shape that virtual stages give it."""
        rows = None if self.stack is None else stack_rows(model, mesh)[self.stack]
        if rows and rows.even:
            rows = StackRows((rows.slots,) * rows.stages, rows.stages)
        return plan_weight_storage(rows, self.shape, P(*self.spec), mesh)


@lru_cache(maxsize=64)
def measure_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """All weights of a model, traced now or by an earlier command."""

    def trace() -> tuple[Weight, ...]:
        frozen, dims, matrices = frozen_weights(model), weight_dims(model), matrix_dims(model)
        stacks = [None, *layer_stacks(model)]
        weights = []
        for name, (shape, spec) in abstract_weights(model).items():
            kind = stacks.index(find_stack(model, name))
            described = shape, tuple(spec), dims[name], matrices.get(name), name not in frozen
            weights.append(Weight(kind - 1 if kind else None, *described))
        return tuple(weights)

    return trace_once(("weights", model), model, trace, lambda *weights: tuple(Weight(*fields) for fields in weights))


@lru_cache(maxsize=64)
def _has_frozen(model: ModelConfig) -> bool:
    return not all(weight.trained for weight in measure_weights(model))


def count_weights(model: ModelConfig) -> int:
    """Number of parameters of a model, as `count_parameters`, from the traces of earlier commands."""
    return sum(math.prod(weight.shape) for weight in measure_weights(model))


def cache_bytes(config: Config) -> tuple[int, int] | None:
    """Bytes of the cache for generation, of all layers on one device: of each token, and of each sequence whatever its
    length, such as a recurrent state; None if the model does not generate."""
    weights = trace_model(config.model)
    stacks = [stack for stacks in layer_runs(weights.blocks) for stack in stacks]
    if not (config.model.causal and all(hasattr(stack, "empty_cache") for stack in stacks)):
        return None

    def measure(stack: nnx.Module, slots: int) -> int:
        def empty_cache(stack: nnx.Module) -> Any:
            layer = jax.tree.map(itemgetter(0), stack)
            return layer.empty_cache(1, slots, COMPUTE_TYPES[config.precision.compute])

        on_mesh = jax.shard_map(empty_cache, mesh=abstract_mesh(MeshConfig()), in_specs=P(), out_specs=P())
        arrays = jax.tree.leaves(jax.eval_shape(on_mesh, stack))
        return len(jax.tree.leaves(stack)[0]) * sum(array.size * array.dtype.itemsize for array in arrays)

    with jax.enable_x64(config.precision.compute == "fp64"):
        empty, one = (sum(measure(stack, slots) for stack in stacks) for slots in (0, 1))
    return one - empty, empty


@lru_cache(maxsize=8192)
def _elements(model: ModelConfig, storage: tuple, trained: bool) -> dict[int | None, DeviceWeights]:
    """The elements of the layers of each kind, and of all weights: None."""
    mesh = _mesh(storage)
    sizes, totals = axes.sizes(mesh), {kind: Counter() for kind in (None, *range(len(layer_stacks(model))))}
    for weight in measure_weights(model):
        if trained and not weight.trained:
            continue
        storage, computed_as = weight.storage(model, mesh), compute_spec(weight.shape, P(*weight.spec), mesh)
        stored, computed = _local(weight.shape, storage.spec, sizes), _local(weight.shape, computed_as, sizes)
        parts = {"stored": stored, "matrices": stored if weight.matrix else 0}
        if (rows := storage.rows) is None:
            parts |= {"shared": computed, "table": computed if weight.dims == (TOKEN, OUT) else 0}
        else:
            computed = computed // weight.shape[0] * rows.slots
            shard = computed // math.prod(sizes[axis] for names, _ in storage.gathers for axis in names)
            experts = computed if axes.EXPERT in computed_as else 0
            parts |= {"layers": computed, "exchanged": 0 if rows.even else shard, "experts": experts}
            parts |= {"largest": computed}
            if storage.gather_per_layer:
                ((_, dim),) = storage.gathers
                is_transposed = _local(weight.shape[1:dim], P(*computed_as[1:dim]), sizes) > 1
                parts |= {"gathered": computed, "gathered_shards": shard, "transposed": is_transposed * computed}
        for kind in {None, weight.stack}:
            for name, elements in parts.items():
                known = totals[kind][name]
                totals[kind][name] = max(known, elements) if name in OF_ONE_WEIGHT else known + elements
    return {kind: DeviceWeights(**total) for kind, total in totals.items()}


@lru_cache(maxsize=4096)
def _matrices(model: ModelConfig, storage: tuple) -> tuple[MatrixLayout, ...]:
    mesh = _mesh(storage)
    weights = [weight for weight in measure_weights(model) if weight.matrix]
    return tuple(MatrixLayout(w.shape, w.storage(model, mesh).spec, *w.matrix, mesh) for w in weights)


def _local(shape: tuple[int, ...], spec: P, sizes: dict[str, int]) -> int:
    """Elements per device of an array that is sharded so over axes of these sizes."""
    split = (axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry))
    return math.prod(shape) // math.prod(sizes[axis] for axis in split)


# --- Muon: matmuls of its iteration, resharding, memory ---------------------------------------------------------------


def muon_width(config: Config) -> int:
    """Bytes of an element in the iteration."""
    return DTYPE_BYTES[ITERATE_IN[config.precision.compute]]


def muon_workspace(config: Config) -> float:
    """Bytes of the temporaries of the largest weight."""

    def elements(matrices: MatrixLayout) -> int:
        # Of an iteration: x, its matmul, the next x and a copy, and three squares; send and receive buffers.
        whole, squares = math.prod(matrices.matrix_shape), min(matrices.matrix_shape) ** 2
        moved = math.prod(matrices.shape) // math.prod(axes.sizes(matrices.mesh)[axis] for axis in matrices.split_axes)
        return matrices.count_per_rank * (4 * whole + 3 * squares) + (2 * moved if matrices.exchanges else 0)

    return muon_width(config) * max(map(elements, muon_matrices(config.model, config.mesh)), default=0)


@lru_cache(maxsize=4096)
def muon_products(count: int, rows: int, columns: int) -> tuple[Product, ...]:
    """The matmuls of the iteration on `count` matrices."""
    stack = jax.ShapeDtypeStruct((count, rows, columns), jnp.float32)
    operations = Program(jax.make_jaxpr(newton_schulz)(stack)).operations
    return tuple(operation.product for operation in operations if operation.product is not None)
