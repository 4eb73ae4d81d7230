"""The sections of `mjax plan` on search, longest sequence, budget, memory and ahead-of-time compilation.

An error about a number of GPUs names one that works. A config that does not fit is rejected, also before training, with
the cheapest changes that make it fit (`search.changes_that_fit`).
"""

import math
import os
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.topologies import get_topology_desc

from mjax.cluster.hardware import Gpu, gpu_named
from mjax.cluster.launch import host_memory
from mjax.config import Config, MeshConfig, with_values
from mjax.config.axes import PIPE, describe_mesh
from mjax.config.batch_size import format_tokens
from mjax.config.checks import can_run_layers, divisors, validate
from mjax.config.kernels import HOPPER, gpu_capability, is_unrolled, resolve_kernels, with_unrolling
from mjax.errors import RunError, UsageError, suggestion
from mjax.models.build import count_active
from mjax.parallel.mesh import make_mesh
from mjax.planner import Section, error_bar, search
from mjax.planner.layer import layer_forward, layer_kinds
from mjax.planner.memory import HEADROOM, Memory, predict_memory, usable_memory
from mjax.planner.scaling import PUBLISHED, TUNED, ScalingLaw, describe_settings
from mjax.planner.search import Budget, Candidate, MemoryOf, SearchResult, TrialResult, describe
from mjax.planner.time import Calibration, bottlenecks, run_tokens
from mjax.step.precision import uses_float8
from mjax.step.step import build_program
from mjax.utils.figures import GIB, format_rows, format_table
from mjax.utils.packages import cuda_build, list_versions

MAX_ROWS = 10  # of the table of a search
MAX_DEVICES = 16_384  # tried when looking for a number of GPUs that is enough


def run_search(
    config: Config, name: str, devices: int, gpu: Gpu, calibration: Calibration, fix: tuple[str, ...]
) -> tuple[Config, Section]:
    """Return the fastest config, and the plan section on the search.

    Args:
      config: valid except for the searched fields.
      name: of the config, or of its file.
      devices, gpu, calibration: the number of GPUs, each of them, and its rates.
      fix: fields that the search does not change.

    Raises:
      UsageError: there is no candidate, or none fits.
    """
    check_searchable(config, devices, gpu.gpus_per_node, fix)
    result = search.search_and_time(config, devices, gpu, calibration, fix)
    if not result.ranked:
        reject_out_of_memory(result, config, name, gpu.name, search.make_predictors(gpu, calibration)[0], fix)
    return result.ranked[0].config, search_section(result, name, config, gpu)


def describe_config(section: Section, name: str, config: Config) -> str:
    """Docstring of the fastest config of a search: its settings, and the predictions that it was chosen by."""
    best, values = section.values["best"][0], section.values
    text = (
        f"{describe(config)}: {best['seconds']:.3g} s/step ({error_bar(best['error'])}), {best['mfu']:.1%} MFU, "
        f"{best['memory']['total'] / GIB:.1f} of {values['usable_bytes'] / GIB:.1f} GiB per GPU; "
        f"{values['tokens']:,} tokens in {best['days']:.3g} days. Model, batch and learning rate are unchanged."
    )
    title = f"{name} for {values['devices']:,} × {values['gpu']}, from mjax plan --devices.\n"
    return f"{title}\n{textwrap.fill(text, 120)}"


# --- Errors -----------------------------------------------------------------------------------------------------------


