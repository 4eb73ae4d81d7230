"""Predicted seconds of a layer: its products, attention, memory-bound kernels and collectives, forward and backward.

`time.py` says how each is modelled, and puts layers together to a step. `Software` has the properties of a training
program that no config contains: what it sends and what it hides. mjax's own program is traced: its products, the bytes
of its kernels and its collectives are read from the trace of a layer. The programs of papers cannot be traced; what
their kernels read and write was read from their code (`Written`). Nothing here is fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import jax

from mjax.config import Config, MeshConfig
from mjax.config.axes import CONTEXT, EXPERT, MODEL, copies, shards, sizes
from mjax.config.kernels import FUSED, attention_on_gpu
from mjax.parallel.grouped import ROWS
from mjax.planner.calibration import WIDTHS, Rates
from mjax.planner.weights import weights_of_device
from mjax.step.precision import in_float8
from mjax.step.unrolling import is_unrolled
from mjax.trace import kernel_bytes
from mjax.trace import layers as trace
from mjax.trace.kernel_bytes import Kernels, Moved
from mjax.trace.program import Product

# Rows of a tile of experts' products.
TILE = ROWS["pallas"]


# --- Software ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """Bytes of the kernels of a program that cannot be traced: of 16-bit activations, read and written by one layer's
    forward pass, per element of the given tensor.

    Attributes:
      stream: per element of [tokens, h]: LayerNorms, dropout, residual sums.
      mlp: per element of [tokens, f / p]: GELU.
      scores: per element of the scores [b, n / p, s, s]: scale, mask, softmax, dropout; not reads and writes of the two
        products.
      logits: per element of the vocabulary scores, forward and backward.
      kernels: launches of a layer's forward pass, except its products.
      backward: bytes of a backward pass divided by those of the forward.
    """

    stream: float
    mlp: float
    scores: float
    logits: float
    kernels: int
    backward: float


@dataclass(frozen=True)
class Overlap:
    """The collectives that run during products.

    Attributes:
      backward: share of a layer's backward collectives over `model` that overlaps the products of its weights'
        gradients, at most as long as these take.
      repeated: with sequence parallelism the same of the gathers of kept tokens that recomputation repeats, during the
        products of gradients: both of a layer with selective recomputation, the first with full.
      gradients: sums over `data` run during the backward pass of the only micro-batch, without ZeRO and without a loop
        over its layers.
      weights: share of FSDP's gathers of weights and sums of gradients that runs during the layers' own kernels.
      copies: the copies into and out of the stacks of a loop over layers run during the products.
    """

    backward: float
    repeated: float = 0.0
    gradients: bool = False
    weights: float = 0.0
    copies: bool = False


@dataclass(frozen=True)
class Software:
    """A training program.

    Attributes:
      name: of the program.
      written: bytes of its kernels; None if its layers are traced.
      flash: it has a flash attention kernel.
      overlap: what it hides; None if that depends on the config (`overlap_of`).
      repeated_sums: all-reduces of a layer that full recomputation repeats. The last one of a layer is dead code, which
        XLA removes.
      gradient_bytes: per element when gradients are summed over `data`.
      accumulate_bytes: read and written per weight when the gradients of a micro-batch are accumulated.
      optimizer_bytes: read and written per weight by norm, clipping, Adam and the cast to the compute dtype.
      splits_messages: each rank of `model` sends its part of an activation to the next stage, which gathers it (arXiv
        2104.04473, section 4.1), with sequence parallelism or without.
      sends_every_tick: stages synchronise after every tick of the schedule and send both ways, even without a receiver.
    """

    name: str
    written: Written | None
    flash: bool
    overlap: Overlap | None
    repeated_sums: int
    gradient_bytes: int
    accumulate_bytes: int
    optimizer_bytes: int
    splits_messages: bool
    sends_every_tick: bool

    def overlap_of(self, config: Config) -> Overlap:
        """Return the collectives that the program hides with this config."""
        return self.overlap or mjax_overlap(config, jax.__version_info__)


def mjax_overlap(config: Config, version: tuple[int, ...]) -> Overlap:
    """Return the collectives that mjax's step hides, by version of jax, read from programs compiled for H100s.

    With sequence parallelism a barrier ties each reduce-scatter of the backward pass to the product next to it, in
    every version; the all-gather before it is needed at once, and one that is repeated needs only what was kept.
    Without sequence parallelism XLA decides: jax 0.10 overlaps the all-reduce with the product, 0.11 does not; and
    0.11 copies into the stacks of a loop during the products. FSDP gathers weights and sums gradients during the
    layers. Without ZeRO and a loop over layers the sums of the only micro-batch run during the gradients of the
    weights. XLA has one collective in flight, so none of these overlaps those over `model` (docs/results/log).
    """
    newer = version >= (0, 11)
    if config.mesh.splits_tokens:
        return Overlap(backward=0.5, repeated=1.0, copies=newer)
    alone = config.mesh.model == 1
    return Overlap(backward=0.0 if newer else 1.0, gradients=alone, weights=0.85 * alone, copies=newer)


# The 26 bytes of Adam, 2 of the norm and 6 of the cast were read from programs compiled for H100s (docs/results/log).
MJAX = Software(
    name="mjax", written=None, flash=True, overlap=None,
    repeated_sums=1, gradient_bytes=4, accumulate_bytes=12, optimizer_bytes=34,
    splits_messages=False, sends_every_tick=True,
)  # fmt: skip


# --- Layers -----------------------------------------------------------------------------------------------------------


class Common:
    """Values shared by the layers and the head: the run, the GPU, collectives. Every method returns seconds.

    Attributes:
      element: bytes of the compute dtype; `gathered`: of what products are gathered for.
      tokens: of a micro-batch on this rank of `context`, made of `samples`.
      kernel: of attention; `flash`: whether it writes no scores.
      kinds: of layers, as in `trace.kinds_of`.
      stream: elements of a micro-batch's stream on all ranks of `model`.
    """

    def __init__(self, config: Config, rates: Rates, software: Software):
        self.config, self.rates, self.software = config, rates, software
        model, mesh = config.model, config.mesh
        self.overlap = software.overlap_of(config)
        self.element, self.float8 = WIDTHS[config.precision.compute], in_float8(config.precision)
        self.gathered = 1 if self.float8 else self.element
        self.samples = config.train.micro_batch
        self.tokens = self.samples * model.sequences * model.sequence // mesh.context
        self.kernel = attention_on_gpu(config, rates.gpu.compute_capability)
        self.flash = software.flash and self.kernel in FUSED
        self.kinds = trace.kinds_of(config)
        self.stream = self.samples * trace.layer_forward(self.kinds[0][1]).elements

    @cached_property
    def layer_sum(self) -> float:
        """One sum of a stream over `model`; with sequence parallelism a reduce-scatter and an all-gather."""
        if self.config.mesh.splits_tokens:
            return self.layer_scatter + self.layer_gather
        return self.rates.sum(self.config.mesh.model, 1, self.element * self.stream)

    @cached_property
    def layer_scatter(self) -> float:
        return self.rates.gather(self.config.mesh.model, 1, self.element * self.stream)

    @cached_property
    def layer_gather(self) -> float:
        return self.rates.gather(self.config.mesh.model, 1, self.gathered * self.stream)

    def exposed_zero(self, seconds: float, work: float) -> float:
        """Exposed seconds of ZeRO's collectives that take `seconds` and overlap `work`."""
        return seconds - min(self.overlap.weights * seconds, work)

    def seconds_of(self, moved: Moved) -> float:
        """Memory-bound kernels."""
        return self.rates.traffic(moved.bytes + moved.weights, moved.kernels)

    @cached_property
    def looped(self) -> bool:
        """True if the layers of a traced program run in a loop."""
        return self.software.written is None and not is_unrolled(self.config, on_gpu=True)


