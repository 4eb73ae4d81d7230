"""Predicted seconds of a step: an analytic model of the GPU, of the program, and of how efficient it is.

Three things are kept apart:

    hardware     `Gpu`: data-sheet values (`mjax/cluster/hardware.py`).
    software     `Software`: properties of the program that no config contains: what it sends in addition, in which
                 dtype, and what it hides (`layer_time.py`). Read from the code, never fitted.
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
                      trace; ranks agree on a scale in an all-reduce of one number (`layer_time.py`)
    context           attention's collectives, which nothing hides
    experts           products of a mixture: as many rows for each expert, or in the worst case all tokens to the same
                      experts; whole tiles of rows. Their tokens' way over `expert` and back is not hidden
    collectives       a ring: bytes sent over its slowest link, which the rings that leave a server together share, and
                      a message's latency for each rank. What a product hides (`layer_time.Overlap`) counts only beyond
                      the product's time
    host memory       a layer's input over the link between GPU and server, at its nominal rate: out beside the whole
                      forward pass of the layer, back beside nothing
    pipeline          work of all micro-batches, then fill and drain as in the schedule (`schedules.py`), in lock-step;
                      the head is on the last stage, for which all others wait
    once per step     sums over `data`, gathers of weights, the bytes of the optimizer; Muon's products (`weights.py`)

The products of a layer and of the head, their shapes, and the number of sums over `model` are read from the traced
model (`trace/layers.py`), once for each model and size of that axis; the rest is arithmetic. The pieces are those of
arXiv 2104.04473, sections 2.2 and 3, and of 2205.05198, section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial

from mjax.cluster.hardware import Gpu
from mjax.config import Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from mjax.config.axes import MODEL, copies, shards
from mjax.config.batch_size import BatchSizes
from mjax.config.model import ModelConfig
from mjax.models.build import count_parameters
from mjax.planner.calibration import Calibration, Rates, default_calibration
from mjax.planner.layer_time import MJAX, Common, LayerTime, Software, over_replicas
from mjax.planner.section import Section, good_to
from mjax.planner.weights import muon_exchange_seconds, muon_iteration_seconds, muon_width, weights_of_device
from mjax.step.precision import in_float8
from mjax.step.unrolling import is_unrolled
from mjax.trace import layers as trace
from mjax.trace.flops import hardware_flops, model_flops
from mjax.utils.figures import named_rows, table

# Parts of a step in display order, with their names in a plan.
NAMES = {
    "matmul": "matrix products of the layers",
    "attention": "attention",
    "elementwise": "LayerNorm, GELU, dropout, sums",
    "head": "embedding and head",
    "model": "collectives over model",
    "context": "collectives over context",
    "expert": "collectives over expert",
    "pipe": "messages between stages",
    "bubble": "bubble of the pipeline",
    "data": "sums and gathers over data",
    "host": "copies to host memory and back",
    "optimizer": "gradient accumulation, update",
}
PARTS = tuple(NAMES)
# Launches for each chunk of the loss: running sums, the gradient of its logits, and its products.
CHUNK_KERNELS = 10


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
        context: attention's collectives over `context`.
        expert: collectives over `expert`, to the experts of a mixture and back.
        pipe: messages between stages.
        bubble: idle time while the pipeline fills and drains.
        data: sums and gathers over `data` and `context`, and of the embedding over `pipe`; with Muon those of its
          matrices.
        host: exposed copies of the layers' inputs to host memory and back.
        optimizer: accumulation of gradients, norm, update of the weights.
      model_tflops: TFLOP/s of one GPU, counted as in `model_flops` (nothing for recomputation, full attention).
      mfu: those over the peak.
      error: error bar of `total`, relative to the time that is measured; None if there is none for this config.
      mean: seconds per step, mean over the run: less than `total` with a batch ramp-up.
      caveats: what is outside the range of the calibration.
    """

    parts: dict[str, float]
    model_tflops: float
    mfu: float
    error: float | None
    mean: float
    caveats: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    def between(self, predicted: float) -> tuple[float, float] | None:
        """The range of a measured time by the error bar, for a prediction such as `total`; None if it has no end."""
        if self.error is None or self.error >= 1:
            return None
        return predicted / (1 + self.error), predicted / (1 - self.error)