def check_searchable(config: Config, devices: int, gpus_per_node: int, fix: Collection[str] = ()) -> None:
    """Reject a search without any candidate.

    Raises:
      UsageError: one sentence, with numbers of GPUs that work.
    """
    for name in fix:
        if name not in search.SEARCHED:
            near = suggestion(name, search.SEARCHED, f"use any of {', '.join(search.SEARCHED)}")
            raise UsageError(f"--fix {name} is not a field of the search; {near}")
    if devices > gpus_per_node and devices % gpus_per_node:
        below = devices // gpus_per_node * gpus_per_node
        advice = f"use {below} or {below + gpus_per_node}, or set --devices-per-node"
        raise UsageError(f"--devices {devices} is not a multiple of {gpus_per_node} GPUs per server; {advice}")
    # Without the fields that the search decides, and without data, which a plan does not need.
    train = replace(config.train, micro_batch=1, recompute="none")
    validate(replace(config, mesh=MeshConfig(), data=replace(config.data, mock=True), train=train))
    if not any(search.candidates(config, devices, fix)):
        counts = (*divisors(gpus_per_node)[:-1], *range(gpus_per_node, MAX_DEVICES, gpus_per_node))
        counts = [n for n in counts if any(search.candidates(config, n, fix))]
        nearest = [n for n in counts if n < devices][-1:] + [n for n in counts if n > devices][:1]
        use = f"use --devices {' or '.join(map(str, nearest))}" if nearest else "use another --train.global-batch"
        model, fixed = config.model, f" with fixed {', '.join(fix)}" if fix else ""
        batches = f"batches of multiples of {search.batch_unit(config)} sequences"
        parts = f"{model.layers} layers, {model.heads} heads and {batches}"
        raise UsageError(f"--devices {devices} cannot be divided among {parts}{fixed}; {use}")


def reject_out_of_memory(
    result: SearchResult, config: Config, name: str, gpu: str, memory_of: MemoryOf, fix: Collection[str]
) -> None:
    """Reject a search in which nothing fits, with the closest candidate, and how many GPUs would be enough.

    Raises:
      UsageError: always.
    """
    smallest, size = result.out_of_memory[0][0], math.inf
    for candidate, least in sorted(result.out_of_memory, key=itemgetter(1)):
        if least >= size:
            break
        if (needed := memory_of(candidate).total) < size:
            smallest, size = candidate, needed
    enough = enough_devices(config, result.devices, memory_of, result.capacity, fix)
    advice = f"use --devices {enough}, where it fits" if enough else f"no number up to {MAX_DEVICES:,} is enough either"
    why = f"takes {size / GIB:.1f} GiB of {result.capacity / GIB:.1f}, of which {HEADROOM:.0%} must stay free"
    if 1 - size / result.capacity >= HEADROOM:
        why, advice = "needs more host memory than there is", "leave out --fix train.recompute"
    none = f"none of {result.tried:,} candidates to run {name} on {result.devices} × {gpu} fits"
    raise UsageError(f"{none}: the smallest, {describe(smallest)}, {why}; {advice}")


def enough_devices(
    config: Config, devices: int, memory_of: MemoryOf, capacity: float, fix: Collection[str] = ()
) -> int | None:
    """Twice, four times … as many GPUs, on which a candidate leaves HEADROOM free; None if `MAX_DEVICES` are too few.

    Only the smallest candidates are tried: micro-batches of 1, full recomputation, one virtual stage.
    """
    thrifty = {"train.micro_batch": 1, "train.recompute": "full", "mesh.virtual_stages": 1}
    fixed = {name: value for name, value in thrifty.items() if name not in fix}
    small, count = with_values(config, fixed), 2 * devices
    while count <= MAX_DEVICES:
        if any(memory_of(way).fits(capacity) for way in search.candidates(small, count, {*fix, *fixed})):
            return count
        count *= 2
    return None


# --- The fastest candidates and their bottlenecks ---------------------------------------------------------------------


def search_section(result: SearchResult, name: str, config: Config, gpu: Gpu) -> Section:
    """The section `search` of a plan.

    Args:
      result: with at least one candidate that fits.
      name, config: of the search.
      gpu: each of the devices.
    """
    best, shown = result.ranked[0], result.ranked[:MAX_ROWS]
    values = {
        "gpu": gpu.name,
        "devices": result.devices,
        "global_batch": config.train.global_batch,
        "tokens": run_tokens(config),
        "devices_per_node": gpu.gpus_per_node,
        "network_bytes_per_second": gpu.network_bandwidth_per_node,
        "usable_bytes": result.capacity,
        "tried": result.tried,
        "out_of_memory": len(result.out_of_memory),
        "pruned_by_time": result.pruned_by_time,
        "best": [_values(candidate) for candidate in shown],
    }
    days, hours = _cost(best)
    lines = [
        f"{result.tried:,} candidates: {len(result.ranked):,} fit; {len(result.out_of_memory):,} out of memory "
        f"(under {HEADROOM:.0%} of {result.capacity / GIB:.1f} GiB free, or host memory); "
        f"{result.pruned_by_time:,} pruned (over {search.MAX_SLOWDOWN - 1:.0%} slower than the fastest)",
        "",
        *_table([{"": number, **_cells(candidate)} for number, candidate in enumerate(shown, 1)]),
        "",
        f"{config.train.steps:,} steps, {run_tokens(config):,} tokens: {days:.3g} days, {hours:,.0f} GPU-hours "
        f"({error_bar(best.time.error)})",
        *best.time.caveats,
    ]
    return Section(f"Search: {name} on {result.devices:,} × {gpu.name}", values, lines)


