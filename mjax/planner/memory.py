"""How many bytes a device needs, said before anything is compiled: a sum in which every term names its array.

    masters, moments       float32: 12 bytes an element, sharded as `parallel/zero.py` says
    weights to compute     a copy in the compute type, cast at the start of the step, and gathered where it is sharded
    kept activations       what the forward pass leaves to the backward pass, for every layer and micro-batch in flight
    gradients              one of each weight in the compute type; float32 sums where micro-batches are accumulated
    logits                 [b s, v / p] of one micro-batch
    work                   what one layer's backward pass has in hand at its fullest moment

A step has three moments at which memory can be fullest, and the largest of them is what the step needs:

    head        every kept activation, and the logits
    backward    every kept activation, the gradients of all layers, the work of one layer
    reduction   no activation, but float32 copies of the gradients while they are summed over `data`

The counting of activations follows arXiv 2205.05198, section 4, with what JAX keeps in place of what PyTorch keeps: no
dropout masks (they are hashed again), no inputs of LayerNorm and GELU beside their outputs where these are computed
again, and weights in the compute type only while they are used. `tests/planner/compiled_memory.json` holds what XLA
allocates for the same configs; `benchmarks/memory.py` makes it anew.

Letters as everywhere: b, s, h, n, d, f, v; T = b s rows of a micro-batch, R the rows of the residual stream (T / p with
sequence parallelism), c bytes of the compute type, p devices along `model`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from mjax.config import Config
from mjax.models.kernels import HOPPER, attention_on_gpu
from mjax.planner.weights import Held, held_by

# Bytes of a number of each type.
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
# Of the memory of a GPU, what has to stay free: predictions are off by up to this.
HEADROOM = 0.05
# Kinds of memory, in the order in which they are shown.
KINDS = ("parameters", "optimizer", "gradients", "activations", "logits", "workspace")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device at the fullest moment of a training step.

    Attributes:
      parameters: float32 masters, and the copy in the compute type that the step computes with.
      optimizer: Adam's two moments.
      gradients: of all layers in the compute type, sums over micro-batches in float32.
      activations: what is kept for the backward pass.
      logits: scores of the vocabulary; 0 where the fullest moment is another one.
      workspace: everything else, mostly the work of one layer.
      moment: `head`, `backward` or `reduction`.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    logits: float
    workspace: float
    moment: str = "backward"

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by kind."""
        return {name: getattr(self, name) for name in KINDS}

    @property
    def total(self) -> float:
        """All kinds together."""
        return self.parameters + self.optimizer + self.gradients + self.activations + self.logits + self.workspace


def free_share(needed: float, usable: float) -> float:
    """What `needed` bytes leave free of `usable` ones, as a fraction; below HEADROOM nobody knows whether they fit."""
    return 1 - needed / usable


def predict_memory(config: Config, capability: tuple[int, ...] = HOPPER) -> Memory:
    """What a training step of `config` needs, on the fullest device; no JAX, some microseconds.

    Args:
      config: validated; `model.attention` a kernel's name, or `auto`, which is taken as on this GPU.
      capability: compute capability of the GPU.

    Raises:
      UsageError: `model.attention` is cudnn, which cannot do what the config needs.
    """
    sizes = _Sizes.of(config, attention_on_gpu(config, capability))
    moments = [_head(sizes), _backward(sizes), _reduction(sizes)]
    return max(moments, key=lambda memory: memory.total)