def mean_over_run(config: Config, seconds_of: Callable[[int], dict[str, float]], total: float) -> float:
    """Seconds per step, mean over the run.

    Args:
      config: of the run.
      seconds_of: the parts of a step of so many micro-batches.
      total: of a step with the global batch.
    """
    train = config.train
    if (train.batch_rampup is None and train.batch_schedule is None) or train.steps < 1:
        return total
    seconds, sequences = 0.0, config.mesh.data * train.micro_batch
    for count, size in BatchSizes.of(config).stretches(train.steps):
        step = total if size == train.global_batch else sum(seconds_of(size // sequences).values())
        seconds += count * step
    return seconds / train.steps


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
    return TimePredictor(gpu, calibration, software, worst)(config)


class TimePredictor:
    """Predicts the time of steps; arguments as for `predict_time`. Configs share what they have in common."""

    def __init__(
        self, gpu: Gpu, calibration: Calibration | None = None, software: Software = MJAX, worst: bool = False
    ):
        self.gpu, self.calibration = gpu, calibration or default_calibration(gpu)
        self.software, self.worst = software, worst
        self._rates, self._work, self._model = (
            lru_cache(maxsize=4096)(function)
            for function in (partial(Rates, gpu, self.calibration), self._work_of, self._model_of)
        )

    def mean(self, config: Config) -> float:
        """Seconds of a step of `config`, mean over the run: `StepTime.mean`, for a search."""
        step = self._step(config)
        return mean_over_run(config, step.seconds, sum(step.seconds(config.micro_batches).values()))

    def _step(self, config: Config) -> _Step:
        train, compute = config.train, config.precision.compute
        unroll = "on" if is_unrolled(config, on_gpu=True) else "off"
        portion = train.micro_batch, train.recompute, unroll, train.loss_chunks
        shared = self._shared(config.mesh, in_float8(config.precision))
        return _Step(config, self._work(config.model, config.data, compute, shared, *portion))

    def __call__(self, config: Config) -> StepTime:
        """The time of a step of `config`."""
        step, train = self._step(config), config.train
        flops, parameters = self._model(config.model, config.data, config.precision.compute, train.global_batch)
        work, seconds = step.work, step.seconds(config.micro_batches)
        total = sum(seconds.values())
        tflops = flops / total / config.mesh.devices / 1e12
        error, caveats = self.calibration.error_of(config, parameters, self.gpu)
        untimed = []
        if work.kernel == "flash":
            untimed.append("the attention kernel flash, which counts as cuDNN's here")
        if config.model.parted_experts():
            untimed.append("the products of experts, which count as cuBLAS's here")
        if train.recompute == "offload":
            host = f"{self.gpu.host_bandwidth / 1e9:g} GB/s"
            untimed.append(f"the copies to host memory, which count at {host} one way here")
        caveats += tuple(f"nobody has timed {work}" for work in untimed)
        mean, mfu = mean_over_run(config, step.seconds, total), tflops * 1e12 / work.rates.peak
        return StepTime(seconds, tflops, mfu, None if untimed else error, mean, caveats)

    @staticmethod
    @lru_cache(maxsize=16384)
    def _shared(mesh: MeshConfig, float8: bool) -> MeshConfig:
        """The mesh as far as the work of a micro-batch depends on it."""
        of_replicas = mesh.zero == 3 or float8  # gathers in every layer, or agrees on scales
        return MeshConfig(
            pipe=mesh.pipe,
            data=mesh.data if of_replicas else mesh.expert,
            model=mesh.model,
            expert=mesh.expert,
            context=mesh.context,
            context_attention=mesh.context_attention,
            sequence_parallel=mesh.sequence_parallel,
            zero=mesh.zero if of_replicas else 0,
            replica=mesh.replica if of_replicas else 1,
        )

    def _work_of(
        self, model: ModelConfig, data: DataConfig, compute: str, mesh: MeshConfig,
        micro_batch: int, recompute: str, unroll: str, loss_chunks: int,
    ) -> _MicroBatch:  # fmt: skip
        train = TrainConfig(
            global_batch=mesh.data * micro_batch,
            micro_batch=micro_batch,
            recompute=recompute,
            unroll=unroll,
            loss_chunks=loss_chunks,
        )
        config = Config(model=model, mesh=mesh, data=data, precision=PrecisionConfig(compute=compute), train=train)
        return _MicroBatch(config, self._rates(compute), self.software, self.worst)

    def _model_of(self, model: ModelConfig, data: DataConfig, compute: str, batch: int) -> tuple[float, int]:
        """FLOPs of a step, and parameters."""
        train, precision = TrainConfig(global_batch=batch), PrecisionConfig(compute=compute)
        return model_flops(Config(model=model, data=data, precision=precision, train=train)), count_parameters(model)


class _MicroBatch(Common):
    """The work of one device for a micro-batch, part by part; every method returns seconds.

    Attributes:
      layers: of a stage, and one of them, for each kind.
    """

    def __init__(self, config: Config, rates: Rates, software: Software, worst: bool = False):
        super().__init__(config, rates, software)
        self.end = trace.head(self.kinds[0][1])
        self.layers = [(n // config.mesh.pipe, LayerTime(self, n, of, worst)) for n, of in self.kinds]

    @cached_property
    def passes(self) -> list[dict[str, float]]:
        """`LayerTime.passes`, summed over the layers of a stage."""
        return [
            {part: sum(n * layer.passes[number].get(part, 0.0) for n, layer in self.layers) for part in PARTS}
            for number in range(3)
        ]

    @cached_property
    def of_passes(self) -> list[float]:
        """The seconds of each of `passes`."""
        return [sum(parts.values()) for parts in self.passes]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds that a micro-batch adds to a step, by part, without messages between stages."""
        seconds = {part: sum(spent[part] for spent in self.passes) for part in PARTS}
        seconds["head"] += self.head()
        seconds["model"] += self.head_sums()
        return seconds

    # --- Embedding and head -------------------------------------------------------------------------------------------

    def head(self) -> float:
        """Embedding, logits and loss of a micro-batch, forward and backward."""
        embedding = self.rates.traffic(9 * self.element * self.stream, 3)
        if not self.end.products:
            return embedding
        written = self.software.written
        if written is None:
            moved = self.seconds_of(self.layers[0][1].traced.head)
        else:
            moved = self.rates.traffic(written.logits * self.samples * self.end.logits, 6)
        products = [self.rates.product(self.tokens, product.n, product.k) for product in self.end.products]
        seconds = embedding + moved + (3 if self.end.trained else 2) * sum(products)
        if (chunks := self.config.train.loss_chunks) > 1:  # as many bytes, and the logits once more
            seconds += products[-1] + self.rates.traffic(0, CHUNK_KERNELS * chunks)
        return seconds

    def head_sums(self) -> float:
        """Collectives over `model` of embedding and head: the embedding's sum, and that of the logits' gradient.

        With a pipeline they are on different stages, and the embedding's is hidden by the others' work.
        """
        seconds = 2 * self.layer_scatter if self.config.mesh.splits_tokens else self.layer_sum
        return seconds * (2 if self.config.mesh.pipe == 1 else 1)


class _Step:
    """The rest of a step of one device; every method returns seconds.

    Attributes:
      work: of a micro-batch.
      weights: of a device; `trained`: those that have gradients, moments and masters.
    """

    def __init__(self, config: Config, work: _MicroBatch):
        self.config, self.work, self.rates, self.software = config, work, work.rates, work.software
        self.element, self.gathered = work.element, work.gathered
        self.weights = weights_of_device(config.model, config.mesh)
        self.trained = weights_of_device(config.model, config.mesh, trained=True)

    def seconds(self, m: int) -> dict[str, float]:
        """The parts of a step of `m` micro-batches on each replica."""
        mesh, work = self.config.mesh, self.work
        seconds = {part: m * spent for part, spent in work.seconds.items()}
        seconds["data"] += self._sums_over_data(m)
        seconds["optimizer"] += self.optimizer(m)
        if self.config.optimizer.name == "muon":
            for axis, exchanged in muon_exchange_seconds(self.config, self.rates).items():
                seconds["model" if axis == MODEL else "data"] += exchanged
        if mesh.pipe > 1:
            message = self._message()
            # One activation and one gradient.
            seconds["pipe"] = m * (work.seconds["pipe"] + 2 * mesh.chunks * message)
            forward, inputs, weights = (spent / mesh.chunks for spent in work.of_passes)
            empty = empty_messages(mesh, m, self.software.sends_every_tick) * message
            seconds["bubble"] += bubble(mesh, m, forward, inputs, weights) + empty
        return seconds

    def _message(self) -> float:
        """An activation, or its gradient, to the next stage; all ranks of a server send at once."""
        mesh = self.config.mesh
        whole = self.element * self.work.stream
        split = mesh.splits_tokens or self.software.splits_messages
        sent = self.rates.send(mesh.pipe, mesh.model * copies(mesh), whole / (mesh.model if split else 1))
        if split and not mesh.splits_tokens:
            sent += self.rates.gather(mesh.model, 1, whole)
        return sent

    def _sums_over_data(self, m: int) -> float:
        """Gradients over `data`, and ZeRO-1's gathers; for the embedding also over `pipe`."""
        mesh, rates, software, own = self.config.mesh, self.rates, self.software, self.trained
        stage = mesh.model * copies(mesh)

        def across(weights: float, trained: float) -> float:
            """Bytes of a gather of weights, and of a sum of the gradients of those that are trained."""
            return self.element * weights + software.gradient_bytes * trained

        seconds = rates.gather(mesh.pipe, stage, across(self.weights.shared, own.shared))
        shared, own_shared = self.weights.shared / mesh.pipe, own.shared / mesh.pipe
        weights = shared if mesh.zero == 3 else self.weights.layers + shared
        trained = own_shared if mesh.zero == 3 else own.layers + own_shared
        # A traced program sums the gradients of several micro-batches behind the loop over them.
        hidden = self.work.overlap.gradients and not self.work.looped and (m == 1 or software.written is not None)
        overlapped = hidden * sum(self.work.of_passes[1:])
        if not mesh.zero:
            whole = over_replicas(mesh, rates.sum, software.gradient_bytes, trained, own.experts)
            # A traced program sums each stack as one; the last of them and the embedding have nothing beside them.
            last = (own_shared + own.largest) * (software.written is None)
            alone = rates.sum(copies(mesh), mesh.model, software.gradient_bytes * last)
            return seconds + (max(alone, whole - overlapped) if hidden else whole)
        narrow = (self.element - self.gathered) * (weights - shared)  # fewer bytes
        seconds += rates.sum(mesh.replica, stage // mesh.replica, software.gradient_bytes * own.stored)
        experts = 0.0 if mesh.zero == 3 else across(self.weights.experts, own.experts)
        return seconds + over_replicas(mesh, rates.gather, 1, across(weights, trained) - narrow, experts)

    def optimizer(self, m: int) -> float:
        """Accumulation of the gradients of `m` micro-batches, and the update of this device's shards."""
        mesh, own = self.config.mesh, self.trained
        weights = own.layers + own.shared / mesh.pipe
        if mesh.zero == 3:
            weights = (weights + (mesh.expert - 1) * own.experts) / shards(mesh)
        added = m * weights if m > 1 else 0.0
        moved = self.software.optimizer_bytes * own.stored + self.software.accumulate_bytes * added
        if self.config.optimizer.name == "adamw":
            return self.rates.traffic(moved, 20)
        # No second moment is read and written, 8 bytes; momentum and result are, before and after the products.
        moved += (4 * muon_width(self.config) - 8) * self.weights.matrices
        return self.rates.traffic(moved, 20) + muon_iteration_seconds(self.config, self.rates)


# --- The pipeline: closed forms of its schedules (`parallel/schedules.py`) --------------------------------------------


def bubble(mesh: MeshConfig, m: int, forward: float, inputs: float, weights: float) -> float:
    """Return the idle seconds of the last stage in a step of `m` micro-batches.

    Closed forms of `Schedule.makespan`, since a table of thousands of micro-batches is too slow for a search.

    Args:
      mesh, m: the pipeline.
      forward, inputs, weights: seconds of F, and of the halves of a backward pass, of one chunk.
    """
    if mesh.schedule != "zb-h1":
        return (mesh.pipe - 1) * (forward + inputs + weights)
    # A tick has one operation on each stage and takes as long as the longest of them.
    return ticks(mesh, m) * max(forward, inputs, weights) - m * mesh.chunks * (forward + inputs + weights)


def ticks(mesh: MeshConfig, m: int) -> int:
    """Length of the schedule's table for `m` micro-batches."""
    work, stages = m * mesh.chunks, mesh.pipe
    if mesh.schedule == "zb-h1":
        return 3 * work + stages - 1 + max(0, stages - m)
    if mesh.schedule == "gpipe":
        return 2 * (work + stages) - 3
    return work + stages * mesh.chunks + stages - 2


def empty_messages(mesh: MeshConfig, m: int, every_tick: bool) -> int:
    """Messages beyond two per micro-batch and chunk: two per stage to fill, or those of all ticks."""
    if every_tick:
        return 2 * (ticks(mesh, m) - m * mesh.chunks)
    return 2 * (mesh.pipe - 1)


# --- The time section of a plan ---------------------------------------------------------------------------------------


def time_section(config: Config, gpu: Gpu, calibration: Calibration | None = None) -> Section:
    """The section of a plan.

    Args:
      config: validated.
      gpu: the GPU.
      calibration: its rates; by default the planner's own.

    Raises:
      UsageError: the GPU has no peak for the config's compute dtype.
    """
    calibration = calibration or default_calibration(gpu)
    step = predict_time(config, gpu, calibration)
    worst = predict_time(config, gpu, calibration, worst=True) if config.model.parted_experts() else None
    devices, compute = config.mesh.devices, config.precision.compute
    tokens_per_second = config.train.global_batch * config.model.sequences * config.model.sequence / step.total
    peak, of_bf16 = gpu.mfu_peak(compute), " of bf16" if in_float8(config.precision) else ""
    hardware = hardware_flops(config) / step.total / devices / 1e12
    causal = model_flops(config, causal=True) / (peak * devices * step.total)
    run_seconds, tokens = config.train.steps * step.mean, run_tokens(config)
    values = {
        "gpu": gpu.name,
        "seconds": step.total,
        "error": step.error,
        "between": step.between(step.total),
        "caveats": list(step.caveats),
        "parts": step.parts,
        "worst_router": {"seconds": worst.total, "parts": worst.parts} if worst else None,
        "model_flops": model_flops(config),
        "hardware_flops": hardware_flops(config),
        "model_tflops": step.model_tflops,
        "hardware_tflops": hardware,
        "peak_tflops": peak / 1e12,
        "mfu": step.mfu,
        "mfu_causal": causal,
        "tokens_per_second": tokens_per_second,
        "run": {"tokens": tokens, "seconds": run_seconds},
        "calibration": asdict(calibration),
        "not_measured": calibration.not_measured(gpu, compute),
    }
    spent = {name: step.parts[part] for part, name in NAMES.items() if step.parts[part] > 0}
    spent["a step"] = step.total
    cells = [(name, f"{1e3 * seconds:,.1f}", f"{seconds / step.total:.1%}") for name, seconds in spent.items()]
    rows = {"beyond": "; ".join(step.caveats)} if step.caveats else {}
    if worst:
        rows["balanced router"] = f"{1e3 * step.total:,.1f} ms a step, as above: every expert has as many tokens"
        rows["worst router"] = f"{1e3 * worst.total:,.1f} ms: all tokens choose the same experts"
    rows |= {
        "error bar": _error_bar(step, calibration),
        "rates": _rates(calibration, gpu, compute),
        "a GPU": f"{step.model_tflops:,.1f} model TFLOP/s, {hardware:,.1f} with what is recomputed",
        "MFU": f"{step.mfu:.1%} of {peak / 1e12:,g} TFLOP/s{of_bf16}: nothing recomputed counts, attention over "
        f"s × s" + (f" ({causal:.1%} if its masked half is left out)" if config.model.causal else ""),
        "tokens/s": f"{tokens_per_second:,.0f}",
        "the run": f"{_duration(run_seconds)} for {tokens:,} tokens in {config.train.steps:,} steps, "
        f"{run_seconds * devices / 3600:,.0f} GPU-hours",
    }
    lines = [*table(("", "ms", "share"), cells), *named_rows(rows)]
    return Section(f"Time on {gpu.name}, predicted", values, lines)


def _error_bar(step: StepTime, calibration: Calibration) -> str:
    source = calibration.source_of("error")
    if step.error is None:
        return f"none: no run like this one was compared with {source}"
    between = step.between(step.total)
    limits = "" if between is None else f", so {1e3 * between[0]:,.1f} to {1e3 * between[1]:,.1f} ms"
    return f"{good_to(step.error)} of the measured time{limits}: {source}"


def _rates(calibration: Calibration, gpu: Gpu, compute: str) -> str:
    """The sources of the rates, one line for each source."""
    unknown, sources, rates = calibration.not_measured(gpu, compute), {}, calibration.rates(compute)
    for name in rates:
        sources.setdefault(calibration.source_of(name), []).append(name)
    measured = ", ".join(name for name in rates if name not in unknown) or "none"
    parts = [f"{', '.join(names)}: {source}" for source, names in sources.items()]
    return "; ".join([f"{measured} measured on {gpu.name}", *parts])


def run_tokens(config: Config) -> int:
    """Tokens of all steps of the run."""
    return BatchSizes.of(config).samples_before(config.train.steps) * config.model.sequences * config.model.sequence


def _duration(seconds: float) -> str:
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:,.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"
