"""Predicted seconds of a step: an analytic model of the GPU, of the program, and of how efficient it is.

Three things are kept apart:

    hardware     `Gpu`: data-sheet values (`mjax/hardware.py`).
    software     `Software`: properties of the program that no config contains: which tensors its kernels read and
                 write, what it sends in addition, in which dtype. Read from the code, never fitted.
    calibration  `Calibration`: the share of the data-sheet rates that is reached: a few numbers, fitted to published
                 runs or measured on the user's machine, with their remaining error (`calibration.py` has both).

The parts of a step, and how each is modelled:

    matrix products   a roofline: the FLOPs at `matmul` × peak, less if a dim is small; or the bytes, if those take
      longer
    attention         flash: the FLOPs of unmasked scores. Else: two products over s × s, and the scores' bytes
    memory-bound      LayerNorm, dropout, residual sums, GELU: bytes over `memory` × bandwidth, and launches
    collectives       a ring: bytes sent over its slowest link, which the rings that leave a server together share, and
                      latency × log2(ranks). What a product hides counts only beyond the product's time
    pipeline          work of all micro-batches, then fill and drain as in the schedule (`schedules.py`), in lock-step;
                      the head is on the last stage, for which all others wait
    once per step     sums over `data`, gathers of weights, the bytes of the optimizer; Muon's products (`muon.py`)

The products of a layer and of the head, their shapes, and the number of sums over `model` are read from the traced
model (`training/trace.py`), once for each model and size of that axis; the rest is arithmetic. The pieces are those of
arXiv 2104.04473, sections 2.2 and 3, and of 2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mjax.batch_size import BatchSizes
from mjax.config import Config, MeshConfig
from mjax.hardware import Gpu
from mjax.models.build import count_parameters
from mjax.models.kernels import attention_on_gpu
from mjax.parallel.axes import MODEL
from mjax.planner import muon
from mjax.planner.calibration import Calibration, Software, default_calibration
from mjax.planner.rates import WIDTHS, Rates
from mjax.planner.regions import activation_elements
from mjax.planner.weights import held_by
from mjax.training import trace
from mjax.training.flops import model_flops
from mjax.training.program import Product

# Parts of a step, in display order.
PARTS = ("matmul", "attention", "elementwise", "head", "model", "pipe", "bubble", "data", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by part.

    Attributes:
      parts: seconds by name; they add up to `total`.
        matmul: matrix products of the layers, including recomputed ones.
        attention: scores, softmax and weighted sums.
        elementwise: memory-bound kernels of the layers.
        head: embedding, logits and loss, without their collectives.
        model: exposed collectives over `model`; with Muon also those of its matrices.
        pipe: messages between stages.
        bubble: idle time while the pipeline fills and drains.
        data: sums and gathers over `data`, and of the embedding over `pipe`; with Muon those of its matrices.
        optimizer: accumulation of gradients, norm, update of the weights.
      model_tflops: TFLOP/s of one GPU, counted as in `model_flops` (nothing for recomputation, full attention).
      mfu: those over the peak.
      error: relative error bar of `total`.
      mean: seconds per step, mean over the run: less than `total` with a batch ramp-up.
      caveats: what is outside the range of the calibration.
    """

    parts: dict[str, float]
    model_tflops: float
    mfu: float
    error: float
    mean: float
    caveats: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())


def predict_time(config: Config, gpu: Gpu, calibration: Calibration | None = None) -> StepTime:
    """Predict the time of a step.

    Args:
      config: validated; `model.attention` is a kernel's name, or `auto`, resolved as on this GPU.
      gpu: the hardware. Neighbours in a server are ranks of `model`, then of `data`, then of `pipe`.
      calibration: program and rates; by default mjax with the rates of published runs.

    Raises:
      UsageError: the GPU has no peak for the config's compute dtype, or does not support its attention kernel.
    """
    calibration = calibration or default_calibration()
    rates = Rates(gpu, calibration, config.precision.compute)
    step = _Step(config, rates)
    seconds = step.seconds(config.micro_batches)
    total = sum(seconds.values())
    tflops = model_flops(config) / total / config.mesh.devices / 1e12
    error, caveats = calibration.error_of(config, count_parameters(config.model), gpu)
    return StepTime(seconds, tflops, tflops * 1e12 / rates.peak, error, _mean(config, step, total), caveats)


