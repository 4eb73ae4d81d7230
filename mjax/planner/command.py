"""What `mjax plan` finds and says: the search of --devices, --longest, --days, and whether a config fits.

Each refusal of a number of GPUs names one that works; what does not fit is refused with the cheapest changes that make
it fit (`search.changes_that_fit`), also before training.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mjax.cluster.hardware import Gpu
from mjax.cluster.launch import host_memory
from mjax.config import Config, MeshConfig, as_flag, axes, differences
from mjax.config.axes import PIPE, in_words
from mjax.config.batch_size import in_units
from mjax.config.checks import can_run_layers, validate
from mjax.config.kernels import HOPPER, capability_of, is_unrolled, resolved_on_gpu
from mjax.config.source import WIDTH
from mjax.errors import UsageError, suggestion
from mjax.planner import Section, good_to, layers_in_words
from mjax.planner.calibration import Calibration
from mjax.planner.layer import kinds_of, layer_forward
from mjax.planner.memory import HEADROOM, fits_host, free_share, predict_memory, usable_memory
from mjax.planner.search import (
    RECOMPUTE,
    SEARCHED,
    WITHIN,
    Budget,
    Candidate,
    MemoryOf,
    SearchResult,
    Trial,
    batch_unit,
    candidates,
    changes_that_fit,
    describe,
    divisors,
    find,
    in_known_ways,
    is_possible,
    ladder,
    largest_model,
    longest,
    predictions,
    value_of,
    with_values,
)
from mjax.planner.time import run_tokens
from mjax.step.precision import in_float8
from mjax.utils.figures import GIB, named_rows, table

SHOWN = 10
"""Candidates in the table of a search."""
LARGEST = 16_384
"""The largest number of GPUs tried when looking for how many are enough."""


def run_search(
    config: Config,
    name: str,
    devices: int,
    gpu: Gpu,
    calibration: Calibration | None = None,
    keep: tuple[str, ...] = (),
) -> tuple[Config, Section]:
    """Return the fastest config, and the plan section on the search.

    Args:
      config: valid except for what the search decides; `name` is that of its file.
      devices, gpu, calibration: the number of GPUs, each of them, and its rates.
      keep: fields that stay as they are.

    Raises:
      UsageError: there is nothing to search, or nothing fits.
    """
    check_searchable(config, devices, gpu.gpus_per_node, keep)
    began = time.perf_counter()
    result = find(config, devices, gpu, calibration, keep)
    if not result.ranked:
        refuse_too_big(result, config, name, gpu.name, predictions(gpu, calibration)[0], keep)
    return result.ranked[0].config, report(result, name, config, gpu, time.perf_counter() - began)


def about(section: Section, name: str, config: Config) -> str:
    """Docstring of the config that a search found: what it is and how it was chosen."""
    best, values = section.values["best"][0], section.values
    text = (
        f"{describe(config)}: {best['seconds']:.3g} s a step ({good_to(best['error'])}), {best['mfu']:.1%} MFU, "
        f"{best['memory']['total'] / GIB:.1f} of {values['usable_bytes'] / GIB:.1f} GiB a GPU; "
        f"{values['tokens']:,} tokens in {best['days']:.3g} days. Model, batch and learning rate are its own."
    )
    warning = [line for line in section.lines if line.startswith("warning")]
    title = f"{name} for {values['devices']:,} × {values['gpu']}, found by the planner.\n"
    return "\n".join([title, *(textwrap.fill(line, WIDTH) for line in (text, *warning))])


# --- Refusals ---------------------------------------------------------------------------------------------------------


def check_searchable(config: Config, devices: int, gpus_per_node: int, keep: Collection[str] = ()) -> None:
    """Refuse a search without any candidate.

    Raises:
      UsageError: one sentence, with numbers of GPUs that work.
    """
    for name in keep:
        if name not in SEARCHED:
            raise UsageError(
                f"--keep {name}: the search does not change it{suggestion(name, list(SEARCHED))}; "
                f"use any of {', '.join(SEARCHED)}"
            )
    if devices > gpus_per_node and devices % gpus_per_node:
        below = devices // gpus_per_node * gpus_per_node
        smaller = [n for n in divisors(devices) if 1 < n < gpus_per_node]
        servers = f", or --devices-per-node {smaller[-1]} for servers of {smaller[-1]}" if smaller else ""
        raise UsageError(
            f"--devices {devices} is not a multiple of the {gpus_per_node} GPUs of a server; "
            f"use {below} or {below + gpus_per_node}{servers}"
        )
    # Without the fields that the search decides, and without data, which a plan does not need.
    alone = replace(config.train, micro_batch=1, recompute="none")
    validate(replace(config, mesh=MeshConfig(), data=replace(config.data, mock=True), train=alone))
    if not any(candidates(config, devices, keep)):
        counts = (*divisors(gpus_per_node)[:-1], *range(gpus_per_node, LARGEST, gpus_per_node))
        counts = [n for n in counts if any(candidates(config, n, keep))]
        sides = [n for n in counts if n < devices][-1:] + [n for n in counts if n > devices][:1]
        use = f"use --devices {' or '.join(map(str, sides))}" if sides else "use another --train.global-batch"
        model, fixed = config.model, f" with {', '.join(keep)} kept" if keep else ""
        raise UsageError(
            f"--devices {devices} cannot be divided among {model.layers} layers, {model.heads} heads and batches of "
            f"multiples of {batch_unit(config)} sequences{fixed}; {use}"
        )


def refuse_too_big(
    result: SearchResult, config: Config, name: str, gpu: str, memory_of: MemoryOf, keep: Collection[str]
) -> None:
    """Refuse a search in which nothing fits, with the closest candidate, and how many GPUs would be enough.

    Raises:
      UsageError: always.
    """
    nearest, least = min(result.too_big, key=lambda pair: pair[1])
    enough = enough_devices(config, result.devices, memory_of, result.capacity, keep)
    advice = f"use --devices {enough}, where it fits" if enough else f"no number up to {LARGEST:,} is enough either"
    what = f"takes {least / GIB:.1f} GiB of {result.capacity / GIB:.1f}"
    if least <= result.capacity:
        what, advice = "needs more host memory than there is", "leave out --keep train.recompute"
    raise UsageError(
        f"none of {result.tried:,} ways to run {name} on {result.devices} × {gpu} fits: the smallest, "
        f"{describe(nearest)}, {what}; {advice}"
    )


def enough_devices(
    config: Config, devices: int, memory_of: MemoryOf, capacity: float, keep: Collection[str] = ()
) -> int | None:
    """Twice, four times … as many GPUs, on which a candidate leaves HEADROOM free; None if `LARGEST` are not enough.

    Only candidates with one sequence per micro-batch, full recomputation and one chunk are tried: those that need least
    memory.
    """
    thrifty = {"train.micro_batch": 1, "train.recompute": "full", "mesh.chunks": 1}
    fixed = {name: value for name, value in thrifty.items() if name not in keep}
    small, count = with_values(config, fixed), 2 * devices
    while count <= LARGEST:
        ways = candidates(small, count, {*keep, *fixed})
        if any(free_share(memory_of(way).total, capacity) >= HEADROOM for way in ways):
            return count
        count *= 2
    return None


# --- The report: the fastest candidates and what holds them back ------------------------------------------------------


def report(result: SearchResult, name: str, config: Config, gpu: Gpu, seconds: float) -> Section:
    """The section `search` of a plan.

    Args:
      result: with at least one candidate that fits.
      name, config: what was searched.
      gpu: each of the devices.
      seconds: duration of the search.
    """
    best, shown = result.ranked[0], result.ranked[:SHOWN]
    values = {
        "gpu": gpu.name,
        "devices_per_node": gpu.gpus_per_node,
        "network_bytes_per_second": gpu.network_bandwidth_per_node,
        "devices": result.devices,
        "global_batch": config.train.global_batch,
        "tokens": run_tokens(config),
        "usable_bytes": result.capacity,
        "tried": result.tried,
        "too_big": len(result.too_big),
        "tight": len(result.tight),
        "slower": result.slower,
        "seconds": seconds,
        "best": [_values(candidate) for candidate in shown],
    }
    days, hours = _cost(best)
    lines = [
        f"{result.tried:,} ways to run it: {len(result.too_big):,} are too big for {result.capacity / GIB:.1f} GiB or "
        f"the host, {len(result.tight):,} leave less than {HEADROOM:.0%} of it free, {len(result.roomy):,} fit, and "
        f"{result.slower:,} take {WITHIN - 1:.0%} longer or more ({seconds:.1f} s)",
        "",
        *_table(result, shown),
        "",
        f"{run_tokens(config):,} tokens in {config.train.steps:,} steps: {days:.3g} days, {hours:,.0f} GPU-hours; "
        f"the prediction: {good_to(best.time.error)}",
        *best.time.caveats,
    ]
    if not result.roomy:
        lines.append(
            f"warning: no way to run it leaves {HEADROOM:.0%} of the memory free, by which the prediction may be off; "
            f"the best leaves {result.free(best):.1%} and may not fit"
        )
    elif result.tight and result.tight[0].time.mean < best.time.mean:
        fast = result.tight[0]
        lines.append(
            f"not ranked, because it leaves {result.free(fast):.1%} of the memory free and the prediction may be off "
            f"by {HEADROOM:.0%}: {describe(fast.config)}, {fast.time.mean:.3g} s"
        )
    return Section(f"Search: {name} on {result.devices:,} × {gpu.name}", values, lines)


def _cost(candidate: Candidate) -> tuple[float, float]:
    """Days and GPU-hours of the whole run."""
    hours = candidate.time.mean * candidate.config.train.steps / 3600
    return hours / 24, hours * candidate.config.mesh.devices


# Columns that are left out where every row has this.
OPTIONAL = {"groups": 1, "expert": 1, "context": "1", "loss chunks": "-", "host GiB": "-"}


def _table(result: SearchResult, shown: list[Candidate]) -> list[str]:
    rows = [{"": number, **_cells(candidate, result)} for number, candidate in enumerate(shown, 1)]
    header = [name for name in rows[0] if any(row[name] != OPTIONAL.get(name) for row in rows)]
    return table(header, [[row[name] for name in header] for row in rows])


def _cells(candidate: Candidate, result: SearchResult) -> dict[str, Any]:
    config, memory, time = candidate
    mesh, train, free = config.mesh, config.train, result.free(candidate)
    days, hours = _cost(candidate)
    # The two slowest parts besides the matmuls, and the memory if too little of it is free.
    parts = sorted((-seconds, name) for name, seconds in time.parts.items() if seconds > 0 and name != "matmul")
    bottlenecks = [f"{name} {-seconds / time.total:.0%}" for seconds, name in parts[:2]]
    bottlenecks += [f"memory, {free:.1%} free"] * (free < HEADROOM)
    chunks = f" × {mesh.chunks}" if mesh.chunks > 1 else ""
    return {
        "pipe": mesh.pipe, "data": mesh.data, "groups": mesh.replica, "expert": mesh.expert,
        "context": f"{mesh.context} ({config.across})" if config.across else "1", "model": mesh.model,
        "schedule": f"{mesh.schedule}{chunks}" if mesh.pipe > 1 else "-", "micro-batch": train.micro_batch,
        "recompute": train.recompute, "seq. par.": "yes" if mesh.splits_tokens else "-", "ZeRO": mesh.zero or "-",
        "loss chunks": train.loss_chunks if train.loss_chunks > 1 else "-", "s/step": f"{time.mean:.3g}",
        "TFLOP/s": f"{time.model_tflops:.0f}", "MFU": "-" if time.mfu is None else f"{time.mfu:.1%}",
        "GiB": f"{memory.total / GIB:.1f}", "host GiB": f"{memory.host / GIB:.1f}" if memory.host else "-",
        "days": f"{days:.3g}", "GPU-hours": f"{hours:,.0f}", "held back by": ", ".join(bottlenecks),
    }  # fmt: skip


def _values(candidate: Candidate) -> dict[str, Any]:
    config, memory, time = candidate
    days, hours = _cost(candidate)
    return {
        **{name: value_of(config, name) for name in SEARCHED},
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


def run_longest(config: Config, name: str, devices: int, gpu: Gpu, calibration: Calibration | None) -> Section:
    """The section of a plan on the longest sequence, with layer inputs on the device and in host memory.

    Raises:
      UsageError: layers differ from each other, or nothing fits.
    """
    machine = gpu.gpus_per_node, *predictions(gpu, calibration), gpu.usable_bytes, gpu.host_bytes
    best = (longest(config, devices, recompute, *machine) for recompute in ("full", "offload"))
    values = [_length_values(candidate) for candidate in best if candidate is not None]
    if not values:
        raise UsageError(f"{name} does not fit on {devices} × {gpu.name} with any length; use --longest {2 * devices}")
    header = ("recomputation", "context", "model", "attention", "positions", "GiB", "tokens/s a GPU", "MFU")
    cells = [
        [
            row["recompute"], row["mesh"]["context"], row["mesh"]["model"], row["context_attention"] or "",
            f"{row['sequence']:,}", f"{row['bytes'] / GIB:.1f}", f"{row['tokens_per_second']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
        ]
        for row in values
    ]  # fmt: skip
    plan = {"gpu": gpu.name, "devices": devices, "found": values}
    return Section(f"Longest sequence on {devices:,} × {gpu.name}", plan, table(header, cells))


def _length_values(best: Candidate) -> dict[str, Any]:
    config, seconds = best.config, best.time.total
    return {
        "sequence": config.model.sequence,
        "mesh": axes.as_typed(config.mesh),
        "context_attention": config.across,
        "recompute": config.train.recompute,
        "bytes": best.memory.total,
        "seconds": seconds,
        "tokens_per_second": config.train.global_batch * config.model.sequence / seconds / config.mesh.devices,
        "mfu": best.time.mfu,
    }


# --- The largest model of a budget ------------------------------------------------------------------------------------


def run_budget(
    config: Config,
    name: str,
    base: Config,
    budget: Budget,
    calibration: Calibration,
    keep: tuple[str, ...],
    say: Callable[[str], None],
) -> tuple[Config, Section]:
    """The config of the largest model that the budget trains, and the plan section on it.

    Args:
      config: with the flags of the command line; valid except for its mesh.
      name: of the config, or of its file.
      base: without the flags, as `name` has it.
      budget: of GPUs and days; `calibration` has their rates.
      keep: as in `run_search`.
      say: told about each model that is tried.

    Raises:
      UsageError: no model can be split, or none is trained in time.
    """
    devices, rungs = budget.devices, ladder(config)
    possible = [rung for rung in rungs if is_possible(rung.config, devices, keep)]
    check_searchable((possible or rungs)[-1].config, devices, budget.gpu.gpus_per_node, keep)
    ways = in_known_ways(devices, budget.gpu, calibration, keep)
    best, tried = largest_model(possible, budget, ways, say)
    return best.config, budget_section(best, tried, name, base, budget)


def budget_section(best: Trial, tried: list[Trial], name: str, base: Config, budget: Budget) -> Section:
    """The section `budget` of a plan: the model, those tried beside it, and the command to train it.

    Args:
      best, tried: as returned by `largest_model`.
      name, base: the config that the models are sizes of.
      budget: of GPUs and days.
    """
    flags = (as_flag(field, new) for field, (_, new) in differences(base, best.best.config).items())
    command = f"mjax train --config {name} {' '.join(flags)} --data.path PREFIX"
    time, header = (
        best.best.time,
        ("parameters", "layers", "hidden", "tokens", "FLOPs", "mesh", "s/step", "MFU", "days"),
    )
    remarks = [f"* fits into {budget.days:g} days; the prediction: {good_to(time.error)}", *time.caveats]
    if best.config.model != base.model:
        remarks.append(f"batch and learning rate are those of {name}: a larger model usually takes a lower rate")
    if best is tried[-1]:
        remarks.append("it is the largest of the ladder, so the budget would train a larger one too")
    return Section(
        f"Budget: {budget.devices:,} × {budget.gpu.name} for {budget.days:g} days",
        {
            "devices": budget.devices,
            "days": budget.days,
            "tokens_per_parameter": budget.tokens_per_parameter,
            "best": _trial_values(best),
            "tried": [_trial_values(trial) for trial in tried],
            "command": command,
        },
        [
            f"the largest within the budget, at {budget.tokens_per_parameter:g} tokens a parameter:",
            "",
            *table(header, [_trial_row(trial, trial is best) for trial in tried]),
            "",
            *remarks,
            "to train it:",
            f"  {command}",
        ],
    )


def _trial_row(trial: Trial, is_best: bool) -> list[Any]:
    model, best = trial.config.model, trial.best
    row = [f"{trial.parameters:,}" + " *" * is_best, model.layers, model.hidden, in_units(trial.tokens)]
    ran = (
        ["", "", ""] if best is None else [describe_mesh(best.config), f"{best.time.mean:.3g}", f"{best.time.mfu:.1%}"]
    )
    return [*row, f"{trial.flops:.3g}", *(ran or ["", "", ""]), trial.duration.removesuffix(" days")]


def describe_mesh(config: Config) -> str:
    """The sizes above 1 of a mesh: 'data 32 × context 2'."""
    return " × ".join(f"{axis} {size}" for axis, size in axes.as_typed(config.mesh).items() if size > 1) or "data 1"


def _trial_values(trial: Trial) -> dict[str, Any]:
    best, model = trial.best, trial.config.model
    ran = best and {"seconds": best.time.mean, "mfu": best.time.mfu, "bytes": best.memory.total, "days": trial.days}
    return {
        "model": {"layers": model.layers, "hidden": model.hidden, "heads": model.heads},
        "parameters": trial.parameters,
        "tokens": trial.tokens,
        "steps": trial.config.train.steps,
        "flops": trial.flops,
        "days_at_peak": trial.days_at_peak,
        **(ran or dict.fromkeys(("seconds", "mfu", "bytes", "days"))),
    }


# --- Whether it fits --------------------------------------------------------------------------------------------------


ADA = (8, 9)
"""Compute capability of the first GPUs with float8 products; Hopper's is 9.0."""
MULTIPLE = 16
"""cuBLAS multiplies float8 matrices whose sizes are multiples of this."""