def _cost(candidate: Candidate) -> tuple[float, float]:
    """Days and GPU-hours of the whole run."""
    hours = candidate.time.mean * candidate.config.train.steps / 3600
    return hours / 24, hours * candidate.config.mesh.devices


# Values of columns that are left out if all rows have them.
USUAL = {
    "pipe": 1, "replicate": 1, "expert": 1, "context": "1", "schedule": "-", "stage layers": "-", "loss chunks": "-",
    "host GiB": "-",
}  # fmt: skip


def _table(rows: list[dict[str, Any]]) -> list[str]:
    header = [name for name in rows[0] if any(row[name] != USUAL.get(name) for row in rows)]
    left = {"", "parameters", "recompute", "bottlenecks"}
    return format_table(header, [[row[name] for name in header] for row in rows], left)


def _cells(candidate: Candidate) -> dict[str, Any]:
    """A candidate as a row of a table."""
    config, memory, time = candidate
    mesh, train = config.mesh, config.train
    days, hours = _cost(candidate)
    stages = f" × {mesh.virtual_stages}" if mesh.virtual_stages > 1 else ""
    context = f" ({config.context_attention})" if config.context_attention else ""
    exchanged = mesh.expert > 1 and config.model.moe_token_dispatcher == "alltoall"
    return {
        "pipe": mesh.pipe, "data": mesh.data, "replicate": mesh.replicate,
        "expert": f"{mesh.expert} (alltoall)" if exchanged else mesh.expert,
        "context": f"{mesh.context}{context}", "model": mesh.model,
        "schedule": f"{mesh.schedule}{stages}" if mesh.pipe > 1 else "-",
        "stage layers": " ".join(map(str, mesh.stage_layers)) or "-", "micro-batch": train.micro_batch,
        "recompute": train.recompute, "SP": "yes" if mesh.splits_tokens else "-", "ZeRO": mesh.zero or "-",
        "loss chunks": train.loss_chunks if train.loss_chunks > 1 else "-", "s/step": f"{time.mean:.3g}",
        "TFLOP/s/GPU": f"{time.model_tflops:.0f}", "MFU": f"{time.mfu:.1%}",
        "GiB": f"{memory.total / GIB:.1f}", "host GiB": f"{memory.host / GIB:.1f}" if memory.host else "-",
        "days": f"{days:.3g}", "GPU-hours": f"{hours:,.0f}",
        "bottlenecks": bottlenecks(time, mesh),
    }  # fmt: skip


def _values(candidate: Candidate) -> dict[str, Any]:
    """The same for --json."""
    config, memory, time = candidate
    days, hours = _cost(candidate)
    return {
        **{name: attrgetter(name)(config) for name in search.SEARCHED},
        "seconds": time.mean,
        "seconds_at_global_batch": time.total,
        "error": time.error,
        "parts": time.parts,
        "model_tflops": time.model_tflops,
        "mfu": time.mfu,
        "memory": {**memory._asdict(), "total": memory.total},
        "days": days,
        "gpu_hours": hours,
    }


# --- The longest sequences --------------------------------------------------------------------------------------------


