"""Published step times, as configs: the time model was fitted to some of them and is checked against all.

arXiv 2104.04473, table 1      ten models on 32 to 3,072 A100s, full recomputation
arXiv 2205.05198, table 5      four models on 8 to 512 A100s, sequence parallelism and selective recomputation, and
                               the same with full recomputation and without sequence parallelism
arXiv 1909.08053, figure 5     weak scaling on 1 to 512 V100s of DGX-2H servers; appendix D: heads, strong scaling
mosaicml/llm-foundry           GPTs of 125M to 70B parameters on 8 to 64 A100s and H100s with PyTorch's FSDP, 512 to
                               65,536 positions: published_steps.csv, from scripts/train/benchmarking/README.md
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from benchmarks.fitting import fit_rates
from mjax.cluster.hardware import Gpu, gpu_named
from mjax.config import Config, GPTConfig, MeshConfig, TrainConfig, load_config
from mjax.planner.layer import hardware_flops
from mjax.planner.time import A100, MJAX, Calibration, FrameworkModel, LayerTime, Overlap, Traffic, predict_time

# --- Megatron-LM ------------------------------------------------------------------------------------------------------

MEGATRON_A100 = replace(A100, error=0.06, sequences=(2048, 2048), source="18 runs of Megatron-LM")
# Fitted to the fourteen scaling results of arXiv 1909.08053: `matmul` and `launch`, the cost of starting each kernel
# from Python; the other rates as on A100.
MEGATRON_V100 = replace(
    MEGATRON_A100, gpu="v100-dgx2h", matmul=0.7205, launch=91.1e-6, error=0.12, sequences=(1024, 1024),
    source="14 scaling results of Megatron-LM, arXiv 1909.08053, figure 5 and appendix D",
)  # fmt: skip


@dataclass(frozen=True)
class PublishedTraffic:
    """Traffic of a program that cannot be traced, as read from its code: bytes of 16-bit activations that the kernels
    of a layer's forward pass read and write, per element of the given tensor.

    Attributes:
      stream: per element of [tokens, h]: LayerNorms, dropout, residual sums.
      mlp: per element of [tokens, f / p]: GELU.
      scores: per element of the scores [b, n / p, s, s]: scale, mask, softmax, dropout; not reads and writes of the two
        products.
      logits: per element of the vocabulary scores, forward and backward.
      kernels: launches of a layer's forward pass, except its products.
      backward: bytes of a backward pass divided by bytes of the forward pass.
    """

    stream: float
    mlp: float
    scores: float
    logits: float
    kernels: int
    backward: float

    def __call__(self, layer: LayerTime) -> Traffic:
        """The traffic of a layer."""
        run, mesh, samples = layer.run, layer.config.mesh, layer.samples
        stream, down = run.stream / (mesh.model if mesh.splits_tokens else 1), layer.layer.branches[-1][-1]
        scale, factor = run.element / 2, self.backward + (layer.config.train.recompute != "none")
        forward = scale * (self.stream * stream + self.mlp * samples * down.m * down.k)
        scores = scale * self.scores * samples * max(p.batch * p.m * p.n for p in layer.layer.activation_products)
        return Traffic(
            forward=(forward, self.kernels),
            backward=(factor * forward, factor * self.kernels),
            scores=(scores, 3),
            scores_backward=(self.backward * scores, self.backward * 3),
            head=(self.logits * samples * run.end.logits, 6),
        )


# The program of arXiv 2104.04473 (Megatron-LM v2): GELU, dropout with residual, and softmax are fused kernels;
# attention stores its scores and a dropout mask; gradients are fp16.
MEGATRON_2021 = FrameworkModel(
    traffic=PublishedTraffic(stream=26, mlp=6, scores=10, logits=16, kernels=11, backward=1.6),
    flash=False, overlap=Overlap(backward=0.0),
    repeated_sums=2, gradient_bytes=2, accumulate_bytes=6, optimizer_bytes=52,
    splits_messages=True, sums_stacks=False,
)  # fmt: skip

# The program of arXiv 2205.05198: the same, but the gather for a weight's gradient overlaps with another product
# (section 4.2.2), and that product adds to the gradient itself (Megatron-LM, fused since February 2022).
MEGATRON_2022 = replace(MEGATRON_2021, overlap=Overlap(backward=0.5), accumulate_bytes=0)

# The program of arXiv 1909.08053: only LayerNorm and the optimizer are fused, so bias, GELU, dropout, residual, scale,
# mask and softmax each read and write.
MEGATRON_2019 = replace(
    MEGATRON_2021,
    traffic=PublishedTraffic(stream=34, mlp=12, scores=21, logits=16, kernels=11, backward=1.6),
    splits_messages=False,
)

# --- Runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      name: of the config, with the run's settings.
      config: as the paper ran it.
      gpu: name in `mjax/cluster/hardware.py`.
      software: the program, or mjax if the run's program is not modelled.
      seconds: of a step.
      source: paper and table.
      network: gigabits per second of a server's network cards, if not the usual.
    """

    name: str
    config: Config
    gpu: str
    software: FrameworkModel
    seconds: float
    source: str
    network: float | None = None

    @property
    def hardware(self) -> Gpu:
        """The GPU in its server."""
        return gpu_named(self.gpu).with_server(network=self.network)


