"""Predicted seconds of a step: an analytic model of the GPU, of the program, and of how efficient it is.

Three things are kept apart:

    hardware     `Gpu`: data-sheet values (`mjax/hardware.py`).
    software     `Software`: properties of the program that no config contains: what it sends in addition, in which
                 dtype, and what it hides (`software.py`). Read from the code, never fitted.
    calibration  `Calibration`: the share of the data-sheet rates that kernels reach: a few numbers of one GPU, measured
                 there kernel by kernel, or taken from published runs (`calibration.py`).

The parts of a step, and how each is modelled:

    matrix products   the FLOPs at `matmul` × peak, less if tiles leave multiprocessors idle or the inner dim is short;
                      or the bytes, if those take longer
    attention         flash: the FLOPs of unmasked scores, by head size, length and direction. Else: two products over
                      s × s, and the scores' bytes
    memory-bound      LayerNorm, residual sums, GELU: bytes of the traced kernels (`kernel_bytes.py`) over `memory` ×
                      bandwidth, and launches; with a loop over layers also what it fills and copies
    float8            the layers' products at `float8` × its peak. Scales and rounding are memory-bound kernels of the
                      trace; ranks agree on a scale in an all-reduce of one number (`float8.py`)
    context           attention's collectives, which nothing hides
    experts           products of a mixture: as many rows for each expert, or in the worst case all tokens to the same
                      experts; whole tiles of rows. Their tokens' way over `expert` and back is not hidden
    collectives       a ring: bytes sent over its slowest link, which the rings that leave a server together share, and
                      a message's latency for each rank. What a product hides (`software.Overlap`) counts only beyond
                      the product's time
    host memory       a layer's input over the link between GPU and server, at its nominal rate: out beside the whole
                      forward pass of the layer, back beside nothing
    pipeline          work of all micro-batches, then fill and drain as in the schedule (`schedules.py`), in lock-step;
                      the head is on the last stage, for which all others wait
    once per step     sums over `data`, gathers of weights, the bytes of the optimizer; Muon's products (`muon.py`)

The products of a layer and of the head, their shapes, and the number of sums over `model` are read from the traced
model (`training/trace.py`), once for each model and size of that axis; the rest is arithmetic. The pieces are those of
arXiv 2104.04473, sections 2.2 and 3, and of 2205.05198, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

from mjax.config import Config
from mjax.hardware import Gpu
from mjax.models.build import count_parameters
from mjax.models.kernels import FUSED, attention_on_gpu
from mjax.parallel.axes import CONTEXT, EXPERT, MODEL, copies
from mjax.parallel.grouped import ROWS
from mjax.planner import kernel_bytes, muon
from mjax.planner.bubble import bubble, empty_messages
from mjax.planner.calibration import Calibration, default_calibration
from mjax.planner.float8 import agreement_seconds
from mjax.planner.kernel_bytes import Kernels, Moved
from mjax.planner.rates import WIDTHS, Rates
from mjax.planner.software import MJAX, Software
from mjax.planner.step_time import PARTS, StepTime, mean_over_run
from mjax.planner.unrolling import is_looped
from mjax.planner.weights import held_by
from mjax.state.precision import in_float8
from mjax.training import trace
from mjax.training.flops import model_flops
from mjax.training.program import Product, axes_of

# Products of the same input are one kernel, and its result is cut apart, if each writes at most so many bytes: XLA's
# xla_gpu_dot_merger_threshold_mb.
JOINED_BYTES = 32 * 2**20
# Rows of a tile of experts' products.
TILE = ROWS["pallas"]
# Launches for each chunk of the loss: running sums, the gradient of its logits, and its products.
CHUNK_KERNELS = 10


def predict_time(
    config: Config,
    gpu: Gpu,
    calibration: Calibration | None = None,
    software: Software = MJAX,
    worst: bool = False,
) -> StepTime:
    """Predict the time of a step.

    Args:
      config: validated; `model.attention` is a kernel's name, or `auto`, resolved as on this GPU.
      gpu: the hardware. Neighbours in a server are ranks of `model`, then of `data`, then of `pipe`.
      calibration: rates; by default the planner's own for this GPU.
      software: the program.
      worst: all tokens of a mixture choose the same experts; by default each expert is chosen as often.

    Raises:
      UsageError: the GPU has no peak for the config's compute dtype, or does not support its attention kernel.
    """
    calibration = calibration or default_calibration(gpu)
    rates = Rates(gpu, calibration, config.precision.compute)
    step = _Step(config, rates, software, worst)
    seconds = step.seconds(config.micro_batches)
    total = sum(seconds.values())
    tflops = model_flops(config) / total / config.mesh.devices / 1e12
    error, caveats = calibration.error_of(config, count_parameters(config.model), gpu)
    if step.kernel == "flash":
        error, caveats = None, (*caveats, "nobody has timed the attention kernel flash, which counts as cuDNN's here")
    if config.model.parted_experts():
        error, caveats = None, (*caveats, "nobody has timed the products of experts, which count as cuBLAS's here")
    if config.train.recompute == "offload":
        link = f"{gpu.host_bandwidth / 1e9:g} GB/s one way"
        error, caveats = None, (*caveats, f"nobody has timed the copies to host memory, which count at {link} here")
    mean = mean_over_run(config, step.seconds, total)
    return StepTime(seconds, tflops, tflops * 1e12 / rates.peak, error, mean, caveats)


class _Step:
    """The work of one device in a step, part by part; every method returns seconds."""

    def __init__(self, config: Config, rates: Rates, software: Software, worst: bool = False):
        self.config, self.rates, self.software, self.worst = config, rates, software, worst
        model, mesh = config.model, config.mesh
        # What two streams hide was read from programs within a server; between servers it is what one stream hides.
        beyond = mesh.model > rates.gpu.gpus_per_node
        self.overlap = software.overlap_of(
            replace(config, train=replace(config.train, streams=1)) if beyond else config
        )
        self.element, self.float8 = WIDTHS[config.precision.compute], in_float8(config.precision)
        self.gathered = 1 if self.float8 else self.element  # bytes per element of what products are gathered for
        self.tokens = config.train.micro_batch * model.sequences * model.sequence // mesh.context
        capability = rates.gpu.compute_capability
        self.kernel = attention_on_gpu(config, capability)
        self.flash = self.software.flash and self.kernel in FUSED
        self.of = of = trace.Traced.of(config)
        self.samples = config.train.micro_batch
        self.layer, self.end = trace.layer_forward(of), trace.head(of)
        self.stream = self.samples * self.layer.elements  # elements, on all ranks of `model`
        self.held = held_by(model, mesh)
        self.layer_weights = self.held.layers * mesh.pipe / model.layers  # per layer
        self.layers = model.layers // mesh.pipe  # per stage

    def seconds(self, m: int) -> dict[str, float]:
        """The parts of a step of `m` micro-batches on each replica."""
        mesh = self.config.mesh
        seconds = {part: m * each for part, each in self._micro_batch.items()}
        seconds["data"] += self._sums_over_data(m)
        seconds["optimizer"] += self.optimizer(m)
        if self.config.optimizer.name == "muon":
            for axis, exchanged in muon.exchange_seconds(self.config, self.rates).items():
                seconds["model" if axis == MODEL else "data"] += exchanged
        if mesh.pipe > 1:
            forward, inputs, weights = (self.layers / mesh.chunks * sum(p.values()) for p in self._passes)
            empty = empty_messages(mesh, m, self.software.sends_every_tick) * self._message
            seconds["bubble"] += bubble(mesh, m, forward, inputs, weights) + empty
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
        over_model, over_data = self._agreed(0)
        forward = {
            "matmul": self._forward_products,
            "attention": self._attention,
            "elementwise": self._kernels[0],
            "model": self._exposed_forward(len(self.layer.branches) * self._layer_sum) + over_model,
            "context": sum(self._over_context),
            "expert": sum(self._over_experts),
            "data": self._waits(self._over_data(self.gathered), self._forward_work) + over_data,
        }
        return forward | {"host": max(0.0, self._to_host - sum(forward.values()))}

    @cached_property
    def _to_host(self) -> float:
        """A copy of what a layer keeps in host memory, one way."""
        kernel = "cudnn" if self.flash else "xla"
        recompute = self.config.train.recompute

        def kept(of: trace.Traced) -> tuple[float, ...]:
            return (trace.layer_backward(of, kernel, recompute).offloaded,)

        if recompute != "offload":
            return 0.0
        return self.rates.host(*trace.of_micro_batch(self.of, self.samples, kept))

    @property
    def _forward_work(self) -> float:
        """What a layer computes in its forward pass."""
        return self._forward_products + self._attention + self._kernels[0]

    def _waits(self, seconds: float, work: float) -> float:
        """What layers wait for of so many seconds of ZeRO's collectives beside so much work."""
        return seconds - min(self.overlap.weights * seconds, work)

    def _backward_inputs(self) -> dict[str, float]:
        """A layer's backward pass without its weight gradients, including recomputation."""
        again, software = self.config.train.recompute, self.software
        to_inputs = sum(self._product(each, each.k, each.n) for each in self.layer.of_weights)
        over_model, over_data = self._agreed(1)
        whole, attention = again in ("full", "offload"), again != "none"
        repeated, split = 0.0, self.config.mesh.splits_tokens
        if whole and split:  # of a layer's gathers and scatters only the last scatter can be dead code
            repeated = self._exposed_forward(2 * self._layer_gather + software.repeated_sums * self._layer_scatter)
            repeated -= self.overlap.repeated * self._layer_gather
        elif whole:
            repeated = self._exposed_forward(software.repeated_sums * self._layer_sum)
        elif attention and split:  # the two gathers are repeated
            repeated = 2 * self._layer_gather - min(2 * self.overlap.repeated * self._layer_gather, to_inputs)
        work = {
            "matmul": to_inputs + whole * self._forward_products,
            "attention": self._attention_backward + attention * self._attention,
            "elementwise": self._kernels[1] + self._loop,
        }
        stored = self._over_data(self.gathered) + self._over_data(software.gradient_bytes)
        beside = sum(work.values()) + self._weight_gradients(self.layer.of_weights)
        return {
            **work,
            "model": self._exposed_backward + repeated + over_model,
            "context": sum(self._over_context) + attention * self._over_context[0] + whole * self._over_context[1],
            "expert": sum(self._over_experts) + attention * self._over_experts[0],
            "data": self._waits(stored, beside) + over_data,
            "host": self._to_host,
        }

    @cached_property
    def _forward_products(self) -> float:
        return sum(
            self._product(each, n, each.k)
            for each, columns in zip(self.layer.of_weights, self.layer.joined, strict=True)
            for n in ((each.n,) if self._is_joined(columns) else columns)
        )

    def _is_joined(self, columns: tuple[int, ...]) -> bool:
        """Whether products of the same input run as one."""
        written = self.element * self.tokens * max(columns)
        return len(columns) > 1 and not self.float8 and (self.software.written is not None or written <= JOINED_BYTES)

    def _weight_gradients(self, products: Iterable[Product]) -> float:
        s, found = self.config.train.streams, 0.0
        for each in products:
            rows, groups = self._rows(each)
            found += s * self.rates.product(each.k, each.n, rows / s, groups, float8=self.float8)
        return found

    def _product(self, each: Product, n: int, k: int) -> float:
        """[tokens, k] × [k, n] for the tokens of a product with a weight, in two halves with two streams."""
        streams, (rows, groups) = self.config.train.streams, self._rows(each)
        return streams * self.rates.product(rows / streams, n, k, groups, float8=self.float8)

    def _rows(self, each: Product) -> tuple[float, int]:
        """The rows of a product with a weight, and how many weights have as many each: of experts whole tiles."""
        if not each.grouped:
            return self.samples * each.m, 1
        model, mesh = self.config.model, self.config.mesh
        rows, groups = self.samples * each.m, each.batch
        if self.worst:
            own = model.parted_experts() // mesh.expert
            rows, groups = self.tokens * mesh.expert, min(model.taken_experts(), own)
        return TILE * math.ceil(rows / TILE), groups

    @cached_property
    def _over_experts(self) -> tuple[float, float]:
        """A layer's gathers over `expert` in its forward pass, and its reduce-scatters; each is the other's transpose
        in the backward pass, and recomputation gathers again."""
        program, mesh = trace.layer_program(self.of)[0], self.config.mesh
        found = {"all_gather": 0.0, "reduce_scatter": 0.0}
        for each in program.operations:
            if each.is_collective and axes_of(each.equation) == (EXPERT,):
                whole = max(program.bytes(value) for value in (each.inputs[0], each.outputs[0]))
                found[each.name] += self.rates.gather(mesh.expert, mesh.model * mesh.context, self.samples * whole)
        return found["all_gather"], found["reduce_scatter"]

    @cached_property
    def _over_context(self) -> tuple[float, float]:
        """A layer's collectives over `context` in its forward pass, before attention and after it; the backward pass
        has the transpose of each, and recomputation those before again."""
        mesh, found, back = self.config.mesh, [0.0, 0.0], 0
        for each in trace.layer_program(self.of)[0].operations:
            if each.is_collective and axes_of(each.equation) == (CONTEXT,):
                program = trace.layer_program(self.of)[0]
                whole = max(program.bytes(value) for value in (each.inputs[0], each.outputs[0]))
                found[back == 3] += self.rates.gather(mesh.context, mesh.model, self.samples * whole)
                back += each.name == "all_to_all"  # of queries, keys and values, then of the result
        return tuple(found)

    @cached_property
    def _attention(self) -> float:
        if self.flash:
            return self._flash(backward=False)
        return self._score_products + self._scores[0]

    @cached_property
    def _attention_backward(self) -> float:
        if self.flash:  # five products for two: it recomputes the scores (arXiv 2307.08691)
            return self._flash(backward=True)
        return 2 * self._score_products + self._scores[1]

    def _flash(self, backward: bool) -> float:
        products, model = self.layer.of_activations, self.config.model
        flops = self.samples * sum(each.flops for each in products) / (2 if model.causal else 1)
        return self.rates.flash((2.5 if backward else 1) * flops, products[0].k, model.sequence, backward)

    @cached_property
    def _score_products(self) -> float:
        products = self.layer.of_activations
        return sum(self.rates.product(each.m, each.n, each.k, each.batch * self.samples) for each in products)

    @cached_property
    def _scores(self) -> tuple[float, float]:
        """Passes over stored scores, in the forward and in the backward pass."""
        written = self.software.written
        if written is None:
            return tuple(self.rates.traffic(each.scores, 3) for each in self._traced[:2])
        elements = self.samples * max(each.batch * each.m * each.n for each in self.layer.of_activations)
        forward = self.rates.traffic(written.scores * elements * self.element / 2, 3)
        return forward, written.backward * forward

    @cached_property
    def _traced(self) -> Kernels:
        """What the traced kernels move for a micro-batch."""
        kernel = "cudnn" if self.flash else "xla"
        return kernel_bytes.of_micro_batch(self.of, kernel, self.config.train.recompute, self.samples)

    @cached_property
    def _kernels(self) -> tuple[float, float]:
        """Memory-bound kernels of a layer, forward, and backward with what is computed again."""
        mesh, written = self.config.mesh, self.software.written
        if written is None:
            cut = [2 * self.element * self.tokens * sum(each) for each in self.layer.joined if self._is_joined(each)]
            forward, backward = map(self._seconds_of, self._traced[:2])
            return forward + self.rates.traffic(sum(cut), len(cut)), backward
        stream = written.stream * self.stream / (mesh.model if mesh.splits_tokens else 1)
        mlp = written.mlp * self.samples * kernel_bytes.activations(self.of)
        forward = self.rates.traffic((stream + mlp) * self.element / 2, written.kernels)
        return forward, (written.backward + (self.config.train.recompute != "none")) * forward

    def _seconds_of(self, moved: Moved) -> float:
        return self.rates.traffic(moved.bytes + moved.weights, moved.kernels)

    @cached_property
    def _looped(self) -> bool:
        """Whether the layers of a traced program run in a loop."""
        return self.software.written is None and is_looped(self.config, self.rates.gpu.usable_bytes)

    @cached_property
    def _loop(self) -> float:
        """What a loop over layers costs for each: filling stacks and copying."""
        if not self._looped:
            return 0.0
        return self.rates.traffic(
            *kernel_bytes.looped(self._traced.kept, self.element * self.layer_weights, self.overlap.copies)
        )

    # --- Collectives --------------------------------------------------------------------------------------------------

    @cached_property
    def _layer_sum(self) -> float:
        """One sum of a stream over `model`; with sequence parallelism a reduce-scatter and an all-gather."""
        if self.config.mesh.splits_tokens:
            return self._layer_scatter + self._layer_gather
        streams = self.config.train.streams
        return streams * self.rates.sum(self.config.mesh.model, 1, self.element * self.stream / streams)

    @cached_property
    def _layer_scatter(self) -> float:
        return self._split(self.element)

    @cached_property
    def _layer_gather(self) -> float:
        return self._split(self.gathered)

    def _split(self, width: float) -> float:
        """A gather or a reduce-scatter of a stream over `model`, of `width` bytes per element."""
        streams = self.config.train.streams
        return streams * self.rates.gather(self.config.mesh.model, 1, width * self.stream / streams)

    def _agreed(self, backward: int) -> tuple[float, float]:
        """The all-reduces of the scales of arrays in float8, over `model` only and over `data`."""
        if not self.float8:
            return 0.0, 0.0
        return agreement_seconds(self._traced[backward].agreed, self.config.mesh, self.rates)

    def _exposed_forward(self, seconds: float) -> float:
        """What a layer waits for of so many seconds of collectives in a forward pass."""
        return seconds - min(self.overlap.forward * seconds, self._forward_products)

    @cached_property
    def _exposed_backward(self) -> float:
        """What a layer waits for of its backward collectives: those beside the weight gradients of the column-parallel
        layers before them, or with two streams beside all products, cost nothing up to the time that these take."""
        split, two = self.config.mesh.splits_tokens, self.config.train.streams == 2
        hidden = self.overlap.backward * (2 * self._layer_scatter if split else self._layer_sum)
        sums = 0.0
        for branch in self.layer.branches:
            beside = self._weight_gradients(branch if two else branch[:-1])
            beside += two * sum(self._product(each, each.k, each.n) for each in branch)
            sums += self._layer_sum - min(hidden, beside)
        return sums

    def _over_data(self, width: float) -> float:
        """ZeRO-3: a gather of a layer's weights, or a scatter of their gradients, of `width` bytes per element."""
        if self.config.mesh.zero != 3:
            return 0.0
        experts = self.held.experts * self.layer_weights / self.held.layers
        return self._over_replicas(self.rates.gather, width, self.layer_weights, experts)

    def _over_replicas(self, collective: Callable, width: float, weights: float, experts: float = 0.0) -> float:
        """A collective of `width` bytes for each of `weights`, over all replicas; but of those of `experts`, which
        `expert` splits, over the replicas that share them."""
        mesh = self.config.mesh
        seconds = collective(copies(mesh), mesh.model, width * (weights - experts))
        if not experts:
            return seconds
        return seconds + collective(copies(mesh) // mesh.expert, mesh.model * mesh.expert, width * experts)

    @cached_property
    def _message(self) -> float:
        """An activation, or its gradient, to the next stage; all ranks of a server send at once."""
        mesh = self.config.mesh
        whole = self.element * self.stream
        split = mesh.splits_tokens or self.software.splits_messages
        sent = self.rates.send(mesh.pipe, mesh.model * copies(mesh), whole / (mesh.model if split else 1))
        if split and not mesh.splits_tokens:
            sent += self.rates.gather(mesh.model, 1, whole)
        return sent

    # --- Embedding and head -------------------------------------------------------------------------------------------

    def head(self) -> float:
        """Embedding, logits and loss of a micro-batch, forward and backward."""
        embedding = self.rates.traffic(9 * self.element * self.stream, 3)
        if not self.end.products:
            return embedding
        written = self.software.written
        if written is None:
            moved = self._seconds_of(self._traced.head)
        else:
            moved = self.rates.traffic(written.logits * self.samples * self.end.logits, 6)
        products = [self.rates.product(self.tokens, each.n, each.k) for each in self.end.products]
        seconds = embedding + moved + 3 * sum(products)
        if (chunks := self.config.train.loss_chunks) > 1:  # as many bytes, and the logits once more
            seconds += products[-1] + self.rates.traffic(0, CHUNK_KERNELS * chunks)
        return seconds

    def head_sums(self) -> float:
        """Collectives over `model` of embedding and head: the embedding's sum, and that of the logits' gradient.

        With a pipeline they are on different stages, and the embedding's is hidden by the others' work.
        """
        each = 2 * self._layer_scatter if self.config.mesh.splits_tokens else self._layer_sum
        return each * (2 if self.config.mesh.pipe == 1 else 1)

    # --- Once a step --------------------------------------------------------------------------------------------------

    def _sums_over_data(self, m: int) -> float:
        """Gradients over `data`, and ZeRO-1's gathers; for the embedding also over `pipe`."""
        mesh, rates, software = self.config.mesh, self.rates, self.software
        stage, across = mesh.model * copies(mesh), software.gradient_bytes + self.element
        seconds = rates.gather(mesh.pipe, stage, across * self.held.shared)
        shared = self.held.shared / mesh.pipe
        weights = shared if mesh.zero == 3 else self.held.layers + shared
        hidden = self.overlap.gradients and not self._looped
        beside = hidden * self.layers * sum(sum(each.values()) for each in self._passes[1:])
        if not mesh.zero:
            whole = self._over_replicas(rates.sum, software.gradient_bytes, weights, self.held.experts)
            # A traced program sums each stack as one; the last of them and the embedding have nothing beside them.
            last = (shared + self.held.largest) * (software.written is None)
            alone = rates.sum(copies(mesh), mesh.model, software.gradient_bytes * last)
            return seconds + (max(alone, whole - beside) if hidden else whole)
        of_layers = weights - shared
        if mesh.zero == 3 or not hidden:
            narrow = (self.element - self.gathered) * of_layers  # fewer bytes
            experts = 0.0 if mesh.zero == 3 else self.held.experts
            return seconds + self._over_replicas(rates.gather, across, weights - narrow / across, experts)
        # The embedding has no layer beside it, before the first and after the last.
        seconds += rates.gather(copies(mesh), mesh.model, across * shared)
        gathered = self._over_replicas(rates.gather, self.gathered, of_layers, self.held.experts)
        summed = self._over_replicas(rates.gather, software.gradient_bytes, of_layers, self.held.experts)
        at_once = self.layers * self._forward_work * (m == 1)  # of several micro-batches all weights are gathered first
        return seconds + self._waits(gathered, at_once) + self._waits(summed, beside)

    def optimizer(self, m: int) -> float:
        """Accumulation of the gradients of `m` micro-batches, and the update of this device's shards."""
        mesh = self.config.mesh
        weights = self.held.layers + self.held.shared / mesh.pipe
        if mesh.zero == 3:
            weights = (weights + (mesh.expert - 1) * self.held.experts) / copies(mesh)
        added = m * weights if m > 1 else 0.0
        moved = self.software.optimizer_bytes * self.held.stored + self.software.accumulate_bytes * added
        if self.config.optimizer.name == "adamw":
            return self.rates.traffic(moved, 20)
        # No second moment is read and written, 8 bytes; momentum and result are, before and after the products.
        moved += (4 * muon.width(self.config) - 8) * self.held.matrices
        return self.rates.traffic(moved, 20) + muon.iteration_seconds(self.config, self.rates)