def longest_section(
    config: Config, name: str, devices: int, gpu: Gpu, calibration: Calibration | None
) -> tuple[Config, Section]:
    """The config with the longest sequence, and its plan section: with layer inputs on the device and in host memory.

    Raises:
      UsageError: layers differ from each other, or nothing fits.
    """
    machine = gpu.gpus_per_node, *search.make_predictors(gpu, calibration), gpu.usable_bytes, gpu.host_bytes
    tried = [search.longest_sequence(config, devices, recompute, *machine) for recompute in ("full", "offload")]
    values, rows = [], []
    for best in filter(None, tried):
        tokens, cells = best.config.train.global_batch * best.config.model.sequence, _cells(best)
        speed, positions = tokens / best.time.total / devices, best.config.model.sequence
        values.append({"sequence": positions, "tokens_per_second": speed, **_values(best)})
        shown = {column: cells[column] for column in ("recompute", "context", "model", "GiB", "MFU")}
        rows.append(shown | {"sequence": f"{positions:,}", "tokens/s/GPU": f"{speed:,.0f}"})
    if not values:
        raise UsageError(f"no sequence of {name} fits on {devices} × {gpu.name}; try --max-sequence-on {2 * devices}")
    plan = {"gpu": gpu.name, "devices": devices, "best": values}
    longest = max((best.config for best in tried if best), key=lambda config: config.model.sequence)
    return longest, Section(f"Longest sequence on {devices:,} × {gpu.name}", plan, _table(rows))


# --- The largest model of a budget ------------------------------------------------------------------------------------


def run_budget(
    config: Config, name: str, budget: Budget, calibration: Calibration, fix: tuple[str, ...]
) -> tuple[Config, Section]:
    """The config of the largest model that the budget trains, and its plan section: the model, and the tried sizes.
    Each trial is reported on stderr.

    Args:
      config: with the flags of the command line; valid except for its mesh.
      name: of the config, or of its file.
      budget: of GPUs and days; `calibration` has their rates.
      fix: as in `run_search`.

    Raises:
      UsageError: no model can be split, or none is trained in time.
    """
    devices, gpu, sizes = budget.devices, budget.gpu, search.size_grid(config)
    possible = [size for size in sizes if search.has_candidates(size.config, devices, fix)]
    check_searchable((possible or sizes)[-1].config, devices, gpu.gpus_per_node, fix)
    search_config = search.search_known_settings(devices, gpu, calibration, fix)
    best, tried = search.largest_model(possible, budget, search_config, partial(print, file=sys.stderr))
    time, active = best.best.time, count_active(best.config.model)
    remarks = [f"* fits in {budget.days:g} days ({error_bar(time.error)})", *time.caveats]
    if best.config.model != config.model:
        remarks.append(f"batch size and learning rate of {name}")
        if config.optimizer.parametrization == "standard":
            remarks[-1] += "; a larger model usually needs a lower learning rate"
    if best is tried[-1]:
        remarks.append("the largest model tried: the budget would train a larger one too")
    kind = "parameter" if active == best.parameters else "active parameter"
    values = {
        "devices": devices,
        "days": budget.days,
        "tokens_per_parameter": best.tokens / active,
        "best": _trial_values(best),
        "tried": [_trial_values(trial) for trial in tried],
    }
    lines = [
        f"largest model within the budget, {best.tokens / active:.3g} tokens per {kind}:",
        "",
        *_table([_trial_cells(trial, trial is best) for trial in tried]),
        "",
        *remarks,
    ]
    return best.best.config, Section(f"Budget: {devices:,} × {gpu.name} for {budget.days:g} days", values, lines)


def forecast_section(config: Config, law: ScalingLaw | None, is_budget: bool) -> Section | None:
    """The loss of a run, and the cost of smaller models with the same loss; None without a law. A budget uses the
    published one by default."""
    law = law or (PUBLISHED if is_budget else None)
    if law is None or not config.model.causal:
        return None
    parameters, tokens, optimizer = count_active(config.model), run_tokens(config), config.optimizer
    forecast, smaller, costs = law.predict(parameters, tokens), [], []
    for factor, size in ((2, "half"), (4, "a quarter")):
        needed = law.tokens_for(forecast.loss, parameters / factor)
        more = needed / (factor * tokens) - 1
        possible = f"{format_tokens(round(needed))} tokens, {more:+.0%} training compute" if more < 100 else "never"
        costs.append(f"{size} as large: {possible}")
        same = {"parameters": parameters / factor, "tokens": needed, "compute": 1 + more}
        smaller.append(same if more < 100 else None)
    interval = [forecast.low, forecast.high] if law.draws else None
    values = {"loss": forecast.loss, "interval": interval, "source": law.source, "same_loss": smaller}
    tuned = [f"{optimizer.learning_rate:g}, batch {config.train.global_batch}, {optimizer.parametrization}"]
    then, now = law.settings, describe_settings(config)
    if different := [f"{name} {then[name]}" for name in TUNED if then.get(name, now[name]) != now[name]]:
        tuned.append(f"the small runs had {', '.join(different)}")
    rows = {
        "loss": f"{forecast}, by {law.source}",
        "same loss": "\n".join(costs),
        "learning rate": "\n".join(tuned),
    }
    return Section("Loss", values, format_rows(rows))


