"""The memory section of `mjax plan`: bytes by kind, and with --gpu a verdict and changes that would make it fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from mjax.cluster.hardware import GIB, Gpu
from mjax.config import Config
from mjax.config.checks import can_run_layers
from mjax.models.build import is_unrolled, repeats_in_stack
from mjax.models.kernels import HOPPER, resolved_on_gpu
from mjax.parallel.axes import PIPE, in_words
from mjax.planner.fit import changes_that_fit
from mjax.planner.memory import HEADROOM, Memory, fits_host, free_share, predict_memory
from mjax.planner.section import Section, layers_in_words, named_rows
from mjax.step.precision import in_float8

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
    rows["attention"] = f"by {values['attention']}"
    if values["float8"]:
        rows["products"] = "with the layers' weights in float8: e4m3, gradients e5m2; all others in bf16"
    if values["loss_chunks"] > 1:
        chunks, here = config.train.loss_chunks, config.model.padded_vocabulary // config.mesh.model
        each = f"{-(-here // chunks):,} logits of a token at a time"
        rows["loss"] = f"in {chunks} chunks of the vocabulary, {each}, computed twice"
    lines = []
    if gpu is not None:
        rows["layers"] = layers_in_words(values["unrolled"])
        if values["unrolled"] and config.mesh.context > 1 and config.train.recompute != "none":
            rows["layers"] += " (over context XLA then recomputed many at once: llama3_8b_128k took 64 GiB, not 34)"
        if not values["unrolled"] and repeats_in_stack(config.model):
            rows["layers"] += (
                " (a pattern of windows then took more: 16 layers of qwen3_8b on 8 GPUs 14.7 GiB, not 9.3)"
            )
        free = free_share(memory.total, gpu.usable_bytes)
        changes = [] if free >= HEADROOM else changes_that_fit(config, gpu.usable_bytes, host=gpu.host_bytes)
        if memory.host:
            values |= _of_server(config, memory, gpu)
            rows["host memory"] += f"; {_server_in_words(values)}"
        values |= {
            "gpu": gpu.name,
            "usable": gpu.usable_bytes,
            "fits": free >= 0 and fits_host(memory, gpu.host_bytes),
            "free": free,
            "changes": [
                {"flags": change.flags, "total": change.memory.total, "devices": change.config.mesh.devices}
                for change in changes
            ],
        }
        verdict = "it fits" if free >= HEADROOM else "it may not fit" if free >= 0 else "it does not fit"
        rows["verdict"] = f"{verdict} into the {gpu.usable_bytes / GIB:.1f} GiB that are usable on {gpu.name}"
        if not fits_host(memory, gpu.host_bytes):
            share = f"{gpu.host_bytes / GIB:,.0f} GiB of host memory that a server has for each GPU"
            rows["verdict"] += f", but not into the {share}: use --train.recompute full, or a smaller micro-batch"
        if 0 <= free < HEADROOM:
            rows["verdict"] += f": {free:.1%} are left free, and the prediction may be off by {HEADROOM:.0%}"
        lines = [f"{change.flags}  →  {change.needs(config)}" for change in changes]
        if lines:
            lines = [f"what fits and leaves {HEADROOM:.0%}, cheapest first:", *(f"  {line}" for line in lines)]
        elif free < HEADROOM:
            lines = [f"no change of mesh or recomputation makes it fit and leaves {HEADROOM:.0%}"]
    if figure is not None:
        draw_modes(config, figure, gpu, name)
        rows["picture"] = str(figure)
    return Section("Memory", values, [*named_rows(rows), *lines])


def _of_server(config: Config, memory: Memory, gpu: Gpu) -> dict[str, float | None]:
    """Bytes of host memory in a server: what all of its devices need, and what it has, None if that is not known."""
    devices = min(gpu.gpus_per_node, config.mesh.devices)
    return {"host_of_server": devices * memory.host, "host_memory": gpu.host_memory_per_node}


def _server_in_words(values: dict[str, Any]) -> str:
    needed, there = values["host_of_server"], values["host_memory"]
    if there is None:
        return f"{needed / GIB:,.1f} GiB in a server, whose memory is not known"
    words = f"{needed / GIB:,.1f} of the {there / GIB:,.0f} GiB of a server"
    return words if needed <= there else f"{words}, which is too much: use --train.recompute full"


def draw_modes(config: Config, file: Path | BinaryIO, gpu: Gpu | None = None, name: str = "") -> None:
    """Draw the memory of a validated config and of the same with each recomputation mode; `name` is for the title."""
    from mjax.pictures.memory import draw_memory  # matplotlib takes a second to import

    config = resolved_on_gpu(config, HOPPER if gpu is None else gpu.compute_capability)
    modes = {mode: memory.parts for mode, memory in variants(config).items()}
    heading = f"Memory of a device by recomputation mode{', for ' * bool(name)}{name}"
    micro_batch, attention = config.train.micro_batch, config.model.attention
    about = f"{in_words(config.mesh, PIPE)}, micro-batches of {micro_batch}, attention by {attention}"
    draw_memory(modes, file, heading, about, gpu, HEADROOM)


def variants(config: Config) -> dict[str, Memory]:
    """The memory in each recomputation mode that is possible, with and without sequence parallelism if `model` is above
    1."""
    found = {}
    for split in (False, True) if config.mesh.model > 1 else (False,):
        for recompute in ("none", "selective", "full", "offload"):
            train = replace(config.train, recompute=recompute)
            changed = replace(config, mesh=replace(config.mesh, sequence_parallel=split), train=train)
            if not can_run_layers(changed):
                continue
            found[f"{recompute}, sequence parallel" if split else recompute] = predict_memory(changed)
    return found