# --- Sizes of the arrays of one device --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Elements of the arrays that the moments are made of, for one micro-batch on one device.

    Attributes:
      config, held: the config, and the weights of a device.
      kernel: of attention.
      width: c, bytes of the compute type.
      master: bytes of a master weight and of a sum of gradients.
      layers: a chunk's: those that one forward pass runs through.
      whole: T h. stream: R h. heads: T h / p, one of q, k, v, context. wide: T f / p.
      scores: b n s² / p, of attention; 0 where they are never written.
      logits: T v / p.
    """

    config: Config
    held: Held
    kernel: str
    width: int
    master: int
    layers: int
    whole: int
    stream: int
    heads: int
    wide: int
    scores: int
    logits: int

    @classmethod
    def of(cls, config: Config, kernel: str) -> _Sizes:
        model, mesh = config.model, config.mesh
        sequences = config.train.micro_batch * model.choices
        rows, p = sequences * model.sequence, mesh.model
        width = WIDTHS[config.precision.compute]
        has_logits = model.head == "pretraining"
        return cls(
            config=config,
            held=held_by(model, mesh),
            kernel=kernel,
            width=width,
            master=max(4, width),
            layers=model.layers // (mesh.pipe * mesh.chunks),
            whole=rows * model.hidden,
            stream=rows * model.hidden // (p if mesh.sequence_parallel else 1),
            heads=rows * model.hidden // p,
            wide=rows * model.mlp_width // p,
            scores=0 if kernel == "cudnn" else sequences * (model.heads // p) * model.sequence**2,
            logits=rows * model.padded_vocabulary // p if has_logits else 0,
        )

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed over micro-batches, in float32."""
        return self.config.mesh.pipe > 1 or self.config.micro_batches > 1

    @property
    def of_layer(self) -> float:
        """Elements of the weights of one layer, as the computation uses them."""
        return self.held.layers / (self.layers * self.config.mesh.chunks)

    @cached_property
    def batch(self) -> float:
        """Bytes of the replica's rows of a batch."""
        widths, config = {"int32": 4, "bool": 1}, self.config
        total = sum(math.prod(shape) * widths[kind] for shape, kind in config.batch_arrays().values())
        return total * config.train.global_batch / config.mesh.data


# --- What is kept -----------------------------------------------------------------------------------------------------


def kept_by_layer(config: Config) -> float:
    """Bytes that a layer keeps of one micro-batch from its forward to its backward pass."""
    return _kept(_Sizes.of(config, attention_on_gpu(config)), config.train.recompute)


def _kept(sizes: _Sizes, recompute: str) -> float:
    c = sizes.width
    if recompute == "full":
        return c * sizes.stream  # the layer's input
    post = sizes.config.model.layernorm == "post"
    # The layer's input and the stream after attention; behind the sum of a post-LN layer its LayerNorm's input too.
    stream = 3 if post else 2
    if recompute == "selective":  # qkv, context, mlp_up by name (KEPT in models/transformer.py)
        return c * (stream * sizes.stream + 4 * sizes.heads + sizes.wide)
    # Both LayerNorms' outputs, as the products read them: gathered, with sequence parallelism. q, k, v and the context;
    # the MLP before and after GELU.
    kept = c * (2 * sizes.stream + 2 * sizes.whole + 4 * sizes.heads + 2 * sizes.wide)
    if sizes.kernel == "cudnn":
        # cuDNN keeps the context in its own shape, beside the one the projection keeps, and a float32 number a row.
        return kept + c * sizes.heads + 4 * sizes.heads / sizes.config.model.head_size
    return kept + _kept_scores(sizes)


def _kept_scores(sizes: _Sizes) -> float:
    """Bytes of the softmax in float32, and as probabilities in the compute type, where a kernel writes them."""
    return (4 + sizes.width) * sizes.scores


def _in_flight(config: Config) -> tuple[int, int]:
    """Chunks' activations that wait for their backward pass, and for their weight gradients, on the fullest stage.

    The slots of `schedules.build_schedule`, in closed form.
    """
    mesh, m = config.mesh, config.micro_batches
    most, chunks, stages = m * mesh.chunks, mesh.chunks, mesh.pipe
    if mesh.schedule == "gpipe":
        return most, 0
    if mesh.schedule == "1f1b":
        return min(most, 2 * stages - 1 + (chunks - 1) * stages), 0
    return min(most, stages * chunks), min(most, stages * chunks)


# --- The moments ------------------------------------------------------------------------------------------------------


def _stored(sizes: _Sizes) -> tuple[float, float]:
    """Bytes of masters and of moments."""
    return sizes.master * sizes.held.stored, 2 * sizes.master * sizes.held.stored