def _trial_cells(trial: TrialResult, is_best: bool) -> dict[str, Any]:
    model, cells = trial.config.model, _cells(trial.best) if trial.best else {}
    return {
        "parameters": f"{trial.parameters:,}" + " *" * is_best,
        "layers": model.layers,
        "hidden": model.hidden,
        "tokens": format_tokens(trial.tokens),
        "FLOPs": f"{trial.flops:.3g}",
        **{name: cells.get(name, "") for name in ("pipe", "data", "context", "model", "s/step", "MFU")},
        "days": trial.duration.removesuffix(" days"),
    }


def _trial_values(trial: TrialResult) -> dict[str, Any]:
    model = trial.config.model
    return {
        "model": {"layers": model.layers, "hidden": model.hidden, "heads": model.heads},
        "parameters": trial.parameters,
        "tokens": trial.tokens,
        "steps": trial.config.train.steps,
        "flops": trial.flops,
        "days_at_peak": trial.days_at_peak,
        **({"days": None} if trial.best is None else _values(trial.best)),
    }


# --- Checks for a GPU -------------------------------------------------------------------------------------------------


ADA = (8, 9)  # compute capability of the first GPUs with float8 matmuls
FP8_MULTIPLE = 16  # of the sizes of cuBLAS's float8 matrices


def check_float8(config: Config, gpu: str, capability: tuple[int, ...]) -> None:
    """Reject float8 on a GPU without it, and sizes that its matmuls do not support.

    Args:
      config: validated.
      gpu: its name, for the message.
      capability: its compute capability.

    Raises:
      UsageError: one sentence, with the flags to change.
    """
    if not uses_float8(config.precision):
        return
    if capability < ADA:
        needs = f"needs compute capability 8.9 or more, as an H100 has, and {gpu} has {'.'.join(map(str, capability))}"
        raise UsageError(f"--precision.compute fp8 {needs}; use --precision.compute bf16")
    tokens = config.train.micro_batch * config.model.sequences * config.model.sequence
    sizes = {f"--train.micro-batch {config.train.micro_batch} has {tokens} tokens": (tokens,)}
    for _, of in layer_kinds(config):
        for weight in layer_forward(of).weights:
            sizes[f"a rank of --mesh.model {config.mesh.model} has a weight of {weight[0]} × {weight[1]}"] = weight
    for what, size in sizes.items():
        if any(n % FP8_MULTIPLE for n in size):
            sizes = f"multiplies matrices whose sizes are multiples of {FP8_MULTIPLE}, and {what}"
            raise UsageError(f"--precision.compute fp8 {sizes}; change that, or use --precision.compute bf16")


def check_local_gpus(config: Config, name: str, force: bool, print_line: Callable[[str], None]) -> None:
    """Reject a config that does not fit on the GPUs of this process, and warn if it barely fits, before compiling.

    On a CPU nothing is rejected: its memory is shared with other processes and may be swapped.

    Args:
      config: validated.
      name: name of the config in messages.
      force: only report and continue.
      print_line: called with that sentence, or the warning.

    Raises:
      UsageError: the config does not fit, or needs an attention kernel or float8 matmuls that are not available.
    """
    from mjax.cluster.processes import local_rank_and_size  # imports the driver's library, which no plan needs

    device = jax.local_devices()[0]
    usable = usable_memory(device)
    if usable is None or config.mesh.devices != jax.device_count():
        return
    check_float8(config, device.device_kind, gpu_capability(device))
    config = resolve_kernels(config, gpu_capability(device))
    try:
        host = host_memory() / (jax.local_device_count() * local_rank_and_size()[1])
        if warning := check_memory(config, usable, device.device_kind, name, host):
            print_line(f"memory  {warning}")
    except UsageError as error:
        if not force:
            raise UsageError(f"{error}; --force tries it anyway") from None
        print_line(f"memory  {error}; continuing because of --force")