def check_float8(config: Config, gpu: str, capability: tuple[int, ...]) -> None:
    """Refuse float8 on a GPU without it, and sizes that its products do not take.

    Args:
      config: validated.
      gpu: its name, for the message.
      capability: its compute capability.

    Raises:
      UsageError: one sentence, with what to change.
    """
    if not in_float8(config.precision):
        return
    if capability < ADA:
        raise UsageError(
            f"--precision.compute fp8 needs a GPU with compute capability 8.9 or more, such as an H100, and {gpu} has "
            f"{'.'.join(map(str, capability))}; use --precision.compute bf16"
        )
    model, train = config.model, config.train
    tokens = train.micro_batch * model.sequences * model.sequence
    if tokens % MULTIPLE:
        raise UsageError(
            f"--precision.compute fp8 multiplies micro-batches of a multiple of {MULTIPLE} tokens, and --train.micro-"
            f"batch {train.micro_batch} has {tokens}; use a --train.micro-batch that is a multiple of {MULTIPLE}"
        )
    for _, of in kinds_of(config):
        for k, n in layer_forward(of).weights:
            if k % MULTIPLE or n % MULTIPLE:
                raise UsageError(
                    f"--precision.compute fp8 multiplies matrices whose sizes are multiples of {MULTIPLE}, and a rank "
                    f"of --mesh.model {config.mesh.model} has a weight of {k} × {n}; change the mesh "
                    "or the model, or use --precision.compute bf16"
                )