def _computed(sizes: _Sizes) -> tuple[float, float]:
    """Bytes of the copies that the step computes with: of the layers, and of all else."""
    mesh, held = sizes.config.mesh, sizes.held
    sharded = mesh.pipe > 1 or (mesh.zero > 0 and mesh.data > 1)
    if sizes.width == sizes.master and not sharded:
        return 0.0, 0.0  # the masters themselves
    layers = held.layers - held.gathered if sizes.width != sizes.master or mesh.zero else 0
    return sizes.width * layers, sizes.width * held.shared


def _sums(sizes: _Sizes) -> float:
    """Bytes of the float32 sums over micro-batches; of weights gathered in the loop only the shard."""
    held = sizes.held
    if not sizes.accumulates:
        return 0.0
    return sizes.master * (held.layers - held.gathered + held.gathered_shards + held.shared)


def _layer_gradients(sizes: _Sizes) -> float:
    """Bytes of the gradients that one backward pass through a chunk's layers stacks up."""
    held, chunks = sizes.held, sizes.config.mesh.chunks
    if sizes.config.mesh.pipe > 1 and sizes.config.mesh.schedule == "zb-h1":
        return 0.0  # W multiplies them out one by one, when B's work is done
    return (sizes.width * (held.layers - held.gathered) + sizes.master * held.gathered_shards) / chunks


def _activations(sizes: _Sizes) -> float:
    kept = _kept(sizes, sizes.config.train.recompute) * sizes.layers
    if sizes.config.mesh.pipe == 1:
        return kept
    slots, pending = _in_flight(sizes.config)
    # The backward pass reads its slot of the ring buffer into an array of its own.
    return kept * (slots + 1) + _pending(sizes) * (pending + (pending > 0))


def _pending(sizes: _Sizes) -> float:
    """ZB-H1: bytes of both factors of each kernel's gradient, for the layers of a chunk."""
    # Inputs of QKV and up, whole; of projection and down, local. Gradients of their outputs, the other way round.
    return sizes.width * sizes.layers * (4 * sizes.whole + 4 * sizes.heads + 2 * sizes.wide)


def _messages(sizes: _Sizes) -> float:
    """Buffers of a pipeline [slots + 1, R, h]: activations and gradients that have arrived, streams for the head."""
    mesh = sizes.config.mesh
    if mesh.pipe == 1:
        return 0.0
    outputs = sizes.config.micro_batches if mesh.schedule == "gpipe" else 1
    return sizes.width * sizes.stream * (2 + 2 + (outputs + 1) + 2)  # and the two that are on their way


def _layer_work(sizes: _Sizes) -> float:
    """Bytes that the backward pass of one layer has in hand besides what was kept and what it hands on."""
    c, config = sizes.width, sizes.config
    recompute, split = config.train.recompute, config.mesh.sequence_parallel
    masks = 1 if config.model.hidden_dropout > 0 else 0  # the dropout mask as it is hashed, a byte an element
    # GELU: its insides in float32, the gradients of its output and input.
    mlp = sizes.wide * (4 + c) + sizes.stream * (5 * c + masks)
    # LayerNorm: two arrays in float32, and the stream, its gradient and both branches.
    norm = sizes.stream * (2 * 4 + 9 * c + masks)
    scores = _scores_in_hand(sizes) + (sizes.stream * 5 * c if sizes.scores else 0)
    if recompute == "selective":
        mlp += c * sizes.wide  # the output of GELU
    elif recompute == "full":
        # What `none` keeps is there again when the backward pass of the layer begins at its MLP, but for scores: XLA
        # computes these when it comes to attention.
        again = _kept(sizes, "none") - _kept_scores(sizes) - c * sizes.stream
        mlp, norm, scores = mlp + again, 0, scores + again
    gathered = 2 * c * sizes.whole if split else 0  # rows of all ranks, of the layer's input and of a gradient
    return max(mlp, norm, scores) + gathered + _weights_in_hand(sizes)


def _scores_in_hand(sizes: _Sizes) -> float:
    """Bytes of attention's scores in its backward pass, where a kernel writes them."""
    config, c, wide = sizes.config, sizes.width, sizes.master
    if not sizes.scores:
        return 0.0
    mesh, recompute = config.mesh, config.train.recompute
    # In float32 scores, or their gradient, and what it is made from; dropout's mask; probabilities where they are not
    # kept, and once more where XLA begins to compute attention again early, beside a collective.
    early = recompute == "selective" and (mesh.model > 1 or (mesh.zero == 3 and mesh.data > 1))
    each = 2 * wide + (config.model.attention_dropout > 0) + c * (recompute != "none") + c * early
    return each * sizes.scores + wide * config.model.sequence**2 * config.model.causal  # the causal mask, for all heads