def check_memory(config: Config, usable: float, gpu: str, name: str = "this config", host: float | None = None) -> str:
    """Reject a config that does not fit, with its memory and the changes that make it fit.

    Args:
      config: validated.
      usable: bytes that XLA may allocate on each device.
      gpu: name of the device.
      name: name of the config in messages.
      host: bytes of this machine's memory for each device; None if they are not known.

    Returns:
      A warning if it fits but leaves less than HEADROOM free, else an empty string.

    Raises:
      UsageError: it needs more than `usable`, or more than `host`.
    """
    memory = predict_memory(config)
    if not memory.fits_host(host):
        both = f"{memory.host / GIB:.1f} GiB of activations per GPU in host memory, and it has {host / GIB:.1f} GiB"
        raise UsageError(f"{name} stores {both}; use --train.recompute full, or a smaller --train.micro-batch")
    free = memory.free(usable)
    if free >= HEADROOM:
        return ""
    changes = search.changes_that_fit(config, usable, host=host)
    options = "; or ".join(f"{change.flags} ({change.needs(config)})" for change in changes)
    advice = f"to fit, cheapest first: {options}" if changes else "no change of mesh or recomputation makes it fit"
    largest_first = sorted(memory.parts.items(), key=lambda part: -part[1])
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest_first if size / GIB >= 0.05)
    needs = f"{name} needs {memory.total / GIB:.1f} GiB per GPU ({kinds}), and {gpu} has {usable / GIB:.1f} GiB usable"
    if free < 0:
        raise UsageError(f"{needs}; {advice}")
    margin = f"which leaves {free:.1%}; the prediction may be off by {HEADROOM:.0%}, so it may not fit"
    return f"{needs}, {margin}; {advice}"


# --- The memory section of a plan, and its picture --------------------------------------------------------------------


PEAKS = {
    "head": "in the loss, with the logits of a micro-batch",
    "backward": "in the backward pass of the layers",
    "reduction": "in the gradient all-reduce",
    "update": "in Muon's orthogonalization",
}


def memory_section(config: Config, gpu: Gpu | None = None, figure: Path | None = None, name: str = "") -> Section:
    """The plan section on the memory of a device.

    Args:
      gpu: the GPU it has to fit into.
      figure: output file of the plot.
    """
    config = resolve_kernels(config, HOPPER if gpu is None else gpu.compute_capability)
    memory = predict_memory(config)
    values: dict[str, Any] = {
        "total": memory.total,
        **memory._asdict(),
        "attention": config.model.attention,
        "unrolled": is_unrolled(config, on_gpu=True),
    }
    rows = {kind: f"{size / GIB:8.2f} GiB" for kind, size in memory.parts.items()}
    rows["peak"] = f"{memory.total / GIB:8.2f} GiB per device, {PEAKS[memory.moment]}"
    if memory.host:
        rows["host memory"] = f"{memory.host / GIB:8.2f} GiB per device: the inputs of all layers"
    rows["attention"] = values["attention"]
    verdict = f"{memory.total / GIB:.2f} GiB per device"
    if gpu is not None:
        rows["layers"] = "unrolled" if values["unrolled"] else "scan"
        free, in_host = memory.free(gpu.usable_bytes), memory.fits_host(gpu.host_bytes)
        changes = [] if free >= HEADROOM else search.changes_that_fit(config, gpu.usable_bytes, host=gpu.host_bytes)
        values |= {"gpu": gpu.name, "usable": gpu.usable_bytes, "fits": free >= 0 and in_host, "free": free}
        plain = [{"flags": c.flags, "total": c.memory.total, "devices": c.config.mesh.devices} for c in changes]
        values["changes"] = plain
        fits = "fits" if free >= HEADROOM else "may not fit" if free >= 0 else "does not fit"
        verdict += f": {fits} in the {gpu.usable_bytes / GIB:.1f} GiB usable on {gpu.name}"
        if 0 <= free < HEADROOM:
            verdict += f": {free:.1%} free, and the prediction may be off by {HEADROOM:.0%}"
        if not in_host:
            verdict += f", but not in the {gpu.host_bytes / GIB:.1f} GiB of host memory; use --train.recompute full"
        if free < HEADROOM:
            verdict += "\nchanges that fit, cheapest first:" if changes else "\nno change of mesh or recomputation fits"
            verdict += "".join(f"\n  {change.flags}  →  {change.needs(config)}" for change in changes)
    if figure is not None:
        draw_modes(config, figure, gpu, name)
    return Section("Memory", values, format_rows(rows), {"memory": verdict})