def whole_rows(config: Config) -> Config:
    """A published config as the papers of 2019 and 2021 ran it: without sequence parallelism, which came in 2022."""
    return replace(config, mesh=replace(config.mesh, sequence_parallel=False))


@lru_cache
def table_1() -> tuple[Run, ...]:
    """The ten rows of arXiv 2104.04473, table 1; its TFLOP/s count recomputation.

    The smallest four ran with torch's DistributedDataParallel, which overlaps the gradient sum with the backward pass,
    the others with Megatron's own, which does not (NVIDIA/Megatron-LM, examples/sc21/run_table_1.sh).
    """
    rows = (
        ("gpt_1_7b", 137),
        ("gpt_3_6b", 138),
        ("gpt_7_5b", 142),
        ("gpt_18b", 135),
        ("gpt_39b", 138),
        ("gpt_76b", 140),
        ("gpt_145b", 148),
        ("gpt_310b", 155),
        ("gpt_530b", 163),
        ("gpt_1t", 163),
    )
    runs = []
    for name, tflops in rows:
        config = _fp16(whole_rows(load_config(name)))
        overlap = Overlap(backward=0.0, gradients=config.mesh.pipe == 1)
        software = replace(MEGATRON_2021, overlap=overlap)
        seconds = hardware_flops(config) / config.mesh.devices / tflops / 1e12
        runs.append(Run(name, config, "a100", software, seconds, "arXiv 2104.04473, table 1"))
    return tuple(runs)


@lru_cache
def table_5() -> tuple[Run, ...]:
    """The eight step times of arXiv 2205.05198, table 5: as the paper proposes, and with full recomputation."""
    rows = (
        ("gpt_22b_sp", 1.10, 1.42),
        ("gpt_175b_sp", 13.75, 18.13),
        ("gpt_530b_sp", 37.83, 49.05),
        ("gpt_1t_sp", 71.49, 94.42),
    )
    runs = []
    for name, proposed, full in rows:
        config = _fp16(load_config(name))
        source = "arXiv 2205.05198, table 5"
        runs.append(Run(name, config, "a100", MEGATRON_2022, proposed, source))
        config = whole_rows(replace(config, train=replace(config.train, recompute="full")))
        alone = replace(MEGATRON_2022, overlap=Overlap(backward=1.0))
        runs.append(Run(f"{name}, full recomputation", config, "a100", alone, full, source))
    return tuple(runs)