def over_replicas(mesh: MeshConfig, collective: Callable, width: float, weights: float, experts: float = 0.0) -> float:
    """A collective of `width` bytes for each of `weights`, over all replicas of a group; but of those of `experts`,
    which `expert` splits, over those that share them."""
    seconds = collective(shards(mesh), mesh.model, width * (weights - experts))
    if not experts:
        return seconds
    return seconds + collective(shards(mesh) // mesh.expert, mesh.model * mesh.expert, width * experts)


class LayerTime:
    """The work of one device in a layer, part by part; every method returns seconds.

    Attributes:
      run: shared by all layers; `config` to `samples` are its attributes.
      of, layer: of its kind, and its products.
      weights: elements of its weights, as used in the computation; of them `experts` are split over `expert`, and
        `trained` have gradients.
      worst: all tokens of a mixture choose the same experts.
    """

    def __init__(self, run: Common, layers: int, of: trace.Traced, worst: bool = False):
        self.run, self.config, self.rates, self.software = run, run.config, run.rates, run.software
        self.overlap, self.element, self.samples = run.overlap, run.element, run.samples
        self.of, self.layer, self.worst = of, trace.layer_forward(of), worst
        weights, of_stage = weights_of_device(run.config.model, run.config.mesh, of.kind), layers / run.config.mesh.pipe
        self.weights, self.experts = weights.layers / of_stage, weights.experts / of_stage
        self.trained = weights_of_device(run.config.model, run.config.mesh, of.kind, trained=True).layers / of_stage

    @cached_property
    def passes(self) -> list[dict[str, float]]:
        """The parts: the forward pass, and the halves of the backward pass: inputs, weights."""
        return [self._forward(), self._backward_inputs(), {"matmul": self._weight_gradients(self.layer.of_trained)}]

    def _forward(self) -> dict[str, float]:
        over_model, over_data = self._agreed(0)
        work = {"matmul": self._forward_products, "attention": self._attention, "elementwise": self._kernels[0]}
        gathers = self._over_data(self.run.gathered)
        forward = {
            **work,
            "model": len(self.layer.branches) * self.run.layer_sum + over_model,
            "context": sum(self._over_context),
            "expert": sum(self._over_experts),
            "data": self.run.exposed_zero(gathers, sum(work.values())) + over_data,
        }
        return forward | {"host": max(0.0, self._to_host - sum(forward.values()))}

    @cached_property
    def _to_host(self) -> float:
        """A copy of what a layer keeps in host memory, one way."""
        kernel, recompute = self._traced_kernel, self.config.train.recompute

        def offloaded(of: trace.Traced) -> tuple[float, ...]:
            return (trace.layer_backward(of, kernel, recompute).offloaded,)

        if recompute != "offload":
            return 0.0
        return self.rates.host(*trace.of_micro_batch(self.of, self.samples, offloaded))

    @property
    def _traced_kernel(self) -> str:
        return "cudnn" if self.run.flash else "xla"

    def _backward_inputs(self) -> dict[str, float]:
        """A layer's backward pass without its weight gradients, including recomputation."""
        recompute, software = self.config.train.recompute, self.software
        to_inputs = sum(self._product(product, product.k, product.n) for product in self.layer.of_weights)
        over_model, over_data = self._agreed(1)
        whole, attention = recompute in ("full", "offload"), recompute != "none"
        repeated, split = 0.0, self.config.mesh.splits_tokens
        if whole and split:  # of a layer's gathers and scatters only the last scatter can be dead code
            sent = 2 * self.run.layer_gather + software.repeated_sums * self.run.layer_scatter
            repeated = sent - self.overlap.repeated * self.run.layer_gather
        elif whole:
            repeated = software.repeated_sums * self.run.layer_sum
        elif attention and split:  # the two gathers are repeated
            repeated = 2 * self.run.layer_gather - min(2 * self.overlap.repeated * self.run.layer_gather, to_inputs)
        work = {
            "matmul": to_inputs + whole * self._forward_products,
            "attention": self._attention_backward + attention * self._attention,
            "elementwise": self._kernels[1] + self._loop,
        }
        stored = self._over_data(self.run.gathered) + self._over_data(software.gradient_bytes, self.trained)
        overlapped = sum(work.values()) + self._weight_gradients(self.layer.of_trained)
        return {
            **work,
            "model": self._exposed_backward + repeated + over_model,
            "context": sum(self._over_context) + attention * self._over_context[0] + whole * self._over_context[1],
            "expert": sum(self._over_experts) + attention * self._over_experts[0],
            "data": self.run.exposed_zero(stored, overlapped) + over_data,
            "host": self._to_host,
        }

    @cached_property
    def _forward_products(self) -> float:
        return sum(self._product(product, product.n, product.k) for product in self.layer.of_weights)

    def _weight_gradients(self, products: Iterable[Product]) -> float:
        seconds = 0.0
        for product in products:
            rows, groups = self._rows(product)
            seconds += self.rates.product(product.k, product.n, rows, groups, float8=self.run.float8)
        return seconds

    def _product(self, product: Product, n: int, k: int) -> float:
        """[tokens, k] × [k, n] for the tokens of a product with a weight."""
        rows, groups = self._rows(product)
        return self.rates.product(rows, n, k, groups, float8=self.run.float8)

    def _rows(self, product: Product) -> tuple[float, int]:
        """The rows of a product with a weight, and the number of weights with so many; experts have whole tiles."""
        rows, groups = self.samples * product.m, product.batch
        if not product.grouped:
            return rows, 1
        model, mesh = self.config.model, self.config.mesh
        if self.worst:
            local = model.parted_experts() // mesh.expert
            rows, groups = self.run.tokens * mesh.expert, min(model.taken_experts(), local)
        return TILE * math.ceil(rows / TILE), groups

    @cached_property
    def _over_experts(self) -> tuple[float, float]:
        """A layer's gathers over `expert` in its forward pass, and its reduce-scatters; each is the other's transpose
        in the backward pass, and recomputation gathers again."""
        mesh, seconds = self.config.mesh, {"all_gather": 0.0, "reduce_scatter": 0.0}
        for name, whole in trace.layer_collectives(self.of, EXPERT):
            seconds[name] += self.rates.gather(mesh.expert, mesh.model * mesh.context, self.samples * whole)
        return seconds["all_gather"], seconds["reduce_scatter"]

    @cached_property
    def _over_context(self) -> tuple[float, float]:
        """A layer's collectives over `context` in its forward pass, before attention and after it; the backward pass
        has the transpose of each, and recomputation those before again."""
        mesh, seconds, exchanged = self.config.mesh, [0.0, 0.0], 0
        for name, whole in trace.layer_collectives(self.of, CONTEXT):
            seconds[exchanged == 3] += self.rates.gather(mesh.context, mesh.model, self.samples * whole)
            exchanged += name == "all_to_all"  # of queries, keys and values, then of the result
        return tuple(seconds)

    @cached_property
    def _attention(self) -> float:
        if not self.layer.of_activations:
            return 0.0
        if self.run.flash:
            return self._flash(backward=False)
        return self._score_products + self._scores[0]

    @cached_property
    def _attention_backward(self) -> float:
        if not self.layer.of_activations:
            return 0.0
        if self.run.flash:  # five products for two: it recomputes the scores (arXiv 2307.08691)
            return self._flash(backward=True)
        return 2 * self._score_products + self._scores[1]

    def _flash(self, backward: bool) -> float:
        products, model = self.layer.of_activations, self.config.model
        flops = self.samples * sum(product.flops for product in products) / (2 if model.causal else 1)
        return self.rates.flash((2.5 if backward else 1) * flops, products[0].k, model.sequence, backward)

    @cached_property
    def _score_products(self) -> float:
        products = self.layer.of_activations
        return sum(self.rates.product(p.m, p.n, p.k, p.batch * self.samples) for p in products)

    @cached_property
    def _scores(self) -> tuple[float, float]:
        """Passes over stored scores, in the forward and in the backward pass."""
        written = self.software.written
        if written is None:
            return tuple(self.rates.traffic(moved.scores, 3) for moved in self.traced[:2])
        elements = self.samples * max(p.batch * p.m * p.n for p in self.layer.of_activations)
        forward = self.rates.traffic(written.scores * elements * self.element / 2, 3)
        return forward, written.backward * forward

    @cached_property
    def traced(self) -> Kernels:
        """Bytes that the traced kernels move for a micro-batch."""
        recompute = self.config.train.recompute
        return kernel_bytes.of_micro_batch(self.of, self._traced_kernel, recompute, self.samples)

    @cached_property
    def _kernels(self) -> tuple[float, float]:
        """Memory-bound kernels of a layer, forward, and backward with what is computed again."""
        mesh, written = self.config.mesh, self.software.written
        if written is None:
            return tuple(map(self.run.seconds_of, self.traced[:2]))
        stream = written.stream * self.run.stream / (mesh.model if mesh.splits_tokens else 1)
        down = self.layer.branches[-1][-1]
        mlp = written.mlp * self.samples * down.m * down.k
        forward = self.rates.traffic((stream + mlp) * self.element / 2, written.kernels)
        return forward, (written.backward + (self.config.train.recompute != "none")) * forward

    @cached_property
    def _loop(self) -> float:
        """Cost of a loop for each layer: filling stacks and copying."""
        if not self.run.looped:
            return 0.0
        return self.rates.traffic(
            *kernel_bytes.looped(self.traced.kept, self.element * self.weights, self.overlap.copies)
        )

    def _agreed(self, backward: int) -> tuple[float, float]:
        """The all-reduces of the scales of arrays in float8, as collectives over `model` and over `data`."""
        mesh, agreed = self.config.mesh, self.traced[backward].agreed if self.run.float8 else ()
        ranks = [(math.prod(sizes(mesh)[axis] for axis in axes), 1 if MODEL in axes else mesh.model) for axes in agreed]
        seconds = sum(self.rates.agree(*each) for each in ranks)
        return (0.0, seconds) if copies(mesh) > 1 else (seconds, 0.0)

    @cached_property
    def _exposed_backward(self) -> float:
        """Exposed seconds of a layer's backward collectives over `model`.

        A collective that overlaps the weight gradients of column-parallel layers costs nothing while these run.
        """
        split = self.config.mesh.splits_tokens
        hidden = self.overlap.backward * (2 * self.run.layer_scatter if split else self.run.layer_sum)
        trained, gradients = iter(self.layer.trained), []
        for branch in self.layer.branches:
            own = [product for product, of in zip(branch, islice(trained, len(branch)), strict=True) if of]
            gradients.append(self._weight_gradients(own[:-1]))  # the last is row-parallel
        return sum(self.run.layer_sum - min(hidden, overlapped) for overlapped in gradients)

    def _over_data(self, width: float, weights: float | None = None) -> float:
        """ZeRO-3: a gather of a layer's weights, or a scatter of some gradients, of `width` bytes per element."""
        if self.config.mesh.zero != 3:
            return 0.0
        weights = self.weights if weights is None else weights
        return over_replicas(self.config.mesh, self.rates.gather, width, weights, min(self.experts, weights))