def draw_modes(config: Config, file: Path | BinaryIO, gpu: Gpu | None = None, name: str = "") -> None:
    """Draw the memory of a validated config with each recomputation mode; `name` is for the title."""
    from mjax.pictures.plan import draw_memory  # matplotlib takes a second to import

    config = resolve_kernels(config, HOPPER if gpu is None else gpu.compute_capability)
    modes = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in search.RECOMPUTE:
            changed = with_values(config, {"mesh.sequence_parallel": split, "train.recompute": recompute})
            if can_run_layers(changed):
                modes[recompute + ", sequence parallel" * split] = predict_memory(changed).parts
    heading = f"Memory per device by recomputation mode{', ' * bool(name)}{name}"
    micro_batch, kernel = config.train.micro_batch, config.model.attention
    about = f"{describe_mesh(config.mesh, PIPE)}, micro-batches of {micro_batch}, attention kernel {kernel}"
    draw_memory(modes, file, heading, about, gpu, HEADROOM)


# --- Compiling for absent NVIDIA GPUs ---------------------------------------------------------------------------------
#
# XLA needs no GPU to compile for one, only a description. `targets/` has a file for each GPU in XLA's format
# (GpuTargetConfigProto), and a topology of servers gives a mesh of virtual devices. The step is the one that training
# runs, from `build_program`, with the XLA flags of this process. A cluster would compile the same program, with one
# difference: without a GPU XLA cannot autotune, so it uses its default tiles for matmuls (Triton's) where on a GPU it
# times several, including cuBLAS's. Collectives, their order and memory hardly depend on that; the speed of matmuls
# does. `benchmarks/aot/` reads the compiled program.

TARGETS = Path(__file__).parent / "targets"


class AllocatedMemory(NamedTuple):
    """Bytes on one device, as allocated by XLA.

    Attributes:
      arguments: state and batch.
      outputs: results.
      aliased: outputs that reuse the memory of arguments, such as the new state.
      temporaries: everything that lives within a step: the weights in the compute dtype, gradients, activations.
      host: temporaries in host memory.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes that have to fit."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


class Compilation(NamedTuple):
    """A step compiled ahead of time.

    Attributes:
      device_kind: JAX's name for the GPU.
      config: with the compiled attention kernel, and with or without a loop over the layers.
      step: the `TrainProgram` whose step it is, on a mesh of these GPUs.
      seconds: of tracing, and of compiling.
      memory: allocated by XLA.
      text: the scheduled HLO.
    """

    device_kind: str
    config: Config
    step: Any
    seconds: dict[str, float]
    memory: AllocatedMemory
    text: str


def sheet_names() -> list[str]:
    """The GPUs with a target file."""
    return sorted(file.stem for file in TARGETS.glob("*.txtpb"))


def check_compile(config: Config, gpu: Gpu | None) -> None:
    """Reject a config or a GPU that cannot be compiled for.

    Raises:
      UsageError: there is no target file for the GPU, or the mesh does not fill its servers, or the CUDA wheels are
        missing.
    """
    names = ", ".join(sheet_names())
    if gpu is None:
        raise UsageError(f"--compile needs a GPU to compile for; add --gpu with one of {names}")
    if gpu.name not in sheet_names():
        raise UsageError(f"--gpu {gpu.name} cannot be compiled for; use one of {names}")
    devices, per_server = config.mesh.devices, gpu.gpus_per_node
    if devices > per_server and devices % per_server:
        fix = f"--devices-per-node {max(n for n in range(1, per_server + 1) if devices % n == 0)}"
        raise UsageError(f"{devices} devices do not fill servers of {per_server}; change --mesh.data, or type {fix}")
    if cuda_build() is None:
        fix = "type: pip install 'jax[cuda13]' (no GPU and no driver is needed)"
        raise UsageError(f"--compile needs the compiler for NVIDIA GPUs, which is in JAX's CUDA wheels; {fix}")


def compile_step(
    config: Config, gpu: str, per_server: int = 8, options: dict[str, Any] | None = None, quiet: bool = True
) -> Compilation:
    """Compile the train step of `config` for its mesh of GPUs, which need not exist: seconds to minutes.

    `launch.hide_accelerators` has to be called before: JAX would look for GPUs and fail.

    Args:
      config: validated; `model.attention` auto is resolved as on a GPU.
      gpu: name of a target file.
      per_server: GPUs per server.
      options: of XLA, by name, in addition to the flags of this process.
      quiet: without a line on stderr for each phase.

    Raises:
      UsageError: JAX or cuDNN does not support the config.
      RunError: XLA cannot compile the step.
    """
    config = with_unrolling(resolve_kernels(config, gpu_named(gpu).compute_capability), on_gpu=True)
    devices = config.mesh.devices
    topology = get_topology_desc(
        platform="cuda",
        topology=f"1x{max(1, devices // per_server)}x{min(devices, per_server)}",  # slices × servers × GPUs of a server
        target_config=(TARGETS / f"{gpu}.txtpb").read_text(),
    )
    device_kind, began = topology.devices[0].device_kind, time.perf_counter()
    if not quiet:
        print(f"mjax: tracing and compiling the step for {devices:,} × {device_kind} …", file=sys.stderr, flush=True)
    program = build_program(config, make_mesh(config.mesh, topology.devices))
    try:
        lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    except NotImplementedError as error:
        # JAX queries its GPU for the features of cuDNN. Without a GPU it assumes the oldest.
        problem = f"JAX does not lower cuDNN's attention here: {str(error).splitlines()[0]}"
        raise UsageError(f"{problem} Without a GPU it assumes an A100; add --model.attention xla") from error
    traced = time.perf_counter()
    try:
        leave_out_compilation_cache()
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"XLA cannot compile this step for {gpu}: {str(error).splitlines()[0]}") from error
    seconds, stats = {"tracing": traced - began, "compiling": time.perf_counter() - traced}, compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "host_temp")
    memory = AllocatedMemory(*(getattr(stats, f"{name}_size_in_bytes") for name in names))
    return Compilation(device_kind, config, program, seconds, memory, compiled.as_text())


def leave_out_compilation_cache() -> None:
    """Disable JAX's persistent cache: without a GPU JAX cannot read its entries, and complains at length."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is used is decided once per process