@lru_cache
def v100_scaling() -> tuple[Run, ...]:
    """Figure 5 and appendix D of arXiv 1909.08053: 39 TFLOP/s on one GPU, and scaling in percent of that.

    Eight sequences per model; 512 with 64 replicas. The TFLOP/s count recomputation, as everywhere in that paper.
    """
    runs = []

    def add(name: str, config: Config, percent: float, source: str):
        seconds = hardware_flops(config) / config.mesh.devices / (39e12 * percent / 100)
        runs.append(Run(name, config, "v100-dgx2h", MEGATRON_2019, seconds, f"arXiv 1909.08053, {source}"))

    weak = (("gpt_1b", 1, 100, 96), ("gpt_2b", 2, 95, 83), ("gpt_4b", 4, 82, 79), ("gpt_8b", 8, 77, 74))
    for name, ranks, alone, replicated in weak:
        add(f"{name} × {ranks}", _v100(name, ranks, 1), alone, "figure 5")
        add(f"{name} × {64 * ranks}", _v100(name, ranks, 64), replicated, "figure 5")
    for heads, percent in ((16, 82), (24, 80), (32, 77)):
        config = _v100("gpt_8b", 8, 1)
        config = replace(config, model=replace(config.model, heads=heads))
        add(f"gpt_8b with {heads} heads", config, percent, "appendix D")
    for ranks, speedup in ((2, 1.64), (4, 2.34), (8, 2.98)):
        add(f"gpt_1b on {ranks}", _v100("gpt_1b", ranks, 1), 100 * speedup / ranks, "appendix D")
    return tuple(runs)


# Width, heads and layers of the models of llm-foundry.
FOUNDRY = {
    "125m": (768, 12, 12), "350m": (1024, 16, 24), "760m": (1536, 12, 24), "1b": (2048, 16, 24), "3b": (2560, 20, 32),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 56, 48), "70b": (8192, 64, 80),
}  # fmt: skip


@lru_cache
def fsdp_steps() -> tuple[Run, ...]:
    """Steps of llm-foundry in bf16, fully sharded, with or without full recomputation, as mjax would run them."""
    runs, source = [], "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
    with (Path(__file__).parent / "published_steps.csv").open() as file:
        for row in csv.DictReader(file):
            hidden, heads, layers = FOUNDRY[row["model"]]
            gpus, sequence, micro_batch = (int(row[name]) for name in ("gpus", "sequence", "micro_batch"))
            samples = micro_batch * int(row["micro_batches"])  # on each GPU
            model = GPTConfig(
                layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=50368,
                attention_dropout=0.0, hidden_dropout=0.0,
            )  # fmt: skip
            train = TrainConfig(global_batch=gpus * samples, micro_batch=micro_batch, recompute=row["recompute"])
            config = Config(model=model, mesh=MeshConfig(data=gpus, zero=3), train=train)
            seconds = samples * sequence / float(row["tokens_per_second"])
            name = f"{row['model']}, {sequence:,} positions, {gpus} GPUs"
            network = 1600.0 if row["gpu"] == "a100" else None
            runs.append(Run(name, config, row["gpu"], MJAX, seconds, source, network))
    return tuple(runs)


def _v100(name: str, model: int, data: int) -> Config:
    config = _fp16(whole_rows(load_config(name)))
    return replace(
        config,
        mesh=replace(config.mesh, model=model, data=data),
        train=replace(config.train, recompute="full", micro_batch=8, global_batch=8 * data),
    )


def _fp16(config: Config) -> Config:
    return replace(config, precision=replace(config.precision, compute="fp16"))


# --- Fitting ----------------------------------------------------------------------------------------------------------


def errors(calibration: Calibration, runs: Sequence[Run]) -> np.ndarray:
    """The relative error of the predicted speed of each run with its own software."""
    predicted = [predict_time(run.config, run.hardware, calibration, run.software).total for run in runs]
    return np.array([run.seconds for run in runs]) / np.array(predicted) - 1.0


def as_mjax(runs: Sequence[Run], calibration: Calibration | None = None) -> np.ndarray:
    """The relative error of the predicted time of each run, as mjax would run it: what an error bar has to cover."""
    predicted = [predict_time(run.config, run.hardware, calibration).total for run in runs]
    return np.array(predicted) / np.array([run.seconds for run in runs]) - 1.0


def fit(calibration: Calibration, runs: Sequence[Run], names: Sequence[str]) -> Calibration:
    """`calibration` with the rates `names` that minimise the squared relative errors of `runs`."""
    return fit_rates(calibration, names, lambda rates: errors(rates, runs))