def _weights_in_hand(sizes: _Sizes) -> float:
    """Bytes of the one layer's weights that a scan has cut out of the stack, or gathered, and of their gradients."""
    if sizes.held.gathered:
        return sizes.of_layer * (2 * sizes.width + sizes.master)
    return sizes.of_layer * sizes.width


def _chunk_in_hand(sizes: _Sizes) -> float:
    """Bytes of the copy of a chunk's weights, where a stage has several."""
    mesh = sizes.config.mesh
    return sizes.width * sizes.held.layers / mesh.chunks if mesh.chunks > 1 else 0.0


def _bias(sizes: _Sizes) -> float:
    """Bytes of what cuDNN is given written out, and of the gradient of it that nobody reads (`models/attention.py`)."""
    model = sizes.config.model
    if sizes.kernel != "cudnn":
        return 0.0
    documents = model.kind == "bert" or sizes.config.data.reset_attention
    square = 2 * sizes.width * model.sequence**2
    sequences = sizes.config.train.micro_batch * model.choices if documents else 1
    if model.positions == "alibi":
        return square * sequences * model.heads // sizes.config.mesh.model
    return square * sequences if documents else 0.0


def _backward(sizes: _Sizes) -> Memory:
    """While the layers are differentiated, after the first of them."""
    masters, moments = _stored(sizes)
    layers, shared = _computed(sizes)
    held, c = sizes.held, sizes.width
    repeats = sizes.accumulates  # the embedding is needed again, by the next micro-batch
    # The gradient of the embedding as output layer waits for that as input; in a pipeline it is summed up at once.
    waiting = c * held.table if sizes.config.mesh.pipe == 1 else 0.0
    gradients = _layer_gradients(sizes) + _sums(sizes) + waiting
    work = _layer_work(sizes) + _chunk_in_hand(sizes) + _messages(sizes) + _bias(sizes) + sizes.batch
    parameters = masters + layers + (shared if repeats else 0.0)
    return Memory(parameters, moments, gradients, _activations(sizes), 0.0, work, "backward")


def _head(sizes: _Sizes) -> Memory:
    """When the logits are there, and their gradient takes their place."""
    masters, moments = _stored(sizes)
    layers, shared = _computed(sizes)
    c = sizes.width
    # The gradient of the embedding takes the place of its copy, unless another micro-batch needs that.
    gradients = _sums(sizes) + (c * sizes.held.table if sizes.accumulates else 0.0)
    # The stream after the last LayerNorm, its gradient; of a BERT the three arrays of its head as well.
    streams = 2 + (4 if sizes.config.model.kind == "bert" else 0)
    work = c * streams * sizes.whole + _messages(sizes) + _bias(sizes) / 2 + sizes.batch
    return Memory(masters + layers + shared, moments, gradients, _activations(sizes), c * sizes.logits, work, "head")


def _reduction(sizes: _Sizes) -> Memory:
    """After the backward pass: gradients in the compute type become float32 and are summed over `data`."""
    masters, moments = _stored(sizes)
    held, mesh, model = sizes.held, sizes.config.mesh, sizes.config.model
    whole = held.layers - held.gathered + held.shared
    wide = sizes.master * (whole + held.gathered_shards)
    if mesh.data == 1 and not sizes.accumulates:
        return Memory(masters, moments, sizes.width * whole, 0.0, 0.0, sizes.batch, "reduction")  # nothing is summed
    # They are converted one after the other, so the last that is still in both types is the largest, one of the MLP's.
    kernel = 0 if held.gathered else model.hidden * model.mlp_width // mesh.model * model.layers // mesh.pipe
    narrow = 0.0 if sizes.accumulates or sizes.width == sizes.master else sizes.width * kernel
    return Memory(masters, moments, narrow + wide, 0.0, 0.0, sizes.batch, "reduction")