def compiler_versions() -> dict[str, str]:
    """Versions of the compiler: JAX, and its CUDA plugin."""
    packages = list_versions()
    return {name: packages[name] for name in ("jax", "jaxlib", f"jax-cuda{cuda_build()}-plugin") if name in packages}


def compile_section(compiled: Compilation, formula: Memory) -> Section:
    """The plan section on the compiled step: memory as allocated and as predicted by `formula`, and collectives."""
    memory, versions = compiled.memory, compiler_versions()
    operations = r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
    collectives = Counter(re.findall(operations, compiled.text))
    predicted = {"total": memory.total, "formula": formula.total, "host_formula": formula.host}
    values = {
        "device_kind": compiled.device_kind,
        "seconds": compiled.seconds,
        "memory": memory._asdict() | predicted,
        "collectives": dict(collectives),
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    rows = {
        "compiled by": ", ".join(f"{package} {number}" for package, number in versions.items()),
        "XLA flags": values["xla_flags"] or "none",
        "compile time": ", ".join(f"{seconds:.1f} s {phase}" for phase, seconds in compiled.seconds.items()),
        "memory": f"{memory.total / GIB:.2f} GiB per device, {memory.temporaries / GIB:.2f} of it temporaries; "
        f"predicted {formula.total / GIB:.2f} GiB ({formula.total / memory.total - 1:+.1%})",
        "collectives": ", ".join(f"{count:,} × {name}" for name, count in sorted(collectives.items())) or "none",
    }
    if memory.host or formula.host:
        rows["host memory"] = f"{memory.host / GIB:.2f} GiB; predicted {formula.host / GIB:.2f} GiB"
    return Section(f"Compiled for {compiled.device_kind}", values, format_rows(rows))


def compile_for(config: Config, gpu: Gpu) -> Section:
    """Compile the step of a checked config, and report on it."""
    compiled = compile_step(config, gpu.name, gpu.gpus_per_node, quiet=False)
    return compile_section(compiled, predict_memory(compiled.config, gpu.compute_capability))