def _mean(config: Config, step: _Step, total: float) -> float:
    """Seconds per step, mean over the run; `total` is that of a step with the global batch."""
    train, steps = config.train, config.train.steps
    if (train.batch_rampup is None and train.batch_schedule is None) or steps < 1:
        return total
    seconds, sequences = 0.0, config.mesh.data * train.micro_batch
    for count, size in BatchSizes.of(config).stretches(steps):
        each = total if size == train.global_batch else sum(step.seconds(size // sequences).values())
        seconds += count * each
    return seconds / steps


def _bubble(mesh: MeshConfig, m: int, forward: float, inputs: float, weights: float) -> float:
    """Idle seconds of the last stage in a step of `m` micro-batches.

    Closed forms of `Schedule.makespan`, since a table of thousands of micro-batches is too slow for a search.

    Args:
      mesh, m: the pipeline.
      forward, inputs, weights: seconds of F, and of the halves of a backward pass, of one chunk.
    """
    fill = mesh.pipe - 1
    if mesh.schedule != "zb-h1":
        return fill * (forward + inputs + weights)
    # A tick has one operation on each stage and takes as long as the longest of them.
    work = m * mesh.chunks
    return _ticks(mesh, m) * max(forward, inputs, weights) - work * (forward + inputs + weights)


def _ticks(mesh: MeshConfig, m: int) -> int:
    """Length of the schedule's table for `m` micro-batches."""
    work, stages = m * mesh.chunks, mesh.pipe
    if mesh.schedule == "zb-h1":
        return 3 * work + stages - 1 + max(0, stages - m)
    if mesh.schedule == "gpipe":
        return 2 * (work + stages) - 3
    return work + stages * mesh.chunks + stages - 2


def _empty_messages(mesh: MeshConfig, m: int, software: Software) -> int:
    """Messages beyond two per micro-batch and chunk: two per stage to fill, or those of all ticks."""
    if software.sends_every_tick:
        return 2 * (_ticks(mesh, m) - m * mesh.chunks)
    return 2 * (mesh.pipe - 1)


@lru_cache(maxsize=1024)
def _activation_elements(of: trace.Traced) -> float:
    return activation_elements(trace.layer_forward(of).program)


class _Step:
    """The work of one device in a step, part by part; every method returns seconds."""

    def __init__(self, config: Config, rates: Rates):
        self.config, self.rates, self.software = config, rates, rates.calibration.software
        model, mesh = config.model, config.mesh
        self.element = WIDTHS[config.precision.compute]
        self.tokens = config.train.micro_batch * model.sequences * model.sequence
        self.samples = config.train.micro_batch
        capability = rates.gpu.compute_capability
        self.flash = self.software.flash and attention_on_gpu(config, capability) == "cudnn"
        of = trace.Traced.of(config)
        self.layer, self.end = trace.layer_forward(of), trace.head(of)
        self.stream = self.samples * self.layer.elements  # elements, on all ranks of `model`
        self.activations = _activation_elements(of)
        self.held = held_by(model, mesh)
        self.layer_weights = self.held.layers * mesh.pipe / model.layers  # per layer
        self.layers = model.layers // mesh.pipe  # per stage

    def seconds(self, m: int) -> dict[str, float]:
        """The parts of a step of `m` micro-batches on each replica."""
        mesh = self.config.mesh
        seconds = {part: m * each for part, each in self._micro_batch.items()}
        seconds["data"] += self._sums_over_data
        seconds["optimizer"] += self.optimizer(m)
        if self.config.optimizer.name == "muon":
            for axis, exchanged in muon.exchange_seconds(self.config, self.rates).items():
                seconds["model" if axis == MODEL else "data"] += exchanged
        if mesh.pipe > 1:
            forward, inputs, weights = (self.layers / mesh.chunks * sum(p.values()) for p in self._passes)
            empty = _empty_messages(mesh, m, self.software) * self._message
            seconds["bubble"] += _bubble(mesh, m, forward, inputs, weights) + empty
        return seconds

    @cached_property
    def _passes(self) -> list[dict[str, float]]:
        """For a layer, by part: the forward pass, and the halves of the backward pass: inputs, weights."""
        return [self._forward(), self._backward_inputs(), {"matmul": self._weight_gradients(self.layer.of_weights)}]

    @cached_property
    def _micro_batch(self) -> dict[str, float]:
        """Seconds that each micro-batch adds to a step, by part."""
        mesh = self.config.mesh
        seconds = {part: self.layers * sum(p.get(part, 0.0) for p in self._passes) for part in PARTS}
        seconds["head"] += self.head()
        seconds["model"] += self.head_sums()
        if mesh.pipe > 1:
            seconds["pipe"] += 2 * mesh.chunks * self._message  # one activation and one gradient
        return seconds

    # --- A layer and a micro-batch ------------------------------------------------------------------------------------

    def _forward(self) -> dict[str, float]:
        """A layer's forward pass."""
        return {
            "matmul": self._forward_products,
            "attention": self._attention,
            "elementwise": self._elementwise,
            "model": len(self.layer.branches) * self._layer_sum,
            "data": self._over_data(self.element),
        }

    def _backward_inputs(self) -> dict[str, float]:
        """A layer's backward pass without its weight gradients, including recomputation."""
        again, software = self.config.train.recompute, self.software
        to_inputs = sum(self.rates.product(self.tokens, each.k, each.n) for each in self.layer.of_weights)
        whole, attention = again == "full", again != "none"
        sums = len(self.layer.branches) * self._layer_sum - self._hidden()
        split = self.config.mesh.sequence_parallel
        if whole:  # of a layer's gathers and scatters only the last scatter can be dead code
            sums += (1 + software.repeated_sums / 2 if split else software.repeated_sums) * self._layer_sum
        elif attention and split:
            sums += self._layer_sum  # the two gathers are repeated: the bytes of one all-reduce
        return {
            "matmul": to_inputs + whole * self._forward_products,
            "attention": self._attention_backward() + attention * self._attention,
            "elementwise": (software.backward_traffic + (whole or attention)) * self._elementwise,
            "model": sums,
            "data": self._over_data(self.element) + self._over_data(software.gradient_bytes),
        }

    @cached_property
    def _forward_products(self) -> float:
        return sum(self.rates.product(self.tokens, each.n, each.k) for each in self.layer.of_weights)

    def _weight_gradients(self, products: Iterable[Product]) -> float:
        return sum(self.rates.product(each.k, each.n, self.tokens) for each in products)

    @cached_property
    def _attention(self) -> float:
        products = self.layer.of_activations
        if self.flash:
            flops = self.samples * sum(each.flops for each in products)
            return self.rates.flash(flops / (2 if self.config.model.causal else 1))
        return (
            sum(self.rates.product(each.m, each.n, each.k, each.batch * self.samples) for each in products)
            + self._scores
        )

    def _attention_backward(self) -> float:
        if self.flash:
            return 2.5 * self._attention  # five products for two: it recomputes the scores (arXiv 2307.08691)
        return 2 * (self._attention - self._scores) + self.software.backward_traffic * self._scores

    @cached_property
    def _scores(self) -> float:
        elements = self.samples * max(each.batch * each.m * each.n for each in self.layer.of_activations)
        return self.rates.traffic(self.software.score_bytes * elements * self.element / 2, 3)

    @cached_property
    def _elementwise(self) -> float:
        mesh, software = self.config.mesh, self.software
        stream = software.stream_bytes * self.stream / (mesh.model if mesh.sequence_parallel else 1)
        mlp = software.mlp_bytes * self.samples * self.activations
        return self.rates.traffic((stream + mlp) * self.element / 2, software.kernels)

    # --- Collectives --------------------------------------------------------------------------------------------------

    @cached_property
    def _layer_sum(self) -> float:
        """One sum of a stream over `model`; with sequence parallelism a reduce-scatter and an all-gather."""
        whole = self.element * self.stream
        ranks = self.config.mesh.model
        if self.config.mesh.sequence_parallel:
            return 2 * self.rates.gather(ranks, 1, whole)
        return self.rates.sum(ranks, 1, whole)

    def _hidden(self) -> float:
        """The part of a layer's backward sums that overlaps with weight gradients of the column-parallel layers before
        them.

        With sequence parallelism that is the reduce-scatter; the all-gather before it is needed at once.
        """
        if not self.software.hides_backward_sums:
            return 0.0
        part = self._layer_sum / (2 if self.config.mesh.sequence_parallel else 1)
        return sum(min(part, self._weight_gradients(branch[:-1])) for branch in self.layer.branches)

    def _over_data(self, width: float) -> float:
        """ZeRO-3: a gather of a layer's weights, or a scatter of their gradients, of `width` bytes per element."""
        mesh = self.config.mesh
        return self.rates.gather(mesh.data, mesh.model, width * self.layer_weights) if mesh.zero == 3 else 0.0

    @cached_property
    def _message(self) -> float:
        """An activation, or its gradient, to the next stage; all ranks of a server send at once."""
        mesh = self.config.mesh
        whole = self.element * self.stream
        split = mesh.sequence_parallel or self.software.splits_messages
        sent = self.rates.send(mesh.pipe, mesh.model * mesh.data, whole / (mesh.model if split else 1))
        if split and not mesh.sequence_parallel:
            sent += self.rates.gather(mesh.model, 1, whole)
        return sent

    # --- Embedding and head -------------------------------------------------------------------------------------------

    def head(self) -> float:
        """Embedding, logits and loss of a micro-batch, forward and backward."""
        embedding = self.rates.traffic(9 * self.element * self.stream, 3)
        if not self.end.products:
            return embedding
        # Logits are written, read by the loss and its gradient, written again: in float32, 16 bytes in total.
        logits = self.rates.traffic(16 * self.samples * self.end.logits, 6)
        return (
            embedding + logits + 3 * sum(self.rates.product(self.tokens, each.n, each.k) for each in self.end.products)
        )

    def head_sums(self) -> float:
        """Collectives over `model` of embedding and head: the embedding's sum, and that of the logits' gradient.

        With a pipeline they are on different stages, and the embedding's is hidden by the others' work.
        """
        return self._layer_sum * (2 if self.config.mesh.pipe == 1 else 1)

    # --- Once a step --------------------------------------------------------------------------------------------------

    @cached_property
    def _sums_over_data(self) -> float:
        """Gradients over `data`, and ZeRO-1's gathers; for the embedding also over `pipe`."""
        mesh, rates, software = self.config.mesh, self.rates, self.software
        stage, across = mesh.model * mesh.data, software.gradient_bytes + self.element
        seconds = rates.gather(mesh.pipe, stage, across * self.held.shared)
        shared = self.held.shared / mesh.pipe
        weights = shared if mesh.zero == 3 else self.held.layers + shared
        if mesh.zero:
            return seconds + rates.gather(mesh.data, mesh.model, across * weights)
        summed = rates.sum(mesh.data, mesh.model, software.gradient_bytes * weights)
        if software.hides_gradient_sums:  # beside the backward pass of the last micro-batch
            beside = self.layers * sum(sum(each.values()) for each in self._passes[1:])
            summed = max(0.0, summed - beside)
        return seconds + summed

    def optimizer(self, m: int) -> float:
        """Accumulation of the gradients of `m` micro-batches, and the update of this device's shards."""
        mesh = self.config.mesh
        weights = self.held.layers + self.held.shared / mesh.pipe
        added = m * weights / (mesh.data if mesh.zero == 3 else 1) if m > 1 else 0.0
        moved = self.software.optimizer_bytes * self.held.stored + self.software.accumulate_bytes * added
        if self.config.optimizer.name == "adamw":
            return self.rates.traffic(moved, 20)
        # No second moment is read and written, 8 bytes; momentum and result are, before and after the products.
        moved += (4 * muon.width(self.config) - 8) * self.held.matrices
        return self.rates.traffic(moved, 20) + muon.iteration_seconds(self.config, self.rates)