def check_gpu_at_hand(config: Config, name: str, force: bool, say: Callable[[str], None]) -> None:
    """Refuse what does not fit on the GPUs of this process, and warn if it barely fits, before compiling.

    On a CPU nothing is refused: its memory is shared with other processes and may be swapped. A wrong number of devices
    is refused elsewhere.

    Args:
      config: validated.
      name: name of the config in messages.
      force: only report and continue.
      say: called with that sentence, or the warning.

    Raises:
      UsageError: the config does not fit, or needs an attention kernel or float8 products that are not available.
    """
    import jax  # a plan does not need it

    from mjax.cluster.processes import place_on_host

    device = jax.local_devices()[0]
    usable = usable_memory(device)
    if usable is None or config.mesh.devices != jax.device_count():
        return
    check_float8(config, device.device_kind, capability_of(device))
    config = resolved_on_gpu(config, capability_of(device))
    try:
        host = host_memory() / (jax.local_device_count() * place_on_host()[1])
        if warning := check_memory(config, usable, device.device_kind, name, host):
            say(f"memory  {warning}")
    except UsageError as error:
        if not force:
            raise UsageError(f"{error}; --force tries it anyway") from None
        say(f"memory  {error}; continuing because of --force")


def check_memory(config: Config, usable: float, gpu: str, name: str = "this config", host: float | None = None) -> str:
    """Refuse what does not fit, with the numbers and changes that would fit.

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
    if not fits_host(memory, host):
        raise UsageError(
            f"{name} keeps {memory.host / GIB:.1f} GiB of activations in host memory for each GPU, and this machine "
            f"has {host / GIB:.1f} GiB for each; use --train.recompute full, or a smaller --train.micro-batch"
        )
    free = free_share(memory.total, usable)
    if free >= HEADROOM:
        return ""
    changes = changes_that_fit(config, usable, host=host)
    nearest = "; or ".join(f"{change.flags} ({change.needs(config)})" for change in changes)
    if free >= 0:
        advice = f"what leaves more, cheapest first: {nearest}" if changes else "no change of mesh leaves more"
        return (
            f"{name} is predicted to need {memory.total / GIB:.1f} of the {usable / GIB:.1f} GiB that are usable on "
            f"{gpu}, which leaves {free:.1%}; the prediction may be off by {HEADROOM:.0%}, so it may not fit; {advice}"
        )
    advice = f"what fits, cheapest first: {nearest}" if changes else "no change of mesh or recomputation makes it fit"
    largest_first = sorted(memory.parts.items(), key=lambda part: -part[1])
    kinds = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in largest_first if size / GIB >= 0.05)
    raise UsageError(
        f"{name} needs {memory.total / GIB:.1f} GiB on each GPU ({kinds}) and {usable / GIB:.1f} GiB of {gpu} are "
        f"usable; {advice}"
    )


# --- The memory section of a plan, and its picture --------------------------------------------------------------------


WHEN = {
    "head": "with the logits of a micro-batch",
    "backward": "in the backward pass of the layers",
    "reduction": "when gradients are summed over data",
    "update": "when Muon orthogonalises matrices",
}


def memory_section(config: Config, gpu: Gpu | None = None, figure: Path | None = None, name: str = "") -> Section:
    """The section of a plan.

    Args:
      gpu: the GPU it has to fit into.
      figure: output file of the plot.
    """
    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    memory = predict_memory(config)
    values: dict[str, Any] = {
        "total": memory.total,
        **memory.parts,
        "host": memory.host,
        "moment": memory.moment,
        "attention": config.model.attention,
        "unrolled": is_unrolled(config, on_gpu=True),
        "float8": in_float8(config.precision),
        "loss_chunks": config.train.loss_chunks,
        "figure": None if figure is None else str(figure),
    }
    rows = {kind: f"{size / GIB:8.2f} GiB" for kind, size in memory.parts.items()}
    rows["total"] = f"{memory.total / GIB:8.2f} GiB on each device, {WHEN[memory.moment]}"
    if memory.host:
        rows["host memory"] = f"{memory.host / GIB:8.2f} GiB for each device: the inputs of all layers"
    rows["attention"], lines = f"by {values['attention']}", []
    if gpu is not None:
        rows["layers"] = layers_in_words(values["unrolled"])
        free, in_host = free_share(memory.total, gpu.usable_bytes), fits_host(memory, gpu.host_bytes)
        changes = [] if free >= HEADROOM else changes_that_fit(config, gpu.usable_bytes, host=gpu.host_bytes)
        values |= {"gpu": gpu.name, "usable": gpu.usable_bytes, "fits": free >= 0 and in_host, "free": free}
        values["changes"] = [
            {"flags": change.flags, "total": change.memory.total, "devices": change.config.mesh.devices}
            for change in changes
        ]
        verdict = "it fits" if free >= HEADROOM else "it may not fit" if free >= 0 else "it does not fit"
        rows["verdict"] = f"{verdict} into the {gpu.usable_bytes / GIB:.1f} GiB that are usable on {gpu.name}"
        if 0 <= free < HEADROOM:
            rows["verdict"] += f": {free:.1%} are left free, and the prediction may be off by {HEADROOM:.0%}"
        if not in_host:
            each = gpu.host_bytes / GIB
            rows["verdict"] += f", but not into the {each:.1f} GiB of host memory; use --train.recompute full"
        if free < HEADROOM:
            lines = [f"what fits and leaves {HEADROOM:.0%}, cheapest first:" if changes else "no change of mesh fits"]
            lines += [f"  {change.flags}  →  {change.needs(config)}" for change in changes]
    if figure is not None:
        draw_modes(config, figure, gpu, name)
        rows["picture"] = str(figure)
    return Section("Memory", values, [*named_rows(rows), *lines])


def draw_modes(config: Config, file: Path | BinaryIO, gpu: Gpu | None = None, name: str = "") -> None:
    """Draw the memory of a validated config and of the same with each recomputation mode; `name` is for the title."""
    from mjax.pictures.plan import draw_memory  # matplotlib takes a second to import

    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    modes = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in RECOMPUTE:
            changed = with_values(config, {"mesh.sequence_parallel": split, "train.recompute": recompute})
            if can_run_layers(changed):
                modes[recompute + ", sequence parallel" * split] = predict_memory(changed).parts
    heading = f"Memory of a device by recomputation mode{', for ' * bool(name)}{name}"
    micro_batch, attention = config.train.micro_batch, config.model.attention
    about = f"{in_words(config.mesh, PIPE)}, micro-batches of {micro_batch}, attention by {attention}"
    draw_memory(modes, file, heading, about, gpu, HEADROOM)
