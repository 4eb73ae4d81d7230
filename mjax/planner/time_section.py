"""The time section of `mjax plan --gpu`: a step by its parts, speed, MFU and its definition, days of the run."""

from __future__ import annotations

from dataclasses import asdict

from mjax.cluster.hardware import Gpu
from mjax.config import Config
from mjax.config.batch_size import BatchSizes
from mjax.planner.calibration import Calibration, default_calibration
from mjax.planner.section import Section, good_to, named_rows, table
from mjax.planner.time import PARTS, StepTime, predict_time
from mjax.step.precision import in_float8
from mjax.trace.flops import hardware_flops, model_flops

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
DAY = 86_400


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
    step_tokens = config.train.global_batch * config.model.sequences * config.model.sequence
    float8 = in_float8(config.precision)
    peak, of_bf16 = gpu.mfu_peak(compute), " of bf16" if float8 else ""
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
        "tokens_per_second": step_tokens / step.total,
        "run": {"tokens": tokens, "seconds": run_seconds},
        "calibration": asdict(calibration),
        "not_measured": calibration.not_measured(gpu, compute),
    }
    parts = [
        (NAMES[name], f"{1e3 * step.parts[name]:,.1f}", f"{step.parts[name] / step.total:.1%}")
        for name in PARTS
        if step.parts[name] > 0
    ]
    rows = {
        "error bar": _error_bar(config, step, calibration),
        "rates": _rates(calibration, gpu, compute),
        "a GPU": f"{step.model_tflops:,.1f} model TFLOP/s, {hardware:,.1f} with what is recomputed",
        "MFU": f"{step.mfu:.1%} of {peak / 1e12:,g} TFLOP/s{of_bf16}: nothing recomputed counts, attention over "
        f"s × s" + (f" ({causal:.1%} if its masked half is left out)" if config.model.causal else ""),
        "tokens/s": f"{step_tokens / step.total:,.0f}",
        "the run": f"{_duration(run_seconds)} for {tokens:,} tokens in {config.train.steps:,} steps, "
        f"{run_seconds * devices / 3600:,.0f} GPU-hours",
    }
    if worst:
        rows = {
            "balanced router": f"{1e3 * step.total:,.1f} ms a step, as above: every expert has as many tokens",
            **_other_router(config, worst.total),
            **rows,
        }
    if step.caveats:
        rows = {"beyond": "; ".join(step.caveats), **rows}
    total = ("a step", f"{1e3 * step.total:,.1f}", "100.0%")
    lines = [*table(("", "ms", "share"), [*parts, total]), *named_rows(rows)]
    return Section(f"Time on {gpu.name}, predicted", values, lines)


def _other_router(config: Config, seconds: float) -> dict[str, str]:
    """The row of a router that gives all tokens to the same experts: the worst, if only some ranks have these."""
    chosen = f"{1e3 * seconds:,.1f} ms: all tokens choose the same experts"
    if config.mesh.expert > 1:
        return {"worst router": f"{chosen}, on the same ranks"}
    return {"one-sided router": f"{chosen}, which every GPU has"}


def _error_bar(config: Config, step: StepTime, calibration: Calibration) -> str:
    found = calibration.source_of("error")
    if step.error is None:
        missing = "fp8; bf16 was" if in_float8(config.precision) else "sequences of this length; others were"
        missing = "the attention kernel flash; others were" if config.model.attention == "flash" else missing
        missing = "mixtures of experts; others were" if config.model.parted_experts() else missing
        missing = "activations in host memory; others were" if config.train.recompute == "offload" else missing
        return f"none for {missing} compared with {found}"
    between = step.between(step.total)
    if between is None:
        return f"{good_to(step.error)} of the measured time: {found}"
    low, high = (f"{1e3 * seconds:,.1f}" for seconds in between)
    return f"{good_to(step.error)} of the measured time, so {low} to {high} ms: {found}"


def _rates(calibration: Calibration, gpu: Gpu, compute: str) -> str:
    """Where the rates come from, those of the same source together."""
    unknown, sources, rates = calibration.not_measured(gpu, compute), {}, calibration.rates(compute)
    for name in rates:
        sources.setdefault(calibration.source_of(name), []).append(name)
    measured = [name for name in rates if name not in unknown]
    found = f"{', '.join(measured)} measured on {gpu.name}" if measured else f"none measured on {gpu.name}"
    return "; ".join([found, *(f"{', '.join(names)}: {source}" for source, names in sources.items())])


def run_tokens(config: Config) -> int:
    """Tokens of all steps of the run."""
    return BatchSizes.of(config).samples_before(config.train.steps) * config.model.sequences * config.model.sequence


def _duration(seconds: float) -> str:
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:,.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"
